//! A request of any dialect, read.

use std::collections::BTreeMap;

use record::{Conversation, Message, Role};
use serde_json::{Value, json};

use crate::SamplingWishes;

/// One request, read.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Request {
    /// History and tools in neutral form.
    pub conversation: Conversation,
    /// Whether the client wants an event stream.
    pub stream: bool,
    /// The model's name, to be given back; empty when absent.
    pub model: String,
    /// Sampling settings, as far as the client named them.
    pub sampling: SamplingWishes,
    /// What the reply's shape depends on.
    pub form: Form,
    /// The reply that this request continues without sending its history (Responses only).
    /// Whoever serves the request puts that history before [`Request::conversation`].
    pub previous: Option<String>,
    /// Whether the first message are instructions that hold for this request only (Responses):
    /// a request that continues it brings its own.
    pub instructed: bool,
}

/// What a reply's shape depends on, beside the reply. Every attempt of a call has its own.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Form {
    /// Chat: whether the stream is to end with a usage chunk.
    pub include_usage: bool,
    /// Gemini: whether a stream is a JSON list in place of server-sent events.
    pub json_list: bool,
    /// Responses: tools that are no plain functions on the wire, by the name that the model
    /// knows them under.
    pub tools: BTreeMap<String, ToolForm>,
    /// Responses: the reply is a summary that takes the place of the conversation.
    pub compaction: Option<Compaction>,
}

/// How the summary of a conversation is given back.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Compaction {
    /// Whether it was asked for at a path of its own (`/responses/compact`), whose body has
    /// another kind; else by an item of an ordinary request.
    pub route: bool,
    /// Items of the request that stay beside the summary.
    pub kept: Vec<Value>,
}

/// How a tool of the Responses dialect looks on the wire when it is no plain function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolForm {
    /// A custom tool: its input is free text. The model calls it with one argument, `input`.
    Custom,
    /// A function inside a namespace.
    Within {
        /// The namespace.
        namespace: String,
        /// The function's name inside it.
        name: String,
    },
}

/// What stands in the address instead of the body (Gemini, and one path of Responses).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Target {
    /// The model's name.
    pub model: String,
    /// Whether a stream is asked for.
    pub stream: bool,
    /// Whether that stream is to be a JSON list.
    pub json_list: bool,
    /// Responses: whether the conversation is to be compacted.
    pub compact: bool,
}

/// Appends a message, unless it is an assistant turn that says nothing: a failed call leaves
/// such a turn in the history of some clients.
pub(crate) fn push(messages: &mut Vec<Message>, message: Message) {
    let says_nothing = message.role == Role::Assistant
        && message.content.is_empty()
        && message.tool_calls.is_empty()
        && message.reasoning.is_none();
    if !says_nothing {
        messages.push(message);
    }
}

/// Arguments of a tool call as the wire has them, as text or object. What is no JSON object is
/// kept as the text that the model wrote.
pub(crate) fn arguments(value: Option<&Value>) -> Value {
    match value {
        None | Some(Value::Null) => json!({}),
        Some(Value::String(text)) if text.trim().is_empty() => json!({}),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::Object(object)) => Value::Object(object),
            _ => Value::String(text.clone()),
        },
        Some(other) => other.clone(),
    }
}

/// The argument under which dialects that only carry objects show arguments that are none.
const UNPARSED: &str = "unparsed_arguments";

/// Arguments as an object. Text that was no JSON becomes the one argument `unparsed_arguments`.
pub(crate) fn arguments_object(arguments: &Value) -> Value {
    match arguments {
        Value::Object(_) => arguments.clone(),
        Value::Null => json!({}),
        other => json!({UNPARSED: other}),
    }
}

/// The other way round.
pub(crate) fn arguments_of_object(value: Option<&Value>) -> Value {
    match value {
        Some(Value::Object(object)) if object.len() == 1 => match object.get(UNPARSED) {
            Some(Value::String(text)) => Value::String(text.clone()),
            _ => Value::Object(object.clone()),
        },
        other => arguments(other),
    }
}

/// The schema of a tool that says nothing of its arguments.
pub(crate) fn no_parameters() -> Value {
    json!({"type": "object", "properties": {}})
}
