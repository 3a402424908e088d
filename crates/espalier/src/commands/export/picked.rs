//! Which rollouts of a run are written, and their advantages.

use std::collections::BTreeMap;

use objective::group_advantages;
use record::{Disposition, Rollout};

use super::summary::Summary;
use crate::recipe::TrainSettings;

/// Splits of evaluations begin so: nothing may be trained on them.
const EVALUATION: &str = "eval";

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    /// Only rollouts whose disposition lets them be trained.
    pub(super) trained: bool,
    pub(super) split: Option<&'a str>,
    pub(super) reward_min: Option<f64>,
}

/// A rollout to be written.
#[derive(Debug)]
pub(super) struct Picked<'a> {
    pub(super) rollout: &'a Rollout,
    /// In its group, by the run's own settings; none when it has no vote, or its group is all
    /// equal and so was not trained.
    pub(super) advantage: Option<f64>,
    /// Its number in its group.
    pub(super) session: usize,
}

/// Picks, in the order of names: the order of starts depends on the machine's mood.
pub(super) fn pick<'a>(
    rollouts: &'a [Rollout],
    wanted: &Wanted<'_>,
    train: &TrainSettings,
    summary: &mut Summary,
) -> Vec<Picked<'a>> {
    summary.rollouts = rollouts.len();
    let mut groups: BTreeMap<&str, Vec<&Rollout>> = BTreeMap::new();
    for rollout in rollouts {
        groups
            .entry(rollout.spec.group.as_str())
            .or_default()
            .push(rollout);
    }
    let mut picked = Vec::new();
    for group in groups.values_mut() {
        group.sort_by(|a, b| a.spec.id.cmp(&b.spec.id));
        let mut advantages = advantages(group, train);
        for (session, rollout) in group.iter().enumerate() {
            match refused(rollout, wanted) {
                Some(reason) => summary.skip(&reason),
                None => picked.push(Picked {
                    rollout,
                    advantage: advantages.remove(rollout.spec.id.as_str()),
                    session,
                }),
            }
        }
    }
    picked.sort_by(|a, b| a.rollout.spec.id.cmp(&b.rollout.spec.id));
    picked
}

/// Advantages of the whole group, whatever of it is asked for: a rollout's advantage does not
/// depend on what is exported.
fn advantages<'a>(group: &[&'a Rollout], train: &TrainSettings) -> BTreeMap<&'a str, f64> {
    let voting: Vec<(&str, f64)> = group
        .iter()
        .filter(|rollout| {
            rollout
                .disposition
                .as_ref()
                .is_some_and(Disposition::has_vote)
        })
        .filter_map(|rollout| Some((rollout.spec.id.as_str(), rollout.verdict.as_ref()?.reward)))
        .collect();
    let rewards: Vec<f64> = voting.iter().map(|(_, reward)| *reward).collect();
    let found = group_advantages(&rewards, train.scale);
    if found.zero_variance {
        return BTreeMap::new();
    }
    let weigh = |advantage: f64| match advantage < 0.0 {
        true => advantage * train.negative_weight,
        false => advantage,
    };
    let values = found.values.into_iter().map(weigh);
    voting.into_iter().map(|(id, _)| id).zip(values).collect()
}

/// Why a rollout is not asked for.
fn refused(rollout: &Rollout, wanted: &Wanted<'_>) -> Option<String> {
    let Some(disposition) = &rollout.disposition else {
        return Some("still running".to_owned());
    };
    let split = rollout.spec.labels.get("split").map(String::as_str);
    match (wanted.split, split) {
        (Some(wanted), found) if found != Some(wanted) => {
            return Some(format!("split {}", found.unwrap_or("none")));
        }
        (None, Some(found)) if found.starts_with(EVALUATION) => {
            return Some(format!("split {found} (--split {found} writes it)"));
        }
        _ => {}
    }
    if wanted.trained && !disposition.trains() {
        return Some(format!("disposition {}", disposition.name()));
    }
    let reward = rollout.verdict.as_ref().map(|verdict| verdict.reward);
    match (wanted.reward_min, reward) {
        (Some(_), None) => Some("no reward".to_owned()),
        (Some(min), Some(reward)) if reward < min => Some(format!("reward below {min}")),
        _ => None,
    }
}
