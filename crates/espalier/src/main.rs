//! The command line. Thin: it reads arguments, calls the rooms below, prints what they found.
//!
//! Exit codes: 0 ok, 1 failed, 2 bad usage, 130 interrupted.

mod atomic;
mod chart;
mod chat_rows;
mod commands;
mod curriculum;
mod display;
mod engines;
mod error;
mod lab;
mod metrics;
mod models;
mod policy;
mod recipe;
mod run_dir;
mod score;
mod steps;
mod summary;
mod teacher;
mod telemetry;
mod tensorboard;
mod text;
mod trainer;
mod training;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use error::CliError;

/// A gateway parses, copies and renders conversations all day: with the allocator of the C library
/// that was a fifth of its processor time (docs/benchmarks.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Reinforcement learning of language models through real, unmodified agent harnesses.
#[derive(Debug, Parser)]
#[command(name = "espalier", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Print machine-readable JSON on stdout instead of text.
    #[arg(long, global = true)]
    json: bool,
}

// Variants carry no comments: the help of a command is the comment of its arguments.
#[derive(Debug, Subcommand)]
enum Command {
    Train(commands::train::Arguments),
    Sft(commands::sft::Arguments),
    Rollout(commands::rollout::Arguments),
    Eval(commands::eval::Arguments),
    Harness(commands::harness::Arguments),
    Verify(commands::verify::Arguments),
    Serve(commands::serve::Arguments),
    Inspect(commands::inspect::Arguments),
    Ledger(commands::ledger::Arguments),
    Tree(commands::tree::Arguments),
    Export(commands::export::Arguments),
    Doctor(commands::doctor::Arguments),
    Tasks(commands::tasks::Arguments),
    Policy(commands::policy::Arguments),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    init_logging();
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            return error::report(&CliError::failed(
                "the async runtime could not start",
                error,
            ));
        }
    };
    let json = cli.json;
    let outcome = runtime.block_on(async {
        match cli.command {
            Command::Train(arguments) => commands::train::run(arguments, json).await,
            Command::Sft(arguments) => commands::sft::run(arguments, json).await,
            Command::Rollout(arguments) => commands::rollout::run(arguments, json).await,
            Command::Eval(arguments) => commands::eval::run(arguments, json).await,
            Command::Harness(arguments) => commands::harness::run(arguments, json).await,
            Command::Verify(arguments) => commands::verify::run(arguments, json).await,
            Command::Serve(arguments) => commands::serve::run(arguments, json).await,
            Command::Inspect(arguments) => commands::inspect::run(&arguments, json).await,
            Command::Ledger(arguments) => commands::ledger::run(&arguments, json).await,
            Command::Tree(arguments) => commands::tree::run(&arguments, json),
            Command::Export(arguments) => commands::export::run(&arguments, json),
            Command::Doctor(arguments) => commands::doctor::run(arguments, json).await,
            Command::Tasks(arguments) => commands::tasks::run(arguments, json).await,
            Command::Policy(arguments) => commands::policy::run(&arguments, json),
        }
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error::report(&error),
    }
}

/// Logs go to stderr; `ESPALIER_LOG` selects (e.g. `ESPALIER_LOG=gateway=debug`).
fn init_logging() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("ESPALIER_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .compact()
        .init();
}
