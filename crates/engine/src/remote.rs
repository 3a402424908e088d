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
//! Limits: [`Endpoint::timeout`] per request, [`BODY_BYTES_MAX`] per reply. Nothing is retried
//! here: the gateway knows what a retry is. Only plain HTTP is spoken; an `https` address is
//! refused with a hint.

pub mod sglang;
pub mod text;
pub mod vllm;

use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, Uri, body::Bytes, header};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use record::{FinishReason, Generation, PolicySpan, Sampling};
use serde_json::Value;

use crate::EngineError;

/// A reply of an engine: 100,000 tokens with log-probabilities have some 10 MB.
pub const BODY_BYTES_MAX: usize = 256 << 20;

/// What is shown of a server's error.
const ERROR_CHARS_MAX: usize = 300;

/// Where an engine is, and how long it may take.
#[derive(Clone)]
pub struct Endpoint {
    /// `http://HOST:PORT`, perhaps with a path.
    pub url: String,
    /// Sent as bearer token.
    pub api_key: Option<String>,
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
            timeout: Duration::from_secs(600),
        }
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint")
            .field("url", &self.url)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
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

/// A client of one server. Connections are kept and shared.
#[derive(Debug, Clone)]
pub(crate) struct Http {
    endpoint: Endpoint,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Http {
    pub(crate) fn new(endpoint: Endpoint) -> Result<Self, EngineError> {
        let uri: Uri = endpoint
            .url
            .parse()
            .map_err(|error| EngineError::Invalid(format!("{}: {error}", endpoint.url)))?;
        if uri.scheme_str() != Some("http") || uri.host().is_none() {
            return Err(EngineError::Invalid(format!(
                "engine address {}: expected http://HOST:PORT; for https, put a proxy that ends TLS on this machine in between",
                endpoint.url
            )));
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Ok(Self {
            endpoint,
            client: Client::builder(TokioExecutor::new()).build(connector),
        })
    }

    fn at(&self, path: &str) -> String {
        format!("{}{path}", self.endpoint.url.trim_end_matches('/'))
    }

    /// Asks, and gives back the JSON of a reply with status 200.
    pub(crate) async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, EngineError> {
        let gone = |what: String| EngineError::Gone(format!("{}: {what}", self.at(path)));
        let mut request = Request::builder()
            .method(method)
            .uri(self.at(path))
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(key) = &self.endpoint.api_key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let bytes = body.map(Value::to_string).unwrap_or_default();
        let request = request
            .body(Full::new(Bytes::from(bytes)))
            .map_err(|error| gone(error.to_string()))?;
        let exchange = async {
            let response = self
                .client
                .request(request)
                .await
                .map_err(|error| gone(format!("no reply ({error})")))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), BODY_BYTES_MAX)
                .collect()
                .await
                .map_err(|error| gone(format!("the reply broke off ({error})")))?
                .to_bytes();
            Ok::<_, EngineError>((status, body))
        };
        let limit = self.endpoint.timeout;
        let (status, body) = tokio::time::timeout(limit, exchange)
            .await
            .map_err(|_| gone(format!("no reply within {} s", limit.as_secs())))??;
        if status.is_success() {
            if body.is_empty() {
                return Ok(Value::Null);
            }
            return serde_json::from_slice(&body)
                .map_err(|error| gone(format!("the reply is not JSON: {error}")));
        }
        let text: String = String::from_utf8_lossy(&body)
            .chars()
            .take(ERROR_CHARS_MAX)
            .collect();
        let said = format!("status {}: {text}", status.as_u16());
        match status.as_u16() {
            // Neither server says how many wait.
            429 | 503 => Err(EngineError::Busy { waiting: 0 }),
            400 | 404 | 413 | 422 => {
                Err(EngineError::Invalid(format!("{}: {said}", self.at(path))))
            }
            _ => Err(gone(said)),
        }
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Value, EngineError> {
        self.ask(Method::POST, path, Some(body)).await
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Value, EngineError> {
        self.ask(Method::GET, path, None).await
    }

    /// The error for a reply that is not what the server documents.
    pub(crate) fn broken(&self, path: &str, expected: &str, found: &Value) -> EngineError {
        let found: String = found.to_string().chars().take(ERROR_CHARS_MAX).collect();
        EngineError::Gone(format!(
            "{}: expected {expected}, found {found}; is the server's version supported?",
            self.at(path)
        ))
    }
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
