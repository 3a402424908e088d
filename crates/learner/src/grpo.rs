//! One reinforcement-learning update over a batch of scored trees.
//!
//! Per term (a generated token of one rollout), with `lp` the present log-probability, `old` the
//! one under the weights that the update started from (recomputed by us) and `rollout` the
//! engine's:
//!
//! `loss = weight · (min(exp(old − rollout), cap) · clipped(exp(lp − old), advantage)
//!         + kl.weight · KL(lp, reference) − entropy_weight · entropy)`
//!
//! The weight comes from the aggregation, the correction is detached. Sequence-wise ratios (GSPO,
//! `correction.over`) are taken over all trained tokens of a *rollout*, each once: how many calls
//! or branches hold them does not matter (I3). All log-probabilities are those of the distribution
//! that was sampled from: logits divided by the rollouts' temperature. Filters (top-p, top-k)
//! renormalise the engine's distribution but not ours, so training recipes leave them off.

use model::forest;
use record::PolicyVersion;
use tree::TrainTree;

use crate::{
    LearnError,
    update::{Plan, Steps, go},
};

pub use crate::{metrics::UpdateMetrics, settings::GrpoSettings};

/// A rollout's kept tree and its advantage.
#[derive(Debug, Clone)]
pub struct ScoredTree {
    /// What to train on.
    pub tree: TrainTree,
    /// The same for every token of the rollout.
    pub advantage: f64,
}

/// How the forest is computed, and by what logits are divided.
pub type Compute = forest::Settings;

/// What an update may look at beside the batch.
#[derive(Debug, Clone, Copy, Default)]
pub struct Beside<'a> {
    /// The reference policy, needed when `kl.weight` is not 0.
    pub reference: Option<&'a model::Weights>,
    /// Version of the weights that are trained, for staleness.
    pub version: Option<PolicyVersion>,
}

/// Goes through the batch and makes optimiser steps; `step` applies a gradient and returns its
/// norm. Trees without trainable tokens take part in nothing.
///
/// # Errors
/// [`LearnError::Batch`] when a target was not sampled (I4), there is nothing to train, or the
/// settings ask for a reference that is not there; [`LearnError::Sample`] and
/// [`LearnError::Stopped`] before the step that would have been made; whatever `step` returns.
pub fn update(
    weights: &mut model::Weights,
    trees: &[ScoredTree],
    settings: &GrpoSettings,
    compute: Compute,
    beside: Beside<'_>,
    mut step: impl FnMut(&mut model::Weights, &[f32]) -> Result<f64, LearnError>,
) -> Result<UpdateMetrics, LearnError> {
    let scored: Vec<(&TrainTree, f64)> = trees
        .iter()
        .map(|scored| (&scored.tree, scored.advantage))
        .collect();
    let plan = Plan {
        settings,
        compute,
        beside,
        ppo: None,
    };
    go(
        weights,
        &scored,
        &plan,
        None,
        &mut Steps {
            policy: &mut step,
            critic: &mut |_, _, _| Ok(0.0),
        },
    )
}
