//! The channels of gpt-oss: a reply is a row of messages, each with a header
//! (`<|start|>assistant<|channel|>NAME`, perhaps ` to=functions.TOOL`, perhaps
//! ` <|constrain|>json`), `<|message|>`, content and an end (`<|end|>`, `<|call|>`, `<|return|>`).
//! The generation prompt is the first message's `<|start|>assistant`.
//!
//! `analysis` is reasoning, `final` and `commentary` without a recipient are text, a recipient
//! `functions.TOOL` makes a call. A message without a known channel stays text as it was written.

use record::{Message, ToolSpec};
use serde_json::Value;

use super::{Grammar, Pieces, blocks::arguments};
use crate::python_json::{Style, dumps};

#[derive(Debug, Clone, Copy)]
pub(super) struct Harmony;

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const ENDS: [&str; 3] = ["<|end|>", "<|call|>", "<|return|>"];

/// A message's content up to its end, and what comes behind the end.
fn content(text: &str) -> (&str, &str) {
    let end = ENDS
        .iter()
        .filter_map(|end| text.find(end).map(|at| (at, end.len())))
        .min();
    // Some ends are left out when another message follows.
    let start = text.find(START);
    match (end, start) {
        (Some((at, _)), Some(start)) if start < at => (&text[..start], &text[start..]),
        (Some((at, length)), _) => (&text[..at], &text[at + length..]),
        (None, Some(start)) => (&text[..start], &text[start..]),
        (None, None) => (text, ""),
    }
}

/// Channel and recipient of a header.
fn header(header: &str) -> Option<(&str, Option<&str>)> {
    let (before, after) = header.split_once(CHANNEL)?;
    let channel = after
        .split(|c: char| c.is_whitespace() || c == '<')
        .next()
        .filter(|channel| !channel.is_empty())?;
    // The recipient stands before the channel or behind it.
    let recipient = [after, before].into_iter().find_map(|part| {
        let (_, recipient) = part.split_once("to=")?;
        recipient
            .split(|c: char| c.is_whitespace() || c == '<')
            .next()
    });
    Some((channel, recipient))
}

fn joined(texts: &[String]) -> Option<String> {
    Some(texts.join("\n")).filter(|text| !text.is_empty())
}

impl Grammar for Harmony {
    fn name(&self) -> &'static str {
        "harmony"
    }

    fn parse(&self, text: &str, _in_thought: bool, _tools: &[ToolSpec]) -> Pieces {
        let mut pieces = Pieces::default();
        let (mut reasoning, mut said) = (Vec::new(), Vec::new());
        let mut rest = text;
        while !rest.is_empty() {
            let whole = rest;
            let Some((head, after)) = rest.split_once(MESSAGE) else {
                // No message at all: text of a model that does not keep to the form.
                pieces.failed = true;
                said.push(rest.to_owned());
                break;
            };
            let (body, behind) = content(after);
            rest = behind;
            let written = &whole[..whole.len() - behind.len()];
            match header(head) {
                Some((_, Some(recipient))) => {
                    let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
                    let found = match body.trim() {
                        "" => Some(None),
                        json => serde_json::from_str::<Value>(json).ok().map(Some),
                    };
                    match found.and_then(arguments) {
                        Some(arguments) if !name.is_empty() => {
                            pieces.calls.push((name.to_owned(), arguments));
                        }
                        _ => {
                            pieces.failed = true;
                            said.push(written.to_owned());
                        }
                    }
                }
                Some(("analysis", None)) => reasoning.push(body.trim().to_owned()),
                Some(("final" | "commentary", None)) => said.push(body.to_owned()),
                _ => {
                    pieces.failed = true;
                    said.push(written.to_owned());
                }
            }
        }
        pieces.reasoning = joined(&reasoning);
        pieces.content = said.join("\n");
        pieces
    }

    fn write(&self, message: &Message) -> String {
        let mut parts = Vec::new();
        if let Some(reasoning) = &message.reasoning {
            parts.push(format!("{CHANNEL}analysis{MESSAGE}{reasoning}"));
        }
        let text = message.text_content();
        let calls = &message.tool_calls;
        if !text.is_empty() || (parts.is_empty() && calls.is_empty()) {
            let channel = if calls.is_empty() {
                "final"
            } else {
                "commentary"
            };
            parts.push(format!("{CHANNEL}{channel}{MESSAGE}{text}"));
        }
        for call in calls {
            let json = dumps(&call.arguments, &Style::new(None));
            parts.push(format!(
                "{CHANNEL}commentary to=functions.{} <|constrain|>json{MESSAGE}{json}",
                call.name
            ));
        }
        parts.join(&format!("<|end|>{START}assistant"))
    }

    fn opens_thought(&self, _generation_prompt: &str) -> bool {
        false
    }
}
