//! How a policy works, from captured calls alone, whatever the harness.
//!
//! | measure | rule |
//! |---|---|
//! | tools | calls of each tool in delivered replies |
//! | shell share | calls of a tool whose name is a shell's ([`SHELLS`]), over all tool calls |
//! | format | delivered replies whose text could be parsed, over all |
//! | errors | tool results that begin with or announce an error ([`is_error`]) |
//! | recovery | errors after which a later call of the same tool had a result without error |
//! | self-verification | writes that a later result shows again: the written text's longest line is in the result of a later call that names the same path |
//! | repeats | tool calls equal in name and arguments to one before |
//! | length | delivered calls, tool calls, generated tokens |
//!
//! A tool call is counted once, where it was generated; its result is looked for in the
//! histories of later calls, by id, else by position. Each finding keeps the call it was seen in.

use std::collections::{BTreeMap, BTreeSet};

use record::{Call, Role};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Names of tools that are a generic shell.
pub const SHELLS: [&str; 9] = [
    "bash",
    "shell",
    "exec",
    "sh",
    "terminal",
    "run_command",
    "execute_bash",
    "run_shell_command",
    "local_shell",
];
/// Lines of written text shorter than this prove nothing when they are read back.
const LINE_CHARS_MIN: usize = 3;

/// What was seen in one rollout, or summed over several.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Behaviour {
    /// Rollouts.
    pub rollouts: u64,
    /// Delivered replies.
    pub calls: u64,
    /// Replies whose text could not be parsed.
    pub parse_failed: u64,
    /// Generated tokens.
    pub tokens: u64,
    /// Tool calls by tool.
    pub tools: BTreeMap<String, u64>,
    /// Tool results that are errors.
    pub errors: u64,
    /// Of those, errors whose tool worked later.
    pub recovered: u64,
    /// Writes of a file with a text worth comparing.
    pub writes: u64,
    /// Of those, writes that were read back.
    pub verified: u64,
    /// Tool calls that repeat one before.
    pub repeats: u64,
    /// What the counts rest on, for one rollout: kind and arrival number of the call.
    pub evidence: Vec<(String, u32)>,
}

/// Whether a tool's result is an error: its first line says so, or a JSON result carries one.
#[must_use]
pub fn is_error(result: &str) -> bool {
    let start: String = result
        .trim_start()
        .chars()
        .take(200)
        .collect::<String>()
        .to_lowercase();
    let first = start.lines().next().unwrap_or_default();
    first.starts_with("error")
        || first.starts_with("traceback")
        || first.contains("command not found")
        || first.contains("no such file or directory")
        || first.contains("permission denied")
        || start.contains("\"error\":")
        || start.contains("exit code: 1")
        || start.contains("\"is_error\":true")
}

struct Act {
    name: String,
    arguments: Value,
    id: String,
    call: u32,
    result: Option<String>,
}

impl Act {
    fn texts(&self) -> Vec<&str> {
        self.arguments
            .as_object()
            .map(|map| map.values().filter_map(Value::as_str).collect())
            .unwrap_or_default()
    }

    /// Path and text of a write, by the usual names of arguments.
    fn write(&self) -> Option<(&str, &str)> {
        let get = |names: &[&str]| {
            names
                .iter()
                .find_map(|name| self.arguments.get(name).and_then(Value::as_str))
        };
        let path = get(&["path", "file_path", "filePath", "file", "filename"])?;
        let text = get(&[
            "content",
            "text",
            "file_text",
            "contents",
            "new_string",
            "newText",
        ])?;
        Some((path, text))
    }
}

/// The tool calls of a rollout with their results.
fn acts(calls: &[Call]) -> Vec<Act> {
    let mut acts: Vec<Act> = Vec::new();
    for call in calls.iter().filter(|call| call.delivered()) {
        // Results that this history brings: the latest act with that id and no result yet.
        for message in call
            .conversation
            .messages
            .iter()
            .filter(|one| one.role == Role::Tool)
        {
            let id = message.tool_call_id.as_deref().unwrap_or_default();
            if let Some(act) = acts
                .iter_mut()
                .rev()
                .find(|act| act.id == id && act.result.is_none())
            {
                act.result = Some(message.text_content());
            }
        }
        for tool in call.reply.iter().flat_map(|reply| &reply.tool_calls) {
            acts.push(Act {
                name: tool.name.clone(),
                arguments: tool.arguments.clone(),
                id: tool.id.clone(),
                call: call.id.index,
                result: None,
            });
        }
    }
    acts
}

impl Behaviour {
    /// What the calls of one rollout show, in order of arrival.
    #[must_use]
    pub fn of(calls: &[Call]) -> Self {
        let mut found = Self {
            rollouts: 1,
            ..Self::default()
        };
        for call in calls.iter().filter(|call| call.delivered()) {
            found.calls += 1;
            if call.parse_failed {
                found.parse_failed += 1;
                found
                    .evidence
                    .push(("parse_failed".to_owned(), call.id.index));
            }
            found.tokens += call
                .generation
                .as_ref()
                .map_or(0, |one| one.token_ids.len() as u64);
        }
        let acts = acts(calls);
        let mut seen: BTreeSet<String> = BTreeSet::new();
        for (at, act) in acts.iter().enumerate() {
            *found.tools.entry(act.name.clone()).or_default() += 1;
            if !seen.insert(format!("{} {}", act.name, act.arguments)) {
                found.repeats += 1;
                found.evidence.push(("repeat".to_owned(), act.call));
            }
            if act.result.as_deref().is_some_and(is_error) {
                found.errors += 1;
                found.evidence.push(("error".to_owned(), act.call));
                let later = acts[at + 1..].iter().find(|later| {
                    later.name == act.name
                        && later
                            .result
                            .as_deref()
                            .is_some_and(|result| !is_error(result))
                });
                if let Some(later) = later {
                    found.recovered += 1;
                    found.evidence.push(("recovered".to_owned(), later.call));
                }
            }
            if let Some((path, text)) = act.write() {
                let line = text
                    .lines()
                    .map(str::trim)
                    .max_by_key(|line| line.chars().count())
                    .filter(|line| line.chars().count() >= LINE_CHARS_MIN);
                let Some(line) = line else { continue };
                found.writes += 1;
                let name = path.rsplit('/').next().unwrap_or(path);
                // Not another write of it: tools tell back what they were given.
                let back = acts[at + 1..].iter().find(|later| {
                    later.write().is_none()
                        && later.texts().iter().any(|text| text.contains(name))
                        && later
                            .result
                            .as_deref()
                            .is_some_and(|result| result.contains(line))
                });
                if let Some(back) = back {
                    found.verified += 1;
                    found.evidence.push(("verified".to_owned(), back.call));
                }
            }
        }
        found
    }

    /// Adds another's counts; evidence stays with the single rollouts.
    pub fn add(&mut self, other: &Self) {
        self.rollouts += other.rollouts;
        self.calls += other.calls;
        self.parse_failed += other.parse_failed;
        self.tokens += other.tokens;
        for (name, count) in &other.tools {
            *self.tools.entry(name.clone()).or_default() += count;
        }
        self.errors += other.errors;
        self.recovered += other.recovered;
        self.writes += other.writes;
        self.verified += other.verified;
        self.repeats += other.repeats;
    }

    /// All tool calls.
    #[must_use]
    pub fn tool_calls(&self) -> u64 {
        self.tools.values().sum()
    }

    /// Shares and means by name; `None` where there is nothing to divide by.
    #[must_use]
    pub fn shares(&self) -> Vec<(&'static str, Option<f64>)> {
        let over = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
        let shell: u64 = self
            .tools
            .iter()
            .filter(|(name, _)| SHELLS.contains(&name.to_lowercase().as_str()))
            .map(|(_, count)| count)
            .sum();
        vec![
            ("shell_share", over(shell, self.tool_calls())),
            (
                "format_ok",
                over(self.calls.saturating_sub(self.parse_failed), self.calls),
            ),
            ("error_rate", over(self.errors, self.tool_calls())),
            ("error_recovery", over(self.recovered, self.errors)),
            ("self_verification", over(self.verified, self.writes)),
            ("repeat_rate", over(self.repeats, self.tool_calls())),
            ("calls_per_rollout", over(self.calls, self.rollouts)),
            (
                "tool_calls_per_rollout",
                over(self.tool_calls(), self.rollouts),
            ),
            ("tokens_per_rollout", over(self.tokens, self.rollouts)),
        ]
    }

    /// The share of needed tools that were called at least once; 1 when none is needed.
    #[must_use]
    pub fn coverage(&self, needed: &[&str]) -> f64 {
        if needed.is_empty() {
            return 1.0;
        }
        let used = needed
            .iter()
            .filter(|name| self.tools.contains_key(**name))
            .count();
        used as f64 / needed.len() as f64
    }
}

/// Two policies side by side, in Markdown: before, after, and the difference.
#[must_use]
pub fn before_after(before: &Behaviour, after: &Behaviour) -> String {
    let mut out = String::from("| measure | before | after | difference |\n|---|---|---|---|\n");
    let shown =
        |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.3}"));
    for ((name, old), (_, new)) in before.shares().into_iter().zip(after.shares()) {
        let difference = old.zip(new).map(|(old, new)| new - old);
        out.push_str(&format!(
            "| {name} | {} | {} | {} |\n",
            shown(old),
            shown(new),
            shown(difference)
        ));
    }
    out
}
