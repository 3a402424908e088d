//! Correcting for the difference between the policy that drew the tokens and the one that is
//! trained: importance weights, and rejection of tokens and sequences that are too far off.

use crate::Matrix;
use crate::matrix::mean;
use crate::policy::Metrics;
use crate::token::LOG_RATIO_MAX;

/// Over what a ratio is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Each token has its own.
    Token,
    /// The product over the sequence, on each of its tokens.
    Sequence,
    /// The geometric mean over the sequence, on each of its tokens: does not grow with length.
    SequenceMean,
}

/// What happens to weights outside the bounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bounds {
    /// Weights above are cut to this (truncated importance sampling).
    Truncate(f64),
    /// Weights outside `low..=high` become 0.
    Zero {
        /// Lower bound.
        low: f64,
        /// Upper bound.
        high: f64,
    },
}

impl Bounds {
    fn high(self) -> f64 {
        match self {
            Self::Truncate(high) | Self::Zero { high, .. } => high,
        }
    }

    /// The lower bound; for truncation, which has none, the one that diagnostics report against.
    fn low(self) -> f64 {
        match self {
            Self::Truncate(high) => 1.0 / high,
            Self::Zero { low, .. } => low,
        }
    }

    fn apply(self, weight: f64) -> f64 {
        match self {
            Self::Truncate(high) => weight.min(high),
            Self::Zero { low, high } if weight < low || weight > high => 0.0,
            Self::Zero { .. } => weight,
        }
    }
}

/// Why there are no weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CorrectionError {
    /// All weights of trained tokens fell outside the bounds.
    #[error("every weight is zero")]
    EveryWeightZero,
}

/// Importance weights of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Correction {
    /// One weight per token, 0 outside the mask. Constants for the gradient.
    pub weights: Matrix,
    /// Diagnostics, names starting with `rollout_is_`.
    pub metrics: Metrics,
}

fn share(values: &[f64], hit: impl Fn(f64) -> bool) -> f64 {
    mean(values.iter().map(|&value| f64::from(u8::from(hit(value)))))
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

fn smallest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn deviation(values: &[f64]) -> f64 {
    crate::group::mean_std(values).1
}

/// Standard deviation about the mean, of values inside `low..=high`. The reference counts
/// 1e-8 values too many, which shows when all values are equal, so this does too.
fn bounded_deviation(values: &[f64], low: f64, high: f64) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let count = values.len() as f64 + 1e-8;
    let bounded = values.iter().map(|value| value.max(low).min(high));
    let center = bounded.clone().sum::<f64>() / count;
    let squares = bounded.map(|value| value * value).sum::<f64>() / count;
    (squares - center * center).max(0.0).sqrt()
}

fn trained(values: &Matrix, mask: &Matrix) -> Vec<f64> {
    values
        .values()
        .iter()
        .zip(mask.values())
        .filter(|(_, mask)| **mask != 0.0)
        .map(|(value, _)| *value)
        .collect()
}

/// Importance weights `exp(log_ratio)`, where `log_ratio` is trained minus rollout
/// log-probability, clamped to ±20. `normalise` divides by the mean weight of the batch.
///
/// # Errors
/// [`CorrectionError::EveryWeightZero`]: nothing of the batch could be trained; check whether the
/// rollout log-probabilities belong to these tokens and weights.
pub fn correction_weights(
    log_ratio: &Matrix,
    mask: &Matrix,
    level: Level,
    bounds: Bounds,
    normalise: bool,
) -> Result<Correction, CorrectionError> {
    let sums = match level {
        Level::SequenceMean => log_ratio.masked_row_means(mask),
        Level::Token | Level::Sequence => log_ratio.masked_row_sums(mask),
    };
    let raw = Matrix::build(mask.rows(), mask.columns(), |row, column| {
        if mask.row(row)[column] == 0.0 {
            return 0.0;
        }
        let log = match level {
            Level::Token => log_ratio.row(row)[column],
            Level::Sequence | Level::SequenceMean => sums[row],
        };
        log.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    });
    let weights = raw
        .map(|weight| bounds.apply(weight))
        .zip(mask, |weight, mask| weight * mask);
    if trained(&weights, mask).iter().all(|&weight| weight == 0.0) {
        return Err(CorrectionError::EveryWeightZero);
    }
    let mut metrics = weight_metrics(&raw, &weights, &sums, mask, level, bounds);
    let mut result = weights;
    if normalise {
        let center = match level {
            Level::Token => result.masked_mean(mask),
            Level::Sequence | Level::SequenceMean => {
                let means = result.masked_row_means(mask);
                let counts = mask.counts();
                mean(
                    means
                        .into_iter()
                        .zip(counts)
                        .filter(|(_, count)| *count > 0)
                        .map(|(mean, _)| mean),
                )
            }
        };
        let factor = if center > 1e-8 { center } else { 1.0 };
        result = result.map(|weight| weight / factor);
        metrics.insert("rollout_is_batch_norm_factor".to_owned(), factor);
    }
    Ok(Correction {
        weights: result,
        metrics,
    })
}

fn weight_metrics(
    raw: &Matrix,
    weights: &Matrix,
    sums: &[f64],
    mask: &Matrix,
    level: Level,
    bounds: Bounds,
) -> Metrics {
    let mut metrics = Metrics::new();
    let mut put = |name: &str, value: f64| {
        metrics.insert(format!("rollout_is_{name}"), value);
    };
    let (high, low) = (bounds.high(), bounds.low());
    let own = trained(weights, mask);
    let own_raw = trained(raw, mask);
    put("mean", mean(own.iter().copied()));
    match level {
        // The product of a whole sequence: its largest and smallest before any bound.
        Level::Sequence | Level::SequenceMean => {
            put("max", largest(sums).min(LOG_RATIO_MAX).exp());
            put("min", smallest(sums).exp());
            put("ratio_fraction_high", share(sums, |sum| sum > high.ln()));
            put("ratio_fraction_low", share(sums, |sum| sum < low.ln()));
        }
        Level::Token => {
            put("max", largest(&own));
            put("min", smallest(&own));
            put(
                "ratio_fraction_high",
                share(&own_raw, |weight| weight > high),
            );
            put("ratio_fraction_low", share(&own_raw, |weight| weight < low));
        }
    }
    let bounded: Vec<f64> = own.iter().map(|weight| weight.clamp(0.0, high)).collect();
    let center = mean(bounded.iter().copied());
    let squares = mean(bounded.iter().map(|weight| weight * weight));
    put("std", bounded_deviation(&own, 0.0, high));
    // How many tokens an unweighted sample would need for the same spread, as a share.
    put("eff_sample_size", 1.0 / (squares / (center + 1e-8).powi(2)));
    let means = weights.masked_row_means(mask);
    put("seq_mean", mean(means.iter().copied()));
    put("seq_std", deviation(&means));
    put("seq_max", largest(&means));
    put("seq_min", smallest(&means));
    put(
        "seq_max_deviation",
        means
            .iter()
            .map(|mean| (mean - 1.0).abs())
            .fold(0.0, f64::max),
    );
    let raw_means = raw.masked_row_means(mask);
    put("seq_fraction_high", share(&raw_means, |mean| mean > high));
    put("seq_fraction_low", share(&raw_means, |mean| mean < low));
    if let Bounds::Zero { low, high } = bounds {
        put(
            "oob_ratio",
            share(&own_raw, |weight| weight < low || weight > high),
        );
    }
    metrics
}

/// How a divergence is gathered before it is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gather {
    /// Each token by itself.
    Token,
    /// Sum over the sequence; all of it is rejected.
    Sum,
    /// Mean over the sequence; all of it is rejected.
    Mean,
    /// Largest of the sequence; all of it is rejected.
    Max,
}

/// A divergence of one token. `d` is trained minus rollout log-probability, clamped to ±20.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Divergence {
    /// `-d`. Its bounds are *ratios*, compared in log space, so they act on the inverse ratio.
    K1,
    /// `d² / 2`.
    K2,
    /// `exp(d) - 1 - d`.
    K3,
}

/// One condition; what fails it is rejected.
#[derive(Debug, Clone, PartialEq)]
pub struct Rejection {
    /// Its name in the metrics, e.g. `token_k1`.
    pub name: String,
    /// How the divergence is gathered.
    pub gather: Gather,
    /// Which divergence.
    pub divergence: Divergence,
    /// Lower bound, for [`Divergence::K1`] only.
    pub low: Option<f64>,
    /// Upper bound.
    pub high: f64,
}

/// The mask that remains when all conditions are applied, and diagnostics, names starting with
/// `rollout_rs_`.
#[must_use]
pub fn rejection_mask(
    log_ratio: &Matrix,
    mask: &Matrix,
    conditions: &[Rejection],
) -> (Matrix, Metrics) {
    let mut metrics = Metrics::new();
    let mut kept = mask.clone();
    for condition in conditions {
        let tokens = log_ratio.map(|log| {
            let log = log.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX);
            match condition.divergence {
                Divergence::K1 => -log,
                Divergence::K2 => 0.5 * log * log,
                Divergence::K3 => log.exp() - 1.0 - log,
            }
        });
        let rows: Option<Vec<f64>> = match condition.gather {
            Gather::Token => None,
            Gather::Sum => Some(tokens.masked_row_sums(mask)),
            Gather::Mean => Some(tokens.masked_row_means(mask)),
            Gather::Max => Some(
                (0..mask.rows())
                    .map(|row| {
                        let own = tokens.row(row).iter().zip(mask.row(row));
                        own.filter(|(_, mask)| **mask != 0.0)
                            .map(|(value, _)| *value)
                            .reduce(f64::max)
                            .unwrap_or(0.0)
                    })
                    .collect(),
            ),
        };
        let statistic = match &rows {
            None => tokens,
            Some(rows) => Matrix::build(mask.rows(), mask.columns(), |row, _| rows[row]),
        };
        let (low, high) = match condition.divergence {
            Divergence::K1 => (
                Some(condition.low.unwrap_or(1.0 / condition.high).ln()),
                condition.high.ln(),
            ),
            _ => (None, condition.high),
        };
        let passes = |value: f64| low.is_none_or(|low| value >= low) && value <= high;
        let kept_now = statistic.map(|value| f64::from(u8::from(passes(value))));
        rejection_metrics(
            &mut metrics,
            &condition.name,
            &statistic,
            rows,
            mask,
            low,
            high,
        );
        let prefix = format!("rollout_rs_{}", condition.name);
        metrics.insert(
            format!("{prefix}_masked_fraction"),
            share(&trained(&kept_now, mask), |kept| kept == 0.0),
        );
        let sequences: Vec<f64> = (0..mask.rows())
            .filter(|&row| mask.row(row).iter().any(|&mask| mask != 0.0))
            .map(|row| fails(&kept_now, mask, row))
            .collect();
        metrics.insert(
            format!("{prefix}_seq_masked_fraction"),
            mean(sequences.into_iter()),
        );
        kept = kept.zip(&kept_now, |kept, now| kept * now);
    }
    metrics.insert(
        "rollout_rs_masked_fraction".to_owned(),
        share(&trained(&kept, mask), |kept| kept == 0.0),
    );
    metrics.insert(
        "rollout_rs_seq_masked_fraction".to_owned(),
        mean((0..mask.rows()).map(|row| fails(&kept, mask, row))),
    );
    (kept, metrics)
}

/// 1 when a trained token of the row is rejected.
fn fails(kept: &Matrix, mask: &Matrix, row: usize) -> f64 {
    let rejected = kept
        .row(row)
        .iter()
        .zip(mask.row(row))
        .any(|(&kept, &mask)| mask != 0.0 && kept == 0.0);
    f64::from(u8::from(rejected))
}

fn rejection_metrics(
    metrics: &mut Metrics,
    name: &str,
    statistic: &Matrix,
    rows: Option<Vec<f64>>,
    mask: &Matrix,
    low: Option<f64>,
    high: f64,
) {
    let mut put = |field: &str, value: f64| {
        metrics.insert(format!("rollout_rs_{name}_{field}"), value);
    };
    let counts = mask.counts();
    let by_sequence = rows.is_some();
    let sequences: Vec<f64> = rows
        .unwrap_or_else(|| statistic.masked_row_means(mask))
        .into_iter()
        .zip(counts)
        .filter(|(_, count)| *count > 0)
        .map(|(value, _)| value)
        .collect();
    let tokens = trained(statistic, mask);
    let extremes: &[f64] = if by_sequence { &sequences } else { &tokens };
    let below = |value: f64| low.is_some_and(|low| value < low);
    put("mean", mean(tokens.iter().copied()));
    put("max", largest(extremes));
    put("min", smallest(extremes));
    put("fraction_high", share(extremes, |value| value > high));
    put("fraction_low", share(extremes, below));
    put("std", bounded_deviation(&tokens, low.unwrap_or(0.0), high));
    put("seq_mean", mean(sequences.iter().copied()));
    put("seq_std", deviation(&sequences));
    put("seq_max", largest(&sequences));
    put("seq_min", smallest(&sequences));
    put(
        "seq_max_deviation",
        sequences
            .iter()
            .map(|value| value.abs())
            .fold(0.0, f64::max),
    );
    put("seq_fraction_high", share(&sequences, |value| value > high));
    if low.is_some() {
        put("seq_fraction_low", share(&sequences, below));
    }
}

/// How far the trained policy is from the one that drew the tokens. `old` is the trained policy's
/// log-probability, `rollout` that of the sampling distribution.
#[must_use]
pub fn off_policy_metrics(old: &Matrix, rollout: &Matrix, mask: &Matrix) -> Metrics {
    let log_ratio = old.zip(rollout, |old, rollout| old - rollout);
    let tokens = trained(&log_ratio, mask);
    let means = |matrix: &Matrix| matrix.masked_row_means(mask);
    let (of_old, of_rollout) = (means(old), means(rollout));
    let perplexity = |means: &[f64]| mean(means.iter().map(|mean| (-mean).exp()));
    let log_perplexity = |means: &[f64]| mean(means.iter().map(|mean| -mean));
    let differences: Vec<f64> = of_rollout
        .iter()
        .zip(&of_old)
        .map(|(rollout, old)| rollout - old)
        .collect();
    let sums = log_ratio.masked_row_sums(mask);
    let squared = |log: f64| (2.0 * log.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)).exp();
    [
        ("training_ppl", perplexity(&of_old)),
        ("training_log_ppl", log_perplexity(&of_old)),
        ("kl", mean(tokens.iter().map(|log| -log))),
        (
            "k3_kl",
            mean(tokens.iter().map(|log| log.exp() - log - 1.0)),
        ),
        ("rollout_ppl", perplexity(&of_rollout)),
        ("rollout_log_ppl", log_perplexity(&of_rollout)),
        ("log_ppl_diff", mean(differences.iter().copied())),
        (
            "log_ppl_abs_diff",
            mean(differences.iter().map(|d| d.abs())),
        ),
        ("log_ppl_diff_max", largest(&differences)),
        ("log_ppl_diff_min", smallest(&differences)),
        ("ppl_ratio", mean(differences.iter().map(|d| d.exp()))),
        (
            "chi2_token",
            mean(tokens.iter().map(|&log| squared(log))) - 1.0,
        ),
        ("chi2_seq", mean(sums.iter().map(|&sum| squared(sum))) - 1.0),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}
