//! Google generateContent and streamGenerateContent.
//!
//! | module | owns |
//! |---|---|
//! | [`request`] | body and address → [`Request`] |
//! | [`response`] | [`Reply`] → body, event stream |
//! | [`failure`] | error bodies and the error event |

pub mod failure;
pub mod request;
pub mod response;

pub use failure::{error_body, error_event};
pub use request::parse;
pub use response::{finish_reason, reply_body, reply_events};

/// Nothing keeps a stream alive here: Gemini CLI chokes on anything but data. With its headers
/// sent early it waits.
pub const KEEP_ALIVE: Option<&str> = None;

#[cfg(doc)]
use crate::{Reply, Request};
#[cfg(test)]
mod habits;
#[cfg(test)]
mod properties;
