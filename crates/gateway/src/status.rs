//! What an orchestrator may know of a rollout.

use record::Fault;
use serde::Serialize;

/// What is known of a rollout.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Calls, retries not counted again.
    pub calls: u32,
    /// Attempts of these calls.
    pub attempts: u32,
    /// Calls that are being worked on or delivered.
    pub in_flight: u32,
    /// Attempts that joined a call in flight.
    pub joined: u32,
    /// Attempts that got an answer once more.
    pub replayed: u32,
    /// Attempts after a failed one of the same call.
    pub asked_again: u32,
    /// Attempts whose client had edited the history after it lost a reply.
    pub edited: u32,
    /// Generations that were cancelled because no client waited any more.
    pub abandoned: u32,
    /// Tokens generated so far.
    pub generated_tokens: u64,
    /// Requests refused, for whatever cause.
    pub refused: u32,
    /// Times that the engine failed.
    pub engine_failures: u32,
    /// Attempts whose client went away before the whole reply was out.
    pub client_gone: u32,
    /// Generations that could not be parsed.
    pub parse_failed: u32,
    /// Prompts that did not fit.
    pub too_long: u32,
    /// Whether a call was refused because of `calls_max`.
    pub calls_max_hit: bool,
    /// Whether a call was refused because of `generated_tokens_max`.
    pub tokens_max_hit: bool,
    /// Whether a call was refused, or cut off, because of `seconds_max`.
    pub seconds_max_hit: bool,
    /// The fault of the latest call that failed by our doing and was not answered in a later
    /// attempt. `None` when every call got its answer in the end.
    pub last_fault: Option<Fault>,
    /// Whether the record is complete.
    pub settled: bool,
    /// Whether the rollout was closed.
    pub closed: bool,
}
