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
            policy_end: Some(2),
            policies: vec![1],
            retries: 1,
            espalier: "0.1.0".into(),
            task_digest: "0123456789abcdef".into(),
            sampling: Some(Sampling::default()),
            reward_source: "code".into(),
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
            ready: 0.0,
            harness: 1.5,
            settle: 0.2,
            verify_wait: 0.0,
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

fn summed_up(calls: &[Call]) -> Summary {
    Summary::of(calls, &Selection::default())
}

#[tokio::test]
async fn a_run_in_short() {
    let folder = run_folder().await;
    let ledger = Ledger::open_read_only(folder.path()).unwrap();
    let rollouts = ledger.rollouts(&[]).unwrap();
    let run: Vec<(Rollout, Summary)> = rollouts
        .into_iter()
        .map(|rollout| {
            let calls = ledger.calls(&rollout.spec.id).unwrap();
            (rollout, summed_up(&calls))
        })
        .collect();
    let overview = overview::Overview::of(run.iter().map(|(rollout, summary)| (rollout, summary)));
    insta::assert_snapshot!(overview.text(Path::new("runs/small")));
    let json = serde_json::to_string_pretty(&overview).unwrap();
    insta::assert_snapshot!(json);
}

#[tokio::test]
async fn what_a_run_comes_to_is_written_down_when_nobody_else_has_it_open() {
    let folder = run_folder().await;
    let reader = Ledger::open_read_only(folder.path()).unwrap();
    let rollouts = reader.rollouts(&[]).unwrap();
    let (display, rule) = (Display::new(true), Selection::default());
    let kept = || reader.summaries::<Summary>().unwrap();
    let found = {
        // Somebody writes: nothing is kept, and nothing fails.
        let _writer = Ledger::open(folder.path()).unwrap();
        let found = summaries(&display, folder.path(), &reader, &rollouts, &rule).await;
        assert!(kept().is_empty());
        found.unwrap()
    };
    assert_eq!(found.len(), 4);
    let again = summaries(&display, folder.path(), &reader, &rollouts, &rule).await;
    assert_eq!(again.unwrap(), found);
    let mut names: Vec<String> = kept().into_keys().collect();
    names.sort();
    assert_eq!(
        names,
        ["k00", "k01", "k02"].map(|sample| format!("s0001-chores-move-react-{sample}")),
        "the one that still runs is not kept"
    );
    // Another rule makes others.
    let all = summaries(&display, folder.path(), &reader, &rollouts, &Selection::All).await;
    let retained = |of: &HashMap<String, Summary>| of[&names[1]].tokens.retained;
    assert_eq!((retained(&found), retained(&all.unwrap())), (4, 6));
    assert!(
        kept()
            .values()
            .all(|summary| summary.selection == Selection::All)
    );
}

/// A byte-level tokenizer's worth of text is not needed: the ids are made up.
fn speech() -> speech::Speech {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policy");
    speech::Speech::of(policy_codec(&folder))
}

fn policy_codec(folder: &Path) -> std::sync::Arc<codec::Codec> {
    crate::policy::load_codec(folder).unwrap()
}

#[tokio::test]
async fn two_branches_at_the_token_where_they_part() {
    let folder = run_folder().await;
    let ledger = Ledger::open_read_only(folder.path()).unwrap();
    let rollouts = ledger.rollouts(&[]).unwrap();
    let found = find(&rollouts, "k01").unwrap();
    let calls = ledger.calls(&found.spec.id).unwrap();
    let diff = |left, right| diff::Diff::between(found, &calls, (left, right), &speech());
    insta::assert_snapshot!(diff(0, 1).unwrap().text(), @r#"
    s0001-chores-move-react-k01: calls 0 and 1 share 7 tokens
    call 1 left call 0: retry, 0 tokens again: same request as call 0

    both        <|im_start|><|im_end|><tool_call></tool_call><tool_response></tool_response><think>
    call 0      (reply) \u{15}\u{16}
    call 1      (reply) 

    token  call 0                              call 1
        0  1 "<|im_start|>"          1 "<|im_start|>"
        1  2 "<|im_end|>"              2 "<|im_end|>"
        2  3 "<tool_call>"            3 "<tool_call>"
        3  4 "</tool_call>"          4 "</tool_call>"
        4  5 "<tool_response>"    5 "<tool_response>"
        5  6 "</tool_response>"  6 "</tool_response>"
        6  7 "<think>"                    7 "<think>"
        7  30 "\u{15}"                     20 "\u{b}"
        8  31 "\u{16}"                     21 "\u{c}"
        9  end                                22 "\r"
    "#);
    insta::assert_snapshot!(diff(1, 2).unwrap().text(), @r#"
    s0001-chores-move-react-k01: calls 1 and 2 share 10 tokens

    both        <|im_start|><|im_end|><tool_call></tool_call><tool_response></tool_response><think>
    call 1      ends here (7 prompt, 3 reply tokens)
    call 2      (prompt) </think>\u{0}\u{e}

    token  call 1                              call 2
        0  1 "<|im_start|>"          1 "<|im_start|>"
        1  2 "<|im_end|>"              2 "<|im_end|>"
        2  3 "<tool_call>"            3 "<tool_call>"
        3  4 "</tool_call>"          4 "</tool_call>"
        4  5 "<tool_response>"    5 "<tool_response>"
        5  6 "</tool_response>"  6 "</tool_response>"
        6  7 "<think>"                    7 "<think>"
        7  20 "\u{b}"                      20 "\u{b}"
        8  21 "\u{c}"                      21 "\u{c}"
        9  22 "\r"                            22 "\r"
       10  end                           8 "</think>"
    "#);
    let json = serde_json::to_string_pretty(&diff(0, 2).unwrap()).unwrap();
    insta::assert_snapshot!(json);
    let error = diff(0, 7).unwrap_err().to_string();
    assert_eq!(error, "s0001-chores-move-react-k01 has no call 7");
}

#[tokio::test]
async fn nodes_are_decoded_on_demand() {
    let folder = run_folder().await;
    let ledger = Ledger::open_read_only(folder.path()).unwrap();
    let rollouts = ledger.rollouts(&[]).unwrap();
    let found = find(&rollouts, "k01").unwrap();
    let calls = ledger.calls(&found.spec.id).unwrap();
    let mut view = rollout::View::new(found, &calls, &Selection::default()).unwrap();
    let plain = view.text();
    view.decode(&speech());
    let text = view.text();
    let added: Vec<&str> = text
        .lines()
        .filter(|line| !plain.lines().any(|l| l == *line))
        .collect();
    insta::assert_snapshot!(added.join("\n"), @r"
      <|im_start|><|im_end|><tool_call></tool_call><tool_response></tool_response><think>
    │    \u{15}\u{16}
         
         </think>\u{0}
         \u{e}
    ");
    let node = view.node(2, &speech()).unwrap();
    insta::assert_snapshot!(node.text(), @r"
    s0001-chores-move-react-k01 node 2: 3 tokens, generated by call 1 · trained

    \u{b}\u{c}\r
    ");
    let error = view.node(5, &speech()).unwrap_err().to_string();
    assert_eq!(error, "s0001-chores-move-react-k01 has no node 5");
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
    seconds      queue 0.0  create 0.01  ready 0.0  harness 1.5  settle 0.20  verify 0.03  destroy 0.01

    call  class  segment  carries on  prompt  exact  reply  attempts  policy  end                class because
       0  main         0           -       7      0      2         1       1  stop, client gone
       1  main         0           -       7     10      3         1       1  stop
       2  main         0           1      12     10      1         1       1  stop

    tree: 5 nodes, 2 leaves; tokens: 32 captured, 15 unique, 6 generated, 4 trainable on kept branches
    ● [0] 7 context, prompt of calls 0, 1
    ├─ ● [1] 2 generated by call 0 · dropped: dead leaf, 2 trainable tokens lost
    └─ ● [2] 3 generated by call 1 · trained
         fork of call 1 from call 0: retry, 0 tokens again: same request as call 0
       ● [3] 2 context, prompt of call 2
       ● [4] 1 generated by call 2 · trained

    system     You work in a folder.
    user       Move a.txt⏎to b.txt, please, and say when you are done.
    assistant  → bash {"command":"mv a.txt b.txt"}
    tool       ok
    assistant  \u{1b}[31mDone.

    reward 0 in 0.03 s
      moved: 0
      | b.txt is there
      | 1

    made by      espalier 0.1.0
    of           task 0123456789ab
    weights      drew 1  at its end 2
    sampling     temperature 1  top p 1  top k 0  reply tokens at most 1024  seed 0
    scored by    code  attempts before 1
    not known    gateway, harness_digest, profile_digest, tools_digests, codec_digest, sandbox, image_digest, verifier_digest
    "#);
    let mut json = serde_json::to_value(&view).unwrap();
    // The record as the ledger has it, and the messages of the last call.
    for part in ["rollout", "conversation"] {
        assert!(json.as_object_mut().unwrap().remove(part).is_some());
    }
    insta::assert_snapshot!(serde_json::to_string_pretty(&json).unwrap());
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
    seconds      queue 0.0  create 0.01  ready 0.0  harness 1.5  settle 0.20  verify 0.03  destroy 0.01

    no calls were captured

    no verdict

    made by      espalier 0.1.0
    of           task 0123456789ab
    weights      drew 1  at its end 2
    sampling     temperature 1  top p 1  top k 0  reply tokens at most 1024  seed 0
    scored by    code  attempts before 1
    not known    gateway, harness_digest, profile_digest, tools_digests, codec_digest, sandbox, image_digest, verifier_digest
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
