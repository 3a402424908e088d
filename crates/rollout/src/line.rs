//! Which job is next. Pure.
//!
//! Groups complete together: a group that was begun goes on before another is begun, because only a
//! complete group says something. One task may not have all places while others wait
//! ([`crate::places::Pools::task_share`]). A batch may have enough: when so many groups are complete
//! and their rewards differ, the rest is not run.

use std::collections::{BTreeMap, HashMap, VecDeque};

use record::{Disposition, Rollout};

use crate::job::Job;

/// The jobs of a batch, by group.
#[derive(Debug)]
pub(crate) struct Line {
    groups: Vec<Group>,
    /// The group of each job.
    group_of: Vec<usize>,
    /// Running jobs by task.
    running: BTreeMap<String, usize>,
    /// Places of one task while others wait.
    share: usize,
}

#[derive(Debug)]
struct Group {
    task: String,
    waiting: VecDeque<usize>,
    begun: bool,
    /// Jobs without a result.
    open: usize,
    rewards: Vec<f64>,
}

impl Group {
    fn note(&mut self, rollout: &Rollout) {
        self.open = self.open.saturating_sub(1);
        let votes = rollout
            .disposition
            .as_ref()
            .is_some_and(Disposition::has_vote);
        if let (true, Some(verdict)) = (votes, &rollout.verdict) {
            self.rewards.push(verdict.reward);
        }
    }

    /// Complete, and with something to learn from.
    fn usable(&self) -> bool {
        let differ = self.rewards.windows(2).any(|pair| pair[0] != pair[1]);
        self.open == 0 && differ
    }
}

impl Line {
    pub(crate) fn new(jobs: &[Job], share: usize) -> Self {
        let mut line = Self {
            groups: Vec::new(),
            group_of: Vec::new(),
            running: BTreeMap::new(),
            share: share.max(1),
        };
        let mut known = HashMap::new();
        for (index, job) in jobs.iter().enumerate() {
            let at = *known
                .entry(job.spec.group.clone())
                .or_insert(line.groups.len());
            if at == line.groups.len() {
                line.groups.push(Group {
                    task: job.spec.task.to_string(),
                    waiting: VecDeque::new(),
                    begun: false,
                    open: 0,
                    rewards: Vec::new(),
                });
            }
            line.groups[at].waiting.push_back(index);
            line.groups[at].open += 1;
            line.group_of.push(at);
        }
        line
    }

    /// The next job; `None` when none waits.
    pub(crate) fn next(&mut self) -> Option<usize> {
        let running = |group: &Group| self.running.get(&group.task).copied().unwrap_or(0);
        let (at, _) = self
            .groups
            .iter()
            .enumerate()
            .filter(|(_, group)| !group.waiting.is_empty())
            .min_by_key(|&(at, group)| {
                let own = running(group);
                // Within the share the order of groups decides, beyond it who has least.
                let beyond = if own < self.share { 0 } else { own };
                (beyond, !group.begun, at)
            })?;
        let group = &mut self.groups[at];
        group.begun = true;
        let job = group.waiting.pop_front()?;
        *self.running.entry(group.task.clone()).or_default() += 1;
        Some(job)
    }

    /// A job that was given out has ended; without a result when it was not run.
    pub(crate) fn ended(&mut self, job: usize, rollout: Option<&Rollout>) {
        let Some(at) = self.group_of.get(job).copied() else {
            return;
        };
        let group = &mut self.groups[at];
        if let Some(running) = self.running.get_mut(&group.task) {
            *running = running.saturating_sub(1);
        }
        if let Some(rollout) = rollout {
            group.note(rollout);
        }
    }

    /// A job has a result already and will not be given out.
    pub(crate) fn known(&mut self, job: usize, rollout: &Rollout) {
        let Some(at) = self.group_of.get(job).copied() else {
            return;
        };
        let group = &mut self.groups[at];
        group.waiting.retain(|waiting| *waiting != job);
        group.begun = true;
        group.note(rollout);
    }

    /// Complete groups whose rewards differ.
    pub(crate) fn usable(&self) -> usize {
        self.groups.iter().filter(|group| group.usable()).count()
    }

    /// Whether all jobs of this job's group have a result.
    pub(crate) fn complete(&self, job: usize) -> bool {
        self.group_of
            .get(job)
            .is_some_and(|at| self.groups[*at].open == 0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use record::{GroupId, RolloutId, RolloutSpec, Sampling, StageSeconds, TaskId, Verdict};
    use task::{Split, chores};

    use super::*;
    use crate::{Budget, lineage, settings::Settings};

    /// Jobs with these tasks and groups.
    fn jobs(of: &[(&str, &str)]) -> Vec<Job> {
        let task = Arc::new(chores::generate(Split::Train, 0, 1).remove(0));
        let installed = Arc::new(harness::Installed {
            profile: harness::Profile::load(None, "react").unwrap(),
            digest: String::new(),
            bundle: "/".into(),
            node: String::new(),
            python: String::new(),
            mounts: Vec::new(),
        });
        let jobs = of.iter().enumerate().map(|(index, (task_id, group))| Job {
            spec: RolloutSpec {
                id: RolloutId::new(format!("r{index}")).unwrap(),
                task: TaskId::new(*task_id).unwrap(),
                group: GroupId::new(*group).unwrap(),
                harness: "react".into(),
                labels: BTreeMap::new(),
                seed: 0,
            },
            task: Arc::clone(&task),
            installed: Arc::clone(&installed),
            sampling: Sampling::default(),
            budget: Budget::default(),
        });
        jobs.collect()
    }

    fn ended(job: &Job, reward: Option<f64>) -> Rollout {
        let settings = Settings::new("/gateway.sock".into());
        Rollout {
            spec: job.spec.clone(),
            lineage: lineage::at_start(job, &settings, 0),
            started_ms: 0,
            finished_ms: Some(1),
            harness_exit: None,
            harness_tail: String::new(),
            calls: 1,
            seconds: StageSeconds::default(),
            verdict: reward.map(|reward| Verdict {
                reward,
                scores: BTreeMap::new(),
                evidence: String::new(),
                seconds: 0.0,
            }),
            disposition: Some(match reward {
                Some(_) => Disposition::Train,
                None => Disposition::Discard {
                    fault: record::Fault::SandboxLost,
                    reason: String::new(),
                },
            }),
        }
    }

    #[test]
    fn groups_complete_together_and_no_task_has_all_places() {
        let jobs = jobs(&[
            ("a", "a1"),
            ("a", "a1"),
            ("a", "a2"),
            ("b", "b"),
            ("b", "b"),
        ]);
        let mut line = Line::new(&jobs, 2);
        let mut next = || line.next();
        assert_eq!([next(), next()], [Some(0), Some(1)], "one group first");
        assert_eq!(next(), Some(3), "task a has its share, so b begins");
        assert_eq!(next(), Some(4));
        assert_eq!(next(), Some(2), "a place that nobody else wants");
        assert_eq!(next(), None);
    }

    #[test]
    fn enough_counts_complete_groups_with_a_difference() {
        let jobs = jobs(&[("a", "a"), ("a", "a"), ("b", "b"), ("b", "b"), ("c", "c")]);
        let mut line = Line::new(&jobs, 4);
        while line.next().is_some() {}
        line.ended(0, Some(&ended(&jobs[0], Some(1.0))));
        assert_eq!(line.usable(), 0, "half a group");
        assert!(!line.complete(0));
        line.ended(1, Some(&ended(&jobs[1], Some(0.0))));
        assert_eq!(line.usable(), 1);
        assert!(line.complete(0) && !line.complete(2));
        line.ended(2, Some(&ended(&jobs[2], Some(1.0))));
        line.ended(3, Some(&ended(&jobs[3], Some(1.0))));
        line.ended(4, Some(&ended(&jobs[4], None)));
        assert_eq!(line.usable(), 1, "equal rewards and faults say nothing");
    }

    proptest! {
        #[test]
        fn every_job_is_given_out_once_and_shares_hold_while_others_wait(
            of in proptest::collection::vec((0_u8..4, 0_u8..3), 1..40),
            places in 1_usize..12,
            share in 1_usize..6,
            ends in proptest::collection::vec(0_usize..100, 40),
        ) {
            let names: Vec<(String, String)> = of
                .iter()
                .map(|(task, group)| (format!("t{task}"), format!("t{task}-g{group}")))
                .collect();
            let names: Vec<(&str, &str)> = names.iter().map(|(t, g)| (t.as_str(), g.as_str())).collect();
            let jobs = jobs(&names);
            let mut line = Line::new(&jobs, share);
            let (mut running, mut given) = (Vec::new(), Vec::new());
            let mut ends = ends.into_iter();
            loop {
                while running.len() < places {
                    let Some(job) = line.next() else { break };
                    prop_assert!(!given.contains(&job));
                    given.push(job);
                    running.push(job);
                    let own = |task: &str| running.iter().filter(|job| names[**job].0 == task).count();
                    if own(names[job].0) > share {
                        // Nobody who has less than the share waits.
                        for (at, (task, _)) in names.iter().enumerate() {
                            prop_assert!(given.contains(&at) || own(task) >= share);
                        }
                    }
                }
                if running.is_empty() {
                    break;
                }
                let at = ends.next().unwrap_or(0) % running.len();
                let job = running.swap_remove(at);
                line.ended(job, Some(&ended(&jobs[job], Some(0.5))));
            }
            prop_assert_eq!(given.len(), jobs.len());
            prop_assert!((0..jobs.len()).all(|job| line.complete(job)));
            prop_assert!(line.running.values().all(|running| *running == 0));
        }
    }
}
