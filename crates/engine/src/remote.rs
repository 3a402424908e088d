//! Engines behind HTTP: vLLM, SGLang, and text-only servers of the Chat Completions dialect.
//!
//! | module | asks | log-probabilities |
//! |---|---|---|
//! | [`vllm`] | `/v1/completions` with ids, or the tokens-only endpoint | of the model's own distribution |
//! | [`sglang`] | `/generate` with ids | of the model's own distribution |
//! | [`text`] | `/chat/completions` with text | none: nothing is trainable |
//!
//! Invariants:
//! - **I4** A log-probability is recorded only when the server says what it is of. Both servers
//!   give those of the unmodified distribution; the one that was sampled from is the same only at
//!   temperature 1 without filters. Elsewhere it stays empty, and the tokens are context.
//! - A reply whose ids are missing, or that has other counts of ids and log-probabilities, is a
//!   broken contract ([`EngineError::Gone`] with what was found), never patched up.
//! - Dropping a call closes its connection, on which both servers stop the generation.
//!
//! How many requests wait there is asked beside them ([`queue`]).
//!
//! Limits: [`Endpoint::timeout`] per request, [`BODY_BYTES_MAX`] per reply. Nothing is retried
//! here: the gateway knows what a retry is.

mod http;
pub mod queue;
pub mod sglang;
pub mod text;
pub mod vllm;

use std::{path::PathBuf, time::Duration};

pub(crate) use http::Http;
use record::{FinishReason, Generation, PolicySpan, Sampling, Secret};
use serde_json::Value;

use crate::EngineError;

/// A reply of an engine: 100,000 tokens with log-probabilities have some 10 MB.
pub const BODY_BYTES_MAX: usize = 256 << 20;

/// Where an engine is, and how long it may take.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// `http://HOST:PORT` or `https://HOST`, perhaps with a path.
    pub url: String,
    /// Sent as bearer token.
    pub api_key: Option<Secret>,
    /// A PEM file with the certificates of who signs for an `https` server; without one, the
    /// well-known authorities do.
    pub authorities: Option<PathBuf>,
    /// For one request, generation included.
    pub timeout: Duration,
}

impl Endpoint {
    /// An endpoint without a key, with ten minutes per request.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            api_key: None,
            authorities: None,
            timeout: Duration::from_secs(600),
        }
    }
}

/// Facts that a server does not tell, or not reliably.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Prompt and reply together.
    pub context_tokens_max: u32,
    /// Ids are below this.
    pub vocabulary: u32,
    /// What its weights count as now.
    pub policy_version: record::PolicyVersion,
}

/// The names of the models that a server lists, asked at `path` (`/v1/models`, or `/models` below an
/// address that has the version in it). For whoever wants to know whether somebody is there.
///
/// # Errors
/// [`EngineError::Invalid`] for an address that is none, [`EngineError::Gone`] with what was found.
pub async fn models(endpoint: Endpoint, path: &str) -> Result<Vec<String>, EngineError> {
    let http = Http::new(endpoint)?;
    let models = http.get(path).await?;
    let Some(list) = models["data"].as_array() else {
        return Err(http.broken(path, "a list of models", &models));
    };
    let names = list.iter().filter_map(|one| one["id"].as_str());
    Ok(names.map(str::to_owned).collect())
}

/// Refuses what no server needs to be asked for.
pub(crate) fn check(prompt: &[u32], sampling: &Sampling, facts: &Facts) -> Result<(), EngineError> {
    let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    if prompt_tokens >= facts.context_tokens_max {
        return Err(EngineError::TooLong {
            prompt_tokens,
            context_tokens_max: facts.context_tokens_max,
        });
    }
    if let Some(id) = prompt.iter().find(|id| **id >= facts.vocabulary) {
        return Err(EngineError::Invalid(format!(
            "id {id} is outside the vocabulary of {}",
            facts.vocabulary
        )));
    }
    if sampling.tokens_max == 0 {
        return Err(EngineError::Invalid(
            "tokens_max is 0: expected at least 1".into(),
        ));
    }
    Ok(())
}

/// At most as many tokens as the context leaves room for.
pub(crate) fn room(prompt: &[u32], sampling: &Sampling, facts: &Facts) -> u32 {
    let prompt = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    sampling
        .tokens_max
        .min(facts.context_tokens_max.saturating_sub(prompt))
}

/// Whether the distribution that is sampled from is the model's own.
pub(crate) fn unmodified(sampling: &Sampling) -> bool {
    sampling.temperature == 1.0 && sampling.top_p >= 1.0 && sampling.top_k == 0
}

/// Why a generation of `tokens` ended, when the server said `length`.
pub(crate) fn cut(sampling: &Sampling, tokens: usize) -> FinishReason {
    if tokens < sampling.tokens_max as usize {
        FinishReason::Context
    } else {
        FinishReason::Length
    }
}

/// A generation from what a server said; `logprobs` are of the model's own distribution.
pub(crate) fn generation(
    sampling: &Sampling,
    token_ids: Vec<u32>,
    logprobs: Vec<f32>,
    policy: Vec<PolicySpan>,
    finish: FinishReason,
    cached_tokens: u32,
) -> Generation {
    Generation {
        logprobs_sampled: if unmodified(sampling) {
            logprobs.clone()
        } else {
            Vec::new()
        },
        logprobs_model: logprobs,
        token_ids,
        policy,
        finish,
        cached_tokens,
    }
}

/// A list of ids; `None` when one is no id.
pub(crate) fn ids(value: &Value) -> Option<Vec<u32>> {
    value
        .as_array()?
        .iter()
        .map(|id| u32::try_from(id.as_u64()?).ok())
        .collect()
}

/// A log-probability; servers write minus infinity as a very small number or not at all.
pub(crate) fn logprob(value: &Value) -> Option<f32> {
    let value = value.as_f64()? as f32;
    value.is_finite().then_some(value)
}
