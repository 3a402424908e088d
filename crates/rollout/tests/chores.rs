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
