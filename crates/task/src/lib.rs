//! Task formats in, [`Task`] out. Pure parsing: nothing is run.
//!
//! | module | owns |
//! |---|---|
//! | [`chores`] | the built-in tasks, made from a seed |
//! | [`mod@load`] | which format a folder or source has |
//! | [`service`] | services made of data: records, and what requests do with them |
//! | [`teacher`] | the scripted policy that plays a reference solution through any harness's tools |
//!
//! Formats, told apart folder by folder and file by file ([`load()`]):
//!
//! | format | marked by | scored by |
//! |---|---|---|
//! | our own, written by [`write_dir`] | `task.toml` with `format = 1` | code, last line |
//! | Harbor 1.0 to 1.4, Terminal-Bench 2 | `task.toml` with `tests/` or `environment/` | code, reward file |
//! | Terminal-Bench 1 | `task.yaml` with `instruction` | pytest's summary |
//! | ClawGym | `data_entry.json`, `reward/` | code, last line or zero; 0.7 / 0.3 with a rubric |
//! | ClawGym's source | `*.jsonl` with `prompt`, `hook_code` | as above |
//! | PinchBench, QwenClawBench | `*.md` with front matter | code, judge, weighted or gated |
//! | Claw-Eval | `task.yaml` with `task_id` | audit of its services, and a judge |
//! | MCP-Atlas | `*.csv` with `PROMPT`, `GTFA_CLAIMS` | judge, claim by claim |
//! | OfficeQA | `*.csv` with `uid`, `question`, `answer` | the last words against the truth |
//! | JobBench | `RUBRICS.json` | judge, weighted rubrics |
//! | like SWE-bench | `*.jsonl` with `instance_id` | tests in a clean room |
//!
//! Formats of other people are read as their tools read them: keys that we do not know are kept
//! in [`Task::metadata`], and what cannot be run here is a sentence in
//! [`Environment::refusals`], never a silent difference.
//!
//! Invariants:
//! - A task always has a verifier or a rubric; a folder without is [`TaskError::MissingVerifier`].
//! - One bad task makes the whole folder an error: a set that silently shrinks gives wrong means.
//! - Writing a task and reading it back gives an equal task, digest included.
//! - [`Task::digest`] is over everything else in the task: equal digests are equal tasks.
//! - At most [`FILES_MAX`] files and [`BYTES_MAX`] bytes per task; symbolic links are refused,
//!   because they mean something else in the sandbox. Beyond a limit: [`TaskError::TooLarge`].

pub mod chores;
mod claw_eval;
mod clawgym;
mod digest;
mod dockerfile;
mod environment;
mod error;
mod fields;
mod grading;
mod harbor;
mod job_bench;
pub mod load;
mod markdown;
mod model;
mod own;
mod servers;
pub mod service;
mod tables;
pub mod teacher;
mod terminal_bench;
mod toml_file;
mod tree;

pub use digest::{digest, set_digest, verifier_digest};
pub use environment::{
    Collect, Environment, HealthCheck, McpServer, McpTransport, Needs, Network, Requirement, Stage,
    Strategy,
};
pub use error::TaskError;
pub use grading::{AuditCheck, AuditRules, Component, Criterion, Grading, Mix, Rubric, Scale};
pub use load::{Found, load, load_dir, load_each};
pub use model::{Contract, Format, Payload, Split, Step, Task, TaskFile, Verifier};
pub use own::write_dir;
pub use service::{Act, Mock, Route, Service, ServiceTool};
pub use tree::{BYTES_MAX, FILES_MAX};
