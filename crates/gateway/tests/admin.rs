//! The admin API as another orchestrator would use it.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::net::SocketAddr;

use gateway::{Admin, Config, LocalAddr};
use ledger::Options;
use record::{Disposition, Fault};
use serde_json::{Value, json};
use support::client::{Answer, Client};
use support::{World, ask, config, id};

const TOKEN: &str = "a token of some length";

struct Api {
    client: Client,
    bearer: String,
}

impl Api {
    async fn post(&mut self, path: &str, body: Value) -> Answer {
        let bearer = self.bearer.clone();
        let headers = [
            ("authorization", bearer.as_str()),
            ("content-type", "application/json"),
        ];
        self.client.post(path, &headers, &body).await
    }

    async fn get(&mut self, path: &str) -> Answer {
        let bearer = self.bearer.clone();
        self.client
            .get(path, &[("authorization", bearer.as_str())])
            .await
    }
}

async fn start() -> (World, Api) {
    let config = Config {
        admin: Some(Admin {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            token: TOKEN.into(),
        }),
        ..config()
    };
    let world = World::with(config, Options::default()).await;
    let address = world
        .gateway
        .local_addrs()
        .iter()
        .find_map(|address| match address {
            LocalAddr::Admin(address) => Some(*address),
            _ => None,
        })
        .unwrap();
    let api = Api {
        client: Client::tcp(address).await,
        bearer: format!("Bearer {TOKEN}"),
    };
    (world, api)
}

#[tokio::test]
async fn a_rollout_from_opening_to_its_disposition() {
    let (world, mut api) = start().await;
    let opened = api
        .post(
            "/v1/rollouts",
            json!({"id": "r1", "task": "t1", "labels": {"step": "3"}, "limits": {"calls_max": 2},
                "sampling": {"temperature": 0.5}}),
        )
        .await;
    assert_eq!(opened.status(), 200, "{}", opened.text());
    let opened = opened.json();
    assert_eq!(opened["id"], "r1");
    let base = opened["base_url"].as_str().unwrap();
    let path = base
        .strip_prefix(&format!("http://{}", world.address()))
        .unwrap();

    let mut harness = Client::tcp(world.address()).await;
    let chat = format!("{path}/chat/completions");
    assert_eq!(harness.post(&chat, &[], &ask("x")).await.status(), 200);

    let settled = api
        .post(
            "/v1/rollouts/r1/settle",
            json!({"quiet_s": 0, "limit_s": 60}),
        )
        .await;
    assert_eq!(settled.json()["settled"], true, "{}", settled.text());
    let status = api.get("/v1/rollouts/r1").await.json();
    assert_eq!(status["calls"], 1);
    assert_eq!(status["in_flight"], 0);
    let calls = api.get("/v1/rollouts/r1/calls").await.json();
    assert_eq!(calls[0]["attempts"][0]["outcome"]["kind"], "delivered");

    let bad = api
        .post("/v1/rollouts/r1/close", json!({"reward": 1.5}))
        .await;
    assert_eq!(bad.status(), 400);
    let bad = api.post("/v1/rollouts/r1/close", json!({})).await;
    assert_eq!(bad.status(), 400);
    let closed = api
        .post("/v1/rollouts/r1/close", json!({"reward": 0.75}))
        .await;
    assert_eq!(closed.status(), 200, "{}", closed.text());
    let rollout = world.ledger.rollout(&id("r1")).unwrap().unwrap();
    assert_eq!(rollout.disposition, Some(Disposition::Train));
    assert_eq!(rollout.verdict.unwrap().reward, 0.75);
    assert_eq!(
        (rollout.calls, rollout.spec.labels["step"].as_str()),
        (1, "3")
    );
    assert_eq!(harness.post(&chat, &[], &ask("x")).await.status(), 401);
    let again = api.post("/v1/rollouts", json!({"id": "r1"})).await;
    assert_eq!(again.status(), 409, "{}", again.text());
}

#[tokio::test]
async fn a_rollout_without_a_call_is_never_a_reward() {
    let (world, mut api) = start().await;
    let opened = api.post("/v1/rollouts", json!({})).await.json();
    let name = opened["id"].as_str().unwrap();
    let path = format!("/v1/rollouts/{name}/close");
    let closed = api.post(&path, json!({"reward": 0.0})).await;
    assert_eq!(closed.json()["disposition"]["fault"], "no_calls");
    let rollout = world.ledger.rollout(&id(name)).unwrap().unwrap();
    assert!(matches!(
        rollout.disposition,
        Some(Disposition::Discard {
            fault: Fault::NoCalls,
            ..
        })
    ));
    assert_eq!(api.post(&path, json!({"reward": 1})).await.status(), 404);
}

#[tokio::test]
async fn weights_change_behind_a_pause() {
    let (world, mut api) = start().await;
    let paused = api.post("/v1/pause", json!({"drain_s": 5})).await;
    assert_eq!(paused.json(), json!({"paused": true, "drained": true}));
    let loaded = api
        .post("/v1/policy", json!({"folder": "step-7", "version": 7}))
        .await;
    assert_eq!(loaded.json(), json!({"version": 7, "engines": []}));
    assert_eq!(api.get("/v1/policy").await.json()["version"], 7);
    let failed = api
        .post("/v1/policy", json!({"folder": "missing", "version": 8}))
        .await;
    assert_eq!(failed.status(), 502);
    assert_eq!(
        api.post("/v1/policy", json!({"version": 8})).await.status(),
        400
    );
    assert_eq!(api.get("/v1/policy").await.json()["version"], 7);
    api.post("/v1/resume", json!({})).await;
    let limits = json!({"id": "b", "limits": {"generated_tokens_max": 0, "seconds_max": 900}});
    let opened = api.post("/v1/rollouts", limits).await.json();
    let mut harness = Client::tcp(world.address()).await;
    let chat = format!("{}/v1/chat/completions", opened["path"].as_str().unwrap());
    assert_eq!(
        harness.post(&chat, &[], &ask("x")).await.code(),
        "tokens_max"
    );
    assert_eq!(
        api.get("/v1/rollouts/b").await.json()["tokens_max_hit"],
        true
    );
}

#[tokio::test]
async fn the_token_is_needed_and_mistakes_are_named() {
    let (world, mut api) = start().await;
    assert_eq!(api.get("/healthz").await.json()["ok"], true);
    assert!(
        api.get("/metrics")
            .await
            .text()
            .contains("espalier_gateway_calls_total 0")
    );
    for body in [json!({"task": "a b"}), json!({"unknown": 1}), json!([])] {
        let answer = api.post("/v1/rollouts", body).await;
        assert_eq!(answer.status(), 400, "{}", answer.text());
    }
    assert_eq!(api.get("/v1/rollouts/none").await.status(), 404);
    assert_eq!(
        api.post("/v1/pause", json!({})).await.json()["paused"],
        true
    );
    assert_eq!(
        api.post("/v1/resume", json!({})).await.json()["paused"],
        false
    );

    api.bearer = "Bearer wrong".to_owned();
    for path in ["/v1/rollouts/none", "/metrics"] {
        assert_eq!(api.get(path).await.status(), 401);
    }
    assert_eq!(api.post("/v1/pause", json!({})).await.status(), 401);
    assert_eq!(api.get("/healthz").await.status(), 200);
    // Harnesses find nothing of this on their listener.
    let mut harness = Client::tcp(world.address()).await;
    let bearer = format!("Bearer {TOKEN}");
    let headers = [("authorization", bearer.as_str())];
    assert_eq!(harness.get("/metrics", &headers).await.status(), 404);
}
