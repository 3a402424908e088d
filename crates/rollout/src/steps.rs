//! Tasks in steps: what each step is, when the next may begin, and one verdict of all. Pure.

use std::sync::Arc;

use record::Verdict;
use task::{Stage, Strategy, Task};

/// The task of each step; the task itself when it has none. Never empty.
pub(crate) fn parts(task: &Arc<Task>) -> Vec<Arc<Task>> {
    if task.environment.stages.is_empty() {
        return vec![Arc::clone(task)];
    }
    (0..task.environment.stages.len())
        .filter_map(|index| task.stage(index))
        .map(Arc::new)
        .collect()
}

/// Collects the verdicts of steps.
#[derive(Debug)]
pub(crate) struct Steps<'a> {
    stages: &'a [Stage],
    strategy: Strategy,
    verdicts: Vec<Verdict>,
    budget: Option<String>,
}

impl<'a> Steps<'a> {
    pub(crate) fn new(task: &'a Task) -> Self {
        Self {
            stages: &task.environment.stages,
            strategy: task.environment.strategy,
            verdicts: Vec::new(),
            budget: None,
        }
    }

    /// Adds the verdict of the next step. Whether the one after it may begin.
    pub(crate) fn add(&mut self, verdict: Verdict, budget: Option<String>) -> bool {
        let reached = self.stages.get(self.verdicts.len()).is_none_or(|stage| {
            stage.min_reward.iter().all(|(key, least)| {
                let found = match key.as_str() {
                    "reward" => verdict.scores.get(key).copied().or(Some(verdict.reward)),
                    _ => verdict.scores.get(key).copied(),
                };
                // A key that is missing is a step that was not reached.
                found.is_some_and(|found| found >= *least)
            })
        });
        self.budget = self.budget.take().or(budget);
        self.verdicts.push(verdict);
        reached
    }

    /// One verdict: the only one, that of the last step that ran, or with the mean over the steps
    /// that ran; and the first budget that was spent. `None` without any verdict.
    pub(crate) fn end(mut self) -> Option<(Verdict, Option<String>)> {
        let named = |index: usize| match self.stages.get(index) {
            Some(stage) => stage.name.clone(),
            None => index.to_string(),
        };
        let each: Vec<(String, f64)> = self
            .verdicts
            .iter()
            .enumerate()
            .map(|(index, verdict)| (format!("step.{}", named(index)), verdict.reward))
            .collect();
        let count = self.verdicts.len();
        let mean = each.iter().map(|(_, reward)| reward).sum::<f64>() / count.max(1) as f64;
        let seconds = self.verdicts.iter().map(|verdict| verdict.seconds).sum();
        let mut verdict = self.verdicts.pop()?;
        if !self.stages.is_empty() {
            if self.strategy == Strategy::Mean {
                verdict.reward = mean;
            }
            verdict.seconds = seconds;
            verdict.scores.extend(each);
        }
        Some((verdict, self.budget))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use task::{Split, chores};

    use super::*;

    fn task(strategy: Strategy) -> Task {
        let mut task = chores::generate(Split::Train, 0, 1).remove(0);
        let stage = |name: &str, least: &[(&str, f64)]| Stage {
            name: name.to_owned(),
            instruction: format!("do {name}"),
            min_reward: least
                .iter()
                .map(|(key, number)| ((*key).to_owned(), *number))
                .collect(),
            ..Stage::default()
        };
        task.environment.strategy = strategy;
        task.environment.stages = vec![
            stage("one", &[("reward", 0.5)]),
            stage("two", &[("style", 0.2)]),
            stage("three", &[]),
        ];
        task
    }

    fn verdict(reward: f64, style: Option<f64>) -> Verdict {
        Verdict {
            reward,
            scores: style
                .map(|style| BTreeMap::from([("style".to_owned(), style)]))
                .unwrap_or_default(),
            evidence: String::new(),
            seconds: 1.0,
        }
    }

    #[test]
    fn a_gate_looks_at_its_key_and_a_missing_key_shuts_it() {
        let task = task(Strategy::Mean);
        let mut steps = Steps::new(&task);
        assert!(steps.add(verdict(0.5, None), None));
        assert!(!steps.add(verdict(1.0, None), Some("calls_limit".into())));
        let (whole, budget) = steps.end().unwrap();
        assert_eq!((whole.reward, whole.seconds), (0.75, 2.0));
        assert_eq!(whole.scores["step.two"], 1.0);
        assert_eq!(budget.as_deref(), Some("calls_limit"));
        let mut steps = Steps::new(&task);
        assert!(!steps.add(verdict(0.4, Some(1.0)), None));
    }

    #[test]
    fn final_is_the_last_step_that_ran() {
        let task = task(Strategy::Final);
        let mut steps = Steps::new(&task);
        assert!(steps.add(verdict(1.0, None), None));
        assert!(steps.add(verdict(1.0, Some(0.2)), None));
        assert!(steps.add(verdict(0.25, None), None));
        assert_eq!(steps.end().unwrap().0.reward, 0.25);
        let mut steps = Steps::new(&task);
        assert!(!steps.add(verdict(0.4, None), None));
        assert_eq!(steps.end().unwrap().0.reward, 0.4);
    }

    #[test]
    fn a_task_without_steps_is_its_own_part() {
        let task = Arc::new(chores::generate(Split::Train, 0, 1).remove(0));
        assert_eq!(parts(&task), [Arc::clone(&task)]);
        let mut steps = Steps::new(&task);
        assert!(steps.add(verdict(0.25, None), None));
        assert_eq!(steps.end(), Some((verdict(0.25, None), None)));
    }
}
