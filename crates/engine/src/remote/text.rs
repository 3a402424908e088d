//! A text-only server of the Chat Completions dialect: a teacher, or a model whose tokens nobody
//! tells. Its replies are turned into ids by the codec's *voice*, as those of a script are, and
//! carry no log-probabilities: nothing is trainable (I4), everything else works.
//!
//! Tokens are counted twice here, in ours and in the server's, and the two differ. What the server
//! is told (`max_tokens`) and what it refuses (its own context) is in its tokens; nothing is cut to
//! a count of ours, because a cut tool call is a broken one.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use async_trait::async_trait;
use record::{
    Conversation, FinishReason, Generation, Message, PolicySpan, PolicyVersion, Role, ToolCall,
};
use serde_json::{Map, Value, json};

use super::{Endpoint, Facts, Http, check, room};
use crate::{Engine, EngineError, Info, Request, scripted::Voice};

/// A conversation → the fields `messages` and `tools` of a request (crate `wire` knows how).
pub type Writer = Arc<dyn Fn(&Conversation) -> Map<String, Value> + Send + Sync>;

/// A text-only server.
pub struct Text {
    http: Http,
    facts: Facts,
    model: String,
    writer: Writer,
    voice: Voice,
    /// Whether the server wants `max_completion_tokens` in place of `max_tokens`.
    renamed: AtomicBool,
}

impl std::fmt::Debug for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Text")
            .field("http", &self.http)
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

impl Text {
    /// A server whose address ends before `/chat/completions`, e.g. `http://HOST/v1`.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] when the address cannot be used.
    pub fn new(
        endpoint: Endpoint,
        facts: Facts,
        model: impl Into<String>,
        writer: Writer,
        voice: Voice,
    ) -> Result<Self, EngineError> {
        Ok(Self {
            http: Http::new(endpoint)?,
            facts,
            model: model.into(),
            writer,
            voice,
            renamed: AtomicBool::new(false),
        })
    }

    /// The name of the only model that a server has.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] when it has several or none, and names them;
    /// [`EngineError::Gone`] when it does not answer.
    pub async fn only_model(endpoint: Endpoint) -> Result<String, EngineError> {
        let names = super::models(endpoint, "/models").await?;
        match names.as_slice() {
            [name] => Ok(name.clone()),
            _ => Err(EngineError::Invalid(format!(
                "the server has {} models, say which: {}",
                names.len(),
                names.get(..20).unwrap_or(&names).join(", ")
            ))),
        }
    }

    async fn ask(
        &self,
        mut body: Map<String, Value>,
        tokens_max: u32,
    ) -> Result<Value, EngineError> {
        const NAMES: [&str; 2] = ["max_tokens", "max_completion_tokens"];
        let path = "/chat/completions";
        let renamed = self.renamed.load(Relaxed);
        body.insert(NAMES[usize::from(renamed)].into(), json!(tokens_max));
        let reply = self.http.post(path, &Value::Object(body.clone())).await;
        match reply {
            Err(EngineError::Invalid(said)) if !renamed && said.contains(NAMES[1]) => {
                self.renamed.store(true, Relaxed);
                body.remove(NAMES[0]);
                body.insert(NAMES[1].into(), json!(tokens_max));
                self.http.post(path, &Value::Object(body)).await
            }
            other => other,
        }
    }
}

/// Whether a refusal says that the prompt does not fit, in the words of one of the providers.
fn says_too_long(said: &str) -> bool {
    let said = said.to_lowercase();
    [
        "context_length_exceeded",
        "context length",
        "context window",
        "prompt is too long",
        "input is too long",
    ]
    .iter()
    .any(|words| said.contains(words))
}

/// The limit that such a refusal names: the first number behind "maximum".
fn named_limit(said: &str) -> Option<u32> {
    let behind = said.split_once("maximum")?.1;
    behind
        .split(|c: char| !c.is_ascii_digit())
        .find(|digits| !digits.is_empty())?
        .parse()
        .ok()
}

/// The message of a reply.
fn message(value: &Value) -> Option<Message> {
    let object = value.as_object()?;
    let text = object.get("content").and_then(Value::as_str);
    let mut message = Message::text(Role::Assistant, text.unwrap_or_default());
    message.reasoning = ["reasoning_content", "reasoning"]
        .iter()
        .find_map(|name| object.get(*name)?.as_str())
        .filter(|reasoning| !reasoning.is_empty())
        .map(str::to_owned);
    let calls = object.get("tool_calls").and_then(Value::as_array);
    for call in calls.into_iter().flatten() {
        let function = &call["function"];
        let written = function["arguments"].as_str().unwrap_or_default();
        let arguments = match serde_json::from_str(written) {
            Ok(Value::Object(object)) => Value::Object(object),
            _ if written.trim().is_empty() => json!({}),
            _ => Value::from(written),
        };
        message.tool_calls.push(ToolCall {
            id: call["id"].as_str().unwrap_or_default().to_owned(),
            name: function["name"].as_str()?.to_owned(),
            arguments,
        });
    }
    Some(message)
}

#[async_trait]
impl Engine for Text {
    fn info(&self) -> Info {
        Info {
            name: format!("openai:{}", self.http.endpoint.url),
            context_tokens_max: self.facts.context_tokens_max,
            vocabulary: self.facts.vocabulary,
        }
    }

    fn policy_version(&self) -> PolicyVersion {
        self.facts.policy_version
    }

    /// Whether the server's list of models answers, be it with a refusal.
    async fn health(&self) -> Result<(), EngineError> {
        self.http.healthy("/models").await
    }

    async fn generate(&self, request: Request) -> Result<Generation, EngineError> {
        let path = "/chat/completions";
        let sampling = &request.sampling;
        check(&request.prompt_ids, sampling, &self.facts)?;
        let hint = request.hint.as_ref().ok_or_else(|| {
            EngineError::Invalid(
                "a text-only server needs the conversation, and the request carries no hint".into(),
            )
        })?;
        let mut body = (self.writer)(&hint.conversation);
        body.insert("model".into(), json!(self.model));
        // Some models refuse to be told what is their default.
        if sampling.temperature != 1.0 {
            body.insert("temperature".into(), json!(sampling.temperature));
        }
        if sampling.top_p < 1.0 {
            body.insert("top_p".into(), json!(sampling.top_p));
        }
        if !sampling.stop.is_empty() {
            body.insert("stop".into(), json!(sampling.stop));
        }
        let tokens_max = room(&request.prompt_ids, sampling, &self.facts);
        let reply = match self.ask(body, tokens_max).await {
            Err(EngineError::Invalid(said)) if says_too_long(&said) => {
                let prompt_tokens = u32::try_from(request.prompt_ids.len()).unwrap_or(u32::MAX);
                return Err(EngineError::TooLong {
                    prompt_tokens,
                    context_tokens_max: named_limit(&said)
                        .unwrap_or_else(|| prompt_tokens.saturating_sub(1)),
                });
            }
            other => other?,
        };
        let choice = &reply["choices"][0];
        let Some(message) = message(&choice["message"]) else {
            return Err(self.http.broken(path, "choices[0].message", &reply));
        };
        let mut token_ids = (self.voice)(&message).map_err(|reason| {
            EngineError::Invalid(format!("the server's reply cannot be spoken: {reason}"))
        })?;
        let finish = match choice["finish_reason"].as_str() {
            Some("length") => {
                // A cut reply has no end of turn; the voice puts one.
                token_ids.pop();
                FinishReason::Length
            }
            _ => FinishReason::Stop,
        };
        Ok(Generation {
            token_ids,
            logprobs_model: Vec::new(),
            logprobs_sampled: Vec::new(),
            policy: vec![PolicySpan {
                start: 0,
                version: self.facts.policy_version,
            }],
            finish,
            cached_tokens: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_that_does_not_fit_is_told_from_other_refusals() {
        for (said, limit) in [
            (
                "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens",
                Some(8192),
            ),
            ("prompt is too long: 9000 tokens > 8192 maximum", None),
            (r#"{"code": "context_length_exceeded"}"#, None),
        ] {
            assert!(says_too_long(said), "{said}");
            assert_eq!(named_limit(said), limit);
        }
        for said in ["no such model", "max_tokens is too large", "invalid key"] {
            assert!(!says_too_long(said), "{said}");
        }
    }
}
