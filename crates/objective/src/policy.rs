//! Policy-gradient losses of a batch of padded sequences, each with its gradient by the
//! log-probabilities. Weights from rollout correction are constants and multiply loss and
//! gradient of their token.

use std::collections::BTreeMap;

use crate::Matrix;
use crate::token::{clipped, clipped_ratio, ratio_of};

/// Named diagnostics.
pub type Metrics = BTreeMap<String, f64>;

/// A policy loss. Bounds `low` and `high` are distances of the ratio from 1 unless said otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PolicyLoss {
    /// PPO, GRPO, DAPO: the ratio of each token is clipped.
    Clipped {
        /// Downwards.
        low: f64,
        /// Upwards.
        high: f64,
        /// Dual clip for negative advantages.
        dual: Option<f64>,
    },
    /// GSPO: one ratio per sequence, the geometric mean of its tokens, gradient per token.
    Sequence {
        /// Downwards.
        low: f64,
        /// Upwards.
        high: f64,
    },
    /// CISPO: the clipped ratio is a constant weight of the log-probability, so that no token
    /// loses its gradient. `low >= 1` means no lower bound.
    Weighted {
        /// Downwards.
        low: f64,
        /// Upwards.
        high: f64,
    },
    /// Plain importance weighting: the ratio of each token, held by nothing but the clamp of its
    /// logarithm.
    Ratio,
    /// SAPO: a sigmoid gate instead of a clip.
    Soft {
        /// Temperature for positive advantages.
        positive: f64,
        /// Temperature for others.
        negative: f64,
    },
    /// GMPO: geometric mean over the tokens of a sequence; bounds on the *log*-ratio. Averages
    /// over sequences itself: the token weights are not used.
    GeometricMean {
        /// Downwards.
        low: f64,
        /// Upwards.
        high: f64,
    },
    /// REINFORCE and GPG: advantage times log-probability.
    Plain,
    /// DRO: plain, with a quadratic penalty on the log-ratio.
    Quadratic {
        /// Strength.
        beta: f64,
    },
    /// DPPO with total variation: a token counts while its probability moved less than the
    /// bounds; the ratio, truncated, is a constant weight.
    TotalVariation {
        /// Downwards.
        low: f64,
        /// Upwards.
        high: f64,
        /// Cap of the ratio.
        cap: f64,
    },
    /// DPPO with the binary KL divergence.
    BinaryKl {
        /// For falling probabilities.
        low: f64,
        /// For rising probabilities.
        high: f64,
        /// Cap of the ratio.
        cap: f64,
    },
    /// KL-Cov: no clip; the share of tokens with the highest covariance of advantage and
    /// log-probability pays for its distance.
    Covariance {
        /// Share of tokens, at least one token.
        share: f64,
        /// Price.
        price: f64,
    },
}

/// A batch.
#[derive(Debug, Clone, Copy)]
pub struct PolicyInputs<'a> {
    /// Under the weights being trained.
    pub logprob: &'a Matrix,
    /// Under the weights at the start of the update.
    pub old: &'a Matrix,
    /// Advantages.
    pub advantages: &'a Matrix,
    /// Trained tokens.
    pub mask: &'a Matrix,
    /// Rollout-correction weights.
    pub correction: Option<&'a Matrix>,
    /// Aggregation weight of each token, see [`crate::weight_matrix`].
    pub weights: &'a Matrix,
}

/// Loss of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyResult {
    /// To be minimised.
    pub loss: f64,
    /// Derivative by each log-probability.
    pub gradient: Matrix,
    /// `ppo_kl`, `pg_clipfrac`, `pg_clipfrac_lower` where they apply.
    pub metrics: Metrics,
}

/// Loss of one token under a [`PolicyLoss`], before any weight.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct PolicyToken {
    /// To be minimised.
    pub loss: f64,
    /// Derivative by the token's log-probability.
    pub slope: f64,
    /// A bound holds the loss (or the weight, where the loss has no ratio of its own).
    pub clipped: bool,
    /// The dual bound, or the cap of a weight, holds.
    pub clipped_lower: bool,
}

impl PolicyToken {
    fn plain(loss: f64, slope: f64) -> Self {
        Self {
            loss,
            slope,
            ..Self::default()
        }
    }
}

/// Evaluates a loss.
#[must_use]
pub fn policy_loss(kind: &PolicyLoss, inputs: &PolicyInputs<'_>) -> PolicyResult {
    match *kind {
        PolicyLoss::GeometricMean { low, high } => return geometric_mean(inputs, low, high),
        PolicyLoss::Covariance { share, price } => {
            let chosen = covariance_choices(inputs, share, 1)
                .pop()
                .unwrap_or_default();
            return covariance_loss(inputs, &chosen, price);
        }
        _ => {}
    }
    let mask = inputs.mask;
    let sequence_logs = inputs
        .logprob
        .zip(inputs.old, |new, old| new - old)
        .masked_row_means(mask);
    let columns = mask.columns();
    let mut gradient = Matrix::filled(mask.rows(), columns, 0.0);
    let mut loss = 0.0;
    let (mut clipped, mut clipped_lower, mut count) = (0.0, 0.0, 0.0);
    for (row, &sequence_log) in sequence_logs.iter().enumerate() {
        for column in (0..columns).filter(|&column| mask.row(row)[column] != 0.0) {
            let (new, old) = (inputs.logprob.row(row)[column], inputs.old.row(row)[column]);
            let advantage = inputs.advantages.row(row)[column];
            let token = policy_token(kind, new, old, advantage, sequence_log);
            let weight = inputs.weights.row(row)[column]
                * inputs
                    .correction
                    .map_or(1.0, |weights| weights.row(row)[column]);
            loss += weight * token.loss;
            gradient.row_mut(row)[column] = weight * token.slope;
            clipped += f64::from(u8::from(token.clipped));
            clipped_lower += f64::from(u8::from(token.clipped_lower));
            count += 1.0;
        }
    }
    let count = f64::max(count, 1.0);
    let metrics = Metrics::from([
        ("ppo_kl".to_owned(), distance(kind, inputs)),
        ("pg_clipfrac".to_owned(), clipped / count),
        ("pg_clipfrac_lower".to_owned(), clipped_lower / count),
    ]);
    PolicyResult {
        loss,
        gradient,
        metrics,
    }
}

/// Mean distance from the old weights. Losses that exponentiate the clamped log-ratio also
/// report the clamped one.
fn distance(kind: &PolicyLoss, inputs: &PolicyInputs<'_>) -> f64 {
    let logs = inputs.old.zip(inputs.logprob, |old, new| match kind {
        PolicyLoss::Sequence { .. } | PolicyLoss::Plain | PolicyLoss::Quadratic { .. } => old - new,
        _ => (old - new).clamp(-20.0, 20.0),
    });
    logs.masked_mean(inputs.mask)
}

/// One token of a loss that is a sum over tokens. `sequence_log` is the mean of `new − old` over
/// the token's sequence, for [`PolicyLoss::Sequence`]; its derivative counts as that of the token
/// alone, as GSPO defines it. [`PolicyLoss::GeometricMean`] and [`PolicyLoss::Covariance`] are no
/// sums over tokens: they give zeros here, use [`policy_loss`].
#[must_use]
pub fn policy_token(
    kind: &PolicyLoss,
    new: f64,
    old: f64,
    advantage: f64,
    sequence_log: f64,
) -> PolicyToken {
    match *kind {
        PolicyLoss::Clipped { low, high, dual } => {
            let result = clipped(new, old, advantage, low, high, dual);
            PolicyToken {
                loss: result.loss,
                slope: result.gradient,
                clipped: result.outer,
                clipped_lower: result.dual,
            }
        }
        PolicyLoss::Sequence { low, high } => {
            let ratio = sequence_log.min(10.0).exp();
            let result = clipped_ratio(ratio, sequence_log > 10.0, advantage, low, high, None);
            PolicyToken {
                loss: result.loss,
                slope: result.gradient,
                clipped: result.outer,
                clipped_lower: false,
            }
        }
        PolicyLoss::Weighted { low, high } => {
            let (ratio, _) = ratio_of(new, old);
            let bounded = ratio.clamp(1.0 - low, 1.0 + high);
            PolicyToken {
                loss: -bounded * advantage * new,
                slope: -bounded * advantage,
                clipped: bounded != ratio,
                clipped_lower: false,
            }
        }
        PolicyLoss::Ratio => {
            let (ratio, saturated) = ratio_of(new, old);
            let free = -advantage * ratio;
            PolicyToken::plain(free, if saturated { 0.0 } else { free })
        }
        PolicyLoss::Soft { positive, negative } => {
            let (ratio, saturated) = ratio_of(new, old);
            let tau = if advantage > 0.0 { positive } else { negative };
            let gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp());
            let slope = if saturated {
                0.0
            } else {
                -advantage * 4.0 * gate * (1.0 - gate) * ratio
            };
            PolicyToken::plain(-advantage * gate * 4.0 / tau, slope)
        }
        PolicyLoss::Plain => PolicyToken::plain(-advantage * new, -advantage),
        PolicyLoss::Quadratic { beta } => {
            let distance = new - old;
            PolicyToken::plain(
                -advantage * new + 0.5 * beta * distance.powi(2),
                -advantage + beta * distance,
            )
        }
        PolicyLoss::TotalVariation { low, high, cap } => {
            let moved = new.exp() - old.exp();
            let valid = if advantage > 0.0 {
                moved <= high
            } else {
                moved >= -low
            };
            trusted(valid, new, old, advantage, cap)
        }
        PolicyLoss::BinaryKl { low, high, cap } => {
            let (p, q) = (new.exp(), old.exp());
            let kl = q * (old - new) + (1.0 - q) * ((1.0 - q + 1e-8) / (1.0 - p + 1e-8)).ln();
            let valid = if advantage > 0.0 {
                kl <= high || p <= q
            } else {
                kl <= low || p >= q
            };
            trusted(valid, new, old, advantage, cap)
        }
        // Handled by the caller: they need more than one token.
        PolicyLoss::GeometricMean { .. } | PolicyLoss::Covariance { .. } => PolicyToken::default(),
    }
}

/// A token inside or outside a trust region, with the truncated ratio as constant weight.
fn trusted(valid: bool, new: f64, old: f64, advantage: f64, cap: f64) -> PolicyToken {
    let (ratio, _) = ratio_of(new, old);
    if !valid {
        return PolicyToken {
            clipped: true,
            ..PolicyToken::default()
        };
    }
    let weight = ratio.min(cap);
    PolicyToken {
        loss: -advantage * weight * new,
        slope: -advantage * weight,
        clipped: false,
        clipped_lower: ratio > cap,
    }
}

/// Which tokens pay in [`PolicyLoss::Covariance`]: places, row by row, of the share with the
/// highest covariance. When tokens tie at the cut every choice among them is as good; the first
/// of the result takes the earliest, and at most `choices_max` are listed.
#[must_use]
pub fn covariance_choices(
    inputs: &PolicyInputs<'_>,
    share: f64,
    choices_max: usize,
) -> Vec<Vec<usize>> {
    let advantage_mean = inputs.advantages.masked_mean(inputs.mask);
    let logprob_mean = inputs.logprob.masked_mean(inputs.mask);
    let mut places: Vec<(f64, usize)> = (0..inputs.mask.values().len())
        .filter(|&at| inputs.mask.values()[at] != 0.0)
        .map(|at| {
            let covariance = (inputs.advantages.values()[at] - advantage_mean)
                * (inputs.logprob.values()[at] - logprob_mean);
            (covariance, at)
        })
        .collect();
    places.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let count = ((places.len() as f64 * share) as usize).clamp(1, places.len().max(1));
    let Some(&(cut, _)) = places.get(count - 1) else {
        return vec![Vec::new()];
    };
    let certain: Vec<usize> = places
        .iter()
        .filter(|(c, _)| *c > cut)
        .map(|(_, at)| *at)
        .collect();
    let tied: Vec<usize> = places
        .iter()
        .filter(|(c, _)| *c == cut)
        .map(|(_, at)| *at)
        .collect();
    let mut choices = Vec::new();
    let mut open: Vec<(Vec<usize>, usize)> = vec![(certain, 0)];
    while let Some((chosen, from)) = open.pop() {
        if choices.len() == choices_max {
            break;
        }
        if chosen.len() == count {
            choices.push(chosen);
            continue;
        }
        // Pushed in reverse, so that the earliest places come out first.
        for at in (from..tied.len()).rev() {
            if tied.len() - at >= count - chosen.len() {
                let mut longer = chosen.clone();
                longer.push(tied[at]);
                open.push((longer, at + 1));
            }
        }
    }
    choices
}

/// The loss of [`PolicyLoss::Covariance`] when these places pay `price` for their distance.
#[must_use]
pub fn covariance_loss(inputs: &PolicyInputs<'_>, chosen: &[usize], price: f64) -> PolicyResult {
    let mask = inputs.mask;
    let distances = inputs.logprob.zip(inputs.old, |new, old| new - old);
    let mut loss = 0.0;
    let gradient: Vec<f64> = (0..mask.values().len())
        .map(|at| {
            if mask.values()[at] == 0.0 {
                return 0.0;
            }
            let distance = distances.values()[at];
            let free = -inputs.advantages.values()[at] * distance.exp();
            let sign = if distance == 0.0 {
                0.0
            } else {
                distance.signum()
            };
            let paid = if chosen.contains(&at) { price } else { 0.0 };
            let weight = inputs.weights.values()[at]
                * inputs
                    .correction
                    .map_or(1.0, |weights| weights.values()[at]);
            loss += weight * (free + paid * distance.abs());
            weight * (free + paid * sign)
        })
        .collect();
    let columns = mask.columns();
    let kl = distances.map(f64::abs).masked_mean(mask);
    PolicyResult {
        loss,
        gradient: Matrix::build(mask.rows(), columns, |row, column| {
            gradient[row * columns + column]
        }),
        metrics: Metrics::from([("ppo_kl".to_owned(), kl)]),
    }
}

fn geometric_mean(inputs: &PolicyInputs<'_>, low: f64, high: f64) -> PolicyResult {
    let mask = inputs.mask;
    let mut gradient = Matrix::filled(mask.rows(), mask.columns(), 0.0);
    let mut loss = 0.0;
    let (mut above, mut below, mut count) = (0.0, 0.0, 0.0);
    for row in 0..mask.rows() {
        let trained: Vec<usize> = (0..mask.columns())
            .filter(|&column| mask.row(row)[column] != 0.0)
            .collect();
        if trained.is_empty() {
            continue;
        }
        let length = trained.len() as f64;
        let (mut log_mean, mut advantage_mean, mut correction) = (0.0, 0.0, 0.0);
        let mut free = vec![0.0; mask.columns()];
        for &column in &trained {
            let log = inputs.logprob.row(row)[column] - inputs.old.row(row)[column];
            let advantage = inputs.advantages.row(row)[column];
            let bounded = log.clamp(-low, high);
            // The bound that holds the gain back, never the one that would hide a loss.
            let sign = if advantage == 0.0 {
                0.0
            } else {
                advantage.signum()
            };
            let held = sign * log > sign * bounded;
            log_mean += sign.abs() * if held { bounded } else { log } / length;
            free[column] = if held { 0.0 } else { sign.abs() };
            advantage_mean += advantage / length;
            if let Some(weights) = inputs.correction {
                correction += (weights.row(row)[column] + 1e-10).ln() / length;
            }
            above += f64::from(u8::from(log != bounded && advantage > 0.0));
            below += f64::from(u8::from(log != bounded && advantage < 0.0));
            count += 1.0;
        }
        let own = -advantage_mean * log_mean.exp() * correction.exp() / mask.rows() as f64;
        loss += own;
        for &column in &trained {
            gradient.row_mut(row)[column] = own * free[column] / length;
        }
    }
    let count = f64::max(count, 1.0);
    let kl = inputs
        .old
        .zip(inputs.logprob, |old, new| old - new)
        .masked_mean(mask);
    PolicyResult {
        loss,
        gradient,
        metrics: Metrics::from([
            ("ppo_kl".to_owned(), kl),
            ("pg_clipfrac".to_owned(), above / count),
            ("pg_clipfrac_lower".to_owned(), below / count),
        ]),
    }
}
