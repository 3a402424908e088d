//! The local kind, for real: every test makes sandboxes on this machine.

mod exec;
mod files;
mod isolation;
mod leaks;
mod lifetime;
mod limits;
mod support;
mod user;
