//! Comparing two policies on the same tasks.

use serde::{Deserialize, Serialize};

use crate::TaskResult;
use crate::interval::{Interval, mean_deviation, student};

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

#[cfg(test)]
mod tests {
    use super::{mcnemar, paired_difference};
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
