//! Whether the initial files of a task give its answer away. Pure.

use std::path::PathBuf;

use task::{Step, Task};

/// Shorter texts say nothing: `1` is in every file.
const CHARS_MIN: usize = 24;

/// A place where an answer shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leak {
    /// The file, relative to the workspace, or `None` for the instruction.
    pub file: Option<PathBuf>,
    /// What is in it, in words.
    pub what: String,
}

/// Looks for the verifier's files, whole solution texts and the usual places of answers among
/// what the agent is given.
#[must_use]
pub fn leaks(task: &Task) -> Vec<Leak> {
    let mut found = Vec::new();
    let mut leak = |file: Option<&PathBuf>, what: String| {
        found.push(Leak {
            file: file.cloned(),
            what,
        });
    };
    let answers: Vec<(String, String)> = task
        .solution
        .iter()
        .filter_map(|step| match step {
            Step::Write(path, text) => {
                Some((format!("the solution's {}", path.display()), text.clone()))
            }
            Step::Say(text) => Some(("the solution's last words".to_owned(), text.clone())),
            _ => None,
        })
        .filter(|(_, text)| text.trim().chars().count() >= CHARS_MIN)
        .collect();
    for file in &task.files {
        let name = file.path.to_string_lossy().to_lowercase();
        if name
            .split('/')
            .any(|part| matches!(part, ".git" | "solution" | "solve.sh" | "answer_key.json"))
        {
            leak(
                Some(&file.path),
                "a place where answers are kept".to_owned(),
            );
        }
        if let Some(check) = task
            .verifier
            .files
            .iter()
            .find(|check| check.content == file.content && file.content.len() >= CHARS_MIN)
        {
            leak(
                Some(&file.path),
                format!("the verifier's {}", check.path.display()),
            );
        }
        let text = String::from_utf8_lossy(&file.content);
        for (what, answer) in &answers {
            if text.contains(answer.trim()) {
                leak(Some(&file.path), what.clone());
            }
        }
    }
    for (what, answer) in &answers {
        if task.instruction.contains(answer.trim()) {
            leak(None, what.clone());
        }
    }
    found
}
