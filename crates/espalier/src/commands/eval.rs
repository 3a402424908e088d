//! `espalier eval`: a policy on held-out tasks.

use std::{path::PathBuf, sync::Arc};

use ledger::Ledger;
use task::Split;

use crate::{
    display::Display, error::CliError, lab::Lab, policy, recipe::Recipe, run_dir::RunDir, score,
    teacher,
};

/// Measure a policy on held-out tasks.
///
/// Example: espalier eval recipes/quickstart.toml --policy runs/quickstart/checkpoints/step-00030
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The recipe.
    recipe: PathBuf,
    /// Task source, instead of the recipe's.
    #[arg(long)]
    tasks: Option<String>,
    /// Harness, instead of the recipe's; may be given several times.
    #[arg(long)]
    harness: Vec<String>,
    /// Sampled rollouts per task, instead of the recipe's.
    #[arg(short = 'k', long = "samples")]
    samples: Option<u32>,
    /// Policy folder, instead of the recipe's.
    #[arg(long)]
    policy: Option<PathBuf>,
    /// New run directory.
    #[arg(long, default_value = "runs/eval")]
    out: PathBuf,
    /// Seed, instead of the recipe's.
    #[arg(long)]
    seed: Option<u64>,
}

/// Runs the command.
pub(crate) async fn run(arguments: Arguments, json: bool) -> Result<(), CliError> {
    let mut recipe = Recipe::load(&arguments.recipe)?;
    recipe.seed = arguments.seed.unwrap_or(recipe.seed);
    recipe.eval.samples = arguments.samples.unwrap_or(recipe.eval.samples).max(1);
    if let Some(folder) = arguments.policy {
        recipe.policy.folder = folder;
    }
    if let Some(source) = arguments.tasks {
        recipe.tasks.held_out = source;
    }
    if !arguments.harness.is_empty() {
        recipe.harnesses = arguments.harness;
    }
    let display = Display::new(json);
    let (cancel, _watcher) = super::interrupts();
    let codec = policy::load_codec(&recipe.policy.folder)?;
    let weights = Arc::new(policy::load_weights(&recipe.policy.folder, &codec)?);
    let tasks = teacher::load_tasks(&recipe.tasks.held_out, Split::HeldOut)?;
    let dir = RunDir::create(&arguments.out, &recipe)?;
    let ledger = Ledger::create_with(&dir.path, recipe.ledger_options()?)
        .map_err(|error| CliError::failed("the run's ledger", error))?;
    let engine = policy::start_engine(&recipe.policy, &codec, weights, 0)?;
    let lab = Lab::open(&recipe, &dir, ledger, codec, engine).await?;
    let evaluation = score::evaluate(&lab, &recipe, &tasks, "eval", 0, &display, &cancel).await;
    lab.close().await?;
    let evaluation = evaluation?;
    let value = serde_json::to_value(&evaluation)
        .map_err(|error| CliError::failed("the evaluation", error))?;
    let text = serde_json::to_vec_pretty(&value)
        .map_err(|error| CliError::failed("the evaluation", error))?;
    dir.write("summary.json", &text)?;
    let line = |name: String, pass: &score::Pass| {
        let (low, high) = (100.0 * pass.ci95[0], 100.0 * pass.ci95[1]);
        display.line(&format!(
            "{name:<18} pass@1 {:5.1} % [{low:.0}, {high:.0}]  {} tasks, {} rollouts, {} lost",
            100.0 * pass.pass_at_1,
            pass.tasks,
            pass.n,
            pass.lost
        ));
    };
    line(
        format!("sampled, T = {}", evaluation.temperature),
        &evaluation.sampled,
    );
    if let Some(greedy) = &evaluation.greedy {
        line("greedy".into(), greedy);
    }
    for (family, pass) in &evaluation.families {
        display.line(&format!("  {family:<20} {:5.1} %", 100.0 * pass));
    }
    display.json(&value);
    Ok(())
}
