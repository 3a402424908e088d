//! Families that write calls as blocks, each by the form that its template documents.

use record::ToolSpec;
use serde_json::{Map, Value};

use super::blocks::{Calls, Marks, arguments, loose, loosely};
use crate::python_json::{Style, dumps};

const THINK: (&str, &str) = ("<think>", "</think>");

/// `<tool_call>`, `<function=NAME>`, `<parameter=KEY>` value `</parameter>` …
pub(super) const QWEN3_CODER: Marks = Marks {
    name: "qwen3-coder",
    think: THINK,
    section: None,
    block: ("<tool_call>", "</tool_call>"),
    read: |inner, tools| {
        let (name, inside) = inner.trim().strip_prefix("<function=")?.split_once('>')?;
        let name = name.trim();
        let inside = inside.trim_end().strip_suffix("</function>")?;
        let object = parameters(inside, ("<parameter=", ">", "</parameter>"), name, tools)?;
        one(name, object)
    },
    write: |name, arguments, _| {
        let mut out = format!("\n<function={name}>\n");
        for (key, value) in arguments {
            out.push_str(&format!(
                "<parameter={key}>\n{}\n</parameter>\n",
                loosely(value)
            ));
        }
        out + "</function>\n"
    },
};

/// The name, then `<arg_key>KEY</arg_key>`, `<arg_value>VALUE</arg_value>` …
pub(super) const GLM: Marks = Marks {
    name: "glm",
    think: THINK,
    section: None,
    block: ("<tool_call>", "</tool_call>"),
    read: |inner, tools| {
        let at = inner.find("<arg_key>").unwrap_or(inner.len());
        let name = inner[..at].trim();
        let (mut rest, mut object) = (inner[at..].trim_start(), Map::new());
        while !rest.is_empty() {
            let (key, behind) = rest.strip_prefix("<arg_key>")?.split_once("</arg_key>")?;
            let value = behind.trim_start().strip_prefix("<arg_value>")?;
            let (value, behind) = until(value, "</arg_value>", "<arg_key>")?;
            let key = key.trim();
            object.insert(key.to_owned(), loose(tools, name, key, value));
            rest = behind;
        }
        one(name, object)
    },
    write: |name, arguments, _| {
        let mut out = format!("{name}\n");
        for (key, value) in arguments {
            out.push_str(&format!(
                "<arg_key>{key}</arg_key>\n<arg_value>{}</arg_value>\n",
                loosely(value)
            ));
        }
        out
    },
};

/// `functions.NAME:N`, a mark, JSON.
pub(super) const KIMI: Marks = Marks {
    name: "kimi",
    think: THINK,
    section: Some(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")),
    block: ("<|tool_call_begin|>", "<|tool_call_end|>"),
    read: |inner, _| {
        let (id, json) = inner.split_once("<|tool_call_argument_begin|>")?;
        let id = id.trim();
        let name = match id.rsplit_once(':') {
            Some((name, number)) if number.chars().all(|digit| digit.is_ascii_digit()) => name,
            _ => id,
        };
        in_json(name.strip_prefix("functions.").unwrap_or(name), json)
    },
    write: |name, arguments, position| {
        let json = json(arguments);
        format!("functions.{name}:{position}<|tool_call_argument_begin|>{json}")
    },
};

/// One block with an `<invoke name="NAME">` per call, each with `<parameter name="KEY">`.
pub(super) const MINIMAX: Marks = Marks {
    name: "minimax",
    think: THINK,
    section: None,
    block: ("<minimax:tool_call>", "</minimax:tool_call>"),
    read: |inner, tools| {
        let mut calls = Vec::new();
        let mut rest = inner.trim();
        while !rest.is_empty() {
            let (name, behind) = rest.strip_prefix("<invoke name=\"")?.split_once("\">")?;
            let (inside, behind) = until(behind, "</invoke>", "<invoke name=")?;
            let marks = ("<parameter name=\"", "\">", "</parameter>");
            let object = parameters(inside, marks, name, tools)?;
            calls.extend(one(name, object)?);
            rest = behind;
        }
        Some(calls)
    },
    write: |name, arguments, _| {
        let mut out = format!("\n<invoke name=\"{name}\">\n");
        for (key, value) in arguments {
            let value = loosely(value);
            out.push_str(&format!("<parameter name=\"{key}\">{value}</parameter>\n"));
        }
        out + "</invoke>\n"
    },
};

/// V3.1: the name, a mark, JSON. V3 and R1: a type, the mark, the name, JSON in a fence.
pub(super) const DEEPSEEK: Marks = Marks {
    name: "deepseek",
    think: THINK,
    section: Some(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")),
    block: ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    read: |inner, _| {
        let (first, second) = inner.split_once("<｜tool▁sep｜>")?;
        match second.split_once("```json") {
            Some((name, fenced)) if first.trim() == "function" => {
                in_json(name, fenced.trim_end().strip_suffix("```")?)
            }
            _ => in_json(first, second),
        }
    },
    write: |name, arguments, _| format!("{name}<｜tool▁sep｜>{}", json(arguments)),
};

fn json(arguments: &Map<String, Value>) -> String {
    dumps(&Value::Object(arguments.clone()), &Style::new(None))
}

fn one(name: &str, arguments: Map<String, Value>) -> Option<Calls> {
    let name = name.trim();
    (!name.is_empty()).then(|| vec![(name.to_owned(), Value::Object(arguments))])
}

fn in_json(name: &str, json: &str) -> Option<Calls> {
    let name = name.trim();
    let found = match json.trim() {
        "" => None,
        text => Some(serde_json::from_str(text).ok()?),
    };
    let arguments = arguments(found)?;
    (!name.is_empty()).then(|| vec![(name.to_owned(), arguments)])
}

/// Text up to a closing mark behind which nothing or the next opening stands: a value may hold
/// the mark itself. The rest has no white space in front.
fn until<'a>(text: &'a str, close: &str, next: &str) -> Option<(&'a str, &'a str)> {
    text.match_indices(close).find_map(|(at, _)| {
        let rest = text[at + close.len()..].trim_start();
        (rest.is_empty() || rest.starts_with(next)).then_some((&text[..at], rest))
    })
}

/// Parameters between marks: before the key, behind it, and behind the value. One line break on
/// each side of a value belongs to the form.
fn parameters(
    text: &str,
    (open, named, close): (&str, &str, &str),
    tool: &str,
    tools: &[ToolSpec],
) -> Option<Map<String, Value>> {
    let mut object = Map::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (key, behind) = rest.strip_prefix(open)?.split_once(named)?;
        let (value, behind) = until(behind, close, open)?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let key = key.trim();
        object.insert(key.to_owned(), loose(tools, tool, key, value));
        rest = behind;
    }
    Some(object)
}
