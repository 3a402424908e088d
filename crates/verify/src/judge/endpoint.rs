//! Judges behind OpenAI- and Anthropic-compatible servers.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use serde_json::{Value, json};
use ureq::{Agent, Body, http::Response};

use super::{Ask, JudgeError};
use crate::contract::cut;

/// Bytes read of an answer.
const ANSWER_BYTES_MAX: u64 = 4 << 20;

/// What a server speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `POST {base}/chat/completions`, bearer key.
    OpenAi,
    /// `POST {base}/messages`, `x-api-key`, `anthropic-version: 2023-06-01`.
    Anthropic,
}

/// One model of one server.
#[derive(Clone)]
pub struct Endpoint {
    api: Api,
    base: String,
    model: String,
    key: Option<String>,
    agent: Arc<Agent>,
    tokens_max: u32,
}

impl std::fmt::Debug for Endpoint {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint")
            .field("api", &self.api)
            .field("base", &self.base)
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

impl Endpoint {
    /// A judge. `base` ends before `/chat/completions` or `/messages`, e.g. `http://host/v1`.
    /// Temperature is 0; a call takes `timeout` at most.
    #[must_use]
    pub fn new(api: Api, base: &str, model: &str, key: Option<String>, timeout: Duration) -> Self {
        let config = Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            .build();
        Self {
            api,
            base: base.trim_end_matches('/').to_owned(),
            model: model.to_owned(),
            key,
            agent: Arc::new(config.into()),
            tokens_max: 4096,
        }
    }

    fn unavailable(&self, reason: String) -> JudgeError {
        JudgeError::Unavailable {
            judge: self.name(),
            reason,
            attempts: 1,
        }
    }

    fn post(&self, system: &str, user: &str) -> Result<String, JudgeError> {
        let (path, body) = match self.api {
            Api::OpenAi => (
                "chat/completions",
                json!({"model": self.model, "temperature": 0, "max_tokens": self.tokens_max, "messages": [
                    {"role": "system", "content": system}, {"role": "user", "content": user}]}),
            ),
            Api::Anthropic => (
                "messages",
                json!({"model": self.model, "temperature": 0, "max_tokens": self.tokens_max, "system": system,
                    "messages": [{"role": "user", "content": user}]}),
            ),
        };
        let mut request = self
            .agent
            .post(format!("{}/{path}", self.base))
            .header("content-type", "application/json");
        if let Some(key) = &self.key {
            request = match self.api {
                Api::OpenAi => request.header("authorization", format!("Bearer {key}")),
                Api::Anthropic => request.header("x-api-key", key),
            };
        }
        if self.api == Api::Anthropic {
            request = request.header("anthropic-version", "2023-06-01");
        }
        match request.send(body.to_string()) {
            Ok(response) => self.read(response),
            Err(error) => Err(self.unavailable(error.to_string())),
        }
    }

    fn read(&self, mut response: Response<Body>) -> Result<String, JudgeError> {
        let status = response.status().as_u16();
        let text = response
            .body_mut()
            .with_config()
            .limit(ANSWER_BYTES_MAX)
            .read_to_string()
            .map_err(|error| self.unavailable(error.to_string()))?;
        let said = || format!("{status} {}", cut(text.trim(), 300));
        match status {
            200..=299 => {}
            408 | 409 | 425 | 429 | 500..=599 => return Err(self.unavailable(said())),
            _ => {
                return Err(JudgeError::Refused {
                    judge: self.name(),
                    reason: said(),
                });
            }
        }
        let value: Value = serde_json::from_str(&text).unwrap_or_default();
        let found = match self.api {
            Api::OpenAi => value["choices"][0]["message"]["content"]
                .as_str()
                .map(str::to_owned),
            Api::Anthropic => value["content"].as_array().map(|parts| {
                parts
                    .iter()
                    .filter_map(|part| part["text"].as_str())
                    .collect::<String>()
            }),
        };
        found.ok_or_else(|| JudgeError::Form {
            judge: self.name(),
            expected: "a text in the reply".to_owned(),
            found: said(),
        })
    }
}

#[async_trait]
impl Ask for Endpoint {
    fn name(&self) -> String {
        format!("{} at {}", self.model, self.base)
    }

    async fn ask(&self, system: &str, user: &str) -> Result<String, JudgeError> {
        let (this, system, user) = (self.clone(), system.to_owned(), user.to_owned());
        // Blocking client on the blocking pool; its own time limit ends it.
        tokio::task::spawn_blocking(move || this.post(&system, &user))
            .await
            .map_err(|error| self.unavailable(error.to_string()))?
    }
}
