//! Whether an assistant turn of a request is one of ours: does it say the same?

use record::Message;
use serde_json::Value;

/// What an assistant turn says, without how it is written: equal for a reply and for every echo
/// of it that was measured on real harnesses.
///
/// Counts: the text, trimmed, whatever blocks it came in; the calls in order, each with its name
/// and its arguments as unordered JSON. Does not count: ids, reasoning, images, key order, `1.0`
/// against `1`, `""` or `null` arguments against `{}`.
#[must_use]
pub fn meaning(message: &Message) -> String {
    let text = message.text_content();
    let mut out = Value::from(text.trim()).to_string();
    for call in &message.tool_calls {
        out.push('\n');
        out.push_str(&Value::from(call.name.as_str()).to_string());
        out.push(' ');
        match &call.arguments {
            Value::Null => out.push_str("{}"),
            Value::String(text) => match serde_json::from_str::<Value>(text) {
                Ok(parsed @ Value::Object(_)) => write(&parsed, &mut out),
                _ if text.trim().is_empty() => out.push_str("{}"),
                _ => out.push_str(&Value::from(text.as_str()).to_string()),
            },
            other => write(other, &mut out),
        }
    }
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
                out.push_str(&Value::from(key.as_str()).to_string());
                out.push(':');
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
        other => out.push_str(&other.to_string()),
    }
}
