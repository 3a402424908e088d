//! I5 and the round trip of Messages. Reader and writer here are written as a client's are.

use proptest::prelude::*;
use record::{Conversation, Message, Part, Role};
use serde_json::{Value, json};

use super::{KEEP_ALIVE, parse, reply_body, reply_events};
use crate::{
    request::arguments_object,
    sse::tests::events,
    testing::{conversation, one_part, reply},
};

/// The message that a client makes of a stream.
fn reassemble(stream: &str) -> Value {
    let mut message = Value::Null;
    let mut json_text = String::new();
    let (mut open, mut ended) = (None, false);
    for (name, data) in events(stream) {
        let event: Value = serde_json::from_str(&data).unwrap();
        assert_eq!(event["type"].as_str(), name.as_deref());
        assert!(!ended, "an event behind the end");
        let index = event["index"].as_u64().map(|index| index as usize);
        let blocks = message["content"].as_array().map_or(0, Vec::len);
        match name.as_deref().unwrap() {
            "ping" => {}
            "message_start" => {
                assert!(message.is_null());
                message = event["message"].clone();
                assert_eq!(message["content"], json!([]));
            }
            "content_block_start" => {
                assert_eq!((open, index), (None, Some(blocks)));
                open = index;
                json_text.clear();
                let content = message["content"].as_array_mut().unwrap();
                content.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                assert_eq!(open, index);
                let block = &mut message["content"][index.unwrap()];
                let delta = event["delta"].as_object().unwrap();
                for (field, text) in delta.iter().filter(|(field, _)| *field != "type") {
                    let text = text.as_str().unwrap();
                    match field.as_str() {
                        "partial_json" => json_text.push_str(text),
                        field => {
                            let before = block[field].as_str().unwrap().to_owned();
                            block[field] = json!(before + text);
                        }
                    }
                }
            }
            "content_block_stop" => {
                assert_eq!(open.take(), index);
                if !json_text.is_empty() {
                    message["content"][index.unwrap()]["input"] =
                        serde_json::from_str(&json_text).unwrap();
                }
            }
            "message_delta" => {
                for name in ["stop_reason", "stop_sequence"] {
                    message[name] = event["delta"][name].clone();
                }
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => ended = true,
            other => panic!("{other}"),
        }
    }
    assert!(ended && open.is_none());
    message
}

fn block(part: &Part) -> Value {
    match part {
        Part::Text { text } => json!({"type": "text", "text": text}),
        Part::Image { url } => {
            let (kind, data) = url
                .strip_prefix("data:")
                .and_then(|url| url.split_once(";base64,"))
                .unwrap();
            json!({"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}})
        }
    }
}

fn blocks(message: &Message) -> Vec<Value> {
    let mut out = Vec::new();
    if let Some(reasoning) = &message.reasoning {
        out.push(json!({"type": "thinking", "thinking": reasoning, "signature": ""}));
    }
    out.extend(message.content.iter().map(block));
    for call in &message.tool_calls {
        out.push(json!({"type": "tool_use", "id": call.id, "name": call.name,
            "input": arguments_object(&call.arguments)}));
    }
    out
}

/// `joined`: results of tools and what the user says behind them are one message.
fn write(conversation: &Conversation, joined: bool) -> Value {
    let mut system = Vec::new();
    let mut list: Vec<(&str, Vec<Value>, bool)> = Vec::new();
    for message in &conversation.messages {
        let blocks = blocks(message);
        match message.role {
            Role::System => system = blocks,
            Role::User => match list.last_mut() {
                Some((_, results, open @ true)) if joined => {
                    results.extend(blocks);
                    *open = false;
                }
                _ => list.push(("user", blocks, false)),
            },
            Role::Assistant => list.push(("assistant", blocks, false)),
            Role::Tool => {
                let result = json!({"type": "tool_result", "tool_use_id": message.tool_call_id,
                    "content": message.text_content()});
                match list.last_mut() {
                    Some((_, results, true)) => results.push(result),
                    _ => list.push(("user", vec![result], true)),
                }
            }
        }
    }
    let messages: Vec<Value> = list
        .into_iter()
        .map(|(role, content, _)| json!({"role": role, "content": content}))
        .collect();
    let tools: Vec<Value> = conversation
        .tools
        .iter()
        .map(|tool| {
            json!({"name": tool.name, "description": tool.description,
            "input_schema": tool.parameters})
        })
        .collect();
    json!({"system": system, "messages": messages, "tools": tools, "max_tokens": 9})
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stream_equals_body(reply in reply(), chars_max in 1..40_usize) {
        let frames = reply_events(&reply, chars_max);
        for frame in &frames {
            prop_assert!(frame.starts_with("event: ") && frame.ends_with("\n\n"));
        }
        // Pings may stand between any two events, and before the first.
        let stream = KEEP_ALIVE.to_owned() + &frames.join(KEEP_ALIVE);
        prop_assert_eq!(reassemble(&stream), reply_body(&reply));
    }

    #[test]
    fn a_conversation_comes_back_as_it_was(conversation in conversation(), joined: bool) {
        let body = write(&conversation, joined);
        prop_assert_eq!(parse(&body).unwrap().conversation, conversation);
    }

    #[test]
    fn the_message_of_a_reply_comes_back_as_it_was(reply in reply()) {
        let content = &reply_body(&reply)["content"];
        let body = json!({"messages": [{"role": "user", "content": "a"},
            {"role": "assistant", "content": content}]});
        let messages = parse(&body).unwrap().conversation.messages;
        let nothing = content.as_array().unwrap().is_empty();
        let said = one_part(&reply.message);
        prop_assert_eq!(messages.get(1), Some(&said).filter(|_| !nothing));
    }
}
