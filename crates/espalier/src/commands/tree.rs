//! `espalier tree`: prefix trees from captures of other gateways.

use std::{
    fs::File,
    io::{BufRead, BufReader, BufWriter, Write},
    path::{Path, PathBuf},
};

use clap::builder::PossibleValuesParser;
use export::report::{Grown, Report};
use tree::Selection;

use crate::{
    display::Display,
    error::CliError,
    text::{count, table},
};

/// Rebuild prefix trees from token captures that you already have.
///
/// One call per line: {"rollout": str, "call": int, "prompt_ids": [int], "output_ids": [int],
/// "logprobs": [float], "finish": "stop"|"length"|"tool_calls", "at": seconds, "delivered"?: bool,
/// "class"?: "main"|"subagent"|"compaction"|"side"}
///
/// Example: espalier tree captures.jsonl --policy clawgym2 --rows rows.jsonl
#[derive(Debug, clap::Args)]
#[allow(
    rustdoc::broken_intra_doc_links,
    reason = "the brackets are JSON, shown as they are by --help"
)]
pub(crate) struct Arguments {
    /// The captures, JSON lines; - reads standard input.
    captures: PathBuf,
    /// Which branches are trained.
    #[arg(long, default_value = "clawgym2", value_parser = PossibleValuesParser::new(tree::SELECTION_NAMES))]
    policy: String,
    /// A rollout with more kept leaves is discarded (clawgym2 only).
    #[arg(long, default_value_t = tree::LEAVES_MAX)]
    leaves_max: usize,
    /// Rows have at most so many tokens; longer branches are cut after a turn.
    #[arg(long)]
    tokens_max: Option<usize>,
    /// Write the training rows to this file, JSON lines.
    #[arg(long)]
    rows: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<(), CliError> {
    let display = Display::new(json);
    let selection = Selection::named(&arguments.policy, arguments.leaves_max).ok_or_else(|| {
        CliError::usage(
            format!("there is no policy {:?}", arguments.policy),
            format!("policies are {}", tree::SELECTION_NAMES.join(", ")),
        )
    })?;
    let file = &arguments.captures;
    let name = file.display();
    let captured = export::read(open(file)?)
        .map_err(|error| CliError::failed(format!("captures {name}"), error))?;
    let mut rows = arguments.rows.as_deref().map(create).transpose()?;
    let mut reports = Vec::new();
    let progress = display.steps("trees", captured.len() as u64, "rollouts");
    // One rollout at a time: its calls are dropped when its report is written.
    for captured in captured {
        let failed = |error| {
            CliError::failed(
                format!("captures {name}: rollout {:?}", captured.rollout),
                error,
            )
        };
        let grown = export::report(&captured, &selection, arguments.tokens_max).map_err(failed)?;
        if let (Some(out), Some(path)) = (&mut rows, &arguments.rows) {
            export::write_rows(out, &captured.rollout, None, None, &grown.rows)
                .map_err(|error| unwritable(path, error))?;
        }
        let Grown { report, .. } = grown;
        let value = serde_json::to_value(&report)
            .map_err(|error| CliError::failed("the answer as JSON", error))?;
        display.json(&value);
        reports.push(report);
        progress.advance("");
    }
    progress.done();
    if let (Some(mut out), Some(path)) = (rows, &arguments.rows) {
        out.flush().map_err(|error| unwritable(path, error))?;
    }
    display.line(text(&reports).trim_end());
    Ok(())
}

fn open(file: &Path) -> Result<Box<dyn BufRead>, CliError> {
    if file.as_os_str() == "-" {
        return Ok(Box::new(BufReader::new(std::io::stdin())));
    }
    let opened = File::open(file)
        .map_err(|error| CliError::failed(format!("captures {}", file.display()), error))?;
    Ok(Box::new(BufReader::with_capacity(1 << 20, opened)))
}

fn create(path: &Path) -> Result<BufWriter<File>, CliError> {
    let file = File::create(path).map_err(|error| unwritable(path, error))?;
    Ok(BufWriter::new(file))
}

fn unwritable(path: &Path, error: std::io::Error) -> CliError {
    CliError::failed(format!("{} could not be written", path.display()), error)
}

fn text(reports: &[Report]) -> String {
    let number = |number: usize| count(number as u64);
    let rows: Vec<Vec<String>> = reports
        .iter()
        .map(|report| {
            let forks: Vec<String> = report
                .forks
                .iter()
                .map(|(cause, forks)| format!("{cause} {forks}"))
                .collect();
            vec![
                report.rollout.clone(),
                number(report.calls),
                number(report.nodes),
                number(report.leaves),
                number(report.unique_tokens),
                number(report.generated_tokens),
                number(report.kept_generated_tokens),
                number(report.rows),
                report.disposition.to_owned(),
                forks.join(", "),
            ]
        })
        .collect();
    table(
        &[
            "rollout",
            "calls",
            "nodes",
            "leaves",
            "unique",
            "generated",
            "kept",
            "rows",
            "disposition",
            "forks",
        ],
        &rows,
    )
}
