//! SGLang: ids in, ids and log-probabilities out.
//!
//! What its log-probabilities are of at other temperatures than 1 depends on how the server was
//! started, and it does not say: there they are left out, and the tokens are context (I4).

use std::{
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use async_trait::async_trait;
use record::{FinishReason, Generation, PolicySpan, PolicyVersion};
use serde::Serialize;
use serde_json::{Value, json};

use super::{Endpoint, Facts, Http, check, cut, generation, ids, logprob, queue, room, unmodified};
use crate::{Engine, EngineError, Info, Queue, Request};

/// An SGLang server.
#[derive(Debug)]
pub struct Sglang {
    http: Http,
    facts: Facts,
    version: AtomicU64,
    waiting: queue::Watch,
}

/// What is asked. A prompt has a hundred thousand ids: they are written as they are.
#[derive(Serialize)]
struct Ask<'a> {
    input_ids: &'a [u32],
    sampling_params: Value,
    return_logprob: bool,
    logprob_start_len: i32,
}

impl Sglang {
    /// Asks whether the server is there, and from now on for its queue.
    ///
    /// # Errors
    /// [`EngineError`] when it does not answer.
    pub async fn connect(endpoint: Endpoint, facts: Facts) -> Result<Self, EngineError> {
        let http = Http::new(endpoint)?;
        let model = http.get("/model_info").await?;
        if !model.is_object() {
            return Err(http.broken("/model_info", "an object", &model));
        }
        Ok(Self {
            waiting: queue::Watch::start(&http.endpoint, queue::SGLANG)?,
            version: AtomicU64::new(facts.policy_version),
            http,
            facts,
        })
    }

    fn spans(&self, meta: &Value, now: PolicyVersion) -> Vec<PolicySpan> {
        let numbered = |value: &Value| match value {
            Value::String(text) => text.parse().ok(),
            other => other.as_u64(),
        };
        let spans = meta["weight_versions"].as_array().into_iter().flatten();
        let spans: Option<Vec<_>> = spans
            .map(|span| {
                Some(PolicySpan {
                    start: u32::try_from(span["start"].as_u64()?).ok()?,
                    version: numbered(&span["version"])?,
                })
            })
            .collect();
        match spans {
            Some(spans) if spans.first().is_some_and(|span| span.start == 0) => spans,
            _ => vec![PolicySpan {
                start: 0,
                version: numbered(&meta["weight_version"]).unwrap_or(now),
            }],
        }
    }
}

#[async_trait]
impl Engine for Sglang {
    fn info(&self) -> Info {
        Info {
            name: format!("sglang:{}", self.http.endpoint.url),
            context_tokens_max: self.facts.context_tokens_max,
            vocabulary: self.facts.vocabulary,
        }
    }

    fn policy_version(&self) -> PolicyVersion {
        self.version.load(Relaxed)
    }

    async fn generate(&self, request: Request) -> Result<Generation, EngineError> {
        let path = "/generate";
        let sampling = &request.sampling;
        check(&request.prompt_ids, sampling, &self.facts)?;
        let top_k = match sampling.top_k {
            0 => -1,
            k => i64::from(k),
        };
        let body = Ask {
            input_ids: &request.prompt_ids,
            sampling_params: json!({
                "max_new_tokens": room(&request.prompt_ids, sampling, &self.facts),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": top_k,
                "stop": sampling.stop,
                "stop_token_ids": sampling.stop_ids,
                "sampling_seed": sampling.seed & i64::MAX.cast_unsigned(),
                "skip_special_tokens": false,
                "no_stop_trim": true,
            }),
            return_logprob: true,
            logprob_start_len: -1,
        };
        let now = self.version.load(Relaxed);
        let reply = self.http.post(path, &body).await?;
        let meta = &reply["meta_info"];
        let Some(token_ids) = ids(&reply["output_ids"]) else {
            return Err(self.http.broken(path, "output_ids", &reply));
        };
        // Each entry is [log-probability, id, text or null]; the ids must agree.
        let entries = meta["output_token_logprobs"].as_array();
        let logprobs: Option<Vec<f32>> = entries
            .filter(|entries| entries.len() == token_ids.len())
            .and_then(|entries| {
                let pairs = entries.iter().zip(&token_ids);
                pairs
                    .map(|(entry, id)| (entry[1] == *id).then(|| logprob(&entry[0])).flatten())
                    .collect()
            });
        let Some(mut logprobs) = logprobs else {
            let expected = "one meta_info.output_token_logprobs per output id";
            return Err(self.http.broken(path, expected, &reply));
        };
        if !unmodified(sampling) {
            logprobs.clear();
        }
        let reason = &meta["finish_reason"];
        let finish = match reason["type"].as_str() {
            Some("stop") => FinishReason::Stop,
            Some("length") => cut(sampling, token_ids.len()),
            Some("abort") => {
                return Err(EngineError::Gone(format!(
                    "the server aborted the request: {reason}"
                )));
            }
            _ => return Err(self.http.broken(path, "meta_info.finish_reason", &reply)),
        };
        let policy = self.spans(meta, now);
        let cached = meta["cached_tokens"].as_u64().unwrap_or(0);
        let cached = u32::try_from(cached).unwrap_or(u32::MAX);
        Ok(generation(
            sampling, token_ids, logprobs, policy, finish, cached,
        ))
    }

    async fn health(&self) -> Result<(), EngineError> {
        self.http.healthy("/health").await
    }

    fn queue(&self) -> Queue {
        self.waiting.queue()
    }

    /// Requests in flight are held and go on under the new weights; cached prefixes are dropped.
    async fn load_weights(&self, folder: &Path, version: PolicyVersion) -> Result<(), EngineError> {
        let pause = json!({"mode": "retract"});
        self.http.post("/pause_generation", &pause).await?;
        let update = json!({"model_path": folder, "weight_version": version.to_string(), "flush_cache": true});
        let loaded = self.http.post("/update_weights_from_disk", &update).await;
        let resumed = self.http.post("/continue_generation", &json!({})).await;
        let loaded = loaded?;
        resumed?;
        if loaded["success"] == false {
            return Err(self
                .http
                .broken("/update_weights_from_disk", "success", &loaded));
        }
        self.version.store(version, Relaxed);
        Ok(())
    }
}
