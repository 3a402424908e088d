//! Which checkpoints stay on the disk: the last few, and the best.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{LearnError, checkpoint};

const BEST: &str = "best.json";

/// The best checkpoint so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// Name of its folder.
    pub name: String,
    /// What it scored; higher is better.
    pub score: f64,
}

fn failed(path: &Path, reason: &dyn std::fmt::Display) -> LearnError {
    LearnError::Checkpoint {
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

/// The best checkpoint noted in a folder of checkpoints.
///
/// # Errors
/// [`LearnError::Checkpoint`] when the note is there but cannot be read.
pub fn best(folder: &Path) -> Result<Option<Best>, LearnError> {
    let path = folder.join(BEST);
    match std::fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| failed(&path, &error)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(&path, &error)),
    }
}

/// Notes a checkpoint as the best if it scored more than the one noted before; an equal score
/// keeps the older one. Returns whether it is the best now. A score that is not finite is never
/// the best.
///
/// # Errors
/// [`LearnError::Checkpoint`].
pub fn note_score(folder: &Path, name: &str, score: f64) -> Result<bool, LearnError> {
    if !score.is_finite() || best(folder)?.is_some_and(|best| best.score >= score) {
        return Ok(false);
    }
    let path = folder.join(BEST);
    let best = Best {
        name: name.to_owned(),
        score,
    };
    let text = serde_json::to_vec_pretty(&best).map_err(|error| failed(&path, &error))?;
    model::files::write_atomically(&path, &text).map_err(|error| failed(&path, &error))?;
    Ok(true)
}

/// Removes the checkpoints of a folder but the `last` newest (by completed steps of the run, at
/// least one) and the best. Folders that are not checkpoints are left alone. Returns what was
/// removed.
///
/// # Errors
/// [`LearnError::Checkpoint`]; what was removed before stays removed.
pub fn prune(folder: &Path, last: usize) -> Result<Vec<PathBuf>, LearnError> {
    let entries = std::fs::read_dir(folder).map_err(|error| failed(folder, &error))?;
    let mut checkpoints: Vec<(u64, PathBuf)> = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| failed(folder, &error))?.path();
        let hidden = path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if hidden || !path.is_dir() {
            continue;
        }
        if let Some(state) = checkpoint::load_state(&path)? {
            checkpoints.push((state.run_steps, path));
        }
    }
    checkpoints.sort();
    let best = best(folder)?;
    let old = checkpoints.len().saturating_sub(last.max(1));
    let mut removed = Vec::new();
    for (_, path) in checkpoints.into_iter().take(old) {
        let is_best = best.as_ref().is_some_and(|best| {
            path.file_name()
                .is_some_and(|name| *name == *std::ffi::OsStr::new(&best.name))
        });
        if is_best {
            continue;
        }
        std::fs::remove_dir_all(&path).map_err(|error| failed(&path, &error))?;
        removed.push(path);
    }
    Ok(removed)
}
