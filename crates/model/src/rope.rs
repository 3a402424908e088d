//! The rotary embedding: tables of cosines and sines, and the ways in which longer contexts than
//! a model was trained on are squeezed into them.

use serde::{Deserialize, Serialize};

use crate::config::Config;

fn default_beta_fast() -> f64 {
    32.0
}

fn default_beta_slow() -> f64 {
    1.0
}

fn default_truncate() -> bool {
    true
}

/// `rope_scaling` of `config.json`. Names and defaults are those that Hugging Face readers expect.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase", deny_unknown_fields)]
pub enum RopeScaling {
    /// Positions divided by `factor` (position interpolation, arXiv 2306.15595).
    Linear {
        /// How many times longer the context becomes.
        factor: f64,
    },
    /// Fast frequencies stay, slow ones are divided by `factor`, with a ramp between (YaRN, arXiv
    /// 2309.00071).
    Yarn {
        /// How many times longer the context becomes.
        factor: f64,
        /// The context that the model was trained on.
        original_max_position_embeddings: usize,
        /// Cosines and sines are multiplied by this; `0.1 ln(factor) + 1` when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
        /// Frequencies that turn more often than this over the original context stay.
        #[serde(default = "default_beta_fast")]
        beta_fast: f64,
        /// Frequencies that turn less often than this are divided.
        #[serde(default = "default_beta_slow")]
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        #[serde(default = "default_truncate")]
        truncate: bool,
    },
    /// Llama 3.1's ramp over wavelengths.
    Llama3 {
        /// How many times longer the context becomes.
        factor: f64,
        /// Wavelengths above the original context divided by this are divided by `factor`.
        low_freq_factor: f64,
        /// Wavelengths below the original context divided by this stay.
        high_freq_factor: f64,
        /// The context that the model was trained on.
        original_max_position_embeddings: usize,
    },
}

impl RopeScaling {
    /// Checks ranges.
    ///
    /// # Errors
    /// A sentence naming the field, what was expected and what was found.
    pub(crate) fn check(&self) -> Result<(), String> {
        let (factor, original) = match *self {
            Self::Linear { factor } => (factor, 1),
            Self::Yarn {
                factor,
                original_max_position_embeddings: original,
                ..
            }
            | Self::Llama3 {
                factor,
                original_max_position_embeddings: original,
                ..
            } => (factor, original),
        };
        if !(factor.is_finite() && factor >= 1.0) {
            return Err(format!(
                "rope_scaling.factor: expected a number of at least 1, found {factor}"
            ));
        }
        if original == 0 {
            return Err(
                "rope_scaling.original_max_position_embeddings: expected a positive number, found 0"
                    .into(),
            );
        }
        if let Self::Llama3 {
            low_freq_factor: low,
            high_freq_factor: high,
            ..
        } = *self
            && !(low > 0.0 && high > low)
        {
            return Err(format!(
                "rope_scaling: expected 0 < low_freq_factor < high_freq_factor, found {low} and {high}"
            ));
        }
        Ok(())
    }

    /// The frequencies after scaling, and the factor for cosines and sines.
    fn apply(&self, plain: &[f64], theta: f64) -> (Vec<f64>, f64) {
        match *self {
            Self::Linear { factor } => (plain.iter().map(|f| f / factor).collect(), 1.0),
            Self::Yarn {
                factor,
                original_max_position_embeddings,
                attention_factor,
                beta_fast,
                beta_slow,
                truncate,
            } => {
                let (half, width) = (plain.len(), 2.0 * plain.len() as f64);
                let context = original_max_position_embeddings as f64;
                // The dimension whose frequency turns so many times over the original context.
                let dimension = |turns: f64| {
                    width * (context / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
                };
                let (mut low, mut high) = (dimension(beta_fast), dimension(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(width - 1.0));
                if low == high {
                    high += 0.001;
                }
                let scaled = (0..half).map(|i| {
                    let slow = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    plain[i] / factor * slow + plain[i] * (1.0 - slow)
                });
                let by_default = if factor <= 1.0 {
                    1.0
                } else {
                    0.1 * factor.ln() + 1.0
                };
                (scaled.collect(), attention_factor.unwrap_or(by_default))
            }
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings,
            } => {
                let context = original_max_position_embeddings as f64;
                let scaled = plain.iter().map(|&frequency| {
                    let turns = context * frequency / std::f64::consts::TAU;
                    let stays = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    frequency / factor * (1.0 - stays) + frequency * stays
                });
                (scaled.collect(), 1.0)
            }
        }
    }
}

/// Cosines and sines of the rotary embedding, `half` of each per position.
#[derive(Debug, Clone)]
pub struct Rope {
    half: usize,
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl Rope {
    /// Tables of a model for positions below `positions`.
    #[must_use]
    pub fn of(config: &Config, positions: usize) -> Self {
        let (width, theta) = (config.head_dim, f64::from(config.rope_theta));
        let plain: Vec<f64> = (0..width / 2)
            .map(|i| 1.0 / theta.powf(2.0 * i as f64 / width as f64))
            .collect();
        match &config.rope_scaling {
            None => Self::tables(positions, &plain, 1.0),
            Some(scaling) => {
                let (frequencies, scale) = scaling.apply(&plain, theta);
                Self::tables(positions, &frequencies, scale)
            }
        }
    }

    fn tables(positions: usize, frequencies: &[f64], scale: f64) -> Self {
        let half = frequencies.len();
        let (mut cosines, mut sines) = (
            Vec::with_capacity(positions * half),
            Vec::with_capacity(positions * half),
        );
        for position in 0..positions {
            for frequency in frequencies {
                let angle = position as f64 * frequency;
                cosines.push((scale * angle.cos()) as f32);
                sines.push((scale * angle.sin()) as f32);
            }
        }
        Self {
            half,
            cosines,
            sines,
        }
    }

    /// Turns every head of a row in place (the halves are paired, as Hugging Face does); `back`
    /// applies the transpose, which is the backward pass.
    pub fn turn(&self, row: &mut [f32], position: usize, back: bool) {
        let half = self.half;
        let cosines = &self.cosines[position * half..(position + 1) * half];
        let sines = &self.sines[position * half..(position + 1) * half];
        for head in row.chunks_exact_mut(2 * half) {
            let (left, right) = head.split_at_mut(half);
            for i in 0..half {
                let (a, b) = (left[i], right[i]);
                let sine = if back { -sines[i] } else { sines[i] };
                left[i] = a * cosines[i] - b * sine;
                right[i] = b * cosines[i] + a * sine;
            }
        }
    }
}
