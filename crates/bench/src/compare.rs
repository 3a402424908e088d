//! Comparing two policies on the same tasks.

use serde::{Deserialize, Serialize};

use crate::TaskResult;
use crate::bootstrap::next;
use crate::interval::{Interval, mean_deviation, student};

/// Up to this many differences that are not 0, the sign-flip test counts every flip.
const EXACT_MAX: usize = 16;

/// How much better B is than A, paired by task.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Mean over tasks of B's share minus A's, in [-1, 1].
    pub mean: f64,
    /// Its 95 % interval: Student's t over the differences, one per task.
    pub ci95: Interval,
    /// Tasks that both have samples of.
    pub tasks: usize,
    /// McNemar's exact two-sided p-value. Only when every counted task has one sample of each.
    pub p_value: Option<f64>,
}

/// B minus A over the tasks that both have samples of: `pairs` holds (A, B) per task. `None` when
/// there is no such task.
#[must_use]
pub fn paired_difference(pairs: &[(TaskResult, TaskResult)]) -> Option<Difference> {
    let counted: Vec<&(TaskResult, TaskResult)> = pairs
        .iter()
        .filter(|(a, b)| a.samples > 0 && b.samples > 0)
        .collect();
    let differences: Vec<f64> = counted
        .iter()
        .filter_map(|(a, b)| Some(b.share()? - a.share()?))
        .collect();
    if differences.is_empty() {
        return None;
    }
    let single = counted
        .iter()
        .all(|(a, b)| a.samples == 1 && b.samples == 1);
    let p_value = single.then(|| {
        let won = differences.iter().filter(|d| **d > 0.0).count();
        let lost = differences.iter().filter(|d| **d < 0.0).count();
        mcnemar(won, lost)
    });
    Some(Difference {
        mean: mean_deviation(&differences).0,
        ci95: student(&differences, -1.0, 1.0),
        tasks: differences.len(),
        p_value,
    })
}

/// McNemar's exact two-sided test: the chance of a split of the disagreeing tasks at least this
/// uneven when neither policy is better. 1 when they never disagree.
#[must_use]
pub fn mcnemar(won: usize, lost: usize) -> f64 {
    let total = won + lost;
    // Terms of the binomial with chance one half, each from the one before, in logarithms.
    let mut log_term = -(total as f64) * std::f64::consts::LN_2;
    let mut tail = 0.0;
    for at in 0..=won.min(lost) {
        tail += log_term.exp();
        log_term += ((total - at) as f64).ln() - ((at + 1) as f64).ln();
    }
    (2.0 * tail).min(1.0)
}

/// Paired sign-flip (permutation) test, two-sided: if neither policy were better, each task's
/// difference could as well have the other sign. The chance of a mean at least as far from 0:
/// exact up to 16 differences that are not 0, else from `rounds` seeded flips, the observed one
/// counted in. 1 when nothing differs. Needs no distribution and any number of samples per task.
#[must_use]
pub fn sign_flip(differences: &[f64], rounds: usize, seed: u64) -> f64 {
    let mut moved: Vec<f64> = differences
        .iter()
        .copied()
        .filter(|difference| *difference != 0.0)
        .collect();
    // Sorted, so that the order of tasks does not matter.
    moved.sort_by(f64::total_cmp);
    if moved.is_empty() {
        return 1.0;
    }
    let observed = moved.iter().sum::<f64>().abs();
    // Sums of the same numbers in another order differ in the last digits.
    let far = |sum: f64| sum.abs() >= observed * (1.0 - 1e-12);
    let flipped = |flips: &mut dyn FnMut(usize) -> bool| -> f64 {
        moved
            .iter()
            .enumerate()
            .map(|(at, value)| if flips(at) { -value } else { *value })
            .sum()
    };
    if moved.len() <= EXACT_MAX {
        let all = 1_u32 << moved.len();
        let hits = (0..all)
            .filter(|set| far(flipped(&mut |at| set >> at & 1 == 1)))
            .count();
        return hits as f64 / f64::from(all);
    }
    let mut state = seed;
    let hits = (0..rounds)
        .filter(|_| far(flipped(&mut |_| next(&mut state) >> 63 == 1)))
        .count();
    (hits + 1) as f64 / (rounds + 1) as f64
}

/// Holm's adjustment of several p-values (1979), in the order they were given: the chance of even
/// one false alarm among all of them stays below the level they are compared with.
#[must_use]
pub fn holm(p_values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p_values.len()).collect();
    order.sort_by(|a, b| p_values[*a].total_cmp(&p_values[*b]));
    let mut adjusted = vec![1.0; p_values.len()];
    let mut least: f64 = 0.0;
    for (rank, index) in order.iter().enumerate() {
        let factor = (p_values.len() - rank) as f64;
        least = least.max((p_values[*index] * factor).min(1.0));
        adjusted[*index] = least;
    }
    adjusted
}

#[cfg(test)]
mod tests {
    use super::{holm, mcnemar, paired_difference, sign_flip};

    #[test]
    fn flips_of_equal_sizes_are_the_binomial() {
        // With differences of one size the test is McNemar's.
        let differences = |won: usize, lost: usize| {
            let mut all = vec![1.0; won];
            all.extend(vec![-1.0; lost]);
            all.extend([0.0; 3]);
            all
        };
        for (won, lost) in [(0, 0), (4, 0), (9, 1), (3, 8), (5, 5)] {
            let found = sign_flip(&differences(won, lost), 10, 1);
            assert!((found - mcnemar(won, lost)).abs() < 1e-12, "{won} {lost}");
        }
        // Beyond the exact range it is an estimate of the same.
        let found = sign_flip(&differences(30, 12), 20_000, 7);
        assert!((found - mcnemar(30, 12)).abs() < 0.002, "{found}");
        assert_eq!(found, sign_flip(&differences(30, 12), 20_000, 7));
        // Every flip by hand: |±3 ±1| >= 4 in 2 of 4.
        assert_eq!(sign_flip(&[3.0, 1.0], 0, 0), 0.5);
    }

    #[test]
    fn holm_by_hand() {
        let adjusted = holm(&[0.04, 0.01, 0.03, 0.5]);
        let expected = [0.09, 0.04, 0.09, 0.5];
        for (found, expected) in adjusted.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-12, "{adjusted:?}");
        }
        assert_eq!(holm(&[]), Vec::<f64>::new());
    }
    use crate::TaskResult;

    fn one(passed: bool) -> TaskResult {
        TaskResult {
            samples: 1,
            passed: u32::from(passed),
        }
    }

    #[test]
    fn known_p_values() {
        for (won, lost, expected) in [
            (0, 0, 1.0),
            (5, 5, 1.0),
            (9, 1, 22.0 / 1024.0),
            (10, 0, 2.0 / 1024.0),
            (3, 8, 464.0 / 2048.0),
        ] {
            let found = mcnemar(won, lost);
            assert!((found - expected).abs() < 1e-12, "{won} {lost}: {found}");
        }
        // Thousands of tasks neither overflow nor vanish.
        assert!((mcnemar(2000, 2000) - 1.0).abs() < 1e-9);
        assert!(mcnemar(1000, 1200) < 1e-4);
    }

    #[test]
    fn pairing_removes_what_tasks_have_in_common() {
        // 20 tasks, half hard for both; B solves four more.
        let pairs: Vec<(TaskResult, TaskResult)> = (0..20)
            .map(|task| (one(task < 10), one(task < 14)))
            .collect();
        let found = paired_difference(&pairs).unwrap();
        assert!((found.mean - 0.2).abs() < 1e-12);
        assert_eq!(found.tasks, 20);
        // Deviation of 4 ones and 16 zeros .410391, t(19) 2.093024.
        let half = 2.093_024 * 0.410_391_3 / 20.0_f64.sqrt();
        assert!((found.ci95.low - (0.2 - half)).abs() < 1e-6);
        assert!((found.p_value.unwrap() - 0.125).abs() < 1e-12);
        // Two samples per task: no McNemar. Tasks that only one of them has are left out.
        let two = TaskResult {
            samples: 2,
            passed: 1,
        };
        let none = TaskResult {
            samples: 0,
            passed: 0,
        };
        let found = paired_difference(&[(two, two), (none, two)]).unwrap();
        assert_eq!((found.tasks, found.p_value), (1, None));
        assert_eq!((found.ci95.low, found.ci95.high), (-1.0, 1.0));
        assert_eq!(paired_difference(&[(none, two)]), None);
    }
}
