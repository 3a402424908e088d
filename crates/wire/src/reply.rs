//! What every dialect says about a reply, and what every dialect may wish for.

use record::{FinishReason, Message};

/// Tokens of one call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Generated tokens, the stop token included.
    pub completion: u32,
    /// Prompt tokens that came from the prefix cache.
    pub cached: u32,
}

/// One finished reply, ready for any dialect.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// The reply's id on the wire. Letters and digits survive every client.
    pub id: String,
    /// Seconds since the Unix epoch.
    pub created_s: u64,
    /// The model's name, as the client asked for it.
    pub model: String,
    /// What the model said.
    pub message: Message,
    /// Why it ended.
    pub finish: FinishReason,
    /// Tokens. Harnesses show these numbers to the model and compact by them: report them
    /// honestly and the same on a replay.
    pub usage: Usage,
}

/// Sampling settings as the client wished for them; `None` where it said nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SamplingWishes {
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// Nucleus.
    pub top_p: Option<f32>,
    /// The k most likely tokens; 0 keeps all.
    pub top_k: Option<u32>,
    /// At most this many generated tokens.
    pub tokens_max: Option<u32>,
    /// Stop strings; empty when none were asked for.
    pub stop: Vec<String>,
    /// Seed of the draw.
    pub seed: Option<u64>,
}
