//! Pass rates over tasks with several samples each.

use serde::{Deserialize, Serialize};

use crate::interval::{Interval, mean_deviation, student, wilson};

/// The samples of one task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskResult {
    /// Samples that count. Faults of the infrastructure do not (I7).
    pub samples: u32,
    /// Of those, passed.
    pub passed: u32,
}

impl TaskResult {
    /// The share of passed samples; `None` without samples.
    #[must_use]
    pub fn share(&self) -> Option<f64> {
        (self.samples > 0)
            .then(|| f64::from(self.passed.min(self.samples)) / f64::from(self.samples))
    }
}

/// A pass rate with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PassRate {
    /// Mean over tasks of the share of passed samples, in [0, 1].
    pub mean: f64,
    /// Its interval.
    pub ci95: Interval,
    /// Tasks that count.
    pub tasks: usize,
    /// Their samples.
    pub samples: u64,
    /// Tasks without samples, left out.
    pub tasks_empty: usize,
}

/// pass@1: the mean over tasks of the share of passed samples, so that a task with more samples
/// does not weigh more. `None` when no task has samples.
#[must_use]
pub fn pass_at_1(tasks: &[TaskResult]) -> Option<PassRate> {
    let shares: Vec<f64> = tasks.iter().filter_map(TaskResult::share).collect();
    if shares.is_empty() {
        return None;
    }
    let (mean, deviation) = mean_deviation(&shares);
    let count = shares.len() as f64;
    let single = tasks.iter().all(|task| task.samples <= 1);
    let ci95 = if single || deviation == 0.0 {
        wilson(mean * count, count)
    } else {
        student(&shares, 0.0, 1.0)
    };
    Some(PassRate {
        mean,
        ci95,
        tasks: shares.len(),
        samples: tasks.iter().map(|task| u64::from(task.samples)).sum(),
        tasks_empty: tasks.len() - shares.len(),
    })
}

/// Mean of `of_task` over the tasks with at least `k` samples; `None` when there are none.
fn over_tasks(tasks: &[TaskResult], k: u32, of_task: impl Fn(&TaskResult) -> f64) -> Option<f64> {
    if k == 0 {
        return None;
    }
    let values: Vec<f64> = tasks
        .iter()
        .filter(|task| task.samples >= k)
        .map(of_task)
        .collect();
    (!values.is_empty()).then(|| mean_deviation(&values).0)
}

/// The chance that k draws without replacement from `total` all fall among the `marked`.
fn all_marked(marked: u32, total: u32, k: u32) -> f64 {
    (0..k)
        .map(|at| f64::from(marked.saturating_sub(at)) / f64::from(total - at))
        .product()
}

/// pass@k: the chance that at least one of k samples passes, `1 - C(n-c, k) / C(n, k)` per task
/// (unbiased, Chen et al. 2021), mean over tasks with at least k samples. `None` when there are
/// none or k is 0.
#[must_use]
pub fn pass_at_k(tasks: &[TaskResult], k: u32) -> Option<f64> {
    over_tasks(tasks, k, |task| {
        1.0 - all_marked(
            task.samples - task.passed.min(task.samples),
            task.samples,
            k,
        )
    })
}

/// pass^k: the chance that all of k samples pass, `C(c, k) / C(n, k)` per task (unbiased, Yao et
/// al. 2024), mean over tasks with at least k samples. `None` when there are none or k is 0.
#[must_use]
pub fn pass_pow_k(tasks: &[TaskResult], k: u32) -> Option<f64> {
    over_tasks(tasks, k, |task| {
        all_marked(task.passed.min(task.samples), task.samples, k)
    })
}

/// pass^k as some benches write it (Claw-Eval): `(c / n)^k` per task. Biased upwards, because it
/// draws with replacement; here so that numbers can be compared with theirs. Tasks with any
/// samples count. `None` when there are none or k is 0.
#[must_use]
pub fn pass_pow_k_plug_in(tasks: &[TaskResult], k: u32) -> Option<f64> {
    if k == 0 {
        return None;
    }
    over_tasks(tasks, 1, |task| {
        task.share().unwrap_or_default().powi(k as i32)
    })
}

/// The share of values that reach each threshold, e.g. of rewards: how much a pass rate owes to
/// where passing begins. Empty values give no shares.
#[must_use]
pub fn threshold_curve(values: &[f64], thresholds: &[f64]) -> Vec<(f64, f64)> {
    if values.is_empty() {
        return Vec::new();
    }
    let share = |threshold: f64| {
        values.iter().filter(|value| **value >= threshold).count() as f64 / values.len() as f64
    };
    thresholds.iter().map(|at| (*at, share(*at))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        TaskResult, pass_at_1, pass_at_k, pass_pow_k, pass_pow_k_plug_in, threshold_curve,
    };

    /// Every subset of k of n samples, of which the first c passed: the definition itself.
    fn enumerate(passed: u32, samples: u32, k: u32) -> (f64, f64) {
        let (mut any, mut all, mut count) = (0.0, 0.0, 0.0);
        for set in 0_u32..1 << samples {
            if set.count_ones() == k {
                let good = (set & ((1 << passed) - 1)).count_ones();
                any += f64::from(u8::from(good > 0));
                all += f64::from(u8::from(good == k));
                count += 1.0;
            }
        }
        (any / count, all / count)
    }

    #[test]
    fn the_estimators_are_the_enumeration() {
        for samples in 1..=10 {
            for passed in 0..=samples {
                for k in 1..=samples {
                    let (any, all) = enumerate(passed, samples, k);
                    let one = [task(passed, samples)];
                    let found = (pass_at_k(&one, k), pass_pow_k(&one, k));
                    assert!(
                        (found.0.unwrap_or(9.0) - any).abs() < 1e-12,
                        "{passed}/{samples} {k}"
                    );
                    assert!(
                        (found.1.unwrap_or(9.0) - all).abs() < 1e-12,
                        "{passed}/{samples} {k}"
                    );
                    let plug_in = pass_pow_k_plug_in(&one, k).unwrap_or(-1.0);
                    assert!(plug_in >= all - 1e-12);
                }
            }
        }
        assert_eq!(pass_pow_k_plug_in(&[task(1, 2)], 3), Some(0.125));
        assert_eq!(pass_pow_k_plug_in(&[task(1, 2)], 0), None);
    }

    #[test]
    fn a_threshold_curve_falls() {
        let curve = threshold_curve(&[0.0, 0.5, 0.75, 1.0], &[0.0, 0.5, 0.75, 1.0]);
        assert_eq!(curve, [(0.0, 1.0), (0.5, 0.75), (0.75, 0.5), (1.0, 0.25)]);
        assert_eq!(threshold_curve(&[], &[0.5]), []);
    }

    fn task(passed: u32, samples: u32) -> TaskResult {
        TaskResult { samples, passed }
    }

    #[test]
    fn known_values() {
        let tasks = [task(3, 10)];
        let near = |found: Option<f64>, expected: f64| {
            assert!(
                (found.unwrap() - expected).abs() < 1e-12,
                "{found:?} {expected}"
            );
        };
        near(pass_at_k(&tasks, 1), 0.3);
        near(pass_at_k(&tasks, 5), 1.0 - 21.0 / 252.0);
        near(pass_at_k(&tasks, 8), 1.0);
        near(pass_pow_k(&tasks, 2), 3.0 / 45.0);
        near(pass_pow_k(&tasks, 4), 0.0);
        assert_eq!(pass_at_k(&tasks, 11), None);
        assert_eq!(pass_at_k(&tasks, 0), None);
        assert_eq!(pass_at_1(&[task(0, 0)]), None);
    }

    #[test]
    fn a_task_with_more_samples_does_not_weigh_more() {
        let rate = pass_at_1(&[task(0, 1), task(100, 100), task(0, 0)]).unwrap();
        assert_eq!(rate.mean, 0.5);
        assert_eq!((rate.tasks, rate.samples, rate.tasks_empty), (2, 101, 1));
    }

    #[test]
    fn the_interval_follows_the_kind_of_evaluation() {
        // One sample per task: Wilson. 5 of 10.
        let single: Vec<TaskResult> = (0..10).map(|at| task(at % 2, 1)).collect();
        let rate = pass_at_1(&single).unwrap();
        assert!((rate.ci95.low - 0.236_593).abs() < 1e-6);
        // Four samples: the task is the unit. Means .25, .5, .75, .5: deviation .204124, t(3) 3.182446.
        let four = [task(1, 4), task(2, 4), task(3, 4), task(2, 4)];
        let rate = pass_at_1(&four).unwrap();
        assert!((rate.ci95.low - (0.5 - 3.182_446 * 0.204_124_1 / 2.0)).abs() < 1e-5);
        // All tasks solved always: not certainty.
        let all: Vec<TaskResult> = (0..10).map(|_| task(4, 4)).collect();
        let rate = pass_at_1(&all).unwrap();
        assert!((rate.ci95.low - 0.722_467).abs() < 1e-6);
    }

    proptest! {
        #[test]
        fn laws(
            tasks in prop::collection::vec((0_u32..8, 0_u32..8), 1..20)
                .prop_map(|pairs| pairs.into_iter()
                    .map(|(passed, more)| task(passed, passed + more)).collect::<Vec<_>>()),
            k in 1_u32..6,
        ) {
            let reversed: Vec<TaskResult> = tasks.iter().rev().copied().collect();
            prop_assert_eq!(pass_at_1(&tasks), pass_at_1(&reversed));
            if let Some(rate) = pass_at_1(&tasks) {
                prop_assert!(rate.ci95.low <= rate.mean + 1e-12 && rate.mean <= rate.ci95.high + 1e-12);
                prop_assert!(rate.ci95.low >= 0.0 && rate.ci95.high <= 1.0);
            }
            if let (Some(any), Some(all)) = (pass_at_k(&tasks, k), pass_pow_k(&tasks, k)) {
                prop_assert!((0.0..=1.0).contains(&any) && (0.0..=1.0).contains(&all));
                prop_assert!(all <= any + 1e-12);
            }
            // Over one set of tasks more tries help pass@k and hurt pass^k.
            let rich: Vec<TaskResult> = tasks.iter().filter(|t| t.samples > k).copied().collect();
            if let (Some(few), Some(more)) = (pass_at_k(&rich, k), pass_at_k(&rich, k + 1)) {
                prop_assert!(more >= few - 1e-12);
                prop_assert!(pass_pow_k(&rich, k + 1) <= pass_pow_k(&rich, k).map(|v| v + 1e-12));
            }
        }
    }
}
