//! Error bodies of Messages.

use serde_json::{Value, json};

use crate::{ErrorKind, sse::frame};

/// Status and body of a refusal. For [`ErrorKind::RateLimit`] also send the header
/// `retry-after` with [`ErrorKind::retry_after_s`].
#[must_use]
pub fn error_body(kind: &ErrorKind, message: &str) -> (u16, Value) {
    let (status, class) = match kind {
        ErrorKind::InvalidRequest | ErrorKind::TooLong => (kind.status(), "invalid_request_error"),
        ErrorKind::Unauthorized | ErrorKind::Ended => (kind.status(), "authentication_error"),
        ErrorKind::NotFound => (kind.status(), "not_found_error"),
        ErrorKind::TooLarge => (kind.status(), "request_too_large"),
        ErrorKind::RateLimit { .. } => (kind.status(), "rate_limit_error"),
        ErrorKind::Engine => (kind.status(), "api_error"),
        // This provider's own status for "come back later".
        ErrorKind::Overloaded => (529, "overloaded_error"),
    };
    (
        status,
        json!({"type": "error", "error": {"type": class, "message": message}}),
    )
}

/// The event that ends a stream which has already begun.
#[must_use]
pub fn error_event(kind: &ErrorKind, message: &str) -> String {
    frame(Some("error"), &error_body(kind, message).1)
}
