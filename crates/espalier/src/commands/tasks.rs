//! `espalier tasks`: check a task set before it is used, and write the built-in one to disk.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use futures::{StreamExt, stream};
use sandbox::LocalProvider;
use serde::Serialize;
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
    /// solution 1, and the verifier must agree with itself.
    ///
    /// Example: espalier tasks check my-tasks
    Check {
        /// A folder of tasks (ours or ClawGym's), `chores`, or `chores:FILE.toml`.
        source: String,
        /// Only read the tasks; run nothing.
        #[arg(long)]
        parse_only: bool,
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
        Action::Check { source, parse_only } => check(&source, parse_only, &display).await,
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

/// What became of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
enum State {
    /// All gates are open.
    Admitted,
    /// Nothing speaks against it, but without a reference solution nothing proves that it can be
    /// solved.
    Unproven,
    /// Must not be used.
    Refused { why: String },
}

impl State {
    fn of(gates: Result<&Gates, &VerifyError>) -> Self {
        match gates {
            Err(error) => Self::Refused {
                why: error.to_string(),
            },
            Ok(gates) if gates.admitted() => Self::Admitted,
            Ok(gates) if gates.solution.is_empty() && gates.no_op == 0.0 && gates.deterministic => {
                Self::Unproven
            }
            Ok(gates) => Self::Refused {
                why: gates.objections().join("; "),
            },
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::Unproven => "unproven",
            Self::Refused { .. } => "refused",
        }
    }
}

async fn check(source: &str, parse_only: bool, display: &Display) -> Result<(), CliError> {
    let splits = load(source)?;
    for (split, tasks) in &splits {
        let split = if splits.len() == 1 {
            "tasks"
        } else {
            split.name()
        };
        display.line(&format!(
            "{split}: {} tasks in {} families can be read",
            tasks.len(),
            families(tasks)
        ));
    }
    let tasks: Vec<Task> = splits.into_iter().flat_map(|(_, tasks)| tasks).collect();
    if parse_only {
        display.json(&serde_json::json!({"tasks": tasks.len()}));
        return Ok(());
    }
    let states = try_out(&tasks, display).await?;
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for state in states.values() {
        *counts.entry(state.name()).or_default() += 1;
    }
    display.json(&serde_json::json!({"tasks": states.len(), "counts": counts, "states": states}));
    let rows: Vec<Vec<String>> = counts
        .iter()
        .map(|(name, count)| vec![(*name).to_owned(), count.to_string()])
        .collect();
    display.line(table(&["gates", "tasks"], &rows).trim_end());
    let refused: Vec<(&String, &String)> = states
        .iter()
        .filter_map(|(id, state)| match state {
            State::Refused { why } => Some((id, why)),
            State::Admitted | State::Unproven => None,
        })
        .collect();
    for (id, why) in refused.iter().take(SHOWN_MAX) {
        display.line(&format!("refused {id}: {why}"));
    }
    if counts.contains_key("unproven") {
        display.line(
            "unproven: no reference solution says that the task can be solved; add a solution.toml",
        );
    }
    match refused.len() {
        0 => Ok(()),
        refused => Err(CliError::plain(
            format!("{refused} of {} tasks must not be used", states.len()),
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

async fn try_out(tasks: &[Task], display: &Display) -> Result<BTreeMap<String, State>, CliError> {
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
    let admitted = stream::iter(tasks)
        .map(|task| {
            let provider = Arc::clone(&provider);
            async move {
                let gates = verify::admit(task, provider.as_ref()).await;
                (task.id.to_string(), State::of(gates.as_ref()))
            }
        })
        .buffer_unordered(CONCURRENCY)
        .inspect(|_| progress.advance(""))
        .collect::<BTreeMap<_, _>>();
    let states = unless(&cancel, admitted).await;
    progress.done();
    if let Some(provider) = Arc::into_inner(provider) {
        provider.close().await;
    }
    states
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

    fn gates(no_op: f64, solution: &[f64], deterministic: bool) -> Gates {
        Gates {
            no_op,
            solution: solution.to_vec(),
            deterministic,
        }
    }

    #[test]
    fn only_what_is_proven_is_admitted() {
        let name = |gates: &Gates| State::of(Ok(gates)).name();
        assert_eq!(name(&gates(0.0, &[1.0; 3], true)), "admitted");
        assert_eq!(name(&gates(0.0, &[], true)), "unproven");
        assert_eq!(name(&gates(0.5, &[], true)), "refused");
        assert_eq!(name(&gates(0.0, &[], false)), "refused");
        assert_eq!(name(&gates(0.0, &[1.0, 0.0], false)), "refused");
    }
}
