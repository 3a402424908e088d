//! An engine on strings, a gateway around it, and a client that shows every byte.
#![allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "shared by tests and an example, each uses a part"
)]

pub mod client;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use engine::scripted::{Script, Scripted, Voice};
use engine::{Engine, EngineError, Hint, Info, Request};
use gateway::{Access, Config, Gateway, Listen, LocalAddr, Open, Status};
use ledger::{Ledger, Options};
use record::{
    Call, Generation, GroupId, Message, PolicyVersion, Role, RolloutId, RolloutSpec, Sampling,
    TaskId, ToolCall,
};
use serde_json::{Value, json};
use tokio::sync::Notify;

pub const CONTEXT: u32 = 4096;
/// Nothing in these tests takes so long on the slowest machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn codec() -> Arc<codec::Codec> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../policy");
    Arc::new(codec::Codec::load(&dir).unwrap())
}

/// Says how many assistant turns there were, and calls a tool unless the user said "stop". The
/// first user text may ask it to "think", to call "twice", and to do so "silently".
#[derive(Debug)]
pub struct Counter;

impl Script for Counter {
    fn reply(&self, hint: &Hint) -> Result<Message, EngineError> {
        let turns = hint
            .conversation
            .messages
            .iter()
            .filter(|message| message.role == Role::Assistant)
            .count();
        let last = hint
            .conversation
            .messages
            .last()
            .map(Message::text_content)
            .unwrap_or_default();
        let mut message = Message::text(Role::Assistant, format!("turn {turns} on {last}"));
        let first = hint
            .conversation
            .messages
            .iter()
            .find(|message| message.role == Role::User);
        let asked = first.map(Message::text_content).unwrap_or_default();
        if asked.contains("think") {
            message.reasoning = Some(format!("Thought {turns}."));
        }
        if asked.contains("silently") {
            message.content.clear();
        }
        if !last.contains("stop") && !hint.conversation.tools.is_empty() {
            for _ in 0..if asked.contains("twice") { 2 } else { 1 } {
                message.tool_calls.push(ToolCall {
                    id: String::new(),
                    name: "bash".to_owned(),
                    arguments: json!({"command": format!("echo \"{turns}\""), "timeout": 1.0}),
                });
            }
        }
        Ok(message)
    }

    fn logprob(&self, _hint: &Hint) -> Option<f32> {
        Some(-0.5)
    }
}

/// The scripted engine, which a test can hold and break.
#[derive(Debug)]
pub struct Puppet {
    inner: Scripted,
    held: AtomicBool,
    released: Notify,
    failures: Mutex<VecDeque<EngineError>>,
    asked: AtomicUsize,
    version: AtomicU64,
    pub requests: Mutex<Vec<Request>>,
}

impl Puppet {
    pub fn new(codec: &Arc<codec::Codec>) -> Arc<Self> {
        Self::with_context(codec, CONTEXT)
    }

    pub fn with_context(codec: &Arc<codec::Codec>, context: u32) -> Arc<Self> {
        let speaker = Arc::clone(codec);
        let voice: Voice = Arc::new(move |message| {
            let text = speaker.speak(message).map_err(|error| error.to_string())?;
            speaker.encode(&text).map_err(|error| error.to_string())
        });
        Arc::new(Self {
            inner: Scripted::new(
                "counter",
                Arc::new(Counter),
                voice,
                context,
                codec.vocabulary(),
            ),
            held: AtomicBool::new(false),
            released: Notify::new(),
            failures: Mutex::default(),
            asked: AtomicUsize::new(0),
            version: AtomicU64::new(0),
            requests: Mutex::default(),
        })
    }

    /// From now on requests wait.
    pub fn hold(&self) {
        self.held.store(true, Ordering::SeqCst);
    }

    /// Lets all of them go on.
    pub fn release(&self) {
        self.held.store(false, Ordering::SeqCst);
        self.released.notify_waiters();
    }

    /// Answers without remembering what was asked: for tests that ask very often.
    pub async fn answer(&self, request: Request) -> Result<Generation, EngineError> {
        self.inner.generate(request).await
    }

    pub fn fail_next(&self, error: EngineError) {
        self.failures.lock().unwrap().push_back(error);
    }

    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl Engine for Puppet {
    fn info(&self) -> Info {
        self.inner.info()
    }

    fn policy_version(&self) -> PolicyVersion {
        self.version.load(Ordering::SeqCst)
    }

    async fn load_weights(&self, folder: &Path, version: PolicyVersion) -> Result<(), EngineError> {
        if folder.ends_with("missing") {
            return Err(EngineError::Invalid("no such folder".to_owned()));
        }
        self.version.store(version, Ordering::SeqCst);
        Ok(())
    }

    async fn generate(&self, request: Request) -> Result<Generation, EngineError> {
        self.requests.lock().unwrap().push(request.clone());
        self.asked.fetch_add(1, Ordering::SeqCst);
        loop {
            let released = self.released.notified();
            if !self.held.load(Ordering::SeqCst) {
                break;
            }
            released.await;
        }
        let failure = self.failures.lock().unwrap().pop_front();
        if let Some(error) = failure {
            return Err(error);
        }
        let mut generation = self.inner.generate(request).await?;
        for span in &mut generation.policy {
            span.version = self.policy_version();
        }
        Ok(generation)
    }
}

/// A gateway with everything that it needs.
pub struct World {
    pub gateway: Gateway,
    pub engine: Arc<Puppet>,
    pub ledger: Ledger,
    pub dir: tempfile::TempDir,
}

pub fn config() -> Config {
    Config {
        listen: vec![Listen::Tcp(SocketAddr::from(([127, 0, 0, 1], 0)))],
        model: "tiny".to_owned(),
        // Early headers only where a test asks for them: no test may depend on how fast it runs.
        headers_after_ms: 60_000,
        ..Config::default()
    }
}

impl World {
    pub async fn new() -> Self {
        Self::with(config(), Options::default()).await
    }

    pub async fn with(config: Config, options: Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let codec = codec();
        let engine = Puppet::new(&codec);
        let ledger = Ledger::create_with(dir.path(), options).unwrap();
        let shared: Arc<dyn Engine> = Arc::<Puppet>::clone(&engine);
        let gateway = Gateway::start(config, shared, codec, ledger.clone())
            .await
            .unwrap();
        Self {
            gateway,
            engine,
            ledger,
            dir,
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.gateway
            .local_addrs()
            .iter()
            .find_map(|address| match address {
                LocalAddr::Tcp(address) => Some(*address),
                _ => None,
            })
            .unwrap()
    }

    pub fn open(&self, name: &str) -> Access {
        self.gateway.open(rollout(name)).unwrap()
    }

    pub fn status(&self, name: &str) -> Status {
        self.gateway.status(&id(name)).unwrap()
    }

    /// Waits until everything that happened is in the ledger.
    pub async fn quiet(&self, name: &str) -> Vec<Call> {
        self.until(name, |status| status.in_flight == 0).await;
        self.ledger.calls(&id(name)).unwrap()
    }

    pub async fn until(&self, name: &str, reached: impl Fn(&Status) -> bool) {
        until(|| reached(&self.status(name))).await;
    }

    pub async fn settle(&self, name: &str, limit: Duration) -> Status {
        self.gateway
            .settle(&id(name), Duration::ZERO, limit)
            .await
            .unwrap()
    }
}

pub async fn until(reached: impl Fn() -> bool) {
    tokio::time::timeout(PATIENCE, async {
        while !reached() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
}

pub fn id(name: &str) -> RolloutId {
    RolloutId::new(name).unwrap()
}

pub fn rollout(name: &str) -> Open {
    Open {
        sampling: Sampling::default(),
        calls_max: 100,
        ..Open::new(RolloutSpec {
            id: id(name),
            task: TaskId::new("t").unwrap(),
            group: GroupId::new("g").unwrap(),
            harness: "test".to_owned(),
            labels: BTreeMap::new(),
            seed: 7,
        })
    }
}

pub fn rollout_of(name: &str, calls_max: u32) -> Open {
    Open {
        calls_max,
        ..rollout(name)
    }
}

pub fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "bash", "description": "runs",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}])
}

pub fn ask(text: &str) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": text}]})
}

pub fn streamed(mut request: Value) -> Value {
    request["stream"] = json!(true);
    request
}

pub fn path(access: &Access) -> String {
    format!("{}/v1/chat/completions", access.path)
}

/// What an event stream says, put together as a client would.
pub fn reassemble(events: &str) -> (Value, Option<String>) {
    let mut message = json!({"role": "assistant", "content": null});
    let mut finish = None;
    let mut ended = false;
    for event in events.split("\n\n").filter(|event| !event.is_empty()) {
        if event.starts_with(':') {
            continue;
        }
        let data = event.strip_prefix("data: ").unwrap();
        if data == "[DONE]" {
            ended = true;
            continue;
        }
        let chunk: Value = serde_json::from_str(data).unwrap();
        let Some(choice) = chunk["choices"].get(0) else {
            continue;
        };
        if let Some(text) = choice["delta"]["content"].as_str() {
            let before = message["content"].as_str().unwrap_or_default();
            message["content"] = json!(format!("{before}{text}"));
        }
        if let Some(calls) = choice["delta"]["tool_calls"].as_array() {
            for call in calls {
                let mut call = call.clone();
                call.as_object_mut().unwrap().shift_remove("index");
                match message.get_mut("tool_calls").and_then(Value::as_array_mut) {
                    Some(list) => list.push(call),
                    None => message["tool_calls"] = json!([call]),
                }
            }
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            finish = Some(reason.to_owned());
        }
    }
    assert!(ended, "no [DONE] in {events}");
    (message, finish)
}

pub fn exists(path: &Path) -> bool {
    path.exists()
}
