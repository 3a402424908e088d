//! A conversation as the body of a Chat Completions request: what a text-only engine is sent.

use record::{Conversation, Message, Part, Role};
use serde_json::{Map, Value, json};

use super::response::call_value;

fn content(message: &Message) -> Value {
    match message.content.as_slice() {
        [] if message.role == Role::Assistant => Value::Null,
        [] => json!(""),
        [Part::Text { text }] => json!(text),
        parts => parts
            .iter()
            .map(|part| match part {
                Part::Text { text } => json!({"type": "text", "text": text}),
                Part::Image { url } => json!({"type": "image_url", "image_url": {"url": url}}),
            })
            .collect(),
    }
}

fn message_value(message: &Message) -> Value {
    let mut out = Map::new();
    out.insert("role".into(), json!(message.role));
    out.insert("content".into(), content(message));
    if let Some(reasoning) = &message.reasoning {
        out.insert("reasoning_content".into(), json!(reasoning));
    }
    if !message.tool_calls.is_empty() {
        let calls: Vec<_> = message.tool_calls.iter().map(call_value).collect();
        out.insert("tool_calls".into(), json!(calls));
    }
    if let Some(id) = &message.tool_call_id {
        out.insert("tool_call_id".into(), json!(id));
    }
    Value::Object(out)
}

/// The fields `messages` and, when there are tools, `tools`. [`super::parse`] reads them back
/// into the same conversation.
#[must_use]
pub fn request_body(conversation: &Conversation) -> Map<String, Value> {
    let messages: Vec<_> = conversation.messages.iter().map(message_value).collect();
    let mut body = Map::new();
    body.insert("messages".into(), json!(messages));
    if !conversation.tools.is_empty() {
        let tools: Vec<_> = conversation
            .tools
            .iter()
            .map(|tool| {
                json!({"type": "function", "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                }})
            })
            .collect();
        body.insert("tools".into(), json!(tools));
    }
    body
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::{
        chat::{parse, reply_body},
        testing::{conversation, one_part, reply},
    };

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_conversation_comes_back_as_it_was(conversation in conversation()) {
            let body = super::request_body(&conversation).into();
            prop_assert_eq!(parse(&body).unwrap().conversation, conversation);
        }

        #[test]
        fn the_message_of_a_reply_comes_back_as_it_was(reply in reply()) {
            let echo = &reply_body(&reply)["choices"][0]["message"];
            let body = serde_json::json!({"messages": [{"role": "user", "content": "a"}, echo]});
            let messages = parse(&body).unwrap().conversation.messages;
            let said = one_part(&reply.message);
            let nothing = said.content.is_empty() && said.tool_calls.is_empty() && said.reasoning.is_none();
            prop_assert_eq!(messages.get(1), Some(&said).filter(|_| !nothing));
        }
    }
}
