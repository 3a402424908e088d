//! ClawGym folders, unchanged: `data_entry.json`, `input_files/`, `reward/`.
//!
//! The verifier is `bash reward/reward.sh` in the workspace, 120 s, last line or zero; the
//! folder `reward/` reaches the sandbox only after the harness ended. Keys that we do not know
//! are kept in the task's metadata: the format belongs to somebody else.

use std::path::{Path, PathBuf};

use record::TaskId;
use serde_json::{Map, Value};

use crate::{
    Contract, Task, TaskError, TaskFile, Verifier, digest,
    tree::{self, stays_inside},
};

/// The file that marks a folder as a ClawGym task.
pub(crate) const FILE: &str = "data_entry.json";
const WORKSPACE: &str = "/root/.openclaw/workspace";
const HOME: &str = "/root";
const TIMEOUT_S: u64 = 120;

struct Entry {
    file: PathBuf,
    values: Map<String, Value>,
}

impl Entry {
    fn read(folder: &Path) -> Result<Self, TaskError> {
        let file = folder.join(FILE);
        let text = tree::read_text(&file)?;
        let value: Value = serde_json::from_str(&text).map_err(|error| TaskError::Field {
            file: file.clone(),
            line: Some(error.line()),
            field: "the file".into(),
            expected: "JSON".to_owned(),
            found: error.to_string(),
            hint: "correct the file",
        })?;
        match value {
            Value::Object(values) => Ok(Self { file, values }),
            other => Err(Self {
                file,
                values: Map::new(),
            }
            .wrong("the file", "an object", &other)),
        }
    }

    fn wrong(&self, field: &str, expected: &str, found: &Value) -> TaskError {
        let found: String = match found {
            Value::Null => "nothing".to_owned(),
            other => other.to_string().chars().take(120).collect(),
        };
        TaskError::Field {
            file: self.file.clone(),
            line: None,
            field: field.into(),
            expected: expected.to_owned(),
            found,
            hint: "correct the file",
        }
    }

    /// Takes a required text out.
    fn text(&mut self, key: &str) -> Result<String, TaskError> {
        match self.values.remove(key) {
            Some(Value::String(text)) if !text.trim().is_empty() => Ok(text),
            other => Err(self.wrong(key, "a text", &other.unwrap_or_default())),
        }
    }

    /// Takes the place of the input files, relative to the workspace, out.
    fn mount(&mut self) -> Result<Option<PathBuf>, TaskError> {
        let expected = format!("a path that is or is under {WORKSPACE}");
        match self.values.remove("input_mount_dir") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => match Path::new(&text).strip_prefix(WORKSPACE) {
                Ok(inner) if inner.as_os_str().is_empty() || stays_inside(inner) => {
                    Ok(Some(inner.to_path_buf()))
                }
                _ => Err(self.wrong("input_mount_dir", &expected, &Value::String(text))),
            },
            Some(other) => Err(self.wrong("input_mount_dir", &expected, &other)),
        }
    }
}

/// Reads one ClawGym folder.
pub(crate) fn read_dir(folder: &Path) -> Result<Task, TaskError> {
    let mut entry = Entry::read(folder)?;
    let name = entry.text("task_id")?;
    let id = TaskId::new(name.clone())
        .map_err(|_| entry.wrong("task_id", tree::ID_EXPECTED, &name.into()))?;
    let instruction = entry.text("user_query")?;
    let mount = entry.mount()?;
    let inputs = folder.join("input_files");
    if mount.is_some() && !inputs.is_dir() {
        return Err(entry.wrong(
            "input_mount_dir",
            "a folder input_files/ beside the file",
            &Value::Null,
        ));
    }
    let mount = mount.unwrap_or_default();
    let files = tree::read(&inputs)?
        .into_iter()
        .map(|file| TaskFile {
            path: mount.join(&file.path),
            ..file
        })
        .collect();
    let metadata = match entry.values.remove("metadata") {
        Some(Value::Object(metadata)) => metadata,
        other => return Err(entry.wrong("metadata", "an object", &other.unwrap_or_default())),
    };
    let verifier_files = tree::read(&folder.join("reward"))?;
    if !verifier_files
        .iter()
        .any(|file| file.path == Path::new("reward.sh"))
    {
        return Err(TaskError::MissingVerifier {
            folder: folder.to_path_buf(),
            expected: "reward/reward.sh".to_owned(),
        });
    }
    let mut task = Task {
        id,
        family: "clawgym".to_owned(),
        instruction,
        files,
        workspace: PathBuf::from(WORKSPACE),
        home: PathBuf::from(HOME),
        verifier: Verifier {
            files: verifier_files,
            folder: PathBuf::from("reward"),
            argv: vec!["bash".to_owned(), "reward/reward.sh".to_owned()],
            cwd: None,
            timeout_s: TIMEOUT_S,
            contract: Contract::LastLineOrZero,
        },
        solution: Vec::new(),
        metadata: metadata.into_iter().chain(entry.values).collect(),
        digest: String::new(),
    };
    task.digest = digest::digest(&task);
    Ok(task)
}
