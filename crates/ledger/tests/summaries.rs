//! Summaries: there as long as the calls are what they were made of, and only then.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::collections::HashMap;

use ledger::{FILE_NAME, Keep, Ledger, LedgerError};
use record::RolloutId;
use serde_json::{Value, json};

fn id(name: &str) -> RolloutId {
    RolloutId::new(name).unwrap()
}

fn all(ledger: &Ledger) -> HashMap<String, Value> {
    ledger.summaries().unwrap()
}

#[tokio::test]
async fn a_summary_goes_when_a_call_changes() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(dir.path()).unwrap();
    let call = support::call(1, "r", 0);
    let summary = json!({"calls": 1});
    type Step = fn(&Ledger, record::Call) -> futures::future::BoxFuture<'_, ()>;
    let changes: [Step; 4] = [
        |ledger, call| Box::pin(async move { ledger.put_call(call).await.unwrap() }),
        |ledger, call| Box::pin(async move { ledger.put_attempts(&call.id, &[]).await.unwrap() }),
        |ledger, call| {
            Box::pin(async move { ledger.forget_calls(&call.id.rollout).await.unwrap() })
        },
        |ledger, call| Box::pin(async move { ledger.forget(&call.id.rollout).await.unwrap() }),
    ];
    for change in changes {
        ledger.put_call(call.clone()).await.unwrap();
        for name in ["r", "other"] {
            ledger.put_summary(&id(name), &summary).await.unwrap();
        }
        assert_eq!(all(&ledger)["r"], summary);
        change(&ledger, call.clone()).await;
        assert_eq!(
            all(&ledger),
            HashMap::from([("other".to_owned(), summary.clone())])
        );
    }
    // The record of the rollout itself is none of its calls; nor is a rollout made thin another.
    ledger.put_call(call).await.unwrap();
    ledger.put_summary(&id("r"), &summary).await.unwrap();
    let mut rollout = support::rollout(1, "r");
    rollout.finished_ms = Some(1);
    ledger.put_rollout(rollout).await.unwrap();
    assert_eq!(ledger.retain(2, Keep::Tokens).await.unwrap(), 1);
    assert_eq!(all(&ledger).len(), 2);
}

#[tokio::test]
async fn damaged_summaries_and_those_of_another_shape_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(dir.path()).unwrap();
    for (name, summary) in [("a", json!(1)), ("b", json!("one")), ("c", json!(3))] {
        ledger.put_summary(&id(name), &summary).await.unwrap();
    }
    ledger.close().await.unwrap();
    let raw = rusqlite::Connection::open(dir.path().join(FILE_NAME)).unwrap();
    raw.execute(
        "UPDATE summaries SET body = CAST('4' AS BLOB) WHERE rollout = 'c'",
        [],
    )
    .unwrap();
    drop(raw);
    let ledger = Ledger::open(dir.path()).unwrap();
    let numbers: HashMap<String, u64> = ledger.summaries().unwrap();
    assert_eq!(numbers, HashMap::from([("a".to_owned(), 1)]));
    assert_eq!(ledger.verify().unwrap().len(), 0, "nothing is lost with it");
}

#[tokio::test]
async fn format_2_is_read_as_it_is_and_brought_up_to_date_by_a_writer() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(dir.path()).unwrap();
    let calls = support::growing(3, "r", 4);
    for call in &calls {
        ledger.put_call(call.clone()).await.unwrap();
    }
    ledger.close().await.unwrap();
    let raw = rusqlite::Connection::open(dir.path().join(FILE_NAME)).unwrap();
    raw.execute_batch("DROP TABLE summaries; PRAGMA user_version = 2")
        .unwrap();
    drop(raw);

    // Somebody of format 2 may be writing it.
    let reader = Ledger::open_read_only(dir.path()).unwrap();
    assert_eq!(reader.calls(&id("r")).unwrap(), calls);
    assert!(all(&reader).is_empty());
    drop(reader);
    let ledger = Ledger::open(dir.path()).unwrap();
    ledger.put_summary(&id("r"), &json!(1)).await.unwrap();
    assert_eq!(all(&ledger).len(), 1);
    assert_eq!(ledger.calls(&id("r")).unwrap(), calls);
    ledger.close().await.unwrap();

    let raw = rusqlite::Connection::open(dir.path().join(FILE_NAME)).unwrap();
    raw.execute_batch("PRAGMA user_version = 4").unwrap();
    drop(raw);
    let error = Ledger::open_read_only(dir.path()).unwrap_err();
    assert!(
        matches!(error, LedgerError::Version { found: 4, .. }),
        "{error}"
    );
}
