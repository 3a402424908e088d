//! One call: prompt, engine, parse, ledger, memory; then, and only then, the reply.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use codec::{CodecError, Prompt, Remembered};
use engine::{EngineError, Hint};
use record::{
    AttemptOutcome, Call, CallId, Continuation, Conversation, Dialect, Fault, Generation, Message,
    Sampling,
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::refusal::{Cause, Refusal};
use crate::serve::{Shared, now_ms};
use crate::session::{Outcome, Session};

/// Text is never longer than this per token on average: a prompt beyond it cannot fit, and is
/// refused without being encoded (50 MB of text would take minutes and gigabytes).
const TEXT_BYTES_PER_TOKEN_MAX: usize = 32;

/// What a call needs to be done.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) index: u32,
    pub(crate) dialect: Dialect,
    pub(crate) digest: String,
    pub(crate) headers: Vec<(String, String)>,
    /// The body as it came.
    pub(crate) body: Value,
    pub(crate) request: wire::Request,
}

/// Seed of one call, from the rollout's seed and the call's index: SHA-256 over both as
/// little-endian integers, first 8 bytes.
#[must_use]
pub fn call_seed(rollout_seed: u64, index: u32) -> u64 {
    let mut hash = Sha256::new();
    hash.update(b"call");
    hash.update(rollout_seed.to_le_bytes());
    hash.update(index.to_le_bytes());
    hash.finalize()
        .iter()
        .take(8)
        .rev()
        .fold(0, |seed, byte| (seed << 8) | u64::from(*byte))
}

/// Why the work stopped.
struct Failure {
    refusal: Refusal,
    /// What the attempts are recorded as; `None` when nothing is recorded.
    outcome: Option<AttemptOutcome>,
    fault: Option<Fault>,
}

/// What is known of a call so far; goes into the ledger whatever happens.
struct Draft {
    prompt: Prompt,
    sampling: Sampling,
    conversation: Arc<Conversation>,
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
    let index = work.index;
    let outcome = tokio::select! {
        biased;
        () = session.cancel.cancelled() => {
            session.fail(index, None, None, now_ms());
            Err(Arc::new(session.refuse_abandoned()))
        }
        outcome = call(shared, session, work) => outcome,
    };
    // Released first: whoever sees the outcome must find the counters right. The attempts keep the
    // call in flight.
    session.release(index);
    tell.send_replace(Some(outcome));
}

async fn call(shared: &Arc<Shared>, session: &Arc<Session>, work: Work) -> Outcome {
    let mut draft = Draft {
        prompt: Prompt {
            ids: Vec::new(),
            text: String::new(),
            continuation: Continuation::default(),
        },
        sampling: session.sampling.clone(),
        conversation: Arc::new(work.request.conversation.clone()),
    };
    let answer = match prepare(shared, session, &work, &mut draft).await {
        Ok(()) => generate(shared, session, &work, &draft).await,
        Err(failure) => Err(failure),
    };
    let answered = match answer {
        Ok(answer) => save(shared, session, &work, &draft, Some(answer)).await,
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
                shared.metrics.attempts.with_label_values(&[name]).inc();
                if let Err(unsaved) = save(shared, session, &work, &draft, None).await {
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

/// Renders the prompt and settles the sampling.
async fn prepare(
    shared: &Arc<Shared>,
    session: &Arc<Session>,
    work: &Work,
    draft: &mut Draft,
) -> Result<(), Failure> {
    let context = shared.info.context_tokens_max;
    let too_long = |prompt_tokens: u32| Failure {
        refusal: Refusal::new(
            Cause::TooLong,
            wire::dialect::too_long(work.dialect, prompt_tokens, context),
        ),
        outcome: Some(AttemptOutcome::TooLong {
            prompt_tokens,
            context_tokens_max: context,
        }),
        fault: None,
    };
    draft.sampling = sampling(shared, session, work);
    let at_least = text_bytes(&work.request.conversation) / TEXT_BYTES_PER_TOKEN_MAX;
    if at_least > context as usize {
        return Err(too_long(u32::try_from(at_least).unwrap_or(u32::MAX)));
    }
    let started = Instant::now();
    let rendered = render(shared, session, &draft.conversation).await?;
    shared
        .metrics
        .render_s
        .observe(started.elapsed().as_secs_f64());
    draft.prompt = rendered.map_err(|error: CodecError| Failure {
        outcome: Some(AttemptOutcome::EngineFailed {
            reason: format!("not asked: {error}"),
        }),
        refusal: Refusal::new(Cause::BadRequest, error.to_string()),
        fault: None,
    })?;
    let prompt_tokens = u32::try_from(draft.prompt.ids.len()).unwrap_or(u32::MAX);
    let room = context.saturating_sub(prompt_tokens);
    if room == 0 {
        return Err(too_long(prompt_tokens));
    }
    draft.sampling.tokens_max = draft.sampling.tokens_max.min(room);
    let continuation = &draft.prompt.continuation;
    let count = |kind: &str, number: u32| {
        shared
            .metrics
            .tokens
            .with_label_values(&[kind])
            .inc_by(number.into());
    };
    count("prompt_exact", continuation.exact);
    count("prompt_encoded", continuation.encoded);
    let echoes = &shared.metrics.echoes;
    echoes
        .with_label_values(&["matched"])
        .inc_by(continuation.echoes_matched.into());
    echoes
        .with_label_values(&["foreign"])
        .inc_by(continuation.echoes_foreign.into());
    Ok(())
}

async fn render(
    shared: &Arc<Shared>,
    session: &Arc<Session>,
    conversation: &Arc<Conversation>,
) -> Result<Result<Prompt, CodecError>, Failure> {
    let (codec, session) = (Arc::clone(&shared.codec), Arc::clone(session));
    let conversation = Arc::clone(conversation);
    blocking(move || {
        let memory = session
            .memory
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        codec.prompt(&conversation, &memory)
    })
    .await
}

/// Tokens of the prompt that this conversation would have now.
pub(crate) async fn count(
    shared: &Arc<Shared>,
    session: &Arc<Session>,
    conversation: Conversation,
) -> Result<u32, Refusal> {
    let conversation = Arc::new(conversation);
    match render(shared, session, &conversation).await {
        Ok(Ok(prompt)) => Ok(u32::try_from(prompt.ids.len()).unwrap_or(u32::MAX)),
        Ok(Err(error)) => Err(Refusal::new(Cause::BadRequest, error.to_string())),
        Err(failure) => Err(failure.refusal),
    }
}

fn text_bytes(conversation: &Conversation) -> usize {
    conversation
        .messages
        .iter()
        .flat_map(|message| &message.content)
        .map(|part| match part {
            record::Part::Text { text } => text.len(),
            record::Part::Image { .. } => 0,
        })
        .sum()
}

/// The rollout's settings, and within them what the client wishes.
fn sampling(shared: &Shared, session: &Session, work: &Work) -> Sampling {
    let wishes = &work.request.sampling;
    let mut sampling = session.sampling.clone();
    sampling.seed = call_seed(session.spec.seed, work.index);
    if !session.sampling_fixed {
        sampling.temperature = wishes.temperature.unwrap_or(sampling.temperature);
        sampling.top_p = wishes.top_p.unwrap_or(sampling.top_p);
        sampling.top_k = wishes.top_k.unwrap_or(sampling.top_k);
        sampling.seed = wishes.seed.unwrap_or(sampling.seed);
    }
    if let Some(wish) = wishes.tokens_max {
        sampling.tokens_max = sampling.tokens_max.min(wish);
    }
    for id in shared.codec.stop_ids() {
        if !sampling.stop_ids.contains(id) {
            sampling.stop_ids.push(*id);
        }
    }
    sampling.stop.extend(wishes.stop.iter().cloned());
    sampling
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
    let started = Instant::now();
    let limit = Duration::from_secs(shared.config.engine_timeout_s);
    let generated = tokio::time::timeout(limit, shared.engine.generate(request)).await;
    shared
        .metrics
        .engine_s
        .observe(started.elapsed().as_secs_f64());
    let generation = match generated {
        Ok(Ok(generation)) => generation,
        Ok(Err(error)) => return Err(engine_failure(shared, work.dialect, &error)),
        Err(_) => {
            let reason = format!("no reply within {} s", limit.as_secs());
            return Err(failed(shared, "timeout", Cause::EngineFailed, reason));
        }
    };
    if let Err(found) = generation.check() {
        let reason = format!("the engine broke its contract: {found}");
        return Err(failed(
            shared,
            "bad_generation",
            Cause::EngineFailed,
            reason,
        ));
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
    blocking(move || {
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
        EngineError::Invalid(_) => ("invalid", Cause::EngineFailed),
        EngineError::NoScript(_) => ("no_script", Cause::EngineFailed),
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

async fn wait_while_paused(shared: &Shared) -> Result<(), Failure> {
    let mut paused = shared.paused.subscribe();
    let limit = Duration::from_secs(shared.config.pause_timeout_s);
    match tokio::time::timeout(limit, paused.wait_for(|paused| !paused)).await {
        Ok(_) => Ok(()),
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

/// Makes the call durable (I6). With an answer, the memory learns it and the reply comes back.
async fn save(
    shared: &Arc<Shared>,
    session: &Arc<Session>,
    work: &Work,
    draft: &Draft,
    answer: Option<Answer>,
) -> Result<Option<wire::Reply>, Failure> {
    let id = session.call_id(work.index);
    let Draft {
        prompt,
        sampling,
        conversation,
    } = draft;
    let started = Instant::now();
    {
        let unsaved = |error: ledger::LedgerError| Failure {
            refusal: Refusal::new(Cause::LedgerFailed, error.to_string()),
            outcome: None,
            fault: Some(Fault::GatewayFailed),
        };
        let mut cleared = session.writing.lock().await;
        if !*cleared {
            let forgotten = shared.ledger.forget_calls(&id.rollout).await;
            forgotten.map_err(unsaved)?;
            *cleared = true;
        }
        let call = Call {
            id: id.clone(),
            dialect: work.dialect,
            request: work.body.clone(),
            headers: work.headers.clone(),
            digest: work.digest.clone(),
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
        .lock()
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
    session.done(work.index, answer.parse_failed);
    let reply_id = reply_id(work.dialect, &id);
    if work.dialect == Dialect::Responses && work.body["store"] != false {
        session.responses.keep(
            &reply_id,
            conversation,
            work.request.instructed,
            &answer.reply,
        );
    }
    let tokens = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    Ok(Some(wire::Reply {
        id: reply_id,
        created_s: now_ms() / 1000,
        model: if work.request.model.is_empty() {
            shared.config.model.clone()
        } else {
            work.request.model.clone()
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

/// Runs work that takes milliseconds of CPU off the async workers.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        let reason = format!("a task of the gateway broke: {error}");
        Failure {
            refusal: Refusal::new(Cause::EngineFailed, reason.clone()),
            outcome: Some(AttemptOutcome::EngineFailed { reason }),
            fault: Some(Fault::GatewayFailed),
        }
    })
}
