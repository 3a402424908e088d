//! What an evaluation asks: models by name. Every engine of `engines`, and
//!
//! | engine | answers |
//! |---|---|
//! | `teacher` | each task's reference solution |
//! | `teacher:SHARE` | the same in that share of attempts, drawn from the rollout's seed; in the others the last step is left out |

use std::{path::Path, sync::Arc};

use codec::Codec;
use engine::Engine;
use task::Task;

use crate::{
    engines::{self, Wants},
    error::CliError,
    policy,
    recipe::{ModelSource, Recipe},
    teacher::Teacher,
};

/// Kinds that `serve` does not have.
const MORE: &str = "; and teacher and teacher:SHARE";

/// What `engine` says.
#[derive(Debug, Clone, PartialEq)]
enum Kind {
    Engine(engines::Kind),
    Teacher { share: f64 },
}

impl Kind {
    fn parse(text: &str) -> Result<Self, CliError> {
        match text.split_once(':').unwrap_or((text, "")) {
            ("teacher", "") => Ok(Self::Teacher { share: 1.0 }),
            ("teacher", share) => match share.parse() {
                Ok(share) if (0.0..=1.0).contains(&share) => Ok(Self::Teacher { share }),
                _ => Err(CliError::usage(
                    format!("engine {text:?}: expected a share from 0 to 1"),
                    "e.g. teacher:0.5",
                )),
            },
            _ => engines::Kind::parse(text, MORE).map(Self::Engine),
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
            (Some(folder), _) | (None, Kind::Engine(engines::Kind::Embedded(folder))) => folder,
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
        let Kind::Engine(engines::Kind::Embedded(folder)) = &self.kind else {
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
        let wants = Wants {
            name: &self.source.name,
            codec: &self.codec,
            threads: recipe.policy.threads,
            device: &recipe.policy.device,
            context_tokens: None,
            model: self.source.model.as_deref(),
            key_variable: self.source.key_variable.as_deref(),
            authorities: self.source.authorities.as_deref(),
        };
        match &self.kind {
            Kind::Engine(kind) => kind.start(wants).await,
            Kind::Teacher { share } => {
                let teacher = Teacher::of(tasks, &recipe.harnesses, *share)?;
                Ok(wants.scripted(Arc::new(teacher)))
            }
        }
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
        assert_eq!(
            kind("openai:http://host/v1"),
            Ok(Kind::Engine(engines::Kind::Openai("http://host/v1".into())))
        );
        for text in ["teacher:2", "embedded:", "embedded", "magic:wand", ""] {
            assert!(kind(text).is_err(), "{text}");
        }
    }
}
