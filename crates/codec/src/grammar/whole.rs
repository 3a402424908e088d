//! Families whose calls reach to the end of the reply.

use record::{Message, ToolSpec};
use serde_json::{Value, json};

use super::{
    Grammar, Pieces,
    blocks::{arguments, kept, named_value, thought},
};
use crate::python_json::{Style, dumps};

/// `[THINK]…[/THINK]`, text, `[TOOL_CALLS]` and behind it a JSON list of calls, or any number of
/// `NAME[ARGS]{…}`, each with its own mark.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mistral;

const THINK: (&str, &str) = ("[THINK]", "[/THINK]");
const CALLS: &str = "[TOOL_CALLS]";
const ARGS: &str = "[ARGS]";

fn mistral_calls(text: &str) -> Option<Vec<(String, Value)>> {
    let mut calls = Vec::new();
    for text in text.split(CALLS) {
        let text = text.trim();
        if let Some((name, json)) = text.split_once(ARGS) {
            // Newer templates put a call id between name and arguments.
            let name = name.split("[CALL_ID]").next()?.trim();
            let arguments = arguments(Some(serde_json::from_str(json.trim()).ok()?))?;
            if name.is_empty() {
                return None;
            }
            calls.push((name.to_owned(), arguments));
        } else {
            let list: Vec<Value> = serde_json::from_str(text).ok()?;
            for value in list {
                calls.push(named_value(value, &["arguments"])?);
            }
        }
    }
    (!calls.is_empty()).then_some(calls)
}

impl Grammar for Mistral {
    fn name(&self) -> &'static str {
        "mistral"
    }

    fn parse(&self, text: &str, in_thought: bool, _tools: &[ToolSpec]) -> Pieces {
        let (reasoning, body, open) = thought(text, in_thought, THINK);
        let mut pieces = Pieces {
            reasoning: kept(reasoning),
            failed: open,
            content: body.to_owned(),
            calls: Vec::new(),
        };
        if let Some((before, after)) = body.split_once(CALLS) {
            match mistral_calls(after) {
                Some(calls) => {
                    pieces.calls = calls;
                    pieces.content = before.trim().to_owned();
                }
                None => pieces.failed = true,
            }
        }
        pieces
    }

    fn write(&self, message: &Message) -> String {
        let mut out = String::new();
        if let Some(reasoning) = &message.reasoning {
            out.push_str(&format!("{}{reasoning}{}", THINK.0, THINK.1));
        }
        out.push_str(&message.text_content());
        for call in &message.tool_calls {
            let json = dumps(&call.arguments, &Style::new(None));
            out.push_str(&format!("{CALLS}{}{ARGS}{json}", call.name));
        }
        out
    }

    fn opens_thought(&self, generation_prompt: &str) -> bool {
        generation_prompt.trim_end().ends_with(THINK.0)
    }
}

/// The whole reply is one JSON object with `name` and `parameters`, or several behind each other
/// (with `;` or line breaks between them), perhaps behind `<|python_tag|>`. Anything else is
/// text: JSON without these two fields is an answer, not a failure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Llama3;

const PYTHON_TAG: &str = "<|python_tag|>";

fn llama_calls(text: &str) -> Option<Vec<(String, Value)>> {
    let mut calls = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        let value = values.next()?.ok()?;
        let at = values.byte_offset();
        let has_arguments = ["parameters", "arguments"]
            .iter()
            .any(|key| value.get(*key).is_some());
        if !has_arguments {
            return None;
        }
        calls.push(named_value(value, &["parameters", "arguments"])?);
        rest = rest[at..].trim_start().trim_start_matches(';').trim_start();
    }
    (!calls.is_empty()).then_some(calls)
}

impl Grammar for Llama3 {
    fn name(&self) -> &'static str {
        "llama3"
    }

    fn parse(&self, text: &str, _in_thought: bool, _tools: &[ToolSpec]) -> Pieces {
        let trimmed = text.trim();
        let tagged = trimmed.strip_prefix(PYTHON_TAG);
        match llama_calls(tagged.unwrap_or(trimmed)) {
            Some(calls) => Pieces {
                calls,
                ..Pieces::default()
            },
            None => Pieces {
                content: text.to_owned(),
                // The tag says that a call was meant; so does JSON that names a tool.
                failed: tagged.is_some()
                    || (trimmed.starts_with('{') && trimmed.contains("\"parameters\"")),
                ..Pieces::default()
            },
        }
    }

    fn write(&self, message: &Message) -> String {
        if message.tool_calls.is_empty() {
            return message.text_content();
        }
        let calls: Vec<String> = message
            .tool_calls
            .iter()
            .map(|call| {
                let value = json!({"name": call.name, "parameters": call.arguments});
                dumps(&value, &Style::new(None))
            })
            .collect();
        calls.join("; ")
    }

    fn opens_thought(&self, _generation_prompt: &str) -> bool {
        false
    }
}
