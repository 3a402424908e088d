//! `<think>…</think>`, text, and any number of `<tool_call>` blocks that hold one JSON object with
//! `name` and `arguments`.
//!
//! White space around the JSON and around blocks does not matter. A block that is not closed, is
//! no JSON, or has no name, stays in the text as it was written, and the reply counts as failed.
//! Text before, between and after calls is content: trimmed and joined by line breaks. Without
//! calls the text is kept to the byte, but for the line breaks behind the reasoning.

use record::Message;
use serde_json::{Map, Value};

use super::{Grammar, Pieces};
use crate::python_json::{Style, dumps};

const THINK: &str = "<think>";
const THINK_END: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";

/// The grammar of Hermes and Qwen.
#[derive(Debug, Clone, Copy)]
pub struct Hermes;

/// A call from the inside of a block.
fn call(inner: &str) -> Option<(String, Value)> {
    let Ok(Value::Object(mut object)) = serde_json::from_str::<Value>(inner.trim()) else {
        return None;
    };
    let Some(Value::String(name)) = object.shift_remove("name") else {
        return None;
    };
    if name.trim().is_empty() {
        return None;
    }
    let arguments = match object.shift_remove("arguments") {
        None | Some(Value::Null) => Value::Object(Map::new()),
        Some(Value::Object(arguments)) => Value::Object(arguments),
        // Some models write the object as a string, as the wire does.
        Some(Value::String(text)) => match serde_json::from_str(&text) {
            Ok(Value::Object(arguments)) => Value::Object(arguments),
            _ => return None,
        },
        Some(_) => return None,
    };
    Some((name, arguments))
}

/// Splits reasoning off: the reasoning, the rest, and whether it was left open.
fn thought(text: &str, in_thought: bool) -> (Option<&str>, &str, bool) {
    let start = text.trim_start();
    let after = match (start.strip_prefix(THINK), in_thought) {
        (Some(after), _) => after,
        (None, true) => text,
        (None, false) => return (None, text, false),
    };
    match after.split_once(THINK_END) {
        Some((reasoning, rest)) => (Some(reasoning), rest.trim_start_matches('\n'), false),
        None => (Some(after), "", true),
    }
}

impl Grammar for Hermes {
    fn name(&self) -> &'static str {
        "hermes"
    }

    fn parse(&self, text: &str, in_thought: bool) -> Pieces {
        let (reasoning, body, open) = thought(text, in_thought);
        let mut pieces = Pieces {
            reasoning: reasoning
                .map(str::trim)
                .filter(|reasoning| !reasoning.is_empty())
                .map(str::to_owned),
            failed: open,
            ..Pieces::default()
        };
        // Runs of text between calls; a malformed block belongs to the run it stands in.
        let mut runs = Vec::new();
        let mut run_start = 0;
        let mut from = 0;
        while let Some(found) = body[from..].find(CALL) {
            let open = from + found;
            let inside = open + CALL.len();
            let Some(length) = body[inside..].find(CALL_END) else {
                pieces.failed = true;
                break;
            };
            let end = inside + length + CALL_END.len();
            match call(&body[inside..inside + length]) {
                Some(call) => {
                    pieces.calls.push(call);
                    runs.push(&body[run_start..open]);
                    run_start = end;
                    from = end;
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
            runs.iter()
                .map(|run| run.trim())
                .filter(|run| !run.is_empty())
                .collect::<Vec<_>>()
                .join("\n")
        };
        pieces
    }

    fn write(&self, message: &Message) -> String {
        let mut out = String::new();
        if let Some(reasoning) = &message.reasoning {
            out.push_str(&format!("{THINK}\n{reasoning}\n{THINK_END}\n\n"));
        }
        out.push_str(&message.text_content());
        for call in &message.tool_calls {
            if !out.is_empty() && !out.ends_with('\n') {
                out.push('\n');
            }
            let block = serde_json::json!({"name": call.name, "arguments": call.arguments});
            let json = dumps(&block, &Style::new(None));
            out.push_str(&format!("{CALL}\n{json}\n{CALL_END}"));
        }
        out
    }

    fn opens_thought(&self, generation_prompt: &str) -> bool {
        match generation_prompt.rfind(THINK) {
            Some(at) => !generation_prompt[at..].contains(THINK_END),
            None => false,
        }
    }
}
