//! I5 and the round trip of Gemini. Reader and writer here are written as a client's are.

use proptest::prelude::*;
use record::{Conversation, Message, Part, Role};
use serde_json::{Value, json};

use super::{parse, reply_body, reply_events};
use crate::{
    Form, Target,
    request::arguments_object,
    sse::tests::events,
    testing::{conversation, one_part, reply},
};

/// The body that a client makes of chunks: neighbouring texts of one kind are one part.
fn join(chunks: &[Value]) -> Value {
    let mut body = chunks.last().unwrap().clone();
    let mut parts: Vec<Value> = Vec::new();
    for (index, chunk) in chunks.iter().enumerate() {
        let candidate = &chunk["candidates"][0];
        let last = index + 1 == chunks.len();
        assert_eq!(candidate.get("finishReason").is_some(), last);
        for part in candidate["content"]["parts"].as_array().unwrap() {
            match parts.last_mut() {
                Some(before)
                    if before["text"].is_string()
                        && part["text"].is_string()
                        && before["thought"] == part["thought"] =>
                {
                    let text = before["text"].as_str().unwrap().to_owned();
                    before["text"] = json!(text + part["text"].as_str().unwrap());
                }
                _ => parts.push(part.clone()),
            }
        }
    }
    body["candidates"][0]["content"]["parts"] = json!(parts);
    body
}

fn parts(message: &Message) -> Vec<Value> {
    let mut out = Vec::new();
    if let Some(reasoning) = &message.reasoning {
        out.push(json!({"text": reasoning, "thought": true}));
    }
    out.extend(message.content.iter().map(|part| match part {
        Part::Text { text } => json!({"text": text}),
        Part::Image { url } => {
            let (kind, data) = url
                .strip_prefix("data:")
                .and_then(|url| url.split_once(";base64,"))
                .unwrap();
            json!({"inlineData": {"mimeType": kind, "data": data}})
        }
    }));
    for call in &message.tool_calls {
        out.push(json!({"functionCall": {"id": call.id, "name": call.name,
            "args": arguments_object(&call.arguments)}}));
    }
    out
}

/// `joined`: responses of functions and what the user says behind them are one content.
fn write(conversation: &Conversation, joined: bool) -> Value {
    let mut system = Vec::new();
    let mut contents: Vec<(&str, Vec<Value>, bool)> = Vec::new();
    for message in &conversation.messages {
        let parts = parts(message);
        match message.role {
            Role::System => system = parts,
            Role::User => match contents.last_mut() {
                Some((_, results, open @ true)) if joined => {
                    results.extend(parts);
                    *open = false;
                }
                _ => contents.push(("user", parts, false)),
            },
            Role::Assistant => contents.push(("model", parts, false)),
            Role::Tool => {
                let result = json!({"functionResponse": {"id": message.tool_call_id, "name": "f",
                    "response": {"output": message.text_content()}}});
                match contents.last_mut() {
                    Some((_, results, true)) => results.push(result),
                    _ => contents.push(("user", vec![result], true)),
                }
            }
        }
    }
    let contents: Vec<Value> = contents
        .into_iter()
        .map(|(role, parts, _)| json!({"role": role, "parts": parts}))
        .collect();
    let functions: Vec<Value> = conversation
        .tools
        .iter()
        .map(|tool| {
            json!({"name": tool.name, "description": tool.description,
            "parametersJsonSchema": tool.parameters})
        })
        .collect();
    json!({"systemInstruction": {"role": "user", "parts": system}, "contents": contents,
        "tools": [{"functionDeclarations": functions}]})
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stream_equals_body(reply in reply(), chars_max in 1..40_usize, json_list: bool) {
        let form = Form { json_list, ..Form::default() };
        let stream = reply_events(&reply, &form, chars_max).concat();
        let chunks: Vec<Value> = if json_list {
            serde_json::from_str(&stream).unwrap()
        } else {
            events(&stream).iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect()
        };
        prop_assert_eq!(join(&chunks), reply_body(&reply));
    }

    #[test]
    fn a_conversation_comes_back_as_it_was(conversation in conversation(), joined: bool) {
        let read = parse(&write(&conversation, joined), &Target::default()).unwrap();
        prop_assert_eq!(read.conversation, conversation);
    }

    #[test]
    fn the_message_of_a_reply_comes_back_as_it_was(reply in reply()) {
        let content = &reply_body(&reply)["candidates"][0]["content"];
        let body = json!({"contents": [{"role": "user", "parts": [{"text": "a"}]}, content]});
        let messages = parse(&body, &Target::default()).unwrap().conversation.messages;
        let said = one_part(&reply.message);
        let nothing = said.content.is_empty() && said.tool_calls.is_empty() && said.reasoning.is_none();
        prop_assert_eq!(messages.get(1), Some(&said).filter(|_| !nothing));
    }
}
