//! One reinforcement-learning update over a batch of scored trees.
//!
//! Per term (a generated token of one rollout), with `lp` the present log-probability, `old` the
//! one under the weights that the update started from (recomputed by us) and `rollout` the
//! engine's:
//!
//! `loss = weight · min(exp(old − rollout), cap) · clipped(exp(lp − old), advantage)`
//!
//! The weight comes from the aggregation, the correction is detached. All log-probabilities are
//! those of the distribution that was sampled from: logits divided by the rollouts' temperature.
//! Filters (top-p, top-k) renormalise the engine's distribution but not ours, so training recipes
//! leave them off.

use model::forest;
use objective::{Aggregation, Clip, clipped_token, token_weights, truncated_weight};
use serde::{Deserialize, Serialize};
use tree::{Forest, Target, TrainTree};

use crate::{LearnError, batch::Batch};

/// Settings of the update.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrpoSettings {
    /// Bounds of the ratio.
    pub clip: Clip,
    /// Importance weights between engine and learner are cut at this (c̄).
    pub importance_max: f32,
    /// From tokens to one loss.
    pub aggregation: Aggregation,
    /// Optimiser steps per batch: rollouts are dealt out to this many mini-batches.
    pub minibatches: usize,
    /// Times the batch is gone through.
    pub passes: usize,
}

impl Default for GrpoSettings {
    fn default() -> Self {
        Self {
            clip: Clip::default(),
            importance_max: 2.0,
            aggregation: Aggregation::TokenMean,
            minibatches: 1,
            passes: 1,
        }
    }
}

/// A rollout's kept tree and its advantage.
#[derive(Debug, Clone)]
pub struct ScoredTree {
    /// What to train on.
    pub tree: TrainTree,
    /// The same for every token of the rollout.
    pub advantage: f64,
}

/// What an update found, as means over terms unless said otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct UpdateMetrics {
    /// The aggregated loss.
    pub loss: f64,
    /// Entropy of the policy at the trained tokens, in nats.
    pub entropy: f64,
    /// rollout − old: divergence between engine and learner; near 0 when they agree.
    pub rollout_kl: f64,
    /// Largest |rollout − old|.
    pub rollout_gap_max: f64,
    /// old − lp.
    pub step_kl: f64,
    /// Part of terms held by a clip bound.
    pub clipped: f64,
    /// Part of terms whose importance weight was cut.
    pub truncated: f64,
    /// Norm of the gradient before clipping, the largest over optimiser steps.
    pub gradient_norm: f64,
    /// Terms trained (tokens, counted once per rollout and pass).
    pub terms: u64,
    /// Tokens of the trees as if each branch were a row of its own.
    pub tokens_logical: u64,
    /// Tokens computed.
    pub tokens_unique: u64,
    /// Optimiser steps.
    pub optimiser_steps: u64,
}

/// How the forest is computed, and by what logits are divided.
pub type Compute = forest::Settings;

/// One pass over some trees: gradient and metrics. `old` holds the log-probabilities by node and
/// target; without it the present ones are taken, which is the same when no step was made since.
fn pass(
    weights: &model::Weights,
    batch: &Batch,
    advantages: &[f64],
    token_weights: &[f64],
    old: Option<&[Vec<f32>]>,
    settings: &GrpoSettings,
    compute: Compute,
) -> Result<(Vec<f32>, UpdateMetrics), LearnError> {
    let term_loss = |node: usize, target: usize, logprob: f32, visit: &mut dyn FnMut(TermLoss)| {
        let old = old.map_or(logprob, |old| old[node][target]);
        for term in batch.terms(node, target) {
            let Target::Sampled {
                logprob_sampled, ..
            } = term.target
            else {
                continue;
            };
            let tree = term.tree as usize;
            let token = clipped_token(logprob, old, advantages[tree] as f32, &settings.clip);
            let correction = truncated_weight(old, logprob_sampled, settings.importance_max);
            let scale = token_weights[tree] * f64::from(correction);
            visit(TermLoss {
                loss: scale * f64::from(token.loss),
                gradient: scale * f64::from(token.gradient),
                clipped: token.clipped,
                truncated: correction >= settings.importance_max,
                gap: f64::from(logprob_sampled - old),
                moved: f64::from(old - logprob),
            });
        }
    };
    let loss = |node: usize, target: usize, logprob: f32| {
        let mut gradient = 0.0;
        term_loss(node, target, logprob, &mut |term| gradient += term.gradient);
        gradient as f32
    };
    let segments = batch.segments();
    let outcome = forest::run(weights, &segments, Some(&loss), compute)?;
    let mut metrics = UpdateMetrics::default();
    for (node, logprobs) in outcome.logprobs.iter().enumerate() {
        for (target, logprob) in logprobs.iter().enumerate() {
            let entropy = f64::from(outcome.entropies[node][target]);
            term_loss(node, target, *logprob, &mut |term| {
                metrics.terms += 1;
                metrics.loss += term.loss;
                metrics.entropy += entropy;
                metrics.rollout_kl += term.gap;
                metrics.rollout_gap_max = metrics.rollout_gap_max.max(term.gap.abs());
                metrics.step_kl += term.moved;
                metrics.clipped += f64::from(u8::from(term.clipped));
                metrics.truncated += f64::from(u8::from(term.truncated));
            });
        }
    }
    let stats = batch.forest.stats();
    metrics.tokens_logical = stats.tokens_logical;
    metrics.tokens_unique = stats.tokens_unique;
    Ok((outcome.gradient, metrics))
}

struct TermLoss {
    loss: f64,
    gradient: f64,
    clipped: bool,
    truncated: bool,
    gap: f64,
    moved: f64,
}

/// Goes through the batch and makes optimiser steps; `step` applies a gradient and returns its
/// norm. Trees without trainable tokens take part in nothing.
///
/// # Errors
/// [`LearnError::Batch`] when a target was not sampled (I4) or there is nothing to train;
/// whatever `step` returns.
pub fn update(
    weights: &mut model::Weights,
    trees: &[ScoredTree],
    settings: &GrpoSettings,
    compute: Compute,
    mut step: impl FnMut(&mut model::Weights, &[f32]) -> Result<f64, LearnError>,
) -> Result<UpdateMetrics, LearnError> {
    let minibatches = settings.minibatches.clamp(1, trees.len().max(1));
    let mut parts: Vec<Part> = Vec::new();
    for part in 0..minibatches {
        // Dealt out like cards, so that every part sees every group.
        let own: Vec<&ScoredTree> = trees.iter().skip(part).step_by(minibatches).collect();
        parts.push(Part::new(&own, settings)?);
    }
    let several_steps = minibatches * settings.passes.max(1) > 1;
    if several_steps {
        for part in &mut parts {
            let segments = part.batch.segments();
            part.old = Some(forest::run(weights, &segments, None, compute)?.logprobs);
        }
    }
    let mut total = UpdateMetrics::default();
    for _ in 0..settings.passes.max(1) {
        for part in &parts {
            let (gradient, found) = pass(
                weights,
                &part.batch,
                &part.advantages,
                &part.token_weights,
                part.old.as_deref(),
                settings,
                compute,
            )?;
            let norm = step(weights, &gradient)?;
            total.loss += found.loss;
            total.entropy += found.entropy;
            total.rollout_kl += found.rollout_kl;
            total.rollout_gap_max = total.rollout_gap_max.max(found.rollout_gap_max);
            total.step_kl += found.step_kl;
            total.clipped += found.clipped;
            total.truncated += found.truncated;
            total.gradient_norm = total.gradient_norm.max(norm);
            total.terms += found.terms;
            total.tokens_logical += found.tokens_logical;
            total.tokens_unique += found.tokens_unique;
            total.optimiser_steps += 1;
        }
    }
    let terms = total.terms.max(1) as f64;
    total.loss /= total.optimiser_steps.max(1) as f64;
    for mean in [
        &mut total.entropy,
        &mut total.rollout_kl,
        &mut total.step_kl,
        &mut total.clipped,
        &mut total.truncated,
    ] {
        *mean /= terms;
    }
    Ok(total)
}

struct Part {
    batch: Batch,
    advantages: Vec<f64>,
    token_weights: Vec<f64>,
    old: Option<Vec<Vec<f32>>>,
}

impl Part {
    fn new(trees: &[&ScoredTree], settings: &GrpoSettings) -> Result<Self, LearnError> {
        let plain: Vec<TrainTree> = trees.iter().map(|scored| scored.tree.clone()).collect();
        let forest = Forest::merge(&plain);
        let terms = || forest.nodes.iter().flat_map(|node| &node.terms);
        if terms().any(|term| term.target == Target::Supervised) {
            let reason =
                "a target without a recorded log-probability cannot enter a policy loss (I4)";
            return Err(LearnError::Batch(reason.into()));
        }
        if terms().next().is_none() {
            return Err(LearnError::Batch(
                "there is no trainable token in the batch".into(),
            ));
        }
        let token_weights = token_weights(&forest.terms_per_tree(), settings.aggregation);
        let advantages = trees.iter().map(|scored| scored.advantage).collect();
        Ok(Self {
            batch: Batch::new(forest),
            advantages,
            token_weights,
            old: None,
        })
    }
}
