//! `espalier eval`: models × harnesses × tasks × attempts, and a report.

mod contamination;
mod trials;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use bench::{Report, Setup, Times, Training};
use ledger::Ledger;
use task::{Split, Task};

use crate::{
    display::Display,
    error::CliError,
    lab::{self, Lab, Plan},
    models::Model,
    recipe::{ModelSource, Recipe},
    run_dir::RunDir,
    teacher,
    text::table,
};

pub(crate) use contamination::compared;

/// The folder of a run with everything that is the same whenever it is made again.
const REPORT: &str = "report";

/// Evaluate models through harnesses on held-out tasks, and write a report.
///
/// Every model is tried through every harness on every task several times, with fixed seeds. The
/// run directory gets `report/` (index.html, report.md, report.json, CSV, plots; the same bytes
/// for the same seeds) and time.md (wall-clock, never the same). Ctrl-C leaves a run that goes on
/// with --resume.
///
/// Example: espalier eval recipes/quickstart.toml --model before=embedded:policy
/// --model after=embedded:runs/quickstart/checkpoints/step-00040 --harness react --harness pi
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The recipe.
    #[arg(required_unless_present = "resume")]
    recipe: Option<PathBuf>,
    /// Task source, instead of the recipe's.
    #[arg(long)]
    tasks: Option<String>,
    /// At most this many tasks, instead of the recipe's `eval.tasks`.
    #[arg(long)]
    tasks_max: Option<usize>,
    /// Harness, instead of the recipe's; may be given several times.
    #[arg(long)]
    harness: Vec<String>,
    /// Model, instead of the recipe's; may be given several times, the one that others are
    /// compared with first. Kinds: embedded:DIR, vllm:URL, sglang:URL, openai:URL, scripted:FILE,
    /// teacher, teacher:SHARE.
    #[arg(long, value_name = "NAME=KIND:WHERE", value_parser = ModelSource::parse)]
    model: Vec<ModelSource>,
    /// Attempts per task, model and harness, instead of the recipe's.
    #[arg(short = 'k', long = "samples")]
    samples: Option<u32>,
    /// Sampling temperature, instead of the recipe's.
    #[arg(long)]
    temperature: Option<f32>,
    /// Policy folder, instead of the recipe's.
    #[arg(long)]
    policy: Option<PathBuf>,
    /// New run directory.
    #[arg(long, default_value = "runs/eval")]
    out: PathBuf,
    /// Go on with the evaluation in this run directory.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["recipe", "tasks", "tasks_max", "harness", "model", "samples", "temperature", "policy", "seed"])]
    resume: Option<PathBuf>,
    /// Seed, instead of the recipe's.
    #[arg(long)]
    seed: Option<u64>,
}

impl Arguments {
    /// The recipe with what the command line says.
    fn resolve(&self) -> Result<Recipe, CliError> {
        let path = self.recipe.clone().unwrap_or_default();
        let mut recipe = Recipe::load(&path)?;
        recipe.seed = self.seed.unwrap_or(recipe.seed);
        recipe.eval.samples = self.samples.unwrap_or(recipe.eval.samples).max(1);
        recipe.eval.tasks = self.tasks_max.unwrap_or(recipe.eval.tasks);
        recipe.eval.temperature = self.temperature.or(recipe.eval.temperature);
        if let Some(folder) = &self.policy {
            recipe.policy.folder.clone_from(folder);
            recipe.eval.models.clear();
        }
        if let Some(source) = &self.tasks {
            recipe.tasks.held_out.clone_from(source);
        }
        if !self.harness.is_empty() {
            recipe.harnesses.clone_from(&self.harness);
        }
        if !self.model.is_empty() {
            recipe.eval.models.clone_from(&self.model);
        }
        if recipe.eval.models.is_empty() {
            recipe.eval.models.push(ModelSource {
                name: "policy".to_owned(),
                engine: format!("embedded:{}", recipe.policy.folder.display()),
                tokenizer: None,
                model: None,
                key_variable: None,
                authorities: None,
                temperature: None,
                price: None,
            });
        }
        recipe.rollout.world_bytes_max = recipe
            .rollout
            .world_bytes_max
            .max(recipe.eval.world_bytes_max);
        // What the command line brought is checked as what a file brings.
        Recipe::parse(&recipe.to_toml()?, &path.display().to_string())
    }
}

/// Runs the command.
pub(crate) async fn run(arguments: Arguments, json: bool) -> Result<(), CliError> {
    let display = Display::new(json);
    let (cancel, _watcher) = super::interrupts();
    let (recipe, resumed) = match &arguments.resume {
        Some(path) => {
            let (dir, recipe) = RunDir::resume(path)?;
            (recipe, Some(dir))
        }
        None => (arguments.resolve()?, None),
    };
    let models = recipe.eval.models.iter();
    let models: Vec<Model> = models
        .map(|source| Model::load(source, &recipe))
        .collect::<Result<_, _>>()?;
    let panel = recipe.verify.panel()?;
    let mut tasks = teacher::load_tasks(&recipe.tasks.held_out, Split::HeldOut)?;
    if recipe.eval.tasks > 0 {
        tasks.truncate(recipe.eval.tasks);
    }
    let (dir, ledger) = match resumed {
        Some(dir) => {
            let ledger = Ledger::open(&dir.path);
            (dir, ledger)
        }
        None => {
            let dir = RunDir::create(&arguments.out, &recipe)?;
            let ledger = Ledger::create(&dir.path);
            (dir, ledger)
        }
    };
    let ledger = ledger.map_err(|error| CliError::failed("the run's ledger", error))?;
    let started = std::time::Instant::now();
    let mut all = Vec::new();
    let mut evidence = String::new();
    for model in &models {
        let engine = model.start(&recipe, &tasks).await?;
        let codec = Arc::clone(&model.codec);
        let (ledger, panel) = (ledger.clone(), panel.clone());
        let lab = Lab::open_judged(&recipe, &dir, ledger, codec, engine, panel).await?;
        let name = &model.source.name;
        let split = format!("eval-{name}");
        let temperature = model.source.temperature.or(recipe.eval.temperature);
        let plan = Plan {
            split: &split,
            step: 0,
            samples: recipe.eval.samples,
            temperature: temperature.unwrap_or(recipe.rollout.temperature),
        };
        let mut jobs = lab.jobs(&tasks, plan)?;
        for job in &mut jobs {
            job.spec.labels.insert("model".to_owned(), name.clone());
            let budget = recipe.eval.budget(&job.task);
            job.budget.calls_max = budget.calls_max;
            job.budget.harness_s = budget.harness_s;
        }
        let planned = jobs.clone();
        let result = lab.run(jobs, name, &display, &cancel).await;
        let ledger = lab.stop().await;
        let result = result?;
        if result.cancelled {
            ledger
                .close()
                .await
                .map_err(|error| CliError::failed("the ledger could not be closed", error))?;
            return Err(CliError::Interrupted {
                resume: format!("go on with: espalier eval --resume {}", dir.path.display()),
            });
        }
        trials::collect(
            name,
            &planned,
            &result.rollouts,
            &ledger,
            &mut all,
            &mut evidence,
        )?;
    }
    ledger
        .close()
        .await
        .map_err(|error| CliError::failed("the ledger could not be closed", error))?;
    let report = Report::of(setup(&recipe, &models, &tasks)?, &all);
    let wall_s = started.elapsed().as_secs_f64();
    let times = Times::of(&all, wall_s, recipe.rollout.concurrency);
    write(&dir, &report, &all, &evidence, &times)?;
    show(&report, &display);
    display.line(&format!(
        "{} attempts in {}; report: {}/{REPORT}/index.html",
        all.len(),
        crate::display::seconds(wall_s),
        dir.path.display()
    ));
    let value =
        serde_json::to_value(&report).map_err(|error| CliError::failed("the report", error))?;
    display.json(&value);
    Ok(())
}

fn setup(recipe: &Recipe, models: &[Model], tasks: &[Arc<Task>]) -> Result<Setup, CliError> {
    let harnesses = lab::profiles(&recipe.harnesses)?
        .into_iter()
        .map(|profile| (profile.name, profile.version))
        .collect();
    let named = |model: &Model| bench::Model {
        name: model.source.name.clone(),
        engine: model.source.engine.clone(),
        temperature: model
            .source
            .temperature
            .or(recipe.eval.temperature)
            .unwrap_or(recipe.rollout.temperature),
        price: model.source.price,
    };
    Ok(Setup {
        tasks: recipe.tasks.held_out.clone(),
        tasks_count: tasks.len(),
        tasks_digest: task::set_digest(tasks.iter().map(AsRef::as_ref)),
        models: models.iter().map(named).collect(),
        harnesses,
        attempts: recipe.eval.samples,
        seed: recipe.seed,
        rounds: recipe.eval.rounds,
        training: training(recipe, models)?,
        contamination: contamination::by_model(models, tasks)?,
    })
}

/// What the steps between the first model and each other one cost, when the others are
/// checkpoints of a run and an hour has a price.
fn training(recipe: &Recipe, models: &[Model]) -> Result<Vec<Training>, CliError> {
    let Some((price, (first, others))) = recipe.eval.machine_hour.zip(models.split_first()) else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for model in others {
        let Some((run, step)) = model.checkpoint() else {
            continue;
        };
        let from = match first.checkpoint() {
            Some((other, step)) if other == run => step,
            _ => 0,
        };
        let file = run.join("metrics.jsonl");
        let text = std::fs::read_to_string(&file)
            .map_err(|error| CliError::failed(file.display().to_string(), error))?;
        let seconds: f64 = text
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .filter(|line| {
                // Steps count from 0, checkpoints by how many are done.
                line["step"]
                    .as_u64()
                    .is_some_and(|at| (from..step).contains(&at))
            })
            .map(|line| {
                line["rollout_s"].as_f64().unwrap_or_default()
                    + line["train_s"].as_f64().unwrap_or_default()
            })
            .sum();
        found.push(Training {
            from: first.source.name.clone(),
            to: model.source.name.clone(),
            cost: seconds / 3600.0 * price,
            basis: format!(
                "steps {from} to {step} of {}, {:.3} h at {price}",
                run.display(),
                seconds / 3600.0
            ),
        });
    }
    Ok(found)
}

/// Everything that is the same next time goes into `report/`, wall-clock beside it.
fn write(
    dir: &RunDir,
    report: &Report,
    trials: &[bench::Trial],
    evidence: &str,
    times: &Times,
) -> Result<(), CliError> {
    let folder = dir.path.join(REPORT);
    std::fs::create_dir_all(&folder)
        .map_err(|error| CliError::failed(folder.display().to_string(), error))?;
    let page = report.document();
    let mut files: BTreeMap<String, String> = page
        .plots()
        .map(|(name, svg)| (format!("{REPORT}/{name}.svg"), svg.to_owned()))
        .collect();
    for (name, text) in [
        ("index.html", page.to_html()),
        ("report.md", page.to_markdown()),
        ("report.json", pretty(report)?),
        ("parts.csv", report.parts_csv()),
        ("matrix.csv", report.matrix.to_csv()),
        ("trials.csv", bench::trials_csv(trials)),
        ("behaviour.jsonl", evidence.to_owned()),
    ] {
        files.insert(format!("{REPORT}/{name}"), text);
    }
    if let Some(network) = network(dir)? {
        files.insert("network.md".to_owned(), network.to_markdown());
        files.insert("network.json".to_owned(), pretty(&network)?);
    }
    files.insert("time.md".to_owned(), times.to_markdown());
    files.insert("time.json".to_owned(), pretty(times)?);
    files
        .iter()
        .try_for_each(|(name, text)| dir.write(name, text.as_bytes()))
}

/// The audit logs of the way out, where rollouts had one.
const EGRESS: &str = "egress";

/// What the rollouts tried to reach, from the `.jsonl` files of [`EGRESS`]; `None` without any.
fn network(dir: &RunDir) -> Result<Option<bench::Network>, CliError> {
    let folder = dir.path.join(EGRESS);
    if !folder.is_dir() {
        return Ok(None);
    }
    let failed = |error: std::io::Error| CliError::failed(folder.display().to_string(), error);
    let mut found = bench::Network::default();
    for entry in std::fs::read_dir(&folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|end| end == "jsonl") {
            found.add(&std::fs::read_to_string(&path).map_err(failed)?);
        }
    }
    Ok(Some(found))
}

fn pretty(value: &impl serde::Serialize) -> Result<String, CliError> {
    serde_json::to_string_pretty(value)
        .map(|text| text + "\n")
        .map_err(|error| CliError::failed("the report", error))
}

/// The numbers that a person wants first.
fn show(report: &Report, display: &Display) {
    let percent = |value: f64| format!("{:.1}", 100.0 * value);
    let rows: Vec<Vec<String>> = report
        .parts
        .iter()
        .map(|part| {
            let pass = part.pass.as_ref();
            let last = part.at_k.last();
            let maybe = |value: Option<f64>| value.map_or("-".to_owned(), percent);
            vec![
                part.model.clone(),
                part.harness.clone(),
                pass.map_or("-".to_owned(), |rate| {
                    format!(
                        "{} [{:.0}, {:.0}]",
                        percent(rate.mean),
                        100.0 * rate.ci95.low,
                        100.0 * rate.ci95.high
                    )
                }),
                maybe(last.and_then(|at| at.pass_at_k)),
                maybe(last.and_then(|at| at.pass_pow_k)),
                maybe(part.reward.map(|mean| mean.mean)),
                format!("{}/{}", part.scored, part.planned),
            ]
        })
        .collect();
    let k = report.setup.attempts;
    let (any, all) = (format!("pass@{k}"), format!("pass^{k}"));
    let header = [
        "model", "harness", "pass@1 %", &any, &all, "reward", "scored",
    ];
    display.line(table(&header, &rows).trim_end());
    let whole = report.whole();
    for one in report.comparisons.iter().filter(|one| one.harness == whole) {
        display.line(&format!(
            "{} → {}: {:+.1} points [{:+.1}, {:+.1}], p {:.4}, paired over {} tasks",
            one.from,
            one.to,
            100.0 * one.pass.mean,
            100.0 * one.pass.ci95.low,
            100.0 * one.pass.ci95.high,
            one.p_value,
            one.tasks
        ));
    }
    if let Some(found) = &report.matrix.decomposition {
        display.line(&format!(
            "variance: model {}, harness {}, model × harness {}, task {}, residual {} %",
            percent(found.model),
            percent(found.harness),
            percent(found.interaction),
            percent(found.task),
            percent(found.residual)
        ));
    }
}
