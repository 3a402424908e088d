//! Behaviour from captured calls: every rule on a small rollout written out here.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests are not in a test function"
)]

use bench::{Behaviour, before_after, is_error};
use record::{
    Attempt, AttemptOutcome, Call, CallId, Continuation, Conversation, Dialect, Message, Role,
    RolloutId, Sampling, ToolCall,
};
use serde_json::{Value, json};

/// A rollout: each turn is the tool calls of a reply, and what they returned.
fn rollout(turns: &[&[(&str, Value, &str)]]) -> Vec<Call> {
    let mut history = vec![Message::text(Role::User, "do it")];
    let mut calls = Vec::new();
    for (index, turn) in turns.iter().enumerate() {
        let mut reply = Message::text(Role::Assistant, "");
        for (at, (name, arguments, _)) in turn.iter().enumerate() {
            reply.tool_calls.push(ToolCall {
                id: format!("c{index}-{at}"),
                name: (*name).to_owned(),
                arguments: arguments.clone(),
            });
        }
        calls.push(Call {
            id: CallId {
                rollout: RolloutId::new("r").unwrap(),
                index: index as u32,
            },
            dialect: Dialect::Chat,
            request: Value::Null,
            headers: Vec::new(),
            digest: String::new(),
            conversation: Conversation {
                messages: history.clone(),
                tools: Vec::new(),
            },
            prompt_ids: Vec::new(),
            continuation: Continuation::default(),
            sampling: Sampling::default(),
            generation: None,
            raw_text: String::new(),
            reply: Some(reply.clone()),
            parse_failed: false,
            attempts: vec![Attempt {
                started_ms: 0,
                finished_ms: 1,
                outcome: AttemptOutcome::Delivered,
                stream: false,
            }],
        });
        history.push(reply);
        for (at, (_, _, result)) in turn.iter().enumerate() {
            let mut message = Message::text(Role::Tool, *result);
            message.tool_call_id = Some(format!("c{index}-{at}"));
            history.push(message);
        }
    }
    calls
}

#[test]
fn each_rule_counts_what_it_says() {
    let calls = rollout(&[
        &[(
            "bash",
            json!({"command": "cat missing"}),
            "cat: missing: No such file or directory",
        )],
        &[
            ("bash", json!({"command": "ls"}), "a.txt"),
            (
                "write",
                json!({"path": "/w/out.md", "content": "# T\nthe long line\n"}),
                "wrote the long line",
            ),
        ],
        &[("bash", json!({"command": "ls"}), "a.txt out.md")],
        &[("read", json!({"path": "/w/out.md"}), "# T\nthe long line\n")],
        &[],
    ]);
    let found = Behaviour::of(&calls);
    assert_eq!((found.calls, found.tool_calls()), (5, 5));
    assert_eq!((found.errors, found.recovered), (1, 1));
    assert_eq!((found.writes, found.verified, found.repeats), (1, 1, 1));
    let share = |name: &str| {
        found
            .shares()
            .iter()
            .find(|(one, _)| *one == name)
            .unwrap()
            .1
    };
    assert_eq!(share("shell_share"), Some(0.6));
    assert_eq!(share("format_ok"), Some(1.0));
    assert_eq!(found.coverage(&["bash", "mail"]), 0.5);
    let kinds: Vec<(&str, u32)> = found
        .evidence
        .iter()
        .map(|(kind, at)| (kind.as_str(), *at))
        .collect();
    assert_eq!(
        kinds,
        [
            ("error", 0),
            ("recovered", 1),
            ("verified", 3),
            ("repeat", 2)
        ]
    );
}

#[test]
fn a_read_that_shows_something_else_verifies_nothing() {
    let write = (
        "write",
        json!({"path": "out.md", "content": "the long line"}),
        "ok",
    );
    let read = |result: &'static str| ("read", json!({"path": "out.md"}), result);
    let verified = |result| {
        Behaviour::of(&rollout(&[
            std::slice::from_ref(&write),
            &[read(result)],
            &[],
        ]))
        .verified
    };
    assert_eq!(verified("the long line"), 1);
    assert_eq!(verified("another line"), 0);
    // Another file that happens to hold the same.
    let other = ("read", json!({"path": "b.md"}), "the long line");
    assert_eq!(
        Behaviour::of(&rollout(&[std::slice::from_ref(&write), &[other], &[]])).verified,
        0
    );
}

#[test]
fn errors_are_told_by_their_first_words() {
    for bad in [
        "Error: x",
        "Traceback (most recent call last):",
        "sh: x: command not found",
        "{\"error\": \"no\"}",
    ] {
        assert!(is_error(bad), "{bad}");
    }
    for good in ["fine", "no errors were found", ""] {
        assert!(!is_error(good), "{good}");
    }
}

#[test]
fn two_checkpoints_stand_side_by_side() {
    let mut before = Behaviour::of(&rollout(&[&[("bash", json!({}), "x")], &[]]));
    before.add(&before.clone());
    let after = Behaviour::of(&rollout(&[&[("read", json!({"path": "a"}), "x")], &[]]));
    assert_eq!(before.rollouts, 2);
    let table = before_after(&before, &after);
    assert!(
        table.contains("| shell_share | 1.000 | 0.000 | -1.000 |"),
        "{table}"
    );
    assert!(table.contains("| error_recovery | – | – | – |"), "{table}");
}
