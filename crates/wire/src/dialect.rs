//! One function per job, for whoever serves all dialects.

use record::Dialect;
use serde_json::Value;

use crate::{
    ErrorKind, Form, Reply, Request, Target, WireError, chat, gemini, messages, responses,
};

/// Reads a request body. `target` is what stands in the address.
///
/// # Errors
/// As the dialect's own `parse`.
pub fn parse(dialect: Dialect, body: &Value, target: &Target) -> Result<Request, WireError> {
    match dialect {
        Dialect::Chat => chat::parse(body),
        Dialect::Responses if target.compact => responses::parse_compact(body),
        Dialect::Responses => responses::parse(body),
        Dialect::Messages => messages::parse(body),
        Dialect::Gemini => gemini::parse(body, target),
    }
}

/// The whole reply as one body.
#[must_use]
pub fn reply_body(dialect: Dialect, reply: &Reply, form: &Form) -> Value {
    match dialect {
        Dialect::Chat => chat::reply_body(reply),
        Dialect::Responses => responses::reply_body(reply, form),
        Dialect::Messages => messages::reply_body(reply),
        Dialect::Gemini => gemini::reply_body(reply),
    }
}

/// The whole reply as complete frames of an event stream, texts in deltas of at most
/// `chars_max` characters.
#[must_use]
pub fn reply_events(dialect: Dialect, reply: &Reply, form: &Form, chars_max: usize) -> Vec<String> {
    match dialect {
        Dialect::Chat => chat::reply_events(reply, form.include_usage, chars_max),
        Dialect::Responses => responses::reply_events(reply, form, chars_max),
        Dialect::Messages => messages::reply_events(reply, chars_max),
        Dialect::Gemini => gemini::reply_events(reply, form, chars_max),
    }
}

/// What keeps a silent stream alive; `None` where clients stumble over anything but data.
#[must_use]
pub fn keep_alive(dialect: Dialect) -> Option<&'static str> {
    match dialect {
        Dialect::Chat => Some(chat::KEEP_ALIVE),
        Dialect::Responses => Some(responses::KEEP_ALIVE),
        Dialect::Messages => Some(messages::KEEP_ALIVE),
        Dialect::Gemini => gemini::KEEP_ALIVE,
    }
}

/// Status and body of a refusal. With [`ErrorKind::retry_after_s`], also send that header.
#[must_use]
pub fn error_body(dialect: Dialect, kind: &ErrorKind, message: &str) -> (u16, Value) {
    match dialect {
        Dialect::Chat => chat::error_body(kind, message),
        Dialect::Responses => responses::error_body(kind, message),
        Dialect::Messages => messages::error_body(kind, message),
        Dialect::Gemini => gemini::error_body(kind, message),
    }
}

/// What ends a stream that has already begun.
#[must_use]
pub fn error_event(dialect: Dialect, kind: &ErrorKind, message: &str, form: &Form) -> String {
    match dialect {
        Dialect::Chat => chat::error_event(kind, message),
        Dialect::Responses => responses::error_event(kind, message),
        Dialect::Messages => messages::error_event(kind, message),
        Dialect::Gemini => gemini::error_event(kind, message, form),
    }
}

/// The sentence that says a prompt does not fit, as the dialect's own provider puts it: clients
/// look for these words before they compact.
#[must_use]
pub fn too_long(dialect: Dialect, prompt_tokens: u32, tokens_max: u32) -> String {
    match dialect {
        Dialect::Chat => format!(
            "This model's maximum context length is {tokens_max} tokens, but the prompt has {prompt_tokens} tokens: shorten the messages (prompt is too long)"
        ),
        Dialect::Responses => format!(
            "Your input exceeds the context window of this model: {prompt_tokens} tokens, but {tokens_max} fit. Please adjust your input and try again."
        ),
        Dialect::Messages => {
            format!("prompt is too long: {prompt_tokens} tokens > {tokens_max} maximum")
        }
        Dialect::Gemini => format!(
            "The input token count ({prompt_tokens}) exceeds the maximum number of tokens allowed ({tokens_max})."
        ),
    }
}

/// The answer to a request that only counts the prompt's tokens; `None` in dialects without one.
#[must_use]
pub fn count_body(dialect: Dialect, tokens: u32) -> Option<Value> {
    match dialect {
        Dialect::Chat => None,
        Dialect::Responses => Some(serde_json::json!({
            "object": "response.input_tokens", "input_tokens": tokens})),
        Dialect::Messages => Some(serde_json::json!({"input_tokens": tokens})),
        Dialect::Gemini => Some(serde_json::json!({"totalTokens": tokens})),
    }
}

/// The first letters of a reply's id, as the dialect's provider has them.
#[must_use]
pub fn reply_id_prefix(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Chat => "chatcmpl",
        Dialect::Responses => "resp_",
        Dialect::Messages => "msg_",
        Dialect::Gemini => "",
    }
}

/// The list of models, or one of them, as the dialect's provider shows it.
#[must_use]
pub fn model_list(dialect: Dialect, names: &[&str]) -> Value {
    let models: Vec<Value> = names.iter().map(|name| model(dialect, name)).collect();
    match dialect {
        Dialect::Chat | Dialect::Responses => {
            serde_json::json!({"object": "list", "data": models})
        }
        Dialect::Messages => serde_json::json!({
            "data": models,
            "has_more": false,
            "first_id": names.first(),
            "last_id": names.last(),
        }),
        Dialect::Gemini => serde_json::json!({"models": models}),
    }
}

/// One model, as the dialect's provider shows it.
#[must_use]
pub fn model(dialect: Dialect, name: &str) -> Value {
    match dialect {
        Dialect::Chat | Dialect::Responses => {
            serde_json::json!({"id": name, "object": "model", "created": 0, "owned_by": "espalier"})
        }
        Dialect::Messages => serde_json::json!({
            "type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}),
        Dialect::Gemini => serde_json::json!({
            "name": format!("models/{name}"),
            "displayName": name,
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }),
    }
}
