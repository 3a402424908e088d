//! One attempt at one task, as the report sees it.

use std::collections::BTreeMap;

use record::Call;
use serde::{Deserialize, Serialize};

use crate::Behaviour;

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Outcome {
    /// It has a verdict that counts.
    Scored {
        /// In [0, 1].
        reward: f64,
        /// Whether the field counts the task as passed with that reward.
        passed: bool,
        /// The budget that ended the harness, if one did.
        truncated: Option<String>,
    },
    /// It has none: a fault, or it never ran. It counts neither way (I7).
    Missing {
        /// In one word, e.g. `sandbox_lost`.
        why: String,
    },
}

/// What an attempt used, from its captured calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Model calls.
    pub calls: u64,
    /// Tool calls.
    pub tool_calls: u64,
    /// Prompt tokens that no earlier call of the rollout had.
    pub prompt_new: u64,
    /// Prompt tokens taken over from an earlier call of the rollout: what a prefix cache saves.
    pub prompt_again: u64,
    /// Generated tokens.
    pub generated: u64,
}

impl Usage {
    /// Sums over the calls of one rollout.
    #[must_use]
    pub fn of(calls: &[Call]) -> Self {
        let mut sum = Self::default();
        for call in calls {
            let again = u64::from(call.continuation.exact);
            sum.calls += 1;
            sum.prompt_again += again;
            sum.prompt_new += (call.prompt_ids.len() as u64).saturating_sub(again);
            sum.generated += call
                .generation
                .as_ref()
                .map_or(0, |one| one.token_ids.len() as u64);
            sum.tool_calls += call
                .reply
                .as_ref()
                .filter(|_| call.delivered())
                .map_or(0, |reply| reply.tool_calls.len() as u64);
        }
        sum
    }
}

/// One attempt at one task by one model through one harness. Every planned attempt is one, also
/// those that never ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// The model.
    pub model: String,
    /// The harness.
    pub harness: String,
    /// The task.
    pub task: String,
    /// The task's family or category.
    pub family: String,
    /// From 0.
    pub attempt: u32,
    /// How it ended.
    pub outcome: Outcome,
    /// What it used.
    pub usage: Usage,
    /// Tool calls of the task's reference solution, when there is one.
    pub steps_reference: Option<u32>,
    /// How it worked.
    pub behaviour: Behaviour,
    /// Share of the task's services that were asked anything; `None` for a task without services,
    /// and without a verdict.
    pub services_coverage: Option<f64>,
    /// Levels by criterion, one per judge in the panel's order. Empty without judges.
    pub marks: BTreeMap<String, Vec<f64>>,
    /// Wall-clock seconds from the making of the sandbox to its end. Never the same twice, so no
    /// part of the report: [`crate::Times`] has it.
    #[serde(skip)]
    pub seconds: f64,
}

impl Trial {
    /// Reward and whether it passed, when it counts.
    #[must_use]
    pub fn scored(&self) -> Option<(f64, bool)> {
        match &self.outcome {
            Outcome::Scored { reward, passed, .. } => Some((*reward, *passed)),
            Outcome::Missing { .. } => None,
        }
    }
}

/// Trials by task, in the order of the tasks' names.
pub(crate) fn by_task<'a>(trials: &[&'a Trial]) -> BTreeMap<&'a str, Vec<&'a Trial>> {
    let mut tasks: BTreeMap<&str, Vec<&Trial>> = BTreeMap::new();
    for trial in trials {
        tasks.entry(trial.task.as_str()).or_default().push(trial);
    }
    tasks
}
