//! `espalier export`: a run's rollouts in the formats of other programs. Reads only, also while the
//! run goes on.

mod picked;
mod summary;
mod writer;

use std::path::PathBuf;

use clap::{ValueEnum, builder::PossibleValuesParser};
use export::{Rule, Source};
use ledger::{Ledger, LedgerError};
use tree::Selection;

use crate::{display::Display, error::CliError};
use picked::{Picked, Wanted};
use summary::Summary;
use writer::Writer;

/// Write a run's rollouts in a format that other programs read.
///
/// What is written, what is not and why is printed, in rollouts and tokens. Rollouts of
/// evaluations are written only with --split. A file that exists is replaced when the new one is
/// complete, not before.
///
/// Example: espalier export runs/quickstart --format rows --out rows.parquet --parquet
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The run directory.
    run: PathBuf,
    /// The format; docs/trees.md says what each holds and how to read it.
    #[arg(long, value_enum)]
    format: Format,
    /// The file; for atif the folder, which gets one file per rollout.
    #[arg(long)]
    out: PathBuf,
    /// Which branches are written as trained, instead of the run's own rule.
    #[arg(long, value_parser = PossibleValuesParser::new(tree::SELECTION_NAMES))]
    selection: Option<String>,
    /// A rollout with more kept leaves is left out (with --selection clawgym2 or clawgym2+aux).
    #[arg(long, default_value_t = tree::LEAVES_MAX)]
    leaves_max: usize,
    /// Only rollouts with at least this reward.
    #[arg(long)]
    reward_min: Option<f64>,
    /// Only rollouts of this split (label `split`), e.g. train or eval-after.
    #[arg(long)]
    split: Option<String>,
    /// Rows have at most so many tokens; longer branches end after a turn (rows and verl).
    #[arg(long)]
    tokens_max: Option<usize>,
    /// Parquet instead of JSON lines (rows, sft and messages; verl always is).
    #[arg(long)]
    parquet: bool,
    /// Write the ids of every prompt too (atif): the size grows with the square of the calls.
    #[arg(long)]
    prompt_ids: bool,
}

/// A format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// Trajectories of ATIF v1.8, one JSON file per rollout.
    Atif,
    /// Rows for veRL, Parquet.
    Verl,
    /// Token rows with masks and log-probabilities.
    Rows,
    /// Chats with a weight per turn: 1 where the policy generated it.
    Sft,
    /// OpenAI-style chats.
    Messages,
    /// Token captures, as `espalier tree` reads them.
    Captures,
}

impl Format {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Atif => "atif",
            Self::Verl => "verl",
            Self::Rows => "rows",
            Self::Sft => "sft",
            Self::Messages => "messages",
            Self::Captures => "captures",
        }
    }

    /// Whether it is for training: then only what the run's dispositions train is written. Else it
    /// is a record of what happened.
    pub(super) fn trains(self) -> bool {
        !matches!(self, Self::Atif | Self::Captures)
    }

    fn parquet(self, asked: bool) -> Result<bool, CliError> {
        match self {
            Self::Verl => Ok(true),
            Self::Rows | Self::Sft | Self::Messages => Ok(asked),
            Self::Atif | Self::Captures if asked => Err(CliError::usage(
                format!("--parquet does not go with --format {}", self.name()),
                "leave it out; rows, sft and messages can be Parquet, verl always is",
            )),
            Self::Atif | Self::Captures => Ok(false),
        }
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<(), CliError> {
    let display = Display::new(json);
    let parquet = arguments.format.parquet(arguments.parquet)?;
    let failed = |error| CliError::failed(format!("run {}", arguments.run.display()), error);
    let ledger = Ledger::open_read_only(&arguments.run).map_err(failed)?;
    let train = super::inspect::train_settings(&arguments.run)?;
    let selection = match &arguments.selection {
        None => train.selection.clone(),
        Some(name) => Selection::named(name, arguments.leaves_max).unwrap_or_default(),
    };
    let rule = Rule::new(selection, arguments.tokens_max);
    let rollouts = ledger.rollouts(&[]).map_err(failed)?;
    let wanted = Wanted {
        trained: arguments.format.trains(),
        split: arguments.split.as_deref(),
        reward_min: arguments.reward_min,
    };
    let mut summary = Summary::new(arguments.format.name(), &rule.name);
    let picked = picked::pick(&rollouts, &wanted, &train, &mut summary);
    let mut writer = Writer::create(arguments, parquet, &rule.name)?;
    let progress = display.steps("export", picked.len() as u64, "rollouts");
    for Picked {
        rollout,
        advantage,
        session,
    } in picked
    {
        progress.advance("");
        let id = &rollout.spec.id;
        let calls = match ledger.calls(id) {
            Ok(calls) => calls,
            // One broken record does not keep the rest from being read.
            Err(error @ LedgerError::Damaged { .. }) => {
                tracing::warn!(rollout = %id, %error, "a rollout is left out");
                summary.skip("damaged in the ledger");
                continue;
            }
            Err(error) => return Err(failed(error)),
        };
        if calls.is_empty() {
            summary.skip("no calls");
            continue;
        }
        let source = match Source::new(rollout, &calls, &rule, advantage) {
            Ok(source) => source,
            Err(error) => {
                tracing::warn!(rollout = %id, %error, "a rollout is left out");
                summary.skip("no tree (too many nodes, or calls that contradict each other)");
                continue;
            }
        };
        if arguments.format.trains() && source.kept.discarded.is_some() {
            summary.over_branched(&source);
            continue;
        }
        match writer.write(&source, session)? {
            Ok(lines) => summary.wrote(&source, lines),
            Err(reason) => summary.skip(reason),
        }
    }
    progress.done();
    summary.bytes = writer.finish()?;
    let value = serde_json::to_value(&summary)
        .map_err(|error| CliError::failed("the answer as JSON", error))?;
    display.json(&value);
    display.line(summary.text(&arguments.out).trim_end());
    Ok(())
}
