//! What a GGUF file says about text: tokens, merges, special tokens, chat template.

use std::path::Path;

use super::{File, Value, read_file};
use crate::files::ModelError;

/// The tokenizer of a GGUF file, as far as byte-level BPE needs it.
#[derive(Debug, Clone, PartialEq)]
pub struct Text {
    /// Tokens by id, in the byte-level alphabet of GPT-2.
    pub tokens: Vec<String>,
    /// Whether each is a special token (control or user-defined).
    pub special: Vec<bool>,
    /// Pairs that are merged, best first: two tokens with a space between them.
    pub merges: Vec<String>,
    /// Name of the rule that splits text before merging, e.g. `smollm` or `qwen2`.
    pub split: String,
    /// The token that ends a turn.
    pub end: Option<u32>,
    /// The chat template, in the Jinja dialect of Hugging Face.
    pub chat_template: Option<String>,
}

/// Types of tokens that are never made by merging.
const CONTROL: f64 = 3.0;
const USER_DEFINED: f64 = 4.0;

/// Reads the tokenizer of a file; its tensors are not looked at.
///
/// # Errors
/// [`ModelError::File`]; [`ModelError::Tensors`] naming the key that is missing or of another type.
pub fn load_text(path: &Path) -> Result<Text, ModelError> {
    read_file(path, |file| file.tokenizer())
}

impl File<'_> {
    fn tokenizer(&self) -> Result<Text, String> {
        let text = |key: &str| match self.values.get(key) {
            Some(Value::Text(text)) => Some(text.clone()),
            _ => None,
        };
        let list = |key: &str| match self.values.get(key) {
            Some(Value::List(values)) => Ok(values),
            Some(_) => Err(format!("{key}: expected a list")),
            None => Err(format!("{key} is missing")),
        };
        let texts = |key: &str| -> Result<Vec<String>, String> {
            let each = list(key)?.iter().map(|value| match value {
                Value::Text(text) => Ok(text.clone()),
                other => Err(format!("{key}: expected texts, found {other:?}")),
            });
            each.collect()
        };
        let model = text("tokenizer.ggml.model").unwrap_or_default();
        if model != "gpt2" {
            return Err(format!(
                "tokenizer.ggml.model: expected gpt2 (byte-level BPE), found {model:?}"
            ));
        }
        let tokens = texts("tokenizer.ggml.tokens")?;
        let kinds = list("tokenizer.ggml.token_type")?;
        if kinds.len() != tokens.len() {
            return Err(format!(
                "tokenizer.ggml.token_type: expected {} entries, found {}",
                tokens.len(),
                kinds.len()
            ));
        }
        let special = kinds
            .iter()
            .map(|kind| matches!(kind, Value::Number(kind) if [CONTROL, USER_DEFINED].contains(kind)))
            .collect();
        Ok(Text {
            tokens,
            special,
            merges: texts("tokenizer.ggml.merges")?,
            split: text("tokenizer.ggml.pre").unwrap_or_default(),
            end: self
                .number("tokenizer.ggml.eos_token_id")
                .map(|id| id as u32),
            chat_template: text("tokenizer.chat_template"),
        })
    }
}
