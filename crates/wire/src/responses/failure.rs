//! Error bodies of Responses.

use serde_json::{Value, json};

use crate::{ErrorKind, chat, sse::frame};

/// Status and body of a refusal, the same as in Chat Completions. For [`ErrorKind::RateLimit`]
/// also send the header `retry-after`: Codex gives up on a 429 without it.
#[must_use]
pub fn error_body(kind: &ErrorKind, message: &str) -> (u16, Value) {
    let (status, mut body) = chat::error_body(kind, message);
    if *kind == ErrorKind::TooLong {
        body["error"]["param"] = json!("input");
    }
    (status, body)
}

/// The event that ends a stream which has already begun. An overloaded engine is told as a
/// server error: Codex repeats the call then, while it gives up on an overload code.
#[must_use]
pub fn error_event(kind: &ErrorKind, message: &str) -> String {
    let code = match kind {
        ErrorKind::Engine | ErrorKind::Overloaded => json!("server_error"),
        // The one code on which Codex surely ends, whatever the others become.
        ErrorKind::Ended => json!("invalid_prompt"),
        other => error_body(other, message).1["error"]["code"].clone(),
    };
    let code = if code.is_null() {
        json!("invalid_prompt")
    } else {
        code
    };
    let data = json!({
        "type": "response.failed",
        "sequence_number": 0,
        "response": {
            "id": "resp_failed",
            "object": "response",
            "created_at": 0,
            "status": "failed",
            "error": {"code": code, "message": message},
            "incomplete_details": null,
            "output": [],
            "usage": null,
        },
    });
    frame(Some("response.failed"), &data)
}
