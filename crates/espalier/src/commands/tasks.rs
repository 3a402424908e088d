//! `espalier tasks`: check a task set before it is used, and write the built-in one to disk.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use futures::{StreamExt, stream};
use sandbox::LocalProvider;
use serde_json::{Map, Value, json};
use task::{Split, Task};
use tokio_util::sync::CancellationToken;
use verify::{Gates, VerifyError};

use crate::{display::Display, error::CliError, text::table};

/// Tasks that are tried out at once.
const CONCURRENCY: usize = 4;
/// Tasks that are named in the terminal; JSON names all.
const SHOWN_MAX: usize = 20;

/// Check tasks, or write the built-in ones to disk.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Read tasks and try each out in sandboxes: doing nothing must score 0, the reference
    /// solution 1, the verifier must agree with itself and pay for no trick, and the initial
    /// files must not hold the answer. With --json: one object per task, a line each, and a
    /// summary as the last line.
    ///
    /// Example: espalier tasks check my-tasks
    Check {
        /// A folder or file of tasks in any format of docs/tasks.md, `chores`, or
        /// `chores:FILE.toml`.
        source: String,
        /// Only read the tasks; run nothing.
        #[arg(long)]
        parse_only: bool,
        /// Only the score of doing nothing, once per task: whole sets in minutes.
        #[arg(long, conflicts_with = "parse_only")]
        no_op_only: bool,
        /// Another set, e.g. the one that was trained on: say which tasks are in it too, or near
        /// one of its tasks.
        #[arg(long, value_name = "SOURCE")]
        against: Option<String>,
    },
    /// Write tasks as folders in our format, to read, change and use as your own.
    ///
    /// Example: espalier tasks write chores --out my-tasks
    Write {
        /// What to write, e.g. `chores`.
        source: String,
        /// New folder; gets `train/` and `held-out/`.
        #[arg(long)]
        out: PathBuf,
    },
}

/// Runs the command.
pub(crate) async fn run(arguments: Arguments, json: bool) -> Result<(), CliError> {
    let display = Display::new(json);
    match arguments.action {
        Action::Check {
            source,
            parse_only,
            no_op_only,
            against,
        } => {
            let depth = match (parse_only, no_op_only) {
                (true, _) => Depth::Parse,
                (_, true) => Depth::NoOp,
                _ => Depth::All,
            };
            check(&source, depth, against.as_deref(), &display).await
        }
        Action::Write { source, out } => write(&source, &out, &display),
    }
}

/// Both splits of a source; one when it has no splits.
fn load(source: &str) -> Result<Vec<(Split, Vec<Task>)>, CliError> {
    let of = |split| {
        task::load(source, split)
            .map_err(|error| CliError::failed(format!("tasks {source}"), error))
    };
    let (train, held_out) = (of(Split::Train)?, of(Split::HeldOut)?);
    // A folder without splits gives the same tasks for both.
    let same = train
        .iter()
        .map(|task| &task.digest)
        .eq(held_out.iter().map(|task| &task.digest));
    let mut splits = vec![(Split::Train, train)];
    if !same {
        splits.push((Split::HeldOut, held_out));
    }
    Ok(splits)
}

/// How far tasks are tried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Depth {
    Parse,
    NoOp,
    All,
}

/// What became of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    /// All gates are open.
    Admitted,
    /// Nothing speaks against it, but without a reference solution nothing proves that it can be
    /// solved.
    Unproven,
    /// It can be read; nothing was run.
    Read,
    /// It is scored by a judge, who is not asked here.
    Judged,
    /// It cannot be run here, and says why.
    NotHere,
    /// Must not be used.
    Refused,
    /// Cannot even be read.
    Unreadable,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::Unproven => "unproven",
            Self::Read => "read",
            Self::Judged => "judged",
            Self::NotHere => "not_here",
            Self::Refused => "refused",
            Self::Unreadable => "unreadable",
        }
    }

    /// Whether such a task must not be in a set that is used.
    fn bad(self) -> bool {
        matches!(self, Self::Refused | Self::Unreadable)
    }
}

/// One task's line.
#[derive(Debug, Clone)]
struct Report {
    id: String,
    state: State,
    why: String,
    json: Value,
}

fn gate(why: Option<&str>) -> Value {
    match why {
        None => json!({"pass": true}),
        Some(why) => json!({"pass": false, "reason": why}),
    }
}

impl Report {
    fn new(id: &str, format: &str, state: State, gates: &[(&str, Option<String>)]) -> Self {
        let why: Vec<&str> = gates.iter().filter_map(|(_, why)| why.as_deref()).collect();
        let map: Map<String, Value> = gates
            .iter()
            .map(|(name, why)| ((*name).to_owned(), gate(why.as_deref())))
            .collect();
        Self {
            id: id.to_owned(),
            state,
            why: why.join("; "),
            json: json!({"id": id, "format": format, "state": state.name(), "gates": map}),
        }
    }

    fn unreadable(place: &Path, error: &task::TaskError) -> Self {
        let id = place.to_string_lossy();
        Self::new(
            &id,
            "unknown",
            State::Unreadable,
            &[("parses", Some(error.to_string()))],
        )
    }

    fn read(task: &Task) -> Self {
        let format = task.format.name();
        Self::new(task.id.as_str(), format, State::Read, &[("parses", None)])
    }

    fn tried(task: &Task, gates: &Gates) -> Self {
        let mut each = vec![("parses", None)];
        each.extend(gates.each());
        let against = each
            .iter()
            .filter(|(name, why)| why.is_some() && *name != "solution")
            .count();
        let state = if gates.admitted() {
            State::Admitted
        } else if gates.solution.is_empty() && against == 0 {
            State::Unproven
        } else {
            State::Refused
        };
        let mut report = Self::new(task.id.as_str(), task.format.name(), state, &each);
        report.json["no_op"] = gates.no_op.into();
        report.json["seconds"] = gates.seconds.into();
        report.json["bytes"] = gates.bytes.into();
        report.json["tricks"] = json!(gates.probes);
        report
    }

    fn idle(task: &Task, score: f64, seconds: f64) -> Self {
        let why = (score != 0.0).then(|| format!("doing nothing scores {score}, not 0"));
        let state = if why.is_some() {
            State::Refused
        } else {
            State::Unproven
        };
        let gates = [("parses", None), ("no_op", why)];
        let mut report = Self::new(task.id.as_str(), task.format.name(), state, &gates);
        report.json["no_op"] = score.into();
        report.json["seconds"] = seconds.into();
        report
    }

    fn failed(task: &Task, error: &VerifyError) -> Self {
        let (state, name) = match error {
            VerifyError::Refused { .. } => (State::NotHere, "environment"),
            VerifyError::NoJudge { .. } => (State::Judged, "judge"),
            _ => (State::Refused, "runs"),
        };
        let gates = [("parses", None), (name, Some(error.to_string()))];
        Self::new(task.id.as_str(), task.format.name(), state, &gates)
    }
}

/// Every task of a source, or what is wrong with it.
fn each(source: &str) -> Result<Vec<task::Found>, CliError> {
    let path = Path::new(source);
    if !path.exists() {
        let tasks = load(source)?.into_iter().flat_map(|(_, tasks)| tasks);
        return Ok(tasks
            .map(|task| (PathBuf::from(source), Ok(task)))
            .collect());
    }
    let mut found = Vec::new();
    let splits: Vec<PathBuf> = [Split::Train, Split::HeldOut]
        .iter()
        .map(|split| path.join(split.name()))
        .filter(|folder| folder.is_dir())
        .collect();
    let folders = if splits.is_empty() {
        vec![path.to_path_buf()]
    } else {
        splits
    };
    for folder in folders {
        let tasks = task::load_each(&folder)
            .map_err(|error| CliError::failed(format!("tasks {source}"), error))?;
        found.extend(tasks);
    }
    Ok(found)
}

/// A set against another one: what is in both.
fn contamination(
    tasks: &[Task],
    against: &str,
    display: &Display,
) -> Result<bench::Contamination, CliError> {
    let other = each(against)?;
    let mut compared = Vec::new();
    for (place, task) in other {
        let task = task.map_err(|error| CliError::failed(place.display().to_string(), error))?;
        compared.push(super::eval::compared(&task));
    }
    let measured: Vec<bench::Compared> = tasks.iter().map(super::eval::compared).collect();
    let found = bench::Contamination::of(&measured, &compared, against);
    display.line(&found.sentence());
    for one in found.found.iter().take(SHOWN_MAX) {
        let what = match (one.same_task, one.same_words) {
            (true, _) => "is the same task as",
            (false, true) => "has the words of",
            (false, false) => "is near",
        };
        display.line(&format!(
            "{} {what} {}: {:.0} % of its runs of words, {} shared files",
            one.task,
            one.other,
            100.0 * one.share,
            one.files
        ));
    }
    Ok(found)
}

async fn check(
    source: &str,
    depth: Depth,
    against: Option<&str>,
    display: &Display,
) -> Result<(), CliError> {
    let found = each(source)?;
    let (mut tasks, mut reports) = (Vec::new(), Vec::new());
    for (place, task) in found {
        match task {
            Ok(task) => tasks.push(task),
            Err(error) => reports.push(Report::unreadable(&place, &error)),
        }
    }
    let (read, families) = (tasks.len(), families(&tasks));
    display.line(&format!("{read} tasks in {families} families can be read"));
    let contamination = against
        .map(|against| contamination(&tasks, against, display))
        .transpose()?;
    if depth == Depth::Parse {
        reports.extend(tasks.iter().map(Report::read));
    } else {
        reports.extend(try_out(&tasks, depth, display).await?);
    }
    reports.sort_by(|a, b| a.id.cmp(&b.id));
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for report in &reports {
        *counts.entry(report.state.name()).or_default() += 1;
        display.json(&report.json);
    }
    display.json(&json!({
        "summary": true, "tasks": reports.len(), "read": read, "families": families, "counts": counts,
        "contamination": contamination,
    }));
    let rows: Vec<Vec<String>> = counts
        .iter()
        .map(|(name, count)| vec![(*name).to_owned(), count.to_string()])
        .collect();
    display.line(table(&["gates", "tasks"], &rows).trim_end());
    let named = |state: State| matches!(state, State::Refused | State::Unreadable | State::NotHere);
    for report in reports
        .iter()
        .filter(|report| named(report.state))
        .take(SHOWN_MAX)
    {
        display.line(&format!(
            "{} {}: {}",
            report.state.name(),
            report.id,
            report.why
        ));
    }
    if depth == Depth::All && counts.contains_key("unproven") {
        display.line(
            "unproven: no reference solution says that the task can be solved; add a solution.toml",
        );
    }
    if counts.contains_key("judged") {
        display.line("judged: a rubric scores it, and no judge is asked here");
    }
    match reports.iter().filter(|report| report.state.bad()).count() {
        0 => Ok(()),
        bad => Err(CliError::plain(
            format!("{bad} of {} tasks must not be used", reports.len()),
            "a reward from such a task is noise: correct it, or take it out (--json names all)",
        )),
    }
}

fn families(tasks: &[Task]) -> usize {
    tasks
        .iter()
        .map(|task| &task.family)
        .collect::<std::collections::BTreeSet<_>>()
        .len()
}

async fn try_out(tasks: &[Task], depth: Depth, display: &Display) -> Result<Vec<Report>, CliError> {
    let provider = LocalProvider::start(sandbox::LocalConfig::default())
        .await
        .map_err(|error| {
            CliError::failed(
                "sandboxes cannot be made here; `espalier doctor` says more",
                error,
            )
        })?;
    let provider = Arc::new(provider);
    let (cancel, _watcher) = super::interrupts();
    let progress = display.steps("gates", tasks.len() as u64, "tasks");
    let tried = stream::iter(tasks)
        .map(|task| {
            let provider = Arc::clone(&provider);
            async move {
                let report = if depth == Depth::NoOp {
                    verify::no_op(task, provider.as_ref())
                        .await
                        .map(|(score, seconds)| Report::idle(task, score, seconds))
                } else {
                    verify::admit(task, provider.as_ref())
                        .await
                        .map(|gates| Report::tried(task, &gates))
                };
                report.unwrap_or_else(|error| Report::failed(task, &error))
            }
        })
        .buffer_unordered(CONCURRENCY)
        .inspect(|_| progress.advance(""))
        .collect::<Vec<_>>();
    let reports = unless(&cancel, tried).await;
    progress.done();
    if let Some(provider) = Arc::into_inner(provider) {
        provider.close().await;
    }
    reports
}

/// The future's result; dropping it on Ctrl-C destroys its sandboxes.
async fn unless<T>(
    cancel: &CancellationToken,
    work: impl Future<Output = T>,
) -> Result<T, CliError> {
    tokio::select! {
        done = work => Ok(done),
        () = cancel.cancelled() => {
            Err(CliError::Interrupted { resume: "nothing was changed".to_owned() })
        }
    }
}

fn write(source: &str, out: &std::path::Path, display: &Display) -> Result<(), CliError> {
    if out.exists() {
        return Err(CliError::usage(
            format!("{} exists already", out.display()),
            "nothing is overwritten: name a folder that is not there yet",
        ));
    }
    let splits = load(source)?;
    let mut written = 0;
    for (split, tasks) in &splits {
        for task in tasks {
            let folder = if splits.len() == 1 {
                out.to_owned()
            } else {
                out.join(split.name())
            };
            task::write_dir(task, &folder.join(task.id.as_str()))
                .map_err(|error| CliError::failed(format!("task {}", task.id), error))?;
            written += 1;
        }
    }
    display.line(&format!("{written} tasks are in {}", out.display()));
    display.json(&serde_json::json!({"tasks": written, "out": out}));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(no_op: f64, solution: &[f64], deterministic: bool, trick: f64) -> State {
        let gates = Gates {
            no_op,
            solution: solution.to_vec(),
            deterministic,
            probes: BTreeMap::from([("reward-file", trick)]),
            leaks: Vec::new(),
            missing: Vec::new(),
            seconds: 0.1,
            bytes: 1,
        };
        let settings = task::chores::Settings::built_in()
            .map(|settings| task::chores::generate_with(&settings, Split::Train).swap_remove(0));
        settings.map_or(State::Unreadable, |task| Report::tried(&task, &gates).state)
    }

    #[test]
    fn only_what_is_proven_is_admitted() {
        assert_eq!(state(0.0, &[1.0; 3], true, 0.0), State::Admitted);
        assert_eq!(state(0.0, &[], true, 0.0), State::Unproven);
        assert_eq!(state(0.5, &[], true, 0.5), State::Refused);
        assert_eq!(state(0.0, &[], false, 0.0), State::Refused);
        assert_eq!(state(0.0, &[1.0, 0.0], false, 0.0), State::Refused);
        assert_eq!(state(0.0, &[1.0; 3], true, 1.0), State::Refused);
    }

    #[test]
    fn a_line_names_each_gate() {
        let report = Report::new(
            "a",
            "own",
            State::Refused,
            &[
                ("parses", None),
                ("no_op", Some("doing nothing scores 1, not 0".into())),
            ],
        );
        assert_eq!(report.json["gates"]["parses"]["pass"], true);
        assert_eq!(
            report.json["gates"]["no_op"]["reason"],
            "doing nothing scores 1, not 0"
        );
        assert_eq!(report.why, "doing nothing scores 1, not 0");
    }
}
