//! What must not be kept: redaction at capture, retention afterwards.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::path::Path;

use ledger::{
    FILE_NAME, Keep, Ledger, LedgerError, Options, REDACTED, Redaction, RedactionSettings,
    TenantSettings,
};
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
        let redaction = Redaction::new(&RedactionSettings {
            patterns: vec!["sk-[0-9a-f]{16}".into()],
            pointers: vec!["/user".into(), "/metadata/*/id".into()],
            ..RedactionSettings::default()
        })
        .unwrap();
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
        let list = |rules: &[&str]| rules.iter().map(|&rule| rule.to_owned()).collect();
        let tenant = TenantSettings {
            patterns: list(patterns),
            pointers: list(pointers),
        };
        let common = RedactionSettings {
            patterns: tenant.patterns.clone(),
            pointers: tenant.pointers.clone(),
            ..RedactionSettings::default()
        };
        let of_tenant = RedactionSettings {
            tenants: [("acme".to_owned(), tenant)].into(),
            ..RedactionSettings::default()
        };
        for settings in [common, of_tenant] {
            let error = Redaction::new(&settings).unwrap_err();
            assert!(matches!(error, LedgerError::Redaction { .. }), "{error}");
        }
    }
}

fn of_tenant(name: &str, tenant: Option<&str>) -> record::Rollout {
    let mut rollout = support::rollout(1, name);
    rollout.disposition = None;
    rollout.verdict = None;
    rollout.harness_tail = String::new();
    let label = tenant.map(|tenant| ("tenant".to_owned(), tenant.to_owned()));
    rollout.spec.labels = label.into_iter().collect();
    rollout
}

#[tokio::test]
async fn tenants_have_rules_of_their_own_and_may_opt_out() {
    let settings = RedactionSettings {
        tenants: [(
            "acme".to_owned(),
            TenantSettings {
                patterns: vec![SECRET.to_owned()],
                pointers: Vec::new(),
            },
        )]
        .into(),
        opt_out: vec!["silent".to_owned()],
        ..RedactionSettings::default()
    };
    for reopened in [false, true] {
        for (tenant, tells) in [(None, true), (Some("acme"), false), (Some("silent"), false)] {
            let dir = tempfile::tempdir().unwrap();
            let options = || Options {
                redaction: Some(Redaction::new(&settings).unwrap()),
                ..Options::default()
            };
            let mut ledger = Ledger::create_with(dir.path(), options()).unwrap();
            ledger.put_rollout(of_tenant("r", tenant)).await.unwrap();
            if reopened {
                // Whose it is must be found in the file.
                ledger.close().await.unwrap();
                ledger = Ledger::open_with(dir.path(), options()).unwrap();
            }
            let mut call = telling(0);
            call.attempts = vec![record::Attempt {
                started_ms: 1,
                finished_ms: 2,
                outcome: record::AttemptOutcome::EngineFailed {
                    reason: format!("bad prompt: {SECRET}"),
                },
                stream: false,
            }];
            ledger.put_call(call.clone()).await.unwrap();
            ledger.put_attempts(&call.id, &call.attempts).await.unwrap();
            let mut ended = of_tenant("r", tenant);
            ended.harness_tail = SECRET.to_owned();
            ended.disposition = Some(record::Disposition::Discard {
                fault: record::Fault::NoCalls,
                reason: format!("it printed: {SECRET}"),
            });
            ledger.put_rollout(ended).await.unwrap();
            let open = on_disk(dir.path());
            let read = ledger.calls(&id("r")).unwrap();
            ledger.close().await.unwrap();
            for bytes in [open, on_disk(dir.path())] {
                assert_eq!(holds(&bytes, SECRET.as_bytes()), tells, "{tenant:?}");
            }
            let silent = tenant == Some("silent");
            assert_eq!(read[0].conversation.messages.is_empty(), silent);
            assert_eq!(read[0].prompt_ids.is_empty(), !tells);
            assert_eq!(read[0].attempts.len(), 1);
        }
    }
}

#[tokio::test]
async fn what_was_dropped_is_gone_from_the_disk_after_a_vacuum_and_readers_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(dir.path()).unwrap();
    let calls = support::growing(6, "r", 30);
    for call in &calls {
        ledger.put_call(call.clone()).await.unwrap();
    }
    let mut rollout = support::rollout(1, "r");
    rollout.finished_ms = Some(10);
    ledger.put_rollout(rollout).await.unwrap();
    let words = calls[29].raw_text.clone();
    ledger.close().await.unwrap();
    let bytes = std::fs::metadata(dir.path().join(FILE_NAME)).unwrap().len();

    let ledger = Ledger::open(dir.path()).unwrap();
    // Readers of this process and of another one, by their own handles, all the while.
    let other = Ledger::open_read_only(dir.path()).unwrap();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let reading = {
        let stop = std::sync::Arc::clone(&stop);
        let calls = calls.clone();
        std::thread::spawn(move || {
            let mut reads = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) || reads == 0 {
                let found = other.calls(&id("r")).unwrap();
                assert_eq!(found.len(), calls.len());
                assert!(
                    found
                        .iter()
                        .zip(&calls)
                        .all(|(a, b)| a.prompt_ids == b.prompt_ids)
                );
                reads += 1;
            }
        })
    };
    assert_eq!(ledger.retain(15, Keep::Tokens).await.unwrap(), 1);
    ledger.vacuum().await.unwrap();
    // The ledger goes on as before.
    ledger.put_call(support::call(3, "s", 0)).await.unwrap();
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    reading.join().unwrap();
    ledger.close().await.unwrap();

    assert!(!holds(&on_disk(dir.path()), words.as_bytes()));
    let smaller = std::fs::metadata(dir.path().join(FILE_NAME)).unwrap().len();
    assert!(smaller < bytes, "{smaller} of {bytes}");
    let ledger = Ledger::open_read_only(dir.path()).unwrap();
    assert_eq!(ledger.verify().unwrap().len(), 0);
    assert_eq!(ledger.calls(&id("s")).unwrap(), [support::call(3, "s", 0)]);
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
