//! Rollouts stick to an engine; a dead engine is taken out, and comes back. Time is virtual.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "tests"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use async_trait::async_trait;
use engine::{
    Engine, EngineError, Hint, Info, Queue, Request,
    pool::{Pool, Settings},
};
use record::{
    Conversation, FinishReason, Generation, GroupId, PolicySpan, PolicyVersion, RolloutId,
    RolloutSpec, Sampling, TaskId,
};

/// An engine whose one token says who it is.
#[derive(Debug)]
struct Fake {
    name: u32,
    dead: AtomicBool,
    /// Requests that fail although it is well.
    failures: AtomicUsize,
    holds: AtomicBool,
    loads: AtomicBool,
    version: AtomicU64,
    asked: AtomicUsize,
    queue: Mutex<Queue>,
}

impl Fake {
    fn new(name: u32) -> Arc<Self> {
        Arc::new(Self {
            name,
            dead: AtomicBool::new(false),
            failures: AtomicUsize::new(0),
            holds: AtomicBool::new(false),
            loads: AtomicBool::new(true),
            version: AtomicU64::new(0),
            asked: AtomicUsize::new(0),
            queue: Mutex::default(),
        })
    }

    fn alive(&self) -> Result<(), EngineError> {
        match self.dead.load(SeqCst) {
            true => Err(EngineError::Gone("no power".into())),
            false => Ok(()),
        }
    }
}

#[async_trait]
impl Engine for Fake {
    fn info(&self) -> Info {
        Info {
            name: format!("fake:{}", self.name),
            context_tokens_max: 100 + self.name,
            vocabulary: 10,
        }
    }

    fn policy_version(&self) -> PolicyVersion {
        self.version.load(SeqCst)
    }

    async fn generate(&self, _request: Request) -> Result<Generation, EngineError> {
        self.asked.fetch_add(1, SeqCst);
        if self.holds.load(SeqCst) {
            std::future::pending::<()>().await;
        }
        self.alive()?;
        if self.failures.load(SeqCst) > 0 {
            self.failures.fetch_sub(1, SeqCst);
            return Err(EngineError::Gone("a defect".into()));
        }
        Ok(Generation {
            token_ids: vec![self.name],
            logprobs_model: Vec::new(),
            logprobs_sampled: Vec::new(),
            policy: vec![PolicySpan {
                start: 0,
                version: self.policy_version(),
            }],
            finish: FinishReason::Stop,
            cached_tokens: 0,
        })
    }

    async fn health(&self) -> Result<(), EngineError> {
        self.alive()
    }

    fn queue(&self) -> Queue {
        *self.queue.lock().unwrap()
    }

    async fn load_weights(&self, _: &Path, version: PolicyVersion) -> Result<(), EngineError> {
        self.alive()?;
        if !self.loads.load(SeqCst) {
            return Err(EngineError::Gone("no such folder".into()));
        }
        self.version.store(version, SeqCst);
        Ok(())
    }
}

fn request(rollout: &str) -> Request {
    Request {
        prompt_ids: vec![1],
        sampling: Sampling::default(),
        hint: Some(Hint {
            rollout: Some(Arc::new(RolloutSpec {
                id: RolloutId::new(rollout).unwrap(),
                task: TaskId::new("t").unwrap(),
                group: GroupId::new("g").unwrap(),
                harness: "h".into(),
                labels: BTreeMap::new(),
                seed: 0,
            })),
            conversation: Arc::new(Conversation::default()),
        }),
    }
}

fn pool(count: u32) -> (Arc<Pool>, Vec<Arc<Fake>>) {
    let fakes: Vec<Arc<Fake>> = (0..count).map(Fake::new).collect();
    let engines = fakes
        .iter()
        .map(|fake| Arc::clone(fake) as Arc<dyn Engine>)
        .collect();
    (
        Arc::new(Pool::start(engines, Settings::default()).unwrap()),
        fakes,
    )
}

async fn who(pool: &Pool, rollout: &str) -> u32 {
    pool.generate(request(rollout)).await.unwrap().token_ids[0]
}

fn up(pool: &Pool) -> Vec<bool> {
    pool.members().iter().map(|member| member.up).collect()
}

/// Several rounds of health checks.
async fn a_while() {
    tokio::time::sleep(Duration::from_secs(60)).await;
}

#[tokio::test(start_paused = true)]
async fn rollouts_stick_and_spread() {
    let (pool, fakes) = pool(3);
    let mut homes = BTreeMap::new();
    for round in 0..4 {
        for rollout in 0..30 {
            let name = format!("r{rollout}");
            let engine = who(&pool, &name).await;
            assert_eq!(
                *homes.entry(name).or_insert(engine),
                engine,
                "round {round}"
            );
        }
    }
    assert_eq!(homes.values().collect::<BTreeSet<_>>().len(), 3);
    assert!(fakes.iter().all(|fake| fake.asked.load(SeqCst) == 40));
    // What fits into one must fit into all.
    assert_eq!(pool.info().context_tokens_max, 100);
}

#[tokio::test(start_paused = true)]
async fn a_dead_engine_is_taken_out_and_comes_back() {
    let (pool, fakes) = pool(2);
    let home = who(&pool, "r").await as usize;
    fakes[home].dead.store(true, SeqCst);
    // The call that finds out fails in a way that a harness repeats, and the repetition works.
    let error = pool.generate(request("r")).await.unwrap_err();
    assert!(matches!(error, EngineError::Gone(_)), "{error}");
    assert!(!up(&pool)[home]);
    assert_eq!(who(&pool, "r").await as usize, 1 - home);
    fakes[home].dead.store(false, SeqCst);
    a_while().await;
    assert_eq!(up(&pool), [true, true]);
    assert_eq!(pool.members()[home].outages, 1);
    // It stays where its history is by now.
    assert_eq!(who(&pool, "r").await as usize, 1 - home);
}

#[tokio::test(start_paused = true)]
async fn calls_on_an_engine_that_falls_silent_end_when_it_is_taken_out() {
    let (pool, fakes) = pool(2);
    let home = who(&pool, "r").await as usize;
    fakes[home].holds.store(true, SeqCst);
    let running = {
        let pool = Arc::clone(&pool);
        tokio::spawn(async move { pool.generate(request("r")).await })
    };
    a_while().await;
    assert!(!running.is_finished(), "a slow engine is not a dead one");
    assert_eq!(pool.members()[home].in_flight, 1);
    fakes[home].dead.store(true, SeqCst);
    let error = running.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("was taken out"), "{error}");
    assert_eq!(pool.members()[home].in_flight, 0);
    assert_eq!(who(&pool, "r").await as usize, 1 - home);
}

#[tokio::test(start_paused = true)]
async fn a_failed_request_alone_takes_nobody_out() {
    let (pool, fakes) = pool(1);
    fakes[0].failures.store(5, SeqCst);
    for _ in 0..5 {
        assert!(pool.generate(request("r")).await.is_err());
        assert_eq!(up(&pool), [true], "it answers its health check");
    }
    assert_eq!(who(&pool, "r").await, 0);
    fakes[0].dead.store(true, SeqCst);
    a_while().await;
    let error = pool.generate(request("r")).await.unwrap_err();
    assert!(
        error.to_string().contains("all 1 engines are out"),
        "{error}"
    );
    assert!(pool.health().await.is_err());
    assert_eq!(pool.members()[0].outages, 1);
}

#[tokio::test(start_paused = true)]
async fn no_engine_serves_with_weights_of_its_own() {
    let (pool, fakes) = pool(2);
    pool.load_weights(Path::new("w1"), 1).await.unwrap();
    assert_eq!(pool.policy_version(), 1);
    fakes[1].loads.store(false, SeqCst);
    pool.load_weights(Path::new("w2"), 2).await.unwrap();
    assert_eq!(up(&pool), [true, false]);
    assert_eq!(pool.policy_version(), 2);
    // Well again, but still with the old weights: it stays out.
    a_while().await;
    assert_eq!(up(&pool), [true, false]);
    fakes[1].loads.store(true, SeqCst);
    a_while().await;
    assert_eq!(up(&pool), [true, true]);
    assert_eq!(fakes[1].version.load(SeqCst), 2);
    // When none could load them, nothing has changed.
    for fake in &fakes {
        fake.loads.store(false, SeqCst);
    }
    assert!(pool.load_weights(Path::new("w3"), 3).await.is_err());
    assert_eq!((pool.policy_version(), up(&pool)), (2, vec![true, true]));
}

#[tokio::test(start_paused = true)]
async fn the_queue_of_all_is_the_sum_over_those_that_are_served() {
    let (pool, fakes) = pool(3);
    assert_eq!(pool.queue(), Queue::default(), "nobody can tell");
    let says = |fake: &Fake, waiting, degraded, failures| {
        *fake.queue.lock().unwrap() = Queue {
            waiting,
            degraded,
            failures,
        };
    };
    says(&fakes[0], Some(3), None, 1);
    says(&fakes[1], Some(4), None, 0);
    says(&fakes[2], None, Some("queue-unknown"), 2);
    let all = pool.queue();
    assert_eq!((all.waiting, all.failures), (Some(7), 3));
    assert_eq!(all.degraded, Some("queue-unknown"), "7 is a lower bound");
    fakes[0].dead.store(true, SeqCst);
    fakes[2].dead.store(true, SeqCst);
    a_while().await;
    let rest = pool.queue();
    assert_eq!((rest.waiting, rest.degraded), (Some(4), None));
}

#[tokio::test(start_paused = true)]
async fn rollouts_beyond_the_limit_are_placed_anew() {
    let fakes: Vec<Arc<Fake>> = (0..2).map(Fake::new).collect();
    let engines = fakes
        .iter()
        .map(|fake| Arc::clone(fake) as Arc<dyn Engine>)
        .collect();
    let settings = Settings {
        rollouts_kept_max: 1,
        ..Settings::default()
    };
    let pool = Pool::start(engines, settings).unwrap();
    let first = who(&pool, "a").await;
    assert_ne!(who(&pool, "b").await, first);
    // `a` was forgotten: the engine with the fewest requests takes it.
    who(&pool, "c").await;
    assert_ne!(who(&pool, "a").await, first);
    assert!(Pool::start(Vec::new(), Settings::default()).is_err());
}
