//! `espalier policy`: policies from files of other programs.

use std::path::{Path, PathBuf};

use codec::Codec;
use model::{
    files::{Precision, write_atomically},
    gguf::{self, Text},
};
use serde_json::{Value, json};

use crate::{display::Display, error::CliError};

/// Bring a policy into the form that recipes name: a Hugging Face folder.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Make a folder from a GGUF file (Llama and Qwen shapes, byte-level BPE). Quantised weights
    /// are dequantised once; they are trained and run in f32.
    ///
    /// Example: espalier policy import SmolLM2-135M-Instruct.Q4_1.gguf --out runs/smollm2
    /// --template policy/chat_template.jinja
    Import {
        /// The file.
        file: PathBuf,
        /// New folder.
        #[arg(long)]
        out: PathBuf,
        /// Chat template, instead of the file's: many small models' templates know no tools.
        #[arg(long)]
        template: Option<PathBuf>,
    },
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<(), CliError> {
    let Action::Import {
        file,
        out,
        template,
    } = &arguments.action;
    let display = Display::new(json);
    let failed = |error| CliError::failed(file.display().to_string(), error);
    let text = gguf::load_text(file).map_err(failed)?;
    let template = match template {
        Some(path) => std::fs::read_to_string(path)
            .map_err(|error| CliError::failed(path.display().to_string(), error))?,
        None => text.chat_template.clone().ok_or_else(|| {
            CliError::usage(
                format!("{}: there is no chat template in it", file.display()),
                "name one with --template FILE",
            )
        })?,
    };
    let tokenizer = tokenizer(&text).map_err(|reason| {
        CliError::usage(
            format!("{}: {reason}", file.display()),
            "bring the model as a Hugging Face folder instead",
        )
    })?;
    let weights = gguf::load(file).map_err(failed)?;
    // Whole or not at all, and nothing that is there is written over.
    if out.exists() {
        return Err(CliError::usage(
            format!("{} exists already", out.display()),
            "choose another --out, or remove it",
        ));
    }
    let name = out.file_name().map(|name| name.to_string_lossy());
    let partial = out.with_file_name(format!(".{}.partial", name.unwrap_or_default()));
    if partial.exists() {
        std::fs::remove_dir_all(&partial)
            .map_err(|error| CliError::failed(partial.display().to_string(), error))?;
    }
    model::save(&weights, &partial, Precision::Bf16)
        .map_err(|error| CliError::failed(out.display().to_string(), error))?;
    write(&partial, "tokenizer.json", &tokenizer)?;
    let end = text.end.and_then(|id| text.tokens.get(id as usize));
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": false,
        "eos_token": end,
        "chat_template": template,
    });
    write(&partial, "tokenizer_config.json", &config)?;
    let codec = Codec::load(&partial)
        .map_err(|error| CliError::failed("the tokenizer and template that came of it", error))?;
    std::fs::rename(&partial, out)
        .map_err(|error| CliError::failed(out.display().to_string(), error))?;
    display.line(&format!(
        "{}: {} parameters, {} tokens, tool calls as in {}, history {}",
        out.display(),
        weights.len(),
        text.tokens.len(),
        codec.grammar(),
        codec.mode().name(),
    ));
    display.json(&json!({
        "folder": out,
        "parameters": weights.len(),
        "tokens": text.tokens.len(),
        "grammar": codec.grammar(),
        "mode": codec.mode().name(),
    }));
    Ok(())
}

fn write(folder: &Path, name: &str, value: &Value) -> Result<(), CliError> {
    let path = folder.join(name);
    let failed = |error: &dyn std::fmt::Display| {
        CliError::plain(format!("{}: {error}", path.display()), "is the disk full?")
    };
    let bytes = serde_json::to_vec(value).map_err(|error| failed(&error))?;
    write_atomically(&path, &bytes).map_err(|error| failed(&error))
}

/// A regular expression that keeps its matches as pieces.
fn isolated(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

/// How text is split before merging, by the name that GGUF files give it. The patterns are those
/// that the models' own tokenizer files hold.
fn split(name: &str) -> Result<Value, String> {
    let bytes = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
    let steps = match name {
        "gpt-2" => vec![bytes(true)],
        "smollm" => vec![
            json!({"type": "Digits", "individual_digits": true}),
            bytes(true),
        ],
        "qwen2" => vec![
            isolated(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            bytes(false),
        ],
        "llama-bpe" => vec![
            isolated(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            bytes(false),
        ],
        other => {
            return Err(format!(
                "tokenizer.ggml.pre: expected gpt-2, smollm, qwen2 or llama-bpe, found {other:?}"
            ));
        }
    };
    Ok(json!({"type": "Sequence", "pretokenizers": steps}))
}

/// The same tokenizer as a `tokenizer.json`.
fn tokenizer(text: &Text) -> Result<Value, String> {
    let special = text.tokens.iter().enumerate();
    let special = special.filter(|(id, _)| text.special[*id]);
    let added: Vec<Value> = special
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    let vocabulary: serde_json::Map<String, Value> = (0..)
        .zip(&text.tokens)
        .map(|(id, token)| (token.clone(), Value::from(id)))
        .collect();
    if vocabulary.len() != text.tokens.len() {
        return Err(format!(
            "tokenizer.ggml.tokens: {} tokens, {} of them different",
            text.tokens.len(),
            vocabulary.len()
        ));
    }
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": split(&text.split)?,
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocabulary, "merges": text.merges,
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The byte-level alphabet: printable bytes are themselves, the others move above 255.
    fn alphabet() -> Vec<String> {
        let plain = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let mut moved = 256;
        (0..256)
            .map(|byte| {
                let code = if plain(byte) {
                    byte
                } else {
                    moved += 1;
                    moved - 1
                };
                char::from_u32(code).unwrap().to_string()
            })
            .collect()
    }

    fn text(split: &str) -> Text {
        let mut tokens = alphabet();
        tokens.extend(["he", "12", "<|im_start|>", "<|im_end|>"].map(str::to_owned));
        let special = tokens.iter().map(|token| token.len() > 4).collect();
        Text {
            special,
            merges: vec!["h e".into(), "1 2".into()],
            split: split.into(),
            end: Some(259),
            chat_template: None,
            tokens,
        }
    }

    #[test]
    fn text_is_split_as_the_name_says_and_comes_back() {
        for (name, digits) in [("gpt-2", 1), ("smollm", 2), ("qwen2", 2), ("llama-bpe", 1)] {
            let json = tokenizer(&text(name)).unwrap();
            let tokens = codec_tokens(&json);
            let said = "<|im_start|>the 12 \u{e4}\n\n it's<|im_end|>";
            let ids = tokens.encode(said).unwrap();
            assert_eq!(tokens.decode(&ids), said, "{name}");
            assert_eq!((ids[0], ids.last()), (258, Some(&259)), "{name}");
            let twelve = tokens.encode("12").unwrap();
            assert_eq!(twelve.len(), digits, "{name}: {twelve:?}");
            assert!(ids.contains(&256), "{name}: merged");
        }
        let error = tokenizer(&text("tekken")).unwrap_err();
        assert!(error.contains("tekken"), "{error}");
    }

    fn codec_tokens(json: &Value) -> Codec {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        let policy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policy");
        for file in ["tokenizer_config.json", "chat_template.jinja"] {
            std::fs::copy(policy.join(file), folder.path().join(file)).unwrap();
        }
        Codec::load(folder.path()).unwrap()
    }
}
