//! What a rollout may use up, and what its harness is told then; holding calls back; new weights.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::time::Duration;

use gateway::Open;
use support::client::{Answer, Client};
use support::{PATIENCE, World, ask, path, rollout, until};

fn ended(answer: &Answer, code: &str) {
    assert_eq!((answer.status(), answer.code().as_str()), (401, code));
    assert_eq!(answer.head.header("x-should-retry"), Some("false"));
}

#[tokio::test]
async fn generated_tokens_are_limited_over_all_calls() {
    let world = World::new().await;
    let access = world
        .gateway
        .open(Open {
            generated_tokens_max: Some(12),
            ..rollout("r")
        })
        .unwrap();
    let mut client = Client::tcp(world.address()).await;
    let mut generated = 0;
    let mut calls = 0;
    let refused = loop {
        assert!(calls < 20, "the budget does not bite");
        let answer = client
            .post(&path(&access), &[], &ask(&format!("number {calls}")))
            .await;
        if answer.status() != 200 {
            break answer;
        }
        calls += 1;
        generated += answer.json()["usage"]["completion_tokens"]
            .as_u64()
            .unwrap();
        world.quiet("r").await;
    };
    ended(&refused, "tokens_max");
    // The last reply was cut to what was left.
    assert_eq!(generated, 12);
    let status = world.status("r");
    assert!(status.tokens_max_hit && !status.calls_max_hit);
    assert_eq!(status.generated_tokens, 12);
    assert_eq!(status.last_fault, None, "a budget is no fault");
}

#[tokio::test]
async fn time_is_limited_for_new_calls_and_for_those_that_run() {
    let world = World::new().await;
    let access = world
        .gateway
        .open(Open {
            seconds_max: Some(1),
            ..rollout("r")
        })
        .unwrap();
    world.engine.hold();
    let mut client = Client::tcp(world.address()).await;
    // The engine is never released: only the rollout's time ends this.
    let answer = client.post(&path(&access), &[], &ask("x")).await;
    ended(&answer, "seconds_max");
    let answer = client.post(&path(&access), &[], &ask("y")).await;
    ended(&answer, "seconds_max");
    let status = world.status("r");
    assert!(status.seconds_max_hit);
    assert_eq!((status.calls, status.last_fault), (1, None));
    assert!(world.quiet("r").await[0].generation.is_none());
}

#[tokio::test]
async fn while_paused_the_engine_drains_and_then_takes_new_weights() {
    let world = World::new().await;
    let access = world.open("r");
    world.engine.hold();
    let mut running = Client::tcp(world.address()).await;
    let body = |text: &str| ask(text).to_string().into_bytes();
    running
        .send("POST", &path(&access), &[], &body("runs"))
        .await
        .unwrap();
    until(|| world.engine.asked() == 1).await;
    world.gateway.pause();
    assert!(!world.gateway.drained(Duration::from_millis(1)).await);
    let mut waiting = Client::tcp(world.address()).await;
    waiting
        .send("POST", &path(&access), &[], &body("waits"))
        .await
        .unwrap();
    world.until("r", |status| status.calls == 2).await;
    world.engine.release();
    assert!(world.gateway.drained(PATIENCE).await);
    assert_eq!(world.engine.asked(), 1);
    world
        .gateway
        .load_weights(std::path::Path::new("step-4"), 4)
        .await
        .unwrap();
    world.gateway.resume();
    assert_eq!(running.answer().await.unwrap().status(), 200);
    assert_eq!(waiting.answer().await.unwrap().status(), 200);
    let calls = world.quiet("r").await;
    let version = |call: &record::Call| call.generation.as_ref().unwrap().policy[0].version;
    assert_eq!((version(&calls[0]), version(&calls[1])), (0, 4));
    let error = world
        .gateway
        .load_weights(std::path::Path::new("missing"), 5)
        .await;
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("goes on with those")
    );
    assert!(world.gateway.metrics_text().contains("policy_version 4"));
}
