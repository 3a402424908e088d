//! The transformer of crate `model` in this process: threads that step batches, one queue before
//! them, weights that can be swapped between calls.
//!
//! - A call sees one set of weights from its first to its last token; [`Embedded::set_weights`]
//!   lets running calls end under the old ones while later calls wait for the new.
//! - The queue holds at most [`Settings::queue_max`] requests; one more is [`EngineError::Busy`].
//! - A request whose future is dropped leaves its batch before the next token.
//! - The threads belong to the [`Embedded`]: dropping it ends them and answers whoever waits with
//!   [`EngineError::Gone`].

use std::{
    collections::VecDeque,
    path::Path,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
};

use async_trait::async_trait;
use model::{
    Weights,
    decode::{self, Batch, Finished, PrefixCache, Prepared, Sequence},
    device::Device,
};
use record::{Generation, PolicySpan, PolicyVersion};
use tokio::sync::oneshot;

use crate::{Engine, EngineError, Info, Queue, Request};

/// Turns ids into text, for stop strings.
pub type Detokenise = Arc<dyn Fn(&[u32]) -> String + Send + Sync>;

/// Limits of the embedded engine.
#[derive(Clone)]
pub struct Settings {
    /// Threads that decode; each has its own batch.
    pub threads: usize,
    /// Sequences of a batch and rows of prompts per step.
    pub batch: decode::Settings,
    /// Keys and values kept for prefixes seen before.
    pub cache_bytes_max: usize,
    /// Requests that may wait.
    pub queue_max: usize,
    /// Where products with weights are made.
    pub device: Device,
    /// Needed when a request has stop strings.
    pub detokenise: Option<Detokenise>,
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings")
            .field("threads", &self.threads)
            .field("batch", &self.batch)
            .finish_non_exhaustive()
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            threads: 2,
            batch: decode::Settings::default(),
            cache_bytes_max: 1 << 30,
            queue_max: 4096,
            device: Device::CPU,
            detokenise: None,
        }
    }
}

/// Totals since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Prompt tokens asked for.
    pub prompt_tokens: u64,
    /// Of these, found in the prefix cache.
    pub cached_tokens: u64,
}

struct Waiting {
    request: Request,
    reply: oneshot::Sender<Result<Generation, EngineError>>,
}

struct State {
    waiting: VecDeque<Waiting>,
    prepared: Arc<Prepared>,
    version: PolicyVersion,
    /// Sequences in each thread's batch.
    loads: Vec<usize>,
    stopping: bool,
}

struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    cache: Arc<PrefixCache>,
    settings: Settings,
    generated_tokens: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every statement leaves the state valid, so a panicked thread does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The embedded engine.
pub struct Embedded {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    info: Info,
}

impl std::fmt::Debug for Embedded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Embedded")
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}

impl Embedded {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`EngineError::Gone`] when the system refuses a thread, or the device the weights.
    pub fn start(
        name: &str,
        weights: Arc<Weights>,
        version: PolicyVersion,
        settings: Settings,
    ) -> Result<Self, EngineError> {
        let config = &weights.config;
        let info = Info {
            name: format!("embedded:{name}"),
            context_tokens_max: u32::try_from(config.max_position_embeddings).unwrap_or(u32::MAX),
            vocabulary: u32::try_from(config.vocab_size).unwrap_or(u32::MAX),
        };
        let count = settings.threads.max(1);
        let cache = Arc::new(PrefixCache::new(config, settings.cache_bytes_max));
        let prepared = prepare(weights, settings.device)?;
        let state = State {
            waiting: VecDeque::new(),
            prepared,
            version,
            loads: vec![0; count],
            stopping: false,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            wake: Condvar::new(),
            cache,
            settings,
            generated_tokens: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            cached_tokens: AtomicU64::new(0),
        });
        let mut engine = Self {
            shared,
            threads: Vec::new(),
            info,
        };
        for index in 0..count {
            let shared = Arc::clone(&engine.shared);
            let thread = std::thread::Builder::new()
                .name(format!("decode-{index}"))
                .spawn(move || decode_thread(&shared, index))
                .map_err(|error| EngineError::Gone(format!("no thread for decoding: {error}")))?;
            engine.threads.push(thread);
        }
        Ok(engine)
    }

    /// New weights of the same shape for all calls that start from now on.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] when the shape differs, [`EngineError::Gone`] when the device does
    /// not take them; the engine goes on with those that it had.
    pub fn set_weights(
        &self,
        weights: Arc<Weights>,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        let config = self.shared.lock().prepared.weights().config.clone();
        if weights.config != config {
            return Err(EngineError::Invalid(
                "new weights have another shape than the running ones".into(),
            ));
        }
        // Not under the lock: it takes a while.
        let prepared = prepare(weights, self.shared.settings.device)?;
        let mut state = self.shared.lock();
        state.prepared = prepared;
        state.version = version;
        // Under the lock: a thread that sees the new weights also sees the empty cache.
        self.shared.cache.clear();
        drop(state);
        self.shared.wake.notify_all();
        Ok(())
    }

    /// Totals since the start.
    #[must_use]
    pub fn totals(&self) -> Totals {
        Totals {
            generated_tokens: self.shared.generated_tokens.load(Relaxed),
            prompt_tokens: self.shared.prompt_tokens.load(Relaxed),
            cached_tokens: self.shared.cached_tokens.load(Relaxed),
        }
    }

    fn check(&self, request: &Request) -> Result<(), EngineError> {
        let prompt_tokens = u32::try_from(request.prompt_ids.len()).unwrap_or(u32::MAX);
        if prompt_tokens >= self.info.context_tokens_max {
            let context_tokens_max = self.info.context_tokens_max;
            return Err(EngineError::TooLong {
                prompt_tokens,
                context_tokens_max,
            });
        }
        let sampling = &request.sampling;
        let wrong = |what: String| Err(EngineError::Invalid(what));
        if prompt_tokens == 0 {
            return wrong("expected a prompt of at least one token, found none".into());
        }
        if let Some(id) = request
            .prompt_ids
            .iter()
            .find(|id| **id >= self.info.vocabulary)
        {
            return wrong(format!(
                "expected token ids below {}, found {id}",
                self.info.vocabulary
            ));
        }
        if !sampling.temperature.is_finite() || sampling.temperature < 0.0 {
            return wrong(format!(
                "temperature: expected 0 or more, found {}",
                sampling.temperature
            ));
        }
        if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
            return wrong(format!(
                "top_p: expected a number in (0, 1], found {}",
                sampling.top_p
            ));
        }
        if sampling.tokens_max == 0 {
            return wrong("tokens_max: expected at least 1, found 0".into());
        }
        if !sampling.stop.is_empty() && self.shared.settings.detokenise.is_none() {
            return wrong(
                "stop strings need a tokenizer, and this engine was started without one".into(),
            );
        }
        Ok(())
    }
}

#[async_trait]
impl Engine for Embedded {
    fn info(&self) -> Info {
        self.info.clone()
    }

    fn policy_version(&self) -> PolicyVersion {
        self.shared.lock().version
    }

    async fn generate(&self, request: Request) -> Result<Generation, EngineError> {
        self.check(&request)?;
        let (reply, answer) = oneshot::channel();
        {
            let mut state = self.shared.lock();
            if state.stopping {
                return Err(EngineError::Gone("it is shutting down".into()));
            }
            let waiting = state.waiting.len();
            if waiting >= self.shared.settings.queue_max {
                return Err(EngineError::Busy { waiting });
            }
            state.waiting.push_back(Waiting { request, reply });
        }
        self.shared.wake.notify_all();
        answer
            .await
            .unwrap_or_else(|_| Err(EngineError::Gone("its decoding thread ended".into())))
    }

    fn queue(&self) -> Queue {
        Queue {
            waiting: Some(self.shared.lock().waiting.len() as u64),
            ..Queue::default()
        }
    }

    /// Calls that run end under the weights that they began with.
    async fn load_weights(&self, folder: &Path, version: PolicyVersion) -> Result<(), EngineError> {
        let folder = folder.to_owned();
        let load = tokio::task::spawn_blocking(move || model::load(&folder));
        let weights = load
            .await
            .map_err(|error| EngineError::Gone(error.to_string()))?
            .map_err(|error| EngineError::Invalid(error.to_string()))?;
        self.set_weights(Arc::new(weights), version)
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A panicked thread has already answered its callers by dropping their channels.
            let _ = thread.join();
        }
    }
}

/// Ends the reply when its text holds one of the stop strings. Only a tail long enough for the
/// longest of them is turned into text (a token is at least one byte).
fn stop_when(stops: Vec<String>, detokenise: Detokenise) -> decode::StopWhen {
    let tail = stops.iter().map(String::len).max().unwrap_or(0) + 8;
    Arc::new(move |ids| {
        let text = detokenise(&ids[ids.len().saturating_sub(tail)..]);
        stops
            .iter()
            .any(|stop| !stop.is_empty() && text.contains(stop.as_str()))
    })
}

struct InFlight {
    id: u64,
    prompt_tokens: u64,
    reply: oneshot::Sender<Result<Generation, EngineError>>,
}

fn decode_thread(shared: &Shared, index: usize) {
    let mut next_id = 0;
    let (mut batch, mut version) = {
        let state = shared.lock();
        (fresh_batch(shared, &state), state.version)
    };
    let mut in_flight: Vec<InFlight> = Vec::new();
    loop {
        {
            let mut state = shared.lock();
            state.loads[index] = batch.len();
            while !state.stopping && batch.is_empty() && !may_take(shared, &state, index, &batch) {
                state = shared
                    .wake
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            if state.stopping {
                state.waiting.clear();
                return;
            }
            if batch.is_empty() && state.version != version {
                batch = fresh_batch(shared, &state);
                version = state.version;
            }
            while state.version == version && may_take(shared, &state, index, &batch) {
                let Some(Waiting { request, reply }) = state.waiting.pop_front() else {
                    break;
                };
                if reply.is_closed() {
                    continue;
                }
                next_id += 1;
                let prompt_tokens = request.prompt_ids.len() as u64;
                in_flight.push(InFlight {
                    id: next_id,
                    prompt_tokens,
                    reply,
                });
                let stops = request.sampling.stop.clone();
                let detokenise = shared.settings.detokenise.clone();
                let stop_when = detokenise
                    .filter(|_| !stops.is_empty())
                    .map(|d| stop_when(stops, d));
                batch.admit(Sequence {
                    id: next_id,
                    prompt: request.prompt_ids,
                    sampling: request.sampling,
                    stop_when,
                });
                state.loads[index] = batch.len();
            }
        }
        let gone: Vec<u64> = in_flight
            .iter()
            .filter(|call| call.reply.is_closed())
            .map(|call| call.id)
            .collect();
        if !gone.is_empty() {
            batch.retain(|id| !gone.contains(&id));
            in_flight.retain(|call| !gone.contains(&call.id));
        }
        let ended = match batch.step() {
            Ok(ended) => ended,
            Err(error) => {
                // The batch has given its sequences up; a later call tries the device again.
                for call in in_flight.drain(..) {
                    // The caller may have gone meanwhile.
                    let _ = call.reply.send(Err(EngineError::Gone(error.to_string())));
                }
                continue;
            }
        };
        for finished in ended {
            if let Some(at) = in_flight.iter().position(|call| call.id == finished.id) {
                let call = in_flight.swap_remove(at);
                shared
                    .generated_tokens
                    .fetch_add(finished.drawn.len() as u64, Relaxed);
                shared.prompt_tokens.fetch_add(call.prompt_tokens, Relaxed);
                shared
                    .cached_tokens
                    .fetch_add(finished.cached_tokens as u64, Relaxed);
                // The caller may have gone meanwhile; then nobody wants the tokens.
                let _ = call.reply.send(Ok(generation(&finished, version)));
            }
        }
    }
}

fn prepare(weights: Arc<Weights>, device: Device) -> Result<Arc<Prepared>, EngineError> {
    let prepared = Prepared::new(weights, device);
    prepared
        .map(Arc::new)
        .map_err(|error| EngineError::Gone(error.to_string()))
}

fn fresh_batch(shared: &Shared, state: &State) -> Batch {
    let rope = Batch::rope(state.prepared.weights());
    Batch::new(
        Arc::clone(&state.prepared),
        rope,
        Arc::clone(&shared.cache),
        shared.settings.batch,
    )
}

/// Whether this thread should take the next request: it has room, and no other has fewer.
fn may_take(shared: &Shared, state: &State, index: usize, batch: &Batch) -> bool {
    let least = state
        .loads
        .iter()
        .enumerate()
        .filter(|(i, _)| *i != index)
        .map(|(_, load)| *load)
        .min();
    !state.waiting.is_empty()
        && batch.len() < shared.settings.batch.sequences_max
        && least.is_none_or(|least| batch.len() <= least)
}

fn generation(finished: &Finished, version: PolicyVersion) -> Generation {
    Generation {
        token_ids: finished.drawn.iter().map(|drawn| drawn.token).collect(),
        logprobs_model: finished
            .drawn
            .iter()
            .map(|drawn| drawn.logprob_model)
            .collect(),
        logprobs_sampled: finished
            .drawn
            .iter()
            .map(|drawn| drawn.logprob_sampled)
            .collect(),
        policy: vec![PolicySpan { start: 0, version }],
        finish: finished.finish,
        cached_tokens: u32::try_from(finished.cached_tokens).unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests;
