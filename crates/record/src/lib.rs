//! The data model that every room shares. Types only: no clock, no socket, no
//! randomness, no file. Whoever needs one of those passes the value in.
//!
//! | module | owns |
//! |---|---|
//! | [`id`] | names of runs, tasks, rollouts, calls: validated strings |
//! | [`conversation`] | the one neutral form of a chat request and reply |
//! | [`sampling`] | how tokens were drawn, and why generation ended |
//! | [`call`] | one model request at the boundary, its attempts, its exact tokens |
//! | [`lineage`] | where a rollout came from |
//! | [`rollout`] | one harness run: stage times, verdict, disposition |
//! | [`secret`] | keys and tokens that no log shows |
//!
//! Invariants (ids from the design's list):
//! - **I1**: [`call::Call::prompt_ids`] and [`call::Generation::token_ids`] are what the
//!   engine consumed and produced; nothing in this workspace re-encodes them.
//! - **I4**: [`call::Generation`] holds one log-probability per generated token;
//!   [`call::Generation::check`] refuses anything else.
//! - **I9**: [`rollout::Rollout::disposition`] is `None` only while the rollout runs.

pub mod call;
pub mod conversation;
pub mod id;
pub mod lineage;
pub mod rollout;
pub mod sampling;
pub mod secret;

pub use call::{
    Attempt, AttemptOutcome, Call, Continuation, Dialect, Generation, MediaSpan, PolicySpan,
};
pub use conversation::{Conversation, Message, Part, Role, ToolCall, ToolSpec};
pub use id::{CallId, GroupId, IdError, RolloutId, TaskId};
pub use lineage::Lineage;
pub use rollout::{Disposition, Fault, Rollout, RolloutSpec, StageSeconds, Verdict};
pub use sampling::{FinishReason, Sampling};
pub use secret::Secret;

/// Which weights produced a token. Version 0 is what the run started from; each
/// optimiser step adds one.
pub type PolicyVersion = u64;
