//! The prefix tree of one rollout: build, classify, select, weigh, pack. Pure.

mod error;
mod forest;
mod train;

pub use error::TreeError;
pub use forest::{Forest, ForestNode, ForestStats, Term};
pub use train::{Target, TrainNode, TrainTree};
