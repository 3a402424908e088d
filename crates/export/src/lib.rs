//! Rollouts in and out of other programs' formats. Pure: readers and writers are passed in.
//!
//! | module | owns |
//! |---|---|
//! | [`captures`] | token captures of other gateways, one call per line, in |
//! | [`mod@report`] | what became of such a rollout: tree, forks, rows |
//! | [`rows`] | training rows, one per line, out |
//!
//! Invariants
//! - Ids of tokens pass through unchanged (I1). A call without a log-probability for every token
//!   is context (I4): nothing is padded.
//! - Formats are strict where a guess would change what is trained: a missing field, a wrong
//!   length, an unknown word names line, expectation and finding. Unknown fields are ignored,
//!   since other gateways write more than is read here.
//!
//! Limits: a line has at most [`captures::LINE_BYTES_MAX`] bytes. All calls of a file are held in
//! memory, because lines may come in any order.

pub mod captures;
pub mod report;
pub mod rows;

pub use captures::{CaptureError, Captured, read};
pub use report::{Report, report};
pub use rows::{RowLine, write_rows};
