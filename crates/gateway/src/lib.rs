//! The HTTP server between a black-box harness and an engine. It gives every rollout a secret
//! key, turns each model request into tokens, asks the engine, makes the call durable and only
//! then lets the reply out, in the shape that the harness's dialect wants.
//!
//! | module | owns |
//! |---|---|
//! | [`config`] | settings and every limit with its default |
//! | [`error`] | why the gateway itself cannot do something |
//! | [`refusal`] | why a request is refused: name, status, counter |
//! | `registry` | key → session, opening, closing, tombstones of closed rollouts |
//! | `session` | one rollout: calls, attempts, the retry rule, budgets, settling |
//! | `status` | what an orchestrator may know of a rollout |
//! | `edits` | histories that a client edited after it lost a reply |
//! | `attempt` | one try of a call, from arrival to a durable outcome |
//! | `work` | one call: prompt, engine, parse, ledger |
//! | `prompt` | the prompt of a call, and how its reply is to be drawn |
//! | `route` | path and credentials of a request |
//! | `receive` | reading a body within limits |
//! | `answer` | from request to response, in any dialect; counts of tokens |
//! | `responses` | conversations that a later request continues by naming them |
//! | `reply` | response bodies, early headers, keep-alives |
//! | `connection` | a socket that knows when a reply has really left |
//! | `serve` | listeners, connections, shutdown |
//! | `admin` | the JSON API for other orchestrators, on its own listener |
//! | `metrics` | Prometheus counters |
//! | `spans` | OpenTelemetry spans of calls |
//!
//! # Invariants
//! - **I1** The ids of [`record::Call`] are the ids that the engine consumed and produced.
//! - **I2** The codec continues prompts from the rollout's memory; the memory learns a call
//!   before the harness sees its reply.
//! - **I6** No byte of a reply's content leaves before `ledger.put_call` has returned. Headers and
//!   keep-alive comments may.
//! - **I7** Engine and ledger failures become a [`record::Fault`] in [`Status`], never a number.
//! - **I9** Nothing is captured for a rollout after [`Gateway::close`].
//! - **I10** Every limit is in [`config::Config`] and ends in a [`refusal::Cause`].
//!
//! # One call, many attempts
//!
//! A request whose digest (see [`wire::digest()`]) equals an earlier call of the same rollout is a
//! further **attempt** of that call, not a new call, when
//! 1. that call is still being worked on: it is joined, the engine is not asked twice;
//! 2. that call failed: the engine is asked again, with the same index and seed;
//! 3. that call has an answer which no client ever got to the end of: the answer is replayed;
//! 4. that call was delivered, and the client says that it retries (`x-stainless-retry-count`
//!    above 0): the answer is replayed;
//! 5. that call was delivered, no later call arrived since, and it was replayed fewer than
//!    [`config::Config::replays_max`] times in this way: the answer is replayed. (A client may
//!    lose a reply after the kernel took it. The cap frees an agent that sends the same history on
//!    purpose, hoping for another answer.)
//!
//! A request with another digest is an attempt too when it is an **edited** copy of one whose reply
//! was lost (`edits`): the partial text as a further turn, the user's message twice. The model then
//! sees the history without the edit, now and in later requests; the record has the body as it came.
//! A reply that was delivered may still have broken off on its way: a part of it in the very next
//! request says so, and the answer is replayed as under 5.
//!
//! Anything else is a new call with the next index and its own seed. The last call with the digest
//! is the one that is compared.
//!
//! A client that goes away does not stop the generation at once: most clients come back with the
//! same request, and then find the answer. When none waits for
//! [`config::Config::abandon_after_s`], it is cancelled; so it is at the engine's deadline, when the
//! rollout is closed or its time is over, and at shutdown. An attempt is recorded as `ClientGone`
//! until its last byte was handed to the kernel.
//!
//! # Budgets
//!
//! A rollout may have a limit of calls, of generated tokens and of seconds ([`Open`]). At a limit,
//! and after settling, new calls get a 401 with `x-should-retry: false`, on which harnesses stop
//! ([`wire::ErrorKind::Ended`] says why not 400 or 409); which limit it was stands in [`Status`].
//!
//! # Early headers
//!
//! A stream's headers are held back for at most [`config::Config::headers_after_ms`], so that quick
//! failures keep their status code. After that they are sent, then the dialect's sign of life every
//! [`config::Config::keep_alive_s`] (none for Gemini, whose clients stumble over it), and a failure
//! becomes the dialect's error event.

pub mod config;
pub mod error;
pub mod refusal;

mod admin;
mod answer;
mod attempt;
mod connection;
mod edits;
mod metrics;
mod prompt;
mod receive;
mod registry;
mod reply;
mod responses;
mod route;
mod serve;
mod session;
mod spans;
mod status;
mod work;

use std::sync::Arc;
use std::time::Duration;

use record::{RolloutId, RolloutSpec, Sampling, Secret};

pub use config::{Admin, Config, Listen};
pub use error::GatewayError;
pub use prompt::call_seed;
pub use serve::LocalAddr;
pub use status::Status;

/// Version of the gateway, as recorded with every rollout that it captures.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A rollout that may call the model from now on.
#[derive(Debug, Clone)]
pub struct Open {
    /// The rollout.
    pub spec: RolloutSpec,
    /// Settings of generation. `tokens_max` is an upper limit, whatever the client wishes.
    pub sampling: Sampling,
    /// Whether the client's wishes for temperature, top-p, top-k and seed are ignored.
    pub sampling_fixed: bool,
    /// New calls beyond this many are refused.
    pub calls_max: u32,
    /// New calls are refused once this many tokens were generated. A call's own limit is lowered
    /// to what is left, so only calls at the same time can exceed it.
    pub generated_tokens_max: Option<u64>,
    /// New calls are refused so many seconds after opening, and generations are cut off then.
    pub seconds_max: Option<u64>,
    /// The secret; 32 random hexadecimal digits when `None`.
    pub key: Option<Secret>,
}

impl Open {
    /// A rollout with 1024 calls of up to 32,768 tokens each, which most harnesses wish for, no
    /// other budget, and a key of its own.
    #[must_use]
    pub fn new(spec: RolloutSpec) -> Self {
        Self {
            spec,
            sampling: Sampling {
                tokens_max: 32_768,
                ..Sampling::default()
            },
            sampling_fixed: false,
            calls_max: 1024,
            generated_tokens_max: None,
            seconds_max: None,
            key: None,
        }
    }
}

/// How a harness reaches its rollout.
#[derive(Clone, PartialEq, Eq)]
pub struct Access {
    /// The secret, to be used as API key.
    pub key: String,
    /// The same as a prefix of the URL's path: `/r/<key>`.
    pub path: String,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Access { .. }")
    }
}

/// A running gateway. Dropping it stops the listeners at once; [`Gateway::shutdown`] drains.
#[derive(Debug)]
pub struct Gateway {
    shared: Arc<serve::Shared>,
    servers: serve::Servers,
}

impl Gateway {
    /// Binds all listeners and starts to serve.
    ///
    /// # Errors
    /// [`GatewayError::Listen`] when an address is taken or cannot be bound,
    /// [`GatewayError::Config`], [`GatewayError::Vocabulary`] when codec and engine do not fit.
    pub async fn start(
        config: Config,
        engine: Arc<dyn engine::Engine>,
        codec: Arc<codec::Codec>,
        ledger: ledger::Ledger,
    ) -> Result<Self, GatewayError> {
        let vocabulary = engine.info().vocabulary;
        if codec.check_model(vocabulary).is_err() {
            return Err(GatewayError::Vocabulary {
                codec: codec.vocabulary(),
                engine: vocabulary,
            });
        }
        config.check()?;
        let shared = Arc::new(serve::Shared::new(config, engine, codec, ledger)?);
        let servers = serve::Servers::start(&shared).await?;
        Ok(Self { shared, servers })
    }

    /// Lets a rollout in.
    ///
    /// # Errors
    /// [`GatewayError::RolloutOpen`] when one with this id is open,
    /// [`GatewayError::TooManyRollouts`], [`GatewayError::Key`].
    pub fn open(&self, open: Open) -> Result<Access, GatewayError> {
        self.shared.registry.open(open).map(|opened| opened.0)
    }

    /// What is known of a rollout, also for a while after it was closed
    /// ([`Config::closed_kept_max`] of them are kept).
    #[must_use]
    pub fn status(&self, id: &RolloutId) -> Option<Status> {
        self.shared.registry.status(id)
    }

    /// Waits until the record of a rollout is complete: no call in flight, and no new one for
    /// `quiet`. From that moment on, new calls are refused. At `limit` they are refused too, and
    /// the status says `settled: false`.
    ///
    /// # Errors
    /// [`GatewayError::UnknownRollout`].
    pub async fn settle(
        &self,
        id: &RolloutId,
        quiet: Duration,
        limit: Duration,
    ) -> Result<Status, GatewayError> {
        self.shared.registry.settle(id, quiet, limit).await
    }

    /// Ends a rollout: later calls are refused, calls in flight are abandoned, nothing more is
    /// captured. Does nothing when it is not open.
    pub fn close(&self, id: &RolloutId) {
        self.shared.registry.close(id);
    }

    /// Where the gateway really listens, harness listeners first, in the order of the
    /// configuration, then the admin listener.
    #[must_use]
    pub fn local_addrs(&self) -> &[LocalAddr] {
        self.servers.addresses()
    }

    /// All metrics in Prometheus text form.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        self.shared.metrics_text()
    }

    /// As [`Gateway::open`], and notes the rollout in the ledger: for rollouts that nobody but
    /// this gateway knows of.
    ///
    /// # Errors
    /// As [`Gateway::open`]; [`GatewayError::Ledger`].
    pub async fn open_noted(&self, open: Open) -> Result<Access, GatewayError> {
        admin::open_noted(&self.shared, open).await
    }

    /// Waits until the engine is at work on nothing, at most for `limit`; says whether that was
    /// so. While paused it stays so.
    pub async fn drained(&self, limit: Duration) -> bool {
        self.shared.drained(limit).await
    }

    /// Gives the engine new weights from a Hugging Face folder. What becomes of its requests in
    /// flight is the engine's own; to have none, [`Gateway::pause`] and [`Gateway::drained`] come
    /// first. Every generation says which weights made which of its tokens.
    ///
    /// # Errors
    /// [`GatewayError::Weights`]; the engine goes on with the weights that it had.
    pub async fn load_weights(
        &self,
        folder: &std::path::Path,
        version: record::PolicyVersion,
    ) -> Result<(), GatewayError> {
        self.shared.load_weights(folder, version).await
    }

    /// Holds back new engine calls until [`Gateway::resume`]. A call waits at most
    /// [`Config::pause_timeout_s`], then it is refused.
    pub fn pause(&self) {
        self.shared.paused.send_replace(true);
    }

    /// Lets engine calls go on.
    pub fn resume(&self) {
        self.shared.paused.send_replace(false);
    }

    /// Refuses new calls, gives those in flight `drain` to finish, then abandons them and waits
    /// until all tasks have ended.
    pub async fn shutdown(&self, drain: Duration) {
        self.shared.shutdown(&self.servers, drain).await;
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.shared.stop_now();
    }
}
