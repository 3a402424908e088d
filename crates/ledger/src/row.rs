//! Records as bytes and back.
//!
//! A call's `body` is one zstd frame (level 1) around:
//!
//! ```text
//! u32 length, JSON of everything but attempts and the four arrays below
//! u32 count, u32 × count   prompt ids
//! u32 count, u32 × count   generated ids
//! u32 count, f32 × count   log-probabilities, model
//! u32 count, f32 × count   log-probabilities, sampled
//! ```
//!
//! all little-endian; a call without a generation has three empty arrays and `null` in the JSON.
//! `attempts` is JSON of its own, because it changes after the reply was delivered. Every sum is
//! the first 16 bytes of SHA-256 over the record's name and its stored bytes, so that a record that
//! was moved is noticed like one that was changed.

use record::{
    Attempt, Call, CallId, Continuation, Conversation, Dialect, FinishReason, Generation, Message,
    PolicySpan, Rollout, Sampling,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::LedgerError;

/// Largest body after decompression, in bytes: what a damaged length cannot exceed.
const BODY_BYTES_MAX: usize = 1 << 30;

pub(crate) const SUM_BYTES: usize = 16;
pub(crate) type Sum = [u8; SUM_BYTES];

/// A call ready to be written.
#[derive(Debug)]
pub(crate) struct CallRow {
    pub(crate) body: Vec<u8>,
    pub(crate) sum: Sum,
    pub(crate) attempts: AttemptsRow,
}

/// The attempts of a call, ready to be written.
#[derive(Debug)]
pub(crate) struct AttemptsRow {
    pub(crate) id: CallId,
    pub(crate) attempts: String,
    pub(crate) sum: Sum,
}

/// A rollout ready to be written.
#[derive(Debug)]
pub(crate) struct RolloutRow {
    pub(crate) id: String,
    pub(crate) started_ms: i64,
    pub(crate) disposition: Option<&'static str>,
    pub(crate) labels: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    pub(crate) sum: Sum,
}

/// A note ready to be written.
#[derive(Debug)]
pub(crate) struct NoteRow {
    pub(crate) key: String,
    pub(crate) body: Vec<u8>,
    pub(crate) sum: Sum,
}

/// Checksum of a record's stored bytes under its name.
pub(crate) fn sum(name: &str, bytes: &[u8]) -> Sum {
    let mut hash = Sha256::new();
    hash.update((name.len() as u64).to_le_bytes());
    hash.update(name.as_bytes());
    hash.update(bytes);
    let mut sum = Sum::default();
    sum.copy_from_slice(&hash.finalize()[..SUM_BYTES]);
    sum
}

#[derive(Serialize)]
struct BodyOut<'a> {
    dialect: Dialect,
    request: &'a Value,
    headers: &'a [(String, String)],
    digest: &'a str,
    conversation: &'a Conversation,
    continuation: &'a Continuation,
    sampling: &'a Sampling,
    generation: Option<GenerationOut<'a>>,
    raw_text: &'a str,
    reply: &'a Option<Message>,
    parse_failed: bool,
}

#[derive(Serialize)]
struct GenerationOut<'a> {
    policy: &'a [PolicySpan],
    finish: FinishReason,
    cached_tokens: u32,
}

#[derive(Deserialize)]
struct BodyIn {
    dialect: Dialect,
    request: Value,
    headers: Vec<(String, String)>,
    digest: String,
    conversation: Conversation,
    continuation: Continuation,
    sampling: Sampling,
    generation: Option<GenerationIn>,
    raw_text: String,
    reply: Option<Message>,
    parse_failed: bool,
}

#[derive(Deserialize)]
struct GenerationIn {
    policy: Vec<PolicySpan>,
    finish: FinishReason,
    cached_tokens: u32,
}

pub(crate) fn call_name(id: &CallId) -> String {
    format!("call {id}")
}

pub(crate) fn attempts_name(id: &CallId) -> String {
    format!("attempts of call {id}")
}

fn unstorable(record: String, found: impl std::fmt::Display) -> LedgerError {
    LedgerError::Encode {
        record,
        found: found.to_string(),
    }
}

pub(crate) fn encode_call(call: &Call) -> Result<CallRow, LedgerError> {
    // Taken apart field by field, so that a new field of `Call` cannot be forgotten here.
    let Call {
        id,
        dialect,
        request,
        headers,
        digest,
        conversation,
        prompt_ids,
        continuation,
        sampling,
        generation,
        raw_text,
        reply,
        parse_failed,
        attempts,
    } = call;
    let json = serde_json::to_vec(&BodyOut {
        dialect: *dialect,
        request,
        headers,
        digest,
        conversation,
        continuation,
        sampling,
        generation: generation.as_ref().map(|generation| GenerationOut {
            policy: &generation.policy,
            finish: generation.finish,
            cached_tokens: generation.cached_tokens,
        }),
        raw_text,
        reply,
        parse_failed: *parse_failed,
    })
    .map_err(|found| unstorable(call_name(id), found))?;

    let mut plain = Vec::with_capacity(json.len() + 4 * prompt_ids.len() + 64);
    let fits = |count: usize| {
        u32::try_from(count).map_err(|_| unstorable(call_name(id), "longer than 4 GiB"))
    };
    plain.extend_from_slice(&fits(json.len())?.to_le_bytes());
    plain.extend_from_slice(&json);
    let mut array = |count: usize, bytes: &mut dyn Iterator<Item = [u8; 4]>| {
        fits(count).map(|count| {
            plain.extend_from_slice(&count.to_le_bytes());
            bytes.for_each(|word| plain.extend_from_slice(&word));
        })
    };
    let ids = |ids: &[u32]| -> Vec<[u8; 4]> { ids.iter().map(|id| id.to_le_bytes()).collect() };
    let floats =
        |values: &[f32]| -> Vec<[u8; 4]> { values.iter().map(|v| v.to_le_bytes()).collect() };
    array(prompt_ids.len(), &mut ids(prompt_ids).into_iter())?;
    if let Some(generation) = generation {
        for words in [
            ids(&generation.token_ids),
            floats(&generation.logprobs_model),
            floats(&generation.logprobs_sampled),
        ] {
            array(words.len(), &mut words.into_iter())?;
        }
    } else {
        for _ in 0..3 {
            array(0, &mut std::iter::empty())?;
        }
    }
    if plain.len() > BODY_BYTES_MAX {
        return Err(unstorable(call_name(id), "longer than 1 GiB"));
    }
    let body = zstd::bulk::compress(&plain, 1).map_err(|found| unstorable(call_name(id), found))?;
    Ok(CallRow {
        sum: sum(&call_name(id), &body),
        body,
        attempts: encode_attempts(id, attempts)?,
    })
}

pub(crate) fn encode_attempts(
    id: &CallId,
    attempts: &[Attempt],
) -> Result<AttemptsRow, LedgerError> {
    let attempts =
        serde_json::to_string(attempts).map_err(|found| unstorable(attempts_name(id), found))?;
    Ok(AttemptsRow {
        sum: sum(&attempts_name(id), attempts.as_bytes()),
        id: id.clone(),
        attempts,
    })
}

/// Reads a body back. The sum was checked before, so an error here means that the bytes are what
/// was written but not what this program writes.
pub(crate) fn decode_call(id: CallId, body: &[u8], attempts: &str) -> Result<Call, String> {
    let plain = zstd::bulk::decompress(body, decompressed_len(body)?)
        .map_err(|found| format!("zstd: {found}"))?;
    let mut rest = plain.as_slice();
    let json_len = take_u32(&mut rest)? as usize;
    let json = take(&mut rest, json_len)?;
    let body: BodyIn = serde_json::from_slice(json).map_err(|found| found.to_string())?;
    let prompt_ids = take_words(&mut rest, u32::from_le_bytes)?;
    let token_ids = take_words(&mut rest, u32::from_le_bytes)?;
    let logprobs_model = take_words(&mut rest, f32::from_le_bytes)?;
    let logprobs_sampled = take_words(&mut rest, f32::from_le_bytes)?;
    if !rest.is_empty() {
        return Err(format!("{} bytes too many", rest.len()));
    }
    Ok(Call {
        id,
        dialect: body.dialect,
        request: body.request,
        headers: body.headers,
        digest: body.digest,
        conversation: body.conversation,
        prompt_ids,
        continuation: body.continuation,
        sampling: body.sampling,
        generation: body.generation.map(|generation| Generation {
            token_ids,
            logprobs_model,
            logprobs_sampled,
            policy: generation.policy,
            finish: generation.finish,
            cached_tokens: generation.cached_tokens,
        }),
        raw_text: body.raw_text,
        reply: body.reply,
        parse_failed: body.parse_failed,
        attempts: serde_json::from_str(attempts).map_err(|found| found.to_string())?,
    })
}

fn decompressed_len(body: &[u8]) -> Result<usize, String> {
    match zstd::zstd_safe::get_frame_content_size(body) {
        Ok(Some(len)) if len <= BODY_BYTES_MAX as u64 => {
            usize::try_from(len).map_err(|found| found.to_string())
        }
        other => Err(format!("zstd frame says its size is {other:?}")),
    }
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8], String> {
    match rest.split_at_checked(len) {
        Some((head, tail)) => {
            *rest = tail;
            Ok(head)
        }
        None => Err(format!("expected {len} more bytes, found {}", rest.len())),
    }
}

fn take_u32(rest: &mut &[u8]) -> Result<u32, String> {
    let bytes = take(rest, 4)?;
    bytes
        .try_into()
        .map(u32::from_le_bytes)
        .map_err(|_| "expected 4 bytes".to_owned())
}

fn take_words<T>(rest: &mut &[u8], word: fn([u8; 4]) -> T) -> Result<Vec<T>, String> {
    let count = take_u32(rest)? as usize;
    let bytes = take(rest, count.saturating_mul(4))?;
    Ok(bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|chunk| word(*chunk))
        .collect())
}

pub(crate) fn encode_rollout(rollout: &Rollout) -> Result<RolloutRow, LedgerError> {
    let id = rollout.spec.id.as_str().to_owned();
    let name = format!("rollout {id}");
    let body = serde_json::to_vec(rollout).map_err(|found| unstorable(name.clone(), found))?;
    Ok(RolloutRow {
        started_ms: i64::try_from(rollout.started_ms)
            .map_err(|found| unstorable(name.clone(), found))?,
        disposition: rollout.disposition.as_ref().map(record::Disposition::name),
        labels: rollout
            .spec
            .labels
            .iter()
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect(),
        sum: sum(&name, &body),
        id,
        body,
    })
}

pub(crate) fn encode_note(key: &str, value: &Value) -> Result<NoteRow, LedgerError> {
    let name = format!("note {key}");
    let body = serde_json::to_vec(value).map_err(|found| unstorable(name.clone(), found))?;
    Ok(NoteRow {
        sum: sum(&name, &body),
        key: key.to_owned(),
        body,
    })
}
