//! Which tasks a step trains on.
//!
//! A group whose rollouts all pass or all fail teaches nothing (its advantages are 0). With
//! `train.curriculum` a step draws families of tasks by how likely a group of theirs is to be
//! mixed: with pass rate `p` and groups of `n`, `1 − pⁿ − (1 − p)ⁿ`. A floor keeps every family in
//! play: what fails always today may succeed tomorrow, and what always passes must not be unlearned
//! unseen. Without it, every task is drawn equally often.
//!
//! The draw of a step is a pure function of the seed, the step, and what the earlier steps found
//! ([`Curriculum::observe`]), so that a resumed run draws the same tasks: it replays the tallies
//! that `metrics.jsonl` kept.
//!
//! Within a family tasks are dealt from a shuffled deck, so none comes back before all were seen.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use learner::sft::batch_indexes;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use record::{Rollout, TaskId};
use serde::{Deserialize, Serialize};
use task::Task;

/// Settings of the draw.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct CurriculumSettings {
    /// Least weight of a family, between 0 and 1; 1 makes all equal.
    pub(crate) floor: f64,
    /// What a tally still counts one step later, between 0 and 1: the pass rate follows about the
    /// last `1 / (1 − memory)` steps.
    pub(crate) memory: f64,
}

impl Default for CurriculumSettings {
    fn default() -> Self {
        Self {
            floor: 0.1,
            memory: 0.9,
        }
    }
}

/// Rollouts with a vote, and how many of them had the full reward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tally {
    pub(crate) voted: f64,
    pub(crate) passed: f64,
}

/// Tallies of a step by `harness/family`.
pub(crate) type Tallies = BTreeMap<String, Tally>;

/// The key of [`Tallies`].
fn tally_key(harness: &str, family: &str) -> String {
    format!("{harness}/{family}")
}

/// Counts the votes and passes of a step's rollouts.
pub(crate) fn tally(rollouts: &[&Rollout], tasks: &[Arc<Task>]) -> Tallies {
    let family: HashMap<&TaskId, &str> = tasks
        .iter()
        .map(|task| (&task.id, task.family.as_str()))
        .collect();
    let mut tallies = Tallies::new();
    for rollout in rollouts {
        let votes = rollout
            .disposition
            .as_ref()
            .is_some_and(record::Disposition::has_vote);
        let (true, Some(verdict), Some(family)) = (
            votes,
            rollout.verdict.as_ref(),
            family.get(&rollout.spec.task),
        ) else {
            continue;
        };
        let key = tally_key(&rollout.spec.harness, family);
        let tally = tallies.entry(key).or_default();
        tally.voted += 1.0;
        tally.passed += f64::from(u8::from(verdict.reward >= 1.0));
    }
    tallies
}

#[derive(Debug)]
struct Family {
    name: String,
    /// Its tasks, as indexes into the source.
    tasks: Vec<usize>,
    /// How many were dealt so far.
    dealt: u64,
}

/// The draw of every step.
#[derive(Debug)]
pub(crate) struct Curriculum {
    settings: Option<CurriculumSettings>,
    seed: u64,
    tasks: usize,
    /// Rollouts per group.
    samples: i32,
    harnesses: Vec<String>,
    families: Vec<Family>,
    tallies: Tallies,
}

impl Curriculum {
    /// Starts with no knowledge: every family counts as passing half of the time.
    pub(crate) fn new(
        settings: Option<CurriculumSettings>,
        seed: u64,
        samples: u32,
        harnesses: Vec<String>,
        tasks: &[Arc<Task>],
    ) -> Self {
        let mut families: Vec<Family> = Vec::new();
        for (index, task) in tasks.iter().enumerate() {
            match families.iter_mut().find(|one| one.name == task.family) {
                Some(family) => family.tasks.push(index),
                None => families.push(Family {
                    name: task.family.clone(),
                    tasks: vec![index],
                    dealt: 0,
                }),
            }
        }
        Self {
            settings,
            seed,
            tasks: tasks.len(),
            samples: i32::try_from(samples).unwrap_or(i32::MAX),
            harnesses,
            families,
            tallies: Tallies::new(),
        }
    }

    /// The tasks of a step, none twice: fewer than `count` when a deck is small or was reshuffled
    /// within the step. Steps must be drawn in order, each once.
    pub(crate) fn draw(&mut self, step: u64, count: usize) -> Vec<usize> {
        let Some(settings) = self.settings else {
            let mut chosen = batch_indexes(self.tasks, count, self.seed, step);
            let mut seen = HashSet::new();
            chosen.retain(|index| seen.insert(*index));
            return chosen;
        };
        let weights: Vec<f64> = self
            .families
            .iter()
            .map(|family| self.usefulness(&family.name).max(settings.floor))
            .collect();
        let total: f64 = weights.iter().sum();
        // Systematic sampling: each family gets its share, rounded up or down by one throw.
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ step.wrapping_mul(SPREAD));
        let throw: f64 = random.random();
        let mut chosen = Vec::with_capacity(count);
        let (mut sum, mut passed) = (0.0, 0.0);
        for (family, weight) in self.families.iter_mut().zip(&weights) {
            sum += weight / total * count as f64;
            // The deck of a family has a seed of its own.
            let seed = self.seed ^ (family.tasks[0] as u64 + 1).wrapping_mul(SPREAD);
            while passed + throw < sum {
                let card = batch_indexes(family.tasks.len(), 1, seed, family.dealt)[0];
                chosen.push(family.tasks[card]);
                family.dealt += 1;
                passed += 1.0;
            }
        }
        let mut seen = HashSet::new();
        chosen.retain(|index| seen.insert(*index));
        chosen
    }

    /// Takes in what a step found.
    pub(crate) fn observe(&mut self, found: &Tallies) {
        let memory = self.settings.unwrap_or_default().memory;
        for tally in self.tallies.values_mut() {
            tally.voted *= memory;
            tally.passed *= memory;
        }
        for (key, tally) in found {
            let known = self.tallies.entry(key.clone()).or_default();
            known.voted += tally.voted;
            known.passed += tally.passed;
        }
    }

    /// The chance that a group of this family is mixed, as a mean over harnesses. The pass rate has
    /// one imagined success and one imagined failure added.
    fn usefulness(&self, family: &str) -> f64 {
        let sum: f64 = self
            .harnesses
            .iter()
            .map(|harness| {
                let tally = self.tallies.get(&tally_key(harness, family));
                let Tally { voted, passed } = tally.copied().unwrap_or_default();
                let pass = (passed + 1.0) / (voted + 2.0);
                1.0 - pass.powi(self.samples) - (1.0 - pass).powi(self.samples)
            })
            .sum();
        sum / self.harnesses.len().max(1) as f64
    }
}

/// An odd constant that spreads small numbers over 64 bits (2⁶⁴ / φ).
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use super::*;

    fn curriculum(settings: Option<CurriculumSettings>) -> Curriculum {
        let tasks: Vec<_> = task::chores::generate(task::Split::Train, 1, 260)
            .into_iter()
            .map(Arc::new)
            .collect();
        Curriculum::new(settings, 5, 4, vec!["react".into()], &tasks)
    }

    fn tallies(pass: impl Fn(&str) -> f64) -> Tallies {
        task::chores::families()
            .map(|family| {
                let tally = Tally {
                    voted: 40.0,
                    passed: 40.0 * pass(family),
                };
                (tally_key("react", family), tally)
            })
            .collect()
    }

    #[test]
    fn without_it_every_task_comes_equally_often() {
        let mut one = curriculum(None);
        let mut seen = vec![0; 260];
        for step in 0..10 {
            one.observe(&tallies(|_| 0.0));
            for index in one.draw(step, 26) {
                seen[index] += 1;
            }
        }
        assert_eq!(seen, vec![1; 260]);
    }

    #[test]
    fn mixed_families_are_drawn_more_often_and_none_is_forgotten() {
        let mut one = curriculum(Some(CurriculumSettings::default()));
        let mut drawn: BTreeMap<usize, usize> = BTreeMap::new();
        for step in 0..40 {
            let chosen = one.draw(step, 64);
            let different: HashSet<_> = chosen.iter().collect();
            assert_eq!(different.len(), chosen.len(), "a task twice in a step");
            assert!((50..=64).contains(&chosen.len()), "{}", chosen.len());
            for index in chosen {
                *drawn.entry(index % 26).or_default() += 1;
            }
            // The first half of the families always fails, the other passes half of the time.
            one.observe(&tallies(|family| {
                let place = task::chores::families().position(|one| one == family);
                if place < Some(13) { 0.0 } else { 0.5 }
            }));
        }
        let failing: usize = (0..13).map(|family| drawn[&family]).sum();
        let mixed: usize = (13..26).map(|family| drawn[&family]).sum();
        assert!((0..26).all(|family| drawn[&family] >= 5), "{drawn:?}");
        assert!(mixed > 4 * failing, "{mixed} {failing}");
    }

    #[test]
    fn a_family_deals_all_its_tasks_before_one_comes_back() {
        let mut one = curriculum(Some(CurriculumSettings::default()));
        let mut seen = vec![0_u32; 260];
        for step in 0..30 {
            for index in one.draw(step, 16) {
                seen[index] += 1;
            }
        }
        for family in 0..26 {
            let own: Vec<u32> = (0..10).map(|card| seen[family + 26 * card]).collect();
            let (least, most) = (own.iter().min(), own.iter().max());
            assert!(most.zip(least).is_some_and(|(a, b)| a - b <= 1), "{own:?}");
        }
    }

    #[test]
    fn the_draw_depends_on_nothing_but_seed_step_and_tallies() {
        let draws = |one: &mut Curriculum| -> Vec<Vec<usize>> {
            (0..5)
                .map(|step| {
                    let chosen = one.draw(step, 20);
                    one.observe(&tallies(|family| family.len() as f64 / 10.0));
                    chosen
                })
                .collect()
        };
        let settings = Some(CurriculumSettings::default());
        let first = draws(&mut curriculum(settings));
        assert_eq!(first, draws(&mut curriculum(settings)));
        assert_ne!(first[0], first[1]);
    }
}
