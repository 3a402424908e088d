//! Supervised training on captured rollouts: the policy's cold start.
//!
//! Loss of a step: mean negative log-probability of the generated tokens, plus `context_weight`
//! times that of the other tokens. Context is weighed once per computed token: a system prompt
//! that all rollouts of a batch share counts once, not once per rollout.

use model::{adamw::AdamW, forest};
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tree::{Forest, TrainTree};

use crate::{LearnError, Schedule};

/// Settings of supervised training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SftSettings {
    /// Optimiser steps.
    pub steps: u64,
    /// Rollouts per step.
    pub rollouts_per_step: usize,
    /// Learning rate.
    pub rate: Schedule,
    /// Steps over which the rate decays; 0 means `steps`. A larger number ends training while the
    /// rate is still high, for a policy that reinforcement learning has something to teach.
    pub rate_steps: u64,
    /// Weight of tokens that were not generated.
    pub context_weight: f32,
    /// A checkpoint every so many steps, besides the one at the end; 0 means only that one.
    pub checkpoint_every: u64,
}

impl Default for SftSettings {
    fn default() -> Self {
        Self {
            steps: 500,
            rollouts_per_step: 32,
            rate: Schedule::default(),
            rate_steps: 0,
            context_weight: 0.1,
            checkpoint_every: 0,
        }
    }
}

/// What a step found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SftMetrics {
    /// The step, from 0.
    pub step: u64,
    /// Mean negative log-probability of generated tokens.
    pub loss: f64,
    /// The same of the others.
    pub context_loss: f64,
    /// Norm of the gradient before clipping.
    pub gradient_norm: f64,
    /// Learning rate.
    pub rate: f64,
    /// Tokens computed.
    pub tokens_unique: u64,
    /// Tokens of the rollouts one by one.
    pub tokens_logical: u64,
}

/// The order of rollouts: reshuffled every time all were seen, a pure function of seed and step,
/// so that a resumed training goes on with the same batches.
#[must_use]
pub fn batch_indexes(len: usize, per_step: usize, seed: u64, step: u64) -> Vec<usize> {
    let mut order: Vec<usize> = Vec::new();
    let mut epoch = u64::MAX;
    (0..per_step as u64)
        .map(|i| {
            let at = step * per_step as u64 + i;
            if at / len as u64 != epoch {
                epoch = at / len as u64;
                order = (0..len).collect();
                let mut rng =
                    ChaCha8Rng::seed_from_u64(seed ^ epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                order.shuffle(&mut rng);
            }
            order[(at % len as u64) as usize]
        })
        .collect()
}

/// One step over some rollouts.
///
/// # Errors
/// [`LearnError::Batch`] when nothing was generated, [`LearnError::NotFinite`].
pub fn step(
    weights: &mut model::Weights,
    optimiser: &mut AdamW,
    trees: &[TrainTree],
    rate: f32,
    context_weight: f32,
    compute: forest::Settings,
) -> Result<SftMetrics, LearnError> {
    let step = optimiser.steps;
    let apply = |weights: &mut model::Weights, gradient: &[f32]| {
        let norm = optimiser.step(weights, gradient, rate);
        if norm.is_finite() {
            Ok(norm)
        } else {
            Err(LearnError::NotFinite { step, norm })
        }
    };
    let mut metrics = step_with(weights, trees, context_weight, compute, apply)?;
    (metrics.step, metrics.rate) = (step, f64::from(rate));
    Ok(metrics)
}

/// The same with a step of the caller's, which returns the norm of the gradient; leaves `step` and
/// `rate` of the metrics at 0.
///
/// # Errors
/// [`LearnError::Batch`] when nothing was generated; whatever `apply` returns.
pub fn step_with(
    weights: &mut model::Weights,
    trees: &[TrainTree],
    context_weight: f32,
    compute: forest::Settings,
    apply: impl FnOnce(&mut model::Weights, &[f32]) -> Result<f64, LearnError>,
) -> Result<SftMetrics, LearnError> {
    let forest = Forest::merge(trees);
    // Per node: terms at each offset.
    let counts: Vec<Vec<u32>> = forest
        .nodes
        .iter()
        .map(|node| {
            let mut counts = vec![0; node.tokens.len()];
            for term in &node.terms {
                counts[term.offset as usize] += 1;
            }
            counts
        })
        .collect();
    let generated: u64 = counts.iter().flatten().map(|count| u64::from(*count)).sum();
    if generated == 0 {
        return Err(LearnError::Batch(
            "there is no generated token in the batch".into(),
        ));
    }
    let targets: Vec<Vec<u32>> = forest
        .nodes
        .iter()
        .zip(&counts)
        .map(|(node, counts)| {
            (0..node.tokens.len() as u32)
                .filter(|offset| node.parent.is_some() || *offset > 0)
                .filter(|offset| counts[*offset as usize] > 0 || context_weight > 0.0)
                .collect()
        })
        .collect();
    let segments: Vec<forest::Segment<'_>> = forest
        .nodes
        .iter()
        .zip(&targets)
        .map(|(node, targets)| forest::Segment {
            parent: node.parent.map(|parent| parent as usize),
            tokens: &node.tokens,
            targets,
        })
        .collect();
    let scale = 1.0 / generated as f32;
    let loss = |node: usize, target: usize, _: f32| {
        let count = counts[node][targets[node][target] as usize];
        -scale
            * if count > 0 {
                count as f32
            } else {
                context_weight
            }
    };
    let outcome = forest::run(weights, &segments, Some(&loss), compute)?;
    let mut metrics = SftMetrics::default();
    let mut context = 0_u64;
    for (node, logprobs) in outcome.logprobs.iter().enumerate() {
        for (target, logprob) in logprobs.iter().enumerate() {
            let count = counts[node][targets[node][target] as usize];
            if count > 0 {
                metrics.loss -= f64::from(count) * f64::from(*logprob);
            } else {
                metrics.context_loss -= f64::from(*logprob);
                context += 1;
            }
        }
    }
    metrics.loss /= generated as f64;
    metrics.context_loss /= context.max(1) as f64;
    let stats = forest.stats();
    metrics.tokens_unique = stats.tokens_unique;
    metrics.tokens_logical = stats.tokens_logical;
    metrics.gradient_norm = apply(weights, &outcome.gradient)?;
    Ok(metrics)
}
