//! Anthropic Messages.
//!
//! | module | owns |
//! |---|---|
//! | [`request`] | body → [`Request`] |
//! | [`response`] | [`Reply`] → body, event stream |
//! | [`failure`] | error bodies and the error event |

pub mod failure;
pub mod request;
pub mod response;

pub use failure::{error_body, error_event};
pub use request::parse;
pub use response::{reply_body, reply_events, stop_reason};

/// An event that keeps a silent stream alive. Client libraries of this dialect skip it wherever
/// it stands, also before the first event.
pub const KEEP_ALIVE: &str = "event: ping\ndata: {\"type\":\"ping\"}\n\n";

#[cfg(doc)]
use crate::{Reply, Request};
#[cfg(test)]
mod habits;
#[cfg(test)]
mod properties;
