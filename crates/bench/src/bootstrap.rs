//! Intervals by resampling tasks.

use crate::Interval;

/// One step of `SplitMix64`: a full-period generator, good enough to pick tasks.
pub(crate) fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The 95 % percentile interval of the mean of `values` (one per task, e.g. shares or paired
/// differences), from `rounds` resamples with replacement. The same seed and order give the same
/// interval. `None` without values or rounds.
#[must_use]
pub fn bootstrap(values: &[f64], rounds: usize, seed: u64) -> Option<Interval> {
    if values.is_empty() || rounds == 0 {
        return None;
    }
    let mut state = seed;
    let count = values.len() as u128;
    let mut means: Vec<f64> = (0..rounds)
        .map(|_| {
            let sum: f64 = (0..values.len())
                .map(|_| {
                    // Multiply and shift: no modulo bias worth naming below 2^32 tasks.
                    let at = (u128::from(next(&mut state)) * count) >> 64;
                    values[at as usize]
                })
                .sum();
            sum / values.len() as f64
        })
        .collect();
    means.sort_by(f64::total_cmp);
    let at = |part: f64| means[((rounds - 1) as f64 * part).round() as usize];
    Some(Interval {
        low: at(0.025),
        high: at(0.975),
    })
}

#[cfg(test)]
mod tests {
    use super::bootstrap;
    use crate::interval::student;

    #[test]
    fn it_agrees_with_students_interval_for_many_tasks() {
        let values: Vec<f64> = (0..400).map(|at| f64::from(at % 5) / 4.0).collect();
        let (found, expected) = (
            bootstrap(&values, 4000, 7).unwrap(),
            student(&values, 0.0, 1.0),
        );
        assert!(
            (found.low - expected.low).abs() < 5e-3,
            "{found:?} {expected:?}"
        );
        assert!(
            (found.high - expected.high).abs() < 5e-3,
            "{found:?} {expected:?}"
        );
    }

    #[test]
    fn the_seed_fixes_it() {
        let values: Vec<f64> = (0..50).map(|at| f64::from(at * at % 37)).collect();
        assert_eq!(bootstrap(&values, 500, 1), bootstrap(&values, 500, 1));
        assert_ne!(bootstrap(&values, 500, 1), bootstrap(&values, 500, 2));
        assert_eq!(bootstrap(&[], 10, 0), None);
        assert_eq!(bootstrap(&values, 0, 0), None);
        let same = bootstrap(&[0.5; 9], 50, 3).unwrap();
        assert_eq!((same.low, same.high), (0.5, 0.5));
    }
}
