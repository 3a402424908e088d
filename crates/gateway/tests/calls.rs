//! What a harness sees: both forms of a reply, keys, bad input, limits, continuation.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::time::Duration;

use gateway::{Config, Listen, call_seed};
use ledger::Options;
use record::{AttemptOutcome, Sampling};
use serde_json::{Value, json};
use support::client::Client;
use support::{CONTEXT, World, ask, config, path, reassemble, rollout, streamed, tools};

#[tokio::test]
async fn a_stream_says_the_same_as_a_body_and_both_are_recorded_first() {
    let world = World::new().await;
    let access = world.open("r");
    let mut client = Client::tcp(world.address()).await;
    let mut request = ask("hello");
    request["tools"] = tools();
    let body = client.post(&path(&access), &[], &request).await;
    assert_eq!(body.status(), 200, "{}", body.text());
    assert_eq!(body.head.header("content-type"), Some("application/json"));
    let reply = body.json();
    assert_eq!(reply["model"], "m");
    assert_eq!(reply["choices"][0]["message"]["content"], "turn 0 on hello");

    let second = world.open("s");
    let events = client.post(&path(&second), &[], &streamed(request)).await;
    assert_eq!(
        events.head.header("content-type"),
        Some("text/event-stream")
    );
    let (message, finish) = reassemble(&events.text());
    assert_eq!(finish.as_deref(), Some("tool_calls"));
    assert_eq!(message, body.message());

    for (name, stream) in [("r", false), ("s", true)] {
        let calls = world.quiet(name).await;
        let [call] = calls.as_slice() else {
            panic!("{calls:?}");
        };
        assert_eq!(call.attempts.len(), 1);
        assert_eq!(call.attempts[0].outcome, AttemptOutcome::Delivered);
        assert_eq!(call.attempts[0].stream, stream);
        let generation = call.generation.as_ref().unwrap();
        assert!(generation.trainable());
        let usage = &reply["usage"];
        assert_eq!(usage["prompt_tokens"], call.prompt_ids.len());
        assert_eq!(usage["completion_tokens"], generation.token_ids.len());
        assert_eq!(call.sampling.seed, call_seed(7, 0));
        // What the engine consumed is what is recorded (I1).
        let requests = world.engine.requests.lock().unwrap();
        assert!(
            requests
                .iter()
                .all(|asked| asked.prompt_ids == call.prompt_ids)
        );
    }
    let metrics = world.gateway.metrics_text();
    assert!(
        metrics.contains("espalier_gateway_attempts_total{outcome=\"delivered\"} 2"),
        "{metrics}"
    );
}

#[tokio::test]
async fn a_rollout_is_told_by_path_or_key_and_both_must_agree() {
    let world = World::new().await;
    let (access, other) = (world.open("r"), world.open("other"));
    assert_eq!(access.key.len(), 32);
    let mut client = Client::tcp(world.address()).await;
    let bare = "/v1/chat/completions?beta=true";
    let bearer = format!("Bearer {}", access.key);
    let wrong = format!("Bearer {}", other.key);
    let good: [(&str, Vec<(&str, &str)>); 5] = [
        (&path(&access), vec![]),
        (bare, vec![("authorization", &bearer)]),
        (bare, vec![("x-api-key", &access.key)]),
        (bare, vec![("x-goog-api-key", &access.key)]),
        (
            &path(&access),
            vec![("authorization", &bearer), ("x-api-key", &access.key)],
        ),
    ];
    for (number, (path, headers)) in good.iter().enumerate() {
        let answer = client
            .post(path, headers, &ask(&format!("q{number}")))
            .await;
        assert_eq!(answer.status(), 200, "{path} {headers:?}");
    }
    let unknown = "/r/00000000000000000000000000000000/v1/chat/completions";
    let bad: [(&str, Vec<(&str, &str)>); 4] = [
        (bare, vec![]),
        (unknown, vec![]),
        (&path(&access), vec![("authorization", &wrong)]),
        (
            bare,
            vec![("authorization", &bearer), ("x-api-key", &other.key)],
        ),
    ];
    for (path, headers) in &bad {
        let answer = client.post(path, headers, &ask("x")).await;
        assert_eq!(answer.status(), 401, "{path} {headers:?}");
        assert_eq!(answer.code(), "invalid_api_key");
    }
    assert_eq!(world.status("r").calls, 5);
    assert_eq!(world.status("other").calls, 0);
}

#[tokio::test]
async fn other_paths_are_answered_at_once() {
    let world = World::new().await;
    let mut client = Client::tcp(world.address()).await;
    let models = client.get("/r/whatever/v1/models", &[]).await;
    assert_eq!(models.json()["data"][0]["id"], "tiny");
    assert_eq!(client.get("/v1/models/tiny", &[]).await.status(), 200);
    assert_eq!(client.get("/v1/models/huge", &[]).await.status(), 404);
    let answer = client.get("/r/secret-key/hello", &[]).await;
    assert_eq!(answer.status(), 404);
    assert!(!answer.text().contains("secret-key"), "{}", answer.text());
    let answer = client.post("/v1/embeddings", &[], &json!({})).await;
    assert_eq!(answer.status(), 404);
    // HEAD has no body, so the connection is not read further.
    let mut client = Client::tcp(world.address()).await;
    client.send("HEAD", "/", &[], b"").await.unwrap();
    assert_eq!(client.head().await.unwrap().status, 200);
}

#[tokio::test]
async fn bad_bodies_are_refused_and_named() {
    let config = Config {
        body_bytes_max: 1 << 20,
        ..config()
    };
    let world = World::with(config, Options::default()).await;
    let access = world.open("r");
    let mut client = Client::tcp(world.address()).await;
    let send = |client: Client, body: Vec<u8>| {
        let path = path(&access);
        async move {
            let mut client = client;
            client.send("POST", &path, &[], &body).await.unwrap();
            let answer = client.answer().await.unwrap();
            (client, answer)
        }
    };
    let answer;
    (client, answer) = send(client, b"{\"messages\": [".to_vec()).await;
    assert_eq!(answer.status(), 400);
    assert!(answer.text().contains("not JSON"), "{}", answer.text());

    let body = json!({"messages": [{"role": "user", "content": 7}]}).to_string();
    let answer;
    (client, answer) = send(client, body.into_bytes()).await;
    assert_eq!(answer.status(), 400);
    assert!(
        answer.text().contains("messages[0].content"),
        "{}",
        answer.text()
    );

    // Three times the limit: all of it is read, nothing is kept, and the client sees the answer.
    let (_, answer) = send(client, vec![b'x'; 3 << 20]).await;
    assert_eq!(answer.status(), 413);
    assert_eq!(answer.code(), "request_too_large");

    let mut client = Client::tcp(world.address()).await;
    let image = json!({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]});
    let answer = client.post(&path(&access), &[], &image).await;
    // A text-only model is told that there was one. A refusal would hit every later call too.
    assert_eq!(answer.status(), 200, "{}", answer.text());
    assert!(world.gateway.metrics_text().contains("images_total 1"));

    let status = world.status("r");
    assert_eq!((status.refused, status.last_fault), (3, None));
    assert_eq!(
        client.post(&path(&access), &[], &ask("x")).await.status(),
        200
    );
}

#[tokio::test]
async fn bodies_in_memory_are_limited() {
    let config = Config {
        bodies_bytes_max: 100_000,
        ..config()
    };
    let world = World::with(config, Options::default()).await;
    let access = world.open("r");
    let mut client = Client::tcp(world.address()).await;
    let large = ask(&"x".repeat(200_000));
    let answer = client.post(&path(&access), &[], &large).await;
    assert_eq!(answer.status(), 503);
    assert!(
        world
            .gateway
            .metrics_text()
            .contains("refused_total{cause=\"bodies_full\"} 1")
    );
    // The share was given back.
    for number in 0..10 {
        let request = ask(&format!("{number}{}", " ".repeat(1000)));
        assert_eq!(
            client.post(&path(&access), &[], &request).await.status(),
            200
        );
    }
}

#[tokio::test]
async fn a_prompt_that_does_not_fit_gets_the_shape_that_harnesses_know() {
    let world = World::new().await;
    let access = world.open("r");
    let mut client = Client::tcp(world.address()).await;
    for (text, stream) in [
        // Encoded, then found too long.
        ("word ".repeat(CONTEXT as usize), false),
        // Early headers do not hide the status.
        ("term ".repeat(CONTEXT as usize), true),
        // 50 MB: refused without being encoded.
        ("x ".repeat(25 << 20), false),
    ] {
        let mut request = ask(&text);
        request["stream"] = json!(stream);
        let answer = client.post(&path(&access), &[], &request).await;
        assert_eq!(answer.status(), 400);
        assert_eq!(answer.code(), "context_length_exceeded");
        assert!(answer.text().contains("prompt is too long"));
    }
    assert_eq!(world.engine.asked(), 0);
    let calls = world.quiet("r").await;
    assert_eq!(calls.len(), 3);
    for call in &calls {
        assert!(
            matches!(
                call.attempts[0].outcome,
                AttemptOutcome::TooLong {
                    context_tokens_max: CONTEXT,
                    ..
                }
            ),
            "{:?}",
            call.attempts
        );
    }
    let status = world.status("r");
    assert_eq!((status.too_long, status.last_fault), (3, None));
}

#[tokio::test]
async fn limits_of_calls_have_names() {
    let config = Config {
        calls_in_flight_max: 1,
        ..config()
    };
    let world = World::with(config, Options::default()).await;
    let access = world
        .gateway
        .open(gateway::Open {
            calls_max: 2,
            ..rollout("r")
        })
        .unwrap();
    world.engine.hold();
    let mut first = Client::tcp(world.address()).await;
    first
        .send("POST", &path(&access), &[], ask("a").to_string().as_bytes())
        .await
        .unwrap();
    world.until("r", |status| status.calls == 1).await;
    let mut client = Client::tcp(world.address()).await;
    let answer = client.post(&path(&access), &[], &ask("b")).await;
    assert_eq!(answer.status(), 429);
    assert_eq!(answer.head.header("retry-after"), Some("1"));
    world.engine.release();
    assert_eq!(first.answer().await.unwrap().status(), 200);
    world.quiet("r").await;

    assert_eq!(
        client.post(&path(&access), &[], &ask("b")).await.status(),
        200
    );
    world.quiet("r").await;
    let answer = client.post(&path(&access), &[], &ask("c")).await;
    assert_eq!(
        (answer.status(), answer.code().as_str()),
        (401, "calls_max")
    );
    assert!(world.status("r").calls_max_hit);
    let metrics = world.gateway.metrics_text();
    assert!(metrics.contains("refused_total{cause=\"calls_max\"} 1"));
    assert!(metrics.contains("refused_total{cause=\"in_flight_max\"} 1"));
}

#[tokio::test]
async fn wishes_count_only_within_the_rollouts_settings() {
    let world = World::new().await;
    let base = Sampling {
        temperature: 0.7,
        tokens_max: 50,
        ..Sampling::default()
    };
    let mut request = ask("x");
    request["temperature"] = json!(0.1);
    request["max_tokens"] = json!(1000);
    request["seed"] = json!(99);
    request["top_p"] = json!(0.5);
    let mut client = Client::tcp(world.address()).await;
    for (name, fixed) in [("free", false), ("fixed", true)] {
        let access = world
            .gateway
            .open(gateway::Open {
                sampling: base.clone(),
                sampling_fixed: fixed,
                ..rollout(name)
            })
            .unwrap();
        assert_eq!(
            client.post(&path(&access), &[], &request).await.status(),
            200
        );
        let used = world.quiet(name).await[0].sampling.clone();
        assert_eq!(used.tokens_max, 50);
        assert!(!used.stop_ids.is_empty());
        let expected = if fixed {
            (0.7, 1.0, call_seed(7, 0))
        } else {
            (0.1, 0.5, 99)
        };
        assert_eq!((used.temperature, used.top_p, used.seed), expected);
    }
}

#[tokio::test]
async fn concurrent_calls_of_one_rollout_are_separate_calls() {
    let world = World::new().await;
    let access = world.open("r");
    world.engine.hold();
    let mut clients = Vec::new();
    for number in 0..8 {
        let mut client = Client::tcp(world.address()).await;
        let request = ask(&format!("question {number}")).to_string();
        client
            .send("POST", &path(&access), &[], request.as_bytes())
            .await
            .unwrap();
        clients.push(client);
    }
    world.until("r", |status| status.in_flight == 8).await;
    world.engine.release();
    for (number, client) in clients.iter_mut().enumerate() {
        let answer = client.answer().await.unwrap();
        let said = answer.message()["content"].as_str().unwrap().to_owned();
        assert_eq!(said, format!("turn 0 on question {number}"));
    }
    let calls = world.quiet("r").await;
    let indices: Vec<u32> = calls.iter().map(|call| call.id.index).collect();
    assert_eq!(indices, [0, 1, 2, 3, 4, 5, 6, 7]);
    for call in &calls {
        assert_eq!(call.sampling.seed, call_seed(7, call.id.index));
    }
}

/// A reply as a harness sends it back: arguments printed anew, other ids, empty content for null.
fn echoed(message: &Value) -> Value {
    let mut echo = message.clone();
    for (number, call) in echo["tool_calls"]
        .as_array_mut()
        .into_iter()
        .flatten()
        .enumerate()
    {
        let text = call["function"]["arguments"].as_str().unwrap();
        let arguments: serde_json::Map<String, Value> = serde_json::from_str(text).unwrap();
        let mut reversed: Vec<_> = arguments.into_iter().collect();
        reversed.reverse();
        let spaced: Vec<String> = reversed
            .iter()
            .map(|(name, value)| format!("{}  :  {value}", json!(name)))
            .collect();
        call["function"]["arguments"] = json!(format!("{{ {} }}", spaced.join(" ,\n")));
        call["id"] = json!(format!("other{number}"));
    }
    echo
}

#[tokio::test]
async fn prompts_continue_exactly_whatever_the_harness_did_to_the_echo() {
    let world = World::new().await;
    let access = world.open("r");
    let mut client = Client::tcp(world.address()).await;
    let mut messages = vec![
        json!({"role": "system", "content": "You help."}),
        json!({"role": "user", "content": "start"}),
    ];
    for turn in 0..4 {
        let request = json!({"model": "m", "tools": tools(), "messages": messages});
        let answer = client.post(&path(&access), &[], &request).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let reply = answer.message();
        assert_eq!(reply["tool_calls"].as_array().unwrap().len(), 1);
        let echo = echoed(&reply);
        let id = echo["tool_calls"][0]["id"].clone();
        messages.push(echo);
        messages
            .push(json!({"role": "tool", "tool_call_id": id, "content": format!("out {turn}\n")}));
    }
    let calls = world.quiet("r").await;
    assert_eq!(calls.len(), 4);
    for pair in calls.windows(2) {
        let mut before = pair[0].prompt_ids.clone();
        before.extend(&pair[0].generation.as_ref().unwrap().token_ids);
        assert!(
            pair[1].prompt_ids.starts_with(&before),
            "call {} is not continued",
            pair[0].id
        );
        let continuation = &pair[1].continuation;
        assert_eq!(continuation.parent, Some(pair[0].id.index));
        assert_eq!(continuation.exact as usize, before.len());
        assert_eq!(continuation.echoes_foreign, 0);
    }
}

#[tokio::test]
async fn a_unix_socket_serves_the_same_and_replaces_a_stale_one() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("gateway.sock");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let unix = Config {
        listen: vec![Listen::Unix(socket.clone())],
        ..config()
    };
    let world = World::with(unix.clone(), Options::default()).await;
    let access = world.open("r");
    let mut client = Client::unix(&socket).await;
    assert_eq!(
        client.post(&path(&access), &[], &ask("x")).await.status(),
        200
    );

    let other = tempfile::tempdir().unwrap();
    let codec = support::codec();
    let taken = gateway::Gateway::start(
        unix,
        support::Puppet::new(&codec),
        codec,
        ledger::Ledger::create(other.path()).unwrap(),
    )
    .await
    .unwrap_err();
    assert!(
        taken.to_string().contains("the address is in use"),
        "{taken}"
    );

    drop(client);
    world.gateway.shutdown(Duration::from_secs(30)).await;
    assert!(!support::exists(&socket));
}

#[tokio::test]
async fn a_taken_port_is_named() {
    let world = World::new().await;
    let address = world.address();
    let other = tempfile::tempdir().unwrap();
    let codec = support::codec();
    let config = Config {
        listen: vec![Listen::Tcp(address)],
        ..config()
    };
    let taken = gateway::Gateway::start(
        config,
        support::Puppet::new(&codec),
        codec,
        ledger::Ledger::create(other.path()).unwrap(),
    )
    .await
    .unwrap_err()
    .to_string();
    assert!(taken.contains(&address.to_string()), "{taken}");
    assert!(taken.contains("the address is in use"), "{taken}");
}
