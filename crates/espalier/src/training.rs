//! From finished rollouts to trees and advantages: the part between orchestrator and learner.

use std::collections::BTreeMap;

use ledger::Ledger;
use objective::{Advantages, Matrix, group_advantages, leave_one_out_advantages};
use record::Rollout;
use serde::{Deserialize, Serialize};
use tree::{Kept, Selection, TrainTree, Tree, select};

use crate::{
    curriculum::Tallies,
    error::CliError,
    recipe::{Baseline, TrainSettings},
};

/// What became of a batch's rollouts on their way to the learner.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Harvest {
    /// Groups with a vote.
    pub(crate) groups: usize,
    /// Of those, groups whose rewards are all equal: nothing to learn.
    pub(crate) groups_zero_variance: usize,
    /// Mean reward over rollouts with a vote.
    pub(crate) reward: f64,
    /// Part of them with the full reward.
    pub(crate) pass: f64,
    /// Rollouts with a vote.
    pub(crate) voted: usize,
    /// Votes and passes by `harness/family`.
    #[serde(default)]
    pub(crate) families: Tallies,
    /// Rollouts by disposition.
    pub(crate) dispositions: BTreeMap<String, u64>,
    /// Rollouts by how they ended (docs/rollouts.md).
    #[serde(default)]
    pub(crate) endings: BTreeMap<String, u64>,
    /// Rollouts that are out because of the shape of their tree.
    pub(crate) over_branched: usize,
    /// Divergences by cause.
    pub(crate) forks: BTreeMap<String, u64>,
    /// Prompt tokens that those cost.
    pub(crate) fork_tokens: u64,
    /// Tokens of all calls, prompts and replies.
    pub(crate) tokens_captured: u64,
    /// Tokens of the trees.
    pub(crate) tokens_unique: u64,
    /// Generated tokens on the way to the learner.
    pub(crate) tokens_trained: u64,
    /// Generated tokens that carried no log-probability (I4).
    pub(crate) tokens_without_logprobs: u64,
    /// Model calls.
    pub(crate) calls: u64,
}

/// A rollout that the learner trains on.
pub(crate) struct Judged {
    pub(crate) tree: TrainTree,
    /// Final reward.
    pub(crate) reward: f64,
    /// What its group says of it; of no meaning where a critic judges.
    pub(crate) advantage: f64,
}

/// A rollout's tree and what was kept of it.
pub(crate) struct Grown {
    pub(crate) tree: Tree,
    pub(crate) kept: Kept,
}

/// Builds a rollout's tree from the ledger and selects.
pub(crate) fn grow(
    ledger: &Ledger,
    rollout: &Rollout,
    selection: &Selection,
    harvest: &mut Harvest,
) -> Result<Grown, CliError> {
    let id = &rollout.spec.id;
    let failed =
        |error: tree::TreeError| CliError::failed(format!("rollout {id}: its tree"), error);
    let calls = ledger
        .calls(id)
        .map_err(|error| CliError::failed(format!("rollout {id}: its calls"), error))?;
    let tree = Tree::build(&calls).map_err(failed)?;
    let kept = select(&tree, selection);
    harvest.calls += calls.len() as u64;
    let stats = tree.stats();
    harvest.tokens_captured += stats.tokens_logical as u64;
    harvest.tokens_unique += stats.tokens_unique as u64;
    harvest.tokens_without_logprobs += kept.tokens_without_logprobs as u64;
    for fork in &tree.forks {
        *harvest
            .forks
            .entry(fork.cause.name().to_owned())
            .or_default() += 1;
        harvest.fork_tokens += fork.tokens_again as u64;
    }
    harvest.over_branched += usize::from(kept.discarded.is_some());
    Ok(Grown { tree, kept })
}

/// Like [`grow`], for supervised training: every generated token of the kept branches is a
/// target, whether or not it has a log-probability.
pub(crate) fn grow_supervised(
    ledger: &Ledger,
    rollout: &Rollout,
    selection: &Selection,
    harvest: &mut Harvest,
) -> Result<Option<TrainTree>, CliError> {
    let id = &rollout.spec.id;
    let grown = grow(ledger, rollout, selection, harvest)?;
    grown
        .kept
        .supervised_tree(&grown.tree)
        .map(Some)
        .map_err(|error| CliError::failed(format!("rollout {id}: its tree"), error))
}

fn weighted(advantage: f64, train: &TrainSettings) -> f64 {
    if advantage < 0.0 {
        advantage * train.negative_weight
    } else {
        advantage
    }
}

/// Advantages of one group, before anything that looks at the whole batch.
fn advantages(rewards: &[f64], train: &TrainSettings) -> Advantages {
    match train.baseline {
        Baseline::Group => group_advantages(rewards, train.scale),
        Baseline::LeaveOneOut => leave_one_out_advantages(rewards, train.scale),
        Baseline::None => Advantages {
            values: rewards.to_vec(),
            ..group_advantages(rewards, train.scale)
        },
    }
}

/// Mean 0 and deviation 1 over all trained tokens of the batch (REINFORCE++, arXiv 2501.03262).
fn whiten(judged: &mut [Judged]) {
    let terms = |one: &Judged| one.tree.terms();
    let all: Vec<f64> = judged
        .iter()
        .flat_map(|one| std::iter::repeat_n(one.advantage, terms(one)))
        .collect();
    let (row, mask) = Matrix::padded(&[all]);
    let white = row.masked_whiten(&mask, true);
    let mut at = 0;
    for one in judged {
        one.advantage = white.values().get(at).copied().unwrap_or(0.0);
        at += terms(one);
    }
}

/// Trees, rewards and advantages of a batch. Groups are formed by the rollouts' group ids; one vote
/// per rollout; rollouts without tokens are left out. Groups without variance are counted, and left
/// out where they say nothing: not to a critic, and not to a baseline of the whole batch.
pub(crate) fn harvest(
    ledger: &Ledger,
    rollouts: &[&Rollout],
    train: &TrainSettings,
) -> Result<(Vec<Judged>, Harvest), CliError> {
    let mut harvest = Harvest::default();
    let mut groups: BTreeMap<&str, Vec<&Rollout>> = BTreeMap::new();
    for rollout in rollouts {
        let Some(disposition) = &rollout.disposition else {
            continue;
        };
        *harvest
            .dispositions
            .entry(disposition.name().to_owned())
            .or_default() += 1;
        let ending = rollout::Ending::counted_as(disposition).to_owned();
        *harvest.endings.entry(ending).or_default() += 1;
        if disposition.has_vote() && rollout.verdict.is_some() {
            groups
                .entry(rollout.spec.group.as_str())
                .or_default()
                .push(rollout);
        }
    }
    let equal_groups_count = train.ppo.is_some() || train.whiten;
    let mut judged = Vec::new();
    for group in groups.values() {
        harvest.groups += 1;
        let rewards: Vec<f64> = group
            .iter()
            .filter_map(|r| r.verdict.as_ref())
            .map(|v| v.reward)
            .collect();
        harvest.voted += rewards.len();
        harvest.reward += rewards.iter().sum::<f64>();
        harvest.pass += rewards.iter().filter(|reward| **reward >= 1.0).count() as f64;
        let advantages = advantages(&rewards, train);
        harvest.groups_zero_variance += usize::from(advantages.zero_variance);
        for ((rollout, advantage), reward) in group.iter().zip(advantages.values).zip(rewards) {
            let grown = grow(ledger, rollout, &train.selection, &mut harvest)?;
            let trains = rollout
                .disposition
                .as_ref()
                .is_some_and(record::Disposition::trains);
            if !trains || (advantages.zero_variance && !equal_groups_count) {
                continue;
            }
            // Nothing is kept of an over-branched rollout: its tree has no term.
            let train_tree = grown.kept.train_tree(&grown.tree).map_err(|error| {
                CliError::failed(format!("group {}: a tree", rollout.spec.group), error)
            })?;
            if train_tree.terms() == 0 {
                continue;
            }
            let advantage = if train.whiten {
                advantage
            } else {
                weighted(advantage, train)
            };
            if advantage == 0.0 && !equal_groups_count {
                continue;
            }
            harvest.tokens_trained += train_tree.terms() as u64;
            judged.push(Judged {
                tree: train_tree,
                reward,
                advantage,
            });
        }
    }
    if train.whiten {
        whiten(&mut judged);
        for one in &mut judged {
            one.advantage = weighted(one.advantage, train);
        }
    }
    let voted = harvest.voted.max(1) as f64;
    harvest.reward /= voted;
    harvest.pass /= voted;
    Ok((judged, harvest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(baseline: Baseline, scale: objective::Scale) -> TrainSettings {
        TrainSettings {
            baseline,
            scale,
            ..TrainSettings::default()
        }
    }

    #[test]
    fn baselines_are_those_of_the_reference_maths() {
        use objective::Scale;
        let rewards = [1.0, 0.0, 0.25, 0.0];
        let of = |baseline, scale| advantages(&rewards, &settings(baseline, scale)).values;
        let group = of(Baseline::Group, Scale::None);
        assert!((group[0] - 0.6875).abs() < 1e-12);
        let one_out = of(Baseline::LeaveOneOut, Scale::None);
        assert!((one_out[0] - (1.0 - 0.25 / 3.0)).abs() < 1e-12);
        assert_eq!(of(Baseline::None, Scale::Std), rewards);
        assert!(advantages(&[1.0, 1.0], &settings(Baseline::None, Scale::Std)).zero_variance);
    }
}
