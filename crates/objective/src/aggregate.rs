//! From losses of tokens to one number.

use serde::{Deserialize, Serialize};

/// How the losses of the tokens of many rollouts become one loss.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// Mean over all tokens of the batch: long rollouts weigh more.
    TokenMean,
    /// Mean over the tokens of each rollout, then over rollouts: each rollout weighs the same.
    RolloutMean,
    /// Sum over the tokens of each rollout, then mean over rollouts.
    RolloutSum,
    /// Sum over all tokens, divided by this constant (Dr.GRPO): independent of lengths.
    Fixed(f64),
}

/// The weight of each token of rollout `i`, so that the sum of weight · loss over all tokens is
/// the aggregated loss. Rollouts without tokens get 0 and do not count as rollouts. Depends only
/// on the number of trained tokens, never on how many branches or rows hold them.
#[must_use]
pub fn token_weights(tokens_per_rollout: &[usize], aggregation: Aggregation) -> Vec<f64> {
    let tokens: usize = tokens_per_rollout.iter().sum();
    let rollouts = tokens_per_rollout.iter().filter(|&&n| n > 0).count();
    tokens_per_rollout
        .iter()
        .map(|&own| {
            if own == 0 {
                return 0.0;
            }
            match aggregation {
                Aggregation::TokenMean => 1.0 / tokens as f64,
                Aggregation::RolloutMean => 1.0 / (rollouts as f64 * own as f64),
                Aggregation::RolloutSum => 1.0 / rollouts as f64,
                Aggregation::Fixed(divisor) => 1.0 / divisor,
            }
        })
        .collect()
}
