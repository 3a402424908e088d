//! `espalier sft`: the cold start. The scripted teacher plays reference solutions through the real
//! harness and gateway; the policy is trained on what was captured.

use std::{collections::HashMap, path::PathBuf, sync::Arc, time::Instant};

use learner::{
    filter::{Candidate, Filter, choose},
    sft::batch_indexes,
};
use ledger::Ledger;
use model::{Weights, forest};
use record::Rollout;
use task::Split;
use tree::{Selection, TrainTree};

use crate::{
    chat_rows,
    display::{self, Display},
    error::CliError,
    lab::{Lab, Plan},
    policy,
    recipe::Recipe,
    run_dir::RunDir,
    teacher,
    training::{self, Harvest},
};

/// Train a policy on rollouts of the scripted teacher, captured through the same harness.
///
/// Example: espalier sft recipes/cold-start.toml --out runs/cold-start
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The recipe.
    recipe: PathBuf,
    /// New run directory; with --captures of an earlier one nothing is rolled out.
    #[arg(long, default_value = "runs/sft")]
    out: PathBuf,
    /// Train on the captures of this run instead of making new ones; may be given several times.
    #[arg(long)]
    captures: Vec<PathBuf>,
    /// Train on the conversations of this file instead, one JSON object per line with `messages` as
    /// in OpenAI's chat API; may be given several times.
    #[arg(long, conflicts_with = "captures")]
    rows: Vec<PathBuf>,
    /// Steps, instead of the recipe's.
    #[arg(long)]
    steps: Option<u64>,
    /// Seed, instead of the recipe's.
    #[arg(long)]
    seed: Option<u64>,
}

/// Runs the command.
pub(crate) async fn run(arguments: Arguments, json: bool) -> Result<(), CliError> {
    let mut recipe = Recipe::load(&arguments.recipe)?;
    recipe.seed = arguments.seed.unwrap_or(recipe.seed);
    recipe.sft.settings.steps = arguments.steps.unwrap_or(recipe.sft.settings.steps);
    let display = Display::new(json);
    let (cancel, _watcher) = super::interrupts();
    let codec = policy::load_codec(&recipe.policy.folder)?;
    let (trees, dir) = if arguments.rows.is_empty() {
        let dir = RunDir::create(&arguments.out, &recipe)?;
        let captured = captured(
            &recipe,
            &dir,
            &arguments.captures,
            &codec,
            &display,
            &cancel,
        );
        (captured.await?, dir)
    } else {
        let trees = trees_of_rows(&arguments.rows, &recipe, &codec, &display)?;
        (trees, RunDir::create(&arguments.out, &recipe)?)
    };
    let weights = match &recipe.sft.shape {
        Some(shape) => {
            let shape = shape
                .clone()
                .validated()
                .map_err(|reason| CliError::plain("sft.shape", reason))?;
            let vocabulary = u32::try_from(shape.vocab_size).unwrap_or(u32::MAX);
            codec
                .check_model(vocabulary)
                .map_err(|error| CliError::failed("sft.shape.vocab_size", error))?;
            Weights::random(shape, recipe.seed)
        }
        None => policy::load_weights(&recipe.policy.folder, &codec)?,
    };
    train(&recipe, &dir, weights, &trees, &display, &cancel)
}

/// The trees of captured rollouts: of earlier runs, or of the teacher's when none is named.
async fn captured(
    recipe: &Recipe,
    dir: &RunDir,
    captures: &[PathBuf],
    codec: &Arc<codec::Codec>,
    display: &Display,
    cancel: &tokio_util::sync::CancellationToken,
) -> Result<Vec<TrainTree>, CliError> {
    let failed = |error| CliError::failed("the run's ledger", error);
    let ledgers: Vec<Ledger> = if captures.is_empty() {
        vec![capture(recipe, dir, codec, display, cancel).await?]
    } else {
        let opened = captures.iter().map(|folder| Ledger::open_read_only(folder));
        opened.collect::<Result<_, _>>().map_err(failed)?
    };
    let mut rollouts: Vec<(&Ledger, Rollout)> = Vec::new();
    for ledger in &ledgers {
        let own = ledger.rollouts(&[]).map_err(failed)?;
        rollouts.extend(own.into_iter().map(|rollout| (ledger, rollout)));
    }
    // The order of starts depends on the machine's mood; the order of batches must not.
    rollouts.sort_by(|a, b| a.1.spec.id.cmp(&b.1.spec.id));
    let mut harvest = Harvest::default();
    let trees = chosen(&rollouts, recipe, display, &mut harvest)?;
    display.line(&format!(
        "{} of {} rollouts are learned from: {} tokens captured, {} unique within rollouts",
        trees.len(),
        rollouts.len(),
        harvest.tokens_captured,
        harvest.tokens_unique
    ));
    Ok(trees)
}

/// The trees of the conversations that the recipe's filter chooses.
fn trees_of_rows(
    files: &[PathBuf],
    recipe: &Recipe,
    codec: &codec::Codec,
    display: &Display,
) -> Result<Vec<TrainTree>, CliError> {
    let mut rows = Vec::new();
    for file in files {
        rows.extend(chat_rows::read(file, codec)?);
    }
    let candidates: Vec<Candidate<'_>> = rows
        .iter()
        .map(|row| Candidate {
            task: &row.task,
            reward: row.reward,
            tokens: row.trees.iter().map(TrainTree::terms).sum(),
        })
        .collect();
    let places = choose(&candidates, &recipe.sft.filter);
    display.line(&format!(
        "{} of {} conversations are learned from",
        places.len(),
        rows.len()
    ));
    if places.is_empty() {
        return Err(nothing_to_learn(&recipe.sft.filter));
    }
    let trees = places.into_iter().flat_map(|at| rows[at].trees.clone());
    Ok(trees.collect())
}

fn nothing_to_learn(filter: &Filter) -> CliError {
    CliError::plain(
        format!(
            "there is nothing with a reward of at least {} to learn from",
            filter.reward_min
        ),
        "look at the captures with `espalier inspect`, or lower sft.filter.reward_min",
    )
}

/// The trees of the rollouts that the recipe's filter chooses.
fn chosen(
    rollouts: &[(&Ledger, Rollout)],
    recipe: &Recipe,
    display: &Display,
    harvest: &mut Harvest,
) -> Result<Vec<TrainTree>, CliError> {
    let filter = &recipe.sft.filter;
    let mut grown: Vec<(Candidate<'_>, TrainTree)> = Vec::new();
    let progress = display.steps("trees", rollouts.len() as u64, "rollouts");
    for (ledger, rollout) in rollouts {
        progress.advance("");
        let reward = rollout.verdict.as_ref().map(|verdict| verdict.reward);
        // A tree is costly; a reward below the threshold needs none.
        let Some(reward) = reward.filter(|reward| *reward >= filter.reward_min) else {
            continue;
        };
        let tree = training::grow_supervised(ledger, rollout, &Selection::default(), harvest)?;
        if let Some(tree) = tree.filter(|tree| tree.terms() > 0) {
            let candidate = Candidate {
                task: rollout.spec.task.as_str(),
                reward,
                tokens: tree.terms(),
            };
            grown.push((candidate, tree));
        }
    }
    progress.done();
    let candidates: Vec<Candidate<'_>> = grown.iter().map(|(candidate, _)| *candidate).collect();
    let mut places = choose(&candidates, filter).into_iter().peekable();
    let trees: Vec<TrainTree> = (0..)
        .zip(grown)
        .filter_map(|(index, (_, tree))| places.next_if_eq(&index).map(|_| tree))
        .collect();
    if trees.is_empty() {
        return Err(nothing_to_learn(filter));
    }
    Ok(trees)
}

/// The teacher's rollouts, captured through harness and gateway.
async fn capture(
    recipe: &Recipe,
    dir: &RunDir,
    codec: &Arc<codec::Codec>,
    display: &Display,
    cancel: &tokio_util::sync::CancellationToken,
) -> Result<Ledger, CliError> {
    let tasks = teacher::load_tasks(&recipe.sft.tasks, Split::Train)?;
    let ledger = Ledger::create_with(&dir.path, recipe.ledger_options()?)
        .map_err(|error| CliError::failed("the run's ledger", error))?;
    let engine = teacher::engine(
        &tasks,
        &recipe.harnesses,
        codec,
        teacher::CONTEXT_TOKENS_MAX,
    )?;
    let lab = Lab::open(recipe, dir, ledger, Arc::clone(codec), engine).await?;
    let plan = Plan {
        split: "teacher",
        step: 0,
        samples: 1,
        temperature: recipe.rollout.temperature,
    };
    let mut jobs = lab.jobs(&tasks, plan)?;
    let mut planned: HashMap<String, usize> = HashMap::new();
    jobs.retain(|job| {
        let count = planned.entry(job.spec.harness.clone()).or_default();
        *count += 1;
        recipe
            .sft
            .tasks_max
            .get(&job.spec.harness)
            .is_none_or(|max| *count <= *max)
    });
    let result = lab.run(jobs, "teacher", display, cancel).await;
    lab.close().await?;
    if result?.cancelled {
        return Err(CliError::Interrupted {
            resume: "start again with another --out".into(),
        });
    }
    Ledger::open_read_only(&dir.path).map_err(|error| CliError::failed("the run's ledger", error))
}

fn train(
    recipe: &Recipe,
    dir: &RunDir,
    weights: Weights,
    trees: &[TrainTree],
    display: &Display,
    cancel: &tokio_util::sync::CancellationToken,
) -> Result<(), CliError> {
    let settings = &recipe.sft.settings;
    let compute = forest::Settings {
        threads: recipe.policy.threads,
        device: policy::device(&recipe.policy)?,
        ..forest::Settings::default()
    };
    let mut learner = learner::Embedded::new(weights, recipe.sft.optimiser.clone(), compute);
    let rate_steps = match settings.rate_steps {
        0 => settings.steps,
        steps => steps,
    };
    let also = policy::text_files(&recipe.policy.folder);
    let started = Instant::now();
    let progress = display.steps("sft", settings.steps, "steps");
    let mut tokens = 0;
    for step in 0..settings.steps {
        if cancel.is_cancelled() {
            return Err(CliError::Interrupted {
                resume: format!(
                    "train again on the same captures with --captures {}",
                    dir.path.display()
                ),
            });
        }
        let batch: Vec<TrainTree> =
            batch_indexes(trees.len(), settings.rollouts_per_step, recipe.seed, step)
                .into_iter()
                .map(|index| trees[index].clone())
                .collect();
        let rate = settings.rate.rate(step, rate_steps);
        let metrics = learner
            .supervise(&batch, rate, settings.context_weight)
            .map_err(|error| CliError::failed(format!("sft step {}", step + 1), error))?;
        tokens += metrics.tokens_unique;
        progress.advance(&format!(
            "loss {:.4} context {:.4}",
            metrics.loss, metrics.context_loss
        ));
        dir.append_metrics(&metrics)?;
        let done = step + 1;
        if settings.checkpoint_every > 0 && done % settings.checkpoint_every == 0 {
            learner
                .save(&dir.checkpoint(done), done, &also)
                .map_err(|error| CliError::failed("the checkpoint", error))?;
        }
    }
    progress.done();
    let out = &recipe.sft.out;
    learner
        .save(&dir.checkpoint(settings.steps), settings.steps, &also)
        .map_err(|error| CliError::failed("the checkpoint", error))?;
    model::save(&learner.weights(), out, model::files::Precision::Bf16)
        .map_err(|error| CliError::failed(format!("policy {}", out.display()), error))?;
    for file in also {
        if let Some(name) = file.file_name() {
            let target = out.join(name);
            if file != target {
                std::fs::copy(&file, &target).map_err(|error| {
                    CliError::failed(format!("{} could not be written", target.display()), error)
                })?;
            }
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    display.line(&format!(
        "{} steps in {}: {:.0} unique tokens/s; policy in {}",
        settings.steps,
        display::seconds(seconds),
        tokens as f64 / seconds,
        out.display()
    ));
    Ok(())
}
