//! Calls as blocks between two marks, which is how most families write them; a family is a
//! [`Marks`] and a function that reads the inside of one block.
//!
//! White space around blocks does not matter. A block that is not closed or cannot be read stays
//! in the text as it was written, and the reply counts as failed. Text before, between and after
//! calls is content: trimmed and joined by line breaks. Without calls the text is kept to the
//! byte, but for the line breaks behind the reasoning.

use record::{Message, ToolSpec};
use serde_json::{Map, Value};

use super::{Grammar, Pieces};
use crate::python_json::{Style, dumps};

/// An argument may hold the closing mark. So many places are tried for the end of a block.
const CLOSINGS_MAX: usize = 16;

/// Name and arguments of the calls in one block.
pub(super) type Calls = Vec<(String, Value)>;

/// How a family marks reasoning and calls.
pub(super) struct Marks {
    /// The family.
    pub(super) name: &'static str,
    /// Around the reasoning.
    pub(super) think: (&'static str, &'static str),
    /// Around all calls of a reply; says nothing by itself.
    pub(super) section: Option<(&'static str, &'static str)>,
    /// Around a block.
    pub(super) block: (&'static str, &'static str),
    /// Reads the inside of a block; `None` when it is malformed.
    pub(super) read: fn(&str, &[ToolSpec]) -> Option<Calls>,
    /// Writes the inside of a block for one call; `position` counts from 0.
    pub(super) write: fn(&str, &Map<String, Value>, usize) -> String,
}

impl std::fmt::Debug for Marks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Splits reasoning off: the reasoning, the rest, and whether it was left open.
pub(super) fn thought<'a>(
    text: &'a str,
    in_thought: bool,
    (open, close): (&str, &str),
) -> (Option<&'a str>, &'a str, bool) {
    let start = text.trim_start();
    let after = match (start.strip_prefix(open), in_thought) {
        (Some(after), _) => after,
        (None, true) => text,
        (None, false) => return (None, text, false),
    };
    match after.split_once(close) {
        Some((reasoning, rest)) => (Some(reasoning), rest.trim_start_matches('\n'), false),
        None => (Some(after), "", true),
    }
}

/// Reasoning as it is kept: trimmed, and none when it is empty.
pub(super) fn kept(reasoning: Option<&str>) -> Option<String> {
    reasoning
        .map(str::trim)
        .filter(|reasoning| !reasoning.is_empty())
        .map(str::to_owned)
}

/// A value that a family writes without quotes: text where the tool's schema says so, else what
/// it is as JSON, else text.
pub(super) fn loose(tools: &[ToolSpec], tool: &str, parameter: &str, text: &str) -> Value {
    let schema = tools
        .iter()
        .find(|spec| spec.name == tool)
        .and_then(|spec| {
            spec.parameters
                .get("properties")?
                .get(parameter)?
                .get("type")
        });
    let is_text = match schema {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => {
            let may_be = |wanted: &str| kinds.iter().any(|kind| kind == wanted);
            may_be("string") && !(may_be("null") && text.trim() == "null")
        }
        _ => false,
    };
    if is_text {
        return Value::from(text);
    }
    serde_json::from_str(text.trim()).unwrap_or_else(|_| Value::from(text))
}

/// The opposite of [`loose`].
pub(super) fn loosely(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => dumps(other, &Style::new(None)),
    }
}

/// A JSON object with a name and arguments under one of the given keys.
pub(super) fn named(text: &str, keys: &[&str]) -> Option<(String, Value)> {
    match serde_json::from_str::<Value>(text.trim()) {
        Ok(value) => named_value(value, keys),
        Err(_) => None,
    }
}

pub(super) fn named_value(value: Value, keys: &[&str]) -> Option<(String, Value)> {
    let Value::Object(mut object) = value else {
        return None;
    };
    let Some(Value::String(name)) = object.shift_remove("name") else {
        return None;
    };
    if name.trim().is_empty() {
        return None;
    }
    let found = keys.iter().find_map(|key| object.shift_remove(*key));
    Some((name, arguments(found)?))
}

/// Arguments as an object. Some models write the object as a string, as the wire does.
pub(super) fn arguments(found: Option<Value>) -> Option<Value> {
    match found {
        None | Some(Value::Null) => Some(Value::Object(Map::new())),
        Some(Value::Object(arguments)) => Some(Value::Object(arguments)),
        Some(Value::String(text)) => match serde_json::from_str(&text) {
            Ok(Value::Object(arguments)) => Some(Value::Object(arguments)),
            _ => None,
        },
        Some(_) => None,
    }
}

/// Reads one block that begins behind its opening mark: its calls, and where the block ends.
fn block(marks: &Marks, text: &str, tools: &[ToolSpec]) -> Option<(Calls, usize)> {
    let close = marks.block.1;
    text.match_indices(close)
        .take(CLOSINGS_MAX)
        .find_map(|(at, _)| {
            let calls = (marks.read)(&text[..at], tools)?;
            (!calls.is_empty()).then_some((calls, at + close.len()))
        })
}

impl Grammar for Marks {
    fn name(&self) -> &'static str {
        self.name
    }

    fn parse(&self, text: &str, in_thought: bool, tools: &[ToolSpec]) -> Pieces {
        let (reasoning, body, open) = thought(text, in_thought, self.think);
        let mut pieces = Pieces {
            reasoning: kept(reasoning),
            failed: open,
            ..Pieces::default()
        };
        // Runs of text between calls; a malformed block belongs to the run it stands in.
        let mut runs = Vec::new();
        let mut run_start = 0;
        let mut from = 0;
        while let Some(found) = body[from..].find(self.block.0) {
            let open = from + found;
            let inside = open + self.block.0.len();
            match block(self, &body[inside..], tools) {
                Some((calls, length)) => {
                    pieces.calls.extend(calls);
                    runs.push(&body[run_start..open]);
                    run_start = inside + length;
                    from = run_start;
                }
                None => {
                    pieces.failed = true;
                    // A block may have been opened twice: try again behind the first opening.
                    from = inside;
                }
            }
        }
        runs.push(&body[run_start..]);
        pieces.content = if pieces.calls.is_empty() {
            body.to_owned()
        } else {
            let runs = runs.iter().map(|run| match self.section {
                Some((open, close)) => run.replace(open, "").replace(close, "").trim().to_owned(),
                None => run.trim().to_owned(),
            });
            let runs: Vec<String> = runs.filter(|run| !run.is_empty()).collect();
            runs.join("\n")
        };
        pieces
    }

    fn write(&self, message: &Message) -> String {
        let mut out = String::new();
        if let Some(reasoning) = &message.reasoning {
            let (open, close) = self.think;
            out.push_str(&format!("{open}\n{reasoning}\n{close}\n\n"));
        }
        out.push_str(&message.text_content());
        if message.tool_calls.is_empty() {
            return out;
        }
        let (section, section_end) = self.section.unwrap_or_default();
        out.push_str(section);
        for (position, call) in message.tool_calls.iter().enumerate() {
            if self.section.is_none() && !out.is_empty() && !out.ends_with('\n') {
                out.push('\n');
            }
            let none = Map::new();
            let arguments = call.arguments.as_object().unwrap_or(&none);
            let inside = (self.write)(&call.name, arguments, position);
            out.push_str(&format!("{}{inside}{}", self.block.0, self.block.1));
        }
        out.push_str(section_end);
        out
    }

    fn opens_thought(&self, generation_prompt: &str) -> bool {
        let (open, close) = self.think;
        match generation_prompt.rfind(open) {
            Some(at) => !generation_prompt[at..].contains(close),
            None => false,
        }
    }
}
