//! From trees to new weights.
//!
//! | module | owns |
//! |---|---|
//! | [`batch`] | a batch of trees as one forest, and the tables that find a target's terms |
//! | [`settings`] | losses, correction, KL, stop rules, PPO: every choice by name |
//! | [`grpo`] | one reinforcement-learning update with group advantages |
//! | [`ppo`] | the same with a value head: GAE on trees, critic on the shared trunk or its own |
//! | `update` | what both do: correction, policy loss, aggregation, one pass over the forest |
//! | [`metrics`] | what is measured at every update |
//! | [`sft`] | supervised training on captured rollouts: the cold start |
//! | [`filter`] | which captured rollouts supervised training learns from |
//! | [`schedule`] | learning rate by step |
//! | [`checkpoint`] | weights, optimiser and counters in a folder, whole or not at all; last and best kept |
//! | [`keep`] | which checkpoints stay: the last few and the best |
//! | [`embedded`] | the learner in this process: policy, optimiser, version |
//!
//! Invariants:
//! - **I3**: a term of the forest is one generated token of one rollout. Every term is asked for
//!   its gradient exactly once per pass, so no token is trained twice, however the tree forks.
//! - **I4**: only [`tree::Target::Sampled`] terms enter a reinforcement-learning loss; a batch
//!   with any other target is refused.
//! - What is not finite, a log-probability, an advantage, a loss, stops the step with the rollout
//!   named; weights and optimiser are as before the update.
//! - The same batch, weights and thread count give the same bits.

pub mod batch;
pub mod checkpoint;
pub mod embedded;
pub mod filter;
pub mod grpo;
pub mod keep;
pub mod metrics;
mod part;
mod pass;
pub mod ppo;
pub mod schedule;
pub mod settings;
pub mod sft;
mod terms;
mod update;

pub use embedded::Embedded;
pub use schedule::Schedule;

/// Why training could not go on.
#[derive(Debug, thiserror::Error)]
pub enum LearnError {
    /// Trees that cannot be trained. A defect of whoever built them.
    #[error("learner: {0}")]
    Batch(String),
    /// The forest was malformed.
    #[error(transparent)]
    Forest(#[from] model::forest::ForestError),
    /// Loss or gradient is not finite; weights are unchanged.
    #[error(
        "learner: the gradient's norm is {norm} at step {step}; weights are unchanged. Lower the learning rate, or look for a rollout with broken log-probabilities"
    )]
    NotFinite {
        /// Optimiser step.
        step: u64,
        /// What was found.
        norm: f64,
    },
    /// A number that makes no sense, and whose it is; weights are unchanged.
    #[error(
        "learner: rollout {rollout} of the batch: {what} is {value}, expected a finite number; weights are unchanged. Leave the rollout out and look at its record"
    )]
    Sample {
        /// Index in the batch that was handed over.
        rollout: usize,
        /// Which number.
        what: &'static str,
        /// What was found.
        value: f64,
    },
    /// A stop rule of the recipe; weights are unchanged.
    #[error(
        "learner: stop rule {rule}: found {found}, the limit is {limit}; weights are as before the update. {advice}"
    )]
    Stopped {
        /// Its key below `stop`.
        rule: &'static str,
        /// What was measured.
        found: f64,
        /// The setting.
        limit: f64,
        /// What to look at.
        advice: &'static str,
    },
    /// Weights could not be read or written.
    #[error(transparent)]
    Model(#[from] model::ModelError),
    /// A checkpoint could not be read or written.
    #[error("learner: checkpoint {path}: {reason}")]
    Checkpoint {
        /// The folder or file.
        path: std::path::PathBuf,
        /// Expected and found, or the system's reason.
        reason: String,
    },
}
