//! `[eval]`: models, attempts, budgets, prices.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

/// Evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct EvalSettings {
    /// Held-out tasks; 0 takes all.
    pub(crate) tasks: usize,
    /// Sampled rollouts per task (and model and harness).
    pub(crate) samples: u32,
    /// One greedy rollout per task beside them; for `train` only.
    pub(crate) greedy: bool,
    /// `train` also evaluates after every so many steps, which is what finds the best checkpoint;
    /// 0 means only before the first step and after the last.
    pub(crate) every: u64,
    /// Sampling temperature of `espalier eval`, when it is not that of the rollouts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) temperature: Option<f32>,
    /// Resamples of each bootstrap and flips of each test.
    pub(crate) rounds: usize,
    /// As `rollout.world_bytes_max`, for the rollouts of `espalier eval`.
    pub(crate) world_bytes_max: u64,
    /// Price of an hour of the machine that trains: with it, improvements between checkpoints have
    /// a cost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) machine_hour: Option<f64>,
    /// What is evaluated, the one that others are compared with first; the policy alone without.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) models: Vec<ModelSource>,
    /// Budgets by task or family; the task's own wins.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) budgets: BTreeMap<String, Budget>,
}

impl Default for EvalSettings {
    fn default() -> Self {
        Self {
            tasks: 0,
            samples: 4,
            greedy: true,
            every: 0,
            temperature: None,
            rounds: 10_000,
            world_bytes_max: 4 << 20,
            machine_hour: None,
            models: Vec::new(),
            budgets: BTreeMap::new(),
        }
    }
}

/// A model to evaluate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelSource {
    /// What it is called in the report.
    pub(crate) name: String,
    /// KIND:WHERE as `serve` takes it, or `teacher`, or `teacher:SHARE`.
    pub(crate) engine: String,
    /// Folder with tokenizer and chat template, when it is neither the engine's nor the policy's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// The model to ask a server of text (`openai:URL`) for, when it has several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) model: Option<String>,
    /// The name of the variable that holds the server's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) key_variable: Option<String>,
    /// File with certificates of authorities that the server may be signed by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) authorities: Option<PathBuf>,
    /// Sampling temperature, when it is another than the evaluation's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) temperature: Option<f32>,
    /// What its tokens cost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) price: Option<bench::Price>,
}

impl ModelSource {
    /// From `NAME=ENGINE`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (name, engine) = text
            .split_once('=')
            .ok_or_else(|| format!("{text:?}: expected NAME=KIND:WHERE"))?;
        Ok(Self {
            name: name.to_owned(),
            engine: engine.to_owned(),
            tokenizer: None,
            model: None,
            key_variable: None,
            authorities: None,
            temperature: None,
            price: None,
        })
    }
}

/// What one attempt at a task may use, below the run's own limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Budget {
    /// Model calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) calls_max: Option<u32>,
    /// Seconds of the harness.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) harness_s: Option<u64>,
}

/// Key, what is expected, what was found.
pub(crate) type Wrong = (String, &'static str, String);

impl EvalSettings {
    /// Whether the values make sense.
    pub(crate) fn check(&self) -> Result<(), Wrong> {
        let mut names = std::collections::BTreeSet::new();
        for model in &self.models {
            // Names become parts of rollouts' names.
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
            let short = !model.name.is_empty() && model.name.len() <= 32;
            if !(short && model.name.chars().all(plain)) {
                return Err((
                    "eval.models.name".into(),
                    "1 to 32 of letters, digits, `.`, `_`, `-`",
                    format!("{:?}", model.name),
                ));
            }
            if !names.insert(&model.name) {
                return Err((
                    "eval.models.name".into(),
                    "a name of its own for each model",
                    format!("{:?} twice", model.name),
                ));
            }
        }
        let temperatures = self.models.iter().filter_map(|model| model.temperature);
        for temperature in temperatures.chain(self.temperature) {
            if !(temperature.is_finite() && temperature >= 0.0) {
                return Err((
                    "eval.temperature".into(),
                    "0 or a number above",
                    temperature.to_string(),
                ));
            }
        }
        let prices = self.models.iter().filter_map(|model| model.price);
        let prices = prices.flat_map(|price| {
            [
                price.prompt_mtok,
                price.prompt_again_mtok,
                price.generated_mtok,
            ]
        });
        for price in prices.chain(self.machine_hour) {
            if !(price.is_finite() && price >= 0.0) {
                return Err((
                    "eval prices".into(),
                    "0 or a number above",
                    price.to_string(),
                ));
            }
        }
        if self.rounds == 0 {
            return Err(("eval.rounds".into(), "at least 1", "0".into()));
        }
        for (name, budget) in &self.budgets {
            if budget.calls_max == Some(0) || budget.harness_s == Some(0) {
                return Err((format!("eval.budgets.{name}"), "at least 1", "0".to_owned()));
            }
        }
        Ok(())
    }

    /// The budget of a task: its own, its family's, or none.
    pub(crate) fn budget(&self, task: &task::Task) -> Budget {
        self.budgets
            .get(task.id.as_str())
            .or_else(|| self.budgets.get(&task.family))
            .copied()
            .unwrap_or_default()
    }
}
