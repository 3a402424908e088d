//! From losses of tokens to one number.

use serde::{Deserialize, Serialize};

use crate::Matrix;

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

/// Sizes of the whole batch when these rollouts are only a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Whole {
    /// Trained tokens of the whole batch.
    pub tokens: Option<f64>,
    /// Rollouts with trained tokens of the whole batch.
    pub rollouts: Option<f64>,
}

/// The weight of each token of rollout `i`, so that the sum of weight · loss over all tokens is
/// the aggregated loss. Rollouts without tokens get 0 and do not count as rollouts. Depends only
/// on the number of trained tokens, never on how many branches or rows hold them.
#[must_use]
pub fn token_weights(tokens_per_rollout: &[usize], aggregation: Aggregation) -> Vec<f64> {
    token_weights_within(tokens_per_rollout, aggregation, &Whole::default())
}

/// [`token_weights`] for a part of a batch: the parts' losses add up to the loss of the whole.
#[must_use]
pub fn token_weights_within(
    tokens_per_rollout: &[usize],
    aggregation: Aggregation,
    whole: &Whole,
) -> Vec<f64> {
    let own_tokens: usize = tokens_per_rollout.iter().sum();
    let own_rollouts = tokens_per_rollout.iter().filter(|&&own| own > 0).count();
    let tokens = whole.tokens.unwrap_or(own_tokens as f64);
    let rollouts = whole.rollouts.unwrap_or(own_rollouts as f64);
    tokens_per_rollout
        .iter()
        .map(|&own| {
            if own == 0 {
                return 0.0;
            }
            match aggregation {
                Aggregation::TokenMean => 1.0 / tokens,
                Aggregation::RolloutMean => 1.0 / (rollouts * own as f64),
                Aggregation::RolloutSum => 1.0 / rollouts,
                Aggregation::Fixed(divisor) => 1.0 / divisor,
            }
        })
        .collect()
}

/// Weights as a matrix: those of the row where the mask holds, else 0.
#[must_use]
pub fn weight_matrix(mask: &Matrix, weights: &[f64]) -> Matrix {
    Matrix::build(mask.rows(), mask.columns(), |row, column| {
        if mask.row(row)[column] == 0.0 {
            0.0
        } else {
            weights[row]
        }
    })
}
