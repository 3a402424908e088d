//! `[verify]`: how rewards are mixed, and who judges rubrics.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use task::{Contract, Mix, Task};
use verify::judge::{Api, Ask, Cache, Endpoint, Panel, Scripted};

use super::eval::Wrong;
use crate::error::CliError;

/// Verifiers beyond the tasks' own code.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct VerifySettings {
    /// How code and judge become one reward, for tasks that have both; the format's own without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mix: Option<Mix>,
    /// Who judges rubrics; tasks that need one are not scored without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) judge: Option<JudgeSettings>,
}

/// A panel of judges.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JudgeSettings {
    /// Each is asked every question.
    pub(crate) models: Vec<JudgeModel>,
    /// Folder where answers are kept by digest, over runs; in memory only without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cache: Option<PathBuf>,
    /// Tries per question and judge.
    #[serde(default = "attempts_max")]
    pub(crate) attempts_max: u32,
    /// Pause before the second try, in milliseconds; doubled for each further one.
    #[serde(default = "pause_ms")]
    pub(crate) pause_ms: u64,
    /// Calls in all.
    #[serde(default = "calls_max")]
    pub(crate) calls_max: u64,
}

fn attempts_max() -> u32 {
    3
}

fn pause_ms() -> u64 {
    1000
}

fn calls_max() -> u64 {
    10_000
}

fn timeout_s() -> u64 {
    180
}

/// One judge.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "api", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum JudgeModel {
    /// A server that speaks Chat Completions.
    Openai(Server),
    /// A server that speaks Messages.
    Anthropic(Server),
    /// Fixed levels, for tests.
    Scripted {
        /// Levels by criterion.
        #[serde(default)]
        scores: BTreeMap<String, f64>,
        /// Level of every other criterion; without it the judge refuses.
        #[serde(default)]
        default: Option<f64>,
    },
}

/// Where a judge is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Server {
    /// Address up to `/chat/completions` or `/messages`.
    base: String,
    /// The model.
    model: String,
    /// Environment variable of this process that holds the key; the key itself is written nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key_variable: Option<String>,
    /// Limit of one call.
    #[serde(default = "timeout_s")]
    timeout_s: u64,
}

impl Server {
    fn endpoint(&self, api: Api) -> Result<Arc<dyn Ask>, CliError> {
        let key = match &self.key_variable {
            None => None,
            Some(name) => Some(std::env::var(name).map_err(|_| {
                CliError::usage(
                    format!(
                        "judge {}: the environment variable {name} is not set",
                        self.model
                    ),
                    "set it to the judge's key; recipes hold only its name",
                )
            })?),
        };
        let timeout = Duration::from_secs(self.timeout_s.max(1));
        let endpoint = Endpoint::new(api, &self.base, &self.model, key, timeout);
        Ok(Arc::new(endpoint))
    }
}

impl VerifySettings {
    /// Whether the values make sense.
    pub(crate) fn check(&self) -> Result<(), Wrong> {
        if let Some(judge) = &self.judge
            && judge.models.is_empty()
        {
            return Err((
                "verify.judge.models".into(),
                "at least one",
                "none".to_owned(),
            ));
        }
        Ok(())
    }

    /// The panel, when judges are named.
    pub(crate) fn panel(&self) -> Result<Option<Arc<Panel>>, CliError> {
        let Some(judge) = &self.judge else {
            return Ok(None);
        };
        let mut judges: Vec<Arc<dyn Ask>> = Vec::new();
        for (index, model) in judge.models.iter().enumerate() {
            judges.push(match model {
                JudgeModel::Openai(server) => server.endpoint(Api::OpenAi)?,
                JudgeModel::Anthropic(server) => server.endpoint(Api::Anthropic)?,
                JudgeModel::Scripted { scores, default } => Arc::new(Scripted::new(
                    &format!("scripted {}", index + 1),
                    scores.clone(),
                    *default,
                )),
            });
        }
        let cache = match &judge.cache {
            Some(folder) => Cache::folder(folder.clone()),
            None => Cache::memory(),
        };
        let mut panel = Panel::new(judges, cache);
        panel.attempts_max = judge.attempts_max;
        panel.pause = Duration::from_millis(judge.pause_ms);
        panel.calls_max = judge.calls_max;
        Ok(Some(Arc::new(panel)))
    }

    /// The task, scored by the recipe's mix when it has both code and rubric.
    pub(crate) fn mixed(&self, task: Arc<Task>) -> Arc<Task> {
        let both = task.grading.rubric.is_some() && task.verifier.contract != Contract::None;
        match self.mix {
            Some(mix) if both && task.grading.mix != mix => {
                let mut task = Arc::unwrap_or_clone(task);
                task.grading.mix = mix;
                task.digest = task::digest(&task);
                Arc::new(task)
            }
            _ => task,
        }
    }
}
