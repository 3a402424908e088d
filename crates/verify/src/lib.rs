//! Verifiers run in the sandbox; verdicts.
//!
//! | function | does |
//! |---|---|
//! | [`verify`] | scores the state that a harness left behind |
//! | [`prepare`], [`spec`] | the world of a task before the harness starts |
//! | [`apply_solution`] | plays the reference solution straight in the sandbox, without a harness |
//! | [`admit`] | whether a task may be used at all |
//!
//! Invariants:
//! - A fault is never a score (I7): whatever is not the verifier's own word about the world is a
//!   [`VerifyError`], and [`VerifyError::fault`] says what training does with it.
//! - The verifier's files come into the sandbox only when [`verify`] is called, after whatever
//!   the agent had put at their place was removed.
//! - Limits: the verifier's own timeout (then [`VerifyError::TimedOut`]), [`OUTPUT_BYTES_MAX`]
//!   kept of each of stdout and stderr (first and last half, so that the last line is there),
//!   [`EVIDENCE_BYTES_MAX`] of evidence in the verdict, [`STEP_TIMEOUT_S`] for a step of a
//!   solution.
//!
//! What becomes of a verifier's end:
//!
//! | end | `LastLine` | `LastLineOrZero` |
//! |---|---|---|
//! | exit 0, last line a number in [0, 1] | that score | that score |
//! | exit 0, no such line | `Contract` | 0 |
//! | exit 126 or 127: a program is missing | `MissingProgram` | `MissingProgram` |
//! | other exit, signal | `Contract` | 0 |
//! | timeout | `TimedOut` | `TimedOut` |
//! | killed for lack of memory | `OutOfMemory` | `OutOfMemory` |

mod contract;
mod error;
mod gates;
mod run;
mod world;

pub use contract::{EVIDENCE_BYTES_MAX, scores};
pub use error::VerifyError;
pub use gates::{Gates, admit};
pub use run::{OUTPUT_BYTES_MAX, verify};
pub use world::{STEP_TIMEOUT_S, apply_solution, prepare, spec};
