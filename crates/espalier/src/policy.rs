//! Loading a policy folder: tokenizer and template, weights.

use std::{path::Path, sync::Arc};

use codec::Codec;
use engine::embedded;
use model::{Weights, device::Device};

use crate::{error::CliError, recipe::PolicySource};

/// Files of a policy folder that belong into every checkpoint beside the weights.
pub(crate) const TEXT_FILES: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
];

/// Tokenizer and template.
pub(crate) fn load_codec(folder: &Path) -> Result<Arc<Codec>, CliError> {
    load_codec_with(folder, codec::Settings::default())
}

/// The same with settings of one's own.
pub(crate) fn load_codec_with(
    folder: &Path,
    settings: codec::Settings,
) -> Result<Arc<Codec>, CliError> {
    Codec::load_with(folder, settings)
        .map(Arc::new)
        .map_err(|error| {
            CliError::failed(
                format!("policy {}: tokenizer and template", folder.display()),
                error,
            )
        })
}

/// Tokenizer and template of the built-in policy, out of this program: it encodes any text, so it
/// serves where nobody asks for the tokens of a model of one's own.
pub(crate) fn built_in_codec(settings: codec::Settings) -> Result<Arc<Codec>, CliError> {
    let failed = |error: String| CliError::failed("the built-in tokenizer", error);
    let mut config: serde_json::Value =
        serde_json::from_str(include_str!("../../../policy/tokenizer_config.json"))
            .map_err(|error| failed(error.to_string()))?;
    config["chat_template"] = include_str!("../../../policy/chat_template.jinja").into();
    let tokenizer = include_bytes!("../../../policy/tokenizer.json");
    Codec::from_parts(tokenizer, &config, settings)
        .map(Arc::new)
        .map_err(|error| failed(error.to_string()))
}

/// Weights, checked against the tokenizer.
pub(crate) fn load_weights(folder: &Path, codec: &Codec) -> Result<Weights, CliError> {
    let weights = model::load(folder).map_err(|error| {
        CliError::failed(format!("policy {}: weights", folder.display()), error)
    })?;
    let vocabulary = u32::try_from(weights.config.vocab_size).unwrap_or(u32::MAX);
    codec.check_model(vocabulary).map_err(|error| {
        CliError::failed(
            format!(
                "policy {}: tokenizer and weights do not fit",
                folder.display()
            ),
            error,
        )
    })?;
    Ok(weights)
}

/// The text files that are there, to be copied into checkpoints.
pub(crate) fn text_files(folder: &Path) -> Vec<std::path::PathBuf> {
    TEXT_FILES
        .iter()
        .map(|name| folder.join(name))
        .filter(|path| path.is_file())
        .collect()
}

/// The device that a recipe names. One that is not here is an error: nothing falls back.
pub(crate) fn device(source: &PolicySource) -> Result<Device, CliError> {
    Device::open(&source.device).map_err(|error| {
        CliError::usage(
            format!("policy.device: {error}"),
            "docs/learner.md says what runs on a device",
        )
    })
}

/// Starts the embedded engine over these weights.
pub(crate) fn start_engine(
    source: &PolicySource,
    codec: &Arc<Codec>,
    weights: Arc<Weights>,
    version: record::PolicyVersion,
) -> Result<Arc<embedded::Embedded>, CliError> {
    let detokenise = {
        let codec = Arc::clone(codec);
        Arc::new(move |ids: &[u32]| codec.decode(ids)) as embedded::Detokenise
    };
    let settings = embedded::Settings {
        threads: source.threads,
        device: device(source)?,
        detokenise: Some(detokenise),
        ..embedded::Settings::default()
    };
    let name = source.folder.display().to_string();
    embedded::Embedded::start(&name, weights, version, settings)
        .map(Arc::new)
        .map_err(|error| CliError::failed("the engine could not start", error))
}
