//! Evaluation: held-out tasks under fixed weights.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use bench::TaskResult;
use record::Rollout;
use serde::{Deserialize, Serialize};
use task::Task;
use tokio_util::sync::CancellationToken;

use crate::{
    display::Display,
    error::CliError,
    lab::{Lab, Plan},
    recipe::Recipe,
};

/// pass@1 with its 95 % interval.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Pass {
    /// Mean over tasks of the part of rollouts with the full reward.
    pub(crate) pass_at_1: f64,
    /// 95 % interval, clustered by task.
    pub(crate) ci95: [f64; 2],
    /// Tasks.
    pub(crate) tasks: usize,
    /// Rollouts with a verdict.
    pub(crate) n: usize,
    /// Rollouts lost to faults; they count neither way.
    pub(crate) lost: usize,
    /// Mean reward.
    pub(crate) reward: f64,
}

/// An evaluation: sampled at the training temperature, and greedy beside it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Evaluation {
    #[serde(flatten)]
    pub(crate) sampled: Pass,
    /// Temperature of the sampled rollouts.
    pub(crate) temperature: f32,
    /// One greedy rollout per task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) greedy: Option<Pass>,
    /// Sampled pass@1 by task family.
    pub(crate) families: BTreeMap<String, f64>,
    /// Sampled pass@1 by harness.
    #[serde(default)]
    pub(crate) harnesses: BTreeMap<String, Pass>,
}

/// Evaluates the lab's engine. `name` becomes part of the rollouts' names.
pub(crate) async fn evaluate(
    lab: &Lab,
    recipe: &Recipe,
    tasks: &[Arc<Task>],
    name: &str,
    step: u64,
    display: &Display,
    cancel: &CancellationToken,
) -> Result<Evaluation, CliError> {
    let count = if recipe.eval.tasks == 0 {
        tasks.len()
    } else {
        recipe.eval.tasks.min(tasks.len())
    };
    let tasks = &tasks[..count];
    let temperature = recipe.rollout.temperature;
    let sampled = Plan {
        split: name,
        step,
        samples: recipe.eval.samples,
        temperature,
    };
    let greedy_name = format!("{name}-greedy");
    let greedy = Plan {
        split: &greedy_name,
        step,
        samples: 1,
        temperature: 0.0,
    };
    let mut jobs = lab.jobs(tasks, sampled)?;
    let sampled_jobs = jobs.len();
    if recipe.eval.greedy {
        jobs.extend(lab.jobs(tasks, greedy)?);
    }
    let result = lab.run(jobs, name, display, cancel).await?;
    if result.cancelled {
        return Err(CliError::Interrupted {
            resume: "every finished rollout is in the ledger".into(),
        });
    }
    let (sampled, greedy) = result.rollouts.split_at(sampled_jobs);
    let (sampled, greedy): (Vec<&Rollout>, Vec<&Rollout>) = (
        sampled.iter().flatten().collect(),
        greedy.iter().flatten().collect(),
    );
    Ok(Evaluation {
        families: families(tasks, &sampled),
        harnesses: by_harness(&sampled),
        sampled: pass(&sampled),
        temperature,
        greedy: recipe.eval.greedy.then(|| pass(&greedy)),
    })
}

fn passed(rollout: &Rollout) -> Option<bool> {
    let votes = rollout
        .disposition
        .as_ref()
        .is_some_and(record::Disposition::has_vote);
    rollout
        .verdict
        .as_ref()
        .filter(|_| votes)
        .map(|verdict| verdict.reward >= 1.0)
}

/// pass@1 over rollouts, clustered by task.
pub(crate) fn pass(rollouts: &[&Rollout]) -> Pass {
    let mut by_task: BTreeMap<&str, TaskResult> = BTreeMap::new();
    let (mut lost, mut reward, mut n) = (0, 0.0, 0);
    for rollout in rollouts {
        let Some(passed) = passed(rollout) else {
            lost += 1;
            continue;
        };
        let none = TaskResult {
            samples: 0,
            passed: 0,
        };
        let result = by_task.entry(rollout.spec.task.as_str()).or_insert(none);
        result.samples += 1;
        result.passed += u32::from(passed);
        reward += rollout
            .verdict
            .as_ref()
            .map_or(0.0, |verdict| verdict.reward);
        n += 1;
    }
    let tasks: Vec<TaskResult> = by_task.into_values().collect();
    // Without a single verdict nothing is known: the whole range.
    let (mean, ci95) = bench::pass_at_1(&tasks).map_or((0.0, [0.0, 1.0]), |rate| {
        (rate.mean, [rate.ci95.low, rate.ci95.high])
    });
    Pass {
        pass_at_1: mean,
        ci95,
        tasks: tasks.len(),
        n,
        lost,
        reward: reward / n.max(1) as f64,
    }
}

fn by_harness(rollouts: &[&Rollout]) -> BTreeMap<String, Pass> {
    let mut own: BTreeMap<String, Vec<&Rollout>> = BTreeMap::new();
    for rollout in rollouts {
        own.entry(rollout.spec.harness.clone())
            .or_default()
            .push(rollout);
    }
    let each = own.into_iter();
    each.map(|(name, rollouts)| (name, pass(&rollouts)))
        .collect()
}

fn families(tasks: &[Arc<Task>], rollouts: &[&Rollout]) -> BTreeMap<String, f64> {
    let family: HashMap<&str, &str> = tasks
        .iter()
        .map(|task| (task.id.as_str(), task.family.as_str()))
        .collect();
    let mut counts: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for rollout in rollouts {
        if let (Some(passed), Some(family)) =
            (passed(rollout), family.get(rollout.spec.task.as_str()))
        {
            let entry = counts.entry((*family).to_owned()).or_default();
            entry.0 += f64::from(u8::from(passed));
            entry.1 += 1.0;
        }
    }
    counts
        .into_iter()
        .map(|(family, (passed, n))| (family, passed / n))
        .collect()
}
