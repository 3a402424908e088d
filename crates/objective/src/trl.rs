//! The loss of TRL's GRPO trainer, with its conventions: no clamp on log-ratios, an upper cut
//! (`delta`) besides the clip, averages that count empty rows. For comparison; training uses
//! [`crate::policy_loss`].

use crate::Matrix;
use crate::matrix::mean;
use crate::policy::{Metrics, PolicyResult};

/// Which loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TrlLoss {
    /// Clipped, mean per sequence.
    Grpo,
    /// Clipped, mean per token of the batch.
    Bnpo,
    /// Clipped, divided by sequences times the longest completion.
    DrGrpo,
    /// Clipped, divided by a given number of items.
    Dapo,
    /// Clipped, sum per sequence.
    Luspo,
    /// Constant truncated ratio times log-probability.
    Cispo,
    /// Sigmoid gate.
    Sapo {
        /// Temperature for positive advantages.
        positive: f64,
        /// Temperature for others.
        negative: f64,
    },
    /// Constant gamma weight of the sequence's ratio times log-probability.
    Vespo {
        /// Exponent and rate for advantages of at least 0.
        positive: (f64, f64),
        /// Exponent and rate for others.
        negative: (f64, f64),
    },
}

/// Settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrlSettings {
    /// Which loss.
    pub loss: TrlLoss,
    /// One ratio per sequence instead of per token.
    pub by_sequence: bool,
    /// Clip downwards.
    pub low: f64,
    /// Clip upwards; for CISPO the cap itself.
    pub high: f64,
    /// Upper cut of the unclipped ratio.
    pub delta: Option<f64>,
    /// Price of the KL divergence from the reference.
    pub beta: f64,
    /// Multiply the divergence by the ratio.
    pub unbiased_kl: bool,
    /// Drop sequences of negative advantage that drifted further than this.
    pub off_policy_max: Option<f64>,
    /// Longest completion.
    pub tokens_max: f64,
    /// Items of the batch.
    pub items: f64,
}

/// A batch; advantages are per row.
#[derive(Debug, Clone, Copy)]
pub struct TrlInputs<'a> {
    /// Under the weights being trained.
    pub logprob: &'a Matrix,
    /// Under the weights at the start of the update.
    pub old: &'a Matrix,
    /// Under the reference.
    pub reference: &'a Matrix,
    /// Under the sampling distribution.
    pub rollout: &'a Matrix,
    /// One per row.
    pub advantages: &'a [f64],
    /// Trained tokens.
    pub mask: &'a Matrix,
    /// Importance weights, if corrected.
    pub correction: Option<&'a Matrix>,
}

/// A token's loss as a function of its ratio and of its own log-probability.
struct Token {
    loss: f64,
    by_ratio: f64,
    by_logprob: f64,
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The weight of VESPO: `exp(rate) w^exponent exp(-rate w)`, w the sequence's ratio.
fn gamma_weight(settings: (f64, f64), inputs: &TrlInputs<'_>, row: usize) -> f64 {
    let lowest = 1e-8_f64.ln();
    let mut log: f64 = (0..inputs.mask.columns())
        .map(|column| {
            let ratio = inputs.logprob.row(row)[column] - inputs.old.row(row)[column];
            ratio.clamp(-20.0, 20.0) * inputs.mask.row(row)[column]
        })
        .sum();
    if let Some(weights) = inputs.correction {
        // The reference sums over padding too, where a weight of 0 counts as the lowest.
        let logs = weights
            .row(row)
            .iter()
            .map(|weight| weight.ln().clamp(lowest, 20.0));
        log += logs.sum::<f64>();
    }
    let log = log.clamp(lowest, 20.0);
    let (exponent, rate) = (settings.0, settings.1.max(1e-4));
    let weight = (rate + exponent * log - rate * log.exp()).exp();
    if weight.is_finite() { weight } else { 0.0 }
}

/// Evaluates the loss.
#[must_use]
pub fn trl_loss(settings: &TrlSettings, inputs: &TrlInputs<'_>) -> PolicyResult {
    let mask = inputs.mask;
    let counts: Vec<f64> = mask
        .counts()
        .into_iter()
        .map(|count| count as f64)
        .collect();
    let total: f64 = counts.iter().sum();
    let rows = mask.rows() as f64;
    let distances = inputs.logprob.zip(inputs.old, |new, old| new - old);
    let means = distances.masked_row_means(mask);
    let mut gradient = Matrix::filled(mask.rows(), mask.columns(), 0.0);
    let mut loss = 0.0;
    let mut kls = Matrix::filled(mask.rows(), mask.columns(), 0.0);
    let mut ratios = kls.clone();
    let mut gammas = Vec::new();
    for row in 0..mask.rows() {
        let advantage = inputs.advantages[row];
        let drift = inputs
            .rollout
            .zip(inputs.logprob, |rollout, new| rollout - new)
            .masked_row_means(mask)[row];
        let dropped = settings
            .off_policy_max
            .is_some_and(|most| advantage < 0.0 && drift > most);
        let gamma = match settings.loss {
            TrlLoss::Vespo { positive, negative } => {
                let own = if advantage >= 0.0 { positive } else { negative };
                gamma_weight(own, inputs, row)
            }
            _ => 0.0,
        };
        gammas.push(gamma);
        let weight = match settings.loss {
            TrlLoss::Grpo | TrlLoss::Sapo { .. } => 1.0 / (rows * counts[row].max(1.0)),
            TrlLoss::Bnpo => 1.0 / total.max(1.0),
            TrlLoss::DrGrpo => 1.0 / (rows * settings.tokens_max),
            TrlLoss::Dapo | TrlLoss::Cispo | TrlLoss::Vespo { .. } => 1.0 / settings.items.max(1.0),
            TrlLoss::Luspo => 1.0 / rows,
        };
        // Gradient that reaches every token of the row through a shared ratio.
        let mut shared = 0.0;
        for column in 0..mask.columns() {
            let new = inputs.logprob.row(row)[column];
            let ratio = if settings.by_sequence {
                means[row].exp()
            } else {
                distances.row(row)[column].exp()
            };
            let mut token = token(settings, ratio, advantage, new, gamma);
            let corrected = !matches!(settings.loss, TrlLoss::Vespo { .. });
            let factor = match inputs.correction {
                Some(weights) if corrected => weights.row(row)[column],
                _ => 1.0,
            } * if dropped { 0.0 } else { 1.0 };
            token.loss *= factor;
            token.by_ratio *= factor;
            token.by_logprob *= factor;
            ratios.row_mut(row)[column] = settings.delta.map_or(ratio, |delta| ratio.min(delta));
            if settings.beta != 0.0 {
                let gap = inputs.reference.row(row)[column] - new;
                let kl = gap.exp() - gap - 1.0;
                let scale = if settings.unbiased_kl { ratio } else { 1.0 };
                kls.row_mut(row)[column] = kl * scale;
                token.loss += settings.beta * kl * scale;
                token.by_logprob += settings.beta * (1.0 - gap.exp()) * scale;
                if settings.unbiased_kl {
                    token.by_ratio += settings.beta * kl;
                }
            }
            if mask.row(row)[column] == 0.0 {
                continue;
            }
            loss += weight * token.loss;
            gradient.row_mut(row)[column] += weight * token.by_logprob;
            if settings.by_sequence {
                shared += weight * token.by_ratio * ratio;
            } else {
                gradient.row_mut(row)[column] += weight * token.by_ratio * ratio;
            }
        }
        if shared != 0.0 {
            for column in 0..mask.columns() {
                gradient.row_mut(row)[column] +=
                    shared * mask.row(row)[column] / counts[row].max(1.0);
            }
        }
    }
    PolicyResult {
        loss,
        gradient,
        metrics: metrics(settings, inputs, &kls, &ratios, &gammas),
    }
}

fn token(settings: &TrlSettings, ratio: f64, advantage: f64, new: f64, gamma: f64) -> Token {
    match settings.loss {
        TrlLoss::Cispo => {
            let slope = -ratio.min(settings.high) * advantage;
            Token {
                loss: slope * new,
                by_ratio: 0.0,
                by_logprob: slope,
            }
        }
        TrlLoss::Vespo { .. } => Token {
            loss: -gamma * advantage * new,
            by_ratio: 0.0,
            by_logprob: -gamma * advantage,
        },
        TrlLoss::Sapo { positive, negative } => {
            let tau = if advantage > 0.0 { positive } else { negative };
            let gate = sigmoid(tau * (ratio - 1.0));
            Token {
                loss: -gate * 4.0 / tau * advantage,
                by_ratio: -4.0 * gate * (1.0 - gate) * advantage,
                by_logprob: 0.0,
            }
        }
        TrlLoss::Grpo | TrlLoss::Bnpo | TrlLoss::DrGrpo | TrlLoss::Dapo | TrlLoss::Luspo => {
            let cut = settings.delta.map_or(ratio, |delta| ratio.min(delta));
            let clipped = ratio.clamp(1.0 - settings.low, 1.0 + settings.high);
            let (free, held) = (cut * advantage, clipped * advantage);
            let moves = if free <= held {
                cut == ratio
            } else {
                clipped == ratio
            };
            Token {
                loss: -free.min(held),
                by_ratio: if moves { -advantage } else { 0.0 },
                by_logprob: 0.0,
            }
        }
    }
}

fn metrics(
    settings: &TrlSettings,
    inputs: &TrlInputs<'_>,
    kls: &Matrix,
    ratios: &Matrix,
    gammas: &[f64],
) -> Metrics {
    let mask = inputs.mask;
    let mut metrics = Metrics::new();
    if settings.beta != 0.0 {
        metrics.insert("kl".to_owned(), kls.masked_mean(mask));
    }
    let hits = |hit: &dyn Fn(f64, f64) -> bool| {
        Matrix::build(mask.rows(), mask.columns(), |row, column| {
            f64::from(u8::from(hit(
                ratios.row(row)[column],
                inputs.advantages[row],
            )))
        })
    };
    // One value per sequence when the ratio is one per sequence: then rows count equally.
    let by_row = |hits: &Matrix| -> Vec<f64> {
        if settings.by_sequence {
            (0..hits.rows())
                .map(|row| hits.row(row).first().copied().unwrap_or(0.0))
                .collect()
        } else {
            let counts = mask.counts();
            let means = hits.masked_row_means(mask).into_iter().zip(counts);
            means
                .filter(|(_, count)| *count > 0)
                .map(|(mean, _)| mean)
                .collect()
        }
    };
    let overall = |hits: &Matrix| {
        if settings.by_sequence {
            mean(by_row(hits).into_iter())
        } else {
            hits.masked_mean(mask)
        }
    };
    match settings.loss {
        TrlLoss::Grpo | TrlLoss::Bnpo | TrlLoss::DrGrpo | TrlLoss::Dapo | TrlLoss::Luspo => {
            let low = hits(&|ratio, advantage| ratio < 1.0 - settings.low && advantage < 0.0);
            let high = hits(&|ratio, advantage| ratio > 1.0 + settings.high && advantage > 0.0);
            let either = low.zip(&high, f64::max);
            for (name, value) in [
                ("low_mean", overall(&low)),
                ("high_mean", overall(&high)),
                ("region_mean", overall(&either)),
                (
                    "low_min",
                    by_row(&low).into_iter().fold(f64::INFINITY, f64::min),
                ),
                (
                    "high_max",
                    by_row(&high).into_iter().fold(f64::NEG_INFINITY, f64::max),
                ),
            ] {
                metrics.insert(format!("clip_ratio/{name}"), value);
            }
        }
        TrlLoss::Cispo => {
            let cut = hits(&|ratio, advantage| ratio > settings.high && advantage > 0.0);
            metrics.insert("cispo_clip_ratio".to_owned(), overall(&cut));
        }
        TrlLoss::Vespo { .. } => {
            metrics.insert(
                "vespo/phi_seq_mean".to_owned(),
                mean(gammas.iter().copied()),
            );
        }
        TrlLoss::Sapo { .. } => {}
    }
    metrics
}
