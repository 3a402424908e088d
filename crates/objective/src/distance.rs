//! How far two policies are apart, from the log-probabilities of drawn tokens; and what staying
//! near costs.

use serde::{Deserialize, Serialize};

use crate::Matrix;

/// An estimator of the KL divergence at one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// Difference of the log-probabilities.
    K1,
    /// Its size.
    Abs,
    /// Half its square.
    K2,
    /// `exp(-k1) + k1 - 1`, the exponent clamped to ±20 and the result to ±10.
    K3,
}

/// Value and derivative by the policy's log-probability. With `straight_through` the derivative
/// is that of [`KlEstimator::K2`], whose expectation is the gradient of the divergence.
#[must_use]
pub fn kl_token(
    logprob: f64,
    reference: f64,
    estimator: KlEstimator,
    straight_through: bool,
) -> (f64, f64) {
    let distance = logprob - reference;
    let (value, slope) = match estimator {
        KlEstimator::K1 => (distance, 1.0),
        KlEstimator::Abs => (
            distance.abs(),
            if distance == 0.0 {
                0.0
            } else {
                distance.signum()
            },
        ),
        KlEstimator::K2 => (0.5 * distance.powi(2), distance),
        KlEstimator::K3 => {
            let clamped = (-distance).clamp(-20.0, 20.0);
            let value = clamped.exp() - clamped - 1.0;
            let cut = clamped != -distance || value > 10.0;
            (
                value.clamp(-10.0, 10.0),
                if cut { 0.0 } else { 1.0 - clamped.exp() },
            )
        }
    };
    (value, if straight_through { distance } else { slope })
}

/// Rewards minus `coefficient` times the difference of log-probabilities, token by token.
#[must_use]
pub fn rewards_with_kl(
    rewards: &Matrix,
    old: &Matrix,
    reference: &Matrix,
    coefficient: f64,
) -> Matrix {
    let distance = old.zip(reference, |old, reference| old - reference);
    rewards.zip(&distance, |reward, distance| {
        reward - coefficient * distance
    })
}

/// A coefficient that follows a target divergence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AdaptiveKl {
    /// The coefficient now.
    pub coefficient: f64,
    /// The divergence aimed at.
    pub target: f64,
    /// Steps over which an error of 100 % would double the coefficient.
    pub horizon: f64,
}

impl AdaptiveKl {
    /// Takes note of a divergence seen over `steps`; the relative error counts up to ±20 %.
    pub fn update(&mut self, divergence: f64, steps: f64) {
        let error = (divergence / self.target - 1.0).clamp(-0.2, 0.2);
        self.coefficient *= 1.0 + error * steps / self.horizon;
    }
}
