//! What an evaluation asks: models of any kind, by name.
//!
//! | engine | answers |
//! |---|---|
//! | `embedded:DIR` | a Hugging Face folder, in this process |
//! | `vllm:URL`, `sglang:URL` | a server that takes and gives tokens |
//! | `scripted:FILE` | replies of a file of JSON lines |
//! | `teacher` | each task's reference solution |
//! | `teacher:SHARE` | the same in that share of attempts, drawn from the rollout's seed; in the others the last step is left out |

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use codec::Codec;
use engine::{
    Engine, EngineError, Hint,
    remote::{Endpoint, Facts, sglang::Sglang, vllm},
    scripted::{Replay, Script, Scripted},
};
use record::{Message, TaskId};
use task::{Step, Task};

use crate::{
    error::CliError,
    policy,
    recipe::{ModelSource, PolicySource, Recipe},
    teacher,
};

const KINDS: &str =
    "today there are embedded:DIR, vllm:URL, sglang:URL, scripted:FILE, teacher and teacher:SHARE";

/// What `engine` says.
#[derive(Debug, Clone, PartialEq)]
enum Kind {
    Embedded(PathBuf),
    Vllm(String),
    Sglang(String),
    Scripted(PathBuf),
    Teacher { share: f64 },
}

impl Kind {
    fn parse(text: &str) -> Result<Self, CliError> {
        let wrong = |why: &str| Err(CliError::usage(format!("engine {text:?}: {why}"), KINDS));
        let (kind, place) = text.split_once(':').unwrap_or((text, ""));
        match (kind, place) {
            ("teacher", "") => Ok(Self::Teacher { share: 1.0 }),
            ("teacher", share) => match share.parse() {
                Ok(share) if (0.0..=1.0).contains(&share) => Ok(Self::Teacher { share }),
                _ => wrong("expected a share from 0 to 1"),
            },
            (_, "") => wrong("expected KIND:WHERE"),
            ("embedded", folder) => Ok(Self::Embedded(folder.into())),
            ("vllm", url) => Ok(Self::Vllm(url.to_owned())),
            ("sglang", url) => Ok(Self::Sglang(url.to_owned())),
            ("scripted", file) => Ok(Self::Scripted(file.into())),
            _ => wrong("unknown kind"),
        }
    }
}

/// A model that can be started.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) source: ModelSource,
    pub(crate) codec: Arc<Codec>,
    kind: Kind,
}

impl Model {
    /// Reads tokenizer and template; weights are read when it starts.
    pub(crate) fn load(source: &ModelSource, recipe: &Recipe) -> Result<Self, CliError> {
        let kind = Kind::parse(&source.engine)?;
        let folder = match (&source.tokenizer, &kind) {
            (Some(folder), _) | (None, Kind::Embedded(folder)) => folder,
            _ => &recipe.policy.folder,
        };
        Ok(Self {
            codec: policy::load_codec(folder)?,
            source: source.clone(),
            kind,
        })
    }

    /// The run directory and the step of a checkpoint, when it is one.
    pub(crate) fn checkpoint(&self) -> Option<(&Path, u64)> {
        let Kind::Embedded(folder) = &self.kind else {
            return None;
        };
        let step = folder.file_name()?.to_str()?.strip_prefix("step-")?;
        let checkpoints = folder.parent()?;
        let run = checkpoints
            .file_name()
            .is_some_and(|name| name == "checkpoints")
            .then(|| checkpoints.parent())??;
        Some((run, step.parse().ok()?))
    }

    /// Starts its engine.
    pub(crate) async fn start(
        &self,
        recipe: &Recipe,
        tasks: &[Arc<Task>],
    ) -> Result<Arc<dyn Engine>, CliError> {
        let name = &self.source.name;
        let failed = |error| CliError::failed(format!("model {name}: the engine"), error);
        let facts = Facts {
            context_tokens_max: teacher::CONTEXT_TOKENS_MAX,
            vocabulary: self.codec.vocabulary(),
            policy_version: 0,
        };
        match &self.kind {
            Kind::Embedded(folder) => {
                let weights = Arc::new(policy::load_weights(folder, &self.codec)?);
                let source = PolicySource {
                    folder: folder.clone(),
                    ..recipe.policy.clone()
                };
                Ok(policy::start_engine(&source, &self.codec, weights, 0)?)
            }
            Kind::Vllm(url) => {
                let api = vllm::Api::default();
                let engine = vllm::Vllm::connect(Endpoint::new(url), facts, api).await;
                Ok(Arc::new(engine.map_err(failed)?))
            }
            Kind::Sglang(url) => {
                let engine = Sglang::connect(Endpoint::new(url), facts).await;
                Ok(Arc::new(engine.map_err(failed)?))
            }
            Kind::Scripted(file) => {
                let script = Replay::load(file).map_err(|error| {
                    CliError::failed(format!("model {name}: the scripted engine"), error)
                })?;
                Ok(self.scripted(Arc::new(script)))
            }
            Kind::Teacher { share } => Ok(self.scripted(Arc::new(Teacher::of(tasks, *share)))),
        }
    }

    fn scripted(&self, script: Arc<dyn Script>) -> Arc<dyn Engine> {
        Arc::new(Scripted::new(
            &self.source.name,
            script,
            teacher::voice(&self.codec),
            teacher::CONTEXT_TOKENS_MAX,
            self.codec.vocabulary(),
        ))
    }
}

/// Plays reference solutions, not always to their ends.
#[derive(Debug)]
struct Teacher {
    solutions: HashMap<TaskId, Vec<Step>>,
    share: f64,
}

impl Teacher {
    fn of(tasks: &[Arc<Task>], share: f64) -> Self {
        let solutions = tasks
            .iter()
            .filter_map(|task| Some((task.id.clone(), task::teacher::reference(task).ok()?)))
            .collect();
        Self { solutions, share }
    }
}

/// A number in [0, 1) from a seed (the last mix of `SplitMix64`).
fn draw(seed: u64) -> f64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
}

impl Script for Teacher {
    fn reply(&self, hint: &Hint) -> Result<Message, EngineError> {
        let no_script = |why: String| EngineError::NoScript(why);
        let rollout = hint
            .rollout
            .as_ref()
            .ok_or_else(|| no_script("the call does not say which rollout it is of".into()))?;
        let steps = self
            .solutions
            .get(&rollout.task)
            .ok_or_else(|| no_script(format!("task {} has no solution", rollout.task)))?;
        let mut steps = steps.clone();
        if draw(rollout.seed) >= self.share
            && let Some(last) = steps.iter().rposition(|step| !matches!(step, Step::Say(_)))
        {
            steps.remove(last);
        }
        task::teacher::next_message(&steps, &hint.conversation)
            .map_err(|error| no_script(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_told_apart() {
        let kind = |text| Kind::parse(text).map_err(|error| error.to_string());
        assert_eq!(kind("teacher"), Ok(Kind::Teacher { share: 1.0 }));
        assert_eq!(kind("teacher:0.25"), Ok(Kind::Teacher { share: 0.25 }));
        assert_eq!(kind("embedded:a:b"), Ok(Kind::Embedded("a:b".into())));
        for text in ["teacher:2", "embedded:", "embedded", "magic:wand", ""] {
            assert!(kind(text).is_err(), "{text}");
        }
    }

    #[test]
    fn draws_are_even() {
        let below: usize = (0..10_000).filter(|seed| draw(*seed) < 0.3).count();
        assert!((2_800..3_200).contains(&below), "{below}");
    }
}
