//! What the state machine needs of its neighbours. The real ones are wired up in
//! [`crate::wiring`]; tests put faults here.

use std::{fmt::Debug, time::Duration};

use async_trait::async_trait;
use record::{Fault, PolicyVersion, Rollout, RolloutId, RolloutSpec, Sampling, Verdict};
use sandbox::Sandbox;
use task::Task;

/// A rollout that is about to make calls.
#[derive(Debug, Clone)]
pub struct OpenSession {
    /// The rollout.
    pub spec: RolloutSpec,
    /// How its replies are drawn.
    pub sampling: Sampling,
    /// Whether the harness's own wishes are overruled.
    pub sampling_fixed: bool,
    /// Calls that it may make.
    pub calls_max: u32,
    /// Tokens that may be generated for it.
    pub generated_tokens_max: Option<u64>,
}

/// How a harness proves which rollout it is.
#[derive(Debug, Clone)]
pub struct Session {
    /// The secret.
    pub key: String,
    /// Path to put before `/v1`, with a leading slash and without a trailing one.
    pub path: String,
}

/// What was captured of a rollout.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Captured {
    /// Calls on record.
    pub calls: u32,
    /// Calls that have arrived and are not answered.
    pub in_flight: u32,
    /// Requests that were refused because `calls_max` was reached.
    pub refused: u32,
    /// Whether a request was refused because `generated_tokens_max` was reached.
    pub tokens_spent: bool,
    /// Whether a request was refused or cut off because the gateway's `seconds_max` was over.
    pub seconds_spent: bool,
    /// Whether the harness's last call did not fit into the context.
    pub too_long: bool,
    /// A fault of engine or gateway that cost the harness a reply it never got, and what is
    /// known of it.
    pub fault: Option<(Fault, String)>,
    /// Whether calls are at rest.
    pub settled: bool,
}

/// The gateway, as seen from here.
#[async_trait]
pub trait Capture: Send + Sync + Debug {
    /// Admits a rollout.
    ///
    /// # Errors
    /// A sentence; the rollout is discarded.
    async fn open(&self, open: OpenSession) -> Result<Session, String>;

    /// What is known right now; `None` for a rollout that is not open.
    fn status(&self, id: &RolloutId) -> Option<Captured>;

    /// Waits until no call is in flight and none was added for `quiet`, at most `limit`.
    ///
    /// # Errors
    /// A sentence; the rollout is discarded.
    async fn settle(
        &self,
        id: &RolloutId,
        quiet: Duration,
        limit: Duration,
    ) -> Result<Captured, String>;

    /// Refuses all further calls of a rollout. Does nothing for one that is not open.
    fn close(&self, id: &RolloutId);

    /// The weights that the next call would see.
    fn policy(&self) -> PolicyVersion;

    /// What is known of the calls that wait for the engine to begin with them.
    fn queue(&self) -> engine::Queue {
        engine::Queue::default()
    }
}

/// The ledger, as seen from here.
#[async_trait]
pub trait Store: Send + Sync + Debug {
    /// Records a rollout, replacing what was recorded under its name; durable on return.
    ///
    /// # Errors
    /// A sentence.
    async fn put(&self, rollout: Rollout) -> Result<(), String>;

    /// Records the end of a rollout; durable on return. Gives back what was recorded: the lineage
    /// with what only the rollout's calls tell.
    ///
    /// # Errors
    /// A sentence.
    async fn close(&self, rollout: Rollout) -> Result<Rollout, String> {
        self.put(rollout.clone()).await?;
        Ok(rollout)
    }

    /// What is recorded under a name.
    ///
    /// # Errors
    /// A sentence.
    async fn get(&self, id: &RolloutId) -> Result<Option<Rollout>, String>;
}

/// Why there is no verdict. Never a score.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JudgeError {
    /// The sandbox ended meanwhile.
    SandboxLost(String),
    /// The verifier broke its contract, crashed or timed out.
    Failed(String),
    /// A judge could not be asked or did not answer in form, or none is named.
    NoAnswer(String),
}

/// The verifier, as seen from here.
#[async_trait]
pub trait Judge: Send + Sync + Debug {
    /// Scores the state of the sandbox.
    ///
    /// # Errors
    /// [`JudgeError`].
    async fn verify(&self, task: &Task, sandbox: &dyn Sandbox) -> Result<Verdict, JudgeError>;

    /// As [`Judge::verify`], for verifiers that read the conversation or what services were asked:
    /// `id` is the rollout whose calls are settled. Without a judge of its own kind neither is told.
    ///
    /// # Errors
    /// [`JudgeError`].
    async fn verify_rollout(
        &self,
        _id: &RolloutId,
        task: &Task,
        sandbox: &dyn Sandbox,
        _audit: Option<&verify::Audit>,
    ) -> Result<Verdict, JudgeError> {
        self.verify(task, sandbox).await
    }
}

/// Closes a session when dropped, so that no abandoned rollout can go on making calls.
pub(crate) struct Open<'a> {
    pub(crate) capture: &'a dyn Capture,
    pub(crate) id: &'a RolloutId,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.capture.close(self.id);
    }
}
