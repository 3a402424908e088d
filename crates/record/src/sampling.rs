//! How a reply is drawn, and why it ended.

use serde::{Deserialize, Serialize};

/// Sampling settings of one generation.
///
/// The engine records two log-probabilities per token, see
/// [`crate::call::Generation`]: of the model's own distribution (temperature 1, no filter) and of
/// the one that was really sampled from (temperature and filters applied).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sampling {
    /// Divides the logits. 0 means greedy: the most likely token, ties to the smaller id.
    pub temperature: f32,
    /// Keeps the smallest set of tokens whose probability reaches this. 1 keeps all.
    pub top_p: f32,
    /// Keeps the k most likely tokens. 0 keeps all.
    pub top_k: u32,
    /// At most this many generated tokens.
    pub tokens_max: u32,
    /// Ends the reply when one of these is generated (it is part of the output).
    pub stop_ids: Vec<u32>,
    /// Ends the reply when its text contains one of these.
    pub stop: Vec<String>,
    /// Seed of the draw. The same seed, prompt and weights give the same tokens whatever else is
    /// in the batch.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            tokens_max: 1024,
            stop_ids: Vec::new(),
            stop: Vec::new(),
            seed: 0,
        }
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// `tokens_max` was reached.
    Length,
    /// The model's context is full.
    Context,
}
