//! 95 % intervals.

use serde::{Deserialize, Serialize};

use crate::special::{NORMAL_975, student_t_975};

/// A two-sided 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Interval {
    /// Half its width.
    #[must_use]
    pub fn half_width(&self) -> f64 {
        (self.high - self.low) / 2.0
    }
}

/// Wilson's score interval of a share. The whole range when there are no trials.
#[must_use]
pub fn wilson(successes: f64, trials: f64) -> Interval {
    if trials <= 0.0 {
        return Interval {
            low: 0.0,
            high: 1.0,
        };
    }
    let z = NORMAL_975;
    let share = successes / trials;
    let scale = 1.0 + z * z / trials;
    let center = (share + z * z / (2.0 * trials)) / scale;
    let spread = z / scale
        * (share * (1.0 - share) / trials + z * z / (4.0 * trials * trials))
            .max(0.0)
            .sqrt();
    // Rounding must not push the estimate out of its own interval.
    Interval {
        low: (center - spread).clamp(0.0, share),
        high: (center + spread).clamp(share, 1.0),
    }
}

/// Mean and unbiased standard deviation. Summed in sorted order, so that the order of the values
/// does not matter to the last digit.
pub(crate) fn mean_deviation(values: &[f64]) -> (f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len() as f64;
    let mean = sorted.iter().sum::<f64>() / count;
    if sorted.len() < 2 || sorted.first() == sorted.last() {
        return (
            sorted
                .first()
                .copied()
                .filter(|_| sorted.len() > 1)
                .unwrap_or(mean),
            0.0,
        );
    }
    let squares: f64 = sorted.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0)).sqrt())
}

/// Student's interval of a mean, cut to a range. The whole range for fewer than two values.
pub(crate) fn student(values: &[f64], low: f64, high: f64) -> Interval {
    if values.len() < 2 {
        return Interval { low, high };
    }
    let (mean, deviation) = mean_deviation(values);
    let half = student_t_975(values.len() - 1) * deviation / (values.len() as f64).sqrt();
    Interval {
        low: (mean - half).max(low),
        high: (mean + half).min(high),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::wilson;

    #[test]
    fn known_wilson_intervals() {
        // The last row is Newcombe's (1998) example: 0.2553 to 0.3662.
        for (successes, trials, low, high) in [
            (0.0, 10.0, 0.0, 0.277_533),
            (5.0, 10.0, 0.236_593, 0.763_407),
            (10.0, 10.0, 0.722_467, 1.0),
            (81.0, 263.0, 0.255_289, 0.366_210),
        ] {
            let found = wilson(successes, trials);
            assert!((found.low - low).abs() < 1e-6, "{found:?}");
            assert!((found.high - high).abs() < 1e-6, "{found:?}");
        }
    }

    proptest! {
        #[test]
        fn intervals_hold_the_estimate_and_shrink(trials in 1_u32..500, part in 0.0..=1.0_f64) {
            let successes = (f64::from(trials) * part).floor();
            let few = wilson(successes, f64::from(trials));
            let many = wilson(successes * 4.0, f64::from(trials) * 4.0);
            let share = successes / f64::from(trials);
            prop_assert!(few.low <= share && share <= few.high);
            prop_assert!(few.low >= 0.0 && few.high <= 1.0);
            prop_assert!(many.half_width() < few.half_width());
        }
    }
}
