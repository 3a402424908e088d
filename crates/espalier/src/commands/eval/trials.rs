//! From rollouts and their captured calls to the trials of a report.

use std::collections::BTreeMap;

use bench::{Behaviour, Outcome, Trial, Usage};
use ledger::Ledger;
use record::{Disposition, Rollout, Verdict};
use rollout::Job;
use serde_json::json;
use task::{Step, Task};

use crate::error::CliError;

/// Adds a trial for each planned job, and its evidence as a line of JSON. Calls are read one
/// rollout at a time: a large evaluation does not fit into memory.
pub(super) fn collect(
    model: &str,
    planned: &[Job],
    rollouts: &[Option<Rollout>],
    ledger: &Ledger,
    trials: &mut Vec<Trial>,
    evidence: &mut String,
) -> Result<(), CliError> {
    let none = std::iter::repeat(&None);
    for (job, rollout) in planned.iter().zip(rollouts.iter().chain(none)) {
        let attempt = job.spec.labels.get("sample");
        let calls = match rollout {
            Some(rollout) => ledger
                .calls(&rollout.spec.id)
                .map_err(|error| CliError::failed("captured calls", error))?,
            None => Vec::new(),
        };
        let mut behaviour = Behaviour::of(&calls);
        let line = json!({
            "rollout": job.spec.id, "model": model, "harness": job.spec.harness,
            "task": job.spec.task, "behaviour": behaviour,
        });
        evidence.push_str(&format!("{line}\n"));
        behaviour.evidence.clear();
        trials.push(Trial {
            model: model.to_owned(),
            harness: job.spec.harness.clone(),
            task: job.spec.task.to_string(),
            family: job.task.family.clone(),
            attempt: attempt.and_then(|text| text.parse().ok()).unwrap_or(0),
            outcome: outcome(rollout.as_ref(), &job.task),
            usage: Usage::of(&calls),
            steps_reference: steps(&job.task),
            marks: rollout
                .as_ref()
                .and_then(|rollout| rollout.verdict.as_ref())
                .map(marks)
                .unwrap_or_default(),
            behaviour,
            services_coverage: rollout
                .as_ref()
                .and_then(|rollout| rollout.verdict.as_ref())
                .and_then(|verdict| verdict.scores.get("services.coverage").copied()),
            seconds: rollout.as_ref().map_or(0.0, seconds),
        });
    }
    Ok(())
}

fn outcome(rollout: Option<&Rollout>, task: &Task) -> Outcome {
    let missing = |why: &str| Outcome::Missing {
        why: why.to_owned(),
    };
    let Some(disposition) = rollout.and_then(|rollout| rollout.disposition.as_ref()) else {
        return missing("not_run");
    };
    let truncated = match disposition {
        Disposition::Discard { fault, .. } | Disposition::Retry { fault, .. } => {
            let name = serde_json::to_value(fault).unwrap_or_default();
            return missing(name.as_str().unwrap_or("fault"));
        }
        Disposition::Truncate { reason } => Some(reason.clone()),
        Disposition::Train | Disposition::Mask { .. } => None,
    };
    match rollout.and_then(|rollout| rollout.verdict.as_ref()) {
        Some(verdict) => Outcome::Scored {
            reward: verdict.reward,
            passed: verdict.reward >= task.grading.pass_at,
            truncated,
        },
        None => missing("no_verdict"),
    }
}

/// Tool calls of the reference solution.
fn steps(task: &Task) -> Option<u32> {
    let steps = task.solution.iter();
    let count = steps.filter(|step| !matches!(step, Step::Say(_))).count();
    (count > 0).then(|| u32::try_from(count).unwrap_or(u32::MAX))
}

/// Levels by criterion, judges in order, from scores named `judge.N.CRITERION`.
fn marks(verdict: &Verdict) -> BTreeMap<String, Vec<f64>> {
    let mut found: BTreeMap<String, BTreeMap<usize, f64>> = BTreeMap::new();
    for (name, level) in &verdict.scores {
        let parts = name
            .strip_prefix("judge.")
            .and_then(|rest| rest.split_once('.'));
        if let Some((number, criterion)) = parts
            && let Ok(number) = number.parse()
        {
            found
                .entry(criterion.to_owned())
                .or_default()
                .insert(number, *level);
        }
    }
    found
        .into_iter()
        .map(|(name, levels)| (name, levels.into_values().collect()))
        .collect()
}

fn seconds(rollout: &Rollout) -> f64 {
    let seconds = &rollout.seconds;
    seconds.create + seconds.harness + seconds.settle + seconds.verify + seconds.destroy
}
