//! `espalier inspect`: what a run's ledger holds, in the terminal. Reads only, also while the run
//! goes on.

mod overview;
mod rollout;
mod svg;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use ledger::Ledger;
use record::{Rollout, RolloutId};
use serde::Serialize;
use tree::Selection;

use crate::{
    display::Display,
    error::CliError,
    recipe::{Recipe, TrainSettings},
};

/// Shown names when one was mistyped.
const NAMES_MAX: usize = 8;

/// Look into a run: what became of its rollouts, and the tree of one of them.
///
/// Example: espalier inspect runs/quickstart, then espalier inspect runs/quickstart ROLLOUT
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The run directory.
    run: PathBuf,
    /// A rollout, or a part of its name that only one has.
    rollout: Option<String>,
    /// Draw the rollout's tree into this file.
    #[arg(long, requires = "rollout")]
    svg: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<(), CliError> {
    let display = Display::new(json);
    let failed = |error| CliError::failed(format!("run {}", arguments.run.display()), error);
    let ledger = Ledger::open_read_only(&arguments.run).map_err(failed)?;
    let selection = selection(&arguments.run)?;
    let rollouts = ledger.rollouts(&[]).map_err(failed)?;
    let Some(name) = &arguments.rollout else {
        let mut overview = overview::Overview::new(&rollouts);
        let progress = display.steps("reading", rollouts.len() as u64, "rollouts");
        for rollout in &rollouts {
            let calls = ledger.calls(&rollout.spec.id).map_err(failed)?;
            overview.add(rollout, &calls, &selection);
            progress.advance("");
        }
        progress.done();
        return show(&display, &overview, |overview| {
            overview.text(&arguments.run)
        });
    };
    let rollout = find(&rollouts, name)?;
    let calls = ledger.calls(&rollout.spec.id).map_err(failed)?;
    if let Some(file) = &arguments.svg {
        svg::write(file, rollout, &calls, &selection)?;
    }
    let view = rollout::View::new(rollout, &calls, &selection)?;
    show(&display, &view, rollout::View::text)
}

fn show<T: Serialize>(
    display: &Display,
    found: &T,
    text: impl Fn(&T) -> String,
) -> Result<(), CliError> {
    let value = serde_json::to_value(found)
        .map_err(|error| CliError::failed("the answer as JSON", error))?;
    display.json(&value);
    display.line(text(found).trim_end());
    Ok(())
}

/// The rule by which the run trains.
fn selection(run: &Path) -> Result<Selection, CliError> {
    Ok(train_settings(run)?.selection)
}

/// How the run trains; the defaults for a directory without recipe.
pub(super) fn train_settings(run: &Path) -> Result<TrainSettings, CliError> {
    let file = run.join("run.toml");
    if !file.is_file() {
        return Ok(TrainSettings::default());
    }
    Ok(Recipe::load(&file)?.train)
}

fn find<'a>(rollouts: &'a [Rollout], name: &str) -> Result<&'a Rollout, CliError> {
    let id = |rollout: &'a Rollout| -> &'a RolloutId { &rollout.spec.id };
    if let Some(exact) = rollouts.iter().find(|rollout| id(rollout).as_str() == name) {
        return Ok(exact);
    }
    let similar: Vec<&Rollout> = rollouts
        .iter()
        .filter(|rollout| id(rollout).as_str().contains(name))
        .collect();
    if let [only] = similar[..] {
        return Ok(only);
    }
    let (found, shown) = if similar.is_empty() {
        ("no rollout".to_owned(), rollouts.iter().collect())
    } else {
        (format!("{} rollouts", similar.len()), similar)
    };
    let names: Vec<&str> = shown
        .iter()
        .take(NAMES_MAX)
        .map(|rollout| id(rollout).as_str())
        .collect();
    let more = shown.len().saturating_sub(NAMES_MAX);
    let more = if more == 0 {
        String::new()
    } else {
        format!(" and {more} more")
    };
    Err(CliError::usage(
        format!("{name:?} names {found} of the run"),
        format!("there are {}{more}", names.join(", ")),
    ))
}
