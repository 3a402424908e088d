//! From trees to new weights.
//!
//! | module | owns |
//! |---|---|
//! | [`batch`] | a batch of trees as one forest, and the tables that find a target's terms |
//! | [`grpo`] | one reinforcement-learning update: correction, clipped loss, aggregation |
//! | [`sft`] | supervised training on captured rollouts: the cold start |
//! | [`schedule`] | learning rate by step |
//! | [`checkpoint`] | weights, optimiser and counters in a folder, whole or not at all |
//! | [`embedded`] | the learner in this process: policy, optimiser, version |
//!
//! Invariants:
//! - **I3**: a term of the forest is one generated token of one rollout. Every term is asked for
//!   its gradient exactly once per pass, so no token is trained twice, however the tree forks.
//! - **I4**: only [`tree::Target::Sampled`] terms enter a reinforcement-learning loss; a batch
//!   with any other target is refused.
//! - The same batch, weights and thread count give the same bits.

pub mod batch;
pub mod checkpoint;
pub mod embedded;
pub mod grpo;
pub mod schedule;
pub mod sft;

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
