//! The engines that `espalier serve` is told to serve.

use std::sync::Arc;

use codec::Codec;
use engine::{
    Engine,
    pool::{self, Pool},
};

use super::{Arguments, History};
use crate::{
    engines::{Kind, Wants},
    error::CliError,
    policy,
};

/// The codec and the engine, or the pool of engines, that the arguments name.
pub(super) async fn start(
    arguments: &Arguments,
) -> Result<(Arc<Codec>, Arc<dyn Engine>), CliError> {
    let kinds = arguments
        .engine
        .iter()
        .map(|text| Kind::parse(text, ""))
        .collect::<Result<Vec<_>, _>>()?;
    let codec = codec(arguments, &kinds)?;
    let mut engines = Vec::with_capacity(kinds.len());
    for (kind, text) in kinds.iter().zip(&arguments.engine) {
        let wants = Wants {
            name: text,
            codec: &codec,
            threads: arguments.threads.max(1),
            device: &arguments.device,
            context_tokens: arguments.context_tokens,
            model: arguments.model.as_deref(),
            key_variable: arguments.engine_key_env.as_deref(),
            authorities: arguments.engine_authorities.as_deref(),
        };
        engines.push(kind.start(wants).await?);
    }
    let engine: Arc<dyn Engine> = match engines.len() {
        1 => engines.remove(0),
        _ => {
            let pool = Pool::start(engines, pool::Settings::default());
            Arc::new(pool.map_err(|error| CliError::failed("the engine", error))?)
        }
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
