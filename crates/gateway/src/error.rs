//! Why the gateway itself cannot do something. What harnesses see is in [`crate::refusal`].

use record::RolloutId;

/// An error of the gateway towards its owner.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// A listener could not be bound.
    #[error(
        "cannot listen on {address}: {reason}; stop the process that holds it, or choose another address"
    )]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        reason: String,
    },
    /// A setting cannot work.
    #[error("gateway setting `{key}`: expected {expected}")]
    Config {
        /// Which.
        key: &'static str,
        /// What it must be.
        expected: &'static str,
    },
    /// Tokenizer and model do not belong together.
    #[error(
        "the tokenizer has {codec} ids but the engine only {engine}: they belong to different models"
    )]
    Vocabulary {
        /// Ids of the tokenizer.
        codec: u32,
        /// Ids of the engine.
        engine: u32,
    },
    /// A rollout with this id is open.
    #[error("rollout {0} is open already: close it first, or use another id")]
    RolloutOpen(RolloutId),
    /// Too many rollouts are open.
    #[error(
        "{open} rollouts are open, which is the limit (`rollouts_max`): close some, or raise it"
    )]
    TooManyRollouts {
        /// How many.
        open: usize,
    },
    /// A key cannot be used.
    #[error("rollout key: expected 8 to 128 letters, digits, `-` or `_` that no other rollout has")]
    Key,
    /// No such rollout.
    #[error("rollout {0} is not open here")]
    UnknownRollout(RolloutId),
    /// The engine did not take new weights, and goes on with those that it had.
    #[error("new weights: {0}; the engine goes on with those that it had")]
    Weights(engine::EngineError),
    /// The ledger could not note a rollout.
    #[error(transparent)]
    Ledger(#[from] ledger::LedgerError),
    /// The system gave no random bytes.
    #[error("no random bytes for a key: {0}")]
    Random(String),
}
