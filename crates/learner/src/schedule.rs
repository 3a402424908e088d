//! Learning rate by step.

use serde::{Deserialize, Serialize};

/// What happens after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// The peak for ever.
    Constant,
    /// Half a cosine down to `floor` times the peak at the last step.
    Cosine,
    /// A line down to `floor` times the peak at the last step.
    Linear,
}

/// Warm-up in a line from 0, then a decay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Schedule {
    /// The highest rate.
    pub peak: f32,
    /// Steps until the peak.
    pub warmup_steps: u64,
    /// After warm-up.
    pub decay: Decay,
    /// Lowest rate, as a part of the peak.
    pub floor: f32,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            peak: 1e-4,
            warmup_steps: 0,
            decay: Decay::Constant,
            floor: 0.1,
        }
    }
}

impl Schedule {
    /// The rate of step `step` (from 0) of `steps`.
    #[must_use]
    pub fn rate(&self, step: u64, steps: u64) -> f32 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f32 / self.warmup_steps as f32;
        }
        let rest = steps.saturating_sub(self.warmup_steps).max(1);
        let part = ((step - self.warmup_steps) as f32 / rest as f32).min(1.0);
        let shape = match self.decay {
            Decay::Constant => return self.peak,
            Decay::Cosine => 0.5 * (1.0 + (std::f32::consts::PI * part).cos()),
            Decay::Linear => 1.0 - part,
        };
        self.peak * (self.floor + (1.0 - self.floor) * shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warms_up_then_decays_to_the_floor() {
        let schedule = Schedule {
            peak: 1.0,
            warmup_steps: 4,
            decay: Decay::Cosine,
            floor: 0.1,
        };
        let rates: Vec<f32> = (0..=24).map(|step| schedule.rate(step, 24)).collect();
        assert_eq!(rates[..4], [0.25, 0.5, 0.75, 1.0]);
        assert!(rates[4..].windows(2).all(|pair| pair[1] <= pair[0]));
        assert!((rates[14] - 0.55).abs() < 1e-6 && (rates[24] - 0.1).abs() < 1e-6);
        let linear = Schedule {
            decay: Decay::Linear,
            ..schedule.clone()
        };
        assert!((linear.rate(14, 24) - 0.55).abs() < 1e-6);
        assert_eq!(
            Schedule {
                decay: Decay::Constant,
                ..schedule
            }
            .rate(1000, 24),
            1.0
        );
    }
}
