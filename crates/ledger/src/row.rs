//! Records as rows and back. A call is an entry of `calls`, which says which body is its own, and a
//! body ([`crate::body`]). `attempts` is JSON of its own, because it changes after the reply was
//! delivered. Every sum is the first 16 bytes of SHA-256 over the record's name and its stored
//! bytes, so that a record that was moved is noticed like one that was changed; the name of a body
//! holds its parent.

use record::{
    Attempt, Call, CallId, Continuation, Conversation, Dialect, FinishReason, Generation, Message,
    PolicySpan, Rollout, Sampling,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::LedgerError;
use crate::body::{self, Parts};
use crate::source::{Difference, Source};

pub(crate) const SUM_BYTES: usize = 16;
pub(crate) type Sum = [u8; SUM_BYTES];

/// A call ready to be written.
#[derive(Debug)]
pub(crate) struct CallRow {
    pub(crate) number: i64,
    pub(crate) parent: Option<i64>,
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

/// A summary ready to be written.
#[derive(Debug)]
pub(crate) struct SummaryRow {
    pub(crate) rollout: String,
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
struct RestOut<'a> {
    call: u32,
    dialect: Dialect,
    headers: &'a [(String, String)],
    digest: &'a str,
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
struct RestIn {
    call: u32,
    dialect: Dialect,
    headers: Vec<(String, String)>,
    digest: String,
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

/// The name of a body, for its checksum.
pub(crate) fn body_name(rollout: &str, number: i64, parent: Option<i64>) -> String {
    match parent {
        Some(parent) => format!("body {number} of {rollout} on {parent}"),
        None => format!("body {number} of {rollout}"),
    }
}

pub(crate) fn unstorable(record: String, found: impl std::fmt::Display) -> LedgerError {
    LedgerError::Encode {
        record,
        found: found.to_string(),
    }
}

/// All fields of a call that are small, as JSON. Its attempts are stored beside it.
pub(crate) fn rest_of(call: &Call) -> Result<Vec<u8>, LedgerError> {
    // Field by field, so that a new field of `Call` cannot be forgotten here.
    let Call {
        id,
        dialect,
        request: _,
        headers,
        digest,
        conversation: _,
        prompt_ids: _,
        continuation,
        sampling,
        generation,
        raw_text,
        reply,
        parse_failed,
        attempts: _,
    } = call;
    let rest = RestOut {
        call: id.index,
        dialect: *dialect,
        headers,
        digest,
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
    };
    serde_json::to_vec(&rest).map_err(|found| unstorable(call_name(id), found))
}

/// A call that is to be stored: where, and what hangs on it.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    pub(crate) id: &'a CallId,
    /// Of its body.
    pub(crate) number: i64,
    pub(crate) attempts: &'a [Attempt],
}

/// Makes the row of a call, stored against `parent` if there is one; `difference` is between
/// these two.
pub(crate) fn encode_call(
    place: &Place<'_>,
    source: &Source,
    difference: &Difference,
    parent: Option<(i64, &Source)>,
) -> Result<CallRow, LedgerError> {
    let Place {
        id,
        number,
        attempts,
    } = *place;
    let body = body::encode(source, difference, parent.map(|(_, source)| source))
        .map_err(|found| unstorable(call_name(id), found))?;
    let parent = parent.map(|(number, _)| number);
    Ok(CallRow {
        number,
        parent,
        sum: sum(&body_name(id.rollout.as_str(), number, parent), &body),
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

/// Puts a call together again. The sums were checked before, so an error here means that the
/// bytes are what was written but not what this program writes.
pub(crate) fn decode_call(id: CallId, parts: &Parts, attempts: &str) -> Result<Call, String> {
    let failed = |found: serde_json::Error| found.to_string();
    let rest: RestIn = serde_json::from_slice(&parts.rest).map_err(failed)?;
    if rest.call != id.index {
        return Err(format!("its body is that of call {}", rest.call));
    }
    Ok(Call {
        id,
        dialect: rest.dialect,
        request: serde_json::from_slice::<Value>(&parts.request).map_err(failed)?,
        headers: rest.headers,
        digest: rest.digest,
        conversation: serde_json::from_slice::<Conversation>(&parts.conversation)
            .map_err(failed)?,
        prompt_ids: parts.prompt.clone(),
        continuation: rest.continuation,
        sampling: rest.sampling,
        generation: rest.generation.map(|generation| Generation {
            token_ids: parts.output.clone(),
            logprobs_model: parts.logprobs_model.clone(),
            logprobs_sampled: parts.logprobs_sampled.clone(),
            policy: generation.policy,
            finish: generation.finish,
            cached_tokens: generation.cached_tokens,
        }),
        raw_text: rest.raw_text,
        reply: rest.reply,
        parse_failed: rest.parse_failed,
        attempts: serde_json::from_str(attempts).map_err(failed)?,
    })
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

pub(crate) fn summary_name(rollout: &str) -> String {
    format!("summary of {rollout}")
}

pub(crate) fn encode_summary(
    id: &record::RolloutId,
    summary: &impl Serialize,
) -> Result<SummaryRow, LedgerError> {
    let name = summary_name(id.as_str());
    let body = serde_json::to_vec(summary).map_err(|found| unstorable(name.clone(), found))?;
    Ok(SummaryRow {
        rollout: id.to_string(),
        sum: sum(&name, &body),
        body,
    })
}
