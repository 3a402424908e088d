//! What must not be kept: redaction at capture, retention afterwards.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::path::Path;

use ledger::{FILE_NAME, Keep, Ledger, LedgerError, Options, REDACTED, Redaction};
use record::{Call, Message, Role, RolloutId};
use serde_json::json;

const SECRET: &str = "sk-0123456789abcdef";

fn id(name: &str) -> RolloutId {
    RolloutId::new(name).unwrap()
}

/// Everything that the run directory holds, bodies decompressed as well.
fn on_disk(dir: &Path) -> Vec<u8> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        all.extend(std::fs::read(entry.unwrap().path()).unwrap());
    }
    let raw = rusqlite::Connection::open(dir.join(FILE_NAME)).unwrap();
    let mut read = raw.prepare("SELECT body FROM bodies").unwrap();
    let bodies = read.query_map([], |row| row.get::<_, Vec<u8>>(0)).unwrap();
    for body in bodies.map(Result::unwrap) {
        // One byte and five numbers, then the frame.
        all.extend(zstd::bulk::decompress(&body[21..], 1 << 24).unwrap());
    }
    all
}

fn holds(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window == text)
}

/// A call that says the secret wherever a call can say something.
fn telling(index: u32) -> Call {
    let mut call = support::growing(5, "r", 1).remove(0);
    call.id.index = index;
    call.request = json!({"messages": [{"content": [{"text": format!("use {SECRET} now")}]}], "user": "ann@example.org"});
    let said = Message::text(Role::User, format!("use {SECRET} now"));
    call.conversation.messages.push(said.clone());
    call.conversation.tools[0].parameters = json!({"default": SECRET});
    call.headers = vec![("x-note".to_owned(), SECRET.to_owned())];
    call.raw_text = format!("<tool>{SECRET}</tool>");
    call.reply = Some(Message {
        reasoning: Some(SECRET.to_owned()),
        tool_calls: vec![record::ToolCall {
            id: "c".to_owned(),
            name: "bash".to_owned(),
            arguments: json!({"command": format!("login {SECRET}")}),
        }],
        ..said
    });
    // The tokens say it, too.
    call.prompt_ids = SECRET.bytes().map(u32::from).collect();
    call
}

#[tokio::test]
async fn redacted_text_never_reaches_the_disk() {
    let token_bytes: Vec<u8> = SECRET
        .bytes()
        .flat_map(|byte| u32::from(byte).to_le_bytes())
        .collect();
    for redacts in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let redaction =
            Redaction::new(&["sk-[0-9a-f]{16}"], &["/user", "/metadata/*/id"], false).unwrap();
        let options = Options {
            redaction: redacts.then_some(redaction),
            ..Options::default()
        };
        let ledger = Ledger::create_with(dir.path(), options).unwrap();
        for index in 0..3 {
            ledger.put_call(telling(index)).await.unwrap();
        }
        let mut rollout = support::rollout(1, "r");
        rollout.harness_tail = format!("last words: {SECRET}");
        rollout.verdict.as_mut().unwrap().evidence = SECRET.to_owned();
        ledger.put_rollout(rollout).await.unwrap();
        // While the log is there, and after it was folded in.
        let open = on_disk(dir.path());
        let calls = ledger.calls(&id("r")).unwrap();
        ledger.close().await.unwrap();
        for bytes in [open, on_disk(dir.path())] {
            assert_eq!(holds(&bytes, SECRET.as_bytes()), !redacts);
            assert_eq!(holds(&bytes, b"ann@example.org"), !redacts);
            assert_eq!(holds(&bytes, &token_bytes), !redacts);
        }
        if redacts {
            assert_eq!(calls[0].request["user"], REDACTED);
            assert_eq!(
                calls[0].request["messages"][0]["content"][0]["text"],
                format!("use {REDACTED} now")
            );
            assert!(calls[0].generation.is_none());
        }
    }
}

#[test]
fn rules_that_are_none_are_named() {
    for (patterns, pointers) in [(&["("][..], &[][..]), (&[], &["user"])] {
        let error = Redaction::new(patterns, pointers, false).unwrap_err();
        assert!(matches!(error, LedgerError::Redaction { .. }), "{error}");
    }
}

#[tokio::test]
async fn old_rollouts_lose_their_texts_and_keep_their_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(dir.path()).unwrap();
    for (name, ended) in [("old", Some(10)), ("new", Some(20)), ("running", None)] {
        for call in support::growing(6, name, 70) {
            ledger.put_call(call).await.unwrap();
        }
        let mut rollout = support::rollout(1, name);
        rollout.finished_ms = ended;
        ledger.put_rollout(rollout).await.unwrap();
    }
    assert_eq!(ledger.retain(15, Keep::Conversation).await.unwrap(), 1);
    assert_eq!(ledger.retain(15, Keep::Conversation).await.unwrap(), 0);
    let before = support::growing(6, "old", 70);
    let calls = ledger.calls(&id("old")).unwrap();
    assert!(
        calls.iter().zip(&before).all(
            |(call, before)| call.request.is_null() && call.conversation == before.conversation
        )
    );
    assert_eq!(ledger.retain(15, Keep::Tokens).await.unwrap(), 1);
    assert_eq!(ledger.retain(15, Keep::Conversation).await.unwrap(), 0);
    let calls = ledger.calls(&id("old")).unwrap();
    for (call, before) in calls.iter().zip(&before) {
        assert_eq!(call.prompt_ids, before.prompt_ids);
        assert_eq!(call.generation, before.generation);
        assert_eq!(call.attempts, before.attempts);
        assert!(call.conversation.messages.is_empty() && call.raw_text.is_empty());
    }
    for name in ["new", "running"] {
        assert_eq!(
            ledger.calls(&id(name)).unwrap(),
            support::growing(6, name, 70)
        );
    }
    assert_eq!(ledger.verify().unwrap().len(), 0);
}
