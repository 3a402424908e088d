//! The engines that `espalier serve` is told to serve.

use std::{path::PathBuf, sync::Arc};

use codec::Codec;
use engine::{
    Engine, EngineError,
    pool::{self, Pool},
    remote::{Endpoint, Facts, sglang::Sglang, text::Text, vllm},
    scripted::{Replay, Scripted},
};
use record::Secret;

use super::{Arguments, History, KINDS, KINDS_LATER, TEXT_CONTEXT_TOKENS_MAX};
use crate::{error::CliError, policy, recipe::PolicySource, teacher};

/// What `--engine` says.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Embedded(PathBuf),
    Vllm(String),
    Sglang(String),
    Openai(String),
    Scripted(PathBuf),
}

/// The codec and the engine, or the pool of engines, that the arguments name.
pub(super) async fn start(
    arguments: &Arguments,
) -> Result<(Arc<Codec>, Arc<dyn Engine>), CliError> {
    let kinds = arguments
        .engine
        .iter()
        .map(|text| Kind::parse(text))
        .collect::<Result<Vec<_>, _>>()?;
    let codec = codec(arguments, &kinds)?;
    let mut engines = Vec::with_capacity(kinds.len());
    for kind in &kinds {
        engines.push(kind.start(&codec, arguments).await?);
    }
    let engine: Arc<dyn Engine> = match engines.len() {
        1 => engines.remove(0),
        _ => Arc::new(Pool::start(engines, pool::Settings::default()).map_err(no_engine)?),
    };
    Ok((codec, engine))
}

/// One tokenizer for all engines: they serve the same model.
fn codec(arguments: &Arguments, kinds: &[Kind]) -> Result<Arc<Codec>, CliError> {
    let settings = || codec::Settings {
        enable_thinking: arguments.thinking,
        history: match arguments.history {
            History::AsGenerated => codec::History::AsGenerated,
            History::AsTemplate => codec::History::AsTemplate,
        },
        ..codec::Settings::default()
    };
    if let Some(folder) = &arguments.tokenizer {
        return policy::load_codec_with(folder, settings());
    }
    let embedded = kinds.iter().find_map(|kind| match kind {
        Kind::Embedded(folder) => Some(folder),
        _ => None,
    });
    if let Some(folder) = embedded {
        return policy::load_codec_with(folder, settings());
    }
    let what = match kinds.iter().find(|kind| !matches!(kind, Kind::Openai(_))) {
        None => return policy::built_in_codec(settings()),
        Some(Kind::Scripted(_)) => "a scripted engine has no tokenizer of its own",
        Some(_) => {
            "the tokenizer of a server's model must be here, because prompts are sent as tokens"
        }
    };
    Err(CliError::usage(
        what,
        "add --tokenizer DIR, a folder with tokenizer.json and chat template",
    ))
}

fn no_engine(error: EngineError) -> CliError {
    CliError::failed("the engine", error)
}

fn endpoint(url: &str, arguments: &Arguments) -> Result<Endpoint, CliError> {
    let api_key = match &arguments.engine_key_env {
        None => None,
        Some(variable) => match std::env::var(variable) {
            Ok(key) if !key.trim().is_empty() => Some(Secret::new(key.trim())),
            _ => {
                return Err(CliError::usage(
                    format!("--engine-key-env {variable}: this variable is not set"),
                    format!("export {variable}=KEY, or leave the flag out"),
                ));
            }
        },
    };
    Ok(Endpoint {
        api_key,
        authorities: arguments.engine_authorities.clone(),
        ..Endpoint::new(url)
    })
}

impl Kind {
    fn parse(text: &str) -> Result<Self, CliError> {
        let wrong = |what: String| Err(CliError::usage(what, format!("today there are {KINDS}")));
        let Some((kind, place)) = text.split_once(':').filter(|(_, place)| !place.is_empty())
        else {
            return wrong(format!("--engine {text:?}: expected KIND:WHERE"));
        };
        match kind {
            "embedded" => Ok(Self::Embedded(place.into())),
            "vllm" => Ok(Self::Vllm(place.into())),
            "sglang" => Ok(Self::Sglang(place.into())),
            "openai" => Ok(Self::Openai(place.into())),
            "scripted" => Ok(Self::Scripted(place.into())),
            later if KINDS_LATER.contains(&later) => {
                wrong(format!("--engine {text:?}: kind {kind} does not exist yet"))
            }
            _ => wrong(format!("--engine {text:?}: unknown kind {kind:?}")),
        }
    }

    async fn start(
        &self,
        codec: &Arc<Codec>,
        arguments: &Arguments,
    ) -> Result<Arc<dyn Engine>, CliError> {
        let facts = |context_tokens_max: u32| Facts {
            context_tokens_max: arguments.context_tokens.unwrap_or(context_tokens_max),
            vocabulary: codec.vocabulary(),
            policy_version: 0,
        };
        let context = teacher::CONTEXT_TOKENS_MAX;
        match self {
            Self::Vllm(url) => {
                let api = vllm::Api::default();
                let endpoint = endpoint(url, arguments)?;
                let engine = vllm::Vllm::connect(endpoint, facts(context), api).await;
                Ok(Arc::new(engine.map_err(no_engine)?))
            }
            Self::Sglang(url) => {
                let engine = Sglang::connect(endpoint(url, arguments)?, facts(context)).await;
                Ok(Arc::new(engine.map_err(no_engine)?))
            }
            Self::Openai(url) => {
                let endpoint = endpoint(url, arguments)?;
                let model = match &arguments.model {
                    Some(model) => model.clone(),
                    None => Text::only_model(endpoint.clone()).await.map_err(|error| {
                        CliError::usage(
                            format!("the engine: {error}"),
                            "name the model with --model NAME",
                        )
                    })?,
                };
                let facts = facts(TEXT_CONTEXT_TOKENS_MAX);
                let writer = Arc::new(wire::chat::request_body);
                let voice = teacher::voice(codec);
                let engine = Text::new(endpoint, facts, model, writer, voice);
                Ok(Arc::new(engine.map_err(no_engine)?))
            }
            Self::Embedded(folder) => {
                let weights = Arc::new(policy::load_weights(folder, codec)?);
                let source = PolicySource {
                    folder: folder.clone(),
                    threads: arguments.threads.max(1),
                    device: arguments.device.clone(),
                };
                Ok(policy::start_engine(&source, codec, weights, 0)?)
            }
            Self::Scripted(file) => {
                let script = Replay::load(file)
                    .map_err(|error| CliError::failed("the scripted engine", error))?;
                Ok(Arc::new(Scripted::new(
                    &file.display().to_string(),
                    Arc::new(script),
                    teacher::voice(codec),
                    arguments.context_tokens.unwrap_or(context),
                    codec.vocabulary(),
                )))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_a_kind_and_a_place() {
        let kind = |text| Kind::parse(text).map_err(|error| error.to_string());
        assert_eq!(kind("embedded:a/b:c"), Ok(Kind::Embedded("a/b:c".into())));
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
