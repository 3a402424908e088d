//! Replies that are lost on the way, and what clients then make of the history: the same call,
//! one answer, no fork. Generations that nobody waits for.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use gateway::Config;
use ledger::Options;
use record::{AttemptOutcome, Call};
use serde_json::{Value, json};
use support::client::Client;
use support::{World, ask, config, path, until};

/// Sends a request and goes away while the engine works; it then finishes for nobody.
async fn lose(world: &World, path: &str, request: &Value) {
    let asked = world.engine.asked();
    let gone = world.status("r").client_gone;
    world.engine.hold();
    let mut client = Client::tcp(world.address()).await;
    client
        .send("POST", path, &[], request.to_string().as_bytes())
        .await
        .unwrap();
    until(|| world.engine.asked() == asked + 1).await;
    drop(client);
    // Known to be gone before there is a reply: the kernel would take one for it.
    world
        .until("r", |status| status.client_gone == gone + 1)
        .await;
    world.engine.release();
    world.quiet("r").await;
}

fn list(request: &mut Value) -> &mut Vec<Value> {
    request["messages"].as_array_mut().unwrap()
}

fn continues(call: &Call, parent: &Call) {
    let generated = &parent.generation.as_ref().unwrap().token_ids;
    let whole = [parent.prompt_ids.as_slice(), generated].concat();
    assert!(call.prompt_ids.starts_with(&whole), "{} forks", call.id);
    assert_eq!(call.continuation.echoes_foreign, 0);
}

/// An edit of the history, whether it stays in later requests, by the client that does it.
type Habit = (&'static str, fn(&mut Vec<Value>), bool);

const HABITS: [Habit; 4] = [
    (
        "kimi keeps the partial text as a turn",
        |list| list.push(json!({"role": "assistant", "content": "turn 1 on"})),
        true,
    ),
    (
        "qwen adds an order to go on, and takes both away again",
        |list| {
            list.push(json!({"role": "assistant", "content": "turn 1 on"}));
            list.push(json!({"role": "user", "content": "Continue where you stopped."}));
        },
        false,
    ),
    (
        "openclaw doubles the user's message",
        |list| list.push(list.last().unwrap().clone()),
        true,
    ),
    (
        "opencode leaves an empty turn",
        |list| list.push(json!({"role": "assistant", "content": ""})),
        true,
    ),
];

#[tokio::test]
async fn an_edited_retry_gets_the_answer_that_was_lost_and_the_thread_goes_on_unforked() {
    for (name, edit, stays) in HABITS {
        let world = World::new().await;
        let path = path(&world.open("r"));
        let mut client = Client::tcp(world.address()).await;
        let mut request = ask("go");
        let first = client.post(&path, &[], &request).await;
        list(&mut request).push(first.message());
        list(&mut request).push(json!({"role": "user", "content": "on"}));
        lose(&world, &path, &request).await;
        assert_eq!(world.engine.asked(), 2);

        let mut edited = request.clone();
        edit(list(&mut edited));
        let answer = client.post(&path, &[], &edited).await;
        assert_eq!(answer.status(), 200, "{name}");
        assert_eq!(
            world.engine.asked(),
            2,
            "{name}: the engine was asked again"
        );
        assert_eq!(answer.message()["content"], "turn 1 on on", "{name}");
        let calls = world.quiet("r").await;
        assert_eq!(calls.len(), 2, "{name}");
        let outcomes: Vec<_> = calls[1].attempts.iter().map(|one| &one.outcome).collect();
        assert_eq!(
            outcomes,
            [&AttemptOutcome::ClientGone, &AttemptOutcome::Delivered],
            "{name}"
        );
        assert_eq!(world.status("r").edited, 1, "{name}");

        let mut next = if stays { edited } else { request };
        list(&mut next).push(answer.message());
        list(&mut next).push(json!({"role": "user", "content": "stop"}));
        assert_eq!(client.post(&path, &[], &next).await.status(), 200);
        let calls = world.quiet("r").await;
        continues(&calls[2], &calls[1]);
    }
}

/// The kernel took the whole of a reply, and the line broke behind it: the record says that it was
/// delivered, and the client shows a part of it.
#[tokio::test]
async fn a_part_of_a_delivered_reply_in_the_very_next_request_is_a_retry() {
    const REPLAYS_MAX: u32 = 2;
    let config = Config {
        replays_max: REPLAYS_MAX,
        ..config()
    };
    for (name, edit, stays) in &HABITS[..2] {
        let world = World::with(config.clone(), Options::default()).await;
        let path = path(&world.open("r"));
        let mut client = Client::tcp(world.address()).await;
        let mut request = ask("go");
        let first = client.post(&path, &[], &request).await;
        list(&mut request).push(first.message());
        list(&mut request).push(json!({"role": "user", "content": "on"}));
        let whole = client.post(&path, &[], &request).await;
        world.quiet("r").await;
        let mut edited = request.clone();
        edit(list(&mut edited));
        let answer = client.post(&path, &[], &edited).await;
        assert_eq!(answer.message(), whole.message(), "{name}");
        let calls = world.quiet("r").await;
        assert_eq!((calls.len(), calls[1].attempts.len()), (2, 2), "{name}");
        assert_eq!(world.engine.asked(), 2, "{name}");
        // The thread goes on unforked.
        let mut next = if *stays { edited.clone() } else { request };
        list(&mut next).push(answer.message());
        list(&mut next).push(json!({"role": "user", "content": "stop"}));
        assert_eq!(client.post(&path, &[], &next).await.status(), 200);
        let calls = world.quiet("r").await;
        continues(&calls[2], &calls[1]);
        // Once another call was answered, nobody tells of a broken line any more: a history that
        // was cut on purpose is one.
        let mut cut = next;
        list(&mut cut).truncate(3);
        edit(list(&mut cut));
        list(&mut cut).push(json!({"role": "user", "content": "and now?"}));
        client.post(&path, &[], &cut).await;
        assert_eq!(world.quiet("r").await.len(), 4, "{name}");
    }
    // A client that does so for ever gets another answer at last.
    let world = World::with(config, Options::default()).await;
    let path = path(&world.open("r"));
    let mut client = Client::tcp(world.address()).await;
    let mut request = ask("on");
    client.post(&path, &[], &request).await;
    world.quiet("r").await;
    list(&mut request).push(json!({"role": "assistant", "content": "turn 0"}));
    for round in 0..=REPLAYS_MAX {
        // Another wording each time, or it would be the same request again.
        let mut again = request.clone();
        let order = format!("Continue ({round}).");
        list(&mut again).push(json!({"role": "user", "content": order}));
        assert_eq!(client.post(&path, &[], &again).await.status(), 200);
        let calls = world.quiet("r").await.len();
        assert_eq!(calls, 1 + usize::from(round == REPLAYS_MAX), "{round}");
    }
}

#[tokio::test]
async fn what_was_delivered_and_is_then_continued_is_no_retry() {
    let world = World::new().await;
    let path = path(&world.open("r"));
    let mut client = Client::tcp(world.address()).await;
    let mut request = ask("stop");
    let answer = client.post(&path, &[], &request).await;
    world.quiet("r").await;
    // The same as a partial text, but the reply has arrived: a conversation that goes on.
    list(&mut request).push(answer.message());
    list(&mut request).push(json!({"role": "user", "content": "stop again"}));
    client.post(&path, &[], &request).await;
    let calls = world.quiet("r").await;
    assert_eq!(calls.len(), 2);
    continues(&calls[1], &calls[0]);
    // Somebody else's partial text is none of ours.
    let request = json!({"messages": [{"role": "user", "content": "stop here"}]});
    lose(&world, &path, &request).await;
    let other = json!({"messages": [{"role": "user", "content": "stop here"},
        {"role": "assistant", "content": "nothing of ours"}]});
    client.post(&path, &[], &other).await;
    assert_eq!(world.quiet("r").await.len(), 4);
    assert_eq!(world.status("r").edited, 0);
}

#[tokio::test]
async fn a_generation_that_nobody_waits_for_is_cancelled_and_asked_again_on_return() {
    let config = Config {
        abandon_after_s: 0,
        ..config()
    };
    let world = World::with(config, Options::default()).await;
    let path = path(&world.open("r"));
    world.engine.hold();
    let mut client = Client::tcp(world.address()).await;
    client
        .send("POST", &path, &[], ask("stop").to_string().as_bytes())
        .await
        .unwrap();
    until(|| world.engine.asked() == 1).await;
    drop(client);
    // The engine is never released: only cancelling ends it.
    let calls = world.quiet("r").await;
    assert_eq!(calls.len(), 1);
    assert!(calls[0].generation.is_none());
    assert_eq!(calls[0].attempts[0].outcome, AttemptOutcome::ClientGone);
    let status = world.status("r");
    assert_eq!((status.abandoned, status.last_fault), (1, None));
    world.engine.release();
    let mut client = Client::tcp(world.address()).await;
    assert_eq!(client.post(&path, &[], &ask("stop")).await.status(), 200);
    let calls = world.quiet("r").await;
    assert_eq!((calls.len(), calls[0].attempts.len()), (1, 2));
    assert!(calls[0].delivered());
    assert!(world.gateway.metrics_text().contains("abandoned_total 1"));
}

/// The same history, still in flight, with another temperature: somebody wants a second sample.
#[tokio::test]
async fn a_second_sample_on_purpose_is_a_sibling() {
    let world = World::new().await;
    let path = path(&world.open("r"));
    world.engine.hold();
    let mut clients = Vec::new();
    for temperature in [0.5, 0.9] {
        let mut request = ask("stop");
        request["temperature"] = json!(temperature);
        let mut client = Client::tcp(world.address()).await;
        client
            .send("POST", &path, &[], request.to_string().as_bytes())
            .await
            .unwrap();
        clients.push(client);
    }
    until(|| world.engine.asked() == 2).await;
    world.engine.release();
    for client in &mut clients {
        assert_eq!(client.answer().await.unwrap().status(), 200);
    }
    let calls = world.quiet("r").await;
    assert_eq!((calls.len(), world.status("r").edited), (2, 0));
    assert_ne!(calls[0].sampling.seed, calls[1].sampling.seed);
}
