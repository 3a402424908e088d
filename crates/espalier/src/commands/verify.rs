//! `espalier verify`: another verifier's word on the end states of a run.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::Arc,
};

use bench::{Pair, Rescored};
use futures::{StreamExt, stream};
use ledger::Ledger;
use record::{Rollout, Verdict};
use sandbox::LocalProvider;
use serde_json::json;
use task::{Contract, Mix, Split, Task};
use verify::{Told, Transcript, World, judge::Panel, rescore};

use crate::{display::Display, error::CliError, recipe::Recipe, run_dir::RunDir, teacher};

/// End states that are scored at once.
const CONCURRENCY: usize = 4;
/// The folder of a run with other verifiers' verdicts.
const VERDICTS: &str = "verdicts";

/// Score the rollouts of a run again, by another verifier. Nothing of them runs again.
///
/// The workspaces that the run kept (`rollout.world_bytes_max`; `eval` keeps them by default) are
/// put into fresh sandboxes. What the other verifier says is kept beside the first one's word, in
/// `verdicts/NAME.jsonl`, with how far the two agree in NAME.md and NAME.json. A rollout without a
/// kept workspace is named with the reason.
///
/// Example: espalier verify runs/eval --verifier my-stricter-tasks --name strict
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The run directory.
    run: PathBuf,
    /// Whose verifiers: a source of tasks with the same ids, or `own`, `code` (the tasks' own code
    /// alone), `judge` (their rubrics alone).
    #[arg(long, value_name = "OTHER")]
    verifier: String,
    /// What its verdicts are called [default: the last part of OTHER].
    #[arg(long)]
    name: Option<String>,
    /// Recipe whose `[verify.judge]` names the judges, instead of the run's own.
    #[arg(long, value_name = "RECIPE")]
    judges: Option<PathBuf>,
}

/// Why a rollout has no second verdict.
type Skipped = (String, String);

/// Runs the command.
pub(crate) async fn run(arguments: Arguments, json: bool) -> Result<(), CliError> {
    let display = Display::new(json);
    let (cancel, _watcher) = super::interrupts();
    let (dir, recipe) = RunDir::resume(&arguments.run)?;
    let panel = match &arguments.judges {
        Some(path) => Recipe::load(path)?.verify.panel()?,
        None => recipe.verify.panel()?,
    };
    let own = own_tasks(&recipe);
    let others = others(&arguments.verifier, &own)?;
    let name = arguments
        .name
        .clone()
        .unwrap_or_else(|| last_part(&arguments.verifier));
    let file = dir.path.join(VERDICTS).join(format!("{name}.jsonl"));
    if file.exists() {
        return Err(CliError::usage(
            format!("{} exists already", file.display()),
            "nothing is overwritten: choose another --name",
        ));
    }
    let ledger = Ledger::open_read_only(&dir.path)
        .map_err(|error| CliError::failed("the run's ledger", error))?;
    let rollouts: Vec<Rollout> = ledger
        .rollouts(&[])
        .map_err(|error| CliError::failed("the run's rollouts", error))?
        .into_iter()
        .filter(|rollout| rollout.verdict.is_some())
        .collect();
    let provider = LocalProvider::start(sandbox::LocalConfig::default())
        .await
        .map_err(|error| {
            CliError::failed(
                "sandboxes cannot be made here; `espalier doctor` says more",
                error,
            )
        })?;
    let again = Again {
        dir: &dir,
        ledger: &ledger,
        provider: &provider,
        panel: panel.as_deref(),
        others: &others,
    };
    let progress = display.steps("verify", rollouts.len() as u64, "rollouts");
    let work = stream::iter(&rollouts)
        .map(|rollout| again.score(rollout))
        .buffered(CONCURRENCY)
        .inspect(|_| progress.advance(""))
        .collect::<Vec<_>>();
    let scored = tokio::select! {
        scored = work => Some(scored),
        () = cancel.cancelled() => None,
    };
    progress.done();
    provider.close().await;
    let Some(scored) = scored else {
        return Err(CliError::Interrupted {
            resume: "nothing was written".to_owned(),
        });
    };
    let passes = |tasks: &HashMap<String, Arc<Task>>, rollout: &Rollout, reward: f64| {
        let task = tasks.get(rollout.spec.task.as_str());
        reward >= task.map_or(1.0, |task| task.grading.pass_at)
    };
    let (mut pairs, mut skipped) = (Vec::new(), BTreeMap::<String, Vec<String>>::new());
    let mut lines = String::new();
    for (rollout, result) in rollouts.iter().zip(scored) {
        let before = rollout.verdict.as_ref().map_or(0.0, |found| found.reward);
        let id = rollout.spec.id.to_string();
        let line = match result {
            Ok(verdict) => {
                pairs.push(Pair {
                    rollout: id.clone(),
                    before,
                    after: verdict.reward,
                    before_passed: passes(&own, rollout, before),
                    after_passed: passes(&others, rollout, verdict.reward),
                });
                json!({"rollout": id, "task": rollout.spec.task, "before": before, "verdict": verdict})
            }
            Err((kind, reason)) => {
                let line = json!({"rollout": id, "task": rollout.spec.task, "before": before,
                    "skipped": kind, "reason": reason});
                skipped.entry(kind).or_default().push(id);
                line
            }
        };
        lines.push_str(&format!("{line}\n"));
    }
    let found = Rescored::of(&pairs);
    let page = found.document(("the run's verifier", &name));
    let counts: BTreeMap<&String, usize> = skipped
        .iter()
        .map(|(kind, ids)| (kind, ids.len()))
        .collect();
    let value = json!({"name": name, "verifier": arguments.verifier, "agreement": found, "skipped": counts});
    std::fs::create_dir_all(dir.path.join(VERDICTS))
        .map_err(|error| CliError::failed(file.display().to_string(), error))?;
    let pretty = serde_json::to_string_pretty(&value)
        .map_err(|error| CliError::failed("the agreement", error))?;
    for (end, text) in [
        ("md", page.to_markdown()),
        ("json", pretty),
        ("jsonl", lines),
    ] {
        dir.write(&format!("{VERDICTS}/{name}.{end}"), text.as_bytes())?;
    }
    display.line(page.to_markdown().trim_end());
    for (kind, ids) in &skipped {
        let example = ids.first().map_or("", String::as_str);
        display.line(&format!("{} not scored: {kind}, e.g. {example}", ids.len()));
    }
    display.line(&format!("kept in {}", file.display()));
    display.json(&value);
    if pairs.is_empty() && !rollouts.is_empty() {
        return Err(CliError::plain(
            "no rollout could be scored again",
            "runs keep workspaces when `rollout.world_bytes_max` is above 0; the reasons are above",
        ));
    }
    Ok(())
}

fn last_part(verifier: &str) -> String {
    let name = Path::new(verifier)
        .file_stem()
        .map_or_else(|| "other".into(), |name| name.to_string_lossy());
    name.chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || "._-".contains(c) {
                c
            } else {
                '-'
            }
        })
        .collect()
}

/// The tasks that a run's rollouts were about, by id, as far as its sources are still there.
fn own_tasks(recipe: &Recipe) -> HashMap<String, Arc<Task>> {
    let mut found = HashMap::new();
    let sources = [
        (&recipe.tasks.train, Split::Train),
        (&recipe.tasks.held_out, Split::HeldOut),
        (&recipe.sft.tasks, Split::Train),
    ];
    for (source, split) in sources {
        match teacher::load_tasks(source, split) {
            Ok(tasks) => found.extend(
                tasks
                    .into_iter()
                    .map(|task| (task.id.to_string(), recipe.verify.mixed(task))),
            ),
            Err(error) => tracing::warn!(%source, %error, "tasks of the run cannot be read"),
        }
    }
    found
}

/// The tasks of the other verifier, by id.
fn others(
    verifier: &str,
    own: &HashMap<String, Arc<Task>>,
) -> Result<HashMap<String, Arc<Task>>, CliError> {
    let with = |keep: fn(&Task) -> bool, mix: Mix| {
        own.iter()
            .filter(|(_, task)| keep(task))
            .map(|(id, task)| {
                let mut task = (**task).clone();
                task.grading.mix = mix;
                (id.clone(), Arc::new(task))
            })
            .collect()
    };
    Ok(match verifier {
        "own" => own.clone(),
        "code" => with(|task| task.verifier.contract != Contract::None, Mix::Code),
        "judge" => with(|task| task.grading.rubric.is_some(), Mix::Judge),
        source => {
            let mut found = HashMap::new();
            for split in [Split::Train, Split::HeldOut] {
                let tasks = task::load(source, split)
                    .map_err(|error| CliError::failed(format!("--verifier {source}"), error))?;
                let named = tasks.into_iter();
                found.extend(named.map(|task| (task.id.to_string(), Arc::new(task))));
            }
            found
        }
    })
}

/// Everything that scoring again needs.
struct Again<'a> {
    dir: &'a RunDir,
    ledger: &'a Ledger,
    provider: &'a LocalProvider,
    panel: Option<&'a Panel>,
    others: &'a HashMap<String, Arc<Task>>,
}

impl Again<'_> {
    async fn score(&self, rollout: &Rollout) -> Result<Verdict, Skipped> {
        let skip = |kind: &str, reason: String| (kind.to_owned(), reason);
        let id = &rollout.spec.id;
        let Some(task) = self.others.get(rollout.spec.task.as_str()) else {
            let reason = format!("the other verifier has no task {}", rollout.spec.task);
            return Err(skip("no such task", reason));
        };
        if !task.environment.stages.is_empty() {
            let reason = "its steps were scored one after the other, and one end state is kept";
            return Err(skip("a task in steps", reason.to_owned()));
        }
        let worlds = self.dir.worlds();
        let file = worlds.join(rollout::world_file(id));
        if !file.exists() {
            let why = std::fs::read_to_string(worlds.join(rollout::not_kept_file(id)));
            let why = why.unwrap_or_else(|_| "the run kept no workspaces".to_owned());
            return Err(skip("its workspace is not kept", why));
        }
        let (ledger, call_id) = (self.ledger.clone(), id.clone());
        let read = tokio::task::spawn_blocking(move || {
            let world = World::load(&file).map_err(|error| error.to_string())?;
            let calls = ledger.calls(&call_id).map_err(|error| error.to_string())?;
            Ok::<_, String>((world, Transcript::of(&calls)))
        });
        let (world, transcript) = read
            .await
            .map_err(|error| skip("what is kept cannot be read", error.to_string()))?
            .map_err(|reason| skip("what is kept cannot be read", reason))?;
        let told = Told {
            transcript: Some(&transcript),
            panel: self.panel,
            audit: None,
        };
        rescore(task, &world, self.provider, told)
            .await
            .map_err(|error| {
                let fault = serde_json::to_value(error.fault()).unwrap_or_default();
                skip(fault.as_str().unwrap_or("fault"), error.to_string())
            })
    }
}
