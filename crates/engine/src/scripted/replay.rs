//! A replay file: a script as data.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use record::{Message, Role, ToolCall};
use serde_json::{Map, Value};

use super::Script;
use crate::{EngineError, Hint};

/// Why a replay file cannot be used. Fix the file; nothing is retried.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The file cannot be read.
    #[error("replay file {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A line is not a reply.
    #[error("replay file {path}:{line}: expected {expected}, found {found}")]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What a line must be.
        expected: &'static str,
        /// What was there.
        found: String,
    },
}

/// The most lines of a replay file.
pub const REPLAY_LINES_MAX: usize = 1_000_000;

#[derive(Debug, Clone)]
struct Recorded {
    message: Message,
    logprob: Option<f32>,
}

/// A script read from a file of JSON lines, one reply per line:
///
/// ```json
/// {"task": "chores-0001", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}
/// {"task": "chores-0001", "content": "Done."}
/// {"task": "*", "turn": 0, "content": "Hello.", "reasoning": "A greeting.", "logprob": -0.5}
/// ```
///
/// `task` is the id of the rollout's task, or `"*"` for every task that has no line of its own at
/// this turn. `turn` counts the assistant turns that the conversation already holds, from 0; left
/// out, the lines of one task follow each other. `content` (text), `reasoning` (text), `tool_calls` (`name`, `arguments` as an object) make
/// the message, at least one of `content` and `tool_calls`. `logprob` gives every token of the reply this log-probability. Blank lines and lines that
/// begin with `#` are skipped; any other field is an error.
#[derive(Debug, Clone)]
pub struct Replay {
    path: PathBuf,
    replies: HashMap<String, HashMap<u32, Recorded>>,
}

impl Replay {
    /// Reads a replay file.
    ///
    /// # Errors
    /// [`ReplayError`] with file and line.
    pub fn load(path: &Path) -> Result<Self, ReplayError> {
        let text = std::fs::read_to_string(path).map_err(|source| ReplayError::Read {
            path: path.into(),
            source,
        })?;
        Self::parse(path, &text)
    }

    /// Reads the content of a replay file; `path` is for messages.
    ///
    /// # Errors
    /// [`ReplayError::Line`] with file and line.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ReplayError> {
        let mut replies: HashMap<String, HashMap<u32, Recorded>> = HashMap::new();
        for (index, line) in text.lines().enumerate() {
            let at = |expected: &'static str, found: String| ReplayError::Line {
                path: path.into(),
                line: index + 1,
                expected,
                found,
            };
            if index >= REPLAY_LINES_MAX {
                return Err(at("at most 1,000,000 lines", "one more".into()));
            }
            if line.trim().is_empty() || line.trim_start().starts_with('#') {
                continue;
            }
            let value: Value = serde_json::from_str(line)
                .map_err(|error| at("a JSON object", error.to_string()))?;
            let Value::Object(object) = value else {
                return Err(at("a JSON object", value.to_string()));
            };
            let (task, turn, recorded) =
                recorded(&object).map_err(|(expected, found)| at(expected, found))?;
            let of_task = replies.entry(task).or_default();
            let turn = match turn {
                Some(turn) => turn,
                None => (0..).find(|turn| !of_task.contains_key(turn)).unwrap_or(0),
            };
            if of_task.insert(turn, recorded).is_some() {
                return Err(at(
                    "one reply per task and turn",
                    format!("a second one for turn {turn}"),
                ));
            }
        }
        Ok(Self {
            path: path.into(),
            replies,
        })
    }

    /// How many replies it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.replies.values().map(HashMap::len).sum()
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn find(&self, hint: &Hint) -> Result<&Recorded, EngineError> {
        let turn = hint
            .conversation
            .messages
            .iter()
            .filter(|message| message.role == Role::Assistant)
            .count();
        let task = hint.rollout.as_ref().map(|rollout| rollout.task.as_str());
        let of = |task: &str| self.replies.get(task)?.get(&u32::try_from(turn).ok()?);
        task.and_then(of).or_else(|| of("*")).ok_or_else(|| {
            EngineError::NoScript(format!(
                "{} has no line for task {:?} (nor \"*\") at turn {turn}; add one",
                self.path.display(),
                task.unwrap_or("(unknown)"),
            ))
        })
    }
}

impl Script for Replay {
    fn reply(&self, hint: &Hint) -> Result<Message, EngineError> {
        self.find(hint).map(|recorded| recorded.message.clone())
    }

    fn logprob(&self, hint: &Hint) -> Option<f32> {
        self.find(hint).ok()?.logprob
    }
}

type Refusal = (&'static str, String);

fn optional_text<'a>(
    object: &'a Map<String, Value>,
    name: &str,
    expected: &'static str,
) -> Result<Option<&'a str>, Refusal> {
    match object.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err((expected, other.to_string())),
    }
}

fn recorded(object: &Map<String, Value>) -> Result<(String, Option<u32>, Recorded), Refusal> {
    const FIELDS: [&str; 6] = [
        "task",
        "turn",
        "content",
        "reasoning",
        "tool_calls",
        "logprob",
    ];
    if let Some(name) = object.keys().find(|name| !FIELDS.contains(&name.as_str())) {
        return Err((
            "only the fields task, turn, content, reasoning, tool_calls, logprob",
            name.clone(),
        ));
    }
    let task = optional_text(object, "task", "`task` to be a text")?
        .ok_or(("`task`: a task id or \"*\"", "none".to_owned()))?;
    let turn = match object.get("turn") {
        None | Some(Value::Null) => None,
        Some(value) => Some(
            value
                .as_u64()
                .and_then(|turn| u32::try_from(turn).ok())
                .ok_or_else(|| ("`turn` to be a whole number", value.to_string()))?,
        ),
    };
    let logprob = match object.get("logprob") {
        None | Some(Value::Null) => None,
        Some(value) => Some(
            value
                .as_f64()
                .filter(|logprob| *logprob <= 0.0)
                .ok_or_else(|| ("`logprob` to be a number of at most 0", value.to_string()))?
                as f32,
        ),
    };
    let content = optional_text(object, "content", "`content` to be a text")?;
    let mut message = Message::text(Role::Assistant, content.unwrap_or_default());
    message.reasoning =
        optional_text(object, "reasoning", "`reasoning` to be a text")?.map(str::to_owned);
    match object.get("tool_calls") {
        None | Some(Value::Null) => {}
        Some(Value::Array(list)) => {
            for (position, value) in list.iter().enumerate() {
                message.tool_calls.push(tool_call(position, value)?);
            }
        }
        Some(other) => return Err(("`tool_calls` to be a list", other.to_string())),
    }
    if content.is_none() && message.tool_calls.is_empty() {
        return Err(("`content` or `tool_calls`", "neither".into()));
    }
    Ok((task.to_owned(), turn, Recorded { message, logprob }))
}

fn tool_call(position: usize, value: &Value) -> Result<ToolCall, Refusal> {
    let name = value.get("name").and_then(Value::as_str);
    let arguments = value.get("arguments").filter(|value| value.is_object());
    match (name, arguments) {
        (Some(name), Some(arguments)) => Ok(ToolCall {
            id: format!("call{position}"),
            name: name.to_owned(),
            arguments: arguments.clone(),
        }),
        _ => Err((
            "a tool call to have a `name` and an object of `arguments`",
            value.to_string(),
        )),
    }
}
