//! Many rollouts at once, with failures on both sides from a seed: clients that go away, come
//! back, edit, ask twice; an engine that fails, is full, falls silent. What is counted on one side
//! must be what the other side saw, and memory must stay flat.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use engine::{Engine, EngineError, Info, Request};
use gateway::{Config, Gateway, LocalAddr, Status};
use ledger::Ledger;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use record::{AttemptOutcome, Call, Generation, PolicyVersion};
use serde_json::json;
use support::client::Client;
use support::{PATIENCE, Puppet, config, id, rollout_of};

const ROLLOUTS: usize = 256;
const TURNS_MAX: usize = 6;

/// The scripted engine with seeded faults.
#[derive(Debug)]
struct Faulty {
    inner: Arc<Puppet>,
    seed: u64,
    asked: AtomicU64,
    failed: AtomicU64,
    answered: AtomicU64,
}

#[async_trait]
impl Engine for Faulty {
    fn info(&self) -> Info {
        self.inner.info()
    }

    fn policy_version(&self) -> PolicyVersion {
        self.inner.policy_version()
    }

    async fn generate(&self, request: Request) -> Result<Generation, EngineError> {
        let number = self.asked.fetch_add(1, Relaxed);
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ number);
        let result = match random.random_range(0..100) {
            0..4 => Err(EngineError::Gone("a seeded fault".to_owned())),
            4..8 => Err(EngineError::Busy { waiting: 1 }),
            8..10 => {
                // Longer than some clients wait.
                tokio::time::sleep(Duration::from_millis(random.random_range(1..50))).await;
                self.inner.answer(request).await
            }
            _ => self.inner.answer(request).await,
        };
        match &result {
            Ok(_) => self.answered.fetch_add(1, Relaxed),
            Err(_) => self.failed.fetch_add(1, Relaxed),
        };
        result
    }
}

/// What the clients of one rollout saw.
#[derive(Debug, Default)]
struct Saw {
    posts: u32,
    answers: u32,
}

/// One rollout of a harness with bad habits and a bad network.
async fn live(address: std::net::SocketAddr, path: String, seed: u64) -> Saw {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut saw = Saw::default();
    let mut client = Client::tcp(address).await;
    let filler = "x".repeat(random.random_range(0..2000));
    let mut request = json!({"model": "m", "tools": support::tools(),
        "messages": [{"role": "user", "content": format!("go {seed} {filler}")}]});
    for turn in 0..random.random_range(1..=TURNS_MAX) {
        let mut body = request.clone();
        let message = loop {
            assert!(saw.posts < 400, "rollout {seed} gets nowhere");
            body["stream"] = json!(random.random_bool(0.5));
            saw.posts += 1;
            let bytes = body.to_string();
            client
                .send("POST", &path, &[], bytes.as_bytes())
                .await
                .unwrap();
            if random.random_bool(0.06) {
                // Goes away, and comes back as some clients do.
                client = Client::tcp(address).await;
                if random.random_bool(0.3) {
                    let list = body["messages"].as_array_mut().unwrap();
                    list.push(json!({"role": "assistant", "content": ""}));
                }
                continue;
            }
            let answer = client.answer().await.unwrap();
            if answer.status() == 200 {
                saw.answers += 1;
                break if body["stream"] == true {
                    support::reassemble(&answer.text()).0
                } else {
                    answer.message()
                };
            }
            assert!(matches!(answer.status(), 429 | 503), "{}", answer.text());
        };
        let list = request["messages"].as_array_mut().unwrap();
        let calls = message["tool_calls"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        list.push(message);
        for call in calls {
            list.push(json!({"role": "tool", "tool_call_id": call["id"], "content": format!("ok {turn}")}));
        }
    }
    saw
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// What the ledger has of a rollout must be what was counted, and what the clients saw.
fn conserved(status: &Status, calls: &[Call], saw: &Saw) {
    assert_eq!(status.calls as usize, calls.len());
    let attempts: usize = calls.iter().map(|call| call.attempts.len()).sum();
    assert_eq!(status.attempts as usize, attempts);
    // A client may be gone before its request was read.
    assert!(status.attempts + status.refused <= saw.posts);
    let ended = |wanted: fn(&AttemptOutcome) -> bool| {
        let all = calls.iter().flat_map(|call| &call.attempts);
        all.filter(|attempt| wanted(&attempt.outcome)).count() as u32
    };
    let delivered = ended(|outcome| *outcome == AttemptOutcome::Delivered);
    // A client may go away after the kernel took the reply: delivered, but not seen.
    assert!(
        delivered >= saw.answers,
        "{delivered} delivered, {} seen",
        saw.answers
    );
    assert_eq!(
        ended(|outcome| *outcome == AttemptOutcome::ClientGone),
        status.client_gone
    );
    for (index, call) in calls.iter().enumerate() {
        assert_eq!(call.id.index as usize, index);
        if call.delivered() {
            let generation = call.generation.as_ref().unwrap();
            generation.check().unwrap();
        }
        // Every turn goes on from the one before, whatever was lost in between (I2).
        if index > 0 && call.generation.is_some() {
            assert_eq!(call.continuation.echoes_foreign, 0, "{}", call.id);
        }
    }
    assert_eq!(status.in_flight, 0);
}

async fn soak(limit: Duration) {
    let seed = std::env::var("ESPALIER_SOAK_SEED").ok();
    let seed: u64 = seed.and_then(|text| text.parse().ok()).unwrap_or(1);
    println!("ESPALIER_SOAK_SEED={seed}");
    let dir = tempfile::tempdir().unwrap();
    let codec = support::codec();
    let engine = Arc::new(Faulty {
        inner: Puppet::with_context(&codec, 1 << 20),
        seed,
        asked: AtomicU64::new(0),
        failed: AtomicU64::new(0),
        answered: AtomicU64::new(0),
    });
    let ledger = Ledger::create(dir.path()).unwrap();
    let config = Config {
        closed_kept_max: 64,
        ..config()
    };
    let shared: Arc<dyn Engine> = Arc::<Faulty>::clone(&engine);
    let gateway = Gateway::start(config, shared, codec, ledger.clone())
        .await
        .unwrap();
    let Some(LocalAddr::Tcp(address)) = gateway.local_addrs().first().cloned() else {
        panic!("no address");
    };
    let (started, mut round) = (Instant::now(), 0_u64);
    let (mut calls_total, mut generations) = (0_usize, 0_u64);
    let mut resident = Vec::new();
    let mut attempts_total = 0_usize;
    while round < 3 || started.elapsed() < limit {
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..ROLLOUTS {
            let name = format!("r{round}.{number}");
            let access = gateway.open(rollout_of(&name, 1000)).unwrap();
            let path = support::path(&access);
            let seed = seed ^ (round << 32) ^ number as u64;
            tasks.spawn(async move { (name, live(address, path, seed).await) });
        }
        while let Some(ended) = tasks.join_next().await {
            let (name, saw) = ended.unwrap();
            let status = gateway
                .settle(&id(&name), Duration::ZERO, PATIENCE)
                .await
                .unwrap();
            assert!(status.settled, "{name}: {status:?}");
            let calls = ledger.calls(&id(&name)).unwrap();
            conserved(&status, &calls, &saw);
            calls_total += calls.len();
            attempts_total += status.attempts as usize;
            generations += calls
                .iter()
                .filter(|call| call.generation.is_some())
                .count() as u64;
            gateway.close(&id(&name));
            // The ledger's own growth is not what is measured here.
            ledger.forget(&id(&name)).await.unwrap();
        }
        round += 1;
        // What is made once is there after two rounds.
        if round >= 2 {
            resident.push(resident_bytes());
        }
    }
    // The peak of the first half against that of the second: a leak shows in long runs, and what an
    // allocator keeps for a while does not.
    let (early, late) = resident.split_at(resident.len().div_ceil(2));
    let peak = |part: &[u64]| part.iter().copied().max().unwrap_or(0);
    let (early, late) = (peak(early), peak(late));
    println!(
        "{round} rounds of {ROLLOUTS} rollouts, {calls_total} calls, {} asked of the engine, {} of them failed, {:.0} s, resident at most {} MB in the first half, {} MB in the second",
        engine.asked.load(Relaxed),
        engine.failed.load(Relaxed),
        started.elapsed().as_secs_f64(),
        early >> 20,
        late >> 20,
    );
    // Nothing was cancelled: every generation is in the record, and there once.
    let (answered, failed) = (engine.answered.load(Relaxed), engine.failed.load(Relaxed));
    assert_eq!(engine.asked.load(Relaxed), answered + failed);
    assert_eq!(generations, answered);
    let grown = late.saturating_sub(early);
    let allowed = match resident.len() {
        0..20 => (early / 4).max(64 << 20),
        _ => (early / 10).max(16 << 20),
    };
    assert!(grown < allowed, "memory grew by {} MB", grown >> 20);
    let metrics = gateway.metrics_text();
    // What the gateway counted over all rollouts is what it told of each, and what the ledger had.
    let counted = |name: &str| -> usize {
        let name = format!("espalier_gateway_{name}");
        let lines = metrics.lines().filter(|line| line.starts_with(&name));
        lines
            .map(|line| line.rsplit(' ').next().unwrap().parse::<usize>().unwrap())
            .sum()
    };
    assert_eq!(counted("calls_total "), calls_total);
    let retries = counted("retries_total{");
    assert_eq!(calls_total + retries, attempts_total);
    assert!(metrics.contains("requests_in_flight 0"), "{metrics}");
    assert!(metrics.contains("rollouts_open 0"), "{metrics}");
    gateway.shutdown(PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_are_conserved_and_memory_is_flat() {
    soak(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "long: ten minutes"]
async fn calls_are_conserved_and_memory_is_flat_for_long() {
    soak(Duration::from_secs(600)).await;
}
