//! The files of a model folder that concern text.

use std::path::Path;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::{CodecError, tokens::Tokens};

const CONFIG: &str = "tokenizer_config.json";
const GENERATION: &str = "generation_config.json";

/// What was read.
pub(crate) struct Files {
    /// `tokenizer.json`.
    pub(crate) tokenizer: Vec<u8>,
    /// Where it came from, for messages.
    pub(crate) tokenizer_name: String,
    /// The template without tools.
    pub(crate) template: String,
    /// The template with tools, when the model has a separate one.
    pub(crate) tool_template: Option<String>,
    /// `bos_token`, `eos_token` … as texts: the template's variables.
    pub(crate) specials: Map<String, Value>,
    /// `eos_token_id` of `generation_config.json`.
    generation_eos: Vec<u32>,
}

fn read(path: &Path) -> Result<Vec<u8>, CodecError> {
    std::fs::read(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => CodecError::MissingFile { path: path.into() },
        _ => CodecError::Unreadable {
            path: path.into(),
            source,
        },
    })
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, CodecError> {
    match read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(CodecError::MissingFile { .. }) => Ok(None),
        Err(other) => Err(other),
    }
}

fn object(path: &str, bytes: &[u8]) -> Result<Value, CodecError> {
    serde_json::from_slice(bytes).map_err(|error| CodecError::BadConfig {
        path: path.to_owned(),
        expected: "a JSON object",
        found: error.to_string(),
    })
}

impl Files {
    pub(crate) fn read(dir: &Path) -> Result<Self, CodecError> {
        let tokenizer_path = dir.join("tokenizer.json");
        let tokenizer = read(&tokenizer_path)?;
        let config_path = dir.join(CONFIG);
        let config = object(&config_path.display().to_string(), &read(&config_path)?)?;
        let jinja = match read_if_there(&dir.join("chat_template.jinja"))? {
            None => None,
            Some(bytes) => {
                Some(
                    String::from_utf8(bytes).map_err(|error| CodecError::BadConfig {
                        path: "chat_template.jinja".into(),
                        expected: "UTF-8 text",
                        found: error.to_string(),
                    })?,
                )
            }
        };
        let mut files = Self::assemble(tokenizer, &config, jinja, &dir.display().to_string())?;
        files.tokenizer_name = tokenizer_path.display().to_string();
        if let Some(bytes) = read_if_there(&dir.join(GENERATION))? {
            files.generation_eos = match object(GENERATION, &bytes)?.get("eos_token_id") {
                None | Some(Value::Null) => Vec::new(),
                Some(Value::Array(list)) => list.iter().map(id).collect::<Result<_, _>>()?,
                Some(one) => vec![id(one)?],
            };
        }
        Ok(files)
    }

    pub(crate) fn from_parts(tokenizer: &[u8], config: &Value) -> Result<Self, CodecError> {
        Self::assemble(tokenizer.to_vec(), config, None, "memory")
    }

    fn assemble(
        tokenizer: Vec<u8>,
        config: &Value,
        jinja: Option<String>,
        place: &str,
    ) -> Result<Self, CodecError> {
        let mut tool_template = None;
        let template = match (jinja, config.get("chat_template")) {
            (Some(text), _) => text,
            (None, Some(Value::String(text))) => text.clone(),
            (None, Some(Value::Array(list))) => {
                let named = |name: &str| {
                    list.iter()
                        .find(|item| item.get("name").and_then(Value::as_str) == Some(name))
                        .and_then(|item| item.get("template"))
                        .and_then(Value::as_str)
                        .map(str::to_owned)
                };
                tool_template = named("tool_use");
                named("default").ok_or_else(|| CodecError::NoTemplate { path: place.into() })?
            }
            _ => return Err(CodecError::NoTemplate { path: place.into() }),
        };
        let mut specials = Map::new();
        if let Some(config) = config.as_object() {
            for (name, value) in config {
                if !name.ends_with("_token") {
                    continue;
                }
                let text = value.as_str().or_else(|| value.get("content")?.as_str());
                if let Some(text) = text {
                    specials.insert(name.clone(), Value::from(text));
                }
            }
        }
        Ok(Self {
            tokenizer,
            tokenizer_name: "tokenizer.json".into(),
            template,
            tool_template,
            specials,
            generation_eos: Vec::new(),
        })
    }

    /// The ids that end a reply, as the files say.
    pub(crate) fn stop_ids(&self, tokens: &Tokens) -> Result<Vec<u32>, CodecError> {
        let mut ids = Vec::new();
        if let Some(text) = self.specials.get("eos_token").and_then(Value::as_str) {
            ids.push(tokens.id(text).ok_or_else(|| CodecError::UnknownStop {
                token: text.to_owned(),
                path: CONFIG,
            })?);
        }
        for &id in &self.generation_eos {
            if id >= tokens.vocabulary() {
                return Err(CodecError::UnknownStop {
                    token: id.to_string(),
                    path: GENERATION,
                });
            }
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        Ok(ids)
    }

    /// SHA-256 over everything that decides about ids.
    pub(crate) fn digest(&self, stop_ids: &[u32]) -> String {
        let mut hash = Sha256::new();
        for part in [
            self.tokenizer.as_slice(),
            self.template.as_bytes(),
            self.tool_template.as_deref().unwrap_or("").as_bytes(),
            format!("{:?} {stop_ids:?}", self.specials).as_bytes(),
        ] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hex::encode(hash.finalize())
    }
}

fn id(value: &Value) -> Result<u32, CodecError> {
    value
        .as_u64()
        .and_then(|id| u32::try_from(id).ok())
        .ok_or_else(|| CodecError::BadConfig {
            path: GENERATION.into(),
            expected: "`eos_token_id` to be an id or a list of ids",
            found: value.to_string(),
        })
}
