//! Advantages, rollout correction, policy losses, aggregation: plain reference maths. Pure.

mod aggregate;
mod group;
mod token;

pub use aggregate::{Aggregation, token_weights};
pub use group::{Advantages, STD_EPSILON, Scale, group_advantages, leave_one_out_advantages};
pub use token::{Clip, LOG_RATIO_MAX, TokenLoss, clipped_token, truncated_weight};
