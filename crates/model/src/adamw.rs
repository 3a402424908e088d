//! AdamW (Loshchilov and Hutter, arXiv 1711.05101) in place over the flat buffer.

use serde::{Deserialize, Serialize};

use crate::weights::Weights;

/// Settings of the optimiser. The learning rate comes with each step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWSettings {
    /// Decay of the mean of gradients.
    pub beta1: f32,
    /// Decay of the mean of squared gradients.
    pub beta2: f32,
    /// Added to the root.
    pub epsilon: f32,
    /// Decay of matrices; norms and biases do not decay.
    pub weight_decay: f32,
    /// Gradients are scaled down to this norm. 0 switches clipping off.
    pub gradient_norm_max: f32,
}

impl Default for AdamWSettings {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.98,
            epsilon: 1e-8,
            weight_decay: 0.0,
            gradient_norm_max: 1.0,
        }
    }
}

/// The optimiser's state.
#[derive(Debug, Clone)]
pub struct AdamW {
    /// Settings.
    pub settings: AdamWSettings,
    /// Steps made.
    pub steps: u64,
    /// Means of gradients, in the order of the flat buffer.
    pub mean: Vec<f32>,
    /// Means of squared gradients.
    pub square: Vec<f32>,
}

/// Euclidean norm of a gradient.
#[must_use]
pub fn norm(gradient: &[f32]) -> f64 {
    gradient
        .chunks(4096)
        .map(|part| f64::from(crate::kernel::dot(part, part)))
        .sum::<f64>()
        .sqrt()
}

impl AdamW {
    /// A fresh state for `len` parameters.
    #[must_use]
    pub fn new(settings: AdamWSettings, len: usize) -> Self {
        Self {
            settings,
            steps: 0,
            mean: vec![0.0; len],
            square: vec![0.0; len],
        }
    }

    /// One step. Returns the norm of the gradient before clipping; a norm that is not finite
    /// leaves weights and state untouched, and the caller must say so.
    pub fn step(&mut self, weights: &mut Weights, gradient: &[f32], rate: f32) -> f64 {
        let Weights { layout, data, .. } = weights;
        let tensors = layout.tensors.iter();
        let parts = tensors.map(|tensor| (tensor.range.clone(), tensor.decays));
        self.step_parts(data, gradient, rate, parts)
    }

    /// The same for parameters outside of [`Weights`], none of which decays.
    pub fn step_plain(&mut self, data: &mut [f32], gradient: &[f32], rate: f32) -> f64 {
        let all = 0..data.len();
        self.step_parts(data, gradient, rate, std::iter::once((all, false)))
    }

    fn step_parts(
        &mut self,
        data: &mut [f32],
        gradient: &[f32],
        rate: f32,
        parts: impl Iterator<Item = (std::ops::Range<usize>, bool)>,
    ) -> f64 {
        let norm = norm(gradient);
        if !norm.is_finite() {
            return norm;
        }
        self.steps += 1;
        let s = &self.settings;
        let limit = f64::from(s.gradient_norm_max);
        let scale = if limit > 0.0 && norm > limit {
            (limit / norm) as f32
        } else {
            1.0
        };
        let exponent = i32::try_from(self.steps).unwrap_or(i32::MAX);
        let correction1 = 1.0 - s.beta1.powi(exponent);
        let correction2 = 1.0 - s.beta2.powi(exponent);
        let step_size = rate / correction1;
        let root_scale = 1.0 / correction2.sqrt();
        for (range, decays) in parts {
            let keep = if decays {
                1.0 - rate * s.weight_decay
            } else {
                1.0
            };
            let parameters = data[range.clone()].iter_mut();
            let state = self.mean[range.clone()]
                .iter_mut()
                .zip(&mut self.square[range.clone()]);
            for ((parameter, (mean, square)), g) in parameters.zip(state).zip(&gradient[range]) {
                let g = g * scale;
                *mean = s.beta1 * *mean + (1.0 - s.beta1) * g;
                *square = s.beta2 * *square + (1.0 - s.beta2) * g * g;
                *parameter = *parameter * keep
                    - step_size * *mean / (square.sqrt() * root_scale + s.epsilon);
            }
        }
        norm
    }
}
