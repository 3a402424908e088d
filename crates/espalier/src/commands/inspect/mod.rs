//! `espalier inspect`: what a run's ledger holds, in the terminal, also while the run goes on.
//! Only summaries that are missing are written: what earlier versions, or other orchestrators, have
//! not summed up is, the first time that somebody looks.

mod diff;
mod egress;
mod lineage;
mod overview;
mod report;
mod rollout;
mod speech;
mod svg;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use ::rollout::Summary;
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
    /// Show the beginning of each node's text beside it, decoded.
    #[arg(long, requires = "rollout")]
    text: bool,
    /// Show only this node of the tree: its tokens and its whole text.
    #[arg(
        long,
        value_name = "NODE",
        requires = "rollout",
        conflicts_with = "diff"
    )]
    node: Option<usize>,
    /// Show only where the branches of these two calls part.
    #[arg(long, num_args = 2, value_names = ["CALL", "CALL"], requires = "rollout")]
    diff: Option<Vec<u32>>,
    /// Folder with the tokenizer that decodes [default: the policy's of the run].
    #[arg(long, value_name = "DIR", requires = "rollout")]
    tokenizer: Option<PathBuf>,
    /// Draw the rollout's tree into this file.
    #[arg(long, requires = "rollout")]
    svg: Option<PathBuf>,
}

/// Runs the command.
pub(crate) async fn run(arguments: &Arguments, json: bool) -> Result<(), CliError> {
    let display = Display::new(json);
    let run = arguments.run.as_path();
    let ledger = Ledger::open_read_only(run).map_err(|error| failed(run, error))?;
    let recipe = recipe(run)?;
    let selection = recipe
        .as_ref()
        .map(|recipe| recipe.train.selection.clone())
        .unwrap_or_default();
    let Some(name) = &arguments.rollout else {
        let rollouts = ledger.rollouts(&[]).map_err(|error| failed(run, error))?;
        let summaries = summaries(&display, run, &ledger, &rollouts, &selection).await?;
        let known = rollouts
            .iter()
            .filter_map(|rollout| Some((rollout, summaries.get(rollout.spec.id.as_str())?)));
        let overview = overview::Overview::of(known);
        return show(&display, &overview, |overview| overview.text(run));
    };
    let rollout = one(&ledger, name).map_err(|error| match error {
        Found::Error(error) => failed(run, error),
        Found::NotOne(error) => error,
    })?;
    let calls = ledger
        .calls(&rollout.spec.id)
        .map_err(|error| failed(run, error))?;
    if let Some(file) = &arguments.svg {
        svg::write(file, &rollout, &calls, &selection)?;
    }
    let speech = || speech::Speech::load(arguments.tokenizer.as_deref(), recipe.as_ref());
    if let Some(&[left, right]) = arguments.diff.as_deref() {
        let diff = diff::Diff::between(&rollout, &calls, (left, right), &speech()?)?;
        return show(&display, &diff, diff::Diff::text);
    }
    let mut view = rollout::View::new(&rollout, &calls, &selection)?;
    view.egress = ::rollout::way_out::read_log(&run.join("egress"), &rollout.spec.id)
        .map_err(|error| CliError::failed("the log of the egress proxy", error))?;
    if let Some(node) = arguments.node {
        let node = view.node(node, &speech()?)?;
        return show(&display, &node, rollout::NodeView::text);
    }
    if arguments.text {
        view.decode(&speech()?);
    }
    show(&display, &view, rollout::View::text)
}

fn failed(run: &Path, error: ledger::LedgerError) -> CliError {
    CliError::failed(format!("run {}", run.display()), error)
}

/// What the calls of each rollout come to, by its name. What is not known yet of rollouts that
/// ended is written down for the next time, when nobody else has the run open.
async fn summaries(
    display: &Display,
    run: &Path,
    ledger: &Ledger,
    rollouts: &[Rollout],
    selection: &Selection,
) -> Result<HashMap<String, Summary>, CliError> {
    let mut summaries: HashMap<String, Summary> =
        ledger.summaries().map_err(|error| failed(run, error))?;
    summaries.retain(|_, summary| summary.selection == *selection);
    let missing: Vec<&Rollout> = rollouts
        .iter()
        .filter(|rollout| !summaries.contains_key(rollout.spec.id.as_str()))
        .collect();
    if missing.is_empty() {
        return Ok(summaries);
    }
    let progress = display.steps("summing up", missing.len() as u64, "rollouts");
    let mut ended = Vec::new();
    for rollout in missing {
        let id = &rollout.spec.id;
        // One damaged call must not hide all other rollouts.
        let (calls, damaged) = ledger
            .calls_intact(id)
            .map_err(|error| failed(run, error))?;
        let mut summary = Summary::of(&calls, selection);
        if let Some(error) = damaged.first() {
            summary.unreadable = Some(error.to_string());
        } else if rollout.disposition.is_some() {
            ended.push(id.clone());
        }
        summaries.insert(id.to_string(), summary);
        progress.advance("");
    }
    progress.done();
    if let Err(error) = keep(run, &ended, &summaries).await {
        tracing::info!(%error, "the summaries are not kept");
    }
    Ok(summaries)
}

async fn keep(
    run: &Path,
    ended: &[RolloutId],
    summaries: &HashMap<String, Summary>,
) -> Result<(), ledger::LedgerError> {
    if ended.is_empty() {
        return Ok(());
    }
    let ledger = Ledger::open(run)?;
    let puts = ended.iter().filter_map(|id| {
        let summary = summaries.get(id.as_str())?;
        Some(ledger.put_summary(id, summary))
    });
    // In one commit, more or less.
    let results = futures::future::join_all(puts).await;
    ledger.close().await?;
    results.into_iter().collect()
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

/// How the run trains; the defaults for a directory without recipe.
pub(super) fn train_settings(run: &Path) -> Result<TrainSettings, CliError> {
    Ok(recipe(run)?.map(|recipe| recipe.train).unwrap_or_default())
}

/// The recipe of the run; a directory that `serve` made has none.
fn recipe(run: &Path) -> Result<Option<Recipe>, CliError> {
    let file = run.join("run.toml");
    if !file.is_file() {
        return Ok(None);
    }
    Recipe::load(&file).map(Some)
}

/// Why there is not the one rollout.
enum Found {
    Error(ledger::LedgerError),
    NotOne(CliError),
}

/// The rollout of this name, or the only one whose name has this part.
fn one(ledger: &Ledger, name: &str) -> Result<Rollout, Found> {
    if let Ok(id) = RolloutId::new(name)
        && let Some(exact) = ledger.rollout(&id).map_err(Found::Error)?
    {
        return Ok(exact);
    }
    let rollouts = ledger.rollouts(&[]).map_err(Found::Error)?;
    find(&rollouts, name).cloned().map_err(Found::NotOne)
}

fn find<'a>(rollouts: &'a [Rollout], name: &str) -> Result<&'a Rollout, CliError> {
    let id = |rollout: &'a Rollout| -> &'a RolloutId { &rollout.spec.id };
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
