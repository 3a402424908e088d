//! `espalier tree`: prefix trees from captures of other gateways.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
};

use clap::builder::PossibleValuesParser;
use export::{
    Facts,
    report::{Grown, Report},
    row_lines,
    svg::{Caption, draw},
    write_lines,
};
use tree::Selection;

use crate::{
    atomic::{AtomicFile, unwritable},
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
    /// Draw every tree into this folder, one SVG file per rollout.
    #[arg(long)]
    svg: Option<PathBuf>,
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
    let mut rows = arguments
        .rows
        .as_deref()
        .map(AtomicFile::create)
        .transpose()?;
    let mut reports = Vec::new();
    let progress = display.steps("trees", captured.len() as u64, "rollouts");
    // One rollout at a time: its calls are dropped when its report is written.
    for (number, captured) in captured.into_iter().enumerate() {
        let failed = |error| {
            CliError::failed(
                format!("captures {name}: rollout {:?}", captured.rollout),
                error,
            )
        };
        let grown = export::report(&captured, &selection, arguments.tokens_max).map_err(failed)?;
        if let (Some(out), Some(path)) = (&mut rows, &arguments.rows) {
            let facts = Facts {
                rollout: &captured.rollout,
                selection: Some(&arguments.policy),
                ..Facts::default()
            };
            write_lines(out, &row_lines(&grown.rows, facts))
                .map_err(|error| unwritable(path, error))?;
        }
        if let Some(folder) = &arguments.svg {
            let file = folder.join(file_name(number, &captured.rollout));
            AtomicFile::write_all_to(&file, drawing(&grown).as_bytes())?;
        }
        let Grown { report, .. } = grown;
        let value = serde_json::to_value(&report)
            .map_err(|error| CliError::failed("the answer as JSON", error))?;
        display.json(&value);
        reports.push(report);
        progress.advance("");
    }
    progress.done();
    if let Some(out) = rows {
        out.finish()?;
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

/// The drawing of a rollout.
fn drawing(grown: &Grown) -> String {
    let report = &grown.report;
    let number = |number: usize| count(number as u64);
    let caption = Caption {
        title: report.rollout.clone(),
        facts: vec![
            report.disposition.to_owned(),
            format!("{} calls", report.calls),
            format!("{} unique tokens", number(report.unique_tokens)),
            format!("{} generated", number(report.generated_tokens)),
            format!("{} trained", number(report.kept_generated_tokens)),
        ],
    };
    draw(&grown.tree, &grown.kept, &caption)
}

/// Names of other gateways are any text, file names are not: the number keeps them apart.
fn file_name(number: usize, rollout: &str) -> String {
    let safe = rollout.chars().map(|c| match c {
        c if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') => c,
        _ => '_',
    });
    let safe: String = safe.take(100).collect();
    format!("{number:04}-{safe}.svg")
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
