//! What a judge is asked.

use std::{fmt::Write as _, path::PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};
use task::{Criterion, Rubric};

use crate::{
    Transcript,
    artefact::{Text, text_of},
    contract::cut,
};

/// Bytes of all material in one question.
const MATERIAL_BYTES_MAX: usize = 400_000;
/// Bytes of one tool result in it.
const RESULT_BYTES_MAX: usize = 2_000;

/// The agent's files as text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Material {
    /// Path in the workspace and text; sorted by path.
    files: Vec<(PathBuf, Text)>,
}

impl Material {
    /// Reads what can be read of the workspace's files; paths are relative to it.
    #[must_use]
    pub fn of(files: impl IntoIterator<Item = (PathBuf, Vec<u8>)>) -> Self {
        let mut files: Vec<(PathBuf, Text)> = files
            .into_iter()
            .map(|(path, content)| {
                let text = text_of(&path, &content);
                (path, text)
            })
            .collect();
        files.sort_by(|a, b| a.0.cmp(&b.0));
        Self { files }
    }

    /// Whether a quote is in a file or was said; blanks do not count.
    pub(super) fn holds(&self, quote: &str, transcript: &Transcript) -> bool {
        let bare = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let quote = bare(quote);
        self.files
            .iter()
            .any(|(_, text)| matches!(text, Text::Whole(text, _) if bare(text).contains(&quote)))
            || bare(&said(transcript)).contains(&quote)
    }
}

/// The transcript as lines.
fn said(transcript: &Transcript) -> String {
    let mut out = String::new();
    for event in &transcript.events {
        let message = &event["message"];
        let role = message["role"].as_str().unwrap_or("?");
        for part in message["content"].as_array().map_or(&[][..], Vec::as_slice) {
            match part["type"].as_str() {
                Some("toolCall") => {
                    let name = part["name"].as_str().unwrap_or("?");
                    let _ = writeln!(
                        out,
                        "{role} calls {name} {}",
                        cut(&part["arguments"].to_string(), RESULT_BYTES_MAX)
                    );
                }
                _ => {
                    let text = part["text"].as_str().unwrap_or_default();
                    let limit = if role == "toolResult" {
                        RESULT_BYTES_MAX
                    } else {
                        MATERIAL_BYTES_MAX
                    };
                    let _ = writeln!(out, "{role}: {}", cut(text, limit));
                }
            }
        }
    }
    out
}

/// The user message. The material stands between lines with a mark made of its own digest: whoever
/// wrote the material could not know it, so nothing inside can end it early.
#[must_use]
pub fn question(
    instruction: &str,
    rubric: &Rubric,
    part: &[Criterion],
    material: &Material,
    transcript: &Transcript,
) -> String {
    let mut inside = String::new();
    let single = match part {
        [one] => one.file.as_ref(),
        _ => None,
    };
    for (path, text) in &material.files {
        if single.is_some_and(|wanted| wanted != path) {
            continue;
        }
        let path = path.display();
        let _ = match text {
            Text::Whole(text, false) => writeln!(inside, "[file {path}]\n{text}"),
            Text::Whole(text, true) => writeln!(inside, "[file {path}, cut]\n{text}"),
            Text::Nothing(why) => writeln!(inside, "[file {path}: {why}]"),
        };
    }
    if single.is_none() {
        let _ = writeln!(inside, "[conversation]\n{}", said(transcript));
    }
    let inside = cut(&inside, MATERIAL_BYTES_MAX);
    let mark = hex::encode(&Sha256::digest(inside.as_bytes())[..8]);
    let mut out = format!("# Task that was given\n{instruction}\n");
    if !rubric.expected.is_empty() {
        let _ = writeln!(out, "\n# What is expected\n{}", rubric.expected);
    }
    out.push_str("\n# Criteria\n");
    for (index, criterion) in part.iter().enumerate() {
        let _ = writeln!(out, "{}. {}\n{}", index + 1, criterion.name, criterion.text);
        if let Some(file) = &criterion.file {
            let _ = writeln!(out, "(about the file {})", file.display());
        }
    }
    let levels: Vec<Value> = rubric
        .scale
        .levels()
        .iter()
        .map(|level| (*level).into())
        .collect();
    let _ = write!(
        out,
        "\n# Material, from the line MATERIAL {mark} to the line END {mark}\nMATERIAL {mark}\n{inside}\nEND {mark}\n\n\
         # Answer\nOne JSON object: {{\"marks\": [{{\"criterion\": number, \"score\": one of {}, \
         \"quote\": \"words of the material that show it, exactly as they stand there, or empty\", \
         \"reason\": \"one sentence\"}}]}}, one mark for each of the {} criteria.\n",
        Value::Array(levels),
        part.len(),
    );
    out
}
