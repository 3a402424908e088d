//! I5: the event stream of any reply reassembles to its body. The reader here is written as the
//! clients' are: it appends deltas by index and knows nothing of the writer.

use proptest::prelude::*;
use record::{FinishReason, Message, Role, ToolCall};
use serde_json::{Map, Value, json};

use super::{reply_body, reply_events};
use crate::{Reply, Usage};

/// The data of each event of a stream, by the rules of server-sent events.
fn events(stream: &str) -> Vec<String> {
    let mut events = Vec::new();
    let mut data: Option<String> = None;
    for line in stream.split('\n') {
        if line.is_empty() {
            events.extend(data.take());
        } else if let Some(text) = line.strip_prefix("data:") {
            let text = text.strip_prefix(' ').unwrap_or(text);
            match &mut data {
                Some(data) => data.extend(["\n", text]),
                None => data = Some(text.to_owned()),
            }
        } else {
            assert!(
                line.starts_with(':'),
                "not a line of an event stream: {line:?}"
            );
        }
    }
    assert_eq!(data, None, "the last event is not closed");
    events
}

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
    for data in events(stream) {
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

fn call() -> impl Strategy<Value = ToolCall> {
    let arguments = prop_oneof![
        prop::collection::vec(("\\PC{0,6}", any::<String>().prop_map(Value::from)), 0..4)
            .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        any::<String>().prop_map(Value::from),
    ];
    ("[a-z0-9]{1,12}", "[a-z_]{1,12}", arguments).prop_map(|(id, name, arguments)| ToolCall {
        id,
        name,
        arguments,
    })
}

fn reply() -> impl Strategy<Value = Reply> {
    let finish = prop_oneof![
        Just(FinishReason::Stop),
        Just(FinishReason::Length),
        Just(FinishReason::Context)
    ];
    (
        any::<String>(),
        prop::option::of("\\PC{1,20}"),
        prop::collection::vec(call(), 0..5),
        finish,
        any::<(u32, u32, u32)>(),
    )
        .prop_map(|(text, reasoning, tool_calls, finish, usage)| {
            let mut message = Message::text(Role::Assistant, text);
            message.reasoning = reasoning;
            message.tool_calls = tool_calls;
            Reply {
                id: "reply1".into(),
                created_s: 1,
                model: "m\"\n".into(),
                message,
                finish,
                usage: Usage {
                    prompt: usage.0,
                    completion: usage.1,
                    cached: usage.2,
                },
            }
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stream_equals_body(reply in reply(), include_usage: bool) {
        let body = reply_body(&reply);
        let frames = reply_events(&reply, include_usage);
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
