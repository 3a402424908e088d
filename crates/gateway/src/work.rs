//! One call: prompt, engine, parse, ledger, memory; then, and only then, the reply.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use codec::{Prompt, Remembered};
use engine::{EngineError, Hint};
use record::{
    AttemptOutcome, Call, CallId, Continuation, Conversation, Dialect, Fault, Generation, Message,
    Sampling,
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::prompt;
use crate::refusal::{Cause, Refusal};
use crate::serve::{Shared, now_ms};
use crate::session::{Outcome, Session};
use crate::spans::Span;

/// What a call needs to be done.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) index: u32,
    pub(crate) dialect: Dialect,
    pub(crate) digest: String,
    pub(crate) headers: Vec<(String, String)>,
    /// The body as it came.
    pub(crate) body: Value,
    /// What the model is to see: the request's conversation without what a client edited into it.
    pub(crate) conversation: Arc<Conversation>,
    pub(crate) sampling: wire::SamplingWishes,
    /// The model's name, to be given back.
    pub(crate) model: String,
    /// See [`wire::Request::instructed`].
    pub(crate) instructed: bool,
}

/// Why the work stopped.
pub(crate) struct Failure {
    pub(crate) refusal: Refusal,
    /// What the attempts are recorded as; `None` when nothing is recorded.
    pub(crate) outcome: Option<AttemptOutcome>,
    pub(crate) fault: Option<Fault>,
}

/// What is known of a call so far; goes into the ledger whatever happens.
pub(crate) struct Draft {
    pub(crate) prompt: Prompt,
    pub(crate) sampling: Sampling,
    pub(crate) conversation: Arc<Conversation>,
}

/// What the engine made of it.
struct Answer {
    generation: Generation,
    raw_text: String,
    reply: Message,
    parse_failed: bool,
}

/// Does the work on a call and tells everybody who waits for it.
pub(crate) async fn run(
    shared: &Arc<Shared>,
    session: &Arc<Session>,
    work: Work,
    tell: watch::Sender<Option<Outcome>>,
) {
    let (index, dialect) = (work.index, work.dialect);
    let started = Instant::now();
    let outcome = tokio::select! {
        biased;
        () = session.cancel.cancelled() => {
            session.fail(index, None, None, now_ms());
            Err(Arc::new(session.refuse_abandoned()))
        }
        outcome = call(shared, session, work) => outcome,
    };
    shared
        .metrics
        .call_took(dialect, started.elapsed().as_secs_f64());
    // Released first: whoever sees the outcome must find the counters right. The attempts keep the
    // call in flight.
    session.release(index);
    tell.send_replace(Some(outcome));
}

async fn call(shared: &Arc<Shared>, session: &Arc<Session>, mut work: Work) -> Outcome {
    let mut draft = Draft {
        prompt: Prompt {
            ids: Vec::new(),
            text: String::new(),
            repaired: 0,
            continuation: Continuation::default(),
        },
        sampling: session.sampling.clone(),
        conversation: Arc::clone(&work.conversation),
    };
    let span = Span::begin(shared.config.spans);
    let answer = match prompt::prepare(shared, session, &work, &mut draft).await {
        Ok(()) => generate_while_wanted(shared, session, &work, &draft).await,
        Err(failure) => Err(failure),
    };
    match &answer {
        Ok(answer) => span.answered(session, &work, &draft, &answer.generation),
        Err(failure) => span.failed(session, &work, &draft, failure.refusal.cause),
    }
    let answered = match answer {
        Ok(answer) => save(shared, session, &mut work, &draft, Some(answer)).await,
        Err(failure) => Err(failure),
    };
    match answered {
        Ok(Some(reply)) => Ok(Arc::new(reply)),
        // A save without an answer gives no reply; it does not come here.
        Ok(None) => Err(Arc::new(session.refuse_abandoned())),
        Err(failure) => {
            session.fail(
                work.index,
                failure.outcome.as_ref(),
                failure.fault,
                now_ms(),
            );
            if let Some(outcome) = &failure.outcome {
                let name = match outcome {
                    AttemptOutcome::TooLong { .. } => "too_long",
                    _ => "engine_failed",
                };
                if failure.refusal.cause != Cause::Abandoned {
                    shared.metrics.attempts.with_label_values(&[name]).inc();
                }
                if let Err(unsaved) = save(shared, session, &mut work, &draft, None).await {
                    tracing::warn!(
                        call = %session.call_id(work.index),
                        error = %unsaved.refusal.message,
                        "a failed call was not saved"
                    );
                }
            }
            Err(Arc::new(failure.refusal))
        }
    }
}

/// Generates as long as somebody waits for the answer, or may come back for it.
async fn generate_while_wanted(
    shared: &Arc<Shared>,
    session: &Arc<Session>,
    work: &Work,
    draft: &Draft,
) -> Result<Answer, Failure> {
    let grace = Duration::from_secs(shared.config.abandon_after_s);
    tokio::select! {
        answer = generate(shared, session, work, draft) => answer,
        () = session.abandoned(work.index, grace) => {
            shared.metrics.abandoned.inc();
            let reason = format!("no client waited for it for {} s", grace.as_secs());
            Err(Failure {
                refusal: Refusal::new(Cause::Abandoned, reason.clone()),
                // For whoever comes back in the very moment; it will ask again.
                outcome: Some(AttemptOutcome::EngineFailed { reason }),
                fault: None,
            })
        }
    }
}

async fn generate(
    shared: &Arc<Shared>,
    session: &Arc<Session>,
    work: &Work,
    draft: &Draft,
) -> Result<Answer, Failure> {
    wait_while_paused(shared).await?;
    let request = engine::Request {
        prompt_ids: draft.prompt.ids.clone(),
        sampling: draft.sampling.clone(),
        hint: Some(Hint {
            rollout: Some(Arc::clone(&session.spec)),
            conversation: Arc::clone(&draft.conversation),
        }),
    };
    let asking = Asking::begin(shared);
    let started = Instant::now();
    let patience = Duration::from_secs(shared.config.engine_timeout_s);
    let limit = session
        .time_left()
        .map_or(patience, |left| left.min(patience));
    let generated = tokio::time::timeout(limit, shared.engine.generate(request)).await;
    drop(asking);
    shared
        .metrics
        .engine_s
        .observe(started.elapsed().as_secs_f64());
    let generation = match generated {
        Ok(Ok(generation)) => generation,
        Ok(Err(error)) => return Err(engine_failure(shared, work.dialect, &error)),
        Err(_) if limit < patience => {
            let refusal = session.refuse_late_time();
            return Err(Failure {
                outcome: Some(AttemptOutcome::EngineFailed {
                    reason: refusal.message.clone(),
                }),
                refusal,
                fault: None,
            });
        }
        Err(_) => {
            let reason = format!("no reply within {} s", limit.as_secs());
            return Err(failed(shared, "timeout", Cause::EngineFailed, reason));
        }
    };
    if let Err(found) = generation.check().and_then(|()| check_policy(&generation)) {
        let reason = format!("the engine broke its contract: {found}");
        return Err(failed(
            shared,
            "bad_generation",
            Cause::EngineFailed,
            reason,
        ));
    }
    if let Some(mode) = shared.engine.degraded() {
        shared
            .metrics
            .engine_degraded
            .with_label_values(&[mode])
            .inc();
    }
    let count = |kind: &str, number: u64| {
        shared
            .metrics
            .tokens
            .with_label_values(&[kind])
            .inc_by(number);
    };
    count("generated", generation.token_ids.len() as u64);
    count("prompt_cached", generation.cached_tokens.into());
    let (codec, index) = (Arc::clone(&shared.codec), work.index);
    let conversation = Arc::clone(&draft.conversation);
    compute(generation.token_ids.len() * size_of::<u32>(), move || {
        let raw_text = codec.decode(&generation.token_ids);
        let parsed = codec
            .parse_with(&raw_text, &conversation.tools)
            .with_ids(index);
        Answer {
            generation,
            raw_text,
            reply: parsed.message,
            parse_failed: parsed.failed,
        }
    })
    .await
}

fn engine_failure(shared: &Shared, dialect: Dialect, error: &EngineError) -> Failure {
    let (kind, cause) = match error {
        EngineError::TooLong {
            prompt_tokens,
            context_tokens_max,
        } => {
            return Failure {
                refusal: Refusal::new(
                    Cause::TooLong,
                    wire::dialect::too_long(dialect, *prompt_tokens, *context_tokens_max),
                ),
                outcome: Some(AttemptOutcome::TooLong {
                    prompt_tokens: *prompt_tokens,
                    context_tokens_max: *context_tokens_max,
                }),
                fault: None,
            };
        }
        EngineError::Busy { .. } => ("busy", Cause::EngineBusy),
        EngineError::Gone(_) => ("gone", Cause::EngineFailed),
        // A harness that repeats these would do so for ever.
        EngineError::Invalid(_) => ("invalid", Cause::EngineRefused),
        EngineError::NoScript(_) => ("no_script", Cause::EngineRefused),
    };
    failed(shared, kind, cause, error.to_string())
}

fn failed(shared: &Shared, kind: &str, cause: Cause, reason: String) -> Failure {
    shared
        .metrics
        .engine_failures
        .with_label_values(&[kind])
        .inc();
    Failure {
        refusal: Refusal::new(cause, reason.clone()),
        outcome: Some(AttemptOutcome::EngineFailed { reason }),
        fault: Some(Fault::EngineFailed),
    }
}

/// Every generated token was made by some weights, and the record says by which.
fn check_policy(generation: &Generation) -> Result<(), String> {
    let spans = &generation.policy;
    let tokens = generation.token_ids.len();
    let sorted = spans.windows(2).all(|pair| pair[0].start < pair[1].start);
    let inside = spans
        .iter()
        .all(|span| span.start == 0 || (span.start as usize) < tokens);
    if spans.first().is_some_and(|span| span.start == 0) && sorted && inside {
        Ok(())
    } else {
        Err(format!(
            "{tokens} tokens do not have these policy versions: {spans:?}"
        ))
    }
}

/// Counts a request to the engine while it runs, however it ends.
struct Asking<'a>(&'a Shared);

impl<'a> Asking<'a> {
    fn begin(shared: &'a Shared) -> Self {
        shared.asking.send_modify(|asking| *asking += 1);
        Self(shared)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.asking.send_modify(|asking| *asking -= 1);
    }
}

async fn wait_while_paused(shared: &Shared) -> Result<(), Failure> {
    let mut paused = shared.paused.subscribe();
    let limit = Duration::from_secs(shared.config.pause_timeout_s);
    let started = Instant::now();
    match tokio::time::timeout(limit, paused.wait_for(|paused| !paused)).await {
        Ok(_) => {
            let waited = started.elapsed();
            if !waited.is_zero() {
                shared.metrics.paused_s.observe(waited.as_secs_f64());
            }
            Ok(())
        }
        Err(_) => {
            let reason = format!(
                "the gateway has been paused for more than {} s",
                limit.as_secs()
            );
            Err(Failure {
                refusal: Refusal::new(Cause::Paused, reason.clone()),
                outcome: Some(AttemptOutcome::EngineFailed { reason }),
                fault: Some(Fault::GatewayFailed),
            })
        }
    }
}

/// Makes the call durable (I6). With an answer, the memory learns it and the reply comes back. The
/// body and the headers go into the record: a call is saved once.
async fn save(
    shared: &Arc<Shared>,
    session: &Arc<Session>,
    work: &mut Work,
    draft: &Draft,
    answer: Option<Answer>,
) -> Result<Option<wire::Reply>, Failure> {
    let id = session.call_id(work.index);
    let Draft {
        prompt,
        sampling,
        conversation,
    } = draft;
    let keep_response = work.dialect == Dialect::Responses && work.body["store"] != false;
    let started = Instant::now();
    {
        let unsaved = |error: ledger::LedgerError| Failure {
            refusal: Refusal::new(Cause::LedgerFailed, error.to_string()),
            outcome: None,
            fault: Some(Fault::GatewayFailed),
        };
        let forget = || shared.ledger.forget_calls(&id.rollout);
        let forgotten = session.forgotten.get_or_try_init(forget).await;
        forgotten.map_err(unsaved)?;
        let writing = session.writing(work.index);
        let _in_order = writing.lock().await;
        let call = Call {
            id: id.clone(),
            dialect: work.dialect,
            request: work.body.take(),
            headers: std::mem::take(&mut work.headers),
            digest: std::mem::take(&mut work.digest),
            conversation: Conversation::clone(conversation),
            prompt_ids: prompt.ids.clone(),
            continuation: prompt.continuation.clone(),
            sampling: sampling.clone(),
            generation: answer.as_ref().map(|answer| answer.generation.clone()),
            raw_text: answer
                .as_ref()
                .map(|answer| answer.raw_text.clone())
                .unwrap_or_default(),
            reply: answer.as_ref().map(|answer| answer.reply.clone()),
            parse_failed: answer.as_ref().is_some_and(|answer| answer.parse_failed),
            attempts: session.attempts(work.index),
        };
        shared.ledger.put_call(call).await.map_err(unsaved)?;
        session.mark_saved(work.index);
    }
    shared
        .metrics
        .save_s
        .observe(started.elapsed().as_secs_f64());
    let Some(answer) = answer else {
        return Ok(None);
    };
    let remembered = session
        .memory
        .write()
        .unwrap_or_else(PoisonError::into_inner)
        .remember(
            work.index,
            prompt,
            &answer.generation.token_ids,
            &answer.raw_text,
            &answer.reply,
        );
    if remembered == Remembered::Full {
        shared.metrics.memory_full.inc();
    }
    if answer.parse_failed {
        shared.metrics.parse_failures.inc();
    }
    let generated = answer.generation.token_ids.len();
    session.done(work.index, answer.parse_failed, generated);
    let reply_id = reply_id(work.dialect, &id);
    if keep_response {
        session
            .responses
            .keep(&reply_id, conversation, work.instructed, &answer.reply);
    }
    let tokens = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    Ok(Some(wire::Reply {
        id: reply_id,
        created_s: now_ms() / 1000,
        model: if work.model.is_empty() {
            shared.config.model.clone()
        } else {
            work.model.clone()
        },
        message: answer.reply,
        finish: answer.generation.finish,
        usage: wire::Usage {
            prompt: tokens(prompt.ids.len()),
            completion: tokens(answer.generation.token_ids.len()),
            cached: answer.generation.cached_tokens,
        },
    }))
}

/// The provider's prefix, then letters and digits only: they survive every client.
fn reply_id(dialect: Dialect, id: &CallId) -> String {
    let hash = Sha256::digest(id.to_string().as_bytes());
    let prefix = wire::dialect::reply_id_prefix(dialect);
    format!("{prefix}{}", hex::encode(&hash[..12]))
}

/// Work on less than this is done where it is asked for: a hop to another thread and back takes as
/// long as rendering and encoding a few kilobytes.
const INLINE_BYTES_MAX: usize = 4 << 10;

/// Does work on so many bytes; when it may take milliseconds, off the async workers.
pub(crate) async fn compute<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let broke = |error: String| {
        let reason = format!("a task of the gateway broke: {error}");
        Failure {
            refusal: Refusal::new(Cause::EngineFailed, reason.clone()),
            outcome: Some(AttemptOutcome::EngineFailed { reason }),
            fault: Some(Fault::GatewayFailed),
        }
    };
    if bytes > INLINE_BYTES_MAX {
        let done = tokio::task::spawn_blocking(work).await;
        return done.map_err(|error| broke(error.to_string()));
    }
    // What it works on is its own or behind a lock that survives it.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work))
        .map_err(|_| broke("it panicked".to_owned()))
}
