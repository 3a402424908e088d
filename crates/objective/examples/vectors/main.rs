//! Checks reference values: `cargo run --release -p objective --example vectors -- DIR`.
//!
//! Reads every `*.json` in DIR that holds `inputs` and `cases`, evaluates each case and compares.
//! Prints the worst relative error per function. Ends with status 1 when an error is above 1e-5,
//! a function or setting is unknown, or nothing was checked.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command")]

mod check;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(folder) = std::env::args().nth(1) else {
        eprintln!("usage: vectors DIR");
        return ExitCode::from(2);
    };
    match check::folder(Path::new(&folder)) {
        Ok(report) => {
            println!("{report}");
            if report.passed() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(problem) => {
            eprintln!("vectors: {problem}");
            ExitCode::FAILURE
        }
    }
}
