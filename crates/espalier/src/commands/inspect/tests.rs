//! A small ledger made by hand: a solved rollout with a tool call, one whose client retried, one
//! that was lost, one that still runs.

use std::collections::BTreeMap;

use record::{
    Attempt, AttemptOutcome, Call, CallId, Continuation, Conversation, Dialect, Disposition, Fault,
    FinishReason, Generation, GroupId, Lineage, Message, PolicySpan, Role, Rollout, RolloutId,
    RolloutSpec, Sampling, StageSeconds, TaskId, ToolCall, ToolSpec, Verdict,
};
use serde_json::{Value, json};
use tree::Selection;

use super::*;

fn rollout(
    id: &str,
    sample: u64,
    reward: Option<f64>,
    disposition: Option<Disposition>,
) -> Rollout {
    let labels = [
        ("step", "1"),
        ("split", "train"),
        ("sample", &sample.to_string()),
    ];
    Rollout {
        spec: RolloutSpec {
            id: RolloutId::new(id).unwrap(),
            task: TaskId::new("chores-move").unwrap(),
            group: GroupId::new("s0001-chores-move-react").unwrap(),
            harness: "react".into(),
            labels: labels
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
            seed: sample,
        },
        lineage: Lineage {
            harness_version: "react 1 (0123456789ab)".into(),
            policy: 1,
            ..Lineage::default()
        },
        started_ms: 1000 + sample,
        finished_ms: disposition.as_ref().map(|_| 9000),
        harness_exit: reward.map(|_| 0),
        harness_tail: String::new(),
        calls: 2,
        seconds: StageSeconds {
            queue: 0.0,
            create: 0.01,
            harness: 1.5,
            settle: 0.2,
            verify: 0.03,
            destroy: 0.01,
        },
        verdict: reward.map(|reward| Verdict {
            reward,
            scores: BTreeMap::from([("moved".to_owned(), reward)]),
            evidence: "b.txt is there\n1\n".into(),
            seconds: 0.03,
        }),
        disposition,
    }
}

fn said(text: &str) -> Message {
    Message::text(Role::Assistant, text)
}

fn calls_bash(command: &str) -> Message {
    let arguments = json!({"command": command});
    let call = ToolCall {
        id: "call_1".into(),
        name: "bash".into(),
        arguments,
    };
    Message {
        tool_calls: vec![call],
        ..said("")
    }
}

/// A call whose prompt and reply are the given ids. `messages` is its history.
fn call(
    rollout: &str,
    index: u32,
    messages: Vec<Message>,
    reply: Message,
    (prompt_ids, token_ids): (Vec<u32>, Vec<u32>),
    outcome: AttemptOutcome,
) -> Call {
    let logprobs = vec![-0.5; token_ids.len()];
    let tool = ToolSpec {
        name: "bash".into(),
        description: String::new(),
        parameters: Value::Null,
    };
    let attempt = Attempt {
        started_ms: 1000,
        finished_ms: 1100,
        outcome,
        stream: false,
    };
    Call {
        id: CallId {
            rollout: RolloutId::new(rollout).unwrap(),
            index,
        },
        dialect: Dialect::Chat,
        request: Value::Null,
        headers: Vec::new(),
        digest: format!("digest-{}", prompt_ids.len()),
        conversation: Conversation {
            messages,
            tools: vec![tool],
        },
        prompt_ids,
        continuation: Continuation {
            exact: if index == 0 { 0 } else { 10 },
            ..Continuation::default()
        },
        sampling: Sampling::default(),
        generation: Some(Generation {
            token_ids,
            logprobs_model: logprobs.clone(),
            logprobs_sampled: logprobs,
            policy: vec![PolicySpan {
                start: 0,
                version: 1,
            }],
            finish: FinishReason::Stop,
            cached_tokens: 0,
        }),
        raw_text: String::new(),
        reply: Some(reply),
        parse_failed: false,
        attempts: vec![attempt],
    }
}

fn history() -> Vec<Message> {
    vec![
        Message::text(Role::System, "You work in a folder."),
        Message::text(
            Role::User,
            "Move a.txt\nto b.txt, please, and say when you are done.",
        ),
    ]
}

/// Two calls; the second carries on the first.
fn straight(id: &str) -> Vec<Call> {
    let mut second = history();
    second.push(calls_bash("mv a.txt b.txt"));
    second.push(Message::text(Role::Tool, "ok"));
    let delivered = AttemptOutcome::Delivered;
    vec![
        call(
            id,
            0,
            history(),
            calls_bash("mv a.txt b.txt"),
            ((1..8).collect(), vec![20, 21, 22]),
            delivered.clone(),
        ),
        call(
            id,
            1,
            second,
            said("Done."),
            ([1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 8, 9].into(), vec![23, 24]),
            delivered,
        ),
    ]
}

/// The first reply never reached the client, which asked again and went on from the other reply.
fn retried(id: &str) -> Vec<Call> {
    let mut second = history();
    second.push(calls_bash("mv a.txt b.txt"));
    second.push(Message::text(Role::Tool, "ok"));
    let prompt: Vec<u32> = (1..8).collect();
    vec![
        call(
            id,
            0,
            history(),
            calls_bash("ls"),
            (prompt.clone(), vec![30, 31]),
            AttemptOutcome::ClientGone,
        ),
        call(
            id,
            1,
            history(),
            calls_bash("mv a.txt b.txt"),
            (prompt, vec![20, 21, 22]),
            AttemptOutcome::Delivered,
        ),
        call(
            id,
            2,
            second,
            said("\u{1b}[31mDone."),
            ([1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 8, 9].into(), vec![23]),
            AttemptOutcome::Delivered,
        ),
    ]
}

fn lost() -> Disposition {
    Disposition::Discard {
        fault: Fault::SandboxLost,
        reason: "sandbox s is gone: it ran out of memory".into(),
    }
}

/// Writes the ledger and returns its folder.
async fn run_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(folder.path()).unwrap();
    let solved = "s0001-chores-move-react-k00";
    let again = "s0001-chores-move-react-k01";
    for (id, sample, reward, disposition, calls) in [
        (
            solved,
            0,
            Some(1.0),
            Some(Disposition::Train),
            straight(solved),
        ),
        (
            again,
            1,
            Some(0.0),
            Some(Disposition::Train),
            retried(again),
        ),
        (
            "s0001-chores-move-react-k02",
            2,
            None,
            Some(lost()),
            Vec::new(),
        ),
        ("s0001-chores-move-react-k03", 3, None, None, Vec::new()),
    ] {
        ledger
            .put_rollout(rollout(id, sample, reward, disposition))
            .await
            .unwrap();
        for call in calls {
            ledger.put_call(call).await.unwrap();
        }
    }
    ledger.close().await.unwrap();
    folder
}

#[tokio::test]
async fn a_run_in_short() {
    let folder = run_folder().await;
    let ledger = Ledger::open_read_only(folder.path()).unwrap();
    let rollouts = ledger.rollouts(&[]).unwrap();
    let mut overview = overview::Overview::new(&rollouts);
    for rollout in &rollouts {
        let calls = ledger.calls(&rollout.spec.id).unwrap();
        overview.add(rollout, &calls, &Selection::default());
    }
    insta::assert_snapshot!(overview.text(Path::new("runs/small")), @"
    runs/small: 4 rollouts (1 running), 5 calls

    disposition  rollouts
    discard             1
    train               2

    fault         rollouts
    sandbox_lost         1

    split  step  harness  rollouts  no vote    pass  reward  calls each
    train     1  react           4        2  50.0 %   0.500         1.2

    tokens
    captured                   56
    unique                     29
    generated                  11
    trained                     9
    without log-probabilities   0

    fork cause  forks  tokens again  dearest
    retry           1             0  s0001-chores-move-react-k01#1: same request as call 0

    not trained because  tokens
    dead leaf                 2

    worth a look                 why
    s0001-chores-move-react-k02  sandbox_lost: sandbox s is gone: it ran out of memory

    one rollout: espalier inspect runs/small ROLLOUT
    ");
    let json = serde_json::to_value(&overview).unwrap();
    assert_eq!(json["tokens"]["trained"], 9);
    assert_eq!(json["results"][0]["counts"]["passed"], 1);
}

#[tokio::test]
async fn a_rollout_with_a_retry() {
    let folder = run_folder().await;
    let ledger = Ledger::open_read_only(folder.path()).unwrap();
    let rollouts = ledger.rollouts(&[]).unwrap();
    let found = find(&rollouts, "k01").unwrap();
    let calls = ledger.calls(&found.spec.id).unwrap();
    let view = rollout::View::new(found, &calls, &Selection::default()).unwrap();
    insta::assert_snapshot!(view.text(), @r#"
    rollout      s0001-chores-move-react-k01
    task         chores-move
    group        s0001-chores-move-react
    harness      react 1 (0123456789ab) (exit code 0)
    policy       version 1
    labels       sample=1 split=train step=1
    disposition  train
    seconds      queue 0.0  create 0.01  harness 1.5  settle 0.20  verify 0.03  destroy 0.01

    call  class  segment  carries on  prompt  exact  reply  attempts  policy  end                class because
       0  main         0           -       7      0      2         1       1  stop, client gone
       1  main         0           -       7     10      3         1       1  stop
       2  main         0           1      12     10      1         1       1  stop

    tree: 5 nodes, 2 leaves; tokens: 32 captured, 15 unique, 6 generated, 4 trainable on kept branches
    ● 7 context, prompt of calls 0, 1
    ├─ ● 2 generated by call 0 · dropped: dead leaf, 2 trainable tokens lost
    └─ ● 3 generated by call 1 · trained
         fork of call 1 from call 0: retry, 0 tokens again: same request as call 0
       ● 2 context, prompt of call 2
       ● 1 generated by call 2 · trained

    system     You work in a folder.
    user       Move a.txt⏎to b.txt, please, and say when you are done.
    assistant  → bash {"command":"mv a.txt b.txt"}
    tool       ok
    assistant  \u{1b}[31mDone.

    reward 0 in 0.03 s
      moved: 0
      | b.txt is there
      | 1
    "#);
    let json = serde_json::to_value(&view).unwrap();
    assert_eq!(json["forks"][0]["cause"], "retry");
    assert_eq!(json["kept"]["tokens_trained"], 4);
}

#[tokio::test]
async fn a_lost_rollout_without_calls() {
    let folder = run_folder().await;
    let ledger = Ledger::open_read_only(folder.path()).unwrap();
    let rollouts = ledger.rollouts(&[]).unwrap();
    let found = find(&rollouts, "s0001-chores-move-react-k02").unwrap();
    let view = rollout::View::new(found, &[], &Selection::default()).unwrap();
    insta::assert_snapshot!(view.text(), @"
    rollout      s0001-chores-move-react-k02
    task         chores-move
    group        s0001-chores-move-react
    harness      react 1 (0123456789ab) (exit code none)
    policy       version 1
    labels       sample=2 split=train step=1
    disposition  discard: sandbox_lost: sandbox s is gone: it ran out of memory
    seconds      queue 0.0  create 0.01  harness 1.5  settle 0.20  verify 0.03  destroy 0.01

    no calls were captured

    no verdict
    ");
}

#[tokio::test]
async fn names_are_found_by_any_part_that_is_unique() {
    let folder = run_folder().await;
    let ledger = Ledger::open_read_only(folder.path()).unwrap();
    let rollouts = ledger.rollouts(&[]).unwrap();
    assert_eq!(find(&rollouts, "k03").unwrap().spec.seed, 3);
    let error = find(&rollouts, "chores").unwrap_err();
    assert_eq!(error.to_string(), "\"chores\" names 4 rollouts of the run");
    let error = find(&rollouts, "nothing").unwrap_err();
    assert_eq!(error.to_string(), "\"nothing\" names no rollout of the run");
}
