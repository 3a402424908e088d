//! Our own tools: files, shell, search, and a list of things to do.

use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Called, Toolbox};
use crate::react::tools as plain;

/// Most bytes of a result; more is cut out of its middle.
const RESULT_BYTES_MAX: usize = 30_000;
const SHELL_S: u64 = 60;
const SHELL_S_MAX: u64 = 600;
/// Files that a search looks into, and the largest of them.
const SEARCH_FILES_MAX: usize = 20_000;
const SEARCH_BYTES_MAX: u64 = 4 << 20;
/// Lines and names that are told.
const FOUND_MAX: usize = 200;
const TODO_MAX: usize = 100;

#[derive(Debug, Default)]
pub(super) struct Tools {
    todo: Vec<Todo>,
}

#[derive(Debug, Clone, Deserialize)]
struct Todo {
    text: String,
    #[serde(default)]
    status: Status,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    #[default]
    Pending,
    InProgress,
    Done,
}

#[derive(Deserialize)]
struct ReadFile {
    path: PathBuf,
    #[serde(default)]
    first_line: usize,
    lines: Option<usize>,
}

#[derive(Deserialize)]
struct WriteFile {
    path: PathBuf,
    content: String,
}

#[derive(Deserialize)]
struct EditFile {
    path: PathBuf,
    old: String,
    new: String,
}

#[derive(Deserialize)]
struct ListFiles {
    #[serde(default = "here")]
    path: PathBuf,
}

#[derive(Deserialize)]
struct Search {
    text: String,
    #[serde(default = "here")]
    path: PathBuf,
    #[serde(default)]
    name: String,
    #[serde(default)]
    ignore_case: bool,
}

#[derive(Deserialize)]
struct Shell {
    command: String,
    timeout_s: Option<u64>,
}

#[derive(Deserialize)]
struct TodoWrite {
    items: Vec<Todo>,
}

fn here() -> PathBuf {
    PathBuf::from(".")
}

fn tool(name: &str, description: &str, properties: Value, required: &[&str]) -> Value {
    json!({
        "name": name,
        "description": description,
        "inputSchema": {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        },
    })
}

impl Toolbox for Tools {
    fn tools(&self) -> Vec<Value> {
        let text = |about: &str| json!({"type": "string", "description": about});
        let number = |about: &str| json!({"type": "integer", "description": about, "minimum": 1});
        let path = text("absolute, or relative to the current folder");
        vec![
            tool(
                "read_file",
                "Read a text file, or some lines of it",
                json!({"path": path, "first_line": number("counted from 1"), "lines": number("how many")}),
                &["path"],
            ),
            tool(
                "write_file",
                "Write a file; its folder is made when it is missing",
                json!({"path": path, "content": text("the whole new content")}),
                &["path", "content"],
            ),
            tool(
                "edit_file",
                "Replace the only place of a text in a file",
                json!({"path": path, "old": text("what is there, once"), "new": text("what comes there")}),
                &["path", "old", "new"],
            ),
            tool(
                "list_files",
                "List a folder; folders end with /",
                json!({"path": path}),
                &[],
            ),
            tool(
                "search_files",
                "Find lines that hold a text, in a file or in all files below a folder",
                json!({
                    "text": text("what is looked for, as it is"),
                    "path": path,
                    "name": text("only files whose name ends with this, e.g. .py"),
                    "ignore_case": {"type": "boolean"},
                }),
                &["text"],
            ),
            tool(
                "shell",
                "Run a command with bash; standard output and error, and the exit code when it is not 0",
                json!({"command": text("the command"), "timeout_s": number("default 60, at most 600")}),
                &["command"],
            ),
            tool("todo_read", "The list of things to do", json!({}), &[]),
            tool(
                "todo_write",
                "Replace the list of things to do",
                json!({"items": {"type": "array", "items": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string"},
                        "status": {"type": "string", "enum": ["pending", "in_progress", "done"]},
                    },
                    "required": ["text"],
                }}}),
                &["items"],
            ),
        ]
    }

    fn call(&mut self, name: &str, arguments: &Value) -> Option<Called> {
        fn parse<T: for<'a> Deserialize<'a>>(arguments: &Value) -> Result<T, String> {
            T::deserialize(arguments).map_err(|error| format!("error: bad arguments: {error}"))
        }
        let result = match name {
            "read_file" => parse::<ReadFile>(arguments).and_then(|a| read_lines(&a)),
            "write_file" => {
                parse::<WriteFile>(arguments).and_then(|a| plain::write(&a.path, &a.content))
            }
            "edit_file" => {
                parse::<EditFile>(arguments).and_then(|a| plain::edit(&a.path, &a.old, &a.new))
            }
            "list_files" => parse::<ListFiles>(arguments).and_then(|a| list(&a.path)),
            "search_files" => parse::<Search>(arguments).and_then(|a| search(&a)),
            "shell" => parse::<Shell>(arguments).map(|a| {
                let limit = a.timeout_s.unwrap_or(SHELL_S).clamp(1, SHELL_S_MAX);
                plain::bash(&a.command, Duration::from_secs(limit))
            }),
            "todo_read" => Ok(self.list()),
            "todo_write" => parse::<TodoWrite>(arguments).and_then(|a| {
                if a.items.len() > TODO_MAX {
                    return Err(format!("error: more than {TODO_MAX} items"));
                }
                self.todo = a.items;
                Ok(self.list())
            }),
            _ => return None,
        };
        let failed = result.is_err();
        let text = plain::shorten(&result.unwrap_or_else(|error| error), RESULT_BYTES_MAX);
        Some(Called { text, failed })
    }
}

impl Tools {
    fn list(&self) -> String {
        if self.todo.is_empty() {
            return "nothing to do".to_owned();
        }
        let lines = self.todo.iter().map(|item| {
            let mark = match item.status {
                Status::Pending => ' ',
                Status::InProgress => '~',
                Status::Done => 'x',
            };
            format!("[{mark}] {}", item.text)
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

fn read_lines(wanted: &ReadFile) -> Result<String, String> {
    let text = plain::read(&wanted.path)?;
    if wanted.first_line <= 1 && wanted.lines.is_none() {
        return Ok(text);
    }
    let lines: Vec<&str> = text
        .lines()
        .skip(wanted.first_line.saturating_sub(1))
        .take(wanted.lines.unwrap_or(usize::MAX))
        .collect();
    Ok(lines.join("\n"))
}

/// The entries of a folder, sorted.
fn entries(folder: &Path) -> Result<Vec<fs::DirEntry>, String> {
    let failed = |error: std::io::Error| format!("error: {}: {error}", folder.display());
    let mut entries = fs::read_dir(folder)
        .map_err(failed)?
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    Ok(entries)
}

fn list(folder: &Path) -> Result<String, String> {
    let entries = entries(folder)?;
    let more = entries.len().saturating_sub(FOUND_MAX);
    let mut names: Vec<String> = entries
        .iter()
        .take(FOUND_MAX)
        .map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_folder { format!("{name}/") } else { name }
        })
        .collect();
    if more > 0 {
        names.push(format!("... and {more} more"));
    }
    if names.is_empty() {
        names.push("the folder is empty".to_owned());
    }
    Ok(names.join("\n"))
}

fn search(wanted: &Search) -> Result<String, String> {
    if wanted.text.is_empty() {
        return Err("error: text is empty".to_owned());
    }
    let fold = |text: &str| match wanted.ignore_case {
        true => text.to_lowercase(),
        false => text.to_owned(),
    };
    let needle = fold(&wanted.text);
    let mut found = Vec::new();
    let (mut looked, mut cut) = (0, false);
    // Links are not followed: no circles.
    let mut waiting = vec![wanted.path.clone()];
    while let Some(path) = waiting.pop() {
        if path.is_dir() {
            let inner = entries(&path)?.into_iter().rev();
            waiting.extend(
                inner
                    .filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_symlink()))
                    .map(|entry| entry.path()),
            );
            continue;
        }
        let named = path.to_string_lossy().ends_with(&wanted.name);
        if !named {
            continue;
        }
        if looked == SEARCH_FILES_MAX || found.len() >= FOUND_MAX {
            cut = true;
            break;
        }
        looked += 1;
        let mut bytes = Vec::new();
        let read =
            File::open(&path).and_then(|file| file.take(SEARCH_BYTES_MAX).read_to_end(&mut bytes));
        match read {
            Ok(_) => {}
            Err(error) if path == wanted.path => {
                return Err(format!("error: {}: {error}", path.display()));
            }
            Err(_) => continue,
        }
        if bytes.contains(&0) {
            continue;
        }
        for (number, line) in String::from_utf8_lossy(&bytes).lines().enumerate() {
            if fold(line).contains(&needle) {
                found.push(format!("{}:{}: {line}", path.display(), number + 1));
            }
        }
    }
    if found.len() > FOUND_MAX {
        found.truncate(FOUND_MAX);
        cut = true;
    }
    if cut {
        found.push("... and more".to_owned());
    }
    if found.is_empty() {
        return Ok("not found".to_owned());
    }
    Ok(found.join("\n"))
}
