//! Advantages of the rollouts of one group: one vote per rollout, whatever its number of calls,
//! branches or tokens.

use serde::{Deserialize, Serialize};

/// Added to the standard deviation, so that a constant group gives zeros and not NaN.
pub const STD_EPSILON: f64 = 1e-6;

/// What differences to the mean are divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// The group's unbiased standard deviation + 1e-6 (GRPO).
    Std,
    /// Nothing (Dr.GRPO).
    None,
}

/// Advantages of one group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Advantages {
    /// One per rollout, in the order of the rewards.
    pub values: Vec<f64>,
    /// Whether all rewards are equal (a group of one included): there is nothing to learn.
    pub zero_variance: bool,
    /// Mean reward.
    pub mean: f64,
    /// Unbiased standard deviation; 0 for a group of one.
    pub std: f64,
}

pub(crate) fn mean_std(values: &[f64]) -> (f64, f64) {
    if values.is_empty() {
        return (0.0, 0.0);
    }
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    if values.len() == 1 {
        return (mean, 0.0);
    }
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0)).sqrt())
}

fn all_equal(values: &[f64]) -> bool {
    values.windows(2).all(|pair| pair[0] == pair[1])
}

/// Reward minus the group's mean, divided as `by` says. A group with equal rewards (or of one
/// rollout) gives exact zeros and `zero_variance`.
#[must_use]
pub fn group_advantages(rewards: &[f64], by: Scale) -> Advantages {
    let (mean, std) = mean_std(rewards);
    let zero_variance = all_equal(rewards);
    let values = if zero_variance {
        vec![0.0; rewards.len()]
    } else {
        let divisor = match by {
            Scale::Std => std + STD_EPSILON,
            Scale::None => 1.0,
        };
        rewards
            .iter()
            .map(|reward| (reward - mean) / divisor)
            .collect()
    };
    Advantages {
        values,
        zero_variance,
        mean,
        std,
    }
}

/// Reward minus the mean of the *other* rollouts of the group (RLOO), divided by nothing or by
/// the standard deviation of the whole group (a scale from the others alone would explode for
/// one success among failures).
#[must_use]
pub fn leave_one_out_advantages(rewards: &[f64], by: Scale) -> Advantages {
    let mut advantages = group_advantages(rewards, by);
    if rewards.len() > 1 {
        let count = rewards.len() as f64;
        let correction = count / (count - 1.0);
        for value in &mut advantages.values {
            *value *= correction;
        }
    }
    advantages
}
