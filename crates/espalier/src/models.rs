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
    path::{Path, PathBuf},
    sync::Arc,
};

use codec::Codec;
use engine::{
    Engine,
    remote::{Endpoint, Facts, sglang::Sglang, vllm},
    scripted::{Replay, Script, Scripted},
};
use task::Task;

use crate::{
    error::CliError,
    policy,
    recipe::{ModelSource, PolicySource, Recipe},
    teacher::{self, Teacher},
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
                let engine = vllm::Vllm::detect(Endpoint::new(url), facts).await;
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
            Kind::Teacher { share } => {
                let teacher = Teacher::of(tasks, &recipe.harnesses, *share)?;
                Ok(self.scripted(Arc::new(teacher)))
            }
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
}
