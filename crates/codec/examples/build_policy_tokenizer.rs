//! Builds the tokenizer of the built-in policy: `cargo run --release -p codec --example
//! build_policy_tokenizer [FOLDER]`. Reads `words.txt` and `chat_template.jinja` in FOLDER
//! (default `policy`) and writes `tokenizer.json`, `tokenizer_config.json` and
//! `generation_config.json` beside them.
//!
//! The vocabulary is near-byte: special tokens, the 256 bytes, and the words and pieces of
//! `words.txt`. There are no merges: a piece of the splitting rule is either one token, or is
//! spelled in bytes. So invented names are spelled in bytes wherever they occur, and a small
//! model can copy them; and every text has exactly one encoding, which decodes to itself.
//!
//! The splitting rule: an escape of JSON strings, letters (with one space before), one digit,
//! one of `_ . / -` or a lone backslash, other signs (with one space before), white space.

use std::{collections::HashSet, error::Error, io::Write as _, path::Path};

use serde_json::{Map, Value, json};
use tokenizers::{PreTokenizedString, PreTokenizer, PreTokenizerWrapper};

/// Ids 0 to 8, in this order. The first two groups end texts and turns.
pub const SPECIALS: [&str; 9] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
];

const SPLIT: &str = concat!(
    r#"\\["'\\/$nt]"#,
    r"| ?\p{L}+",
    r"|\p{N}",
    r"|[_./\-\\]",
    r"| ?[^\s\p{L}\p{N}_./\-\\]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// The printable character that stands for a byte in a byte-level vocabulary: itself when it is
/// printable, else the next free one from U+0100.
fn symbol(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        char::from(byte)
    } else {
        let before = (0..byte).filter(|byte| !printable(*byte)).count() as u32;
        char::from_u32(0x100 + before).unwrap_or('\u{fffd}')
    }
}

fn symbols(text: &str) -> String {
    text.bytes().map(symbol).collect()
}

fn pre_tokenizer() -> Value {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
    ]})
}

/// The words and pieces in the order of the file, each once.
fn pieces(words: &str) -> Result<Vec<String>, Box<dyn Error>> {
    let splitter: PreTokenizerWrapper = serde_json::from_value(pre_tokenizer())?;
    let mut pieces = Vec::new();
    let mut seen = HashSet::new();
    for (index, line) in words.lines().enumerate() {
        let at = |what: String| format!("words.txt:{}: {what}", index + 1);
        let line = line.trim();
        let mut wanted = Vec::new();
        if line.starts_with('"') {
            for piece in serde_json::Deserializer::from_str(line).into_iter::<String>() {
                wanted.push(piece.map_err(|error| at(format!("not a JSON text: {error}")))?);
            }
        } else if !line.starts_with('#') {
            for word in line.split_whitespace() {
                wanted.push(word.to_owned());
                wanted.push(format!(" {word}"));
            }
        }
        for piece in wanted {
            let mut split = PreTokenizedString::from(piece.as_str());
            splitter
                .pre_tokenize(&mut split)
                .map_err(|error| error.to_string())?;
            let parts = split.get_splits(
                tokenizers::OffsetReferential::Original,
                tokenizers::OffsetType::Byte,
            );
            let alone = parts.len() == 1;
            // Leading-space forms are made for every word; a few have none.
            if !alone {
                return Err(at(format!(
                    "the splitting rule never yields {piece:?} as one piece"
                ))
                .into());
            }
            // Single bytes are in the vocabulary anyway.
            if piece.len() > 1 && seen.insert(piece.clone()) {
                pieces.push(piece);
            }
        }
    }
    Ok(pieces)
}

/// `tokenizer.json`.
///
/// # Errors
/// A sentence with the line of `words` that cannot be used.
pub fn tokenizer(words: &str) -> Result<Value, Box<dyn Error>> {
    let mut vocabulary = Map::new();
    for special in SPECIALS {
        vocabulary.insert(special.to_owned(), json!(vocabulary.len()));
    }
    for byte in 0..=255u8 {
        vocabulary.insert(symbol(byte).to_string(), json!(vocabulary.len()));
    }
    for piece in pieces(words)? {
        vocabulary.insert(symbols(&piece), json!(vocabulary.len()));
    }
    let added: Vec<Value> = SPECIALS
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": content.starts_with("<|")})
        })
        .collect();
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer(),
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": true,
            "vocab": vocabulary,
            "merges": [],
        },
    }))
}

/// `tokenizer_config.json`.
pub fn config(template: &str) -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": false,
        "add_prefix_space": false,
        "bos_token": null,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": null,
        "clean_up_tokenization_spaces": false,
        "chat_template": template,
    })
}

/// `generation_config.json`: both the end of a turn and the end of a text stop a reply.
pub fn generation_config() -> Value {
    json!({"eos_token_id": [2, 0], "pad_token_id": 0})
}

/// Content of a file as it is written: JSON of one entry per line, and a line break at the end.
pub fn printed(value: &Value) -> Result<String, Box<dyn Error>> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

#[allow(dead_code, reason = "the tests use this file as a module")]
fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "policy".into());
    let folder = Path::new(&folder);
    let words = std::fs::read_to_string(folder.join("words.txt"))?;
    let template = std::fs::read_to_string(folder.join("chat_template.jinja"))?;
    let tokenizer = tokenizer(&words)?;
    std::fs::write(folder.join("tokenizer.json"), printed(&tokenizer)?)?;
    std::fs::write(
        folder.join("tokenizer_config.json"),
        printed(&config(&template))?,
    )?;
    std::fs::write(
        folder.join("generation_config.json"),
        printed(&generation_config())?,
    )?;
    let tokens = tokenizer["model"]["vocab"].as_object().map_or(0, Map::len);
    writeln!(std::io::stdout(), "{tokens} tokens")?;
    Ok(())
}
