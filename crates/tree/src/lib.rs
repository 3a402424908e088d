//! The prefix tree of one rollout: build, classify, select, weigh, pack. Pure: no clock, no
//! socket, no randomness.
//!
//! | module | owns |
//! |---|---|
//! | `radix` | the shape: a compressed prefix tree over tokens |
//! | `builder` | [`Builder`]: calls in, one at a time, in any order |
//! | `media` | placeholders of images: equal ids of unequal payloads are not equal |
//! | `tree`, `layout` | [`Tree`]: nodes in preorder, who generated and who owns each |
//! | `classify`, `digest`, `quote` | [`CallClass`]: what a call is, by what it shares with others and who quotes whom |
//! | `link` | which call each carries on, and its segment |
//! | `unspoken` | both for captures of which only tokens are known |
//! | `fork` | [`Fork`]: every divergence with cause, evidence and price in tokens |
//! | `select` | [`Selection`]: which calls are trained; what is lost and why |
//! | `pack`, `train` | [`TrainTree`]: what a learner computes for one rollout |
//! | `rows` | [`Rows`]: the same for trainers that take sequences |
//! | `forest` | [`Forest`]: the trees of a batch merged where prefixes are equal |
//!
//! ```text
//! calls ─► Builder ─► Tree ─► select ─► Kept::train_tree ─┐
//!                                  │      other rollouts ┴─► Forest::merge ─► learner
//!                                  └─► linearise ─► rows ─► other trainers
//! ```
//!
//! Invariants:
//! - **I1** For each call, root to leaf spells prompt ids + output ids ([`Tree::check`]).
//! - **I3** A node is wholly context or wholly generated and is stored once, so a generated token
//!   of a kept branch has exactly one target however many branches share it. When several calls
//!   generated the same tokens at the same place, the earliest delivered one owns them: its
//!   log-probabilities and versions count. A node is trained when *any* kept call generated it.
//! - **I4** Tokens without both log-probabilities are context and are counted
//!   ([`TreeStats::tokens_without_logprobs`], [`Kept::tokens_without_logprobs`]). The first token
//!   of a sequence is never trained: nothing predicts it.
//! - A target belongs to the transition *into* its token, so the first token of every branch is
//!   supervised, however many siblings it has.
//! - Rows are the tree again: each term once, under the same prefix, so a loss that weighs tokens by
//!   rollout is the same over both. Branches that are too long end after a turn, and what that
//!   costs is counted ([`Rows::cut`]).
//! - Kept and dropped add up: [`Kept::tokens_trained`] plus the sum over [`Kept::dropped`] is
//!   everything that could be trained.
//! - Deterministic, and independent of the order of the calls. The shape of a forest is also
//!   independent of the order of its trees.
//!
//! What `clawgym2` means by a dead leaf: within a segment of a conversation, each call carries on
//! at most one earlier call, namely the last one whose reply its history holds, token by token
//! or in the same words. The longest such chain that ends with a delivered reply is kept: most
//! calls, then one that any call went on from, then most generated tokens, then the latest. A reply whose tokens were re-rendered later
//! (drift, an edited system message) is still part of the chain, because it acted on the world;
//! only retries, rollbacks and undelivered replies are dead.
//!
//! Limits: more than [`TreeLimits::nodes_max`] nodes is [`TreeError::TooManyNodes`], the rollout
//! is discarded; more than `leaves_max` kept leaves is [`OverBranched`], nothing is kept and all
//! trainable tokens are reported as lost. Adding a call takes one comparison of its tokens with
//! what is there plus time in proportion to what is new; the rest of building takes time linear in
//! the nodes of the tree and the messages of the calls, and memory linear in unique tokens.

mod builder;
mod classify;
mod digest;
mod error;
mod forest;
mod fork;
mod layout;
mod link;
mod media;
mod pack;
mod quote;
mod radix;
mod rows;
mod select;
mod train;
mod tree;
mod unspoken;

pub use builder::Builder;
pub use classify::CallClass;
pub use error::TreeError;
pub use forest::{Forest, ForestNode, ForestStats, Term};
pub use fork::{Fork, ForkCause};
pub use rows::{CutNode, Row, Rows, linearise};
pub use select::{
    DropReason, Dropped, Kept, LEAVES_MAX, OverBranched, SELECTION_NAMES, Selection, select,
};
pub use train::{Target, TrainNode, TrainTree};
pub use tree::{Node, Origin, Place, Tree, TreeLimits, TreeStats};

#[cfg(test)]
mod tests;
