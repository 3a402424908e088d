//! What an update found. Measured at every update, whatever is applied.

use serde::{Deserialize, Serialize};

/// What an update found, as means over terms unless said otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpdateMetrics {
    /// The aggregated loss.
    pub loss: f64,
    /// Entropy of the policy at the trained tokens, in nats.
    pub entropy: f64,
    /// rollout − old: divergence between engine and learner; near 0 when they agree.
    pub rollout_kl: f64,
    /// Largest |rollout − old|.
    pub rollout_gap_max: f64,
    /// old − lp.
    pub step_kl: f64,
    /// Part of terms held by a clip bound.
    pub clipped: f64,
    /// Part of terms whose importance weight was cut.
    pub truncated: f64,
    /// Norm of the gradient before clipping, the largest over optimiser steps.
    pub gradient_norm: f64,
    /// Terms trained (tokens, counted once per rollout and pass).
    pub terms: u64,
    /// Tokens of the trees as if each branch were a row of its own.
    pub tokens_logical: u64,
    /// Tokens computed.
    pub tokens_unique: u64,
    /// Optimiser steps.
    pub optimiser_steps: u64,
    /// Optimiser steps left out because the policy had moved too far.
    pub steps_skipped: u64,
    /// |rollout − old|.
    pub rollout_gap: f64,
    /// The same at the first token of each reply.
    pub rollout_gap_opening: f64,
    /// The same at the last token of each reply.
    pub rollout_gap_closing: f64,
    /// The same between the two.
    pub rollout_gap_middle: f64,
    /// Importance weight that was applied.
    pub importance_mean: f64,
    /// Effective sample size of the importance weights, as a share of the terms.
    pub importance_ess: f64,
    /// Part of terms with importance weight 0.
    pub rejected: f64,
    /// KL to the reference policy by the chosen estimator; 0 without reference.
    pub reference_kl: f64,
    /// Advantage.
    pub advantage_mean: f64,
    /// Standard deviation of the advantage.
    pub advantage_std: f64,
    /// Largest |advantage|.
    pub advantage_max: f64,
    /// Part of terms with advantage 0.
    pub advantage_zero: f64,
    /// Versions between the weights that drew a token and those that are trained.
    pub staleness: f64,
    /// The largest of it.
    pub staleness_max: f64,
    /// Loss of the value head, not weighted.
    pub value_loss: f64,
    /// Part of terms whose value is held by its clip.
    pub value_clipped: f64,
    /// 1 − var(return − value) / var(return), of the values before the update.
    pub value_explained: f64,
    /// Norm of the critic's gradient, the largest over optimiser steps.
    pub value_gradient_norm: f64,
}

/// Where a token stands in its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Opening,
    Middle,
    Closing,
}

/// One term as the loss saw it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) loss: f64,
    pub(crate) clipped: bool,
    pub(crate) truncated: bool,
    /// rollout − old.
    pub(crate) gap: f64,
    /// old − lp.
    pub(crate) moved: f64,
    pub(crate) correction: f64,
    pub(crate) reference_kl: f64,
    pub(crate) advantage: f64,
    pub(crate) staleness: f64,
    pub(crate) value_loss: f64,
    pub(crate) value_clipped: bool,
    pub(crate) class: Class,
}

/// Sums over the terms of one pass.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    /// Sums where the metric is a mean.
    pub(crate) sums: UpdateMetrics,
    /// Sum of k3 between the weights at the start of the update and the present ones; unlike the
    /// plain difference it is never negative.
    pub(crate) moved: f64,
    weights_squared: f64,
    advantages_squared: f64,
    opening: (f64, f64),
    middle: (f64, f64),
    closing: (f64, f64),
}

impl Tally {
    pub(crate) fn add(&mut self, seen: &Seen, entropy: f64) {
        let s = &mut self.sums;
        let share = |hit: bool| f64::from(u8::from(hit));
        s.terms += 1;
        s.loss += seen.loss;
        s.entropy += entropy;
        s.rollout_kl += seen.gap;
        s.rollout_gap += seen.gap.abs();
        s.rollout_gap_max = s.rollout_gap_max.max(seen.gap.abs());
        s.step_kl += seen.moved;
        self.moved += (-seen.moved).exp() - 1.0 + seen.moved;
        s.clipped += share(seen.clipped);
        s.truncated += share(seen.truncated);
        s.importance_mean += seen.correction;
        self.weights_squared += seen.correction * seen.correction;
        s.rejected += share(seen.correction == 0.0);
        s.reference_kl += seen.reference_kl;
        s.advantage_mean += seen.advantage;
        self.advantages_squared += seen.advantage * seen.advantage;
        s.advantage_max = s.advantage_max.max(seen.advantage.abs());
        s.advantage_zero += share(seen.advantage == 0.0);
        s.staleness += seen.staleness;
        s.staleness_max = s.staleness_max.max(seen.staleness);
        s.value_loss += seen.value_loss;
        s.value_clipped += share(seen.value_clipped);
        let class = match seen.class {
            Class::Opening => &mut self.opening,
            Class::Middle => &mut self.middle,
            Class::Closing => &mut self.closing,
        };
        class.0 += seen.gap.abs();
        class.1 += 1.0;
    }

    /// Adds a pass; `norm` is that of its gradient.
    pub(crate) fn merge(&mut self, pass: &Self, norm: f64, value_norm: f64) {
        let (s, o) = (&mut self.sums, &pass.sums);
        for (mine, theirs) in [
            (&mut s.loss, o.loss),
            (&mut s.entropy, o.entropy),
            (&mut s.rollout_kl, o.rollout_kl),
            (&mut s.rollout_gap, o.rollout_gap),
            (&mut s.step_kl, o.step_kl),
            (&mut s.clipped, o.clipped),
            (&mut s.truncated, o.truncated),
            (&mut s.importance_mean, o.importance_mean),
            (&mut s.rejected, o.rejected),
            (&mut s.reference_kl, o.reference_kl),
            (&mut s.advantage_mean, o.advantage_mean),
            (&mut s.advantage_zero, o.advantage_zero),
            (&mut s.staleness, o.staleness),
            (&mut s.value_loss, o.value_loss),
            (&mut s.value_clipped, o.value_clipped),
            (&mut self.weights_squared, pass.weights_squared),
            (&mut self.advantages_squared, pass.advantages_squared),
            (&mut self.opening.0, pass.opening.0),
            (&mut self.opening.1, pass.opening.1),
            (&mut self.middle.0, pass.middle.0),
            (&mut self.middle.1, pass.middle.1),
            (&mut self.closing.0, pass.closing.0),
            (&mut self.closing.1, pass.closing.1),
        ] {
            *mine += theirs;
        }
        for (mine, theirs) in [
            (&mut s.rollout_gap_max, o.rollout_gap_max),
            (&mut s.advantage_max, o.advantage_max),
            (&mut s.staleness_max, o.staleness_max),
            (&mut s.gradient_norm, norm),
            (&mut s.value_gradient_norm, value_norm),
        ] {
            *mine = mine.max(theirs);
        }
        s.terms += o.terms;
        s.tokens_logical += o.tokens_logical;
        s.tokens_unique += o.tokens_unique;
        s.optimiser_steps += 1;
    }

    /// Means from sums.
    pub(crate) fn finish(&self) -> UpdateMetrics {
        let mut m = self.sums;
        let terms = m.terms.max(1) as f64;
        m.loss /= m.optimiser_steps.max(1) as f64;
        for mean in [
            &mut m.entropy,
            &mut m.rollout_kl,
            &mut m.rollout_gap,
            &mut m.step_kl,
            &mut m.clipped,
            &mut m.truncated,
            &mut m.importance_mean,
            &mut m.rejected,
            &mut m.reference_kl,
            &mut m.advantage_mean,
            &mut m.advantage_zero,
            &mut m.staleness,
            &mut m.value_loss,
            &mut m.value_clipped,
        ] {
            *mean /= terms;
        }
        let squares = self.weights_squared / terms;
        m.importance_ess = if squares > 0.0 {
            m.importance_mean * m.importance_mean / squares
        } else {
            0.0
        };
        let variance = self.advantages_squared / terms - m.advantage_mean * m.advantage_mean;
        m.advantage_std = variance.max(0.0).sqrt();
        let mean = |(sum, count): (f64, f64)| if count > 0.0 { sum / count } else { 0.0 };
        m.rollout_gap_opening = mean(self.opening);
        m.rollout_gap_middle = mean(self.middle);
        m.rollout_gap_closing = mean(self.closing);
        m
    }
}

/// 1 − var(return − value) / var(return); 0 when all returns are equal.
pub(crate) fn explained(values: &[f64], returns: &[f64]) -> f64 {
    let variance = |list: &mut dyn Iterator<Item = f64>| {
        let (mut count, mut sum, mut squares) = (0.0, 0.0, 0.0);
        for value in list {
            count += 1.0;
            sum += value;
            squares += value * value;
        }
        if count == 0.0 {
            return 0.0;
        }
        let mean = sum / count;
        squares / count - mean * mean
    };
    let all = variance(&mut returns.iter().copied());
    if all <= 1e-12 {
        return 0.0;
    }
    1.0 - variance(&mut returns.iter().zip(values).map(|(r, v)| r - v)) / all
}
