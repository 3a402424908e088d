//! No log line has a key, at any level, whatever goes wrong. The one test of this program, because
//! it collects what the whole process logs.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use engine::EngineError;
use engine::remote::{Endpoint, Facts, text::Text};
use gateway::{Admin, Config, LocalAddr};
use ledger::Options;
use serde_json::json;
use support::client::Client;
use support::{World, ask, config, id, path, rollout, streamed};

const KEY: &str = "rollout-key-0123456789";
const TOKEN: &str = "admin-token-0123456789";
const ENGINE_KEY: &str = "engine-key-0123456789";

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn no_key_is_logged_at_any_level() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .init();

    let config = Config {
        admin: Some(Admin {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            token: TOKEN.into(),
        }),
        ..config()
    };
    let shown = format!("{config:?}");
    let world = World::with(config, Options::default()).await;
    let open = gateway::Open {
        key: Some(KEY.into()),
        ..rollout("r")
    };
    let shown = format!("{shown} {open:?}");
    let access = world.gateway.open(open).unwrap();
    let mut client = Client::tcp(world.address()).await;
    let bearer = format!("Bearer {KEY}");
    let bare = "/v1/chat/completions";
    client.post(&path(&access), &[], &ask("a")).await;
    client
        .post(bare, &[("authorization", &bearer)], &ask("b"))
        .await;
    client
        .post(bare, &[("x-api-key", KEY)], &streamed(ask("c")))
        .await;
    client
        .post(bare, &[("x-goog-api-key", KEY)], &ask("d"))
        .await;
    // Failures of every kind are logged with what they know.
    world
        .engine
        .fail_next(EngineError::Gone("no power".to_owned()));
    client.post(&path(&access), &[], &ask("e")).await;
    client
        .post(&path(&access), &[], &json!({"messages": KEY}))
        .await;
    let two_keys = [("authorization", "Bearer another-key-0123456789")];
    client.post(&path(&access), &two_keys, &ask("f")).await;
    client
        .post(&format!("/r/{KEY}/v1/dream"), &[], &json!({}))
        .await;
    let mut client = Client::tcp(world.address()).await;
    client
        .send("POST", &path(&access), &[], ask("g").to_string().as_bytes())
        .await
        .unwrap();
    drop(client);
    world.quiet("r").await;

    let admin = world
        .gateway
        .local_addrs()
        .iter()
        .find_map(|address| match address {
            LocalAddr::Admin(address) => Some(*address),
            _ => None,
        });
    let mut api = Client::tcp(admin.unwrap()).await;
    let bearer = format!("Bearer {TOKEN}");
    api.get("/v1/rollouts/r", &[("authorization", &bearer)])
        .await;
    api.get("/v1/rollouts/r", &[("authorization", "Bearer wrong")])
        .await;
    api.get("/metrics", &[("authorization", &bearer)]).await;

    let endpoint = Endpoint {
        api_key: Some(ENGINE_KEY.into()),
        timeout: Duration::from_secs(5),
        // Nobody listens on port 1.
        ..Endpoint::new("http://127.0.0.1:1/v1")
    };
    let shown = format!("{shown} {endpoint:?} {access:?} {:?}", world.gateway);
    let facts = Facts {
        context_tokens_max: 100,
        vocabulary: 100,
        policy_version: 0,
    };
    let writer = Arc::new(wire::chat::request_body);
    let voice = Arc::new(|_: &record::Message| Ok(vec![1]));
    let text = Text::new(endpoint.clone(), facts, "m", writer, voice).unwrap();
    let shown = format!("{shown} {text:?}");
    let error = Text::only_model(endpoint).await.unwrap_err();
    tracing::error!(%error, ?text, "an engine that is not there");
    world.settle("r", Duration::from_secs(5)).await;
    world.gateway.close(&id("r"));
    world.gateway.shutdown(Duration::from_secs(5)).await;

    let logged = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(
        logged.contains("an engine that is not there"),
        "the log is heard"
    );
    for (what, text) in [("the log", &logged), ("what is printed of values", &shown)] {
        for secret in [KEY, TOKEN, ENGINE_KEY] {
            assert!(!text.contains(secret), "{what} has {secret}: {text}");
        }
    }
}
