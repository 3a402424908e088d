//! The loss of one token. Computed in f64 from f32 inputs, so that the difference of two
//! log-probabilities loses nothing.

use serde::{Deserialize, Serialize};

/// Log-ratios are clamped to this before they are exponentiated, so that one broken
/// log-probability cannot make an infinite weight.
pub const LOG_RATIO_MAX: f64 = 20.0;

/// How far the policy may move on one token before its gradient stops.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clip {
    /// The ratio counts down to `1 - low`.
    pub low: f32,
    /// The ratio counts up to `1 + high`.
    pub high: f32,
    /// For negative advantages the loss is at most `dual * |advantage|` (dual clip); above 1.
    pub dual: Option<f32>,
}

impl Default for Clip {
    /// 0.2 down, 0.28 up, no dual clip.
    fn default() -> Self {
        Self {
            low: 0.2,
            high: 0.28,
            dual: None,
        }
    }
}

/// Loss and gradient of one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLoss {
    /// To be minimised.
    pub loss: f32,
    /// Derivative of the loss by the token's log-probability.
    pub gradient: f32,
    /// Whether a bound holds the loss, so that the gradient is zero.
    pub clipped: bool,
    /// `exp(logprob - old)` after the clamp.
    pub ratio: f32,
}

/// The same in f64, with the two bounds told apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Clipped {
    pub(crate) loss: f64,
    pub(crate) gradient: f64,
    pub(crate) ratio: f64,
    /// The ratio left the trust region on the side where that lowers the loss.
    pub(crate) outer: bool,
    /// The dual bound holds.
    pub(crate) dual: bool,
}

/// `exp` of the clamped log-ratio, and whether the clamp cut the gradient.
pub(crate) fn ratio_of(logprob: f64, old: f64) -> (f64, bool) {
    let log_ratio = logprob - old;
    let clamped = log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX);
    (clamped.exp(), clamped != log_ratio)
}

pub(crate) fn clipped(
    logprob: f64,
    old: f64,
    advantage: f64,
    low: f64,
    high: f64,
    dual: Option<f64>,
) -> Clipped {
    let (ratio, saturated) = ratio_of(logprob, old);
    clipped_ratio(ratio, saturated, advantage, low, high, dual)
}

pub(crate) fn clipped_ratio(
    ratio: f64,
    saturated: bool,
    advantage: f64,
    low: f64,
    high: f64,
    dual: Option<f64>,
) -> Clipped {
    let free = -advantage * ratio;
    let bounded = -advantage * ratio.clamp(1.0 - low, 1.0 + high);
    let outer = bounded > free;
    let mut loss = free.max(bounded);
    let mut gradient = if outer || saturated { 0.0 } else { free };
    let mut held_by_dual = false;
    if let Some(dual) = dual
        && advantage < 0.0
        && loss > -advantage * dual
    {
        loss = -advantage * dual;
        gradient = 0.0;
        held_by_dual = true;
    }
    Clipped {
        loss,
        gradient,
        ratio,
        outer,
        dual: held_by_dual,
    }
}

/// PPO's clipped loss of one token, with separate bounds below and above and an optional dual
/// clip. `old` is the log-probability under the weights at the start of the update.
#[must_use]
pub fn clipped_token(logprob: f32, old: f32, advantage: f32, clip: &Clip) -> TokenLoss {
    let result = clipped(
        f64::from(logprob),
        f64::from(old),
        f64::from(advantage),
        f64::from(clip.low),
        f64::from(clip.high),
        clip.dual.map(f64::from),
    );
    TokenLoss {
        loss: result.loss as f32,
        gradient: result.gradient as f32,
        clipped: result.outer || result.dual,
        ratio: result.ratio as f32,
    }
}

/// The truncated importance weight of one token: `min(exp(old - rollout), cap)`, the log-ratio
/// clamped to ±20. A constant for the gradient: multiply loss and gradient by it. `rollout` is
/// the log-probability under the distribution that was sampled from.
#[must_use]
pub fn truncated_weight(old: f32, rollout: f32, cap: f32) -> f32 {
    let (ratio, _) = ratio_of(f64::from(old), f64::from(rollout));
    ratio.min(f64::from(cap)) as f32
}
