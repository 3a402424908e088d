//! The local kind, for real: every test makes sandboxes on this machine.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests; clippy's own exception ends at their helper functions"
)]

mod conformance;
mod density;
mod egress;
mod isolation;
mod leaks;
mod lifetime;
mod limits;
mod react;
mod red_team;
#[path = "../suite/mod.rs"]
mod suite;
mod support;
mod user;
