//! `espalier rollout`: run rollouts and keep what was captured.

use std::{path::PathBuf, sync::Arc};

use engine::Engine;
use ledger::Ledger;
use task::Split;

use crate::{
    display::Display,
    error::CliError,
    lab::{Lab, Plan},
    policy,
    recipe::Recipe,
    run_dir::RunDir,
    score, teacher,
};

/// Run rollouts and keep what was captured.
///
/// Example: espalier rollout recipes/quickstart.toml --teacher --harness pi -n 1 --out runs/look
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The recipe.
    recipe: PathBuf,
    /// Task source, instead of the recipe's training tasks.
    #[arg(long)]
    tasks: Option<String>,
    /// Harness, instead of the recipe's; may be given several times.
    #[arg(long)]
    harness: Vec<String>,
    /// Rollouts per task and harness.
    #[arg(short = 'n', long = "samples", default_value_t = 1)]
    samples: u32,
    /// At most this many tasks.
    #[arg(long)]
    tasks_max: Option<usize>,
    /// Play the tasks' reference solutions instead of asking the policy.
    #[arg(long)]
    teacher: bool,
    /// New run directory.
    #[arg(long, default_value = "runs/rollout")]
    out: PathBuf,
}

/// Runs the command.
pub(crate) async fn run(arguments: Arguments, json: bool) -> Result<(), CliError> {
    let mut recipe = Recipe::load(&arguments.recipe)?;
    if !arguments.harness.is_empty() {
        recipe.harnesses = arguments.harness;
    }
    if let Some(source) = arguments.tasks {
        recipe.tasks.train = source;
    }
    let display = Display::new(json);
    let (cancel, _watcher) = super::interrupts();
    let codec = policy::load_codec(&recipe.policy.folder)?;
    let mut tasks = teacher::load_tasks(&recipe.tasks.train, Split::Train)?;
    tasks.truncate(arguments.tasks_max.unwrap_or(usize::MAX));
    let engine: Arc<dyn Engine> = if arguments.teacher {
        teacher::engine(
            &tasks,
            &recipe.harnesses,
            &codec,
            teacher::CONTEXT_TOKENS_MAX,
        )?
    } else {
        let weights = Arc::new(policy::load_weights(&recipe.policy.folder, &codec)?);
        policy::start_engine(&recipe.policy, &codec, weights, 0)?
    };
    let dir = RunDir::create(&arguments.out, &recipe)?;
    let ledger = Ledger::create_with(&dir.path, recipe.ledger_options()?)
        .map_err(|error| CliError::failed("the run's ledger", error))?;
    let lab = Lab::open(&recipe, &dir, ledger, codec, engine).await?;
    let plan = Plan {
        split: "rollout",
        step: 0,
        samples: arguments.samples,
        temperature: recipe.rollout.temperature,
    };
    let jobs = lab.jobs(&tasks, plan)?;
    let result = lab.run(jobs, "rollouts", &display, &cancel).await;
    lab.close().await?;
    let result = result?;
    let rollouts: Vec<_> = result.ended().collect();
    let pass = score::pass(&rollouts);
    for rollout in &rollouts {
        let verdict = rollout
            .verdict
            .as_ref()
            .map_or("    -".to_owned(), |verdict| {
                format!("{:5.2}", verdict.reward)
            });
        let disposition = rollout
            .disposition
            .as_ref()
            .map_or("running", |disposition| disposition.name());
        display.line(&format!(
            "{verdict}  {disposition:<9} {:>3} calls  {}",
            rollout.calls, rollout.spec.id
        ));
    }
    display.line(&format!(
        "{} rollouts in {:.1} s: pass {:.1} %, {} lost. Look deeper: espalier inspect {}",
        rollouts.len(),
        result.seconds,
        100.0 * pass.pass_at_1,
        pass.lost,
        dir.path.display()
    ));
    let value = serde_json::json!({
        "rollouts": rollouts.len(), "seconds": result.seconds, "pass": pass,
        "dispositions": result.counts.dispositions, "endings": result.counts.endings,
    });
    display.json(&value);
    if result.cancelled {
        return Err(CliError::Interrupted {
            resume: "every finished rollout is in the ledger".into(),
        });
    }
    Ok(())
}
