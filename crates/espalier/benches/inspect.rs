//! How long `espalier inspect` takes on a large run: `cargo bench -p espalier --bench inspect`.
//!
//! Makes a run of `ROLLOUTS` (10,000 unless the environment says otherwise) with five calls each, a
//! part of them with forks, retries, faults; each rollout is summed up when it ends, as the runner
//! does it. Then the program itself is started and timed, `--json` and text, and once on the same
//! run without its summaries, as of an earlier version.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a bench"
)]

use std::{path::Path, process::Command, time::Instant};

use ledger::{FILE_NAME, Ledger};
use record::{
    Attempt, AttemptOutcome, Call, CallId, Continuation, Conversation, Dialect, Disposition, Fault,
    FinishReason, Generation, GroupId, Lineage, Message, PolicySpan, Role, Rollout, RolloutId,
    RolloutSpec, Sampling, StageSeconds, TaskId, Verdict,
};
use rollout::Summary;
use serde_json::json;
use tree::Selection;

const CALLS: u32 = 5;
const GROUP: u64 = 8;
const GROUPS_PER_STEP: u64 = 16;

/// Numbers that look random and are the same on every machine.
fn noise(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn ids(seed: u64, count: usize) -> Vec<u32> {
    (0..count as u64)
        .map(|at| (noise(seed ^ at) % 4096) as u32)
        .collect()
}

fn calls(number: u64, id: &RolloutId) -> Vec<Call> {
    let mut messages = vec![
        Message::text(Role::System, "You work in a folder. ".repeat(20)),
        Message::text(Role::User, format!("Do chore {number}.")),
    ];
    let mut prompt = ids(1, 300);
    prompt.extend(ids(noise(number), 60));
    let mut calls = Vec::new();
    for index in 0..CALLS {
        let seed = noise(number * 100 + u64::from(index));
        let output = ids(seed, 30);
        let retried = noise(seed).is_multiple_of(20);
        calls.push(Call {
            id: CallId {
                rollout: id.clone(),
                index,
            },
            dialect: Dialect::Chat,
            request: json!({"model": "policy", "messages": serde_json::to_value(&messages).unwrap()}),
            headers: Vec::new(),
            digest: format!("{seed:064x}"),
            conversation: Conversation {
                messages: messages.clone(),
                tools: Vec::new(),
            },
            prompt_ids: prompt.clone(),
            continuation: Continuation {
                parent: index.checked_sub(1),
                ..Continuation::default()
            },
            sampling: Sampling::default(),
            generation: Some(Generation {
                logprobs_model: vec![-0.5; output.len()],
                logprobs_sampled: vec![-0.5; output.len()],
                token_ids: output.clone(),
                policy: vec![PolicySpan {
                    start: 0,
                    version: number / (GROUP * GROUPS_PER_STEP),
                }],
                finish: FinishReason::Stop,
                cached_tokens: 0,
            }),
            raw_text: String::new(),
            reply: Some(Message::text(Role::Assistant, format!("step {seed:x}"))),
            parse_failed: false,
            attempts: vec![Attempt {
                started_ms: 0,
                finished_ms: seed % 900,
                outcome: if retried {
                    AttemptOutcome::ClientGone
                } else {
                    AttemptOutcome::Delivered
                },
                stream: false,
            }],
        });
        if retried {
            // The next call asks the same again.
            continue;
        }
        messages.push(Message::text(Role::Assistant, format!("step {seed:x}")));
        messages.push(Message::text(
            Role::Tool,
            format!("result {seed:x}").repeat(8),
        ));
        prompt.extend(output);
        prompt.extend(ids(seed ^ 7, 50));
    }
    calls
}

fn rollout(number: u64) -> Rollout {
    let (step, group) = (number / (GROUP * GROUPS_PER_STEP), number / GROUP);
    let chance = noise(number ^ 0xfeed);
    let lost = chance.is_multiple_of(50);
    let seconds = |part: u64| (noise(number ^ part) % 4000) as f64 / 1000.0;
    Rollout {
        spec: RolloutSpec {
            id: RolloutId::new(format!(
                "s{step:04}-chores-{group:05}-react-k{:02}",
                number % GROUP
            ))
            .unwrap(),
            task: TaskId::new(format!("chores-{group:05}")).unwrap(),
            group: GroupId::new(format!("s{step:04}-chores-{group:05}-react")).unwrap(),
            harness: ["react", "pi"][(group % 2) as usize].to_owned(),
            labels: [("step", step.to_string()), ("split", "train".to_owned())]
                .map(|(name, value)| (name.to_owned(), value))
                .into(),
            seed: number,
        },
        lineage: Lineage {
            espalier: "0.1.0".into(),
            gateway: "0.1.0".into(),
            task_digest: format!("{:064x}", noise(group)),
            harness_version: "react 1 (0123456789ab)".into(),
            harness_digest: "a".repeat(64),
            profile_digest: "b".repeat(64),
            tools_digests: vec!["c".repeat(64)],
            codec_digest: "d".repeat(64),
            policy: step,
            policies: vec![step],
            policy_end: Some(step + chance % 2),
            sampling: Some(Sampling::default()),
            sandbox: "local".into(),
            image_digest: "e".repeat(64),
            warm: false,
            retries: 0,
            reward_source: "code".into(),
            verifier_digest: "f".repeat(64),
        },
        started_ms: 1_000_000 + number * 10,
        finished_ms: Some(1_005_000 + number * 10),
        harness_exit: Some(0),
        harness_tail: "all done\n".repeat(20),
        calls: CALLS,
        seconds: StageSeconds {
            queue: seconds(1),
            create: seconds(2) / 100.0,
            ready: 0.0,
            harness: seconds(3),
            settle: seconds(4) / 50.0,
            verify_wait: 0.0,
            verify: seconds(5) / 40.0,
            destroy: seconds(6) / 100.0,
        },
        verdict: (!lost).then(|| Verdict {
            reward: chance.is_multiple_of(3).into(),
            scores: [("files".to_owned(), 1.0)].into(),
            evidence: "b.txt is there\n".repeat(10),
            seconds: 0.02,
        }),
        disposition: Some(if lost {
            Disposition::Discard {
                fault: Fault::SandboxLost,
                reason: "it ran out of memory".into(),
            }
        } else {
            Disposition::Train
        }),
    }
}

async fn make(dir: &Path, rollouts: u64) {
    let ledger = Ledger::create(dir).unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for lane in 0..16 {
        let ledger = ledger.clone();
        tasks.spawn(async move {
            for number in (lane..rollouts).step_by(16) {
                let rollout = rollout(number);
                let id = rollout.spec.id.clone();
                let calls = calls(number, &id);
                let summary = Summary::of(&calls, &Selection::default());
                for call in calls {
                    ledger.put_call(call).await.unwrap();
                }
                ledger.put_rollout(rollout).await.unwrap();
                ledger.put_summary(&id, &summary).await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    ledger.close().await.unwrap();
}

fn time(dir: &Path, arguments: &[&str]) -> f64 {
    let started = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_espalier"))
        .arg("inspect")
        .arg(dir)
        .args(arguments)
        .output()
        .unwrap();
    let seconds = started.elapsed().as_secs_f64();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.stdout.len() > 1000);
    seconds
}

fn median(dir: &Path, arguments: &[&str]) -> f64 {
    let mut seconds: Vec<f64> = (0..5).map(|_| time(dir, arguments)).collect();
    seconds.sort_by(f64::total_cmp);
    seconds[2]
}

fn main() {
    let rollouts = std::env::var("ROLLOUTS").map_or(10_000, |text| text.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let started = Instant::now();
    runtime.block_on(make(dir.path(), rollouts));
    let bytes = std::fs::metadata(dir.path().join(FILE_NAME)).unwrap().len();
    println!(
        "{rollouts} rollouts of {CALLS} calls: written in {:.1} s, {:.1} MB",
        started.elapsed().as_secs_f64(),
        bytes as f64 / 1e6
    );
    println!(
        "espalier inspect RUN           {:.2} s",
        median(dir.path(), &[])
    );
    println!(
        "espalier inspect RUN --json    {:.2} s",
        median(dir.path(), &["--json"])
    );
    let one = rollout(rollouts / 2).spec.id;
    println!(
        "espalier inspect RUN ROLLOUT   {:.2} s",
        median(dir.path(), &[one.as_str()])
    );
    // As an earlier version left it: another rule, so that no summary fits.
    let policy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policy");
    let recipe = format!("[policy]\nfolder = {policy:?}\n[train.selection]\npolicy = \"all\"\n");
    std::fs::write(dir.path().join("run.toml"), recipe).unwrap();
    println!(
        "the first time without summaries {:.1} s, the next {:.2} s",
        time(dir.path(), &[]),
        median(dir.path(), &[])
    );
}
