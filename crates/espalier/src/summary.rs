//! `summary.json` of a training run, and the table that a person sees at its end.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{display, score::Evaluation, training::Harvest};

/// Tokens of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tokens {
    /// Of all calls, prompts and replies.
    pub(crate) captured: u64,
    /// Of the rollouts' trees.
    pub(crate) unique: u64,
    /// Generated and trained.
    pub(crate) trained: u64,
}

/// Wall-clock seconds by phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct PhaseSeconds {
    pub(crate) eval: f64,
    pub(crate) rollout: f64,
    pub(crate) train: f64,
}

/// What the steps so far add up to.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    pub(crate) reward: Vec<f64>,
    pub(crate) pass: Vec<f64>,
    pub(crate) dispositions: BTreeMap<String, u64>,
    pub(crate) forks: BTreeMap<String, u64>,
    pub(crate) tokens: Tokens,
    pub(crate) seconds: PhaseSeconds,
}

impl Sums {
    /// Adds a step.
    pub(crate) fn add(&mut self, harvest: &Harvest, rollout_s: f64, train_s: f64) {
        self.reward.push(harvest.reward);
        self.pass.push(harvest.pass);
        for (name, count) in &harvest.dispositions {
            *self.dispositions.entry(name.clone()).or_default() += count;
        }
        for (name, count) in &harvest.forks {
            *self.forks.entry(name.clone()).or_default() += count;
        }
        self.tokens.captured += harvest.tokens_captured;
        self.tokens.unique += harvest.tokens_unique;
        self.tokens.trained += harvest.tokens_trained;
        self.seconds.rollout += rollout_s;
        self.seconds.train += train_s;
    }
}

/// An evaluation on the way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct AtStep {
    /// Steps that were complete.
    pub(crate) step: u64,
    #[serde(flatten)]
    pub(crate) evaluation: Evaluation,
}

/// Before and after, and on the way where `eval.every` asks for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Evaluations {
    pub(crate) before: Evaluation,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) during: Vec<AtStep>,
    pub(crate) after: Evaluation,
}

/// The whole file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Summary {
    pub(crate) steps: u64,
    pub(crate) wall_s: f64,
    pub(crate) eval: Evaluations,
    /// Mean reward of each step's rollouts.
    pub(crate) reward: Vec<f64>,
    pub(crate) dispositions: BTreeMap<String, u64>,
    pub(crate) tokens: Tokens,
    pub(crate) forks: BTreeMap<String, u64>,
    pub(crate) seconds: PhaseSeconds,
    pub(crate) seed: u64,
    pub(crate) harnesses: Vec<String>,
    pub(crate) versions: BTreeMap<String, String>,
}

fn percent(value: f64) -> String {
    format!("{:5.1} %", 100.0 * value)
}

/// The table at the end of a run.
pub(crate) fn table(summary: &Summary) -> String {
    let row = |name: &str, before: &crate::score::Pass, after: &crate::score::Pass| {
        let interval = |pass: &crate::score::Pass| {
            format!(
                "{} [{:.0}, {:.0}]",
                percent(pass.pass_at_1),
                100.0 * pass.ci95[0],
                100.0 * pass.ci95[1]
            )
        };
        let change = 100.0 * (after.pass_at_1 - before.pass_at_1);
        format!(
            "{name:<22} {:<20} {:<20} {change:+.1} points\n",
            interval(before),
            interval(after)
        )
    };
    let eval = &summary.eval;
    let mut text = format!(
        "{:<22} {:<20} {:<20} change\n",
        "held-out pass@1", "before", "after"
    );
    let sampled = format!("sampled, T = {}", eval.after.temperature);
    text.push_str(&row(&sampled, &eval.before.sampled, &eval.after.sampled));
    if let (Some(before), Some(after)) = (&eval.before.greedy, &eval.after.greedy) {
        text.push_str(&row("greedy", before, after));
    }
    if eval.after.harnesses.len() > 1 {
        for (name, after) in &eval.after.harnesses {
            if let Some(before) = eval.before.harnesses.get(name) {
                text.push_str(&row(&format!("sampled, {name}"), before, after));
            }
        }
    }
    let pass = &eval.after.sampled;
    text.push_str(&format!(
        "{} tasks, {} sampled rollouts each side, 95 % intervals clustered by task; {} steps in {}\n",
        pass.tasks,
        pass.n,
        summary.steps,
        display::seconds(summary.wall_s)
    ));
    text
}
