//! Second writers, full disks, damaged records, wrong files, closed ledgers.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

mod support;

use std::sync::Arc;

use ledger::{FILE_NAME, Ledger, LedgerError, Options};
use record::{CallId, RolloutId};
use serde_json::json;

fn id(name: &str) -> RolloutId {
    RolloutId::new(name).unwrap()
}

#[tokio::test]
async fn a_second_writer_is_told_who_holds_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let first = Ledger::create(dir.path()).unwrap();
    let error = Ledger::open(dir.path()).unwrap_err();
    let LedgerError::Locked { holder, .. } = &error else {
        panic!("{error}");
    };
    assert!(
        holder.contains(&format!("process {} ", std::process::id())),
        "{holder}"
    );
    assert!(matches!(
        Ledger::create(dir.path()),
        Err(LedgerError::Exists { .. })
    ));

    first.put_call(support::call(1, "r", 0)).await.unwrap();
    let reader = Ledger::open_read_only(dir.path()).unwrap();
    assert_eq!(reader.calls(&id("r")).unwrap().len(), 1);
    assert!(matches!(
        reader.put_call(support::call(1, "r", 1)).await,
        Err(LedgerError::ReadOnly { .. })
    ));

    let clone = first.clone();
    first.close().await.unwrap();
    assert!(matches!(
        clone.put_note("k", json!(1)).await,
        Err(LedgerError::Closed { .. })
    ));
    assert_eq!(clone.calls(&id("r")).unwrap().len(), 1);
    Ledger::open(dir.path()).unwrap();
}

#[tokio::test]
async fn what_is_not_a_ledger_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for open in [Ledger::open, Ledger::open_read_only] {
        assert!(matches!(open(dir.path()), Err(LedgerError::Missing { .. })));
    }
    std::fs::write(dir.path().join(FILE_NAME), "x".repeat(10_000)).unwrap();
    for open in [Ledger::open, Ledger::open_read_only] {
        let error = open(dir.path()).unwrap_err();
        assert!(matches!(error, LedgerError::Damaged { .. }), "{error}");
    }

    std::fs::remove_file(dir.path().join(FILE_NAME)).unwrap();
    let other = rusqlite::Connection::open(dir.path().join(FILE_NAME)).unwrap();
    other.execute_batch("CREATE TABLE t (x)").unwrap();
    let error = Ledger::open(dir.path()).unwrap_err();
    assert!(
        matches!(error, LedgerError::Version { found: -1, .. }),
        "{error}"
    );

    let newer = tempfile::tempdir().unwrap();
    drop(Ledger::create(newer.path()).unwrap());
    rusqlite::Connection::open(newer.path().join(FILE_NAME))
        .unwrap()
        .execute_batch("PRAGMA user_version = 99")
        .unwrap();
    let error = Ledger::open(newer.path()).unwrap_err();
    assert!(
        matches!(error, LedgerError::Version { found: 99, .. }),
        "{error}"
    );
}

#[tokio::test]
async fn a_full_disk_loses_nothing_that_was_saved_and_ends_when_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        file_bytes_max: Some(256 << 10),
        ..Options::default()
    };
    let ledger = Ledger::create_with(dir.path(), options).unwrap();
    let mut saved = Vec::new();
    let full = loop {
        let index = u32::try_from(saved.len()).unwrap();
        assert!(index < 10_000, "the limit does not bite");
        let call = support::call(u64::from(index), "r", index);
        match ledger.put_call(call.clone()).await {
            Ok(()) => saved.push(call),
            Err(error) => break error,
        }
    };
    assert!(matches!(full, LedgerError::DiskFull { .. }), "{full}");
    assert!(ledger.is_full());
    assert!(saved.len() > 20, "{}", saved.len());
    assert_eq!(ledger.calls(&id("r")).unwrap(), saved);

    // Together: a record that does not fit whatever the other one frees, and one that shrinks an
    // old record.
    let mut large = support::growing(1, "r", 1).remove(0);
    large.id.index = u32::try_from(saved.len()).unwrap();
    let (large, small) = tokio::join!(
        ledger.put_call(large),
        ledger.put_attempts(&saved[0].id, &[]),
    );
    assert!(
        matches!(large, Err(LedgerError::DiskFull { .. })),
        "{large:?}"
    );
    small.unwrap();

    ledger.forget(&id("r")).await.unwrap();
    assert!(!ledger.is_full());
    ledger.put_call(saved[0].clone()).await.unwrap();
    ledger.close().await.unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    assert_eq!(ledger.calls(&id("r")).unwrap(), &saved[..1]);
}

#[tokio::test]
async fn damage_is_named_and_stays_local() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(dir.path()).unwrap();
    for rollout in ["r1", "r2"] {
        for index in 0..4 {
            ledger
                .put_call(support::call(u64::from(index), rollout, index))
                .await
                .unwrap();
        }
        ledger
            .put_rollout(support::rollout(7, rollout))
            .await
            .unwrap();
    }
    ledger.put_note("k", json!(1)).await.unwrap();
    ledger.close().await.unwrap();

    let raw = rusqlite::Connection::open(dir.path().join(FILE_NAME)).unwrap();
    let changes = [
        // one bit of a body; the attempts; a body that belongs to another call
        "UPDATE bodies SET body = CAST(substr(body, 1, 40) || x'00' || substr(body, 42) AS BLOB) WHERE number = (SELECT body FROM calls WHERE rollout = 'r1' AND call = 1)",
        "UPDATE calls SET attempts = '[]' WHERE rollout = 'r1' AND call = 2",
        "UPDATE calls SET body = (SELECT body FROM calls WHERE rollout = 'r1' AND call = 0) WHERE rollout = 'r1' AND call = 3",
        "UPDATE rollouts SET body = CAST(replace(CAST(body AS TEXT), 'task-1', 'task-2') AS BLOB) WHERE id = 'r1'",
        "UPDATE notes SET body = CAST('2' AS BLOB)",
    ];
    for change in changes {
        assert_eq!(raw.execute(change, []).unwrap(), 1, "{change}");
    }
    drop(raw);

    let ledger = Ledger::open(dir.path()).unwrap();
    let call = |index| {
        ledger.call(&CallId {
            rollout: id("r1"),
            index,
        })
    };
    assert_eq!(call(0).unwrap(), Some(support::call(0, "r1", 0)));
    for (index, name) in [
        (1, "call r1#1"),
        (2, "attempts of call r1#2"),
        (3, "call r1#3"),
    ] {
        let error = call(index).unwrap_err();
        let LedgerError::Damaged { record, path, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(record, name);
        assert_eq!(path, &dir.path().join(FILE_NAME));
        assert!(error.to_string().contains("run its rollout again"));
    }
    assert!(ledger.calls(&id("r1")).is_err());
    assert!(ledger.rollout(&id("r1")).is_err());
    assert!(ledger.note("k").is_err());
    assert_eq!(ledger.calls(&id("r2")).unwrap().len(), 4);
    assert!(ledger.rollout(&id("r2")).unwrap().is_some());

    // Saving the record anew repairs it.
    ledger.put_call(support::call(1, "r1", 1)).await.unwrap();
    assert_eq!(call(1).unwrap(), Some(support::call(1, "r1", 1)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_puts_than_the_queue_holds_all_arrive() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Arc::new(Ledger::create(dir.path()).unwrap());
    let count = u32::try_from(ledger::QUEUE_RECORDS_MAX * 2).unwrap();
    let mut puts = tokio::task::JoinSet::new();
    for index in 0..count {
        let ledger = Arc::clone(&ledger);
        puts.spawn(async move { ledger.put_note(&format!("k{index}"), json!(index)).await });
    }
    while let Some(put) = puts.join_next().await {
        put.unwrap().unwrap();
    }
    assert_eq!(ledger.counts().unwrap().notes, u64::from(count));
}

#[tokio::test]
async fn a_closed_ledger_is_readable_in_a_directory_that_nobody_may_write() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a run? 100%");
    let ledger = Ledger::create(&run).unwrap();
    ledger.put_call(support::call(5, "r", 0)).await.unwrap();
    ledger.close().await.unwrap();
    std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o555)).unwrap();
    // Root may write anyway; then this is the ordinary path, and must work just the same.
    let reader = Ledger::open_read_only(&run).unwrap();
    assert_eq!(reader.calls(&id("r")).unwrap(), [support::call(5, "r", 0)]);
    std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o755)).unwrap();
}
