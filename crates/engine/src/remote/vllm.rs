//! vLLM: ids in, ids and log-probabilities out.
//!
//! The server gives the log-probabilities of the unmodified distribution (its default, measured in
//! the project's facts on engines). Start it with `--max-logprobs` of at least 1, which is the
//! default. Changing weights needs `VLLM_SERVER_DEV_MODE=1`.
//!
//! [`Vllm::detect`] asks the tokens-only endpoint where the server has it. Where it has not, the
//! engine is degraded ([`COMPLETIONS`]): nothing is lost but that the server does not say which
//! weights made which tokens, so that new weights wait for the requests in flight.

use std::{
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use async_trait::async_trait;
use record::{FinishReason, Generation, PolicySpan, PolicyVersion, Sampling};
use serde::Serialize;
use serde_json::{Value, json};

use super::{Endpoint, Facts, Http, check, cut, generation, ids, logprob, queue, room};
use crate::{Engine, EngineError, Info, Queue, Request};

/// Which of the server's endpoints is asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Api {
    /// `/v1/completions`, which every server has.
    #[default]
    Completions,
    /// `/inference/v1/generate`, which a server started with `--tokens-only` or
    /// `--enable-scale-out` has. It says which weights made which tokens.
    Tokens,
}

/// The name of the mode of a server without the tokens-only endpoint.
pub const COMPLETIONS: &str = "vllm-completions";

/// The tokens-only endpoint.
const GENERATE: &str = "/inference/v1/generate";

/// A vLLM server.
#[derive(Debug)]
pub struct Vllm {
    http: Http,
    facts: Facts,
    api: Api,
    model: String,
    version: AtomicU64,
    /// The tokens-only endpoint was looked for in vain.
    degraded: bool,
    waiting: queue::Watch,
}

/// What is asked. A prompt has a hundred thousand ids: they are written as they are, not through a
/// [`Value`] each.
#[derive(Serialize)]
struct AskCompletion<'a> {
    model: &'a str,
    prompt: &'a [u32],
    return_token_ids: bool,
    #[serde(flatten)]
    sampling: Value,
}

/// The same of the tokens-only endpoint.
#[derive(Serialize)]
struct AskTokens<'a> {
    model: &'a str,
    token_ids: &'a [u32],
    sampling_params: Value,
}

impl Vllm {
    /// [`Vllm::connect`] with the tokens-only endpoint where the server has it, else with
    /// [`Api::Completions`], degraded.
    ///
    /// # Errors
    /// [`EngineError`] when the server does not answer as vLLM does.
    pub async fn detect(endpoint: Endpoint, facts: Facts) -> Result<Self, EngineError> {
        let http = Http::new(endpoint.clone())?;
        // Without a prompt nothing is generated: a server that has the endpoint says that one is
        // missing, any other that there is no such endpoint, or none for us.
        let status = http.status_of(GENERATE, &json!({})).await?;
        let api = match status {
            400 | 422 => Api::Tokens,
            403..=405 | 501 => Api::Completions,
            _ => {
                return Err(EngineError::Gone(format!(
                    "{}{GENERATE}: expected a refusal of an empty request, or of the endpoint (403, 404), found status {status}",
                    http.endpoint.url
                )));
            }
        };
        let mut engine = Self::connect(endpoint, facts, api).await?;
        if api == Api::Completions {
            engine.degraded = true;
            tracing::warn!(
                engine = %engine.http.endpoint.url,
                status,
                mode = COMPLETIONS,
                "the server has no tokens-only endpoint: it does not say which weights made which \
                 tokens, and new weights wait for requests in flight; start it with \
                 --enable-scale-out"
            );
        }
        Ok(engine)
    }

    /// Asks the server for its model and context, and from now on for its queue. `facts.context_tokens_max` is lowered to the
    /// server's own.
    ///
    /// # Errors
    /// [`EngineError`] when the server does not answer as vLLM does.
    pub async fn connect(
        endpoint: Endpoint,
        mut facts: Facts,
        api: Api,
    ) -> Result<Self, EngineError> {
        let http = Http::new(endpoint)?;
        let models = http.get("/v1/models").await?;
        let model = &models["data"][0];
        let Some(name) = model["id"].as_str() else {
            return Err(http.broken("/v1/models", "a list with one model", &models));
        };
        if let Some(own) = model["max_model_len"].as_u64() {
            let own = u32::try_from(own).unwrap_or(u32::MAX);
            facts.context_tokens_max = facts.context_tokens_max.min(own);
        }
        Ok(Self {
            waiting: queue::Watch::start(&http.endpoint, queue::VLLM)?,
            model: name.to_owned(),
            version: AtomicU64::new(facts.policy_version),
            http,
            facts,
            api,
            degraded: false,
        })
    }

    fn sampling(sampling: &Sampling, tokens_max: u32) -> Value {
        json!({
            "max_tokens": tokens_max,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            // The server takes a signed number.
            "seed": sampling.seed & i64::MAX.cast_unsigned(),
            "stop": sampling.stop,
            "stop_token_ids": sampling.stop_ids,
            "skip_special_tokens": false,
            "logprobs": 0,
        })
    }

    async fn completions(&self, request: &Request) -> Result<Generation, EngineError> {
        let path = "/v1/completions";
        let sampling = &request.sampling;
        let body = AskCompletion {
            model: &self.model,
            prompt: &request.prompt_ids,
            return_token_ids: true,
            sampling: Self::sampling(sampling, room(&request.prompt_ids, sampling, &self.facts)),
        };
        let version = self.version.load(Relaxed);
        let reply = self.http.post(path, &body).await?;
        let choice = &reply["choices"][0];
        let Some(token_ids) = ids(&choice["token_ids"]) else {
            return Err(self.http.broken(path, "choices[0].token_ids", &reply));
        };
        let logprobs = choice["logprobs"]["token_logprobs"]
            .as_array()
            .and_then(|list| list.iter().map(logprob).collect::<Option<Vec<_>>>())
            .filter(|list| list.len() == token_ids.len());
        let Some(logprobs) = logprobs else {
            return Err(self.http.broken(
                path,
                "as many choices[0].logprobs.token_logprobs as token ids",
                &reply,
            ));
        };
        let policy = vec![PolicySpan { start: 0, version }];
        self.finish(path, request, &reply, token_ids, logprobs, policy)
    }

    async fn tokens(&self, request: &Request) -> Result<Generation, EngineError> {
        let path = GENERATE;
        let sampling = &request.sampling;
        let body = AskTokens {
            model: &self.model,
            token_ids: &request.prompt_ids,
            sampling_params: Self::sampling(
                sampling,
                room(&request.prompt_ids, sampling, &self.facts),
            ),
        };
        let version = self.version.load(Relaxed);
        let reply = self.http.post(path, &body).await?;
        let choice = &reply["choices"][0];
        let content = choice["logprobs"]["content"].as_array();
        let (Some(token_ids), Some(content)) = (ids(&choice["token_ids"]), content) else {
            let expected = "choices[0].token_ids and .logprobs.content";
            return Err(self.http.broken(path, expected, &reply));
        };
        // The ids stand twice: they must agree.
        let logprobs: Option<Vec<f32>> = content
            .iter()
            .zip(&token_ids)
            .map(|(entry, id)| {
                (entry["token_id"] == *id)
                    .then(|| logprob(&entry["logprob"]))
                    .flatten()
            })
            .collect();
        let logprobs =
            logprobs.filter(|list| list.len() == token_ids.len() && list.len() == content.len());
        let Some(logprobs) = logprobs else {
            return Err(self
                .http
                .broken(path, "one log-probability per token id", &reply));
        };
        let mut policy = Vec::new();
        for span in choice["weight_versions"].as_array().into_iter().flatten() {
            let version = span["version"].as_str().and_then(|text| text.parse().ok());
            let start = span["start"].as_u64().and_then(|at| u32::try_from(at).ok());
            match (start, version) {
                (Some(start), Some(version)) => policy.push(PolicySpan { start, version }),
                // The name that a server starts with is not one of our numbers.
                (Some(start), None) => policy.push(PolicySpan {
                    start,
                    version: self.facts.policy_version,
                }),
                _ => return Err(self.http.broken(path, "spans of weight versions", &reply)),
            }
        }
        if policy.first().is_none_or(|span| span.start != 0) {
            policy = vec![PolicySpan { start: 0, version }];
        }
        self.finish(path, request, &reply, token_ids, logprobs, policy)
    }

    fn finish(
        &self,
        path: &str,
        request: &Request,
        reply: &Value,
        token_ids: Vec<u32>,
        logprobs: Vec<f32>,
        policy: Vec<PolicySpan>,
    ) -> Result<Generation, EngineError> {
        let finish = match reply["choices"][0]["finish_reason"].as_str() {
            Some("stop") => FinishReason::Stop,
            Some("length") => cut(&request.sampling, token_ids.len()),
            Some("abort") => {
                return Err(EngineError::Gone("the server aborted the request".into()));
            }
            _ => return Err(self.http.broken(path, "a finish reason", reply)),
        };
        let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        Ok(generation(
            &request.sampling,
            token_ids,
            logprobs,
            policy,
            finish,
            cached
                .and_then(|count| u32::try_from(count).ok())
                .unwrap_or(0),
        ))
    }
}

#[async_trait]
impl Engine for Vllm {
    fn info(&self) -> Info {
        Info {
            name: format!("vllm:{}", self.http.endpoint.url),
            context_tokens_max: self.facts.context_tokens_max,
            vocabulary: self.facts.vocabulary,
        }
    }

    fn policy_version(&self) -> PolicyVersion {
        self.version.load(Relaxed)
    }

    async fn generate(&self, request: Request) -> Result<Generation, EngineError> {
        check(&request.prompt_ids, &request.sampling, &self.facts)?;
        match self.api {
            Api::Completions => self.completions(&request).await,
            Api::Tokens => self.tokens(&request).await,
        }
    }

    async fn health(&self) -> Result<(), EngineError> {
        self.http.healthy("/health").await
    }

    fn degraded(&self) -> Option<&'static str> {
        self.degraded.then_some(COMPLETIONS)
    }

    fn queue(&self) -> Queue {
        self.waiting.queue()
    }

    /// With [`Api::Tokens`] requests in flight are held and go on under the new weights, and the
    /// server says where the change was. [`Api::Completions`] does not say it, so there they
    /// end under the old weights first. Cached prefixes are dropped either way.
    async fn load_weights(&self, folder: &Path, version: PolicyVersion) -> Result<(), EngineError> {
        let pause = match self.api {
            Api::Tokens => "/pause?mode=keep",
            Api::Completions => "/pause?mode=wait",
        };
        self.http.post(pause, &json!({})).await?;
        let loaded = async {
            let reload = json!({"method": "reload_weights", "kwargs": {"weights_path": folder}});
            self.http.post("/collective_rpc", &reload).await?;
            let name = json!({"new_version": version.to_string()});
            self.http.post("/update_weight_version", &name).await?;
            // Keys and values of the old weights would be taken for those of the new.
            self.http.post("/reset_prefix_cache", &json!({})).await
        }
        .await;
        let resumed = self.http.post("/resume", &json!({})).await;
        loaded?;
        resumed?;
        self.version.store(version, Relaxed);
        Ok(())
    }
}
