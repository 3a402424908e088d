//! A ledger of format 1 is brought up to date when it is opened; nothing is lost or changed.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::path::Path;

use ledger::{FILE_NAME, Ledger, LedgerError};
use record::{Call, RolloutId};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// As format 1 said.
fn sum(name: &str, bytes: &[u8]) -> Vec<u8> {
    let mut hash = Sha256::new();
    hash.update((name.len() as u64).to_le_bytes());
    hash.update(name.as_bytes());
    hash.update(bytes);
    hash.finalize()[..16].to_vec()
}

fn body(call: &Call) -> Vec<u8> {
    let mut json = serde_json::to_value(call).unwrap();
    for field in ["id", "prompt_ids", "attempts"] {
        json.as_object_mut().unwrap().remove(field);
    }
    if let Value::Object(generation) = &mut json["generation"] {
        for field in ["token_ids", "logprobs_model", "logprobs_sampled"] {
            generation.remove(field);
        }
    }
    let json = serde_json::to_vec(&json).unwrap();
    let mut plain = (json.len() as u32).to_le_bytes().to_vec();
    plain.extend(json);
    let mut array = |values: Vec<[u8; 4]>| {
        plain.extend((values.len() as u32).to_le_bytes());
        plain.extend(values.concat());
    };
    let ids = |ids: &[u32]| ids.iter().map(|id| id.to_le_bytes()).collect();
    let floats = |values: &[f32]| values.iter().map(|value| value.to_le_bytes()).collect();
    array(ids(&call.prompt_ids));
    match &call.generation {
        Some(generation) => {
            array(ids(&generation.token_ids));
            array(floats(&generation.logprobs_model));
            array(floats(&generation.logprobs_sampled));
        }
        None => (0..3).for_each(|_| array(Vec::new())),
    }
    zstd::bulk::compress(&plain, 1).unwrap()
}

fn write_format_1(dir: &Path, calls: &[Call]) {
    let file = rusqlite::Connection::open(dir.join(FILE_NAME)).unwrap();
    file.execute_batch(
        "PRAGMA journal_mode = WAL;
         CREATE TABLE rollouts (id TEXT PRIMARY KEY, started_ms INTEGER NOT NULL, disposition TEXT,
             body BLOB NOT NULL, sum BLOB NOT NULL) STRICT, WITHOUT ROWID;
         CREATE TABLE labels (name TEXT NOT NULL, value TEXT NOT NULL, rollout TEXT NOT NULL,
             PRIMARY KEY (name, value, rollout)) STRICT, WITHOUT ROWID;
         CREATE TABLE calls (number INTEGER PRIMARY KEY, rollout TEXT NOT NULL, call INTEGER NOT NULL,
             attempts TEXT NOT NULL, attempts_sum BLOB NOT NULL, body BLOB NOT NULL,
             sum BLOB NOT NULL, UNIQUE (rollout, call)) STRICT;
         CREATE TABLE notes (key TEXT PRIMARY KEY, body BLOB NOT NULL, sum BLOB NOT NULL)
             STRICT, WITHOUT ROWID;
         INSERT INTO notes VALUES ('k', CAST('7' AS BLOB), x'00');
         PRAGMA application_id = 1165193324; PRAGMA user_version = 1;",
    )
    .unwrap();
    file.execute("UPDATE notes SET sum = ?1", [sum("note k", b"7")])
        .unwrap();
    for call in calls {
        let (body, attempts) = (body(call), serde_json::to_string(&call.attempts).unwrap());
        file.execute(
            "INSERT INTO calls (rollout, call, attempts, attempts_sum, body, sum)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            rusqlite::params![
                call.id.rollout.as_str(),
                call.id.index,
                attempts,
                sum(
                    &format!("attempts of call {}", call.id),
                    attempts.as_bytes()
                ),
                body,
                sum(&format!("call {}", call.id), &body),
            ],
        )
        .unwrap();
    }
}

#[tokio::test]
async fn format_1_becomes_format_2_and_shrinks() {
    let calls = support::growing(9, "r", 12);
    let odd: Vec<Call> = (0..20)
        .map(|at| support::call(u64::from(at), "s", at))
        .collect();
    for open in [Ledger::open, Ledger::open_read_only] {
        let dir = tempfile::tempdir().unwrap();
        write_format_1(dir.path(), &[&calls[..], &odd].concat());
        let ledger = open(dir.path()).unwrap();
        let of = |name: &str| ledger.calls(&RolloutId::new(name).unwrap()).unwrap();
        assert_eq!(of("r"), calls);
        assert_eq!(of("s"), odd);
        assert_eq!(ledger.note("k").unwrap(), Some(7.into()));
        assert_eq!(ledger.verify().unwrap().len(), 0);
        let raw = rusqlite::Connection::open(dir.path().join(FILE_NAME)).unwrap();
        let (bytes, whole): (i64, i64) = raw
            .query_row(
                "SELECT sum(length(body)), sum(parent IS NULL) FROM bodies WHERE rollout = 'r'",
                [],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )
            .unwrap();
        let before: usize = calls.iter().map(|call| body(call).len()).sum();
        assert_eq!(whole, 1);
        assert!(bytes as usize * 6 < before, "{bytes} of {before}");
    }
}

#[tokio::test]
async fn what_was_damaged_is_named_after_the_migration_too() {
    let dir = tempfile::tempdir().unwrap();
    let calls: Vec<Call> = (0..3)
        .map(|at| support::call(u64::from(at), "s", at))
        .collect();
    write_format_1(dir.path(), &calls);
    let raw = rusqlite::Connection::open(dir.path().join(FILE_NAME)).unwrap();
    raw.execute("UPDATE calls SET sum = x'00' WHERE call = 1", [])
        .unwrap();
    drop(raw);
    let ledger = Ledger::open(dir.path()).unwrap();
    let (intact, damaged) = ledger.calls_intact(&RolloutId::new("s").unwrap()).unwrap();
    assert_eq!(intact, [calls[0].clone(), calls[2].clone()]);
    assert!(matches!(&damaged[..], [LedgerError::Damaged { record, .. }] if record == "call s#1"));
}

#[tokio::test]
async fn a_reader_beside_a_writer_of_format_1_is_told() {
    let dir = tempfile::tempdir().unwrap();
    write_format_1(dir.path(), &[]);
    // Another process has the run open.
    let held = std::fs::File::create(dir.path().join("ledger.lock")).unwrap();
    held.lock().unwrap();
    let error = Ledger::open_read_only(dir.path()).unwrap_err();
    assert!(
        matches!(error, LedgerError::Version { found: 1, .. }),
        "{error}"
    );
    assert!(
        error.to_string().contains("nobody else has it open"),
        "{error}"
    );
}
