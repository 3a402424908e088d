//! Older formats. A migration is one transaction: whoever is killed meanwhile has the old file.

use std::path::Path;

use record::{
    CallId, Continuation, Conversation, Dialect, FinishReason, Generation, Message, PolicySpan,
    RolloutId, Sampling,
};
use rusqlite::{Connection, params};
use serde::Deserialize;
use serde_json::Value;

use crate::body::{decompressed_len, take_bytes, take_words};
use crate::encode::encode;
use crate::recent::Recents;
use crate::row::{self, Place, attempts_name, call_name};
use crate::source::Source;
use crate::{LedgerError, schema};

/// The JSON of a call in version 1.
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

/// A row of `calls` in version 1.
struct OldCall {
    rollout: String,
    call: u32,
    attempts: String,
    attempts_sum: Vec<u8>,
    body: Vec<u8>,
    sum: Vec<u8>,
}

/// Brings a file of version 1 to version 2. A damaged call stays damaged: its bytes are taken over
/// under a checksum that does not match, so that it is named whenever it is read.
pub(crate) fn from_1(file: &Path, connection: &mut Connection) -> Result<(), LedgerError> {
    let sqlite = |source| LedgerError::sqlite(file, source);
    tracing::info!(file = %file.display(), "bringing the ledger from format 1 to format 2");
    let transaction = connection.transaction().map_err(sqlite)?;
    transaction
        .execute_batch(&format!(
            "ALTER TABLE calls RENAME TO old_calls; {}",
            schema::CALLS
        ))
        .map_err(sqlite)?;
    let recents = Recents::default();
    {
        let mut read = transaction
            .prepare(
                "SELECT rollout, call, attempts, attempts_sum, body, sum FROM old_calls
                 ORDER BY rollout, number",
            )
            .map_err(sqlite)?;
        let mut write_body = transaction
            .prepare(
                "INSERT INTO bodies (number, rollout, parent, body, sum) VALUES (?1, ?2, ?3, ?4, ?5)",
            )
            .map_err(sqlite)?;
        let mut write_call = transaction
            .prepare(
                "INSERT INTO calls (rollout, call, body, attempts, attempts_sum)
                 VALUES (?1, ?2, ?3, ?4, ?5)",
            )
            .map_err(sqlite)?;
        let mut rows = read.query([]).map_err(sqlite)?;
        let mut number = 0_i64;
        while let Some(found) = rows.next().map_err(sqlite)? {
            let old = OldCall {
                rollout: found.get(0).map_err(sqlite)?,
                call: found.get(1).map_err(sqlite)?,
                attempts: found.get(2).map_err(sqlite)?,
                attempts_sum: found.get(3).map_err(sqlite)?,
                body: found.get(4).map_err(sqlite)?,
                sum: found.get(5).map_err(sqlite)?,
            };
            number += 1;
            let (parent, body, sum) = match renewed(file, number, &old, &recents) {
                Ok(row) => (row.parent, row.body, row.sum.to_vec()),
                Err(error) => {
                    tracing::warn!(%error, "a damaged call is taken over as it is");
                    (None, old.body, old.sum)
                }
            };
            write_body
                .execute(params![number, old.rollout, parent, body, sum])
                .map_err(sqlite)?;
            write_call
                .execute(params![
                    old.rollout,
                    old.call,
                    number,
                    old.attempts,
                    old.attempts_sum
                ])
                .map_err(sqlite)?;
        }
    }
    transaction
        .execute_batch("DROP TABLE old_calls; PRAGMA user_version = 2")
        .map_err(sqlite)?;
    transaction.commit().map_err(sqlite)
}

/// Brings a file of version 2 to version 3: summaries are made when they are asked for.
pub(crate) fn from_2(file: &Path, connection: &Connection) -> Result<(), LedgerError> {
    connection
        .execute_batch(&format!(
            "BEGIN; {} PRAGMA user_version = 3; COMMIT;",
            schema::SUMMARIES
        ))
        .map_err(|source| LedgerError::sqlite(file, source))
}

fn renewed(
    file: &Path,
    number: i64,
    old: &OldCall,
    recents: &Recents,
) -> Result<row::CallRow, LedgerError> {
    let damaged = |found: String| LedgerError::Damaged {
        path: file.to_owned(),
        record: format!("call {}#{}", old.rollout, old.call),
        found,
    };
    let rollout =
        RolloutId::new(old.rollout.clone()).map_err(|found| damaged(found.to_string()))?;
    let id = CallId {
        rollout: rollout.clone(),
        index: old.call,
    };
    let sums = [
        (call_name(&id), old.body.as_slice(), &old.sum),
        (
            attempts_name(&id),
            old.attempts.as_bytes(),
            &old.attempts_sum,
        ),
    ];
    for (name, bytes, sum) in sums {
        if row::sum(&name, bytes) != sum.as_slice() {
            return Err(damaged("its checksum does not match".to_owned()));
        }
    }
    let call = decode_1(id.clone(), &old.body, &old.attempts).map_err(damaged)?;
    let (said, attempts) = (call.continuation.parent, call.attempts.clone());
    let place = Place {
        id: &id,
        number,
        attempts: &attempts,
    };
    let (row, recent) = encode(&recents.of(&rollout), said, &place, Source::of(call)?)?;
    recents.add(&rollout, recent);
    Ok(row)
}

fn decode_1(id: CallId, body: &[u8], attempts: &str) -> Result<record::Call, String> {
    let plain = zstd::bulk::decompress(body, decompressed_len(body)?)
        .map_err(|found| format!("zstd: {found}"))?;
    let mut rest = plain.as_slice();
    let body: BodyIn =
        serde_json::from_slice(take_bytes(&mut rest)?).map_err(|found| found.to_string())?;
    let prompt_ids = take_words(&mut rest, u32::from_le_bytes)?;
    let token_ids = take_words(&mut rest, u32::from_le_bytes)?;
    let logprobs_model = take_words(&mut rest, f32::from_le_bytes)?;
    let logprobs_sampled = take_words(&mut rest, f32::from_le_bytes)?;
    if !rest.is_empty() {
        return Err(format!("{} bytes too many", rest.len()));
    }
    Ok(record::Call {
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
