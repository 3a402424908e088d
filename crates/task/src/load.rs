//! From a source to tasks: which format, which split.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::{
    Split, Task, TaskError,
    chores::{self, Settings},
    claw_eval, clawgym, harbor, job_bench, markdown, own, tables, terminal_bench,
    tree::{folders, read_text, refused},
};

/// Loads a split from a source: `chores` (built in), `chores:PATH.toml` (same, with the settings
/// of that file), a folder of tasks or a file of tasks. A folder that holds a folder `train` or `held-out` is read
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

/// Loads a folder of tasks, a folder that is one task, or a file that holds one or many. Files
/// that are no task beside the task folders and hidden folders are ignored. Tasks come sorted by
/// folder or file name.
///
/// # Errors
/// Any [`TaskError`]; the first bad task makes the whole set an error.
pub fn load_dir(path: &Path) -> Result<Vec<Task>, TaskError> {
    let mut tasks = Vec::new();
    let mut seen: BTreeMap<String, PathBuf> = BTreeMap::new();
    for (place, found) in load_each(path)? {
        let task = found?;
        if let Some(first) = seen.insert(task.id.to_string(), place.clone()) {
            return Err(TaskError::Duplicate {
                id: task.id.to_string(),
                first,
                second: place,
            });
        }
        tasks.push(task);
    }
    Ok(tasks)
}

/// A place where a task was looked for, and the task or what is wrong with it.
pub type Found = (PathBuf, Result<Task, TaskError>);

/// As [`load_dir`], but each task or the complaint about it, with the place it came from. For
/// whoever checks a set. A table that cannot be read to its end is one complaint.
///
/// # Errors
/// [`TaskError`] when there is nothing to read.
pub fn load_each(path: &Path) -> Result<Vec<Found>, TaskError> {
    if path.is_file() {
        return Ok(file_tasks(path));
    }
    if let Some(kind) = kind_of(path) {
        return Ok(vec![(path.to_path_buf(), kind.read(path))]);
    }
    let markdown = markdown_files(path)?;
    if !markdown.is_empty() {
        return Ok(markdown.iter().flat_map(|file| file_tasks(file)).collect());
    }
    let mut found = Vec::new();
    for folder in folders(path)? {
        match kind_of(&folder) {
            Some(kind) => found.push((folder.clone(), kind.read(&folder))),
            // One level of sorting, as JobBench has it: profession/task.
            None => {
                let inner: Vec<PathBuf> = folders(&folder)?
                    .into_iter()
                    .filter(|inner| kind_of(inner).is_some())
                    .collect();
                if inner.is_empty() {
                    let error = TaskError::NotATask {
                        folder: folder.clone(),
                    };
                    found.push((folder, Err(error)));
                }
                for inner in inner {
                    if let Some(kind) = kind_of(&inner) {
                        found.push((inner.clone(), kind.read(&inner)));
                    }
                }
            }
        }
    }
    if found.is_empty() {
        return Err(TaskError::Empty {
            folder: path.to_path_buf(),
        });
    }
    Ok(found)
}

/// Markdown tasks of a folder, or of its sub-folder `tasks` when there is an `assets` beside it.
fn markdown_files(path: &Path) -> Result<Vec<PathBuf>, TaskError> {
    let inner = path.join("tasks");
    let folder = if inner.is_dir() && path.join("assets").is_dir() {
        inner
    } else {
        path.to_path_buf()
    };
    let mut files = Vec::new();
    let entries = std::fs::read_dir(&folder).map_err(|error| refused(&folder, &error))?;
    for entry in entries {
        let file = entry.map_err(|error| refused(&folder, &error))?.path();
        if file.is_file() && markdown::is_task(&file) {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

fn file_tasks(file: &Path) -> Vec<Found> {
    let place = |task: Result<Task, TaskError>| (file.to_path_buf(), task);
    if file.extension().is_some_and(|end| end == "md") {
        return vec![place(markdown::read_file(file))];
    }
    match tables::read_file(file) {
        Ok(tasks) => tasks.into_iter().map(|task| place(Ok(task))).collect(),
        Err(error) => vec![place(Err(error))],
    }
}

/// The format of a folder that is one task.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Own,
    Harbor,
    ClawGym,
    TerminalBench1,
    ClawEval,
    JobBench,
}

fn kind_of(folder: &Path) -> Option<Kind> {
    let has = |name: &str| folder.join(name).is_file();
    if has(own::FILE) {
        let ours = read_text(&folder.join(own::FILE)).is_ok_and(|text| {
            text.lines()
                .any(|line| line.trim_start().starts_with("format"))
        });
        return Some(if !ours && harbor::is_task(folder) {
            Kind::Harbor
        } else {
            Kind::Own
        });
    }
    if has(clawgym::FILE) {
        return Some(Kind::ClawGym);
    }
    if has(job_bench::FILE) {
        return Some(Kind::JobBench);
    }
    if has(terminal_bench::FILE) {
        let bench = read_text(&folder.join(terminal_bench::FILE))
            .is_ok_and(|text| text.lines().any(|line| line.starts_with("task_id:")));
        return Some(if bench {
            Kind::ClawEval
        } else {
            Kind::TerminalBench1
        });
    }
    None
}

impl Kind {
    fn read(self, folder: &Path) -> Result<Task, TaskError> {
        match self {
            Self::Own => own::read_dir(folder),
            Self::Harbor => harbor::read_dir(folder),
            Self::ClawGym => clawgym::read_dir(folder),
            Self::TerminalBench1 => terminal_bench::read_dir(folder),
            Self::ClawEval => claw_eval::read_dir(folder),
            Self::JobBench => job_bench::read_dir(folder),
        }
    }
}
