//! `espalier harness`: what is known of harnesses, and whether a profile keeps its promises.

mod judge;
mod line;
mod play;
mod report;
mod scenario;
mod watch;

use std::{path::PathBuf, sync::Arc};

use sandbox::{LocalConfig, LocalProvider};
use serde::Serialize;

use crate::{display::Display, error::CliError, lab, policy};
use report::Report;
use scenario::{Bench, Scenario};

/// Look at harness profiles, and prove one against a scripted engine.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Check(Check),
    List(List),
}

/// Prove a profile: real harness, sandbox, gateway and tokenizer; scripted engine.
///
/// Example: espalier harness check pi:messages --only turns --only storm
#[derive(Debug, clap::Args)]
struct Check {
    /// NAME or NAME:DIALECT; may be given several times.
    #[arg(required_unless_present = "all")]
    harness: Vec<String>,
    /// Every profile in every dialect that it offers.
    #[arg(long, conflicts_with = "harness")]
    all: bool,
    /// Every dialect of the named profiles.
    #[arg(long)]
    dialects: bool,
    /// Play this; may be given several times. Otherwise everything that the harness has.
    #[arg(long, value_enum)]
    only: Vec<Scenario>,
    /// Folder with the tokenizer and chat template to speak in.
    #[arg(long, default_value = "policy")]
    policy: PathBuf,
    /// Keep the captured calls here, a run directory for each scenario.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print the results as one Markdown table.
    #[arg(long)]
    table: bool,
}

/// Name all profiles with version, dialects and habits.
#[derive(Debug, clap::Args)]
struct List {}

/// Runs the command.
pub(crate) async fn run(arguments: Arguments, json: bool) -> Result<(), CliError> {
    match arguments.command {
        Command::Check(check) => check_all(check, json).await,
        Command::List(_) => list(json),
    }
}

fn folder() -> Option<PathBuf> {
    std::env::var_os("ESPALIER_HARNESSES").map(PathBuf::from)
}

#[derive(Debug, Serialize)]
struct Known {
    name: String,
    version: String,
    dialects: Vec<&'static str>,
    summary: String,
}

fn list(json: bool) -> Result<(), CliError> {
    let display = Display::new(json);
    let names = harness::names(folder().as_deref());
    let known: Vec<Known> = lab::profiles(&names)?
        .into_iter()
        .map(|profile| Known {
            dialects: profile
                .dialects
                .iter()
                .copied()
                .map(harness::word)
                .collect(),
            name: profile.name,
            version: profile.version,
            summary: profile.summary,
        })
        .collect();
    for one in &known {
        display.line(&format!(
            "{:<16} {:<11} {:<28} {}",
            one.name,
            one.version,
            one.dialects.join(" "),
            one.summary
        ));
    }
    display.json(&serde_json::json!(known));
    Ok(())
}

/// The names to check, with dialects.
fn chosen(check: &Check) -> Result<Vec<String>, CliError> {
    let names = if check.all {
        harness::names(folder().as_deref())
    } else {
        check.harness.clone()
    };
    if !check.all && !check.dialects {
        return Ok(names);
    }
    let mut chosen = Vec::new();
    for mut profile in lab::profiles(&names)? {
        for dialect in profile.dialects.clone() {
            profile.speak(dialect);
            chosen.push(profile.name.clone());
        }
    }
    Ok(chosen)
}

async fn check_all(check: Check, json: bool) -> Result<(), CliError> {
    let display = Display::new(json);
    let (cancel, _watcher) = super::interrupts();
    let codec = policy::load_codec(&check.policy)?;
    let scratch = tempfile::tempdir()
        .map_err(|error| CliError::failed("a folder for what is captured", error))?;
    let out = check.out.clone().unwrap_or_else(|| scratch.path().into());
    let provider = LocalProvider::start(LocalConfig::default())
        .await
        .map_err(|error| CliError::failed("sandboxes cannot be made here", error))?;
    let mut reports = Vec::new();
    for name in chosen(&check)? {
        let mut installed = lab::install(std::slice::from_ref(&name)).await?;
        let Some(installed) = installed.pop() else {
            continue;
        };
        let bench = Bench {
            codec: Arc::clone(&codec),
            provider: provider.clone(),
            installed: Arc::clone(&installed),
            folder: out.join(name.replace(':', "-")),
        };
        let mut report = Report::new(&installed);
        if !check.table {
            display.line(&report.head());
        }
        let wanted = |scenario: &Scenario| {
            if check.only.is_empty() {
                return scenario.fits(&installed);
            }
            // The window for a compaction is made for the prompt that the turns show.
            let needed = *scenario == Scenario::Turns && check.only.contains(&Scenario::Compaction);
            needed || check.only.contains(scenario)
        };
        let all = [
            Scenario::Turns,
            Scenario::Storm,
            Scenario::Subagent,
            Scenario::Compaction,
        ];
        for scenario in all.into_iter().filter(wanted) {
            let base = report.base().cloned();
            let outcome = bench.run(scenario, base.as_ref(), &cancel).await?;
            if cancel.is_cancelled() {
                return Err(CliError::Interrupted {
                    resume: "nothing is left of the check".into(),
                });
            }
            if !check.table {
                for line in report::lines(&outcome) {
                    display.line(&line);
                }
            }
            report.outcomes.push(outcome);
        }
        reports.push(report);
    }
    provider.close().await;
    if check.table {
        for line in report::table(&reports) {
            display.line(&line);
        }
    }
    display.json(&serde_json::json!({"harnesses": reports}));
    let failed: Vec<String> = reports
        .iter()
        .flat_map(|report| report.failures())
        .collect();
    if failed.is_empty() {
        return Ok(());
    }
    Err(CliError::plain(
        format!("not as it must be: {}", failed.join(", ")),
        "give --out DIR, then look with: espalier inspect DIR/HARNESS/SCENARIO",
    ))
}
