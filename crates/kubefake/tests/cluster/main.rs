//! The fake cluster as its clients see it: raw HTTP and WebSockets, `kubectl`, and the official
//! Python client.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests; clippy's own exception ends at their helper functions"
)]

mod deletion;
mod faults;
mod foreign;
mod history;
mod leaks;
mod objects;
mod pods;
mod streams;
mod support;
mod watches;
