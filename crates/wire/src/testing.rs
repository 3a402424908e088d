//! Random replies and conversations for the property tests of all dialects.

use proptest::prelude::*;
use record::{Conversation, FinishReason, Message, Part, Role, ToolCall, ToolSpec};
use serde_json::{Value, json};

use crate::{Reply, Usage};

fn object() -> impl Strategy<Value = Value> {
    let value = prop_oneof![
        any::<String>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        Just(json!({"b": [1, null, true], "a": {}})),
    ];
    prop::collection::vec(("\\PC{0,6}", value), 0..4)
        .prop_map(|entries| Value::Object(entries.into_iter().collect()))
}

/// A call whose arguments may be text that is no JSON object.
pub(crate) fn call() -> impl Strategy<Value = ToolCall> {
    let arguments = prop_oneof![
        3 => object(),
        1 => "[a-z{\\[ ]{0,8}x".prop_map(Value::from),
    ];
    ("[a-z0-9]{1,12}", "[a-z_]{1,12}", arguments).prop_map(|(id, name, arguments)| ToolCall {
        id,
        name,
        arguments,
    })
}

fn said() -> impl Strategy<Value = Message> {
    (
        any::<String>(),
        prop::option::of("\\PC{1,20}"),
        prop::collection::vec(call(), 0..5),
    )
        .prop_map(|(text, reasoning, tool_calls)| {
            let mut message = Message::text(Role::Assistant, text);
            message.reasoning = reasoning;
            message.tool_calls = tool_calls;
            message
        })
}

pub(crate) fn reply() -> impl Strategy<Value = Reply> {
    let finish = prop_oneof![
        Just(FinishReason::Stop),
        Just(FinishReason::Length),
        Just(FinishReason::Context)
    ];
    (said(), finish, any::<(u32, u32, u32)>()).prop_map(|(message, finish, usage)| Reply {
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
    })
}

fn parts() -> impl Strategy<Value = Vec<Part>> {
    let part = prop_oneof![
        4 => "(?s).{1,12}".prop_map(|text| Part::Text { text }),
        1 => "[a-zA-Z0-9+/]{4,8}".prop_map(|data| Part::Image {
            url: format!("data:image/png;base64,{data}")
        }),
    ];
    prop::collection::vec(part, 1..4)
}

/// Turns as harnesses have them: a user's, an assistant's that says something, and results for
/// its calls. Neither an empty turn nor two of one kind that a dialect would join.
pub(crate) fn conversation() -> impl Strategy<Value = Conversation> {
    let texts = prop::collection::vec("(?s).{1,12}".prop_map(|text| Part::Text { text }), 1..3);
    let round = (parts(), said(), prop::collection::vec("(?s).{0,12}", 5));
    let tool =
        ("[a-z_]{1,12}", "\\PC{0,12}", any::<bool>()).prop_map(|(name, description, schema)| {
            let parameters = if schema {
                json!({"type": "object", "required": ["b"], "properties": {
                "b": {"type": "string"}, "a": {"type": ["integer", "null"]}}})
            } else {
                json!({"type": "object", "properties": {}})
            };
            ToolSpec {
                name,
                description,
                parameters,
            }
        });
    (
        prop::option::of(texts),
        prop::collection::vec(round, 1..4),
        prop::collection::vec(tool, 0..3),
        parts(),
    )
        .prop_map(|(system, rounds, tools, last)| {
            let plain = |role, content| Message {
                content,
                ..Message::text(role, "")
            };
            let mut messages = Vec::new();
            messages.extend(system.map(|content| plain(Role::System, content)));
            for (user, said, results) in rounds {
                messages.push(plain(Role::User, user));
                if said.content.is_empty() && said.tool_calls.is_empty() {
                    continue;
                }
                let calls = said.tool_calls.clone();
                messages.push(said);
                for (call, text) in calls.iter().zip(results) {
                    let mut result = Message::text(Role::Tool, text);
                    result.tool_call_id = Some(call.id.clone());
                    messages.push(result);
                }
            }
            messages.push(plain(Role::User, last));
            Conversation { messages, tools }
        })
}

/// The message of a reply, as it is to come back: text in one part.
pub(crate) fn one_part(message: &Message) -> Message {
    Message {
        content: Message::text(Role::Assistant, message.text_content()).content,
        ..message.clone()
    }
}
