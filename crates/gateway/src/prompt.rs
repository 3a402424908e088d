//! The prompt of a call, and how its reply is to be drawn.

use std::sync::{Arc, PoisonError};

use codec::{CodecError, Prompt};
use record::{AttemptOutcome, Continuation, Conversation, Sampling};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use crate::refusal::{Cause, Refusal};
use crate::serve::Shared;
use crate::session::Session;
use crate::work::{Draft, Failure, Work, compute};

/// Text is never longer than this per token on average: a prompt beyond it cannot fit, and is
/// refused without being encoded (50 MB of text would take minutes and gigabytes).
const TEXT_BYTES_PER_TOKEN_MAX: usize = 32;

/// A tool with its schema, or the arguments of a tool call, about.
const TOOL_BYTES: usize = 1 << 10;

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

/// Renders the prompt and settles the sampling.
pub(crate) async fn prepare(
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
    let at_least = text_bytes(&work.conversation) / TEXT_BYTES_PER_TOKEN_MAX;
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
    draft.sampling.tokens_max = draft
        .sampling
        .tokens_max
        .min(room)
        .min(session.tokens_left().max(1));
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
    count("prompt_repaired", draft.prompt.repaired);
    let images = work
        .conversation
        .messages
        .iter()
        .flat_map(|message| &message.content);
    let images = images.filter(|part| matches!(part, record::Part::Image { .. }));
    shared.metrics.images.inc_by(images.count() as u64);
    let shape = match continuation.parent {
        Some(_) => "continued",
        None if work.headers.iter().any(|(name, _)| name == ":path") => "compaction",
        None if work.conversation.tools.is_empty() => "root_without_tools",
        None => "root",
    };
    shared.metrics.shapes.with_label_values(&[shape]).inc();
    let cause = encoded_cause(&draft.conversation, continuation, shared.codec.mode());
    shared
        .metrics
        .encoded
        .with_label_values(&[cause])
        .inc_by(continuation.encoded.into());
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
    let made = conversation.messages.iter();
    let made: usize = made.map(|message| message.tool_calls.len()).sum();
    let tools = (conversation.tools.len() + made) * TOOL_BYTES;
    compute(text_bytes(&conversation) + tools, move || {
        let memory = session
            .memory
            .read()
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
    let wishes = &work.sampling;
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

/// Why the end of a prompt had to be encoded: the word used in metrics.
fn encoded_cause(
    conversation: &Conversation,
    continuation: &Continuation,
    mode: &codec::Mode,
) -> &'static str {
    let answered = conversation
        .messages
        .iter()
        .any(|message| message.role == record::Role::Assistant);
    match continuation.parent {
        _ if *mode != codec::Mode::Exact => "no_exact_mode",
        _ if !answered => "first",
        _ if continuation.echoes_foreign > 0 => "foreign_turn",
        Some(_) => "new_messages",
        None => "other_root",
    }
}
