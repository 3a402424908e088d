//! How much of a set of tasks is in another one: what was trained on must not be what is measured.
//! Pure.
//!
//! | finding | rule |
//! |---|---|
//! | the same task | equal digests |
//! | the same words | equal instructions but for case, spacing and punctuation |
//! | near | the share of an instruction's runs of [`WORDS`] words that one other instruction has too; from [`NEAR`] on |
//! | shared files | initial files of [`FILE_BYTES_MIN`] bytes and more that are also an initial file of another task |
//!
//! An instruction of fewer than [`WORDS`] words is one run. Tasks made from templates are near each
//! other by their nature; the report says how near, and whoever reads it what that means.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::Document;

/// Words of a run.
pub const WORDS: usize = 8;
/// From this share of its runs on an instruction is near another.
pub const NEAR: f64 = 0.8;
/// Smaller files say nothing: everybody has them.
pub const FILE_BYTES_MIN: usize = 64;
/// Findings that a page names; data names all.
const SHOWN_MAX: usize = 20;

/// What is compared of a task.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Compared {
    /// Its name.
    pub id: String,
    /// Digest of the whole of it.
    pub digest: String,
    /// What the harness is told.
    pub instruction: String,
    /// Digests of its initial files of [`FILE_BYTES_MIN`] bytes and more.
    pub files: Vec<String>,
}

/// What was found about one task of the measured set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Overlap {
    /// The task.
    pub task: String,
    /// The task of the other set that is nearest to it.
    pub other: String,
    /// Whether it is the same task.
    pub same_task: bool,
    /// Whether the instruction has the same words.
    pub same_words: bool,
    /// Share of the instruction's runs of words that the other has.
    pub share: f64,
    /// Initial files that a task of the other set has too.
    pub files: usize,
}

/// How much of a measured set is in another one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Contamination {
    /// Where the other set came from.
    pub other: String,
    /// Tasks of the measured set.
    pub tasks: usize,
    /// Tasks of the other set.
    pub other_tasks: usize,
    /// Tasks that are in the other set.
    pub same_tasks: usize,
    /// Tasks with the same words as one of the other set, the same tasks among them.
    pub same_words: usize,
    /// Tasks near one of the other set, those with the same words among them.
    pub near: usize,
    /// Tasks with an initial file that a task of the other set has too.
    pub with_files: usize,
    /// Mean over the tasks of the largest share of runs of words.
    pub share_mean: f64,
    /// Every task for which one of the counts above is not 0, by name.
    pub found: Vec<Overlap>,
}

/// Words in lower case, without what is around them.
fn words(text: &str) -> Vec<String> {
    text.split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect()
}

fn runs(words: &[String]) -> BTreeSet<&[String]> {
    match words.len() {
        0 => BTreeSet::new(),
        short if short < WORDS => BTreeSet::from([words]),
        _ => words.windows(WORDS).collect(),
    }
}

impl Contamination {
    /// Compares a measured set with another one, whose source is named.
    #[must_use]
    pub fn of(measured: &[Compared], other: &[Compared], source: &str) -> Self {
        let theirs: Vec<Vec<String>> = other.iter().map(|task| words(&task.instruction)).collect();
        let mut by_run: HashMap<&[String], Vec<usize>> = HashMap::new();
        for (at, words) in theirs.iter().enumerate() {
            for run in runs(words) {
                by_run.entry(run).or_default().push(at);
            }
        }
        let digests: HashMap<&str, usize> = other
            .iter()
            .enumerate()
            .map(|(at, task)| (task.digest.as_str(), at))
            .collect();
        let files: HashSet<&String> = other.iter().flat_map(|task| &task.files).collect();
        let mut sum = 0.0;
        let mut whole = Self {
            other: source.to_owned(),
            tasks: measured.len(),
            other_tasks: other.len(),
            ..Self::default()
        };
        for task in measured {
            let ours = words(&task.instruction);
            let runs = runs(&ours);
            let mut shared: BTreeMap<usize, usize> = BTreeMap::new();
            for at in runs.iter().filter_map(|run| by_run.get(run)).flatten() {
                *shared.entry(*at).or_default() += 1;
            }
            let same = digests.get(task.digest.as_str()).copied();
            // The nearest; of several the first, so that the order of sets alone decides.
            let nearest = shared
                .iter()
                .max_by_key(|(at, count)| (**count, theirs[**at] == ours, usize::MAX - **at))
                .map(|(at, count)| (*at, *count as f64 / runs.len() as f64));
            let share = nearest.map_or(0.0, |(_, share)| share);
            sum += share;
            let at = same.or(nearest.map(|(at, _)| at));
            let overlap = Overlap {
                task: task.id.clone(),
                other: at.map(|at| other[at].id.clone()).unwrap_or_default(),
                same_task: same.is_some(),
                same_words: at.is_some_and(|at| !ours.is_empty() && theirs[at] == ours),
                share,
                files: task
                    .files
                    .iter()
                    .filter(|file| files.contains(file))
                    .count(),
            };
            let near = share >= NEAR || overlap.same_task;
            whole.same_tasks += usize::from(overlap.same_task);
            whole.same_words += usize::from(overlap.same_words || overlap.same_task);
            whole.near += usize::from(near);
            whole.with_files += usize::from(overlap.files > 0);
            if near || overlap.same_words || overlap.files > 0 {
                whole.found.push(overlap);
            }
        }
        whole.found.sort_by(|a, b| a.task.cmp(&b.task));
        whole.share_mean = if measured.is_empty() {
            0.0
        } else {
            sum / measured.len() as f64
        };
        whole
    }

    /// The counts in a sentence.
    #[must_use]
    pub fn sentence(&self) -> String {
        format!(
            "Of {} tasks, {} are among the {} of {}, {} have the words of one, {} share {:.0} % of their runs of {WORDS} words with one, {} have an initial file of one; mean share of runs {:.3}.",
            self.tasks,
            self.same_tasks,
            self.other_tasks,
            self.other,
            self.same_words,
            self.near,
            100.0 * NEAR,
            self.with_files,
            self.share_mean
        )
    }

    /// What was found, as a table of a page.
    pub fn table(&self, page: &mut Document) {
        let rows: Vec<Vec<String>> = self
            .found
            .iter()
            .take(SHOWN_MAX)
            .map(|one| {
                let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
                vec![
                    one.task.clone(),
                    one.other.clone(),
                    yes(one.same_task),
                    yes(one.same_words),
                    format!("{:.3}", one.share),
                    one.files.to_string(),
                ]
            })
            .collect();
        let header = [
            "task",
            "nearest",
            "same task",
            "same words",
            "share of runs",
            "shared files",
        ];
        page.table(&header, rows);
        if self.found.len() > SHOWN_MAX {
            let more = self.found.len() - SHOWN_MAX;
            page.text(format!("And {more} more, which the data names."));
        }
    }
}

/// Adds what was found by model to a page; nothing without any.
pub(crate) fn show(found: &BTreeMap<String, Contamination>, page: &mut Document) {
    if !found.is_empty() {
        page.heading("Contamination");
    }
    for (model, found) in found {
        page.text(format!("What {model} was trained on. {}", found.sentence()));
        found.table(page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(id: &str, instruction: &str, files: &[&str]) -> Compared {
        Compared {
            id: id.to_owned(),
            digest: format!("{instruction}{files:?}"),
            instruction: instruction.to_owned(),
            files: files.iter().map(|&file| file.to_owned()).collect(),
        }
    }

    #[test]
    fn the_same_is_told_from_the_near_and_the_far() {
        let long = "Read the file data.csv, add up the second column and write the sum into out.txt please";
        let train = [
            task("a", long, &["x", "y"]),
            task("b", "Say hello.", &[]),
            task(
                "c",
                "Something else entirely, with other words than any of the rest has here",
                &[],
            ),
        ];
        let near = long.replace("please", "now");
        let eval = [
            task("1", long, &["x", "y"]),
            task("2", &long.to_uppercase().replace(',', " ;"), &[]),
            task("3", &near, &["y"]),
            task("4", "say HELLO", &[]),
            task(
                "5",
                "Paint the wall blue and the door red before the rain begins on Monday",
                &["z"],
            ),
        ];
        let found = Contamination::of(&eval, &train, "train");
        assert_eq!(
            (
                found.tasks,
                found.other_tasks,
                found.same_tasks,
                found.same_words,
                found.near,
                found.with_files
            ),
            (5, 3, 1, 3, 4, 2)
        );
        let names: Vec<(&str, &str)> = found
            .found
            .iter()
            .map(|one| (one.task.as_str(), one.other.as_str()))
            .collect();
        assert_eq!(names, [("1", "a"), ("2", "a"), ("3", "a"), ("4", "b")]);
        assert!(found.found[2].share < 1.0 && found.found[2].share >= NEAR);
        assert!((found.share_mean - (3.0 + found.found[2].share) / 5.0).abs() < 1e-12);
        let mut page = Document::new("x");
        show(&BTreeMap::from([("m".to_owned(), found)]), &mut page);
        assert!(
            page.to_markdown()
                .contains("| 1 | a | yes | yes | 1.000 | 2 |")
        );
    }

    #[test]
    fn nothing_has_nothing_in_common() {
        let none = Contamination::of(&[], &[], "none");
        assert_eq!((none.tasks, none.share_mean), (0, 0.0));
        let empty = Contamination::of(&[task("1", "", &[])], &[task("a", "", &["x"])], "x");
        assert_eq!((empty.near, empty.found.len()), (0, 0));
    }
}
