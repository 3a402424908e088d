//! What can be wrong with the calls of a rollout.

/// Why no tree was built. None of these is retryable: the record is wrong or too large, so the
/// rollout is discarded (its reward must not be used without its tokens).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// Two calls have the same arrival number.
    #[error(
        "tree: call {index} occurs twice in the rollout; the ledger must hold each arrival number once"
    )]
    DuplicateCall {
        /// The number.
        index: u32,
    },
    /// The calls belong to more than one rollout.
    #[error(
        "tree: expected calls of one rollout, found {first} and {other}; build one tree per rollout"
    )]
    MixedRollouts {
        /// Rollout of the first call.
        first: String,
        /// The other rollout.
        other: String,
    },
    /// A call's log-probabilities do not fit its tokens (I4).
    #[error(
        "tree: call {call}: {found}; the engine must give one log-probability per token or none"
    )]
    Generation {
        /// Its arrival number.
        call: u32,
        /// What was found.
        found: String,
    },
    /// A call's media spans do not fit its prompt.
    #[error(
        "tree: call {call}: media spans: found {found}; expected spans in order, side by side at most, inside the prompt"
    )]
    Media {
        /// Its arrival number.
        call: u32,
        /// What was found.
        found: String,
    },
    /// The learner in this process reads text only.
    #[error(
        "train tree: node {index} holds {spans} images or other media, which the embedded learner cannot compute; leave the rollout out, or linearise it for a trainer that can"
    )]
    MediaTrained {
        /// The node.
        index: usize,
        /// Spans in it.
        spans: usize,
    },
    /// The tree would be larger than the limit (I10).
    #[error(
        "tree: {calls} calls need more than nodes_max = {nodes_max} nodes; the harness does not replay its history verbatim (see fork causes), or raise nodes_max"
    )]
    TooManyNodes {
        /// Calls of the rollout.
        calls: usize,
        /// The limit.
        nodes_max: usize,
    },
    /// A node of a [`crate::TrainTree`] is malformed.
    #[error("train tree: node {index}: {problem}")]
    TrainNode {
        /// The node.
        index: usize,
        /// What was expected and found.
        problem: String,
    },
    /// A call's path does not spell its tokens (I1). A bug of this crate.
    #[error(
        "tree: I1 broken at call {call}: path has {found} tokens, prompt and output have {expected}, first difference at {at}; please report this with the ledger"
    )]
    TokenTruth {
        /// Its arrival number.
        call: u32,
        /// Tokens of prompt and output.
        expected: usize,
        /// Tokens of the path.
        found: usize,
        /// Where they differ first.
        at: usize,
    },
}
