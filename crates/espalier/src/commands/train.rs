//! `espalier train`: reinforcement learning, step by step, resumable.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use learner::grpo::UpdateMetrics;
use ledger::Ledger;
use model::forest;
use serde::{Deserialize, Serialize};
use task::Split;

use crate::{
    chart,
    curriculum::{self, Curriculum},
    display::{self, Display},
    error::CliError,
    lab::{Lab, Plan},
    policy,
    recipe::Recipe,
    run_dir::RunDir,
    score::{self, Evaluation},
    summary::{Evaluations, PhaseSeconds, Summary, Tokens, table},
    teacher,
    tensorboard::Events,
    training::{self, Harvest},
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

/// A line of `metrics.jsonl`.
#[derive(Debug, Serialize, Deserialize)]
struct StepMetrics {
    step: u64,
    #[serde(flatten)]
    harvest: serde_json::Value,
    update: Option<UpdateMetrics>,
    policy_version: u64,
    rollout_s: f64,
    train_s: f64,
}

/// What the steps so far add up to.
#[derive(Debug, Default)]
struct Sums {
    reward: Vec<f64>,
    pass: Vec<f64>,
    dispositions: std::collections::BTreeMap<String, u64>,
    forks: std::collections::BTreeMap<String, u64>,
    tokens: Tokens,
    seconds: PhaseSeconds,
}

impl Sums {
    fn add(&mut self, harvest: &Harvest, rollout_s: f64, train_s: f64) {
        self.reward.push(harvest.reward);
        self.pass.push(harvest.pass);
        for (name, count) in &harvest.dispositions {
            *self.dispositions.entry(name.clone()).or_default() += count;
        }
        for (name, count) in &harvest.forks {
            *self.forks.entry(name.clone()).or_default() += count;
        }
        self.tokens.captured += harvest.tokens_captured;
        self.tokens.unique += harvest.tokens_unique;
        self.tokens.trained += harvest.tokens_trained;
        self.seconds.rollout += rollout_s;
        self.seconds.train += train_s;
    }
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
        temperature: recipe.rollout.temperature,
        ..forest::Settings::default()
    };
    let codec = policy::load_codec(&recipe.policy.folder)?;
    let (mut learner, first_step) = match &checkpoint {
        Some((folder, _)) => learner::Embedded::resume(folder, compute)
            .map_err(|error| CliError::failed(format!("checkpoint {}", folder.display()), error))?,
        None => {
            let weights = policy::load_weights(&recipe.policy.folder, &codec)?;
            (
                learner::Embedded::new(weights, recipe.train.optimiser.clone(), compute),
                0,
            )
        }
    };
    let engine =
        policy::start_engine(&recipe.policy, &codec, learner.weights(), learner.version())?;
    let train_tasks = teacher::load_tasks(&recipe.tasks.train, Split::Train)?;
    let held_out = teacher::load_tasks(&recipe.tasks.held_out, Split::HeldOut)?;
    let lab = Lab::open(&recipe, &dir, ledger, Arc::clone(&codec), engine.clone()).await?;
    display.line(&format!(
        "{} through {}: {} training tasks, {} held out, {} parameters, seed {}, {}",
        recipe.policy.folder.display(),
        lab.harness_names().join(" + "),
        train_tasks.len(),
        held_out.len(),
        learner.weights().len(),
        recipe.seed,
        dir.path.display()
    ));
    let resume_hint = || CliError::Interrupted {
        resume: format!("go on with: espalier train --resume {}", dir.path.display()),
    };
    let mut sums = Sums::default();
    let mut curriculum = Curriculum::new(
        recipe.train.curriculum,
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
    let mut events = Events::create(&dir.path)?;
    let mut step_seconds: Vec<f64> = Vec::new();
    for step in first_step..steps {
        let started = Instant::now();
        let tasks: Vec<_> = curriculum
            .draw(step, recipe.train.tasks_per_step)
            .into_iter()
            .map(|index| Arc::clone(&train_tasks[index]))
            .collect();
        let temperature = recipe.rollout.temperature;
        let plan = Plan {
            split: "train",
            step,
            samples: recipe.train.samples,
            temperature,
        };
        let result = lab
            .run(
                lab.jobs(&tasks, plan)?,
                &format!("step {}/{steps}", step + 1),
                &display,
                &cancel,
            )
            .await?;
        if result.cancelled {
            lab.close().await?;
            return Err(resume_hint());
        }
        let rollout_s = started.elapsed().as_secs_f64();
        let started = Instant::now();
        let rollouts: Vec<_> = result.ended().collect();
        let (trees, mut harvest) = training::harvest(&lab.ledger, &rollouts, &recipe.train)?;
        harvest.families = curriculum::tally(&rollouts, &tasks);
        curriculum.observe(&harvest.families);
        let update = if trees.is_empty() {
            // Named in the step's line: every group had equal rewards, or nothing was captured.
            None
        } else {
            let rate = recipe.train.rate.rate(step, steps);
            let metrics = learner
                .update(&trees, &recipe.train.grpo, rate)
                .map_err(|error| {
                    CliError::failed(format!("step {}: the update", step + 1), error)
                })?;
            engine
                .set_weights(learner.weights(), learner.version())
                .map_err(|error| CliError::failed("the engine refused the new weights", error))?;
            Some(metrics)
        };
        let train_s = started.elapsed().as_secs_f64();
        step_seconds.push(rollout_s + train_s);
        sums.add(&harvest, rollout_s, train_s);
        dir.append_metrics(&StepMetrics {
            step,
            harvest: serde_json::to_value(&harvest).unwrap_or_default(),
            update,
            policy_version: learner.version(),
            rollout_s,
            train_s,
        })?;
        events.append_step(step + 1, &harvest, update.as_ref(), rollout_s, train_s)?;
        if (step + 1) % recipe.train.checkpoint_every == 0 || step + 1 == steps {
            learner
                .save(
                    &dir.checkpoint(step + 1),
                    step + 1,
                    &policy::text_files(&recipe.policy.folder),
                )
                .map_err(|error| CliError::failed("the checkpoint", error))?;
        }
        let left = (steps - step - 1) as f64 * step_seconds.iter().sum::<f64>()
            / step_seconds.len() as f64;
        display.line(&step_line(
            step + 1,
            steps,
            &harvest,
            update.as_ref(),
            rollout_s,
            train_s,
            left,
        ));
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
    let versions = [
        ("espalier".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("codec".to_owned(), codec.digest().to_owned()),
    ];
    let summary = Summary {
        steps,
        wall_s: began.elapsed().as_secs_f64(),
        eval: Evaluations { before, after },
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

fn step_line(
    step: u64,
    steps: u64,
    harvest: &Harvest,
    update: Option<&UpdateMetrics>,
    rollout_s: f64,
    train_s: f64,
    left: f64,
) -> String {
    let dropped =
        harvest.dispositions.get("discard").copied().unwrap_or(0) + harvest.over_branched as u64;
    let forks: u64 = harvest.forks.values().sum();
    let learned = update.map_or_else(
        || "nothing to learn (all groups equal)".to_owned(),
        |update| {
            format!(
                "entropy {:.3}  |grad| {:.2}",
                update.entropy, update.gradient_norm
            )
        },
    );
    format!(
        "step {step:>3}/{steps}  pass {:5.1} %  reward {:.3}  groups {}-{}  tokens {}k/{}k/{}k  forks {forks}  drops {dropped}  {learned}  {rollout_s:.1}s + {train_s:.1}s  eta {}",
        100.0 * harvest.pass,
        harvest.reward,
        harvest.groups,
        harvest.groups_zero_variance,
        harvest.tokens_captured / 1000,
        harvest.tokens_unique / 1000,
        harvest.tokens_trained / 1000,
        display::seconds(left)
    )
}
