//! `chores.toml`: which chores a run uses.

use std::path::Path;

use serde::Deserialize;

use super::families;
use crate::{Split, TaskError, toml_file};

/// The defaults, as they lie in `tasks/chores/chores.toml`.
const BUILT_IN: &str = include_str!("../../../../tasks/chores/chores.toml");

/// Chores of one file are bounded.
pub(super) const COUNT_MAX: usize = 100_000;

/// Which chores to make.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Seed of every choice.
    pub seed: u64,
    /// Number of tasks to train on.
    pub train: usize,
    /// Number of tasks to measure on.
    pub held_out: usize,
    /// Which families take turns; all when empty.
    #[serde(default)]
    pub families: Vec<String>,
}

impl Settings {
    /// The settings that come with the program.
    ///
    /// # Errors
    /// None in a released program: a test reads the built-in file.
    pub fn built_in() -> Result<Self, TaskError> {
        Self::from_toml(BUILT_IN, Path::new("tasks/chores/chores.toml"))
    }

    /// Reads the text of a `chores.toml`; `file` is named in errors.
    ///
    /// # Errors
    /// [`TaskError::Field`] for unknown keys, wrong types, unknown families and counts above
    /// 100,000.
    pub fn from_toml(text: &str, file: &Path) -> Result<Self, TaskError> {
        let settings: Self = toml_file::parse(text, file)?;
        for (key, count) in [("train", settings.train), ("held_out", settings.held_out)] {
            if count > COUNT_MAX {
                return Err(TaskError::Field {
                    file: file.to_path_buf(),
                    line: toml_file::line_of_key(text, key),
                    field: key.into(),
                    expected: format!("at most {COUNT_MAX}"),
                    found: count.to_string(),
                    hint: "ask for fewer tasks",
                });
            }
        }
        for family in &settings.families {
            if !families().any(|known| known == family) {
                let known: Vec<_> = families().collect();
                return Err(TaskError::Field {
                    file: file.to_path_buf(),
                    line: toml_file::line_of_key(text, "families"),
                    field: "families".into(),
                    expected: format!("any of {}", known.join(", ")),
                    found: format!("{family:?}"),
                    hint: "correct the name or leave `families` out to use all",
                });
            }
        }
        Ok(settings)
    }

    /// How many tasks of a split.
    #[must_use]
    pub fn count(&self, split: Split) -> usize {
        match split {
            Split::Train => self.train,
            Split::HeldOut => self.held_out,
        }
    }
}
