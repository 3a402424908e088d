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
//!
//! With `train.mix` a step draws pairs of harness and task: every harness has its share of the
//! pairs, and within it families of its own, by what passed through *that* harness. A harness whose
//! share is 0 is never drawn: it is there to be evaluated.

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

/// The same by harness.
pub(crate) fn by_harness(tallies: &Tallies) -> Tallies {
    let mut by_harness = Tallies::new();
    for (key, tally) in tallies {
        let harness = key.split_once('/').map_or(key.as_str(), |(name, _)| name);
        let sum = by_harness.entry(harness.to_owned()).or_default();
        sum.voted += tally.voted;
        sum.passed += tally.passed;
    }
    by_harness
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

/// Shares of harnesses in a step's pairs, by name.
pub(crate) type Mix = BTreeMap<String, f64>;

/// A task of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Pair {
    /// Index into the source.
    pub(crate) task: usize,
    /// The harness that it goes through, as an index into the recipe's; `None`: all of them.
    pub(crate) harness: Option<usize>,
}

/// The tasks of a family, for one harness or for all.
#[derive(Debug)]
struct Deck {
    family: String,
    harness: Option<usize>,
    /// Part of a step's pairs that go to the deck's harness.
    share: f64,
    /// Its tasks, as indexes into the source.
    tasks: Vec<usize>,
    /// How many were dealt so far.
    dealt: u64,
}

impl Deck {
    /// Every deck is shuffled in an order of its own.
    fn seed(&self, run: u64) -> u64 {
        let of_harness = self.harness.map_or(0, |harness| harness as u64 + 1);
        run ^ (self.tasks[0] as u64 + 1).wrapping_mul(SPREAD)
            ^ of_harness.wrapping_mul(SPREAD).rotate_left(32)
    }
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
    mixed: bool,
    /// Harness by harness.
    decks: Vec<Deck>,
    tallies: Tallies,
}

impl Curriculum {
    /// Starts with no knowledge: every family counts as passing half of the time.
    pub(crate) fn new(
        settings: Option<CurriculumSettings>,
        mix: Option<&Mix>,
        seed: u64,
        samples: u32,
        harnesses: Vec<String>,
        tasks: &[Arc<Task>],
    ) -> Self {
        let shares: Vec<(Option<usize>, f64)> = match mix {
            None => vec![(None, 1.0)],
            Some(mix) => {
                let total: f64 = mix.values().sum();
                let named = harnesses.iter().enumerate();
                named
                    .filter_map(|(at, name)| Some((Some(at), mix.get(name)? / total)))
                    .filter(|(_, share)| *share > 0.0)
                    .collect()
            }
        };
        let mut decks: Vec<Deck> = Vec::new();
        for (harness, share) in shares {
            let first = decks.len();
            for (index, task) in tasks.iter().enumerate() {
                let own = &mut decks[first..];
                match own.iter_mut().find(|deck| deck.family == task.family) {
                    Some(deck) => deck.tasks.push(index),
                    None => decks.push(Deck {
                        family: task.family.clone(),
                        harness,
                        share,
                        tasks: vec![index],
                        dealt: 0,
                    }),
                }
            }
        }
        Self {
            settings,
            seed,
            tasks: tasks.len(),
            samples: i32::try_from(samples).unwrap_or(i32::MAX),
            harnesses,
            mixed: mix.is_some(),
            decks,
            tallies: Tallies::new(),
        }
    }

    /// The tasks of a step, none twice: fewer than `count` when a deck is small or was reshuffled
    /// within the step. Steps must be drawn in order, each once.
    pub(crate) fn draw(&mut self, step: u64, count: usize) -> Vec<Pair> {
        let mut chosen = if self.settings.is_none() && !self.mixed {
            batch_indexes(self.tasks, count, self.seed, step)
                .into_iter()
                .map(|task| Pair {
                    task,
                    harness: None,
                })
                .collect()
        } else {
            self.deal(step, count)
        };
        let mut seen = HashSet::new();
        chosen.retain(|pair| seen.insert(*pair));
        chosen
    }

    /// The part of a step that each deck is to have; the sum is 1.
    fn weights(&self) -> Vec<f64> {
        let of = |deck: &Deck| match self.settings {
            Some(settings) => self.usefulness(deck).max(settings.floor),
            None => deck.tasks.len() as f64,
        };
        let weights: Vec<f64> = self.decks.iter().map(of).collect();
        let mut totals: BTreeMap<Option<usize>, f64> = BTreeMap::new();
        for (deck, weight) in self.decks.iter().zip(&weights) {
            *totals.entry(deck.harness).or_default() += weight;
        }
        let each = self.decks.iter().zip(weights);
        each.map(|(deck, weight)| deck.share * weight / totals[&deck.harness])
            .collect()
    }

    fn deal(&mut self, step: u64, count: usize) -> Vec<Pair> {
        let weights = self.weights();
        // Systematic sampling: each family gets its share, rounded up or down by one throw.
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ step.wrapping_mul(SPREAD));
        let throw: f64 = random.random();
        let mut chosen = Vec::with_capacity(count);
        let (mut sum, mut passed) = (0.0, 0.0);
        for (deck, weight) in self.decks.iter_mut().zip(&weights) {
            sum += weight * count as f64;
            let seed = deck.seed(self.seed);
            while passed + throw < sum {
                let card = batch_indexes(deck.tasks.len(), 1, seed, deck.dealt)[0];
                chosen.push(Pair {
                    task: deck.tasks[card],
                    harness: deck.harness,
                });
                deck.dealt += 1;
                passed += 1.0;
            }
        }
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

    /// The chance that a group of this deck is mixed, as a mean over its harnesses. The pass rate
    /// has one imagined success and one imagined failure added.
    fn usefulness(&self, deck: &Deck) -> f64 {
        let harnesses = match deck.harness {
            Some(at) => &self.harnesses[at..=at],
            None => &self.harnesses[..],
        };
        let sum: f64 = harnesses
            .iter()
            .map(|harness| {
                let tally = self.tallies.get(&tally_key(harness, &deck.family));
                let Tally { voted, passed } = tally.copied().unwrap_or_default();
                let pass = (passed + 1.0) / (voted + 2.0);
                1.0 - pass.powi(self.samples) - (1.0 - pass).powi(self.samples)
            })
            .sum();
        sum / harnesses.len().max(1) as f64
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
        Curriculum::new(settings, None, 5, 4, vec!["react".into()], &tasks)
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
            for pair in one.draw(step, 26) {
                seen[pair.task] += 1;
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
            for pair in chosen {
                *drawn.entry(pair.task % 26).or_default() += 1;
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
            for pair in one.draw(step, 16) {
                seen[pair.task] += 1;
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
        let draws = |one: &mut Curriculum| -> Vec<Vec<Pair>> {
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

    #[test]
    fn a_mix_gives_every_harness_its_share_and_families_of_its_own() {
        let tasks: Vec<_> = task::chores::generate(task::Split::Train, 1, 260)
            .into_iter()
            .map(Arc::new)
            .collect();
        let mix = Mix::from([
            ("looked-at".into(), 0.0),
            ("pi".into(), 3.0),
            ("react".into(), 1.0),
        ]);
        let names = ["react", "pi", "looked-at"].map(str::to_owned).to_vec();
        for settings in [None, Some(CurriculumSettings::default())] {
            let mut one = Curriculum::new(settings, Some(&mix), 5, 4, names.clone(), &tasks);
            let mut counts = [0; 3];
            let mut first_family = [0; 2];
            for step in 0..20 {
                let chosen = one.draw(step, 64);
                let different: HashSet<_> = chosen.iter().collect();
                assert_eq!(different.len(), chosen.len(), "a pair twice in a step");
                for pair in chosen {
                    let harness = pair.harness.unwrap();
                    counts[harness] += 1;
                    assert_eq!(counts[2], 0, "weight 0 is never drawn");
                    first_family[harness] += usize::from(pair.task % 26 == 0);
                }
                // Through react the first family always fails, all else passes half of the time.
                one.observe(&tallies(|family| {
                    let place = task::chores::families().position(|one| one == family);
                    if place == Some(0) { 0.0 } else { 0.5 }
                }));
            }
            let share = counts[1] as f64 / (counts[0] + counts[1]) as f64;
            assert!((share - 0.75).abs() < 0.02, "{counts:?}");
            if settings.is_some() {
                let rate = |at: usize| first_family[at] as f64 / counts[at] as f64;
                assert!(rate(0) < 0.5 * rate(1), "{first_family:?} of {counts:?}");
            }
        }
    }
}
