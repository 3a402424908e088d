//! `espalier train`: reinforcement learning, step by step, resumable.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Instant,
};

use ledger::Ledger;
use model::forest;
use task::Split;

use crate::{
    chart,
    curriculum::Curriculum,
    display::Display,
    error::CliError,
    lab::Lab,
    policy,
    recipe::Recipe,
    run_dir::RunDir,
    score::{self, Evaluation},
    steps::{Record, StepMetrics, Steps, evaluation_due},
    summary::{AtStep, Evaluations, Summary, Sums, table},
    teacher,
    tensorboard::Events,
    trainer::Trainer,
    training::Harvest,
};

/// Train a policy with reinforcement learning through a harness.
///
/// Example: espalier train recipes/quickstart.toml --out runs/mine --seed 1
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The recipe. Not needed with --resume.
    recipe: Option<PathBuf>,
    /// Steps, instead of the recipe's.
    #[arg(long)]
    steps: Option<u64>,
    /// New run directory [default: runs/RECIPE-SEED].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Go on with the run in this directory.
    #[arg(long, conflicts_with_all = ["recipe", "out", "seed", "harness"])]
    resume: Option<PathBuf>,
    /// Seed, instead of the recipe's.
    #[arg(long)]
    seed: Option<u64>,
    /// Harness, instead of the recipe's; may be given several times.
    #[arg(long)]
    harness: Vec<String>,
}

struct Start {
    recipe: Recipe,
    dir: RunDir,
    ledger: Ledger,
    /// Newest checkpoint and its step, when resuming.
    checkpoint: Option<(PathBuf, u64)>,
}

fn start(arguments: Arguments) -> Result<Start, CliError> {
    let opened = |ledger: Result<Ledger, ledger::LedgerError>| {
        ledger.map_err(|error| CliError::failed("the run's ledger", error))
    };
    if let Some(path) = &arguments.resume {
        let (dir, mut recipe) = RunDir::resume(path)?;
        recipe.train.steps = arguments.steps.unwrap_or(recipe.train.steps);
        let ledger = opened(Ledger::open_with(&dir.path, recipe.ledger_options()?))?;
        let checkpoint = dir.newest_checkpoint();
        return Ok(Start {
            recipe,
            dir,
            ledger,
            checkpoint,
        });
    }
    let Some(path) = &arguments.recipe else {
        return Err(CliError::usage(
            "no recipe",
            "espalier train recipes/quickstart.toml, or --resume DIR",
        ));
    };
    let mut recipe = Recipe::load(path)?;
    recipe.seed = arguments.seed.unwrap_or(recipe.seed);
    recipe.train.steps = arguments.steps.unwrap_or(recipe.train.steps);
    if !arguments.harness.is_empty() {
        recipe.harnesses = arguments.harness;
    }
    let name = path
        .file_stem()
        .map_or_else(|| "run".into(), |stem| stem.to_string_lossy().into_owned());
    let out = arguments
        .out
        .unwrap_or_else(|| Path::new("runs").join(format!("{name}-{}", recipe.seed)));
    // Everything that can be wrong with the recipe is found before a directory is made.
    let codec = policy::load_codec(&recipe.policy.folder)?;
    policy::load_weights(&recipe.policy.folder, &codec)?;
    let dir = RunDir::create(&out, &recipe)?;
    let ledger = opened(Ledger::create_with(&dir.path, recipe.ledger_options()?))?;
    Ok(Start {
        recipe,
        dir,
        ledger,
        checkpoint: None,
    })
}

/// Runs the command.
pub(crate) async fn run(arguments: Arguments, json: bool) -> Result<(), CliError> {
    let began = Instant::now();
    let Start {
        recipe,
        dir,
        ledger,
        checkpoint,
    } = start(arguments)?;
    let display = Display::new(json);
    let (cancel, _watcher) = super::interrupts();
    let compute = forest::Settings {
        threads: recipe.policy.threads,
        device: policy::device(&recipe.policy)?,
        temperature: recipe.rollout.temperature,
        ..forest::Settings::default()
    };
    let codec = policy::load_codec(&recipe.policy.folder)?;
    let from = checkpoint.as_ref().map(|(folder, _)| folder.as_path());
    let (trainer, first_step) = Trainer::open(&recipe, &codec, from, compute)?;
    let engine =
        policy::start_engine(&recipe.policy, &codec, trainer.weights(), trainer.version())?;
    let train_tasks = teacher::load_tasks(&recipe.tasks.train, Split::Train)?;
    let held_out = teacher::load_tasks(&recipe.tasks.held_out, Split::HeldOut)?;
    let lab = Lab::open(&recipe, &dir, ledger, Arc::clone(&codec), engine.clone()).await?;
    display.line(&format!(
        "{} through {}: {} training tasks, {} held out, {} parameters, seed {}, {}",
        recipe.policy.folder.display(),
        lab.harness_names().join(" + "),
        train_tasks.len(),
        held_out.len(),
        trainer.weights().len(),
        recipe.seed,
        dir.path.display()
    ));
    let resume_hint = || CliError::Interrupted {
        resume: format!("go on with: espalier train --resume {}", dir.path.display()),
    };
    let mut sums = Sums::default();
    let mut curriculum = Curriculum::new(
        recipe.train.curriculum,
        recipe.train.mix.as_ref(),
        recipe.seed,
        recipe.train.samples,
        lab.harness_names(),
        &train_tasks,
    );
    for (step, harvest) in replay_metrics(&dir, first_step, &mut sums)? {
        curriculum.draw(step, recipe.train.tasks_per_step);
        curriculum.observe(&harvest.families);
    }
    let started = Instant::now();
    let before = evaluation(
        &lab,
        &recipe,
        &held_out,
        "eval-before",
        (0, first_step),
        &display,
        &cancel,
    )
    .await
    .map_err(|error| interrupted_as(error, resume_hint))?;
    sums.seconds.eval += started.elapsed().as_secs_f64();
    display.line(&format!("before: {}", one_line(&before)));
    let steps = recipe.train.steps;
    let during = async |at: u64, sums: &mut Sums| -> Result<(), CliError> {
        if !evaluation_due(&recipe, at) {
            return Ok(());
        }
        let started = Instant::now();
        let name = "eval-during";
        let found = evaluation(&lab, &recipe, &held_out, name, (at, at), &display, &cancel)
            .await
            .map_err(|error| interrupted_as(error, resume_hint))?;
        sums.seconds.eval += started.elapsed().as_secs_f64();
        let best = Trainer::note_score(&dir, at, found.sampled.pass_at_1)?;
        let mark = if best { ", the best so far" } else { "" };
        display.line(&format!("after step {at}: {}{mark}", one_line(&found)));
        Ok(())
    };
    // An interruption may have come between the checkpoint and its evaluation.
    during(first_step, &mut sums).await?;
    let all = Steps {
        recipe: &recipe,
        dir: &dir,
        lab: &lab,
        tasks: &train_tasks,
        engine: &engine,
        trainer: Arc::new(Mutex::new(trainer)),
        display: &display,
        cancel: &cancel,
    };
    let mut record = Record {
        sums: &mut sums,
        events: Events::create(&dir.path)?,
        made: 0,
        began: Instant::now(),
    };
    let cancelled = all
        .run(first_step, &mut curriculum, &mut record, during)
        .await?;
    drop(all);
    if cancelled {
        lab.close().await?;
        return Err(resume_hint());
    }
    let started = Instant::now();
    let after = evaluation(
        &lab,
        &recipe,
        &held_out,
        "eval-after",
        (steps, steps),
        &display,
        &cancel,
    )
    .await
    .map_err(|error| interrupted_as(error, resume_hint))?;
    sums.seconds.eval += started.elapsed().as_secs_f64();
    if recipe.eval.every > 0 {
        Trainer::note_score(&dir, steps, after.sampled.pass_at_1)?;
    }
    let during = evaluations_during(&lab.ledger, recipe.eval.every, steps)?;
    let versions = [
        ("espalier".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("codec".to_owned(), codec.digest().to_owned()),
    ];
    let summary = Summary {
        steps,
        wall_s: began.elapsed().as_secs_f64(),
        eval: Evaluations {
            before,
            during,
            after,
        },
        reward: sums.reward,
        dispositions: sums.dispositions,
        tokens: sums.tokens,
        forks: sums.forks,
        seconds: sums.seconds,
        seed: recipe.seed,
        harnesses: lab.harness_names(),
        versions: versions.into(),
    };
    lab.close().await?;
    let value =
        serde_json::to_value(&summary).map_err(|error| CliError::failed("the summary", error))?;
    let text = serde_json::to_vec_pretty(&value)
        .map_err(|error| CliError::failed("the summary", error))?;
    dir.write("summary.json", &text)?;
    chart::reward_curve(&dir.path, &summary, &sums.pass)?;
    display.line("");
    display.line(&table(&summary));
    display.line(&format!(
        "curve: {0}/reward.svg   look deeper: espalier inspect {0}",
        dir.path.display()
    ));
    display.json(&value);
    Ok(())
}

/// An evaluation of the run after `step` steps, with weights that have made `weights_step`; one
/// that is complete in the run's notes is not made again. The step is part of its name: a finished
/// run that is extended is evaluated anew.
async fn evaluation(
    lab: &Lab,
    recipe: &Recipe,
    tasks: &[Arc<task::Task>],
    name: &str,
    (step, weights_step): (u64, u64),
    display: &Display,
    cancel: &tokio_util::sync::CancellationToken,
) -> Result<Evaluation, CliError> {
    let key = format!("{name}-{step}");
    let noted = lab
        .ledger
        .note(&key)
        .map_err(|error| CliError::failed("the run's notes", error))?;
    if let Some(done) = noted.and_then(|note| serde_json::from_value(note).ok()) {
        return Ok(done);
    }
    if step != weights_step {
        let what = format!("the run has no {name} though {weights_step} steps are done");
        return Err(CliError::plain(
            what,
            "its ledger is not the one it was trained with",
        ));
    }
    let evaluation = score::evaluate(lab, recipe, tasks, name, step, display, cancel).await?;
    let note = serde_json::to_value(&evaluation)
        .map_err(|error| CliError::failed("the evaluation", error))?;
    lab.ledger
        .put_note(&key, note)
        .await
        .map_err(|error| CliError::failed("the run's notes", error))?;
    Ok(evaluation)
}

/// The evaluations between the first step and the last, from the run's notes: those made before an
/// interruption are there too.
fn evaluations_during(ledger: &Ledger, every: u64, steps: u64) -> Result<Vec<AtStep>, CliError> {
    let mut found = Vec::new();
    if every == 0 {
        return Ok(found);
    }
    for step in (every..steps).step_by(usize::try_from(every).unwrap_or(usize::MAX)) {
        let note = ledger
            .note(&format!("eval-during-{step}"))
            .map_err(|error| CliError::failed("the run's notes", error))?;
        if let Some(evaluation) = note.and_then(|note| serde_json::from_value(note).ok()) {
            found.push(AtStep { step, evaluation });
        }
    }
    Ok(found)
}

fn interrupted_as(error: CliError, resume_hint: impl Fn() -> CliError) -> CliError {
    if matches!(error, CliError::Interrupted { .. }) {
        resume_hint()
    } else {
        error
    }
}

/// Takes the metrics of the steps before `first_step` from an earlier run of the same directory,
/// and cuts off those after it: they are made again from the same rollouts. Returns what the steps
/// found, in order.
fn replay_metrics(
    dir: &RunDir,
    first_step: u64,
    sums: &mut Sums,
) -> Result<Vec<(u64, Harvest)>, CliError> {
    let path = dir.path.join("metrics.jsonl");
    if first_step == 0 && !path.exists() {
        return Ok(Vec::new());
    }
    let text = std::fs::read_to_string(&path)
        .map_err(|error| CliError::failed(path.display().to_string(), error))?;
    let mut kept = String::new();
    let mut found = Vec::new();
    for line in text.lines() {
        let Ok(metrics) = serde_json::from_str::<StepMetrics>(line) else {
            continue;
        };
        let Ok(harvest) = serde_json::from_value::<Harvest>(metrics.harvest) else {
            continue;
        };
        if metrics.step < first_step {
            sums.add(&harvest, metrics.rollout_s, metrics.train_s);
            kept.push_str(line);
            kept.push('\n');
            found.push((metrics.step, harvest));
        }
    }
    if !found.iter().map(|(step, _)| *step).eq(0..first_step) {
        return Err(CliError::plain(
            format!(
                "{}: expected one line for each of the {first_step} steps before the checkpoint, found {}",
                path.display(),
                found.len()
            ),
            "restore the file, or start a new run from the checkpoint as `policy.folder`",
        ));
    }
    dir.write("metrics.jsonl", kept.as_bytes())?;
    Ok(found)
}

fn one_line(evaluation: &Evaluation) -> String {
    let greedy = evaluation
        .greedy
        .as_ref()
        .map(|pass| format!(", greedy {:.1} %", 100.0 * pass.pass_at_1));
    let pass = &evaluation.sampled;
    format!(
        "held-out pass@1 {:.1} % [{:.0}, {:.0}]{}",
        100.0 * pass.pass_at_1,
        100.0 * pass.ci95[0],
        100.0 * pass.ci95[1],
        greedy.unwrap_or_default()
    )
}
