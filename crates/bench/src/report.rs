//! All numbers of an evaluation, from its trials. Pure: the same trials give the same report,
//! whatever their order.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{
    Behaviour, Contamination, Interval, Matrix, Outcome, PassRate, Price, Score, Service,
    TaskResult, Trial, bootstrap, holm,
    interval::{mean_deviation, student},
    kappa, kappa_quadratic, matrix, pass_at_1, pass_at_k, pass_pow_k, pass_pow_k_plug_in,
    sign_flip, threshold_curve,
    trial::by_task,
    wilson,
};

/// Stands for all harnesses together.
pub const ALL: &str = "(all)";
/// Rewards from which on an attempt passes, in the look at how much that choice matters.
pub const THRESHOLDS: [f64; 7] = [0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0];

/// A model that was evaluated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Its name in the report.
    pub name: String,
    /// What answers, e.g. `embedded:policy`.
    pub engine: String,
    /// Sampling temperature.
    pub temperature: f32,
    /// What its tokens cost.
    pub price: Option<Price>,
}

/// What training cost between two models, in the currency of the prices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Training {
    /// The model before.
    pub from: String,
    /// The model after.
    pub to: String,
    /// Cost of the steps between them.
    pub cost: f64,
    /// How that was found, in words.
    pub basis: String,
}

/// What was evaluated and how.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// Where the tasks came from.
    pub tasks: String,
    /// How many.
    pub tasks_count: usize,
    /// SHA-256 over the digests of all tasks, in order.
    pub tasks_digest: String,
    /// Models, the one that others are compared with first.
    pub models: Vec<Model>,
    /// Harnesses with their versions.
    pub harnesses: BTreeMap<String, String>,
    /// Planned attempts per task, model and harness.
    pub attempts: u32,
    /// Seed of the run, and of what is drawn here.
    pub seed: u64,
    /// Resamples of each bootstrap and flips of each test.
    pub rounds: usize,
    /// Costs of training.
    pub training: Vec<Training>,
    /// How much of the tasks is in what models were trained on, by model.
    #[serde(default)]
    pub contamination: BTreeMap<String, Contamination>,
}

/// A mean with two intervals.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Mean {
    /// Mean over tasks.
    pub mean: f64,
    /// Student's interval over tasks.
    pub ci95: Interval,
    /// By resampling tasks.
    pub bootstrap95: Interval,
}

/// The k-draw measures at one k; `None` without a task that has k attempts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AtK {
    /// k.
    pub k: u32,
    /// pass@k, unbiased: 1 − C(n−c, k) / C(n, k).
    pub pass_at_k: Option<f64>,
    /// pass^k, unbiased: C(c, k) / C(n, k).
    pub pass_pow_k: Option<f64>,
    /// pass^k as (c / n)^k, with replacement, as Claw-Eval and others write it.
    pub pass_pow_k_plug_in: Option<f64>,
}

/// Everything about one model through one harness, or through [`ALL`] of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// The model.
    pub model: String,
    /// The harness, or [`ALL`].
    pub harness: String,
    /// Planned attempts.
    pub planned: usize,
    /// Attempts that count.
    pub scored: usize,
    /// The others, by why.
    pub missing: BTreeMap<String, usize>,
    /// Attempts that count although a budget ended them, by budget.
    pub truncated: BTreeMap<String, usize>,
    /// pass@1; `None` when nothing counts.
    pub pass: Option<PassRate>,
    /// Its interval by resampling tasks.
    pub pass_bootstrap95: Option<Interval>,
    /// Wilson's interval as if all attempts were independent: too narrow with several attempts
    /// per task, for comparison with reports that do this.
    pub pass_wilson95: Interval,
    /// More draws.
    pub at_k: Vec<AtK>,
    /// Mean reward.
    pub reward: Option<Mean>,
    /// Share of attempts with at least that reward.
    pub thresholds: Vec<(f64, f64)>,
    /// pass@1 by family.
    pub families: BTreeMap<String, f64>,
    /// Use and cost.
    pub service: Service,
    /// How it worked.
    pub behaviour: Behaviour,
    /// Reference steps over tool calls, at most 1, mean over passed attempts whose task has a
    /// reference solution.
    pub step_efficiency: Option<f64>,
    /// Share of the services of its task that an attempt asked anything, mean over attempts at
    /// tasks with services.
    pub services_coverage: Option<f64>,
}

/// One model against another on the tasks that both have attempts at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Compared with.
    pub from: String,
    /// Compared.
    pub to: String,
    /// The harness, or [`ALL`].
    pub harness: String,
    /// Tasks.
    pub tasks: usize,
    /// Difference of pass@1.
    pub pass: Mean,
    /// Difference of the mean reward.
    pub reward: Mean,
    /// Sign-flip test of the difference of pass@1.
    pub p_value: f64,
    /// The same, adjusted for the number of comparisons (Holm).
    pub p_adjusted: f64,
    /// McNemar's exact test, with one attempt per task and side only.
    pub mcnemar: Option<f64>,
}

/// How much judges agree.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Agreement {
    /// Positions of the two judges in the panel, from 1.
    pub judges: (usize, usize),
    /// Criteria that both marked.
    pub marks: usize,
    /// Share of equal levels.
    pub equal: f64,
    /// Cohen's kappa.
    pub kappa: Option<f64>,
    /// With quadratic weights.
    pub kappa_quadratic: Option<f64>,
}

/// A better model and what the improvement cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Improvement {
    /// The costs it rests on.
    pub training: Training,
    /// Percentage points of pass@1 over all harnesses.
    pub points: f64,
    /// Whether the interval of the difference lies above 0: only then it is one.
    pub verified: bool,
    /// Cost of a percentage point; `None` when nothing is verified.
    pub cost_per_point: Option<f64>,
}

/// The numbers of an evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// What was evaluated.
    pub setup: Setup,
    /// By model, then harness; [`ALL`] last when there are several harnesses.
    pub parts: Vec<Part>,
    /// Mean rewards and what their variance is made of.
    pub matrix: Matrix,
    /// First model against each other.
    pub comparisons: Vec<Comparison>,
    /// Pairs of judges.
    pub agreement: Vec<Agreement>,
    /// What improvements cost.
    pub improvements: Vec<Improvement>,
    /// Thresholds at which the models stand in another order than at the tasks' own.
    pub order_changes: Vec<f64>,
}

/// Successes and rewards by task.
struct PerTask<'a> {
    results: BTreeMap<&'a str, TaskResult>,
    rewards: BTreeMap<&'a str, f64>,
}

impl<'a> PerTask<'a> {
    fn of(trials: &[&'a Trial]) -> Self {
        let (mut results, mut rewards) = (BTreeMap::new(), BTreeMap::new());
        for (task, trials) in by_task(trials) {
            let scored: Vec<(f64, bool)> =
                trials.iter().filter_map(|trial| trial.scored()).collect();
            let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
            let result = TaskResult {
                samples: count(scored.len()),
                passed: count(scored.iter().filter(|(_, passed)| *passed).count()),
            };
            results.insert(task, result);
            if !scored.is_empty() {
                let each: Vec<f64> = scored.iter().map(|(reward, _)| *reward).collect();
                rewards.insert(task, mean_deviation(&each).0);
            }
        }
        Self { results, rewards }
    }

    fn shares(&self) -> BTreeMap<&'a str, f64> {
        self.results
            .iter()
            .filter_map(|(task, result)| Some((*task, result.share()?)))
            .collect()
    }
}

impl Setup {
    fn mean(&self, values: &[f64], low: f64) -> Option<Mean> {
        Some(Mean {
            mean: (!values.is_empty()).then(|| mean_deviation(values).0)?,
            ci95: student(values, low, 1.0),
            bootstrap95: bootstrap(values, self.rounds, self.seed)?,
        })
    }

    fn price(&self, model: &str) -> Option<Price> {
        self.models.iter().find(|one| one.name == model)?.price
    }
}

impl Report {
    /// Computes everything.
    #[must_use]
    pub fn of(setup: Setup, trials: &[Trial]) -> Self {
        let mut sorted: Vec<&Trial> = trials.iter().collect();
        sorted.sort_by(|a, b| {
            let key = |trial: &Trial| (trial.task.clone(), trial.harness.clone(), trial.attempt);
            key(a).cmp(&key(b))
        });
        let mut harnesses: Vec<&str> = setup.harnesses.keys().map(String::as_str).collect();
        if harnesses.len() > 1 {
            harnesses.push(ALL);
        }
        let of = |model: &str, harness: &str| -> Vec<&Trial> {
            sorted
                .iter()
                .copied()
                .filter(|trial| {
                    trial.model == model && (harness == ALL || trial.harness == harness)
                })
                .collect()
        };
        let mut parts = Vec::new();
        for model in &setup.models {
            for harness in &harnesses {
                parts.push(part(
                    &setup,
                    &model.name,
                    harness,
                    &of(&model.name, harness),
                ));
            }
        }
        let mut comparisons = Vec::new();
        if let Some((first, others)) = setup.models.split_first() {
            for other in others {
                for harness in &harnesses {
                    let (before, after) = (of(&first.name, harness), of(&other.name, harness));
                    comparisons.extend(compare(
                        &setup,
                        (&first.name, &other.name),
                        harness,
                        &PerTask::of(&before),
                        &PerTask::of(&after),
                    ));
                }
            }
        }
        let p_values: Vec<f64> = comparisons.iter().map(|one| one.p_value).collect();
        for (comparison, adjusted) in comparisons.iter_mut().zip(holm(&p_values)) {
            comparison.p_adjusted = adjusted;
        }
        let scores: Vec<Score> = sorted
            .iter()
            .filter_map(|trial| {
                Some(Score {
                    model: trial.model.clone(),
                    harness: trial.harness.clone(),
                    task: trial.task.clone(),
                    reward: trial.scored()?.0,
                })
            })
            .collect();
        let whole = harnesses.last().copied().unwrap_or(ALL);
        Self {
            matrix: matrix(&scores, setup.rounds, setup.seed),
            agreement: agreement(&sorted),
            improvements: improvements(&setup, &comparisons, whole),
            order_changes: order_changes(&parts, whole),
            parts,
            comparisons,
            setup,
        }
    }

    /// The part of one model and harness.
    #[must_use]
    pub fn part(&self, model: &str, harness: &str) -> Option<&Part> {
        self.parts
            .iter()
            .find(|part| part.model == model && part.harness == harness)
    }

    /// Where all harnesses are together: [`ALL`], or the only one.
    #[must_use]
    pub fn whole(&self) -> &str {
        match self.setup.harnesses.keys().next() {
            Some(only) if self.setup.harnesses.len() == 1 => only,
            _ => ALL,
        }
    }
}

fn part(setup: &Setup, model: &str, harness: &str, trials: &[&Trial]) -> Part {
    let per_task = PerTask::of(trials);
    let results: Vec<TaskResult> = per_task.results.values().copied().collect();
    let shares: Vec<f64> = per_task.shares().into_values().collect();
    let rewards: Vec<f64> = per_task.rewards.values().copied().collect();
    let scored: Vec<(f64, bool)> = trials.iter().filter_map(|trial| trial.scored()).collect();
    let passed = scored.iter().filter(|(_, passed)| *passed).count();
    let (mut missing, mut truncated) = (BTreeMap::new(), BTreeMap::new());
    let mut behaviour = Behaviour::default();
    let mut families: BTreeMap<&str, Vec<&Trial>> = BTreeMap::new();
    for trial in trials {
        match &trial.outcome {
            Outcome::Missing { why } => *missing.entry(why.clone()).or_default() += 1,
            Outcome::Scored {
                truncated: Some(why),
                ..
            } => *truncated.entry(why.clone()).or_default() += 1,
            Outcome::Scored { .. } => {}
        }
        if trial.usage.calls > 0 {
            behaviour.add(&trial.behaviour);
        }
        families.entry(&trial.family).or_default().push(trial);
    }
    let most = results.iter().map(|result| result.samples).max();
    let at_k = (1..=most.unwrap_or(0).min(64))
        .map(|k| AtK {
            k,
            pass_at_k: pass_at_k(&results, k),
            pass_pow_k: pass_pow_k(&results, k),
            pass_pow_k_plug_in: pass_pow_k_plug_in(&results, k),
        })
        .collect();
    let each: Vec<f64> = scored.iter().map(|(reward, _)| *reward).collect();
    let efficiency: Vec<f64> = trials
        .iter()
        .filter(|trial| trial.scored().is_some_and(|(_, passed)| passed))
        .filter(|trial| trial.usage.tool_calls > 0)
        .filter_map(|trial| {
            let steps = f64::from(trial.steps_reference?);
            Some((steps / trial.usage.tool_calls as f64).min(1.0))
        })
        .collect();
    let coverage: Vec<f64> = trials
        .iter()
        .filter_map(|trial| trial.services_coverage)
        .collect();
    Part {
        model: model.to_owned(),
        harness: harness.to_owned(),
        planned: trials.len(),
        scored: scored.len(),
        missing,
        truncated,
        pass: pass_at_1(&results),
        pass_bootstrap95: bootstrap(&shares, setup.rounds, setup.seed),
        pass_wilson95: wilson(passed as f64, scored.len() as f64),
        at_k,
        reward: setup.mean(&rewards, 0.0),
        thresholds: threshold_curve(&each, &THRESHOLDS),
        families: families
            .into_iter()
            .filter_map(|(family, trials)| {
                let results = PerTask::of(&trials).results;
                let results: Vec<TaskResult> = results.into_values().collect();
                Some((family.to_owned(), pass_at_1(&results)?.mean))
            })
            .collect(),
        service: Service::of(trials, setup.price(model)),
        behaviour,
        step_efficiency: (!efficiency.is_empty()).then(|| mean_deviation(&efficiency).0),
        services_coverage: (!coverage.is_empty()).then(|| mean_deviation(&coverage).0),
    }
}

fn compare(
    setup: &Setup,
    (from, to): (&str, &str),
    harness: &str,
    before: &PerTask<'_>,
    after: &PerTask<'_>,
) -> Option<Comparison> {
    let differences = |one: &BTreeMap<&str, f64>, other: &BTreeMap<&str, f64>| -> Vec<f64> {
        one.iter()
            .filter_map(|(task, value)| Some(other.get(task)? - value))
            .collect()
    };
    let passes = differences(&before.shares(), &after.shares());
    let rewards = differences(&before.rewards, &after.rewards);
    let pairs: Vec<(TaskResult, TaskResult)> = before
        .results
        .iter()
        .filter_map(|(task, one)| Some((*one, *after.results.get(task)?)))
        .collect();
    Some(Comparison {
        from: from.to_owned(),
        to: to.to_owned(),
        harness: harness.to_owned(),
        tasks: passes.len(),
        pass: setup.mean(&passes, -1.0)?,
        reward: setup.mean(&rewards, -1.0)?,
        p_value: sign_flip(&passes, setup.rounds, setup.seed),
        p_adjusted: 1.0,
        mcnemar: crate::paired_difference(&pairs)?.p_value,
    })
}

/// Marks of every two judges, paired by attempt and criterion.
fn agreement(trials: &[&Trial]) -> Vec<Agreement> {
    let mut pairs: BTreeMap<(usize, usize), Vec<(f64, f64)>> = BTreeMap::new();
    for marks in trials.iter().flat_map(|trial| trial.marks.values()) {
        for (second, b) in marks.iter().enumerate() {
            for (first, a) in marks[..second].iter().enumerate() {
                pairs
                    .entry((first + 1, second + 1))
                    .or_default()
                    .push((*a, *b));
            }
        }
    }
    pairs
        .into_iter()
        .map(|(judges, pairs)| Agreement {
            judges,
            marks: pairs.len(),
            equal: pairs.iter().filter(|(a, b)| a == b).count() as f64 / pairs.len().max(1) as f64,
            kappa: kappa(&pairs),
            kappa_quadratic: kappa_quadratic(&pairs),
        })
        .collect()
}

fn improvements(setup: &Setup, comparisons: &[Comparison], whole: &str) -> Vec<Improvement> {
    let of = |training: &Training| {
        let comparison = comparisons.iter().find(|one| {
            one.from == training.from && one.to == training.to && one.harness == whole
        })?;
        let points = 100.0 * comparison.pass.mean;
        let verified = comparison.pass.ci95.low > 0.0;
        Some(Improvement {
            training: training.clone(),
            points,
            verified,
            cost_per_point: verified.then(|| training.cost / points),
        })
    };
    setup.training.iter().filter_map(of).collect()
}

/// Thresholds at which two models swap places.
fn order_changes(parts: &[Part], whole: &str) -> Vec<f64> {
    let parts: Vec<&Part> = parts.iter().filter(|part| part.harness == whole).collect();
    let mut found = BTreeSet::new();
    for (index, one) in parts.iter().enumerate() {
        for other in &parts[..index] {
            let (Some(a), Some(b)) = (&one.pass, &other.pass) else {
                continue;
            };
            let own = (a.mean - b.mean).partial_cmp(&0.0);
            for (at, (threshold, share)) in one.thresholds.iter().enumerate() {
                let there = other.thresholds.get(at).map_or(0.0, |(_, share)| *share);
                let order = (share - there).partial_cmp(&0.0);
                // A tie is no other order.
                if share != &there && a.mean != b.mean && order != own {
                    found.insert(threshold.to_bits());
                }
            }
        }
    }
    // All are positive, so their bits are in the order of the numbers.
    found.into_iter().map(f64::from_bits).collect()
}
