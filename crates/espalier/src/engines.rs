//! The engines that `--engine`, `--model` and `[[eval.models]]` name: KIND:WHERE, one list for all.
//!
//! | engine | answers |
//! |---|---|
//! | `embedded:DIR` | a Hugging Face folder, in this process |
//! | `vllm:URL`, `sglang:URL` | a server that takes and gives tokens |
//! | `openai:URL` | a server of Chat Completions, text only: evaluated and captured, never trained |
//! | `scripted:FILE` | replies of a file of JSON lines |
//!
//! Whether further words are engines (`teacher`) is the caller's.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use codec::Codec;
use engine::{
    Engine, EngineError,
    remote::{Endpoint, Facts, sglang::Sglang, text::Text, vllm},
    scripted::{Replay, Script, Scripted},
};
use record::Secret;

use crate::{error::CliError, policy, recipe::PolicySource, teacher};

/// The kinds, for people.
pub(crate) const KINDS: &str = "embedded:DIR, vllm:URL, sglang:URL, openai:URL and scripted:FILE";
const KINDS_LATER: [&str; 1] = ["tinker"];
/// A server of text says no limit of its context: it refuses by itself what is too long.
const TEXT_CONTEXT_TOKENS_MAX: u32 = 1 << 24;

/// What is behind KIND:WHERE.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A folder.
    Embedded(PathBuf),
    /// An address.
    Vllm(String),
    /// An address.
    Sglang(String),
    /// An address.
    Openai(String),
    /// A file.
    Scripted(PathBuf),
}

/// What else an engine needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wants<'a> {
    /// What it is called in messages and in replies of scripted engines.
    pub(crate) name: &'a str,
    /// Tokenizer and template.
    pub(crate) codec: &'a Arc<Codec>,
    /// Threads of the embedded engine.
    pub(crate) threads: usize,
    /// `cpu` or `cuda`, of the embedded engine.
    pub(crate) device: &'a str,
    /// Tokens of prompt and reply together, when it is not what the engine says.
    pub(crate) context_tokens: Option<u32>,
    /// The model to ask a server of text for; the only one it has when `None`.
    pub(crate) model: Option<&'a str>,
    /// The variable of this process that holds the server's key.
    pub(crate) key_variable: Option<&'a str>,
    /// Certificates of authorities that the server may be signed by, beside the usual ones.
    pub(crate) authorities: Option<&'a Path>,
}

impl Kind {
    /// Reads KIND:WHERE. `more` are further kinds that the caller takes, for the message.
    pub(crate) fn parse(text: &str, more: &str) -> Result<Self, CliError> {
        let wrong = |what: String| {
            Err(CliError::usage(
                format!("engine {text:?}: {what}"),
                format!("today there are {KINDS}{more}"),
            ))
        };
        let Some((kind, place)) = text.split_once(':').filter(|(_, place)| !place.is_empty())
        else {
            return wrong("expected KIND:WHERE".to_owned());
        };
        match kind {
            "embedded" => Ok(Self::Embedded(place.into())),
            "vllm" => Ok(Self::Vllm(place.into())),
            "sglang" => Ok(Self::Sglang(place.into())),
            "openai" => Ok(Self::Openai(place.into())),
            "scripted" => Ok(Self::Scripted(place.into())),
            later if KINDS_LATER.contains(&later) => {
                wrong(format!("kind {kind} does not exist yet"))
            }
            _ => wrong(format!("unknown kind {kind:?}")),
        }
    }

    /// Starts it, or connects to it.
    pub(crate) async fn start(&self, wants: Wants<'_>) -> Result<Arc<dyn Engine>, CliError> {
        let failed =
            |error: EngineError| CliError::failed(format!("the engine {}", wants.name), error);
        let facts = |context_tokens_max: u32| Facts {
            context_tokens_max: wants.context_tokens.unwrap_or(context_tokens_max),
            vocabulary: wants.codec.vocabulary(),
            policy_version: 0,
        };
        let context = teacher::CONTEXT_TOKENS_MAX;
        match self {
            Self::Vllm(url) => {
                let endpoint = wants.endpoint(url)?;
                let engine = vllm::Vllm::detect(endpoint, facts(context)).await;
                Ok(Arc::new(engine.map_err(failed)?))
            }
            Self::Sglang(url) => {
                let engine = Sglang::connect(wants.endpoint(url)?, facts(context)).await;
                Ok(Arc::new(engine.map_err(failed)?))
            }
            Self::Openai(url) => {
                let endpoint = wants.endpoint(url)?;
                let model = match wants.model {
                    Some(model) => model.to_owned(),
                    None => Text::only_model(endpoint.clone()).await.map_err(|error| {
                        CliError::usage(
                            format!("the engine {}: {error}", wants.name),
                            "name the model: --model NAME with serve, `model` in [[eval.models]]",
                        )
                    })?,
                };
                let writer = Arc::new(wire::chat::request_body);
                let voice = teacher::voice(wants.codec);
                let facts = facts(TEXT_CONTEXT_TOKENS_MAX);
                let engine = Text::new(endpoint, facts, model, writer, voice);
                Ok(Arc::new(engine.map_err(failed)?))
            }
            Self::Embedded(folder) => {
                let weights = Arc::new(policy::load_weights(folder, wants.codec)?);
                let source = PolicySource {
                    folder: folder.clone(),
                    threads: wants.threads,
                    device: wants.device.to_owned(),
                };
                Ok(policy::start_engine(&source, wants.codec, weights, 0)?)
            }
            Self::Scripted(file) => {
                let script = Replay::load(file).map_err(|error| {
                    CliError::failed(format!("the scripted engine {}", wants.name), error)
                })?;
                Ok(wants.scripted(Arc::new(script)))
            }
        }
    }
}

impl Wants<'_> {
    /// An engine that replies as a script says.
    pub(crate) fn scripted(&self, script: Arc<dyn Script>) -> Arc<dyn Engine> {
        Arc::new(Scripted::new(
            self.name,
            script,
            teacher::voice(self.codec),
            self.context_tokens.unwrap_or(teacher::CONTEXT_TOKENS_MAX),
            self.codec.vocabulary(),
        ))
    }

    fn endpoint(&self, url: &str) -> Result<Endpoint, CliError> {
        let api_key = match self.key_variable {
            None => None,
            Some(variable) => match std::env::var(variable) {
                Ok(key) if !key.trim().is_empty() => Some(Secret::new(key.trim())),
                _ => {
                    return Err(CliError::usage(
                        format!("the key of engine {}: {variable} is not set", self.name),
                        format!("export {variable}=KEY, or do not name the variable"),
                    ));
                }
            },
        };
        Ok(Endpoint {
            api_key,
            authorities: self.authorities.map(Path::to_path_buf),
            ..Endpoint::new(url)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_a_kind_and_a_place() {
        let kind = |text| Kind::parse(text, "").map_err(|error| error.to_string());
        assert_eq!(kind("embedded:a/b:c"), Ok(Kind::Embedded("a/b:c".into())));
        assert_eq!(
            kind("openai:http://h:1/v1"),
            Ok(Kind::Openai("http://h:1/v1".into()))
        );
        assert_eq!(
            kind("scripted:x.jsonl"),
            Ok(Kind::Scripted("x.jsonl".into()))
        );
        let cases = [
            ("embedded", "expected KIND:WHERE"),
            ("embedded:", "expected KIND:WHERE"),
            ("tinker:http://host", "kind tinker does not exist yet"),
            ("magic:wand", "unknown kind \"magic\""),
        ];
        for (text, expected) in cases {
            let found = kind(text).unwrap_err();
            assert!(found.contains(expected), "{text} gave: {found}");
        }
    }
}
