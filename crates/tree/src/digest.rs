//! What two conversations have in common, whatever the dialect and the client did to ids, key
//! order and white space.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use record::{Call, Message, Part, Role};
use serde_json::Value;

/// A conversation reduced to comparable keys.
#[derive(Debug)]
pub(crate) struct Digest {
    /// Leading system messages.
    pub(crate) system: u64,
    /// Tools, in order.
    pub(crate) tools: u64,
    pub(crate) tools_count: usize,
    /// Messages after the leading system messages.
    pub(crate) messages: Vec<u64>,
    pub(crate) roles: Vec<Role>,
    /// Our reply.
    pub(crate) reply: Option<u64>,
}

fn hash_value(value: &Value, hasher: &mut DefaultHasher) {
    match value {
        Value::Object(map) => {
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort();
            keys.len().hash(hasher);
            for key in keys {
                key.hash(hasher);
                hash_value(&map[key], hasher);
            }
        }
        Value::Array(items) => {
            items.len().hash(hasher);
            for item in items {
                hash_value(item, hasher);
            }
        }
        // Arguments that travel as text are the same arguments.
        Value::String(text) => match serde_json::from_str::<Value>(text) {
            Ok(inner @ (Value::Object(_) | Value::Array(_))) => hash_value(&inner, hasher),
            _ => text.hash(hasher),
        },
        Value::Number(number) => number.to_string().hash(hasher),
        Value::Bool(flag) => flag.hash(hasher),
        Value::Null => 0_u8.hash(hasher),
    }
}

/// Role, text and tool calls. Ids are rewritten by clients and reasoning is echoed by some only,
/// so neither takes part.
pub(crate) fn message_key(message: &Message) -> u64 {
    let mut hasher = DefaultHasher::new();
    message.role.hash(&mut hasher);
    message.text_content().trim().hash(&mut hasher);
    for part in &message.content {
        if let Part::Image { url } = part {
            url.hash(&mut hasher);
        }
    }
    for call in &message.tool_calls {
        call.name.hash(&mut hasher);
        hash_value(&call.arguments, &mut hasher);
    }
    hasher.finish()
}

impl Digest {
    pub(crate) fn of(call: &Call) -> Self {
        let messages = &call.conversation.messages;
        let head = messages
            .iter()
            .take_while(|message| message.role == Role::System)
            .count();
        let mut system = DefaultHasher::new();
        for message in &messages[..head] {
            message_key(message).hash(&mut system);
        }
        let mut tools = DefaultHasher::new();
        for tool in &call.conversation.tools {
            tool.name.hash(&mut tools);
            tool.description.hash(&mut tools);
            hash_value(&tool.parameters, &mut tools);
        }
        Self {
            system: system.finish(),
            tools: tools.finish(),
            tools_count: call.conversation.tools.len(),
            messages: messages[head..].iter().map(message_key).collect(),
            roles: messages[head..]
                .iter()
                .map(|message| message.role)
                .collect(),
            reply: call.reply.as_ref().map(message_key),
        }
    }

    /// The first message after the system messages.
    pub(crate) fn first(&self) -> Option<u64> {
        self.messages.first().copied()
    }
}
