//! Settings of reinforcement learning. Every default is GRPO with clipped ratios and truncated
//! token weights, as ClawGym II trains.

use objective::{Aggregation, Clip, Divergence, Gather, KlEstimator, Level, PolicyLoss, Rejection};
use serde::{Deserialize, Serialize};

/// The policy loss. All that have bounds take them from [`GrpoSettings::clip`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// The ratio of each token is clipped (PPO, GRPO, DAPO; with `clip.dual` dual clip).
    #[default]
    Clipped,
    /// One ratio per rollout, the geometric mean of its tokens', is clipped (GSPO). Bounds are of
    /// the order of 3e-4, and `rollout_mean` is the aggregation that the method was made for.
    Gspo,
    /// The clipped ratio is a constant weight of the log-probability, so that no token loses its
    /// gradient (CISPO). `clip.low` of 1 or more means no lower bound.
    Cispo,
    /// The ratio of each token, not clipped.
    ImportanceWeighted,
    /// Advantage times log-probability, without a ratio.
    Reinforce,
}

/// What importance weights between engine and learner are taken over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RatioOver {
    /// Each token has its own.
    #[default]
    Token,
    /// The product over all trained tokens of the rollout.
    Rollout,
    /// Their geometric mean.
    RolloutMean,
}

/// What happens to importance weights outside the bounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outside {
    /// Those above `importance_max` are cut to it (TIS).
    #[default]
    Truncate,
    /// Those above `importance_max` or below `correction.importance_min` become 0 (IcePop, MIS).
    Mask,
}

/// A divergence by which tokens or rollouts are rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RejectBy {
    /// Ratio of the engine's to our probability, in `1/high ..= high` (or `low ..= high`).
    Ratio,
    /// Half the squared log-ratio.
    K2,
    /// `exp(d) − 1 − d`.
    K3,
}

/// Over what that divergence is gathered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RejectOver {
    /// Each token by itself.
    Token,
    /// Sum over the rollout.
    RolloutSum,
    /// Mean over the rollout: with `ratio` the geometric bounds.
    RolloutMean,
    /// Largest of the rollout.
    RolloutMax,
}

/// One condition; tokens or rollouts that fail it get weight 0. Denominators of the aggregation
/// stay: a rejected token still counts as a token.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reject {
    /// Gathered over what.
    pub over: RejectOver,
    /// Measured how.
    pub by: RejectBy,
    /// Lower bound, for `ratio` only; `1/high` when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low: Option<f64>,
    /// Upper bound.
    pub high: f64,
}

/// Correction of the difference between engine and learner. Always measured; this says what is
/// done about it. The upper bound is [`GrpoSettings::importance_max`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CorrectionSettings {
    /// Without it all weights are 1 and nothing is rejected.
    pub apply: bool,
    /// What a weight is taken over.
    pub over: RatioOver,
    /// What happens outside the bounds.
    pub outside: Outside,
    /// Lower bound of masking.
    pub importance_min: f64,
    /// Divide by the mean weight of the batch.
    pub normalise: bool,
    /// Conditions, all of which must hold.
    pub reject: Vec<Reject>,
    /// A rollout with one token whose ratio is below this is rejected (1e-4 is usual).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub veto: Option<f64>,
}

impl Default for CorrectionSettings {
    fn default() -> Self {
        Self {
            apply: true,
            over: RatioOver::Token,
            outside: Outside::Truncate,
            importance_min: 0.5,
            normalise: false,
            reject: Vec::new(),
            veto: None,
        }
    }
}

impl CorrectionSettings {
    /// Whether a token's weight depends on that token alone, so that no pass is needed before.
    pub(crate) fn is_token_wise(&self) -> bool {
        !self.apply
            || (self.over == RatioOver::Token
                && self.outside == Outside::Truncate
                && !self.normalise
                && self.reject.is_empty()
                && self.veto.is_none())
    }

    pub(crate) fn level(&self) -> Level {
        match self.over {
            RatioOver::Token => Level::Token,
            RatioOver::Rollout => Level::Sequence,
            RatioOver::RolloutMean => Level::SequenceMean,
        }
    }

    pub(crate) fn rejections(&self) -> Vec<Rejection> {
        let each = self.reject.iter().enumerate();
        each.map(|(index, reject)| Rejection {
            name: index.to_string(),
            gather: match reject.over {
                RejectOver::Token => Gather::Token,
                RejectOver::RolloutSum => Gather::Sum,
                RejectOver::RolloutMean => Gather::Mean,
                RejectOver::RolloutMax => Gather::Max,
            },
            divergence: match reject.by {
                RejectBy::Ratio => Divergence::K1,
                RejectBy::K2 => Divergence::K2,
                RejectBy::K3 => Divergence::K3,
            },
            low: reject.low,
            high: reject.high,
        })
        .collect()
    }
}

/// Where the price of leaving the reference policy is paid.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlPlace {
    /// Added to the loss of each token.
    #[default]
    Loss,
    /// Taken from the reward of each token (always k1 between the weights at the start of the
    /// update and the reference): advantages fall by what is still to come on a token's branches.
    Reward,
}

/// KL divergence to a reference policy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KlSettings {
    /// Price; 0 switches it off, and no reference is computed.
    pub weight: f64,
    /// Estimator of the loss.
    pub estimator: KlEstimator,
    /// Gradient of k2 whatever the estimator: its expectation is that of the divergence.
    pub straight_through: bool,
    /// Where it is paid.
    pub place: KlPlace,
}

impl Default for KlSettings {
    fn default() -> Self {
        Self {
            weight: 0.0,
            estimator: KlEstimator::K3,
            straight_through: false,
            place: KlPlace::Loss,
        }
    }
}

/// When to stop rather than train on. All off by default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StopRules {
    /// Mean |rollout − old| above this is an error before any step: engine and learner disagree.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout_gap: Option<f64>,
    /// Mean entropy below this is an error before the step: the policy has collapsed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy_min: Option<f64>,
    /// KL between the weights at the start of the update and the present ones (k3) above this skips the rest of the batch's steps; counted, no error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_kl: Option<f64>,
    /// Mean KL to the reference above this is an error before the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference_kl: Option<f64>,
}

/// Settings of the update.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrpoSettings {
    /// Bounds of the ratio.
    pub clip: Clip,
    /// Importance weights between engine and learner are cut at this (c̄).
    pub importance_max: f32,
    /// From tokens to one loss.
    pub aggregation: Aggregation,
    /// Optimiser steps per batch: rollouts are dealt out to this many mini-batches.
    pub minibatches: usize,
    /// Times the batch is gone through.
    pub passes: usize,
    /// The policy loss.
    pub loss: Loss,
    /// Price of certainty: this times the entropy is taken from the loss.
    pub entropy_weight: f64,
    /// Correction of the difference between engine and learner.
    pub correction: CorrectionSettings,
    /// Distance to a reference policy.
    pub kl: KlSettings,
    /// When to stop.
    pub stop: StopRules,
}

impl Default for GrpoSettings {
    fn default() -> Self {
        Self {
            clip: Clip::default(),
            importance_max: 2.0,
            aggregation: Aggregation::TokenMean,
            minibatches: 1,
            passes: 1,
            loss: Loss::default(),
            entropy_weight: 0.0,
            correction: CorrectionSettings::default(),
            kl: KlSettings::default(),
            stop: StopRules::default(),
        }
    }
}

impl GrpoSettings {
    /// The loss with its bounds as the reference maths names it.
    pub(crate) fn policy_loss(&self) -> PolicyLoss {
        let (low, high) = (f64::from(self.clip.low), f64::from(self.clip.high));
        match self.loss {
            Loss::Clipped => PolicyLoss::Clipped {
                low,
                high,
                dual: self.clip.dual.map(f64::from),
            },
            Loss::Gspo => PolicyLoss::Sequence { low, high },
            Loss::Cispo => PolicyLoss::Weighted { low, high },
            Loss::ImportanceWeighted => PolicyLoss::Ratio,
            Loss::Reinforce => PolicyLoss::Plain,
        }
    }
}

/// Settings of PPO: what is learned beside the policy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PpoSettings {
    /// Discount per generated token.
    pub gamma: f64,
    /// Between one-step (0) and terminal (1) estimates; on a tree see `objective::tree_gae`.
    pub lambda: f64,
    /// A prediction may not gain by moving further than this from the old one.
    pub value_clip: f64,
    /// Weight of the value loss.
    pub value_weight: f64,
    /// Advantages of the batch get mean 0 and deviation 1.
    pub whiten: bool,
    /// First updates that train the critic alone.
    pub warmup_updates: u64,
    /// Learning rate of the critic, as a multiple of the policy's.
    pub rate_factor: f32,
}

impl Default for PpoSettings {
    fn default() -> Self {
        Self {
            gamma: 1.0,
            lambda: 1.0,
            value_clip: 0.5,
            value_weight: 0.5,
            whiten: true,
            warmup_updates: 0,
            rate_factor: 10.0,
        }
    }
}
