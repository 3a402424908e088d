//! From a source to tasks: which format, which split.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::{
    Split, Task, TaskError,
    chores::{self, Settings},
    clawgym, own,
    tree::{folders, read_text},
};

/// Loads a split from a source: `chores` (built in), `chores:PATH.toml` (same, with the settings
/// of that file) or a folder of tasks. A folder that holds a folder `train` or `held-out` is read
/// by split; any other folder is one set and gives the same tasks for both splits.
///
/// # Errors
/// Any [`TaskError`].
pub fn load(source: &str, split: Split) -> Result<Vec<Task>, TaskError> {
    if source == "chores" {
        return Ok(chores::generate_with(&Settings::built_in()?, split));
    }
    if let Some(file) = source.strip_prefix("chores:") {
        let file = Path::new(file);
        let settings = Settings::from_toml(&read_text(file)?, file)?;
        return Ok(chores::generate_with(&settings, split));
    }
    let folder = Path::new(source);
    let has_splits = [Split::Train, Split::HeldOut]
        .iter()
        .any(|split| folder.join(split.name()).is_dir());
    if has_splits {
        load_dir(&folder.join(split.name()))
    } else {
        load_dir(folder)
    }
}

/// Loads a folder of tasks, or a folder that is one task. Files beside the task folders and
/// hidden folders are ignored. Tasks come sorted by folder name.
///
/// # Errors
/// Any [`TaskError`]; the first bad task makes the whole folder an error.
pub fn load_dir(path: &Path) -> Result<Vec<Task>, TaskError> {
    if is_task(path) {
        return Ok(vec![load_task(path)?]);
    }
    let mut tasks = Vec::new();
    let mut seen: BTreeMap<String, PathBuf> = BTreeMap::new();
    for folder in folders(path)? {
        let task = load_task(&folder)?;
        if let Some(first) = seen.insert(task.id.to_string(), folder.clone()) {
            return Err(TaskError::Duplicate {
                id: task.id.to_string(),
                first,
                second: folder,
            });
        }
        tasks.push(task);
    }
    if tasks.is_empty() {
        return Err(TaskError::Empty {
            folder: path.to_path_buf(),
        });
    }
    Ok(tasks)
}

fn is_task(folder: &Path) -> bool {
    folder.join(own::FILE).is_file() || folder.join(clawgym::FILE).is_file()
}

fn load_task(folder: &Path) -> Result<Task, TaskError> {
    if folder.join(own::FILE).is_file() {
        own::read_dir(folder)
    } else if folder.join(clawgym::FILE).is_file() {
        clawgym::read_dir(folder)
    } else {
        Err(TaskError::NotATask {
            folder: folder.to_path_buf(),
        })
    }
}
