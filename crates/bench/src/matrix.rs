//! Models × harnesses on the same tasks: means with intervals, and where the variance is.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{
    Interval, bootstrap,
    interval::{mean_deviation, student},
};

/// One score of one attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// The policy.
    pub model: String,
    /// The harness.
    pub harness: String,
    /// The task.
    pub task: String,
    /// In [0, 1].
    pub reward: f64,
}

/// One cell of the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Mean over tasks of the mean reward.
    pub mean: f64,
    /// Its 95 % interval, clustered by task.
    pub ci95: Interval,
    /// The same by resampling tasks.
    pub bootstrap95: Interval,
    /// Tasks.
    pub tasks: usize,
    /// Attempts with a verdict.
    pub attempts: usize,
}

/// Shares of the variance of cell means (per task) that each part explains; they add up to 1
/// when anything varies, and are all 0 when nothing does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Decomposition {
    /// The model alone.
    pub model: f64,
    /// The harness alone.
    pub harness: f64,
    /// Their interaction: models that do better in one harness than the other.
    pub interaction: f64,
    /// Tasks, whatever the model and harness.
    pub task: f64,
    /// All else: tasks that suit one pair.
    pub residual: f64,
    /// Tasks that every pair has, on which this rests.
    pub tasks: usize,
}

/// A matrix of cells and what the variance is made of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Matrix {
    /// By model, then harness.
    pub cells: BTreeMap<String, BTreeMap<String, Cell>>,
    /// `None` unless every pair has scores and shares at least one task.
    pub decomposition: Option<Decomposition>,
}

/// Mean reward by (model, harness), then task.
type Means<'a> = BTreeMap<(&'a str, &'a str), BTreeMap<&'a str, f64>>;

/// Model, harness, task and mean reward.
type Row<'a> = (&'a str, &'a str, &'a str, f64);

/// Builds the matrix. The order of scores does not matter; `seed` and `rounds` are the
/// bootstrap's.
#[must_use]
pub fn matrix(scores: &[Score], rounds: usize, seed: u64) -> Matrix {
    let mut groups: BTreeMap<(&str, &str), BTreeMap<&str, Vec<f64>>> = BTreeMap::new();
    for score in scores {
        groups
            .entry((&score.model, &score.harness))
            .or_default()
            .entry(&score.task)
            .or_default()
            .push(score.reward);
    }
    let mut cells: BTreeMap<String, BTreeMap<String, Cell>> = BTreeMap::new();
    let mut means: Means<'_> = BTreeMap::new();
    for ((model, harness), tasks) in &groups {
        let by_task: BTreeMap<&str, f64> = tasks
            .iter()
            .map(|(task, rewards)| (*task, mean_deviation(rewards).0))
            .collect();
        let values: Vec<f64> = by_task.values().copied().collect();
        let whole = Interval {
            low: 0.0,
            high: 1.0,
        };
        let cell = Cell {
            mean: mean_deviation(&values).0,
            ci95: student(&values, 0.0, 1.0),
            bootstrap95: bootstrap(&values, rounds, seed).unwrap_or(whole),
            tasks: values.len(),
            attempts: tasks.values().map(Vec::len).sum(),
        };
        cells
            .entry((*model).to_owned())
            .or_default()
            .insert((*harness).to_owned(), cell);
        means.insert((model, harness), by_task);
    }
    Matrix {
        cells,
        decomposition: decompose(&means),
    }
}

/// Sums of squares of a balanced three-way table without replication (model × harness × task):
/// the classical analysis of variance, each sum divided by the total.
fn decompose(means: &Means<'_>) -> Option<Decomposition> {
    let models: BTreeSet<&str> = means.keys().map(|(model, _)| *model).collect();
    let harnesses: BTreeSet<&str> = means.keys().map(|(_, harness)| *harness).collect();
    if means.len() != models.len() * harnesses.len() {
        return None;
    }
    let first = means.values().next()?;
    let tasks: Vec<&str> = first
        .keys()
        .copied()
        .filter(|task| means.values().all(|cell| cell.contains_key(task)))
        .collect();
    if tasks.is_empty() {
        return None;
    }
    let at = |model: &str, harness: &str, task: &str| -> f64 {
        means
            .get(&(model, harness))
            .and_then(|cell| cell.get(task))
            .copied()
            .unwrap_or_default()
    };
    let all: Vec<Row<'_>> = models
        .iter()
        .flat_map(|model| harnesses.iter().map(move |harness| (*model, *harness)))
        .flat_map(|(model, harness)| tasks.iter().map(move |task| (model, harness, *task)))
        .map(|(model, harness, task)| (model, harness, task, at(model, harness, task)))
        .collect();
    let mean = |keep: &dyn Fn(&Row<'_>) -> bool| -> f64 {
        let kept: Vec<f64> = all
            .iter()
            .filter(|row| keep(row))
            .map(|row| row.3)
            .collect();
        kept.iter().sum::<f64>() / kept.len() as f64
    };
    let grand = mean(&|_| true);
    let square = |value: f64| value * value;
    let total: f64 = all.iter().map(|row| square(row.3 - grand)).sum();
    if total < 1e-12 {
        return Some(Decomposition {
            tasks: tasks.len(),
            ..Decomposition::default()
        });
    }
    let (m, h, t) = (
        models.len() as f64,
        harnesses.len() as f64,
        tasks.len() as f64,
    );
    let of_model: BTreeMap<&str, f64> = models
        .iter()
        .map(|model| (*model, mean(&|row| row.0 == *model)))
        .collect();
    let of_harness: BTreeMap<&str, f64> = harnesses
        .iter()
        .map(|harness| (*harness, mean(&|row| row.1 == *harness)))
        .collect();
    let ss_model: f64 = of_model
        .values()
        .map(|value| h * t * square(value - grand))
        .sum();
    let ss_harness: f64 = of_harness
        .values()
        .map(|value| m * t * square(value - grand))
        .sum();
    let ss_task: f64 = tasks
        .iter()
        .map(|task| m * h * square(mean(&|row| row.2 == *task) - grand))
        .sum();
    let ss_both: f64 = of_model
        .iter()
        .flat_map(|(model, a)| {
            of_harness
                .iter()
                .map(move |(harness, b)| (*model, *harness, *a, *b))
        })
        .map(|(model, harness, a, b)| {
            let cell = mean(&|row| row.0 == model && row.1 == harness);
            t * square(cell - a - b + grand)
        })
        .sum();
    Some(Decomposition {
        model: ss_model / total,
        harness: ss_harness / total,
        interaction: ss_both / total,
        task: ss_task / total,
        residual: ((total - ss_model - ss_harness - ss_both - ss_task) / total).max(0.0),
        tasks: tasks.len(),
    })
}

impl Matrix {
    /// As a table in Markdown: mean and interval in percent, models down, harnesses across.
    #[must_use]
    pub fn to_markdown(&self) -> String {
        let harnesses: BTreeSet<&String> = self.cells.values().flat_map(BTreeMap::keys).collect();
        let mut out = String::from("| model |");
        let mut rule = String::from("|---|");
        for harness in &harnesses {
            out.push_str(&format!(" {} |", harness.replace('|', "\\|")));
            rule.push_str("---|");
        }
        out = format!("{out}\n{rule}\n");
        for (model, row) in &self.cells {
            out.push_str(&format!("| {} |", model.replace('|', "\\|")));
            for harness in &harnesses {
                match row.get(*harness) {
                    Some(cell) => out.push_str(&format!(
                        " {:.1} [{:.1}, {:.1}] n={} |",
                        100.0 * cell.mean,
                        100.0 * cell.ci95.low,
                        100.0 * cell.ci95.high,
                        cell.attempts
                    )),
                    None => out.push_str(" – |"),
                }
            }
            out.push('\n');
        }
        if let Some(found) = &self.decomposition {
            out.push_str(&format!(
                "\nShares of variance over {} shared tasks: model {:.3}, harness {:.3}, interaction {:.3}, task {:.3}, residual {:.3}.\n",
                found.tasks, found.model, found.harness, found.interaction, found.task, found.residual
            ));
        }
        out
    }

    /// As CSV, a row per cell.
    #[must_use]
    pub fn to_csv(&self) -> String {
        let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
        let mut out = String::from(
            "model,harness,mean,ci95_low,ci95_high,bootstrap95_low,bootstrap95_high,tasks,attempts\n",
        );
        for (model, row) in &self.cells {
            for (harness, cell) in row {
                out.push_str(&format!(
                    "{},{},{},{},{},{},{},{},{}\n",
                    quoted(model),
                    quoted(harness),
                    cell.mean,
                    cell.ci95.low,
                    cell.ci95.high,
                    cell.bootstrap95.low,
                    cell.bootstrap95.high,
                    cell.tasks,
                    cell.attempts
                ));
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn scores(of: impl Fn(usize, usize, usize) -> f64) -> Vec<Score> {
        let mut scores = Vec::new();
        for model in 0..2 {
            for harness in 0..3 {
                for task in 0..4 {
                    scores.push(Score {
                        model: format!("m{model}"),
                        harness: format!("h{harness}"),
                        task: format!("t{task}"),
                        reward: of(model, harness, task),
                    });
                }
            }
        }
        scores
    }

    #[test]
    fn pure_causes_are_named_alone() {
        let part = |of: fn(usize, usize, usize) -> f64| {
            matrix(&scores(of), 50, 1).decomposition.unwrap_or_default()
        };
        assert!((part(|model, _, _| model as f64).model - 1.0).abs() < 1e-9);
        assert!((part(|_, harness, _| harness as f64 / 2.0).harness - 1.0).abs() < 1e-9);
        assert!((part(|_, _, task| task as f64 / 3.0).task - 1.0).abs() < 1e-9);
        // Models swap places between two harnesses and tie in the third.
        let swap = part(|model, harness, _| match harness {
            0 => model as f64,
            1 => 1.0 - model as f64,
            _ => 0.5,
        });
        assert!((swap.interaction - 1.0).abs() < 1e-9, "{swap:?}");
        assert_eq!(
            part(|_, _, _| 0.5),
            Decomposition {
                tasks: 4,
                ..Decomposition::default()
            }
        );
    }

    #[test]
    fn an_incomplete_table_is_not_decomposed() {
        let mut some = scores(|_, _, _| 1.0);
        some.retain(|score| !(score.model == "m0" && score.harness == "h0"));
        let found = matrix(&some, 50, 1);
        assert_eq!(found.decomposition, None);
        assert!(found.to_markdown().contains("| m0 | – |"));
        assert_eq!(found.to_csv().lines().count(), 6);
    }

    proptest! {
        #[test]
        fn shares_add_up_and_order_does_not_matter(
            rewards in prop::collection::vec(0.0..1.0_f64, 24),
        ) {
            let mut all = scores(|model, harness, task| rewards[model * 12 + harness * 4 + task]);
            let found = matrix(&all, 20, 3);
            let parts = found.decomposition.unwrap_or_default();
            let sum = parts.model + parts.harness + parts.interaction + parts.task + parts.residual;
            prop_assert!((sum - 1.0).abs() < 1e-9);
            all.reverse();
            prop_assert_eq!(matrix(&all, 20, 3), found);
        }
    }
}
