//! Whether an assistant turn of a request is one of ours: does it say the same?

use std::borrow::Cow;

use record::{Message, Part, ToolSpec};
use serde_json::Value;

/// What an assistant turn says, without how it is written: equal for a reply and for every echo
/// of it that was measured on real harnesses.
///
/// Counts: the text, trimmed, whatever blocks it came in; the calls in order, each with its name
/// and its arguments as unordered JSON. Does not count: ids, reasoning, images, key order, `1.0`
/// against `1`, `""` or `null` arguments against `{}`, blanks at the ends of lines of arguments.
#[must_use]
pub fn meaning(message: &Message) -> String {
    let mut out = String::new();
    put(text(message).trim(), &mut out);
    for call in &message.tool_calls {
        out.push('\n');
        put(&call.name, &mut out);
        out.push(' ');
        out.push_str(&said_arguments(&call.arguments));
    }
    out
}

/// Whether two turns have the same [`meaning`]. Almost always they are the same word for word or
/// say something else in their text, and nothing is written out to find that.
#[must_use]
pub fn same_meaning(one: &Message, other: &Message) -> bool {
    one.tool_calls.len() == other.tool_calls.len()
        && text(one).trim() == text(other).trim()
        && one.tool_calls.iter().zip(&other.tool_calls).all(|(a, b)| {
            a.name == b.name
                && (a.arguments == b.arguments
                    || said_arguments(&a.arguments) == said_arguments(&b.arguments))
        })
}

/// [`Message::text_content`] without a copy where the text is in one piece.
fn text(message: &Message) -> Cow<'_, str> {
    match message.content.as_slice() {
        [] => Cow::Borrowed(""),
        [Part::Text { text }] => Cow::Borrowed(text),
        _ => Cow::Owned(message.text_content()),
    }
}

/// A text with its length before it: nothing in it can be taken for what comes next, and nothing
/// needs to be escaped.
fn put(text: &str, out: &mut String) {
    out.push_str(&text.len().to_string());
    out.push(':');
    out.push_str(text);
}

fn said_arguments(arguments: &Value) -> String {
    match arguments {
        Value::Null => "{}".to_owned(),
        Value::String(text) => match serde_json::from_str::<Value>(text) {
            Ok(parsed @ Value::Object(_)) => canonical(&parsed),
            _ if text.trim().is_empty() => "{}".to_owned(),
            _ => canonical(arguments),
        },
        other => canonical(other),
    }
}

/// The turn without arguments that say what their schemas say when they are absent: some clients
/// fill such defaults in before they echo a call. `None` when it has no such argument.
pub(crate) fn without_defaults(message: &Message, tools: &[ToolSpec]) -> Option<Message> {
    let is_default = |name: &str, key: &str, value: &Value| {
        let tool = tools.iter().find(|tool| tool.name == name);
        let default =
            tool.and_then(|tool| tool.parameters.get("properties")?.get(key)?.get("default"));
        default.is_some_and(|default| default == value || canonical(default) == canonical(value))
    };
    let has_one = message.tool_calls.iter().any(|call| {
        let arguments = call.arguments.as_object();
        arguments.is_some_and(|arguments| {
            arguments
                .iter()
                .any(|(key, value)| is_default(&call.name, key, value))
        })
    });
    if !has_one {
        return None;
    }
    let mut plain = message.clone();
    for call in &mut plain.tool_calls {
        if let Value::Object(arguments) = &mut call.arguments {
            arguments.retain(|key, value| !is_default(&call.name, key, value));
        }
    }
    Some(plain)
}

fn canonical(value: &Value) -> String {
    let mut out = String::new();
    write(value, &mut out);
    out
}

fn write(value: &Value, out: &mut String) {
    match value {
        Value::Object(object) => {
            let mut entries: Vec<_> = object.iter().collect();
            entries.sort_by(|a, b| a.0.cmp(b.0));
            out.push('{');
            for (index, (key, item)) in entries.into_iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                put(key, out);
                write(item, out);
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write(item, out);
            }
            out.push(']');
        }
        // JavaScript has one kind of number: whole ones lose their point on the way, and
        // those above 2^53 their last digits, so every number is compared as a float.
        Value::Number(number) => match number.as_f64() {
            Some(float) => out.push_str(&format!("{float}")),
            None => out.push_str(&number.to_string()),
        },
        // Claude Code takes blanks off the ends of lines that are written to a file.
        Value::String(text) => {
            let ends = |line: &str| line.ends_with([' ', '\t']);
            out.push('s');
            if text.split('\n').any(ends) {
                let lines: Vec<&str> = text
                    .split('\n')
                    .map(|line| line.trim_end_matches([' ', '\t']))
                    .collect();
                put(&lines.join("\n"), out);
            } else {
                put(text, out);
            }
        }
        other => out.push_str(&other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use record::{Part, Role, ToolCall};
    use serde_json::json;

    use super::*;

    fn turn(text: &str, calls: &[(&str, Value)]) -> Message {
        let mut message = Message::text(Role::Assistant, text);
        for (id, (name, arguments)) in calls.iter().enumerate() {
            message.tool_calls.push(ToolCall {
                id: format!("id{id}"),
                name: (*name).into(),
                arguments: arguments.clone(),
            });
        }
        message
    }

    #[test]
    fn form_does_not_count() {
        let ours = turn(
            "Hi.\n",
            &[("f", json!({"a": 2.0, "b": {"x": null, "y": [1e3]}}))],
        );
        let mut echo = turn(
            "Hi.",
            &[("f", json!({"b": {"y": [1000], "x": null}, "a": 2}))],
        );
        echo.content = vec![
            Part::Text { text: "H".into() },
            Part::Text { text: "i.".into() },
        ];
        echo.reasoning = Some("dropped or renamed".into());
        echo.tool_calls[0].id = "other".into();
        assert_eq!(meaning(&ours), meaning(&echo));
        assert!(same_meaning(&ours, &echo));
        let nothing = [json!({}), json!(null), json!(""), json!("{}")];
        for arguments in nothing {
            assert_eq!(
                meaning(&turn("", &[("f", arguments)])),
                meaning(&turn("", &[("f", json!({}))]))
            );
        }
        assert_eq!(
            meaning(&turn("", &[("f", json!("{\"b\": 1, \"a\": 2}"))])),
            meaning(&turn("", &[("f", json!({"a": 2, "b": 1}))]))
        );
    }

    #[test]
    fn defaults_that_a_client_filled_in_can_be_taken_out() {
        let tools = [ToolSpec {
            name: "f".into(),
            description: String::new(),
            parameters: json!({"type": "object", "properties": {
                "all": {"type": "boolean", "default": false},
                "n": {"type": "number", "default": 1},
                "path": {"type": "string"},
            }}),
        }];
        let call = |arguments| turn("Hi.", &[("f", arguments)]);
        let plain = |arguments| without_defaults(&call(arguments), &tools);
        assert_eq!(
            plain(json!({"all": false, "n": 1.0, "path": "a"})),
            Some(call(json!({"path": "a"})))
        );
        assert_eq!(plain(json!({"all": true, "n": 2, "path": "a"})), None);
        assert_eq!(plain(json!({"path": false})), None);
        assert_eq!(plain(json!("no object")), None);
        let foreign = turn("", &[("g", json!({"all": false}))]);
        assert_eq!(without_defaults(&foreign, &tools), None);
    }

    #[test]
    fn everything_that_is_said_counts() {
        let call = |name, arguments| turn("", &[(name, arguments)]);
        let different = [
            turn("a", &[]),
            turn("a b", &[]),
            turn("", &[]),
            call("f", json!({})),
            call("g", json!({})),
            call("f", json!({"a": 1})),
            call("f", json!({"a": "1"})),
            call("f", json!({"a": [1, 2]})),
            call("f", json!({"a": [2, 1]})),
            call("f", json!({"a": null})),
            call("f", json!("no json")),
            turn("", &[("f", json!({})), ("g", json!({}))]),
            turn("", &[("g", json!({})), ("f", json!({}))]),
        ];
        let mut seen = std::collections::HashSet::new();
        for message in &different {
            assert!(seen.insert(meaning(message)), "{message:?}");
            let like = different
                .iter()
                .filter(|other| same_meaning(message, other));
            assert_eq!(like.count(), 1, "{message:?}");
        }
    }

    #[test]
    fn blanks_at_the_ends_of_lines_of_arguments_do_not_count() {
        let call = |text| meaning(&turn("", &[("write", json!({"text": text}))]));
        assert_eq!(call("  two  \n\tq \t\n"), call("  two\n\tq\n"));
        for other in [
            " two\n\tq\n",
            "  two\n\tq",
            "  two\n\n\tq\n",
            "  t wo\n\tq\n",
        ] {
            assert_ne!(call(other), call("  two\n\tq\n"), "{other:?}");
        }
    }
}
