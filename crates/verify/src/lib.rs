//! Verifiers run in the sandbox; verdicts.
//!
//! | function | does |
//! |---|---|
//! | [`verify`], [`verify_with`] | scores the state that a harness left behind; the second with conversation and judges |
//! | [`collect`], [`artifacts`], [`apart`] | Harbor's hooks, what a task wants kept, a verifier with a sandbox of its own |
//! | [`World`], [`rescore`] | keeps a state and scores it again, by any task's verifier |
//! | [`Transcript::of`] | the conversation in the shape that graders expect, from captured calls |
//! | [`judge`] | a model that scores by a rubric |
//! | [`artefact`] | text out of spreadsheets, documents, notebooks, databases |
//! | [`prepare`], [`spec`] | the world of a task before the harness starts |
//! | [`Services`], [`Audit`] | the services of a task, and what they were asked |
//! | [`tool_servers`], [`start_tool_servers`] | what tool servers the harness is told of; whether they are there |
//! | [`apply_solution`] | plays the reference solution straight in the sandbox, without a harness |
//! | [`admit`] | whether a task may be used at all |
//! | [`leaks`] | whether the initial files give the answer away |
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
//!
//! `RewardFile` looks at the reward file alone (`reward.json`, else `reward.txt`): no file, or
//! no finite number from 0 to 1 in it, is `Contract`; timeout and memory as above. Code of the
//! first two contracts runs with `PYTHONSAFEPATH`, its own folder as `PYTHONPATH` and without
//! user site, so that modules which an agent left in the workspace stand in for none.

pub mod artefact;
mod audit;
mod claw_eval;
mod contract;
mod error;
mod gates;
pub mod judge;
mod office;
mod rescore;
mod run;
mod services;
mod transcript;
mod world;

pub use audit::{Leak, leaks};
pub use claw_eval::{claw_eval_score, robustness};
pub use contract::{EVIDENCE_BYTES_MAX, scores};
pub use error::VerifyError;
pub use gates::{Gates, admit, no_op};
pub use office::office_answer;
pub use rescore::{World, WorldError, apart, rescore};
pub use run::{OUTPUT_BYTES_MAX, Told, WORKSPACE_BYTES_MAX, verify, verify_with};
pub use services::{Asked, Audit, ServiceAudit, Services, start_tool_servers, tool_servers};
pub use transcript::Transcript;
pub use world::{
    STEP_TIMEOUT_S, apply_solution, artifacts, collect, missing, prepare, refuse, spec,
};
