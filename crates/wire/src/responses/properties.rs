//! I5 and the round trip of Responses. Reader and writer here are written as a client's are.

use proptest::prelude::*;
use record::{Conversation, Part, Role};
use serde_json::{Value, json};

use super::{KEEP_ALIVE, parse, reply_body, reply_events};
use crate::{
    Form, ToolForm, opaque,
    sse::tests::events,
    testing::{conversation, one_part, reply},
};

fn append(target: &mut Value, field: &str, more: &Value) {
    let before = target[field].as_str().unwrap_or_default().to_owned();
    target[field] = json!(before + more.as_str().unwrap());
}

/// The response that a client makes of a stream: items from deltas alone, checked against the
/// events that repeat what is done.
fn reassemble(stream: &str) -> Value {
    let mut response = Value::Null;
    let mut items: Vec<Value> = Vec::new();
    let mut ended = false;
    for (number, (name, data)) in events(stream).into_iter().enumerate() {
        let event: Value = serde_json::from_str(&data).unwrap();
        let name = name.unwrap();
        assert_eq!(event["type"], name.as_str());
        assert_eq!(event["sequence_number"], number);
        assert!(!ended, "an event behind the end");
        let at = event["output_index"].as_u64().map(|index| index as usize);
        if let (Some(at), Some(id)) = (at, event.get("item_id")) {
            assert_eq!((at + 1, &items[at]["id"]), (items.len(), id));
        }
        match name.as_str() {
            "response.created" | "response.in_progress" => response = event["response"].clone(),
            "response.output_item.added" => {
                assert_eq!(at, Some(items.len()));
                items.push(event["item"].clone());
            }
            "response.content_part.added" => {
                items[at.unwrap()]["content"] = json!([event["part"]]);
            }
            "response.reasoning_summary_part.added" => {
                items[at.unwrap()]["summary"] = json!([event["part"]]);
            }
            "response.output_text.delta" => {
                append(
                    &mut items[at.unwrap()]["content"][0],
                    "text",
                    &event["delta"],
                );
            }
            "response.reasoning_summary_text.delta" => {
                append(
                    &mut items[at.unwrap()]["summary"][0],
                    "text",
                    &event["delta"],
                );
            }
            "response.function_call_arguments.delta" => {
                append(&mut items[at.unwrap()], "arguments", &event["delta"]);
            }
            "response.custom_tool_call_input.delta" => {
                append(&mut items[at.unwrap()], "input", &event["delta"]);
            }
            "response.output_text.done" => {
                assert_eq!(items[at.unwrap()]["content"][0]["text"], event["text"]);
            }
            "response.reasoning_summary_text.done" => {
                assert_eq!(items[at.unwrap()]["summary"][0]["text"], event["text"]);
            }
            "response.content_part.done" => {
                assert_eq!(items[at.unwrap()]["content"][0], event["part"]);
            }
            "response.reasoning_summary_part.done" => {
                assert_eq!(items[at.unwrap()]["summary"][0], event["part"]);
            }
            "response.function_call_arguments.done" => {
                assert_eq!(items[at.unwrap()]["arguments"], event["arguments"]);
            }
            "response.custom_tool_call_input.done" => {
                assert_eq!(items[at.unwrap()]["input"], event["input"]);
            }
            "response.output_item.done" => {
                let item = &mut items[at.unwrap()];
                if item.get("status").is_some() {
                    item["status"] = json!("completed");
                }
                assert_eq!(*item, event["item"]);
            }
            "response.completed" | "response.incomplete" => {
                assert_eq!(event["response"]["output"], json!(items));
                response = event["response"].clone();
                ended = true;
            }
            other => panic!("{other}"),
        }
    }
    assert!(ended);
    response
}

fn content(parts: &[Part], text: &str) -> Vec<Value> {
    parts
        .iter()
        .map(|part| match part {
            Part::Text { text: said } => json!({"type": text, "text": said}),
            Part::Image { url } => json!({"type": "input_image", "image_url": url}),
        })
        .collect()
}

fn write(conversation: &Conversation) -> Value {
    let mut items = Vec::new();
    for message in &conversation.messages {
        if let Some(reasoning) = &message.reasoning {
            items.push(json!({"type": "reasoning", "summary": [],
                "encrypted_content": opaque::seal(reasoning)}));
        }
        let parts = &message.content;
        match message.role {
            Role::System => items.push(json!({"type": "message", "role": "developer",
                "content": content(parts, "input_text")})),
            Role::User => {
                items.push(json!({"role": "user", "content": content(parts, "input_text")}));
            }
            Role::Assistant if parts.is_empty() => {}
            Role::Assistant => items.push(json!({"type": "message", "role": "assistant",
                "content": content(parts, "output_text")})),
            Role::Tool => items.push(json!({"type": "function_call_output",
                "call_id": message.tool_call_id, "output": message.text_content()})),
        }
        for call in &message.tool_calls {
            let arguments = match &call.arguments {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            items.push(
                json!({"type": "function_call", "call_id": call.id, "name": call.name,
                "arguments": arguments}),
            );
        }
    }
    let tools: Vec<Value> = conversation
        .tools
        .iter()
        .map(|tool| {
            json!({"type": "function", "name": tool.name, "description": tool.description,
            "parameters": tool.parameters, "strict": false})
        })
        .collect();
    json!({"input": items, "tools": tools})
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stream_equals_body(reply in reply(), chars_max in 1..40_usize, custom: bool, within: bool) {
        let mut form = Form::default();
        let mut calls = reply.message.tool_calls.iter();
        for (wanted, tool) in [(custom, ToolForm::Custom), (within, ToolForm::Within {
            namespace: "n".into(), name: "f".into() })] {
            if let Some(call) = calls.next() && wanted {
                form.tools.insert(call.name.clone(), tool);
            }
        }
        let frames = reply_events(&reply, &form, chars_max);
        for frame in &frames {
            prop_assert!(frame.starts_with("event: response.") && frame.ends_with("\n\n"));
        }
        let stream = KEEP_ALIVE.to_owned() + &frames.join(KEEP_ALIVE);
        prop_assert_eq!(reassemble(&stream), reply_body(&reply, &form));
    }

    #[test]
    fn a_conversation_comes_back_as_it_was(conversation in conversation()) {
        prop_assert_eq!(parse(&write(&conversation)).unwrap().conversation, conversation);
    }

    #[test]
    fn the_message_of_a_reply_comes_back_as_it_was(reply in reply()) {
        let body = reply_body(&reply, &Form::default());
        let mut input = vec![json!({"role": "user", "content": "a"})];
        input.extend(body["output"].as_array().unwrap().iter().cloned());
        let messages = parse(&json!({"input": input})).unwrap().conversation.messages;
        let said = one_part(&reply.message);
        let nothing = said.content.is_empty() && said.tool_calls.is_empty() && said.reasoning.is_none();
        prop_assert_eq!(messages.get(1), Some(&said).filter(|_| !nothing));
    }
}
