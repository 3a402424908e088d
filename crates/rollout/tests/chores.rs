//! The reference solutions, played by the teacher through real harnesses in real sandboxes, are
//! worth 1.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

mod real;

use real::{Loop, Teacher, installed, jobs, line};
use record::{AttemptOutcome, Disposition};
use task::{Split, chores};
use tokio_util::sync::CancellationToken;

async fn all_worth_one(harness: &str, count: usize, concurrency: usize) {
    let tasks = chores::generate(Split::Train, 0, count);
    let Some(installed) = installed(harness).await else {
        return;
    };
    let Some(world) = Loop::start(Teacher::of(&tasks)).await else {
        return;
    };
    let result = world
        .runner
        .run_batch(
            jobs(&tasks, &installed, 1),
            concurrency,
            CancellationToken::new(),
            |_| {},
        )
        .await
        .unwrap();
    for rollout in result.ended() {
        println!("{}", line(rollout));
        println!("{}", rollout.harness_tail);
    }
    assert!(result.counts.conserved());
    for (rollout, task) in result.ended().zip(&tasks) {
        assert_eq!(
            rollout.disposition,
            Some(Disposition::Train),
            "{}",
            line(rollout)
        );
        assert_eq!(
            rollout.verdict.as_ref().unwrap().reward,
            1.0,
            "{}",
            line(rollout)
        );
        assert_eq!(rollout.harness_exit, Some(0));
        assert_eq!(
            world.ledger.rollout(&rollout.spec.id).unwrap().as_ref(),
            Some(rollout)
        );
        // Enough to run it again, and to tell why another run differs.
        assert_eq!(rollout.lineage.missing(), Vec::<&str>::new());
        assert_eq!(rollout.lineage.sandbox, "local");
        assert_eq!(rollout.lineage.reward_source, "code");
        assert_eq!(rollout.lineage.task_digest, task.digest);
        assert_eq!(rollout.lineage.policies, [0]);
        let sampling = rollout.lineage.sampling.as_ref().unwrap();
        assert_eq!(sampling.seed, rollout.spec.seed);
        // One call per step of the solution and one for the last words; each delivered, and each
        // the exact continuation of the one before (I2).
        let calls = world.ledger.calls(&rollout.spec.id).unwrap();
        assert_eq!(calls.len(), rollout.calls as usize);
        assert_eq!(calls.len(), task::teacher::reference(task).unwrap().len());
        for pair in calls.windows(2) {
            let mut expected = pair[0].prompt_ids.clone();
            expected.extend(&pair[0].generation.as_ref().unwrap().token_ids);
            assert!(
                pair[1].prompt_ids.starts_with(&expected),
                "{} forks",
                pair[1].id
            );
        }
        for call in &calls {
            assert_eq!(call.attempts.len(), 1, "{}", call.id);
            assert_eq!(
                call.attempts[0].outcome,
                AttemptOutcome::Delivered,
                "{}",
                call.id
            );
        }
    }
    // What the calls of each come to was written down when it ended.
    let summaries = world.ledger.summaries::<rollout::Summary>().unwrap();
    for rollout in result.ended() {
        let id = &rollout.spec.id;
        let calls = world.ledger.calls(id).unwrap();
        let fresh = rollout::Summary::of(&calls, &tree::Selection::default());
        assert_eq!(summaries[id.as_str()], fresh, "{id}");
        assert_eq!(fresh.calls.calls, rollout.calls);
        assert_eq!(fresh.calls.exact, rollout.calls - 1);
        // The teacher is a script: what it says has no log-probabilities (I4).
        assert_eq!(fresh.tokens.without_logprobs, fresh.tokens.generated);
        assert_eq!(fresh.tokens.retained, 0);
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn through_react() {
    all_worth_one("react", 8, 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn through_pi() {
    all_worth_one("pi", 3, 2).await;
}

/// Anthropic Messages: inputs come back in the order of the schema, cache marks move, system
/// messages stand in the midst of the list.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "400 MB to install"]
async fn through_claude_code() {
    all_worth_one("claude-code", 3, 2).await;
}

/// OpenAI Responses: items, custom tools and namespaces.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "400 MB to install"]
async fn through_codex() {
    all_worth_one("codex", 3, 2).await;
}

/// Clock ticks of this process and of all children that it has waited for.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields = stat.rsplit_once(')').unwrap().1.split_whitespace();
    let ticks: f64 = fields
        .skip(11)
        .take(4)
        .map(|ticks| ticks.parse::<f64>().unwrap())
        .sum();
    ticks / 100.0
}

/// CPU and wall-clock seconds of a rollout, everything included but the model:
/// `HARNESS=react ROLLOUTS=64 cargo nextest run --release -p rollout --run-ignored all --no-capture measure`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn measure() {
    let setting = |name: &str, default: &str| std::env::var(name).unwrap_or(default.to_owned());
    let harness = setting("HARNESS", "react");
    let count: usize = setting("ROLLOUTS", "64").parse().unwrap();
    let concurrency: usize = setting("CONCURRENCY", "4").parse().unwrap();
    let tasks = chores::generate(Split::Train, 0, count);
    let installed = installed(&harness).await.unwrap();
    let Some(world) = Loop::start(Teacher::of(&tasks)).await else {
        return;
    };
    let before = cpu_s();
    let result = world
        .runner
        .run_batch(
            jobs(&tasks, &installed, 1),
            concurrency,
            CancellationToken::new(),
            |_| {},
        )
        .await
        .unwrap();
    // The sandboxes' time is known once the warden, their parent, has ended.
    world.close().await;
    let cpu = cpu_s() - before;
    let calls: u32 = result.ended().map(|rollout| rollout.calls).sum();
    let mean = |stage: fn(&record::StageSeconds) -> f64| {
        result
            .ended()
            .map(|rollout| stage(&rollout.seconds))
            .sum::<f64>()
            / count as f64
    };
    let rewards = result.ended().flat_map(|rollout| &rollout.verdict);
    let reward = rewards.map(|verdict| verdict.reward).sum::<f64>() / count as f64;
    println!("{:?}, mean reward {reward}", result.counts);
    println!(
        "{harness}: {count} rollouts, {calls} calls, {concurrency} at a time: {:.3} s CPU and {:.3} s wall a rollout; {:.2} rollouts/s; stages: create {:.3} harness {:.3} settle {:.3} verify {:.3} destroy {:.3}",
        cpu / count as f64,
        result.seconds * concurrency as f64 / count as f64,
        count as f64 / result.seconds,
        mean(|seconds| seconds.create),
        mean(|seconds| seconds.harness),
        mean(|seconds| seconds.settle),
        mean(|seconds| seconds.verify),
        mean(|seconds| seconds.destroy),
    );
}
