//! Error bodies of Gemini.

use serde_json::{Value, json};

use crate::{ErrorKind, Form, sse::frame};

/// Status and body of a refusal.
#[must_use]
pub fn error_body(kind: &ErrorKind, message: &str) -> (u16, Value) {
    let word = match kind {
        ErrorKind::InvalidRequest | ErrorKind::TooLong | ErrorKind::TooLarge => "INVALID_ARGUMENT",
        ErrorKind::Unauthorized | ErrorKind::Ended => "UNAUTHENTICATED",
        ErrorKind::NotFound => "NOT_FOUND",
        ErrorKind::RateLimit { .. } => "RESOURCE_EXHAUSTED",
        ErrorKind::Engine => "INTERNAL",
        ErrorKind::Overloaded => "UNAVAILABLE",
    };
    let status = kind.status();
    (
        status,
        json!({"error": {"code": status, "message": message, "status": word}}),
    )
}

/// What ends a stream which has already begun.
#[must_use]
pub fn error_event(kind: &ErrorKind, message: &str, form: &Form) -> String {
    let body = error_body(kind, message).1;
    if form.json_list {
        format!("[{body}]")
    } else {
        frame(None, &body)
    }
}
