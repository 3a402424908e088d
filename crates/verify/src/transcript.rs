//! The conversation of a rollout, rebuilt from its captured calls, in the shape that graders of
//! the field expect: the messages of an OpenClaw session. It works for every harness, because it
//! reads what crossed the boundary and nothing else.
//!
//! Rule: calls are read in order of arrival. A call whose history continues a conversation that
//! is known adds what is new of it, then its reply; any other call begins a conversation, of which
//! everything past the longest common beginning with a known one is added. So nothing is told
//! twice, and what a compaction or a sub-agent said comes where it happened. System prompts are
//! left out, as in the sessions.

use std::collections::HashMap;

use record::{Call, Message, Role};
use serde_json::{Value, json};

/// What was said, in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Transcript {
    /// `{"type": "message", "message": {"role", "content": [...]}}`, roles `user`, `assistant`,
    /// `toolResult`; content parts `text` and `toolCall`.
    pub events: Vec<Value>,
    /// The text of the last reply that called no tool; of the last reply with text when every
    /// one called a tool; empty without.
    pub last_words: String,
}

/// Whether two messages say the same. Ids and reasoning are rewritten by harnesses on the way.
fn same(one: &Message, other: &Message) -> bool {
    let calls = |message: &Message| -> Vec<(String, Value)> {
        message
            .tool_calls
            .iter()
            .map(|call| (call.name.clone(), call.arguments.clone()))
            .collect()
    };
    one.role == other.role
        && one.text_content().trim() == other.text_content().trim()
        && calls(one) == calls(other)
}

fn common(one: &[Message], other: &[Message]) -> usize {
    one.iter()
        .zip(other)
        .take_while(|(one, other)| same(one, other))
        .count()
}

impl Transcript {
    /// From the calls of one rollout, in order of arrival. Calls that the harness never got a
    /// reply to are left out.
    #[must_use]
    pub fn of(calls: &[Call]) -> Self {
        let mut threads: Vec<Vec<Message>> = Vec::new();
        let mut whole = Self::default();
        let mut with_text = String::new();
        let mut names: HashMap<String, String> = HashMap::new();
        for call in calls.iter().filter(|call| call.delivered()) {
            let Some(reply) = &call.reply else { continue };
            let history = &call.conversation.messages;
            let known = threads
                .iter()
                .map(|thread| common(thread, history))
                .max()
                .unwrap_or(0);
            let continued = threads
                .iter()
                .position(|thread| thread.len() == known && known > 0);
            for message in history[known..].iter().chain([reply]) {
                for call in &message.tool_calls {
                    names.insert(call.id.clone(), call.name.clone());
                }
                whole.events.extend(event(message, &names));
            }
            let text = reply.text_content();
            if !text.trim().is_empty() {
                if reply.tool_calls.is_empty() {
                    whole.last_words.clone_from(&text);
                }
                with_text = text;
            }
            let mut thread = history.clone();
            thread.push(reply.clone());
            match continued {
                Some(at) => threads[at] = thread,
                None => threads.push(thread),
            }
        }
        if whole.last_words.is_empty() {
            whole.last_words = with_text;
        }
        whole
    }

    /// Everything that the model said, a message a line.
    #[must_use]
    pub fn words(&self) -> String {
        let said = self.events.iter().filter(|event| {
            event.pointer("/message/role").and_then(Value::as_str) == Some("assistant")
        });
        let parts = said.filter_map(|event| event.pointer("/message/content")?.as_array());
        let texts = parts
            .flatten()
            .filter_map(|part| part.get("text").and_then(Value::as_str));
        texts.collect::<Vec<_>>().join("\n")
    }

    /// As JSON for `transcript.json`.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        Value::Array(self.events.clone()).to_string().into_bytes()
    }
}

fn event(message: &Message, names: &HashMap<String, String>) -> Option<Value> {
    let role = match message.role {
        Role::System => return None,
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "toolResult",
    };
    let mut content = Vec::new();
    let text = message.text_content();
    if !text.is_empty() {
        content.push(json!({"type": "text", "text": text}));
    }
    for call in &message.tool_calls {
        // Some graders look for `arguments`, some for `params`.
        content.push(json!({
            "type": "toolCall", "id": call.id, "name": call.name,
            "arguments": call.arguments, "params": call.arguments,
        }));
    }
    let mut inner = json!({"role": role, "content": content});
    if let Some(id) = &message.tool_call_id {
        inner["toolCallId"] = id.clone().into();
        if let Some(name) = names.get(id) {
            inner["toolName"] = name.clone().into();
        }
    }
    Some(json!({"type": "message", "message": inner}))
}
