//! A text-only server of the Chat Completions dialect: a teacher, or a model whose tokens nobody
//! tells. Its replies are turned into ids by the codec's *voice*, as those of a script are, and
//! carry no log-probabilities: nothing is trainable (I4), everything else works.

use std::sync::Arc;

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
        })
    }
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
        let tokens_max = room(&request.prompt_ids, sampling, &self.facts);
        body.insert("model".into(), json!(self.model));
        body.insert("max_tokens".into(), json!(tokens_max));
        body.insert("temperature".into(), json!(sampling.temperature));
        body.insert("top_p".into(), json!(sampling.top_p));
        if !sampling.stop.is_empty() {
            body.insert("stop".into(), json!(sampling.stop));
        }
        let reply = self.http.post(path, &Value::Object(body)).await?;
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
        // Counted in our tokens it may be longer than in the server's.
        token_ids.truncate(tokens_max as usize);
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
