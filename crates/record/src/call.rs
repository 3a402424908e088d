//! One model request at the boundary, and what came back.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{CallId, Conversation, FinishReason, Message, PolicyVersion, Sampling};

/// The API that the harness spoke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// OpenAI Chat Completions.
    Chat,
    /// OpenAI Responses.
    Responses,
    /// Anthropic Messages.
    Messages,
    /// Google generateContent.
    Gemini,
}

/// A run of generated tokens that came from the same weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicySpan {
    /// First generated token of the run, from 0.
    pub start: u32,
    /// The weights.
    pub version: PolicyVersion,
}

/// What an engine produced for one prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    /// Generated ids, the stop token included when one was drawn.
    pub token_ids: Vec<u32>,
    /// Log-probability of each token under the model's own distribution (temperature 1, no
    /// filter). Empty when the engine cannot tell; then nothing is trainable (I4).
    pub logprobs_model: Vec<f32>,
    /// Log-probability of each token under the distribution that was sampled from. This is the
    /// `rollout` log-probability of importance weights. Empty as above.
    pub logprobs_sampled: Vec<f32>,
    /// Which weights produced which tokens; sorted, the first starts at 0.
    pub policy: Vec<PolicySpan>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Prompt tokens whose keys and values came from the prefix cache.
    pub cached_tokens: u32,
}

impl Generation {
    /// The predicate of I4: as many log-probabilities as tokens, or none at all; all finite.
    ///
    /// # Errors
    /// A sentence that says what was found.
    pub fn check(&self) -> Result<(), String> {
        for (name, values) in [
            ("logprobs_model", &self.logprobs_model),
            ("logprobs_sampled", &self.logprobs_sampled),
        ] {
            if !values.is_empty() && values.len() != self.token_ids.len() {
                return Err(format!(
                    "{} tokens but {} {name}",
                    self.token_ids.len(),
                    values.len()
                ));
            }
            if values.iter().any(|value| !value.is_finite()) {
                return Err(format!("{name} holds a value that is not finite"));
            }
        }
        Ok(())
    }

    /// Whether every token has both log-probabilities, so that it may be trained (I4).
    #[must_use]
    pub fn trainable(&self) -> bool {
        self.logprobs_model.len() == self.token_ids.len()
            && self.logprobs_sampled.len() == self.token_ids.len()
    }
}

/// Placeholder tokens that stand for something other than text: an image, a sound, a page.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MediaSpan {
    /// The first placeholder, counted from the start of what holds the span: a prompt, a node of
    /// a tree, a row.
    pub start: u32,
    /// Placeholders.
    pub tokens: u32,
    /// Digest of the payload as the model saw it.
    pub digest: String,
    /// Its processed size, as the model's processor counts: height and width, or frames, height
    /// and width.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub size: Vec<u32>,
}

/// How the prompt's ids came about (I2), in tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Continuation {
    /// The earlier call of the rollout whose prompt and reply this prompt extends, if any.
    pub parent: Option<u32>,
    /// Tokens taken over from that call exactly as the engine had them.
    pub exact: u32,
    /// Tokens that had to be encoded from text.
    pub encoded: u32,
    /// How many echoed assistant turns were recognised as ours and replaced by what we recorded.
    pub echoes_matched: u32,
    /// Echoed assistant turns that are not ours: a fork whose cause the tree names.
    pub echoes_foreign: u32,
    /// Where the prompt holds something other than text, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub media: Vec<MediaSpan>,
}

/// How one try of a call ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum AttemptOutcome {
    /// The whole reply was handed to the client's connection.
    Delivered,
    /// The client went away before the reply was complete.
    ClientGone,
    /// The engine failed; the client was told so in its dialect.
    EngineFailed {
        /// What the engine said.
        reason: String,
    },
    /// The prompt does not fit; the client was told so in its dialect.
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Tokens that fit.
        context_tokens_max: u32,
    },
}

/// One try of a call. Retries of a client are attempts of the same call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Attempt {
    /// Milliseconds since the Unix epoch at arrival.
    pub started_ms: u64,
    /// Milliseconds since the Unix epoch when the outcome was known.
    pub finished_ms: u64,
    /// How it ended.
    pub outcome: AttemptOutcome,
    /// Whether the client asked for a stream.
    pub stream: bool,
}

/// One model request of a rollout: everything that training, inspection and replay need.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Call {
    /// Rollout and arrival number.
    pub id: CallId,
    /// The API the harness spoke.
    pub dialect: Dialect,
    /// The body as it came, key order kept.
    pub request: Value,
    /// Headers worth keeping (session ids, retry marks), lower-case names. Never credentials.
    #[serde(default)]
    pub headers: Vec<(String, String)>,
    /// SHA-256 of the canonical request (sorted keys, volatile fields removed): equal for
    /// retries of the same call. Hexadecimal.
    pub digest: String,
    /// The request in neutral form, as it was rendered.
    pub conversation: Conversation,
    /// The ids the engine consumed.
    pub prompt_ids: Vec<u32>,
    /// How they came about.
    pub continuation: Continuation,
    /// The settings in force after limits were applied.
    pub sampling: Sampling,
    /// What the engine produced; `None` when it failed or was never asked.
    pub generation: Option<Generation>,
    /// The raw text of the generation, special tokens included.
    #[serde(default)]
    pub raw_text: String,
    /// The reply in neutral form, as it was sent.
    pub reply: Option<Message>,
    /// Whether reasoning and tool calls could be parsed from the raw text (a failure is plain
    /// text plus a counter).
    #[serde(default)]
    pub parse_failed: bool,
    /// Tries, in order. The last one decides what the harness saw.
    pub attempts: Vec<Attempt>,
}

impl Call {
    /// Whether the harness got the reply.
    #[must_use]
    pub fn delivered(&self) -> bool {
        self.attempts
            .iter()
            .any(|attempt| attempt.outcome == AttemptOutcome::Delivered)
    }
}
