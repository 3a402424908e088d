//! The pool over fake sandboxes, on a virtual clock.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::SeqCst},
};

use async_trait::async_trait;
use proptest::prelude::*;
use sandbox::{Exit, File, Output};

use super::*;
use crate::Pools;

/// What all fake sandboxes share.
#[derive(Debug, Default)]
struct World {
    alive: AtomicI64,
    most: AtomicI64,
    made: AtomicUsize,
    /// Making takes so long, in milliseconds.
    slow_ms: AtomicU64,
    refuses: AtomicBool,
    /// Sandboxes with these numbers do not live any more.
    dead: Mutex<BTreeSet<usize>>,
    specs: Mutex<Vec<Spec>>,
}

#[derive(Debug)]
struct Fake {
    world: Arc<World>,
    number: usize,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.world.alive.fetch_sub(1, SeqCst);
    }
}

#[derive(Debug)]
struct Maker(Arc<World>);

#[async_trait]
impl Provider for Maker {
    async fn create(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        let alive = self.0.alive.fetch_add(1, SeqCst) + 1;
        self.0.most.fetch_max(alive, SeqCst);
        // From here on it is undone when this is dropped.
        let made = Fake {
            world: Arc::clone(&self.0),
            number: self.0.made.fetch_add(1, SeqCst),
        };
        let name = spec.name.clone();
        self.0.specs.lock().unwrap().push(spec);
        tokio::time::sleep(Duration::from_millis(self.0.slow_ms.load(SeqCst))).await;
        if self.0.refuses.load(SeqCst) {
            let reason = "no room".into();
            return Err(SandboxError::Create { name, reason });
        }
        Ok(Box::new(made))
    }
}

#[async_trait]
impl Sandbox for Fake {
    async fn exec(&self, _: Exec) -> Result<Output, SandboxError> {
        if self.world.dead.lock().unwrap().contains(&self.number) {
            return Err(SandboxError::Gone {
                name: "warm".into(),
                reason: "node lost".into(),
            });
        }
        Ok(Output {
            exit: Exit::Code(0),
            // Tells its number.
            stdout: self.number.to_string().into_bytes(),
            stderr: Vec::new(),
            dropped_bytes: 0,
            out_of_memory: false,
            seconds: 0.0,
        })
    }

    async fn upload(&self, _: Vec<File>) -> Result<(), SandboxError> {
        Ok(())
    }

    async fn download(&self, _: PathBuf, _: u64) -> Result<Vec<File>, SandboxError> {
        Ok(Vec::new())
    }

    async fn destroy(self: Box<Self>) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn plenty() -> Option<f64> {
    Some(0.5)
}

fn scarce() -> Option<f64> {
    Some(MEMORY_FREE_MIN / 2.0)
}

struct Setting {
    world: Arc<World>,
    provider: Arc<dyn Provider>,
    warm: Warm,
    gauges: Arc<Gauges>,
    places: Arc<Places>,
}

fn setting(per_key: usize, total: usize, memory: fn() -> Option<f64>) -> Setting {
    let (world, gauges) = (Arc::new(World::default()), Arc::new(Gauges::default()));
    let settings = Settings {
        per_key,
        total,
        idle_s: 100,
    };
    let limits = Limits {
        make: Duration::from_secs(60),
        destroy: Duration::from_secs(30),
    };
    let pools = Pools {
        create: 3,
        ..Pools::default()
    };
    Setting {
        provider: Arc::new(Maker(Arc::clone(&world))),
        warm: Warm::new(settings, limits, Arc::clone(&gauges), memory),
        places: Arc::new(Places::new(&pools, 8, 60, &gauges)),
        gauges,
        world,
    }
}

/// What a job of this harness wants; the environment is the task's, the name the rollout's.
fn spec(of: u8) -> Spec {
    Spec {
        name: "s0001-t-react-k00".into(),
        gateway_port: 8000 + u16::from(of),
        env: BTreeMap::from([("TASK".into(), "1".into())]),
        ..Spec::default()
    }
}

impl Setting {
    fn begin(&self, jobs: &[u8]) {
        let wanted = jobs.iter().map(|of| key(&spec(*of), "react")).collect();
        self.warm.begin(&self.places, wanted);
        self.warm.look(&self.provider);
    }

    fn claim(&self, of: u8) -> Option<Claim> {
        let (key, _) = key(&spec(of), "react").unwrap();
        self.warm.claim(&key)
    }

    async fn take(&self, claim: Option<Claim>, of: u8) -> Option<Counted> {
        self.warm.take(claim, &spec(of), "react").await
    }

    fn counted(&self, line: &str) -> bool {
        self.gauges.text().lines().any(|own| own == line)
    }
}

async fn a_while(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_takes_what_stands_ready_and_it_knew_nothing_of_it() {
    let all = setting(2, 4, plenty);
    all.begin(&[0, 0, 0, 1]);
    a_while(1).await;
    assert_eq!(all.world.alive.load(SeqCst), 3, "two and one");
    for spec in all.world.specs.lock().unwrap().iter() {
        assert!(spec.name.starts_with("warm-") && spec.env.is_empty() && spec.files.is_empty());
        let deadline = Spec::default().limits.deadline_s + 100;
        assert_eq!(
            spec.limits.deadline_s, deadline,
            "it loses no time by waiting"
        );
    }
    let claim = all.claim(0);
    let taken = all.take(claim, 0).await.expect("it stands ready");
    a_while(1).await;
    assert_eq!(all.world.alive.load(SeqCst), 4, "another was made");
    drop(taken);
    // A job with services has sockets of its own.
    let own = Spec {
        forwards: vec![(9100, "/tmp/s".into())],
        ..spec(0)
    };
    assert!(all.warm.take(None, &own, "react").await.is_none());
    assert!(all.counted("espalier_rollout_warm_missed_total{reason=\"own_sockets\"} 1"));
    all.warm.close().await;
    assert_eq!(all.world.alive.load(SeqCst), 0);
    assert!(all.take(None, 0).await.is_none(), "it is closed");
}

#[tokio::test(start_paused = true)]
async fn a_dead_one_is_dropped_and_counted() {
    let all = setting(2, 4, plenty);
    all.begin(&[0, 0]);
    a_while(1).await;
    all.world.dead.lock().unwrap().extend([0, 1]);
    let (first, second) = (all.claim(0), all.claim(0));
    assert!(
        all.take(first, 0).await.is_none(),
        "both are dead: one is made"
    );
    a_while(1).await;
    assert_eq!(all.world.alive.load(SeqCst), 0);
    let (own, _) = key(&spec(0), "react").unwrap();
    let dropped = format!(
        "espalier_rollout_warm_dropped_total{{harness=\"react\",image=\"default\",key=\"{}\",reason=\"dead\"}} 2",
        own.digest
    );
    assert!(all.counted(&dropped), "{}", all.gauges.text());
    assert!(all.take(second, 0).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn one_that_was_made_for_another_gateway_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gateway.sock");
    let spec = Spec {
        gateway_socket: Some(path.clone()),
        ..spec(0)
    };
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let all = setting(1, 4, plenty);
    let begin = || {
        let wanted = (0..3).map(|_| key(&spec, "react")).collect();
        all.warm.begin(&all.places, wanted);
        all.warm.look(&all.provider);
    };
    begin();
    a_while(1).await;
    assert!(all.warm.take(None, &spec, "react").await.is_some());
    a_while(1).await;
    // It is held by what was made with it, so the new one is another inode.
    let held = std::fs::hard_link(&path, folder.path().join("held"));
    held.unwrap();
    std::fs::remove_file(&path).unwrap();
    drop(listener);
    let _another = std::os::unix::net::UnixListener::bind(&path).unwrap();
    assert!(all.warm.take(None, &spec, "react").await.is_none());
    a_while(1).await;
    assert!(all.warm.take(None, &spec, "react").await.is_some());
}

#[tokio::test(start_paused = true)]
async fn rollouts_come_first_and_memory_is_spared() {
    let all = setting(4, 8, plenty);
    let first = [
        all.places.create().await,
        all.places.create().await,
        all.places.create().await,
    ];
    all.begin(&[0; 8]);
    a_while(5).await;
    assert_eq!(all.world.made.load(SeqCst), 0, "rollouts have all places");
    drop(first);
    a_while(5).await;
    assert_eq!(all.world.alive.load(SeqCst), 4);
    assert_eq!(all.world.most.load(SeqCst), 4);
    let poor = setting(4, 8, scarce);
    poor.begin(&[0; 8]);
    a_while(5).await;
    assert_eq!(poor.world.made.load(SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn however_it_ends_nothing_is_left() {
    // Idle too long; jobs still wait, so new ones stand there.
    let all = setting(2, 4, plenty);
    all.begin(&[0, 0]);
    a_while(150).await;
    assert_eq!(all.world.made.load(SeqCst), 4);
    assert_eq!(all.world.alive.load(SeqCst), 2);
    // Stopped.
    all.warm.rest(true);
    a_while(1).await;
    assert_eq!(all.world.alive.load(SeqCst), 0);
    // The batch is over, and no other comes.
    all.begin(&[0, 0]);
    drop((all.claim(0), all.claim(0)));
    a_while(1).await;
    assert_eq!(all.world.alive.load(SeqCst), 0, "nobody waits");
    all.warm.rest(false);
    a_while(1).await;
    assert_eq!(all.world.alive.load(SeqCst), 2, "for the next batch");
    a_while(120).await;
    assert_eq!(all.world.alive.load(SeqCst), 0);
    // Dropped in the middle of making.
    all.world.slow_ms.store(10_000, SeqCst);
    all.begin(&[0, 0]);
    a_while(1).await;
    assert_eq!(all.world.alive.load(SeqCst), 2, "being made");
    let Setting { warm, world, .. } = all;
    drop(warm);
    tokio::task::yield_now().await;
    assert_eq!(world.alive.load(SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_made_is_counted_and_tried_less_and_less() {
    let all = setting(1, 4, plenty);
    all.world.refuses.store(true, SeqCst);
    all.begin(&[0]);
    a_while(60).await;
    let tries = all.world.made.load(SeqCst);
    assert!((3..=5).contains(&tries), "{tries} tries in a minute");
    assert_eq!(all.world.alive.load(SeqCst), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Batches of jobs over a pool whose sandboxes die, refuse and are slow: each is used once, no
    /// more stand than may, and nothing is left.
    #[test]
    fn each_is_used_once_and_all_are_gone_in_the_end(
        per_key in 1_usize..4, total in 1_usize..6,
        jobs in proptest::collection::vec(0_u8..3, 1..24),
        runs_ms in proptest::collection::vec(1_u64..20_000, 24),
        deaths in proptest::collection::vec(0_usize..40, 0..8),
        slow_ms in 0_u64..3000, refuses: bool, closes: bool,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let all = Arc::new(setting(per_key, total, plenty));
            all.world.slow_ms.store(slow_ms, SeqCst);
            all.world.dead.lock().unwrap().extend(deaths);
            all.begin(&jobs);
            let used = Arc::new(Mutex::new(BTreeSet::new()));
            let one = |of: u8, run_ms: u64| {
                let (all, used, claim) = (Arc::clone(&all), Arc::clone(&used), all.claim(of));
                async move {
                    if let Some((sandbox, _up)) = all.take(claim, of).await {
                        let exec = healthy_exec();
                        let number = sandbox.exec(exec).await.unwrap().stdout;
                        assert!(used.lock().unwrap().insert(number), "used twice");
                        tokio::time::sleep(Duration::from_millis(run_ms)).await;
                    } else {
                        tokio::time::sleep(Duration::from_millis(run_ms)).await;
                    }
                    if refuses {
                        all.world.refuses.store(run_ms.is_multiple_of(2), SeqCst);
                    }
                }
            };
            // Two at a time, in order.
            let jobs = jobs.iter().zip(&runs_ms);
            let mut running = FuturesUnordered::new();
            for (of, run_ms) in jobs {
                if running.len() == 2 {
                    running.next().await;
                }
                running.push(one(*of, *run_ms));
            }
            while running.next().await.is_some() {}
            drop(running);
            let most = all.world.most.load(SeqCst);
            // Two running; of each of them one that was found dead may not be gone yet.
            assert!(most <= total as i64 + 2 + 2, "{most} lived of {total}");
            all.warm.rest(false);
            a_while(1).await;
            if closes {
                all.warm.close().await;
            } else {
                a_while(400).await;
            }
            assert_eq!(all.world.alive.load(SeqCst), 0);
        });
    }
}

fn healthy_exec() -> Exec {
    Exec {
        argv: vec!["number".into()],
        cwd: None,
        env: BTreeMap::new(),
        stdin: Vec::new(),
        timeout: HEALTHY_WITHIN,
        output_bytes_max: 16,
        end_background: true,
        user: None,
    }
}
