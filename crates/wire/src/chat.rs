//! OpenAI Chat Completions.
//!
//! | module | owns |
//! |---|---|
//! | [`request`] | body → [`Request`] |
//! | [`response`] | [`Reply`] → body, event stream |
//! | [`failure`] | error bodies and the error event |
//! | [`write`](mod@write) | a conversation → the body of a request, for text-only engines |

pub mod failure;
pub mod request;
pub mod response;
pub mod write;

pub use failure::{error_body, error_event};
pub use request::parse;
pub use response::{finish_reason, reply_body, reply_events};
pub use write::request_body;

/// A comment that keeps a silent stream alive. Every client of this dialect that was measured
/// ignores it (a Gemini client does not: never send it there).
pub const KEEP_ALIVE: &str = ": keep-alive\n\n";

#[cfg(doc)]
use crate::{Reply, Request};
#[cfg(test)]
mod habits;
#[cfg(test)]
mod stream_equals_body;
