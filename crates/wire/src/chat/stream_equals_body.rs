//! I5: the event stream of any reply reassembles to its body. The reader here is written as the
//! clients' are: it appends deltas by index and knows nothing of the writer.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::{reply_body, reply_events};
use crate::{sse::tests::events, testing::reply};

fn append(target: &mut Map<String, Value>, name: &str, value: &Value) {
    if let Value::String(more) = value {
        match target.get_mut(name) {
            Some(Value::String(text)) => text.push_str(more),
            _ => {
                target.insert(name.into(), value.clone());
            }
        }
    }
}

/// The message, finish reason and usage that a client makes of a stream.
fn reassemble(stream: &str) -> (Value, Value, Value) {
    let mut message = Map::new();
    message.insert("role".into(), Value::Null);
    message.insert("content".into(), Value::Null);
    let mut calls: Vec<Map<String, Value>> = Vec::new();
    let (mut finish, mut usage, mut done) = (Value::Null, Value::Null, false);
    for (_, data) in events(stream) {
        assert!(!done, "an event after [DONE]");
        if data == "[DONE]" {
            done = true;
            continue;
        }
        let chunk: Value = serde_json::from_str(&data).unwrap();
        assert_eq!(chunk["object"], "chat.completion.chunk");
        if chunk["usage"].is_object() {
            usage = chunk["usage"].clone();
        }
        let Some(choice) = chunk["choices"].get(0) else {
            continue;
        };
        assert_eq!(finish, Value::Null, "a delta after the finish reason");
        finish = choice["finish_reason"].clone();
        let delta = &choice["delta"];
        if delta["role"].is_string() {
            message["role"] = delta["role"].clone();
        }
        append(&mut message, "content", &delta["content"]);
        append(
            &mut message,
            "reasoning_content",
            &delta["reasoning_content"],
        );
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = part["index"].as_u64().expect("every part has an index") as usize;
            while calls.len() <= index {
                calls.push(Map::from_iter([("function".to_owned(), json!({}))]));
            }
            for name in ["id", "type"] {
                append(&mut calls[index], name, &part[name]);
            }
            let function = calls[index]["function"].as_object_mut().unwrap();
            for name in ["name", "arguments"] {
                append(function, name, &part["function"][name]);
            }
        }
    }
    assert!(done, "no [DONE]");
    if !calls.is_empty() {
        message.insert("tool_calls".into(), json!(calls));
    }
    (Value::Object(message), finish, usage)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stream_equals_body(reply in reply(), include_usage: bool, chars_max in 1..40_usize) {
        let body = reply_body(&reply);
        let frames = reply_events(&reply, include_usage, chars_max);
        for frame in &frames {
            prop_assert!(frame.starts_with("data: ") && frame.ends_with("\n\n"));
        }
        // Keep-alives may stand between any two frames.
        let (message, finish, usage) = reassemble(&frames.join(super::KEEP_ALIVE));
        let choice = &body["choices"][0];
        // Key order aside.
        prop_assert_eq!(&message, &choice["message"]);
        prop_assert_eq!(&finish, &choice["finish_reason"]);
        prop_assert_eq!(&usage, if include_usage { &body["usage"] } else { &Value::Null });
    }
}
