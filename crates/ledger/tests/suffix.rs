//! Calls are stored as what is new in them: how much that saves, and what hangs on it.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

mod support;

use ledger::{FILE_NAME, Ledger, LedgerError};
use record::{CallId, RolloutId};

fn id(name: &str) -> RolloutId {
    RolloutId::new(name).unwrap()
}

fn file_bytes(dir: &std::path::Path) -> u64 {
    std::fs::metadata(dir.join(FILE_NAME)).unwrap().len()
}

#[tokio::test]
async fn fifty_turns_take_little_more_than_their_last_request() {
    let calls = support::growing(1, "r", 50);
    // Each call whole: its own rollout, so that nothing is shared.
    let (whole, shared) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let ledger = Ledger::create(whole.path()).unwrap();
    for (at, call) in calls.iter().enumerate() {
        let mut alone = call.clone();
        alone.id.rollout = id(&format!("r{at}"));
        ledger.put_call(alone).await.unwrap();
    }
    ledger.close().await.unwrap();
    let ledger = Ledger::create(shared.path()).unwrap();
    for call in &calls {
        ledger.put_call(call.clone()).await.unwrap();
    }
    ledger.close().await.unwrap();
    let ledger = Ledger::open(shared.path()).unwrap();
    assert_eq!(ledger.calls(&id("r")).unwrap(), calls);
    assert_eq!(
        ledger.call(&calls[49].id).unwrap().as_ref(),
        Some(&calls[49])
    );
    let (whole, shared) = (file_bytes(whole.path()), file_bytes(shared.path()));
    println!(
        "50 turns: whole {whole} bytes, as suffixes {shared} bytes, 1/{:.1}",
        whole as f64 / shared as f64
    );
    assert!(whole >= 15 * shared, "{whole} and {shared}");
}

#[tokio::test]
async fn chains_end_and_calls_far_down_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(dir.path()).unwrap();
    let calls = support::growing(2, "r", 150);
    for (at, call) in calls.iter().enumerate() {
        // In between everything is forgotten that the process remembers.
        ledger.put_call(call.clone()).await.unwrap();
        if at == 70 {
            ledger.put_rollout(support::rollout(1, "r")).await.unwrap();
        }
    }
    ledger.close().await.unwrap();
    let raw = rusqlite::Connection::open(dir.path().join(FILE_NAME)).unwrap();
    let whole: i64 = raw
        .query_row(
            "SELECT count(*) FROM bodies WHERE parent IS NULL",
            [],
            |row| row.get(0),
        )
        .unwrap();
    assert_eq!(whole, 3, "one in 65");
    let ledger = Ledger::open_read_only(dir.path()).unwrap();
    for at in [0, 1, 64, 65, 149] {
        assert_eq!(
            ledger.call(&calls[at].id).unwrap().as_ref(),
            Some(&calls[at]),
            "{at}"
        );
    }
    assert_eq!(ledger.calls(&id("r")).unwrap(), calls);
}

#[tokio::test]
async fn replaced_and_forgotten_calls_break_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(dir.path()).unwrap();
    let mut calls = support::growing(3, "r", 6);
    for call in &calls {
        ledger.put_call(call.clone()).await.unwrap();
    }
    // Others are stored against it.
    calls[2].raw_text = "changed".to_owned();
    calls[2].conversation.messages.truncate(1);
    ledger.put_call(calls[2].clone()).await.unwrap();
    assert_eq!(ledger.calls(&id("r")).unwrap(), calls);
    ledger.forget_calls(&id("r")).await.unwrap();
    assert_eq!(ledger.calls(&id("r")).unwrap(), []);
    // A put that overlaps with forgetting: its parent may be gone when it is written.
    ledger.put_call(calls[0].clone()).await.unwrap();
    let forgotten = id("r");
    for _ in 0..20 {
        let (put, forget) = tokio::join!(
            ledger.put_call(calls[1].clone()),
            ledger.forget_calls(&forgotten)
        );
        put.unwrap();
        forget.unwrap();
        ledger.put_call(calls[0].clone()).await.unwrap();
        ledger.calls(&forgotten).unwrap();
    }
    assert_eq!(ledger.verify().unwrap().len(), 0);
}

#[tokio::test]
async fn damage_takes_what_hangs_on_it_and_is_listed() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(dir.path()).unwrap();
    for rollout in ["r1", "r2"] {
        for call in support::growing(4, rollout, 5) {
            ledger.put_call(call).await.unwrap();
        }
    }
    ledger.close().await.unwrap();
    let raw = rusqlite::Connection::open(dir.path().join(FILE_NAME)).unwrap();
    let changed = raw
        .execute(
            "UPDATE bodies SET body = CAST(substr(body, 1, 40) || x'00' || substr(body, 42) AS BLOB)
             WHERE number = (SELECT body FROM calls WHERE rollout = 'r1' AND call = 3)",
            [],
        )
        .unwrap();
    assert_eq!(changed, 1);
    drop(raw);
    let ledger = Ledger::open(dir.path()).unwrap();
    let (intact, damaged) = ledger.calls_intact(&id("r1")).unwrap();
    assert_eq!(intact, &support::growing(4, "r1", 5)[..3]);
    assert_eq!(damaged.len(), 2);
    let listed = ledger.verify().unwrap();
    let names: Vec<String> = listed
        .iter()
        .map(|error| match error {
            LedgerError::Damaged { record, .. } => record.clone(),
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(names, ["call r1#3", "call r1#4"]);
    assert!(
        listed[1]
            .to_string()
            .contains("its checksum does not match"),
        "{}",
        listed[1]
    );
    let at = |index| CallId {
        rollout: id("r1"),
        index,
    };
    assert!(ledger.call(&at(2)).unwrap().is_some());
    assert!(ledger.call(&at(4)).is_err());
    assert_eq!(ledger.calls(&id("r2")).unwrap().len(), 5);
}
