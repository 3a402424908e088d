//! OpenAI Responses.
//!
//! | module | owns |
//! |---|---|
//! | [`request`] | body → [`Request`] |
//! | [`response`] | [`Reply`] → body, event stream |
//! | [`failure`] | error bodies and the event of a failed response |

pub mod failure;
pub mod request;
pub mod response;

pub use failure::{error_body, error_event};
pub use request::{parse, parse_compact};
pub use response::{reply_body, reply_events};

/// A comment that keeps a silent stream alive. Every client of this dialect that was measured
/// ignores it.
pub const KEEP_ALIVE: &str = ": keep-alive\n\n";

#[cfg(doc)]
use crate::{Reply, Request};
#[cfg(test)]
mod habits;
#[cfg(test)]
mod properties;
