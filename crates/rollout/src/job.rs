//! What to run, and how rollouts, groups and attempts are named.
//!
//! Names are derived, never drawn, so that a resumed run gives the same rollout the same name.

use std::{collections::BTreeMap, sync::Arc};

use harness::Installed;
use record::{GroupId, IdError, RolloutId, RolloutSpec, Sampling, TaskId};
use sha2::{Digest, Sha256};
use task::Task;

/// Attempts that one job may have over all resumptions of a run.
pub const ATTEMPTS_MAX: u32 = 100;

/// Bytes of a name that are kept free for the suffix of an attempt (`.r99`).
const SUFFIX_BYTES: usize = 4;

/// One rollout to run.
#[derive(Debug, Clone)]
pub struct Job {
    /// What it is to be.
    pub spec: RolloutSpec,
    /// The task.
    pub task: Arc<Task>,
    /// The harness.
    pub installed: Arc<Installed>,
    /// How replies are drawn. The seed is replaced by the rollout's.
    pub sampling: Sampling,
    /// What it may use, below the limits of all.
    pub budget: Budget,
}

/// What one rollout may use. `None` leaves it to [`crate::Settings`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Budget {
    /// Model calls.
    pub calls_max: Option<u32>,
    /// Tokens generated in all calls.
    pub generated_tokens_max: Option<u64>,
    /// Seconds of the harness, of each step for tasks in steps. The smallest limit wins: this, the
    /// task's own, the stage's, the profile's.
    pub harness_s: Option<u64>,
}

/// Rollouts of one task through one harness in one step.
#[derive(Debug, Clone, Copy)]
pub struct GroupPlan<'a> {
    /// Seed of the run.
    pub run_seed: u64,
    /// Step of the run.
    pub step: u32,
    /// Which tasks these are: `train`, `held_out` …
    pub split: &'a str,
    /// The task.
    pub task: &'a TaskId,
    /// The harness.
    pub harness: &'a str,
    /// How many rollouts.
    pub samples: u32,
}

/// The rollouts of a group: `s0003-TASK-HARNESS-k02` in group `s0003-TASK-HARNESS`, with labels
/// `step`, `split`, `sample`. For a split other than `train` the names start with it:
/// `held_out-s0003-…`. A name that would be too long has its task cut and completed by a digest.
///
/// # Errors
/// [`IdError`] when split or harness have characters that no name may have.
pub fn plan_group(plan: GroupPlan<'_>) -> Result<Vec<RolloutSpec>, IdError> {
    let prefix = match plan.split {
        "train" => format!("s{:04}", plan.step),
        split => format!("{split}-s{:04}", plan.step),
    };
    let overhead = prefix.len() + plan.harness.len() + "--".len() + "-k0000".len() + SUFFIX_BYTES;
    let room = record::id::ID_BYTES_MAX.saturating_sub(overhead);
    let task = shorten(plan.task.as_str(), room);
    let group = GroupId::new(format!("{prefix}-{task}-{}", plan.harness))?;
    (0..plan.samples)
        .map(|sample| {
            let id = RolloutId::new(format!("{group}-k{sample:02}"))?;
            let labels = [
                ("step", plan.step.to_string()),
                ("split", plan.split.to_owned()),
                ("sample", sample.to_string()),
            ];
            Ok(RolloutSpec {
                seed: seed(plan.run_seed, &id),
                id,
                task: plan.task.clone(),
                group: group.clone(),
                harness: plan.harness.to_owned(),
                labels: labels
                    .into_iter()
                    .map(|(key, value)| (key.to_owned(), value))
                    .collect::<BTreeMap<_, _>>(),
            })
        })
        .collect()
}

/// The spec of an attempt: the job's own for 0; `ID.rN`, labelled `attempt`, for later ones.
///
/// # Errors
/// [`IdError`] when the name is too long for a suffix.
pub fn attempt(spec: &RolloutSpec, number: u32) -> Result<RolloutSpec, IdError> {
    let mut spec = spec.clone();
    if number > 0 {
        spec.id = RolloutId::new(format!("{}.r{number}", spec.id))?;
        spec.labels.insert("attempt".into(), number.to_string());
    }
    Ok(spec)
}

/// Seed of a rollout: from the run's seed and the rollout's name.
fn seed(run_seed: u64, id: &RolloutId) -> u64 {
    let mut hash = Sha256::new();
    hash.update(run_seed.to_le_bytes());
    hash.update(id.as_str().as_bytes());
    let digest = hash.finalize();
    digest
        .iter()
        .take(8)
        .fold(0, |seed, byte| (seed << 8) | u64::from(*byte))
}

/// The text when it has at most `bytes_max` bytes, else its start and 8 digits of its digest.
fn shorten(text: &str, bytes_max: usize) -> String {
    if text.len() <= bytes_max {
        return text.to_owned();
    }
    let digest = hex::encode(Sha256::digest(text.as_bytes()));
    // Ids are ASCII, so every byte is a character.
    let kept = text.get(..bytes_max.saturating_sub(9)).unwrap_or_default();
    format!("{kept}.{}", &digest[..8])
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn plan<'a>(task: &'a TaskId, harness: &'a str, split: &'a str, samples: u32) -> GroupPlan<'a> {
        GroupPlan {
            run_seed: 7,
            step: 3,
            split,
            task,
            harness,
            samples,
        }
    }

    #[test]
    fn names_follow_the_scheme() {
        let task = TaskId::new("rename-0001").unwrap();
        let specs = plan_group(plan(&task, "pi", "train", 3)).unwrap();
        assert_eq!(specs[2].id.as_str(), "s0003-rename-0001-pi-k02");
        assert_eq!(specs[2].group.as_str(), "s0003-rename-0001-pi");
        assert_eq!(specs[2].labels["step"], "3");
        assert_eq!(specs[2].labels["split"], "train");
        assert_eq!(specs[2].labels["sample"], "2");
        let eval = plan_group(plan(&task, "pi", "held_out", 1)).unwrap();
        assert_eq!(eval[0].id.as_str(), "held_out-s0003-rename-0001-pi-k00");
        let again = attempt(&specs[2], 2).unwrap();
        assert_eq!(again.id.as_str(), "s0003-rename-0001-pi-k02.r2");
        assert_eq!((again.seed, &again.group), (specs[2].seed, &specs[2].group));
    }

    proptest! {
        #[test]
        fn names_and_seeds_are_distinct_and_leave_room_for_attempts(
            a in "[a-z0-9][a-z0-9._:-]{0,127}", b in "[a-z0-9][a-z0-9._:-]{0,127}",
            harness in "[a-z]{1,40}", samples in 1_u32..6,
        ) {
            prop_assume!(a != b);
            let mut ids = HashSet::new();
            let mut seeds = HashSet::new();
            for task in [a, b] {
                let task = TaskId::new(task).unwrap();
                for split in ["train", "held_out"] {
                    for spec in plan_group(plan(&task, &harness, split, samples)).unwrap() {
                        prop_assert!(attempt(&spec, ATTEMPTS_MAX - 1).is_ok());
                        prop_assert!(ids.insert(spec.id.clone()));
                        prop_assert!(seeds.insert(spec.seed));
                    }
                }
            }
        }
    }
}
