//! A recipe: everything that a run depends on, in one TOML file. Strict: an unknown key or a
//! wrong type names file, line, key and what was expected.

mod eval;
mod judge;
mod train;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
};

pub(crate) use eval::{EvalSettings, ModelSource};
pub(crate) use judge::VerifySettings;
use learner::filter::Filter;
use ledger::RedactionSettings;
use model::adamw::AdamWSettings;
use sandbox::Limits;
use serde::{Deserialize, Serialize};
pub(crate) use train::{Baseline, CriticPlace, TrainSettings};

use crate::error::CliError;

/// The whole recipe, as written or with defaults filled in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Recipe {
    /// Seed of every random choice of the run.
    #[serde(default)]
    pub(crate) seed: u64,
    /// Where the policy comes from.
    pub(crate) policy: PolicySource,
    /// What to train and evaluate on.
    #[serde(default)]
    pub(crate) tasks: TaskSources,
    /// Harness profiles; a batch draws every task with every one of them.
    #[serde(default = "default_harnesses")]
    pub(crate) harnesses: Vec<String>,
    /// The kind of sandbox.
    #[serde(default)]
    pub(crate) sandbox: sandbox::SandboxConfig,
    /// How rollouts are run.
    #[serde(default)]
    pub(crate) rollout: RolloutSettings,
    /// Reinforcement learning.
    #[serde(default)]
    pub(crate) train: TrainSettings,
    /// Evaluation.
    #[serde(default)]
    pub(crate) eval: EvalSettings,
    /// Verifiers beyond the tasks' own code.
    #[serde(default)]
    pub(crate) verify: VerifySettings,
    /// The cold start.
    #[serde(default)]
    pub(crate) sft: SftRecipe,
    /// What must not be written down.
    #[serde(default, skip_serializing_if = "RedactionSettings::is_empty")]
    pub(crate) redact: RedactionSettings,
}

fn default_harnesses() -> Vec<String> {
    vec!["react".into()]
}

/// Where the policy comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PolicySource {
    /// Hugging Face folder with weights, tokenizer and chat template. For `sft` only tokenizer and
    /// template are needed.
    pub(crate) folder: PathBuf,
    /// Threads that decode and train.
    #[serde(default = "default_threads")]
    pub(crate) threads: usize,
    /// Where products with weights are made, decoding and training: `cpu` or `cuda`.
    #[serde(default = "default_device", skip_serializing_if = "is_default_device")]
    pub(crate) device: String,
}

fn default_device() -> String {
    "cpu".into()
}

fn is_default_device(device: &str) -> bool {
    device == "cpu"
}

fn default_threads() -> usize {
    2
}

/// Task sources, as `task::load` takes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TaskSources {
    /// Trained on.
    pub(crate) train: String,
    /// Evaluated on.
    pub(crate) held_out: String,
}

impl Default for TaskSources {
    fn default() -> Self {
        Self {
            train: "chores".into(),
            held_out: "chores".into(),
        }
    }
}

/// How rollouts are run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RolloutSettings {
    /// Sandboxes at once.
    pub(crate) concurrency: usize,
    /// Sampling temperature of training and of sampled evaluation.
    pub(crate) temperature: f32,
    /// Longest reply of a call.
    pub(crate) reply_tokens_max: u32,
    /// Calls of a rollout.
    pub(crate) calls_max: u32,
    /// Tokens that may be generated for a rollout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) generated_tokens_max: Option<u64>,
    /// Where gauges of the run are served, `http://ADDRESS/metrics`; nowhere by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// Places of stages.
    pub(crate) pools: rollout::Pools,
    /// Sandboxes that stand ready.
    pub(crate) warm: rollout::warm::Settings,
    /// Which spent budgets are masked instead of truncated.
    #[serde(skip_serializing_if = "rollout::Choices::is_empty")]
    pub(crate) dispositions: rollout::Choices,
    /// Limits of each stage.
    pub(crate) stages: rollout::Stages,
    /// Limits of each sandbox.
    pub(crate) limits: Limits,
    /// Workspaces of at most so many bytes are kept after the harness ended, so that another
    /// verifier can score them later (`espalier verify`); 0 keeps none.
    pub(crate) world_bytes_max: u64,
}

impl Default for RolloutSettings {
    fn default() -> Self {
        Self {
            concurrency: 32,
            temperature: 1.0,
            reply_tokens_max: 256,
            calls_max: 12,
            generated_tokens_max: None,
            metrics_listen: None,
            pools: rollout::Pools::default(),
            warm: rollout::warm::Settings::default(),
            dispositions: rollout::Choices::default(),
            stages: rollout::Stages::default(),
            limits: Limits::default(),
            world_bytes_max: 0,
        }
    }
}

/// The cold start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SftRecipe {
    /// Task source of the teacher's rollouts.
    pub(crate) tasks: String,
    /// For a harness, through how many of the tasks the teacher is played; all when it is not
    /// named. Slow harnesses need only a few: what is copied and why is learned from the others.
    pub(crate) tasks_max: BTreeMap<String, usize>,
    /// Which of the captured rollouts are learned from.
    pub(crate) filter: Filter,
    /// Steps and batches.
    #[serde(flatten)]
    pub(crate) settings: learner::sft::SftSettings,
    /// The optimiser.
    pub(crate) optimiser: AdamWSettings,
    /// Shape of fresh weights.
    pub(crate) shape: Option<model::Config>,
    /// Where the cold-started policy goes.
    pub(crate) out: PathBuf,
}

impl Default for SftRecipe {
    fn default() -> Self {
        Self {
            tasks: "chores".into(),
            tasks_max: BTreeMap::new(),
            filter: Filter::default(),
            settings: learner::sft::SftSettings::default(),
            optimiser: AdamWSettings::default(),
            shape: None,
            out: "runs/policy".into(),
        }
    }
}

impl Recipe {
    /// Reads a recipe.
    pub(crate) fn load(path: &Path) -> Result<Self, CliError> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            CliError::usage(
                format!("recipe {}: {error}", path.display()),
                "recipes are TOML files, see recipes/",
            )
        })?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Parses a recipe; `name` is what errors call it.
    pub(crate) fn parse(text: &str, name: &str) -> Result<Self, CliError> {
        let recipe: Self = toml::from_str(text).map_err(|error| {
            let what = format!("recipe {name}: {}", error.to_string().trim_end());
            CliError::usage(what, "docs/recipes.md lists every key with its default")
        })?;
        recipe.check(name)?;
        Ok(recipe)
    }

    fn check(&self, name: &str) -> Result<(), CliError> {
        let wrong = |key: &str, expected: &str, found: String| {
            let what = format!("recipe {name}: {key}: expected {expected}, found {found}");
            Err(CliError::usage(
                what,
                "docs/recipes.md lists every key with its range",
            ))
        };
        if self.harnesses.is_empty() {
            return wrong("harnesses", "at least one name", "none".into());
        }
        let at_least_one = [
            ("policy.threads", self.policy.threads as u64),
            ("rollout.concurrency", self.rollout.concurrency as u64),
            (
                "rollout.reply_tokens_max",
                u64::from(self.rollout.reply_tokens_max),
            ),
            ("rollout.calls_max", u64::from(self.rollout.calls_max)),
            ("train.tasks_per_step", self.train.tasks_per_step as u64),
            ("train.checkpoint_every", self.train.checkpoint_every),
            ("eval.samples", u64::from(self.eval.samples)),
        ];
        for (key, value) in at_least_one {
            if value == 0 {
                return wrong(key, "at least 1", "0".into());
            }
        }
        if let Some(name) = self
            .sft
            .tasks_max
            .keys()
            .find(|name| !self.harnesses.contains(name))
        {
            return wrong(
                "sft.tasks_max",
                "names that `harnesses` has",
                format!("{name:?}"),
            );
        }
        if let Some((key, expected, found)) = self.train.wrong(&self.harnesses) {
            return wrong(key, expected, found);
        }
        if let Err((key, expected, found)) = self.eval.check() {
            return wrong(&key, expected, found);
        }
        if let Err((key, expected, found)) = self.verify.check() {
            return wrong(&key, expected, found);
        }
        if let Err(error) = self.rollout.dispositions.check() {
            let found = format!("{} = {:?}", error.name, error.found.name());
            return wrong("rollout.dispositions", error.expected, found);
        }
        let share = self.rollout.pools.task_share;
        if !(share > 0.0 && share <= 1.0) {
            let expected = "a number above 0, at most 1";
            return wrong("rollout.pools.task_share", expected, share.to_string());
        }
        let warm = &self.rollout.warm;
        if warm.per_key > 0 && (warm.total == 0 || warm.idle_s == 0) {
            let expected = "at least 1 each while per_key is not 0";
            let found = format!("{} and {}", warm.total, warm.idle_s);
            return wrong("rollout.warm.total, .idle_s", expected, found);
        }
        let wrong_host = |host: &&String| {
            host.trim().is_empty() || host.contains(['/', ' ', ',']) || host.contains("://")
        };
        if let Some(host) = self.sandbox.egress().0.iter().find(wrong_host) {
            let expected = "names such as pypi.org, *.example.org, host:8443, or *";
            return wrong("sandbox.egress", expected, format!("{host:?}"));
        }
        let temperature = self.rollout.temperature;
        if !(temperature.is_finite() && temperature > 0.0) {
            return wrong(
                "rollout.temperature",
                "a number above 0",
                temperature.to_string(),
            );
        }
        ledger_options(&self.redact, &format!("recipe {name}: redact"))?;
        Ok(())
    }

    /// How the run's ledger is opened.
    pub(crate) fn ledger_options(&self) -> Result<ledger::Options, CliError> {
        ledger_options(&self.redact, "the recipe: redact")
    }

    /// The recipe with every default filled in, for the run directory.
    pub(crate) fn to_toml(&self) -> Result<String, CliError> {
        toml::to_string_pretty(self)
            .map_err(|error| CliError::failed("the recipe could not be written down", error))
    }
}

/// How a ledger is opened that leaves out what these rules say; `name` is what errors call them.
pub(crate) fn ledger_options(
    rules: &RedactionSettings,
    name: &str,
) -> Result<ledger::Options, CliError> {
    if rules.is_empty() {
        return Ok(ledger::Options::default());
    }
    let redaction = ledger::Redaction::new(rules).map_err(|error| {
        CliError::usage(
            format!("{name}: {error}"),
            "docs/ledger.md says how rules are written",
        )
    })?;
    Ok(ledger::Options {
        redaction: Some(redaction),
        ..ledger::Options::default()
    })
}

/// Reads a file with rules for a gateway that has no recipe.
pub(crate) fn load_redaction(path: &Path) -> Result<RedactionSettings, CliError> {
    let hint = "a TOML file with the keys of a recipe's [redact], see docs/ledger.md";
    let wrong = |found: String| CliError::usage(format!("rules {}: {found}", path.display()), hint);
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    toml::from_str(&text).map_err(|error| wrong(error.to_string().trim_end().to_owned()))
}
