//! Why tasks could not be read or written.

use std::path::PathBuf;

fn place(line: &Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!(":{line}"))
}

/// Why a task could not be read or written. None is retryable: a person must change a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TaskError {
    /// The system refused a file operation.
    #[error("{path}: {reason}; check that the path is right and readable")]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
    /// Something in a file is not what the format says.
    #[error("{file}{line}: {field}: expected {expected}, found {found}; {hint}", line = place(.line))]
    Field {
        /// The file.
        file: PathBuf,
        /// Line from 1, when it is known.
        line: Option<usize>,
        /// The key, with dots for nesting.
        field: Box<str>,
        /// What the format says.
        expected: String,
        /// What is there.
        found: String,
        /// What to do.
        hint: &'static str,
    },
    /// A task without the code that scores it can only produce invented rewards.
    #[error(
        "{folder}: the task has no verifier: expected {expected}; add it, or take the task out of the set"
    )]
    MissingVerifier {
        /// The task's folder.
        folder: PathBuf,
        /// The file that is missing.
        expected: String,
    },
    /// A folder in no known format.
    #[error(
        "{folder}: not a task: expected task.toml (ours, Harbor), data_entry.json (ClawGym), task.yaml (Terminal-Bench 1, Claw-Eval), RUBRICS.json (JobBench), *.md (PinchBench, QwenClawBench), *.jsonl or *.csv; remove it or point at a set of tasks"
    )]
    NotATask {
        /// The folder.
        folder: PathBuf,
    },
    /// A folder without a single task.
    #[error("{folder}: no task in it: expected one sub-folder per task; check the path")]
    Empty {
        /// The folder.
        folder: PathBuf,
    },
    /// Two tasks with one name: their rewards would be mixed up.
    #[error("task {id} is in {first} and in {second}; rename one of them")]
    Duplicate {
        /// The name.
        id: String,
        /// Where it was first.
        first: PathBuf,
        /// Where it was again.
        second: PathBuf,
    },
    /// A task that is larger than the limits of this crate.
    #[error("{path}: {what} is above the limit of {limit}; make the task smaller")]
    TooLarge {
        /// The folder or file.
        path: PathBuf,
        /// What was measured.
        what: String,
        /// The limit with its unit.
        limit: String,
    },
    /// A task holds something that the format cannot say.
    #[error("task {id} cannot be written: {what}")]
    NotWritable {
        /// The task.
        id: String,
        /// What cannot be written, and why.
        what: String,
    },
}
