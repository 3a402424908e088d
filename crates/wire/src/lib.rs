//! Dialects of the model API and one [`record::Conversation`] between them. Pure: a JSON value
//! in, a JSON value or the text of an event stream out; no socket, no clock, no randomness.
//!
//! | module | owns |
//! |---|---|
//! | [`chat`] | Chat Completions: request, body, event stream, errors |
//! | [`responses`] | OpenAI Responses: the same |
//! | [`messages`] | Anthropic Messages: the same |
//! | [`gemini`] | Google generateContent: the same |
//! | [`dialect`] | one function per job over all of them, and the small answers: counts, models |
//! | [`digest`](mod@digest) | the canonical form of a request, equal for retries |
//! | [`error`] | what can go wrong with a request, without a dialect |
//! | [`request`] | what every dialect is read into |
//! | [`reply`] | what every dialect says about a reply |
//! | [`opaque`] | marks that clients carry from a reply into the next request |
//!
//! A further dialect is one more module with the same six items as [`chat`] (`parse`,
//! `reply_body`, `reply_events`, `KEEP_ALIVE`, `error_body`, `error_event`), reading into the
//! same [`Request`] and writing from the same [`Reply`] and [`ErrorKind`].
//!
//! Invariants:
//! - **I5** a reply's event stream reassembles to its body (one property test per dialect, over
//!   random replies with up to 4 parallel calls, cut into random deltas).
//! - A conversation written in a dialect and read again is the same conversation, and the message
//!   of a reply that comes back in the next request is the same message (property tests; what a
//!   dialect cannot carry is named there).
//! - Text is never altered: what stands between the quotes of the request stands in the
//!   conversation, byte for byte. Arguments of tool calls are parsed, key order kept.
//! - Unknown fields are ignored, never refused: harnesses stop, or retry with fewer features,
//!   on a 400. Only a field that we read and that has another type than the API's is refused,
//!   with the path of the field.
//!
//! Limits: none of its own. Whoever reads the body limits its bytes; `serde_json` limits the
//! nesting to 128.

pub mod chat;
pub mod dialect;
pub mod digest;
pub mod error;
mod field;
pub mod gemini;
pub mod messages;
pub mod opaque;
pub mod reply;
pub mod request;
pub mod responses;
mod sse;
#[cfg(test)]
mod testing;

pub use digest::digest;
pub use error::{ErrorKind, WireError};
pub use reply::{Reply, SamplingWishes, Usage};
pub use request::{Compaction, Form, Request, Target, ToolForm};
