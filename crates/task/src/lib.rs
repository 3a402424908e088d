//! Task formats in, [`Task`] out. Pure parsing: nothing is run.
//!
//! | module | owns |
//! |---|---|
//! | [`chores`] | the built-in tasks, made from a seed |
//! | [`mod@load`] | which format a folder or source has |
//! | [`teacher`] | the scripted policy that plays a reference solution through any harness's tools |
//!
//! Formats: our own folder (`task.toml`, `instruction.md`, `files/`, `verify/`, optional
//! `solution.toml`), written by [`write_dir`]; and ClawGym folders (`data_entry.json`,
//! `input_files/`, `reward/`), read unchanged. [`load_dir`] tells them apart folder by folder.
//!
//! Invariants:
//! - A task always has a verifier; a folder without one is [`TaskError::MissingVerifier`].
//! - One bad task makes the whole folder an error: a set that silently shrinks gives wrong means.
//! - Writing a task and reading it back gives an equal task, digest included.
//! - [`Task::digest`] is over everything else in the task: equal digests are equal tasks.
//! - At most [`FILES_MAX`] files and [`BYTES_MAX`] bytes per task; symbolic links are refused,
//!   because they mean something else in the sandbox. Beyond a limit: [`TaskError::TooLarge`].

pub mod chores;
mod clawgym;
mod digest;
mod error;
pub mod load;
mod model;
mod own;
pub mod teacher;
mod toml_file;
mod tree;

pub use digest::digest;
pub use error::TaskError;
pub use load::{load, load_dir};
pub use model::{Contract, Split, Step, Task, TaskFile, Verifier};
pub use own::write_dir;
pub use tree::{BYTES_MAX, FILES_MAX};
