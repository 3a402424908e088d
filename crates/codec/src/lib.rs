//! Chat template, tokenizer, reasoning and tool-call parsing, exact continuation. Pure: files
//! are read once in [`Codec::load`], the time of day is passed in, nothing is drawn at random.
//!
//! | module | owns |
//! |---|---|
//! | [`template`] | the model's own Jinja template, rendered as Hugging Face renders it |
//! | [`python_json`] | `json.dumps` and `repr` as Python prints them |
//! | [`tokens`] | the tokenizer: text ⇄ ids, special tokens kept |
//! | `pieces` | ids of texts between special tokens, encoded once for all rollouts |
//! | [`grammar`] | raw text ⇄ reasoning, text and tool calls, one module per model family |
//! | [`echo`] | whether an assistant turn of a request is one of ours |
//! | [`memory`] | what a rollout has generated so far, as a tree of texts and ids |
//! | [`continuation`] | the prompt of the next call, in the ids of the earlier ones |
//! | [`self_check`] | the proof, at start-up, that continuation is exact for this model |
//!
//! # Exact continuation (I1, I2)
//!
//! A harness sends the whole history as JSON with every call. Rendering and encoding it again
//! gives other ids than the engine had: arguments come back re-serialised or re-ordered,
//! reasoning is dropped, and the same text has many encodings. So:
//!
//! 1. An assistant turn of the request is **ours** when it says the same as a recorded reply:
//!    the text (trimmed) and the calls in order (name, and arguments as unordered JSON with
//!    `1.0 = 1`; an argument that says what the tool's schema gives as default may be absent).
//!    Ids, reasoning, `null`/`""`/absent content and string/blocks do not count.
//! 2. Each turn of ours is rendered with a **placeholder**: a word of letters and digits that
//!    occurs nowhere in the conversation, as content, without calls and reasoning. The template
//!    puts the turn's header before it and the end of turn after it. Then the placeholder is
//!    replaced by the recorded raw text; the header by the generation prompt it was generated
//!    behind (they differ when thinking is off); and the end of turn is dropped when the raw text
//!    has its own. A cut reply has none: there the template's stays.
//!    This needs from a template only that it prints the content of an assistant turn. For
//!    templates that count roles, and so need a call before a tool result, a turn with calls is
//!    stood for by one call whose name is the placeholder.
//! 3. The recorded calls form a tree: a call's text is its parent's text plus a tail. The
//!    longest recorded text that is a prefix of the new text gives the ids; where equal replies
//!    have several raw texts, the one that fits the longest is taken.
//! 4. Only the rest is encoded. It begins right behind or right before an end-of-turn token,
//!    which tokenizers never merge across, so for clean text the rest's ids are the tail of the
//!    ids of the whole.
//!
//! Turns that are not ours are rendered as they came and counted as
//! [`record::Continuation::echoes_foreign`]. A template with which neither way of step 2 works
//! fails [`Codec::self_check`], and the codec works in [`Mode::ReEncode`]: right prompts, no
//! exact continuation, visible in [`Codec::mode`].
//!
//! # Limits
//!
//! | limit | value | at the limit |
//! |---|---|---|
//! | recorded calls of a rollout | [`memory::CALLS_MAX`] | [`Remembered::Full`]: later prompts continue from the last recorded call and re-encode what came after; counted as `encoded` |
//! | bytes of a rollout's memory | [`memory::BYTES_MAX`] | the same |
//! | bytes of encoded pieces kept for all rollouts | `pieces::BYTES_MAX` | those not used lately are encoded again |
//! | raw texts tried for one echoed turn | [`memory::CANDIDATES_MAX`] | the newest are tried |

pub mod continuation;
pub mod echo;
mod error;
mod files;
#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]
mod fuzz;
pub mod grammar;
pub mod memory;
mod pieces;
pub mod python_json;
pub mod self_check;
mod strftime;
pub mod template;
pub mod tokens;

use std::{path::Path, sync::Arc};

pub use continuation::Prompt;
pub use error::CodecError;
pub use grammar::Parsed;
pub use memory::{Memory, Remembered};
use record::{Conversation, Message, ToolSpec};
pub use self_check::Mode;

use crate::{files::Files, grammar::Grammar, template::Template, tokens::Tokens};

/// How turns of ours are shown to the model in later prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum History {
    /// As they were generated, reasoning included: no forks.
    #[default]
    AsGenerated,
    /// As the template shows them, which is what deployment sends: many templates strip
    /// reasoning of earlier turns, which is a fork with a cause. Turns without reasoning are
    /// shown as generated.
    AsTemplate,
}

/// What a template may ask for beside the conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The template's variable `enable_thinking`; left undefined when `None`.
    pub enable_thinking: Option<bool>,
    /// What `strftime_now` tells, in seconds since the Unix epoch. Fixed, or prompts would
    /// change from day to day.
    pub now_s: u64,
    /// How turns of ours are shown.
    pub history: History,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            enable_thinking: None,
            // 2026-01-01T00:00:00Z
            now_s: 1_767_225_600,
            history: History::default(),
        }
    }
}

/// Text ⇄ tokens for one model. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Codec {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) tokens: Tokens,
    pub(crate) template: Template,
    pub(crate) grammar: Box<dyn Grammar>,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) stop_texts: Vec<String>,
    pub(crate) turn: template::Turn,
    pub(crate) settings: Settings,
    /// Whether a turn of ours that calls tools is stood for by a call, or by content.
    pub(crate) calls_stay_calls: bool,
    digest: String,
    mode: Mode,
}

impl Codec {
    /// Reads `tokenizer.json`, `tokenizer_config.json` (special tokens, template),
    /// `chat_template.jinja` when there is one (it wins) and `generation_config.json` when there
    /// is one (more stop tokens), with default [`Settings`], and runs [`Codec::self_check`].
    ///
    /// # Errors
    /// [`CodecError`] when a file is missing or cannot be used. A failed self-check is no error:
    /// see [`Codec::mode`].
    pub fn load(dir: &Path) -> Result<Codec, CodecError> {
        Self::load_with(dir, Settings::default())
    }

    /// As [`Codec::load`], with settings.
    ///
    /// # Errors
    /// As [`Codec::load`].
    pub fn load_with(dir: &Path, settings: Settings) -> Result<Codec, CodecError> {
        Self::build(Files::read(dir)?, settings)
    }

    /// Builds a codec from the content of the files instead of a folder.
    ///
    /// # Errors
    /// As [`Codec::load`].
    pub fn from_parts(
        tokenizer_json: &[u8],
        tokenizer_config: &serde_json::Value,
        settings: Settings,
    ) -> Result<Codec, CodecError> {
        let files = Files::from_parts(tokenizer_json, tokenizer_config)?;
        Self::build(files, settings)
    }

    fn build(files: Files, settings: Settings) -> Result<Codec, CodecError> {
        let tokens = Tokens::new(&files.tokenizer, &files.tokenizer_name)?;
        let template = Template::new(&files, &settings)?;
        let mut stop_ids = files.stop_ids(&tokens)?;
        let turn = template::Turn::probe(&template, &tokens)?;
        if let Some(id) = turn.end_id
            && !stop_ids.contains(&id)
        {
            stop_ids.push(id);
        }
        let stop_texts = stop_ids
            .iter()
            .map(|id| tokens.decode(&[*id]))
            .filter(|text| !text.is_empty())
            .collect();
        let digest = files.digest(&stop_ids);
        let mut inner = Inner {
            tokens,
            template,
            grammar: grammar::detect(&files.template),
            stop_ids,
            stop_texts,
            turn,
            settings,
            calls_stay_calls: false,
            digest,
            mode: Mode::Exact,
        };
        inner.mode = self_check::run(&inner);
        if inner.mode != Mode::Exact && inner.turn.called.is_some() {
            inner.calls_stay_calls = true;
            let mode = self_check::run(&inner);
            if mode == Mode::Exact {
                inner.mode = mode;
            }
        }
        Ok(Codec {
            inner: Arc::new(inner),
        })
    }

    /// One more than the largest id.
    #[must_use]
    pub fn vocabulary(&self) -> u32 {
        self.inner.tokens.vocabulary()
    }

    /// SHA-256 over tokenizer, template and stop ids. Hexadecimal.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.inner.digest
    }

    /// Ids that end a reply.
    #[must_use]
    pub fn stop_ids(&self) -> &[u32] {
        &self.inner.stop_ids
    }

    /// Whether prompts continue exactly, or why not.
    #[must_use]
    pub fn mode(&self) -> &Mode {
        &self.inner.mode
    }

    /// Encodes text. Special tokens in the text become special tokens; none are added.
    ///
    /// # Errors
    /// [`CodecError::Encode`] when the tokenizer fails, e.g. on text it has no tokens for.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, CodecError> {
        self.inner.tokens.encode(text)
    }

    /// Decodes ids, special tokens included. Bytes that are not UTF-8 become U+FFFD, unknown ids
    /// nothing.
    #[must_use]
    pub fn decode(&self, ids: &[u32]) -> String {
        self.inner.tokens.decode(ids)
    }

    /// Checks that every id of this codec is an id of the model.
    ///
    /// # Errors
    /// [`CodecError::Vocabulary`].
    pub fn check_model(&self, vocabulary: u32) -> Result<(), CodecError> {
        if self.vocabulary() <= vocabulary {
            Ok(())
        } else {
            Err(CodecError::Vocabulary {
                codec: self.vocabulary(),
                model: vocabulary,
            })
        }
    }

    /// The prompt of a call: rendered, and in the ids of the earlier calls as far as they reach.
    ///
    /// # Errors
    /// [`CodecError`] when the template refuses the conversation, or when
    /// the tokenizer fails.
    pub fn prompt(
        &self,
        conversation: &Conversation,
        memory: &Memory,
    ) -> Result<Prompt, CodecError> {
        continuation::prompt(&self.inner, self.mode(), conversation, memory)
    }

    /// What a raw generation says. Never fails: what cannot be parsed stays text, with
    /// [`Parsed::failed`] set. Ids of tool calls derive from the raw text and the position; use
    /// [`Parsed::with_ids`] to make them unique within a rollout.
    #[must_use]
    pub fn parse(&self, raw: &str) -> Parsed {
        self.parse_with(raw, &[])
    }

    /// As [`Codec::parse`], with the tools of the request: some model families write arguments
    /// without their types, and only the tool's schema tells the text `"1"` from the number `1`.
    #[must_use]
    pub fn parse_with(&self, raw: &str, tools: &[ToolSpec]) -> Parsed {
        grammar::parse(&self.inner, raw, tools)
    }

    /// The model family whose way of writing reasoning and calls is read and written, told by
    /// the template.
    #[must_use]
    pub fn grammar(&self) -> &'static str {
        self.inner.grammar.name()
    }

    /// The raw text that a model would generate for this assistant message, end of turn
    /// included: the template's own rendering of the turn.
    ///
    /// # Errors
    /// [`CodecError`] when the template refuses the message.
    pub fn speak(&self, message: &Message) -> Result<String, CodecError> {
        grammar::speak(&self.inner, message)
    }

    /// Proves exact continuation on a small set of conversations. [`Codec::load`] has done so:
    /// see [`Codec::mode`].
    #[must_use]
    pub fn self_check(&self) -> Mode {
        self_check::run(&self.inner)
    }
}
