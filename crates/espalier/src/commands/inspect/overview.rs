//! The whole run: what became of its rollouts, how well they did, what forks cost.

use std::{
    collections::{BTreeMap, HashSet},
    path::Path,
};

use record::{Call, Disposition, Rollout};
use serde::Serialize;
use tree::{Selection, Tree, select};

use super::rollout::reason_name;
use crate::text::{count, short, table};

/// Rollouts named as worth a look.
const ATTENTION_MAX: usize = 5;

/// Rollouts of one split, step and harness.
#[derive(Debug, Default, Serialize)]
struct Row {
    rollouts: u64,
    /// Rollouts that count.
    voted: u64,
    /// Of these, with the full reward.
    passed: u64,
    reward_sum: f64,
    calls: u64,
}

#[derive(Debug, Default, Serialize)]
struct Tokens {
    /// Prompts and replies of all calls.
    captured: u64,
    /// Stored once in the trees.
    unique: u64,
    generated: u64,
    /// Went into the loss: kept branches of training rollouts whose group had a difference.
    trained: u64,
    /// Generated, but context for want of log-probabilities.
    without_logprobs: u64,
}

#[derive(Debug, Default, Serialize)]
struct ForkCost {
    forks: u64,
    /// Prompt tokens that had to be computed again.
    tokens_again: u64,
    /// The most expensive one: rollout, call, evidence.
    example: String,
    #[serde(skip)]
    example_tokens: usize,
}

#[derive(Debug, Serialize)]
struct Attention {
    rollout: String,
    why: String,
}

/// What is known of a run.
#[derive(Debug, Default, Serialize)]
pub(super) struct Overview {
    rollouts: u64,
    running: u64,
    calls: u64,
    dispositions: BTreeMap<&'static str, u64>,
    faults: BTreeMap<String, u64>,
    /// Rollouts that were cut short or masked, by reason.
    reasons: BTreeMap<String, u64>,
    /// By split, step and harness.
    #[serde(serialize_with = "as_list")]
    results: BTreeMap<(String, u64, String), Row>,
    tokens: Tokens,
    forks: BTreeMap<&'static str, ForkCost>,
    /// Trainable tokens that are not trained, by reason.
    tokens_dropped: BTreeMap<String, u64>,
    over_branched: u64,
    /// Rollouts whose tree could not be built, with the error.
    unreadable: BTreeMap<String, String>,
    attention: Vec<Attention>,
    /// Groups whose rewards differ.
    #[serde(skip)]
    groups_with_difference: HashSet<String>,
}

fn as_list<S: serde::Serializer>(
    results: &BTreeMap<(String, u64, String), Row>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(results.iter().map(|((split, step, harness), row)| {
        serde_json::json!({"split": split, "step": step, "harness": harness, "counts": row})
    }))
}

impl Overview {
    /// An empty overview; looks at all rollouts only for the differences within groups.
    pub(super) fn new(rollouts: &[Rollout]) -> Self {
        let mut rewards: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for rollout in rollouts.iter().filter(|rollout| voted(rollout)) {
            let reward = rollout.verdict.as_ref().map(|verdict| verdict.reward);
            rewards
                .entry(rollout.spec.group.as_str())
                .or_default()
                .extend(reward);
        }
        let differing = rewards
            .into_iter()
            .filter(|(_, rewards)| rewards.windows(2).any(|pair| pair[0] != pair[1]))
            .map(|(group, _)| group.to_owned());
        Self {
            groups_with_difference: differing.collect(),
            ..Self::default()
        }
    }

    /// Counts a rollout in.
    pub(super) fn add(&mut self, rollout: &Rollout, calls: &[Call], selection: &Selection) {
        let id = rollout.spec.id.as_str();
        self.rollouts += 1;
        self.calls += calls.len() as u64;
        match &rollout.disposition {
            None => self.running += 1,
            Some(disposition) => {
                *self.dispositions.entry(disposition.name()).or_default() += 1;
                self.note_fault(id, disposition);
            }
        }
        self.note_result(rollout, calls.len() as u64);
        match Tree::build(calls) {
            Ok(tree) => self.note_tree(rollout, &tree, selection),
            Err(error) => {
                self.unreadable.insert(id.to_owned(), error.to_string());
            }
        }
    }

    fn note_fault(&mut self, id: &str, disposition: &Disposition) {
        let (fault, reason) = match disposition {
            Disposition::Train => return,
            Disposition::Truncate { reason } | Disposition::Mask { reason } => {
                let reason = format!("{}: {}", disposition.name(), short(reason, 60));
                *self.reasons.entry(reason).or_default() += 1;
                return;
            }
            Disposition::Retry { fault, reason } | Disposition::Discard { fault, reason } => {
                (fault, reason)
            }
        };
        let fault = fault_name(*fault);
        self.attend(id, format!("{fault}: {}", short(reason, 100)));
        *self.faults.entry(fault).or_default() += 1;
    }

    fn attend(&mut self, id: &str, why: String) {
        if self.attention.len() < ATTENTION_MAX {
            self.attention.push(Attention {
                rollout: id.to_owned(),
                why,
            });
        }
    }

    fn note_result(&mut self, rollout: &Rollout, calls: u64) {
        let label = |name: &str| rollout.spec.labels.get(name).cloned();
        let step = label("step")
            .and_then(|step| step.parse().ok())
            .unwrap_or(0);
        let split = label("split").unwrap_or_else(|| "-".to_owned());
        let row = self
            .results
            .entry((split, step, rollout.spec.harness.clone()))
            .or_default();
        row.rollouts += 1;
        row.calls += calls;
        if let (true, Some(verdict)) = (voted(rollout), &rollout.verdict) {
            row.voted += 1;
            row.passed += u64::from(verdict.reward >= 1.0);
            row.reward_sum += verdict.reward;
        }
    }

    fn note_tree(&mut self, rollout: &Rollout, tree: &Tree, selection: &Selection) {
        let id = rollout.spec.id.as_str();
        let stats = tree.stats();
        self.tokens.captured += stats.tokens_logical as u64;
        self.tokens.unique += stats.tokens_unique as u64;
        self.tokens.generated += stats.tokens_generated as u64;
        self.tokens.without_logprobs += stats.tokens_without_logprobs as u64;
        for fork in &tree.forks {
            let cost = self.forks.entry(fork.cause.name()).or_default();
            cost.forks += 1;
            cost.tokens_again += fork.tokens_again as u64;
            if cost.example.is_empty() || fork.tokens_again > cost.example_tokens {
                cost.example_tokens = fork.tokens_again;
                cost.example = format!("{id}#{}: {}", fork.call, short(&fork.evidence, 60));
            }
        }
        let kept = select(tree, selection);
        for dropped in &kept.dropped {
            if dropped.tokens_trainable > 0 {
                let tokens = self
                    .tokens_dropped
                    .entry(reason_name(dropped.reason))
                    .or_default();
                *tokens += dropped.tokens_trainable as u64;
            }
        }
        if let Some(over) = kept.discarded {
            self.over_branched += 1;
            self.attend(id, over.to_string());
        }
        let in_training = rollout
            .spec
            .labels
            .get("split")
            .is_some_and(|split| split == "train");
        let trains = rollout
            .disposition
            .as_ref()
            .is_some_and(Disposition::trains);
        if in_training
            && trains
            && self
                .groups_with_difference
                .contains(rollout.spec.group.as_str())
        {
            self.tokens.trained += kept.tokens_trained as u64;
        }
    }

    /// For a terminal.
    pub(super) fn text(&self, run: &Path) -> String {
        let run = run.display();
        let running = match self.running {
            0 => String::new(),
            running => format!(" ({running} running)"),
        };
        let mut text = format!(
            "{run}: {} rollouts{running}, {} calls\n",
            self.rollouts, self.calls
        );
        let mut part = |part: String| {
            text.push('\n');
            text.push_str(&part);
        };
        let pairs = |counts: Vec<(String, u64)>| -> Vec<Vec<String>> {
            counts
                .into_iter()
                .map(|(name, number)| vec![name, count(number)])
                .collect()
        };
        let named = |(name, number): (&&str, &u64)| ((*name).to_owned(), *number);
        part(table(
            &["disposition", "rollouts"],
            &pairs(self.dispositions.iter().map(named).collect()),
        ));
        let owned = |(name, number): (&String, &u64)| (name.clone(), *number);
        if !self.faults.is_empty() {
            part(table(
                &["fault", "rollouts"],
                &pairs(self.faults.iter().map(owned).collect()),
            ));
        }
        if !self.reasons.is_empty() {
            let rows = pairs(self.reasons.iter().map(owned).collect());
            part(table(&["reason", "rollouts"], &rows));
        }
        part(self.results_text());
        let tokens = [
            ("captured", self.tokens.captured),
            ("unique", self.tokens.unique),
            ("generated", self.tokens.generated),
            ("trained", self.tokens.trained),
            ("without log-probabilities", self.tokens.without_logprobs),
        ];
        part(table(
            &["tokens", ""],
            &pairs(tokens.map(|(name, n)| (name.to_owned(), n)).into()),
        ));
        if !self.forks.is_empty() {
            let rows: Vec<Vec<String>> = self
                .forks
                .iter()
                .map(|(cause, cost)| {
                    let (forks, again) = (cost.forks.to_string(), count(cost.tokens_again));
                    vec![(*cause).to_owned(), forks, again, cost.example.clone()]
                })
                .collect();
            part(table(
                &["fork cause", "forks", "tokens again", "dearest"],
                &rows,
            ));
        }
        if !self.tokens_dropped.is_empty() {
            let rows = pairs(self.tokens_dropped.iter().map(owned).collect());
            part(table(&["not trained because", "tokens"], &rows));
        }
        if self.over_branched > 0 {
            part(format!(
                "{} rollouts are over-branched: nothing of them is trained\n",
                self.over_branched
            ));
        }
        for (id, error) in &self.unreadable {
            part(format!("{id}: no tree: {error}\n"));
        }
        if !self.attention.is_empty() {
            let rows: Vec<Vec<String>> = self
                .attention
                .iter()
                .map(|attention| vec![attention.rollout.clone(), attention.why.clone()])
                .collect();
            part(table(&["worth a look", "why"], &rows));
        }
        part(format!("one rollout: espalier inspect {run} ROLLOUT\n"));
        text
    }

    fn results_text(&self) -> String {
        let rows: Vec<Vec<String>> = self
            .results
            .iter()
            .map(|((split, step, harness), row)| {
                let voted = row.voted.max(1) as f64;
                let or_dash = |text: String| if row.voted == 0 { "-".to_owned() } else { text };
                vec![
                    split.clone(),
                    step.to_string(),
                    harness.clone(),
                    row.rollouts.to_string(),
                    (row.rollouts - row.voted).to_string(),
                    or_dash(format!("{:.1} %", 100.0 * row.passed as f64 / voted)),
                    or_dash(format!("{:.3}", row.reward_sum / voted)),
                    format!("{:.1}", row.calls as f64 / row.rollouts.max(1) as f64),
                ]
            })
            .collect();
        let header = [
            "split",
            "step",
            "harness",
            "rollouts",
            "no vote",
            "pass",
            "reward",
            "calls each",
        ];
        table(&header, &rows)
    }
}

fn voted(rollout: &Rollout) -> bool {
    rollout.verdict.is_some()
        && rollout
            .disposition
            .as_ref()
            .is_some_and(Disposition::has_vote)
}

/// The fault's word, as in the ledger.
pub(super) fn fault_name(fault: record::Fault) -> String {
    match serde_json::to_value(fault) {
        Ok(serde_json::Value::String(name)) => name,
        _ => format!("{fault:?}"),
    }
}
