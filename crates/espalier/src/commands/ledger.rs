//! `espalier ledger`: is what a run captured still intact, and how much of it is kept for how long.

use std::{
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use ::ledger::{Keep, Ledger, LedgerError};
use serde::Serialize;

use crate::{display::Display, error::CliError, text::count};

/// Damaged records that are named; the number of all is always told.
const NAMED_MAX: usize = 50;

/// Check what a run captured, or make it smaller.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Verify(Verify),
    Compact(Compact),
}

/// Read every record and say what is damaged, and so lost.
///
/// Reads only, also while the run goes on. Exit code 1 when something is damaged.
///
/// Example: espalier ledger verify runs/quickstart
#[derive(Debug, clap::Args)]
struct Verify {
    /// The run directory.
    run: PathBuf,
}

/// Drop what is old and give its space back.
///
/// Tokens, log-probabilities, rewards and outcomes always stay, so everything can still be trained
/// and counted. Nobody else may be writing the run; readers go on.
///
/// Example: espalier ledger compact runs/quickstart --raw-days 7 --text-days 90
#[derive(Debug, clap::Args)]
struct Compact {
    /// The run directory.
    run: PathBuf,
    /// Drop request bodies and headers, as they came, of rollouts that ended longer ago.
    #[arg(long, value_name = "DAYS")]
    raw_days: Option<u64>,
    /// Drop all texts of rollouts that ended longer ago: only tokens stay.
    #[arg(long, value_name = "DAYS")]
    text_days: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Verified {
    rollouts: u64,
    calls: u64,
    damaged: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Compacted {
    /// Rollouts that lost something.
    thinned: usize,
    bytes_before: u64,
    bytes_after: u64,
}

/// Runs the command.
pub(crate) async fn run(arguments: &Arguments, json: bool) -> Result<(), CliError> {
    let display = Display::new(json);
    match &arguments.command {
        Command::Verify(arguments) => verify(arguments, &display),
        Command::Compact(arguments) => compact(arguments, &display).await,
    }
}

fn failed(run: &std::path::Path, error: LedgerError) -> CliError {
    CliError::failed(format!("run {}", run.display()), error)
}

fn tell(display: &Display, found: &impl Serialize) -> Result<(), CliError> {
    let value = serde_json::to_value(found)
        .map_err(|error| CliError::failed("the answer as JSON", error))?;
    display.json(&value);
    Ok(())
}

fn verify(arguments: &Verify, display: &Display) -> Result<(), CliError> {
    let run = arguments.run.as_path();
    let failed = |error| failed(run, error);
    let ledger = Ledger::open_read_only(run).map_err(failed)?;
    let counts = ledger.counts().map_err(failed)?;
    let damaged = ledger.verify().map_err(failed)?;
    let found = Verified {
        rollouts: counts.rollouts,
        calls: counts.calls,
        damaged: damaged.iter().map(ToString::to_string).collect(),
    };
    tell(display, &found)?;
    for error in found.damaged.iter().take(NAMED_MAX) {
        display.line(error);
    }
    let read = format!("{} rollouts, {} calls", found.rollouts, found.calls);
    match found.damaged.len() {
        0 => {
            display.line(&format!("{}: {read}, all intact", run.display()));
            Ok(())
        }
        number => Err(CliError::plain(
            format!("{}: {read}, {number} records are damaged", run.display()),
            "everything else can be read; run the rollouts of the damaged calls again, or leave them out",
        )),
    }
}

async fn compact(arguments: &Compact, display: &Display) -> Result<(), CliError> {
    let run = arguments.run.as_path();
    let failed = |error| failed(run, error);
    let ledger = Ledger::open(run).map_err(failed)?;
    let file = ledger.file().to_owned();
    let size = || std::fs::metadata(&file).map_or(0, |data| data.len());
    let bytes_before = size();
    let mut thinned = 0;
    for (days, keep) in [
        (arguments.text_days, Keep::Tokens),
        (arguments.raw_days, Keep::Conversation),
    ] {
        if let Some(days) = days {
            let before_ms = now_ms().saturating_sub(days.saturating_mul(24 * 3600 * 1000));
            thinned += ledger.retain(before_ms, keep).await.map_err(failed)?;
        }
    }
    ledger.vacuum().await.map_err(failed)?;
    ledger.close().await.map_err(failed)?;
    let found = Compacted {
        thinned,
        bytes_before,
        bytes_after: size(),
    };
    tell(display, &found)?;
    display.line(&format!(
        "{}: {thinned} rollouts thinned, {} bytes before, {} after",
        run.display(),
        count(found.bytes_before),
        count(found.bytes_after)
    ));
    Ok(())
}

fn now_ms() -> u64 {
    let now: Duration = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
