//! Rollouts in and out of other programs' formats. Pure: readers and writers are passed in.
//!
//! | module | owns |
//! |---|---|
//! | [`captures`] | token captures, one call per line: those of other gateways in, a run's own out |
//! | [`mod@report`] | what became of a captured rollout: tree, forks, rows |
//! | [`source`] | what every format is written from: a rollout, its calls, its tree, what is kept |
//! | [`rows`] | training rows, one per line |
//! | [`verl`] | the same as veRL's trainers take them |
//! | [`chat`] | kept branches as messages, with or without weights per turn |
//! | [`atif`] | trajectories of ATIF v1.8 |
//! | [`parquet`] | rows and messages as Parquet: the same serde types, with columns beside them |
//! | [`svg`] | a tree as a drawing |
//!
//! ```text
//! captures ─► read ─► report ─┐
//! ledger ─► Source ───────────┴─► rows · verl · chat · atif · captures ─► JSON lines, Parquet
//!                             └─► svg
//! ```
//!
//! Invariants
//! - Ids of tokens pass through unchanged (I1). A call without a log-probability for every token
//!   is context (I4): nothing is padded.
//! - I3 over files: a token is trained in one row, a turn in one branch, however many share it.
//! - Formats are strict where a guess would change what is trained: a missing field, a wrong
//!   length, an unknown word names line, field, expectation and finding. Unknown fields are ignored,
//!   since other gateways write more than is read here.
//! - Equal rollouts give equal bytes: no clock, no random order.
//!
//! Limits: a line has at most [`captures::LINE_BYTES_MAX`] bytes. All calls of a captures file are
//! held in memory, because lines may come in any order. Of a run one rollout at a time is held; Parquet
//! collects [`parquet::GROUP_BYTES_MAX`] bytes before it writes.

pub mod atif;
pub mod captures;
pub mod chat;
pub mod parquet;
pub mod report;
pub mod rows;
pub mod source;
pub mod svg;
pub mod verl;

pub use captures::{CaptureError, Captured, capture_lines, read};
pub use report::{Report, report};
pub use rows::{Facts, RowLine, row_lines, write_lines};
pub use source::{Rule, Source};
