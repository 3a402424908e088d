//! A run directory: `run.toml` (the resolved recipe), `ledger.sqlite`, `checkpoints/`,
//! `metrics.jsonl`, `summary.json`, charts.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{error::CliError, lab, recipe::Recipe};

/// A run's files.
#[derive(Debug, Clone)]
pub(crate) struct RunDir {
    pub(crate) path: PathBuf,
}

impl RunDir {
    /// Makes a new run directory. One that exists is refused: nothing is ever overwritten.
    pub(crate) fn create(path: &Path, recipe: &Recipe) -> Result<Self, CliError> {
        // A mistyped harness must not leave a directory that is in the way of the next try.
        lab::profiles(&recipe.harnesses)?;
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|error| {
                CliError::failed(format!("run directory {}", parent.display()), error)
            })?;
        }
        match std::fs::create_dir(path) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                return Err(CliError::usage(
                    format!("run directory {} exists already", path.display()),
                    "go on with --resume DIR, choose another --out DIR, or remove it",
                ));
            }
            Err(error) => {
                return Err(CliError::failed(
                    format!("run directory {}", path.display()),
                    error,
                ));
            }
        }
        let dir = Self {
            path: path.to_owned(),
        };
        dir.write("run.toml", recipe.to_toml()?.as_bytes())?;
        Ok(dir)
    }

    /// Opens a run directory to go on with it.
    pub(crate) fn resume(path: &Path) -> Result<(Self, Recipe), CliError> {
        let recipe = Recipe::load(&path.join("run.toml"))?;
        Ok((
            Self {
                path: path.to_owned(),
            },
            recipe,
        ))
    }

    /// Where kept workspaces are.
    pub(crate) fn worlds(&self) -> PathBuf {
        self.path.join("worlds")
    }

    /// Where what rollouts asked of the internet is logged.
    pub(crate) fn egress(&self) -> PathBuf {
        self.path.join("egress")
    }

    pub(crate) fn checkpoint(&self, step: u64) -> PathBuf {
        self.path
            .join("checkpoints")
            .join(format!("step-{step:05}"))
    }

    /// The newest complete checkpoint, and its step.
    pub(crate) fn newest_checkpoint(&self) -> Option<(PathBuf, u64)> {
        let entries = std::fs::read_dir(self.path.join("checkpoints")).ok()?;
        entries
            .flatten()
            .filter_map(|entry| {
                let step = entry
                    .file_name()
                    .to_str()?
                    .strip_prefix("step-")?
                    .parse()
                    .ok()?;
                Some((entry.path(), step))
            })
            .max_by_key(|(_, step)| *step)
    }

    /// Writes a file whole or not at all.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<(), CliError> {
        let path = self.path.join(name);
        model::files::write_atomically(&path, bytes).map_err(|error| {
            CliError::failed(format!("{} could not be written", path.display()), error)
        })
    }

    /// Appends a line to `metrics.jsonl`.
    pub(crate) fn append_metrics(&self, line: &impl Serialize) -> Result<(), CliError> {
        let path = self.path.join("metrics.jsonl");
        let failed = |error: std::io::Error| {
            CliError::failed(format!("{} could not be written", path.display()), error)
        };
        let mut text = serde_json::to_string(line)
            .map_err(|error| CliError::failed("metrics could not be written down", error))?;
        text.push('\n');
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(failed)?;
        file.write_all(text.as_bytes()).map_err(failed)
    }
}
