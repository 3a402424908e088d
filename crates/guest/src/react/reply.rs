//! What a Chat Completions server answers, whole or in events.

use serde_json::{Map, Value, json};

/// A tool call as the model made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ToolCall {
    pub(super) id: String,
    pub(super) name: String,
    /// JSON, as text; perhaps not valid.
    pub(super) arguments: String,
}

/// The assistant's message in a response body.
pub(super) fn message(body: &[u8], stream: bool) -> Result<Value, String> {
    if stream {
        return from_events(&String::from_utf8_lossy(body));
    }
    let mut value: Value =
        serde_json::from_slice(body).map_err(|e| format!("the response is not JSON: {e}"))?;
    match value.pointer_mut("/choices/0/message").map(Value::take) {
        Some(message) if message.is_object() => Ok(message),
        _ => Err("the response has no choices[0].message".to_owned()),
    }
}

/// Joins the deltas of an event stream.
fn from_events(text: &str) -> Result<Value, String> {
    let mut message = Map::new();
    message.insert("role".to_owned(), json!("assistant"));
    let mut calls: Vec<Map<String, Value>> = Vec::new();
    let mut finished = false;
    for data in text.lines().filter_map(|line| line.strip_prefix("data:")) {
        let data = data.trim();
        if data == "[DONE]" {
            break;
        }
        let event: Value =
            serde_json::from_str(data).map_err(|e| format!("an event is not JSON: {e}"))?;
        if let Some(error) = event.get("error") {
            return Err(format!("the server broke off: {error}"));
        }
        let Some(choice) = event.pointer("/choices/0") else {
            continue;
        };
        finished |= choice.get("finish_reason").is_some_and(Value::is_string);
        let Some(delta) = choice.get("delta").and_then(Value::as_object) else {
            continue;
        };
        for (key, value) in delta {
            match (key.as_str(), value) {
                ("role", _) | (_, Value::Null) => {}
                ("tool_calls", Value::Array(pieces)) => {
                    for piece in pieces {
                        add_piece(&mut calls, piece);
                    }
                }
                _ => add_text(&mut message, key, value),
            }
        }
    }
    if !finished {
        return Err("the stream ended without a finish reason".to_owned());
    }
    message.entry("content").or_insert(Value::Null);
    if !calls.is_empty() {
        let calls = calls.into_iter().map(Value::Object).collect();
        message.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    Ok(Value::Object(message))
}

/// Text grows, anything else is replaced.
fn add_text(into: &mut Map<String, Value>, key: &str, value: &Value) {
    match (into.get_mut(key), value) {
        (Some(Value::String(old)), Value::String(new)) => old.push_str(new),
        _ => {
            into.insert(key.to_owned(), value.clone());
        }
    }
}

fn add_piece(calls: &mut Vec<Map<String, Value>>, piece: &Value) {
    let index = piece
        .get("index")
        .and_then(Value::as_u64)
        .unwrap_or(calls.len() as u64);
    // A server that counts wrongly must not make us allocate.
    let index = (index as usize).min(calls.len());
    if index == calls.len() {
        calls.push(Map::new());
    }
    let Some(call) = calls.get_mut(index) else {
        return;
    };
    for (key, value) in piece.as_object().into_iter().flatten() {
        match (key.as_str(), value) {
            ("index", _) | (_, Value::Null) => {}
            ("function", Value::Object(function)) => {
                let entry = call.entry("function").or_insert_with(|| json!({}));
                if let Value::Object(entry) = entry {
                    for (key, value) in function {
                        add_text(entry, key, value);
                    }
                }
            }
            // Ids and types come once; some servers repeat them.
            _ => {
                call.entry(key.clone()).or_insert_with(|| value.clone());
            }
        }
    }
}

/// The message as it goes back: all that came, with a role.
pub(super) fn echo(message: Value) -> Value {
    match message {
        Value::Object(mut fields) => {
            fields.entry("role").or_insert_with(|| json!("assistant"));
            Value::Object(fields)
        }
        other => json!({"role": "assistant", "content": other}),
    }
}

pub(super) fn tool_calls(message: &Value) -> Vec<ToolCall> {
    let calls = message.get("tool_calls").and_then(Value::as_array);
    let text = |call: &Value, pointer: &str| {
        call.pointer(pointer)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    calls
        .into_iter()
        .flatten()
        .map(|call| ToolCall {
            id: text(call, "/id"),
            name: text(call, "/function/name"),
            arguments: match call.pointer("/function/arguments") {
                // Some servers send an object.
                Some(Value::Object(object)) => Value::Object(object.clone()).to_string(),
                _ => text(call, "/function/arguments"),
            },
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_of_any_cut_joins_to_the_whole_message() {
        let whole = json!({
            "role": "assistant",
            "content": "Häl\nlo",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{\"command\": \"ls\"}"}},
                {"id": "b", "type": "function", "function": {"name": "read", "arguments": "{}"}},
            ],
        });
        let delta = |delta: Value| format!("data: {}\n\n", json!({"choices": [{"delta": delta}]}));
        for cut in 1..5 {
            let pieces = |text: &str| -> Vec<String> {
                let chars: Vec<char> = text.chars().collect();
                chars.chunks(cut).map(|c| c.iter().collect()).collect()
            };
            let mut stream = format!(
                ": ping\n\n{}",
                delta(json!({"role": "assistant", "content": null}))
            );
            for piece in pieces("Häl\nlo") {
                stream += &delta(json!({"content": piece}));
            }
            for (index, call) in whole["tool_calls"].as_array().unwrap().iter().enumerate() {
                let name = &call["function"]["name"];
                stream += &delta(json!({"tool_calls": [{"index": index, "id": call["id"],
                    "type": "function", "function": {"name": name, "arguments": ""}}]}));
                for piece in pieces(call["function"]["arguments"].as_str().unwrap()) {
                    stream += &delta(
                        json!({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}),
                    );
                }
            }
            let end = json!({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]});
            let unfinished = message(stream.as_bytes(), true);
            assert!(unfinished.unwrap_err().contains("finish reason"));
            stream += &format!("data: {end}\n\ndata: [DONE]\n\n");
            assert_eq!(message(stream.as_bytes(), true).unwrap(), whole);
        }
    }

    #[test]
    fn calls_are_taken_as_they_come() {
        let calls = tool_calls(&json!({"tool_calls": [
            {"id": "1", "function": {"name": "x", "arguments": {"a": 1}}}, {}, 7,
        ]}));
        assert_eq!(calls.len(), 3);
        assert_eq!(calls[0].arguments, "{\"a\":1}");
        assert_eq!(calls[1].name, "");
        assert!(tool_calls(&json!({"tool_calls": null})).is_empty());
        assert!(message(b"{\"choices\": []}", false).is_err());
        assert!(message(b"<html>", false).unwrap_err().contains("not JSON"));
    }
}
