//! What can go wrong between text and tokens.

use std::path::PathBuf;

/// Why a codec could not be loaded, or a conversation not be turned into a prompt. None of these
/// is retryable. Those of a prompt are the request's doing: the harness sees a 400 with the
/// sentence, and the rollout trains on what came before.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// A file of the model folder is missing.
    #[error(
        "codec: {path} is missing; expected a Hugging Face model folder: point the tokenizer setting at one that holds it"
    )]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A file could not be read.
    #[error("codec: cannot read {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// `tokenizer.json` is not a tokenizer of the format that the `tokenizers` library reads.
    #[error(
        "codec: {path} is not a usable tokenizer: {reason}; save it again with a current `tokenizers` library, or fetch the file again (it may be a pointer to a large file)"
    )]
    BadTokenizer {
        /// The file.
        path: String,
        /// What the library said.
        reason: String,
    },
    /// A configuration file does not parse or holds something else than expected.
    #[error("codec: {path}: expected {expected}, found {found}")]
    BadConfig {
        /// The file.
        path: String,
        /// What was expected.
        expected: &'static str,
        /// What was found.
        found: String,
    },
    /// There is no chat template.
    #[error(
        "codec: no chat template in {path}: expected `chat_template` in tokenizer_config.json or a file chat_template.jinja; take the chat-tuned variant of the model, or add a template"
    )]
    NoTemplate {
        /// The folder.
        path: String,
    },
    /// The template does not parse, or refused the conversation.
    #[error("codec: chat template, line {line}: {reason}")]
    Template {
        /// Line of the template, from 1; 0 when unknown.
        line: usize,
        /// What the template engine, or the template itself, said.
        reason: String,
    },
    /// A token named as end of sequence is not in the vocabulary.
    #[error(
        "codec: the stop token {token:?} named in {path} is not in the vocabulary; tokenizer.json and {path} come from different models"
    )]
    UnknownStop {
        /// The token.
        token: String,
        /// The file that names it.
        path: &'static str,
    },
    /// The tokenizer has ids that the model has not.
    #[error(
        "codec: the tokenizer has {codec} ids but the model only {model}: they belong to different models; point the tokenizer setting at the model's own folder"
    )]
    Vocabulary {
        /// One more than the codec's largest id.
        codec: u32,
        /// The model's vocabulary.
        model: u32,
    },
    /// The tokenizer refused a text.
    #[error("codec: the tokenizer failed on a text of {bytes} bytes: {reason}")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What the library said.
        reason: String,
    },
}
