//! The whole run: what became of its rollouts, how well they did, what was kept and lost, what
//! forks cost, where the time went. Made of the rollouts' records and summaries; calls are not
//! read here.

use std::collections::{BTreeMap, HashSet};

use record::{Disposition, Rollout, StageSeconds};
use rollout::{Ending, Summary};
use serde::Serialize;

use crate::text::short;

/// Rollouts named as worst in each respect.
const WORST_MAX: usize = 3;
/// Rollouts named because of a fault.
const FAULTS_MAX: usize = 5;

/// Rollouts of one split, step and harness.
#[derive(Debug, Default, Serialize)]
pub(super) struct Row {
    pub(super) rollouts: u64,
    /// Rollouts that count.
    pub(super) voted: u64,
    /// Of these, with the full reward.
    pub(super) passed: u64,
    pub(super) reward_sum: f64,
    pub(super) calls: u64,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct Tokens {
    /// Prompts and replies of all calls.
    pub(super) captured: u64,
    /// Stored once in the trees.
    pub(super) unique: u64,
    pub(super) generated: u64,
    /// Went into the loss: kept branches of training rollouts whose group had a difference.
    pub(super) trained: u64,
    /// Generated, but context for want of log-probabilities.
    pub(super) without_logprobs: u64,
}

/// Trainable tokens of one harness.
#[derive(Debug, Default, Serialize)]
pub(super) struct Retained {
    pub(super) rollouts: u64,
    pub(super) trainable: u64,
    /// On kept branches of rollouts that train.
    pub(super) retained: u64,
    /// On branches that the rule drops, by reason.
    pub(super) dropped: BTreeMap<String, u64>,
    /// Of rollouts that do not train, by disposition.
    pub(super) out: BTreeMap<&'static str, u64>,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct ForkCost {
    pub(super) forks: u64,
    /// Prompt tokens that had to be computed again.
    pub(super) tokens_again: u64,
    /// The most expensive one: rollout, call, evidence.
    pub(super) example: String,
    #[serde(skip)]
    example_tokens: u64,
}

/// How calls repeat and carry on each other.
#[derive(Debug, Default, Serialize)]
pub(super) struct CallCounts {
    pub(super) attempts: u64,
    /// Attempts that brought nothing new.
    pub(super) duplicates: u64,
    /// Calls that carry on an earlier one, and how many of them token by token.
    pub(super) continued: u64,
    pub(super) exact: u64,
    pub(super) parse_failed: u64,
    pub(super) classes: BTreeMap<String, u64>,
}

/// Rollouts that ended in one way.
#[derive(Debug, Serialize)]
pub(super) struct Ended {
    pub(super) rollouts: u64,
    /// Whose doing it is.
    pub(super) blame: &'static str,
    /// In words.
    pub(super) what: &'static str,
}

/// Seconds of one stage over all rollouts that ended.
#[derive(Debug, Serialize)]
pub(super) struct Stage {
    pub(super) stage: &'static str,
    pub(super) p50_s: f64,
    pub(super) p95_s: f64,
    pub(super) max_s: f64,
    pub(super) sum_s: f64,
}

/// A rollout worth a look.
#[derive(Debug, Serialize)]
pub(super) struct Worst {
    pub(super) rollout: String,
    pub(super) why: String,
}

/// What is known of a run.
#[derive(Debug, Default, Serialize)]
pub(super) struct Overview {
    pub(super) rollouts: u64,
    pub(super) running: u64,
    pub(super) dispositions: BTreeMap<&'static str, u64>,
    pub(super) faults: BTreeMap<String, u64>,
    /// Rollouts that were cut short or masked, by reason.
    pub(super) reasons: BTreeMap<String, u64>,
    /// By ending and disposition, with what the table of dispositions says of it.
    #[serde(serialize_with = "ended_as_list")]
    pub(super) endings: BTreeMap<(String, &'static str), Ended>,
    /// By split, step and harness.
    #[serde(serialize_with = "as_list")]
    pub(super) results: BTreeMap<(String, u64, String), Row>,
    pub(super) tokens: Tokens,
    /// By harness.
    pub(super) retained: BTreeMap<String, Retained>,
    pub(super) forks: BTreeMap<String, ForkCost>,
    pub(super) calls: u64,
    pub(super) call_counts: CallCounts,
    /// Generated tokens by how many versions their weights were older than those in force when
    /// their rollout ended.
    pub(super) stale: BTreeMap<u64, u64>,
    /// Slowest first.
    pub(super) stages: Vec<Stage>,
    pub(super) over_branched: u64,
    /// Rollouts whose tree could not be built, with the error.
    pub(super) unreadable: BTreeMap<String, String>,
    pub(super) worst: Vec<Worst>,
    #[serde(skip)]
    scores: Vec<Score>,
    /// Groups whose rewards differ.
    #[serde(skip)]
    groups_with_difference: HashSet<String>,
}

/// In what a rollout may be the worst.
#[derive(Debug)]
struct Score {
    rollout: String,
    tokens_lost: u64,
    trainable: u64,
    tokens_again: u64,
    forks: u64,
    seconds: f64,
    harness_s: f64,
}

fn as_list<S: serde::Serializer>(
    results: &BTreeMap<(String, u64, String), Row>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(results.iter().map(|((split, step, harness), row)| {
        serde_json::json!({"split": split, "step": step, "harness": harness, "counts": row})
    }))
}

fn ended_as_list<S: serde::Serializer>(
    endings: &BTreeMap<(String, &'static str), Ended>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(endings.iter().map(|((ending, disposition), ended)| {
        serde_json::json!({"ending": ending, "disposition": disposition, "rollouts": ended.rollouts,
            "blame": ended.blame, "what": ended.what})
    }))
}

fn add<K: Ord>(counts: &mut BTreeMap<K, u64>, key: K, number: u64) {
    *counts.entry(key).or_default() += number;
}

impl Overview {
    /// Looks at a run: each rollout with what its calls come to.
    pub(super) fn of<'a>(run: impl Iterator<Item = (&'a Rollout, &'a Summary)> + Clone) -> Self {
        let mut rewards: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for (rollout, _) in run.clone().filter(|(rollout, _)| voted(rollout)) {
            let reward = rollout.verdict.as_ref().map(|verdict| verdict.reward);
            let group = rewards.entry(rollout.spec.group.as_str()).or_default();
            group.extend(reward);
        }
        let differing = rewards
            .into_iter()
            .filter(|(_, rewards)| rewards.windows(2).any(|pair| pair[0] != pair[1]))
            .map(|(group, _)| group.to_owned());
        let mut overview = Self {
            groups_with_difference: differing.collect(),
            ..Self::default()
        };
        let mut ended = Vec::new();
        for (rollout, summary) in run {
            overview.add(rollout, summary);
            if rollout.disposition.is_some() {
                ended.push(rollout.seconds);
            }
        }
        overview.stages = stages(&ended);
        overview.name_worst();
        overview
    }

    fn add(&mut self, rollout: &Rollout, summary: &Summary) {
        let id = rollout.spec.id.as_str();
        self.rollouts += 1;
        match &rollout.disposition {
            None => self.running += 1,
            Some(disposition) => {
                add(&mut self.dispositions, disposition.name(), 1);
                let row = Ending::of(disposition);
                let name = short(Ending::counted_as(disposition), 40);
                self.endings
                    .entry((name, disposition.name()))
                    .or_insert(Ended {
                        rollouts: 0,
                        blame: row.blame.name(),
                        what: row.what,
                    })
                    .rollouts += 1;
                self.note_fault(id, disposition);
            }
        }
        self.note_result(rollout, u64::from(summary.calls.calls));
        self.note_calls(summary);
        self.note_tokens(rollout, summary);
        self.note_forks(id, summary);
        let newest = rollout.lineage.policy_end.unwrap_or_else(|| {
            let versions = summary.tokens_by_policy.keys().last();
            versions.copied().unwrap_or(rollout.lineage.policy)
        });
        for (version, tokens) in &summary.tokens_by_policy {
            add(&mut self.stale, newest.saturating_sub(*version), *tokens);
        }
        if let Some(error) = &summary.unreadable {
            self.unreadable.insert(id.to_owned(), error.clone());
        }
        let seconds = &rollout.seconds;
        self.scores.push(Score {
            rollout: id.to_owned(),
            tokens_lost: summary.tokens.dropped.values().sum(),
            trainable: summary.trainable(),
            tokens_again: summary.forks.values().map(|price| price.tokens_again).sum(),
            forks: summary.forks.values().map(|price| price.forks).sum(),
            seconds: all_stages(seconds).iter().skip(1).map(|(_, s)| s).sum(),
            harness_s: seconds.harness,
        });
    }

    fn note_fault(&mut self, id: &str, disposition: &Disposition) {
        let (fault, reason) = match disposition {
            Disposition::Train => return,
            Disposition::Truncate { reason } | Disposition::Mask { reason } => {
                let reason = format!("{}: {}", disposition.name(), short(reason, 60));
                add(&mut self.reasons, reason, 1);
                return;
            }
            Disposition::Retry { fault, reason } | Disposition::Discard { fault, reason } => {
                (fault, reason)
            }
        };
        let fault = fault.name().to_owned();
        if self.worst.len() < FAULTS_MAX {
            self.worst.push(Worst {
                rollout: id.to_owned(),
                why: format!("{fault}: {}", short(reason, 100)),
            });
        }
        add(&mut self.faults, fault, 1);
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

    fn note_calls(&mut self, summary: &Summary) {
        let (all, own) = (&mut self.call_counts, &summary.calls);
        self.calls += u64::from(own.calls);
        for (sum, number) in [
            (&mut all.attempts, own.attempts),
            (&mut all.duplicates, own.duplicates),
            (&mut all.continued, own.continued),
            (&mut all.exact, own.exact),
            (&mut all.parse_failed, own.parse_failed),
        ] {
            *sum += u64::from(number);
        }
        for (class, calls) in &own.classes {
            add(&mut all.classes, class.clone(), u64::from(*calls));
        }
    }

    fn note_tokens(&mut self, rollout: &Rollout, summary: &Summary) {
        let own = &summary.tokens;
        self.tokens.captured += own.captured;
        self.tokens.unique += own.unique;
        self.tokens.generated += own.generated;
        self.tokens.without_logprobs += own.without_logprobs;
        self.over_branched += u64::from(summary.over_branched.is_some());
        let of_harness = self
            .retained
            .entry(rollout.spec.harness.clone())
            .or_default();
        of_harness.rollouts += 1;
        of_harness.trainable += summary.trainable();
        let trains = rollout
            .disposition
            .as_ref()
            .is_some_and(Disposition::trains);
        if trains {
            of_harness.retained += own.retained;
            for (reason, tokens) in &own.dropped {
                add(&mut of_harness.dropped, reason.clone(), *tokens);
            }
        } else if summary.trainable() > 0 {
            let name = rollout
                .disposition
                .as_ref()
                .map_or("running", Disposition::name);
            add(&mut of_harness.out, name, summary.trainable());
        }
        let in_training = rollout
            .spec
            .labels
            .get("split")
            .is_some_and(|split| split == "train");
        let differs = self
            .groups_with_difference
            .contains(rollout.spec.group.as_str());
        if in_training && trains && differs {
            self.tokens.trained += own.retained;
        }
    }

    fn note_forks(&mut self, id: &str, summary: &Summary) {
        for (cause, price) in &summary.forks {
            let cost = self.forks.entry(cause.clone()).or_default();
            cost.forks += price.forks;
            cost.tokens_again += price.tokens_again;
            if cost.example.is_empty() || price.dearest_tokens > cost.example_tokens {
                cost.example_tokens = price.dearest_tokens;
                let evidence = short(&price.dearest_evidence, 60);
                cost.example = format!("{id}#{}: {evidence}", price.dearest_call);
            }
        }
    }

    /// Names the rollouts that lost most, computed most again, and took longest.
    fn name_worst(&mut self) {
        let mut named = Vec::new();
        let mut by = |weight: fn(&Score) -> f64, why: fn(&Score) -> String| {
            let mut order: Vec<&Score> = self.scores.iter().filter(|s| weight(s) > 0.0).collect();
            order.sort_by(|a, b| {
                weight(b)
                    .total_cmp(&weight(a))
                    .then_with(|| a.rollout.cmp(&b.rollout))
            });
            named.extend(order.into_iter().take(WORST_MAX).map(|score| Worst {
                rollout: score.rollout.clone(),
                why: why(score),
            }));
        };
        by(
            |score| score.tokens_lost as f64,
            |score| {
                let (lost, of) = (score.tokens_lost, score.trainable);
                format!("{lost} of {of} trainable tokens are on dropped branches")
            },
        );
        by(
            |score| score.tokens_again as f64,
            |score| {
                format!(
                    "{} tokens again in {} forks",
                    score.tokens_again, score.forks
                )
            },
        );
        by(
            |score| score.seconds,
            |score| {
                let (all, harness) = (score.seconds, score.harness_s);
                format!("{all:.1} s, {harness:.1} s of it in the harness")
            },
        );
        self.worst.extend(named);
    }
}

fn all_stages(seconds: &StageSeconds) -> [(&'static str, f64); 8] {
    let StageSeconds {
        queue,
        create,
        ready,
        harness,
        settle,
        verify_wait,
        verify,
        destroy,
    } = *seconds;
    [
        ("queue", queue),
        ("create", create),
        ("ready", ready),
        ("harness", harness),
        ("settle", settle),
        ("verify_wait", verify_wait),
        ("verify", verify),
        ("destroy", destroy),
    ]
}

/// The stages, slowest at 95 % first.
fn stages(ended: &[StageSeconds]) -> Vec<Stage> {
    if ended.is_empty() {
        return Vec::new();
    }
    let mut seconds: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
    for rollout in ended {
        for (stage, own) in all_stages(rollout) {
            seconds.entry(stage).or_default().push(own);
        }
    }
    let mut stages: Vec<Stage> = seconds
        .into_iter()
        .map(|(stage, mut seconds)| {
            seconds.sort_by(f64::total_cmp);
            Stage {
                stage,
                p50_s: at(&seconds, 0.5),
                p95_s: at(&seconds, 0.95),
                max_s: at(&seconds, 1.0),
                sum_s: seconds.iter().sum(),
            }
        })
        .collect();
    stages.sort_by(|a, b| b.p95_s.total_cmp(&a.p95_s));
    stages
}

/// The smallest of the sorted values that so large a part does not exceed.
fn at(sorted: &[f64], part: f64) -> f64 {
    let rank = (part * sorted.len() as f64).ceil() as usize;
    let index = rank.max(1) - 1;
    sorted.get(index).copied().unwrap_or(0.0)
}

fn voted(rollout: &Rollout) -> bool {
    rollout.verdict.is_some()
        && rollout
            .disposition
            .as_ref()
            .is_some_and(Disposition::has_vote)
}
