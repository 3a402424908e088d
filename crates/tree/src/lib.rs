//! The prefix tree of one rollout: build, classify, select, weigh, pack. Pure.

mod classify;
mod digest;
mod error;
mod forest;
mod fork;
mod layout;
mod radix;
mod select;
mod train;
mod tree;

pub use classify::CallClass;
pub use error::TreeError;
pub use forest::{Forest, ForestNode, ForestStats, Term};
pub use fork::{Fork, ForkCause};
pub use select::{DropReason, Dropped, Kept, OverBranched, Selection, select};
pub use train::{Target, TrainNode, TrainTree};
pub use tree::{Node, Origin, Place, Tree, TreeLimits, TreeStats};
