//! Error bodies of Chat Completions.

use serde_json::{Value, json};

use crate::ErrorKind;

/// Status and body of a refusal. For [`ErrorKind::RateLimit`] also send the header
/// `retry-after` with [`ErrorKind::retry_after_s`].
#[must_use]
pub fn error_body(kind: &ErrorKind, message: &str) -> (u16, Value) {
    let (class, code) = match kind {
        ErrorKind::InvalidRequest => ("invalid_request_error", Value::Null),
        ErrorKind::Unauthorized => ("invalid_request_error", json!("invalid_api_key")),
        ErrorKind::NotFound => ("invalid_request_error", json!("not_found")),
        ErrorKind::Ended => ("invalid_request_error", json!("rollout_ended")),
        ErrorKind::TooLarge => ("invalid_request_error", json!("request_too_large")),
        ErrorKind::TooLong => ("invalid_request_error", json!("context_length_exceeded")),
        ErrorKind::RateLimit { .. } => ("rate_limit_error", json!("rate_limit_exceeded")),
        ErrorKind::Engine => ("server_error", json!("engine_failed")),
        ErrorKind::Overloaded => ("server_error", json!("overloaded")),
    };
    let param = match kind {
        ErrorKind::TooLong => json!("messages"),
        _ => Value::Null,
    };
    (
        kind.status(),
        json!({"error": {"message": message, "type": class, "param": param, "code": code}}),
    )
}

/// The event that ends a stream which has already begun. No `[DONE]` follows: the client must
/// not take what it has for a whole reply.
#[must_use]
pub fn error_event(kind: &ErrorKind, message: &str) -> String {
    format!("data: {}\n\n", error_body(kind, message).1)
}
