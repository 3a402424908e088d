//! Clients that go away, come back, ask twice; engines and disks that fail; settling.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::time::Duration;

use engine::EngineError;
use gateway::Config;
use ledger::Options;
use record::{AttemptOutcome, Fault};
use serde_json::json;
use support::client::Client;
use support::{PATIENCE, World, ask, config, id, path, reassemble, rollout, streamed, until};

#[tokio::test]
async fn a_client_that_goes_away_finds_the_answer_when_it_comes_back() {
    let world = World::new().await;
    let access = world.open("r");
    for (round, stream) in [(1, false), (2, true)] {
        let mut request = ask(&format!("round {round}"));
        request["stream"] = json!(stream);
        world.engine.hold();
        let mut client = Client::tcp(world.address()).await;
        client
            .send("POST", &path(&access), &[], request.to_string().as_bytes())
            .await
            .unwrap();
        until(|| world.engine.asked() == round).await;
        drop(client);
        let gone = u32::try_from(round).unwrap();
        world.until("r", |status| status.client_gone == gone).await;
        assert_eq!(
            world.status("r").in_flight,
            1,
            "the engine is still at work"
        );
        world.engine.release();
        let calls = world.quiet("r").await;
        assert_eq!(calls.len(), round);
        assert_eq!(
            calls[round - 1].attempts[0].outcome,
            AttemptOutcome::ClientGone
        );
        assert!(calls[round - 1].generation.is_some());

        // As Claude Code does: the same again, not as a stream.
        let mut client = Client::tcp(world.address()).await;
        request["stream"] = json!(false);
        let answer = client.post(&path(&access), &[], &request).await;
        assert_eq!(answer.status(), 200);
        assert_eq!(world.engine.asked(), round, "the engine was asked again");
        let calls = world.quiet("r").await;
        let outcomes: Vec<_> = calls[round - 1]
            .attempts
            .iter()
            .map(|attempt| &attempt.outcome)
            .collect();
        assert_eq!(
            outcomes,
            [&AttemptOutcome::ClientGone, &AttemptOutcome::Delivered]
        );
    }
    assert_eq!(world.status("r").replayed, 2);
}

#[tokio::test]
async fn equal_requests_in_flight_are_one_call() {
    let world = World::new().await;
    let access = world.open("r");
    world.engine.hold();
    let mut clients = Vec::new();
    for stream in [false, true, false] {
        let mut client = Client::tcp(world.address()).await;
        let mut request = ask("same");
        request["stream"] = json!(stream);
        client
            .send("POST", &path(&access), &[], request.to_string().as_bytes())
            .await
            .unwrap();
        clients.push((client, stream));
    }
    world.until("r", |status| status.attempts == 3).await;
    world.engine.release();
    let mut messages = Vec::new();
    for (client, stream) in &mut clients {
        let answer = client.answer().await.unwrap();
        messages.push(match stream {
            true => reassemble(&answer.text()).0,
            false => answer.message(),
        });
    }
    assert!(messages.iter().all(|message| *message == messages[0]));
    assert_eq!(world.engine.asked(), 1);
    let calls = world.quiet("r").await;
    assert_eq!(calls.len(), 1);
    assert_eq!(calls[0].attempts.len(), 3);
    assert!(
        calls[0]
            .attempts
            .iter()
            .all(|attempt| attempt.outcome == AttemptOutcome::Delivered)
    );
    assert_eq!(world.status("r").joined, 2);
}

#[tokio::test]
async fn the_rule_for_repeats_of_a_delivered_call() {
    let world = World::new().await;
    let access = world.open("r");
    let mut client = Client::tcp(world.address()).await;
    // What is asked, whether it is marked as a retry, and how many calls there are then.
    let steps = [
        ("a", false, 1), // new
        ("a", false, 1), // right after: replayed
        ("a", false, 1), // and once more
        ("a", false, 2), // the agent means it: a new call
        ("b", false, 3),
        ("a", false, 4), // a later call came in between: new
        ("b", true, 4),  // says that it is a retry
        ("b", false, 5),
        ("b", true, 5),
    ];
    for (number, (text, marked, calls)) in steps.into_iter().enumerate() {
        let mark = [("x-stainless-retry-count", "1")];
        let headers = if marked { &mark[..] } else { &[] };
        let answer = client.post(&path(&access), headers, &ask(text)).await;
        assert_eq!(answer.status(), 200);
        world.quiet("r").await;
        assert_eq!(world.status("r").calls, calls, "step {number}");
    }
    let calls = world.quiet("r").await;
    assert_eq!(calls[0].attempts.len(), 3);
    let seeds: std::collections::HashSet<_> = calls.iter().map(|call| call.sampling.seed).collect();
    assert_eq!(seeds.len(), 5);
}

#[tokio::test]
async fn a_failed_call_is_asked_again_under_the_same_index() {
    let world = World::new().await;
    let access = world.open("r");
    let mut client = Client::tcp(world.address()).await;
    world
        .engine
        .fail_next(EngineError::Gone("no power".to_owned()));
    world.engine.fail_next(EngineError::Busy { waiting: 9 });
    let answer = client.post(&path(&access), &[], &streamed(ask("x"))).await;
    assert_eq!(answer.status(), 503, "a quick failure keeps its status");
    assert!(answer.text().contains("no power"));
    world.quiet("r").await;
    assert_eq!(world.status("r").last_fault, Some(Fault::EngineFailed));
    let answer = client.post(&path(&access), &[], &ask("x")).await;
    assert_eq!(answer.status(), 429);
    assert_eq!(answer.head.header("retry-after"), Some("1"));
    let answer = client.post(&path(&access), &[], &ask("x")).await;
    assert_eq!(answer.status(), 200);
    let calls = world.quiet("r").await;
    assert_eq!(calls.len(), 1);
    let outcomes: Vec<_> = calls[0]
        .attempts
        .iter()
        .map(|attempt| attempt.outcome.clone())
        .collect();
    let failed = |reason: &str| AttemptOutcome::EngineFailed {
        reason: reason.to_owned(),
    };
    assert_eq!(
        outcomes,
        [
            failed("engine is gone: no power"),
            failed("engine queue is full (9 waiting)"),
            AttemptOutcome::Delivered
        ]
    );
    let status = world.status("r");
    assert_eq!(status.engine_failures, 2);
    assert_eq!(status.client_gone, 0);
    assert_eq!(status.last_fault, None, "it was answered in the end");
    let requests = world.engine.requests.lock().unwrap();
    assert!(
        requests
            .iter()
            .all(|request| request.sampling.seed == requests[0].sampling.seed)
    );
}

#[tokio::test]
async fn silence_is_filled_with_comments_and_a_late_failure_is_an_event() {
    let config = Config {
        headers_after_ms: 0,
        keep_alive_s: 1,
        ..config()
    };
    let world = World::with(config, Options::default()).await;
    let access = world.open("r");
    for fails in [false, true] {
        world.engine.hold();
        let mut client = Client::tcp(world.address()).await;
        let request = streamed(ask(&format!("fails: {fails}"))).to_string();
        client
            .send("POST", &path(&access), &[], request.as_bytes())
            .await
            .unwrap();
        let head = client.head().await.unwrap();
        assert_eq!(head.status, 200);
        for _ in 0..2 {
            let chunk = client.chunk().await.unwrap().unwrap();
            assert_eq!(chunk, b": keep-alive\n\n");
        }
        if fails {
            world.engine.fail_next(EngineError::Gone("late".to_owned()));
        }
        world.engine.release();
        let mut rest = Vec::new();
        while let Some(chunk) = client.chunk().await.unwrap() {
            rest.extend(chunk);
        }
        let rest = String::from_utf8(rest).unwrap();
        if fails {
            assert!(rest.contains("\"error\""), "{rest}");
            assert!(!rest.contains("[DONE]"), "{rest}");
        } else {
            reassemble(&rest);
        }
    }
    let calls = world.quiet("r").await;
    assert_eq!(calls[0].attempts[0].outcome, AttemptOutcome::Delivered);
    assert!(matches!(
        calls[1].attempts[0].outcome,
        AttemptOutcome::EngineFailed { .. }
    ));
}

#[tokio::test]
async fn a_slow_engine_is_cut_off() {
    let config = Config {
        engine_timeout_s: 1,
        ..config()
    };
    let world = World::with(config, Options::default()).await;
    let access = world.open("r");
    world.engine.hold();
    let mut client = Client::tcp(world.address()).await;
    let answer = client.post(&path(&access), &[], &ask("x")).await;
    assert_eq!(answer.status(), 503);
    assert!(answer.text().contains("no reply within 1 s"));
    assert!(
        world
            .gateway
            .metrics_text()
            .contains("engine_failures_total{kind=\"timeout\"} 1")
    );
}

#[tokio::test]
async fn while_paused_the_engine_is_not_asked() {
    let world = World::new().await;
    let access = world.open("r");
    world.gateway.pause();
    let mut client = Client::tcp(world.address()).await;
    client
        .send("POST", &path(&access), &[], ask("x").to_string().as_bytes())
        .await
        .unwrap();
    world.until("r", |status| status.in_flight == 1).await;
    assert_eq!(world.engine.asked(), 0);
    world.gateway.resume();
    assert_eq!(client.answer().await.unwrap().status(), 200);

    let config = Config {
        pause_timeout_s: 0,
        ..config()
    };
    let world = World::with(config, Options::default()).await;
    let access = world.open("r");
    world.gateway.pause();
    let mut client = Client::tcp(world.address()).await;
    let answer = client.post(&path(&access), &[], &ask("x")).await;
    assert_eq!(answer.status(), 503);
    assert_eq!(world.engine.asked(), 0);
    assert_eq!(world.status("r").last_fault, Some(Fault::GatewayFailed));
}

#[tokio::test]
async fn a_full_disk_refuses_calls_until_there_is_room() {
    let options = Options {
        file_bytes_max: Some(200 << 10),
        ..Options::default()
    };
    let world = World::with(config(), options).await;
    let access = world
        .gateway
        .open(gateway::Open {
            calls_max: 10_000,
            ..rollout("r")
        })
        .unwrap();
    let mut client = Client::tcp(world.address()).await;
    let mut answered = 0;
    let refused = loop {
        assert!(answered < 2000, "the limit does not bite");
        let answer = client
            .post(&path(&access), &[], &ask(&format!("call {answered}")))
            .await;
        if answer.status() != 200 {
            break answer;
        }
        answered += 1;
    };
    assert_eq!(refused.status(), 503);
    assert!(refused.text().contains("nothing saved before is lost"));
    assert_eq!(world.status("r").last_fault, Some(Fault::GatewayFailed));
    // Refused before the engine works for nothing. Small writes may still find a place.
    for number in 0..20 {
        let request = ask(&format!("more {number}"));
        let before = world.engine.asked();
        let answer = client.post(&path(&access), &[], &request).await;
        assert_ne!(answer.status(), 200);
        if world
            .ledger
            .put_note("gateway.probe", json!(1))
            .await
            .is_err()
        {
            assert!(world.engine.asked() <= before + 1);
        }
    }
    assert_eq!(world.ledger.calls(&id("r")).unwrap().len(), answered);

    world.ledger.forget(&id("r")).await.unwrap();
    let answer = client.post(&path(&access), &[], &ask("after")).await;
    assert_eq!(answer.status(), 200);
}

#[tokio::test]
async fn settling_waits_for_what_is_in_flight_and_ends_the_rollout() {
    let world = World::new().await;
    let access = world.open("r");
    world.engine.hold();
    let mut slow = Client::tcp(world.address()).await;
    slow.send(
        "POST",
        &path(&access),
        &[],
        ask("slow").to_string().as_bytes(),
    )
    .await
    .unwrap();
    until(|| world.engine.asked() == 1).await;
    let mut client = Client::tcp(world.address()).await;

    let settled = world.settle("r", PATIENCE);
    tokio::pin!(settled);
    // Still settling: new calls are taken.
    client
        .send(
            "POST",
            &path(&access),
            &[],
            ask("late").to_string().as_bytes(),
        )
        .await
        .unwrap();
    tokio::select! {
        status = &mut settled => panic!("settled with calls in flight: {status:?}"),
        () = until(|| world.engine.asked() == 2) => {}
    }
    world.engine.release();
    let status = settled.await;
    assert!(status.settled);
    assert_eq!((status.calls, status.in_flight), (2, 0));
    assert_eq!(slow.answer().await.unwrap().status(), 200);
    assert_eq!(client.answer().await.unwrap().status(), 200);
    let calls = world.ledger.calls(&id("r")).unwrap();
    assert!(calls.iter().all(record::Call::delivered), "{calls:?}");

    let answer = client.post(&path(&access), &[], &ask("too late")).await;
    assert_eq!(
        (answer.status(), answer.code().as_str()),
        (401, "rollout_ended")
    );
    // The SDKs repeat a 409, and obey this whatever the status.
    assert_eq!(answer.head.header("x-should-retry"), Some("false"));
    world.gateway.close(&id("r"));
    let answer = client.post(&path(&access), &[], &ask("too late")).await;
    assert_eq!(answer.status(), 401);
    let status = world.status("r");
    assert!(status.closed && status.settled);
    assert_eq!(status.calls, 2);
    assert_eq!(world.ledger.calls(&id("r")).unwrap().len(), 2);
}

#[tokio::test]
async fn at_the_settling_limit_calls_are_refused_and_closing_cuts_the_rest() {
    let world = World::new().await;
    let access = world.open("r");
    world.engine.hold();
    let mut slow = Client::tcp(world.address()).await;
    slow.send(
        "POST",
        &path(&access),
        &[],
        ask("slow").to_string().as_bytes(),
    )
    .await
    .unwrap();
    until(|| world.engine.asked() == 1).await;
    let status = world.settle("r", Duration::from_millis(1)).await;
    assert!(!status.settled);
    assert_eq!(status.in_flight, 1);
    let mut client = Client::tcp(world.address()).await;
    let answer = client.post(&path(&access), &[], &ask("late")).await;
    assert_eq!(answer.status(), 401);
    world.gateway.close(&id("r"));
    assert_eq!(slow.answer().await.unwrap().status(), 401);
    assert_eq!(world.ledger.calls(&id("r")).unwrap(), []);
    world.engine.release();
    // The id may be used again, with a new key. What an interrupted run had captured under it goes.
    let again = world.open("r");
    assert_ne!(again.key, access.key);
    assert_eq!(
        client.post(&path(&again), &[], &ask("x")).await.status(),
        200
    );
    assert_eq!(
        client.post(&path(&access), &[], &ask("x")).await.status(),
        401
    );
}

#[tokio::test]
async fn a_rollout_that_runs_again_does_not_inherit_calls() {
    let world = World::new().await;
    let mut client = Client::tcp(world.address()).await;
    for run in 0..2 {
        let access = world.open("r");
        for number in 0..3 - 2 * run {
            let request = ask(&format!("run {run} call {number}"));
            assert_eq!(
                client.post(&path(&access), &[], &request).await.status(),
                200
            );
        }
        assert!(world.settle("r", PATIENCE).await.settled);
        world.gateway.close(&id("r"));
    }
    let calls = world.ledger.calls(&id("r")).unwrap();
    assert_eq!(calls.len(), 1);
    assert_eq!(
        calls[0].conversation.messages[0].text_content(),
        "run 1 call 0"
    );
}

#[tokio::test]
async fn opening_has_limits() {
    let config = Config {
        rollouts_max: 1,
        closed_kept_max: 1,
        ..config()
    };
    let world = World::with(config, Options::default()).await;
    let access = world.open("a");
    let error = world.gateway.open(rollout("a")).unwrap_err();
    assert!(error.to_string().contains("open already"), "{error}");
    let error = world.gateway.open(rollout("b")).unwrap_err();
    assert!(error.to_string().contains("rollouts_max"), "{error}");
    world.gateway.close(&id("a"));
    let key = |key: &str| gateway::Open {
        key: Some(key.into()),
        ..rollout("b")
    };
    assert!(world.gateway.open(key("short")).is_err());
    assert!(world.gateway.open(key("with/slash")).is_err());
    assert_eq!(
        world.gateway.open(key("long-enough")).unwrap().path,
        "/r/long-enough"
    );
    world.gateway.close(&id("b"));
    // Only one closed rollout is remembered.
    assert!(world.gateway.status(&id("a")).is_none());
    let mut client = Client::tcp(world.address()).await;
    assert_eq!(
        client.post(&path(&access), &[], &ask("x")).await.status(),
        401
    );
    let answer = client
        .post("/r/long-enough/v1/chat/completions", &[], &ask("x"))
        .await;
    assert_eq!(answer.status(), 401);
}

#[tokio::test]
async fn shutdown_drains_and_then_abandons() {
    for drains in [true, false] {
        let world = World::new().await;
        let access = world.open("r");
        world.engine.hold();
        let mut client = Client::tcp(world.address()).await;
        client
            .send("POST", &path(&access), &[], ask("x").to_string().as_bytes())
            .await
            .unwrap();
        until(|| world.engine.asked() == 1).await;
        let drain = if drains { PATIENCE } else { Duration::ZERO };
        let shutdown = world.gateway.shutdown(drain);
        let answer = async {
            if drains {
                world.engine.release();
            }
            client.answer().await.unwrap()
        };
        let ((), answer) = tokio::join!(shutdown, answer);
        assert_eq!(answer.status(), if drains { 200 } else { 503 });
        let calls = world.ledger.calls(&id("r")).unwrap();
        assert_eq!(calls.len(), usize::from(drains));
        assert!(
            tokio::net::TcpStream::connect(world.address())
                .await
                .is_err(),
            "still listening"
        );
    }
}
