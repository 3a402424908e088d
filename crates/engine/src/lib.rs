//! What turns tokens into tokens.
//!
//! One trait, [`Engine`]; the gateway knows nothing else of a model. Kinds: `embedded` (the
//! transformer of crate `model`, in this process), `scripted` (a policy given as code or as a
//! replay file), and those behind HTTP: vLLM, SGLang and text-only servers (`remote`). A `pool`
//! is several engines that look like one.

pub mod embedded;
pub mod pool;
pub mod remote;
pub mod scripted;

use std::{path::Path, sync::Arc};

use async_trait::async_trait;
use record::{Conversation, Generation, PolicyVersion, RolloutSpec, Sampling};

/// What is asked of an engine.
#[derive(Debug, Clone)]
pub struct Request {
    /// The prompt, exactly as the model is to see it.
    pub prompt_ids: Vec<u32>,
    /// How to draw the reply.
    pub sampling: Sampling,
    /// For scripted policies, which read text and not tokens. A model ignores it.
    pub hint: Option<Hint>,
}

/// What a scripted policy may read.
#[derive(Debug, Clone)]
pub struct Hint {
    /// The rollout that asks, when it is known.
    pub rollout: Option<Arc<RolloutSpec>>,
    /// The request in neutral form.
    pub conversation: Arc<Conversation>,
}

/// Facts about an engine that do not change while it lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// Kind and place, e.g. `embedded:policy/`.
    pub name: String,
    /// Prompt and reply together must not exceed this.
    pub context_tokens_max: u32,
    /// Ids must be below this.
    pub vocabulary: u32,
}

/// Why an engine gave no tokens.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The prompt leaves no room for a single token. Not retryable; the harness gets its
    /// dialect's "prompt too long".
    #[error("prompt of {prompt_tokens} tokens does not fit into a context of {context_tokens_max}")]
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Tokens that fit.
        context_tokens_max: u32,
    },
    /// The request cannot be served as asked (an id outside the vocabulary, a negative
    /// temperature …). Not retryable; a defect of ours or of the caller.
    #[error("engine refused the request: {0}")]
    Invalid(String),
    /// The scripted policy has no answer here. Not retryable.
    #[error("scripted policy has no reply: {0}")]
    NoScript(String),
    /// The engine has stopped or broke. Training discards the rollout (I7).
    #[error("engine is gone: {0}")]
    Gone(String),
    /// Too many requests wait. Retryable.
    #[error("engine queue is full ({waiting} waiting)")]
    Busy {
        /// Requests in the queue.
        waiting: usize,
    },
}

/// Turns tokens into tokens. Dropping the future of [`Engine::generate`] cancels the request.
#[async_trait]
pub trait Engine: Send + Sync + std::fmt::Debug {
    /// Facts that do not change.
    fn info(&self) -> Info;

    /// The weights that the next request would see.
    fn policy_version(&self) -> PolicyVersion;

    /// Generates one reply.
    ///
    /// # Errors
    /// See [`EngineError`].
    async fn generate(&self, request: Request) -> Result<Generation, EngineError>;

    /// Whether it could serve a request now. Cheap: asked every few seconds.
    ///
    /// # Errors
    /// [`EngineError::Gone`] with what was found.
    async fn health(&self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Loads weights from a Hugging Face folder that the engine can read, and calls them
    /// `version`. What becomes of requests in flight is the kind's own; every generation says
    /// which weights made which of its tokens.
    ///
    /// # Errors
    /// [`EngineError`]; the engine goes on with the weights that it had.
    async fn load_weights(&self, folder: &Path, version: PolicyVersion) -> Result<(), EngineError> {
        let _ = (folder, version);
        Err(EngineError::Invalid(format!(
            "engine {} cannot change its weights",
            self.info().name
        )))
    }

    /// The name of the mode in which it does less than its kind can; `None` when it does all.
    fn degraded(&self) -> Option<&'static str> {
        None
    }

    /// What is known of the requests that wait for it to begin with them.
    fn queue(&self) -> Queue {
        Queue::default()
    }

    /// The engines behind this one; empty for a single engine.
    fn members(&self) -> Vec<Member> {
        Vec::new()
    }
}

/// What is known of the requests that wait at an engine. The default is that of one that cannot tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Queue {
    /// How many; `None` when it cannot tell.
    pub waiting: Option<u64>,
    /// The name of the mode in which it cannot tell, or not all of it, although its kind can.
    pub degraded: Option<&'static str>,
    /// How often it was asked in vain so far.
    pub failures: u64,
}

/// What is known of one engine of a [`pool::Pool`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Kind and place.
    pub name: String,
    /// Whether it gets requests.
    pub up: bool,
    /// Requests that it has now.
    pub in_flight: u64,
    /// Requests that it was given so far.
    pub requests: u64,
    /// How often it was taken out.
    pub outages: u64,
}
