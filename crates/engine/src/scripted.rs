//! Policies given as code or as a replay file: an engine without a model.
//!
//! A [`Script`] answers with a message; a *voice* turns the message into the ids that the real
//! model would have generated for it (crate `codec` knows how: `speak`, then `encode`). So
//! everything behind the engine sees real tokens, and a scripted rollout is a supervised
//! training target.
//!
//! Invariants:
//! - **I4** log-probabilities are empty unless the script names one: scripted tokens are never
//!   trained by RL.
//! - Replies depend on nothing but the request: the same request gives the same tokens.
//! - `tokens_max` and the context are obeyed as a model obeys them: the reply is cut, with
//!   [`FinishReason::Length`] or [`FinishReason::Context`]. Stop strings are not looked for.
//!
//! A script runs on the caller's task and must not block for long.

mod replay;

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use record::{FinishReason, Generation, Message, PolicySpan, PolicyVersion};
pub use replay::{REPLAY_LINES_MAX, Replay, ReplayError};

use crate::{Engine, EngineError, Hint, Info, Request};

/// A policy given as code.
pub trait Script: Send + Sync + fmt::Debug {
    /// The next assistant message.
    ///
    /// # Errors
    /// [`EngineError::NoScript`] when there is no answer here; any other variant to play a
    /// failing engine.
    fn reply(&self, hint: &Hint) -> Result<Message, EngineError>;

    /// The log-probability that every token of this reply is to carry; `None` leaves them out.
    fn logprob(&self, _hint: &Hint) -> Option<f32> {
        None
    }
}

/// Message → ids as a model would generate them, stop token included.
pub type Voice = Arc<dyn Fn(&Message) -> Result<Vec<u32>, String> + Send + Sync>;

/// The engine of a script.
pub struct Scripted {
    info: Info,
    script: Arc<dyn Script>,
    voice: Voice,
}

impl fmt::Debug for Scripted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scripted")
            .field("info", &self.info)
            .field("script", &self.script)
            .finish_non_exhaustive()
    }
}

impl Scripted {
    /// An engine called `scripted:NAME`.
    #[must_use]
    pub fn new(
        name: &str,
        script: Arc<dyn Script>,
        voice: Voice,
        context_tokens_max: u32,
        vocabulary: u32,
    ) -> Self {
        Self {
            info: Info {
                name: format!("scripted:{name}"),
                context_tokens_max,
                vocabulary,
            },
            script,
            voice,
        }
    }
}

#[async_trait]
impl Engine for Scripted {
    fn info(&self) -> Info {
        self.info.clone()
    }

    fn policy_version(&self) -> PolicyVersion {
        0
    }

    async fn generate(&self, request: Request) -> Result<Generation, EngineError> {
        let prompt_tokens = u32::try_from(request.prompt_ids.len()).unwrap_or(u32::MAX);
        let room = self.info.context_tokens_max.saturating_sub(prompt_tokens);
        if room == 0 {
            return Err(EngineError::TooLong {
                prompt_tokens,
                context_tokens_max: self.info.context_tokens_max,
            });
        }
        let tokens_max = request.sampling.tokens_max;
        if tokens_max == 0 {
            return Err(EngineError::Invalid(
                "tokens_max is 0: expected at least 1".into(),
            ));
        }
        let hint = request.hint.as_ref().ok_or_else(|| {
            EngineError::Invalid(
                "a scripted policy needs the conversation, and the request carries no hint".into(),
            )
        })?;
        let message = self.script.reply(hint)?;
        let mut token_ids = (self.voice)(&message).map_err(|reason| {
            EngineError::Invalid(format!("the script's reply cannot be spoken: {reason}"))
        })?;
        let known = |id: &u32| *id < self.info.vocabulary;
        if let Some(id) = request
            .prompt_ids
            .iter()
            .chain(&token_ids)
            .find(|id| !known(id))
        {
            return Err(EngineError::Invalid(format!(
                "id {id} is outside the vocabulary of {}",
                self.info.vocabulary
            )));
        }
        let limit = room.min(tokens_max) as usize;
        let finish = if token_ids.len() <= limit {
            FinishReason::Stop
        } else if room < tokens_max {
            FinishReason::Context
        } else {
            FinishReason::Length
        };
        token_ids.truncate(limit);
        let logprobs = match self.script.logprob(hint) {
            Some(logprob) => vec![logprob; token_ids.len()],
            None => Vec::new(),
        };
        Ok(Generation {
            token_ids,
            logprobs_model: logprobs.clone(),
            logprobs_sampled: logprobs,
            policy: vec![PolicySpan {
                start: 0,
                version: self.policy_version(),
            }],
            finish,
            cached_tokens: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use record::{Conversation, Role, Sampling};

    use super::*;

    fn voice() -> Voice {
        // One id per character, 1 at the end.
        Arc::new(|message| {
            let text = message.text_content();
            Ok(text.chars().map(|c| c as u32).chain([1]).collect())
        })
    }

    fn replay(text: &str) -> Result<Replay, ReplayError> {
        Replay::parse(Path::new("replies.jsonl"), text)
    }

    fn hint(task: &str, turns: usize) -> Hint {
        let spec = serde_json::from_value(serde_json::json!({
            "id": "r", "task": task, "group": "g", "harness": "h", "seed": 0}))
        .unwrap();
        let mut messages = vec![Message::text(Role::User, "go")];
        for _ in 0..turns {
            messages.push(Message::text(Role::Assistant, "x"));
            messages.push(Message::text(Role::User, "go on"));
        }
        Hint {
            rollout: Some(Arc::new(spec)),
            conversation: Arc::new(Conversation {
                messages,
                tools: Vec::new(),
            }),
        }
    }

    fn ask(script: Replay, request: Request) -> Result<Generation, EngineError> {
        let engine = Scripted::new("test", Arc::new(script), voice(), 16, 128);
        futures::executor::block_on(engine.generate(request))
    }

    fn request(prompt: usize, tokens_max: u32, hint: Hint) -> Request {
        Request {
            prompt_ids: vec![7; prompt],
            sampling: Sampling {
                tokens_max,
                ..Sampling::default()
            },
            hint: Some(hint),
        }
    }

    #[test]
    fn replies_follow_task_and_turn() {
        let script = replay(concat!(
            "# two of one task, one for all others\n\n",
            "{\"task\": \"a\", \"tool_calls\": [{\"name\": \"bash\", \"arguments\": {\"z\": 1, \"a\": 2}}]}\n",
            "{\"task\": \"a\", \"content\": \"two\"}\n",
            "{\"task\": \"*\", \"turn\": 2, \"content\": \"three\"}\n",
        ))
        .unwrap();
        assert_eq!(script.len(), 3);
        let calls = script.reply(&hint("a", 0)).unwrap().tool_calls;
        assert_eq!(calls[0].arguments.to_string(), r#"{"z":1,"a":2}"#);
        assert_eq!(script.reply(&hint("a", 1)).unwrap().text_content(), "two");
        assert_eq!(script.reply(&hint("a", 2)).unwrap().text_content(), "three");
        assert_eq!(script.reply(&hint("b", 2)).unwrap().text_content(), "three");
        let missing = script.reply(&hint("b", 0)).unwrap_err().to_string();
        assert_eq!(
            missing,
            "scripted policy has no reply: replies.jsonl has no line for task \"b\" (nor \"*\") at turn 0; add one"
        );
    }

    #[test]
    fn a_bad_line_is_named() {
        for (text, expected) in [
            ("\n{", "replies.jsonl:2: expected a JSON object, found EOF"),
            ("[]", "replies.jsonl:1: expected a JSON object, found []"),
            ("{}", "expected `task`: a task id or \"*\", found none"),
            (
                r#"{"task": "a"}"#,
                "expected `content` or `tool_calls`, found neither",
            ),
            (
                r#"{"task": "a", "content": 1}"#,
                "expected `content` to be a text, found 1",
            ),
            (
                r#"{"task": "a", "contents": ""}"#,
                "expected only the fields",
            ),
            (
                r#"{"task": "a", "content": "", "logprob": 0.5}"#,
                "at most 0, found 0.5",
            ),
            (
                r#"{"task": "a", "tool_calls": [{"name": "b"}]}"#,
                "an object of `arguments`",
            ),
            (
                "{\"task\": \"a\", \"turn\": 0, \"content\": \"\"}\n{\"task\": \"a\", \"turn\": 0, \"content\": \"\"}",
                "replies.jsonl:2: expected one reply per task and turn, found a second one for turn 0",
            ),
        ] {
            let found = replay(text).unwrap_err().to_string();
            assert!(found.contains(expected), "{text} gave: {found}");
        }
    }

    #[test]
    fn limits_cut_as_a_model_is_cut() {
        let script = replay(r#"{"task": "*", "content": "hello"}"#).unwrap();
        for (prompt, tokens_max, tokens, finish) in [
            (1, 100, 6, FinishReason::Stop),
            (1, 6, 6, FinishReason::Stop),
            (1, 5, 5, FinishReason::Length),
            (10, 6, 6, FinishReason::Stop),
            (11, 6, 5, FinishReason::Context),
            (11, 5, 5, FinishReason::Length),
        ] {
            let generation =
                ask(script.clone(), request(prompt, tokens_max, hint("t", 0))).unwrap();
            assert_eq!(
                (generation.token_ids.len(), generation.finish),
                (tokens, finish),
                "prompt {prompt}, tokens_max {tokens_max}"
            );
        }
        assert!(matches!(
            ask(script, request(16, 5, hint("t", 0))),
            Err(EngineError::TooLong {
                prompt_tokens: 16,
                context_tokens_max: 16
            })
        ));
    }

    #[test]
    fn tokens_carry_no_logprobs_unless_the_script_says_so() {
        let silent = replay(r#"{"task": "*", "content": "a"}"#).unwrap();
        let generation = ask(silent, request(1, 9, hint("t", 0))).unwrap();
        assert!(generation.logprobs_model.is_empty() && !generation.trainable());
        let told = replay(r#"{"task": "*", "content": "a", "logprob": -0.5}"#).unwrap();
        let generation = ask(told, request(1, 9, hint("t", 0))).unwrap();
        assert_eq!(generation.logprobs_sampled, [-0.5, -0.5]);
        assert!(generation.trainable() && generation.check().is_ok());
    }

    #[test]
    fn ids_outside_the_vocabulary_are_refused() {
        let script = replay(r#"{"task": "*", "content": "é"}"#).unwrap();
        let error = ask(script, request(1, 9, hint("t", 0))).unwrap_err();
        assert_eq!(
            error,
            EngineError::Invalid("id 233 is outside the vocabulary of 128".into())
        );
    }
}
