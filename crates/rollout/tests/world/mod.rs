//! A world in which every boundary can break, on a virtual clock. Nothing here is random: the
//! plan of each attempt says what happens.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

use std::{
    collections::BTreeMap,
    future::pending,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicI64, Ordering::SeqCst},
    },
    time::Duration,
};

use async_trait::async_trait;
use harness::{Installed, Profile};
use record::{Disposition, Fault, PolicyVersion, Rollout, RolloutId, Sampling, TaskId, Verdict};
use rollout::{
    Capture, Captured, GroupPlan, Job, Judge, JudgeError, OpenSession, Runner, Session, Settings,
    Stages, Store, plan_group,
};
use sandbox::{Exec, Exit, File, Output, Provider, Sandbox, SandboxError, Spec};
use task::{Contract, Environment, Format, Grading, Payload, Task, Verifier};
use tokio::time::sleep;

mod plan;

pub use plan::*;

/// The world: plans by attempt, and what is alive in it.
#[derive(Debug, Default)]
pub struct World {
    plans: Mutex<BTreeMap<String, Plan>>,
    /// Every record in the order it was made.
    pub records: Mutex<Vec<Rollout>>,
    ledger: Mutex<BTreeMap<RolloutId, Rollout>>,
    sessions: Mutex<BTreeMap<RolloutId, Captured>>,
    pub sandboxes: AtomicI64,
    pub sandboxes_max: AtomicI64,
    pub creations: AtomicI64,
    /// Harnesses that run, and the most at a time; likewise verifiers.
    pub running: Gauge,
    pub verifying: Gauge,
    /// Calls by session are known to the world, also after it was closed.
    pub opened: AtomicI64,
}

/// Counts what is going on.
#[derive(Debug, Default)]
pub struct Gauge {
    now: AtomicI64,
    max: AtomicI64,
}

impl Gauge {
    fn enter(&self) -> Inside<'_> {
        let now = self.now.fetch_add(1, SeqCst) + 1;
        self.max.fetch_max(now, SeqCst);
        Inside(self)
    }

    pub fn max(&self) -> i64 {
        self.max.load(SeqCst)
    }
}

struct Inside<'a>(&'a Gauge);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, SeqCst);
    }
}

impl World {
    pub fn plan(&self, id: &str, plan: Plan) {
        self.plans.lock().unwrap().insert(id.to_owned(), plan);
    }

    fn of(&self, id: &str) -> Plan {
        self.plans.lock().unwrap().get(id).copied().unwrap_or(GOOD)
    }

    pub fn ledger(&self) -> BTreeMap<RolloutId, Rollout> {
        self.ledger.lock().unwrap().clone()
    }

    pub fn open_sessions(&self) -> usize {
        self.sessions.lock().unwrap().len()
    }

    pub fn alive(&self) -> i64 {
        self.sandboxes.load(SeqCst)
    }
}

#[derive(Debug, Clone)]
pub struct Ports(pub Arc<World>);

async fn step(plan: &Plan) {
    sleep(Duration::from_millis(plan.step_ms)).await;
}

#[async_trait]
impl Store for Ports {
    async fn put(&self, rollout: Rollout) -> Result<(), String> {
        let plan = self.0.of(rollout.spec.id.as_str());
        let does = match rollout.disposition {
            None => plan.record_start,
            Some(Disposition::Discard {
                fault: Fault::Interrupted,
                ..
            }) => Does::Work,
            Some(_) => plan.record_end,
        };
        if does != Does::Work {
            return Err("no space left".into());
        }
        self.0.records.lock().unwrap().push(rollout.clone());
        self.0
            .ledger
            .lock()
            .unwrap()
            .insert(rollout.spec.id.clone(), rollout);
        Ok(())
    }

    async fn get(&self, id: &RolloutId) -> Result<Option<Rollout>, String> {
        Ok(self.0.ledger.lock().unwrap().get(id).cloned())
    }
}

#[async_trait]
impl Capture for Ports {
    async fn open(&self, open: OpenSession) -> Result<Session, String> {
        let plan = self.0.of(open.spec.id.as_str());
        assert_eq!(open.sampling.seed, open.spec.seed);
        if plan.open != Does::Work {
            return Err("too many rollouts".into());
        }
        let before = self
            .0
            .sessions
            .lock()
            .unwrap()
            .insert(open.spec.id.clone(), Captured::default());
        assert!(before.is_none(), "{} was opened twice", open.spec.id);
        self.0.opened.fetch_add(1, SeqCst);
        Ok(Session {
            key: format!("key-{}", open.spec.id),
            path: format!("/r/key-{}", open.spec.id),
        })
    }

    fn status(&self, id: &RolloutId) -> Option<Captured> {
        self.0.sessions.lock().unwrap().get(id).cloned()
    }

    async fn settle(
        &self,
        id: &RolloutId,
        _quiet: Duration,
        _limit: Duration,
    ) -> Result<Captured, String> {
        let plan = self.0.of(id.as_str());
        step(&plan).await;
        match plan.settle {
            Does::Work => {}
            Does::Hang => pending().await,
            _ => return Err("the gateway is gone".into()),
        }
        let mut captured = self.status(id).unwrap();
        captured.settled = plan.settled;
        captured.in_flight = u32::from(!plan.settled);
        captured.too_long = plan.too_long;
        captured.fault = plan
            .engine_fault
            .then(|| (Fault::EngineFailed, "engine is gone".to_owned()));
        Ok(captured)
    }

    fn close(&self, id: &RolloutId) {
        self.0.sessions.lock().unwrap().remove(id);
    }

    fn policy(&self) -> PolicyVersion {
        7
    }
}

#[async_trait]
impl Judge for Ports {
    async fn verify(&self, _task: &Task, sandbox: &dyn Sandbox) -> Result<Verdict, JudgeError> {
        let name = format!("{sandbox:?}");
        let plan = self.0.of(&name);
        assert!(
            self.0
                .sessions
                .lock()
                .unwrap()
                .keys()
                .all(|id| id.as_str() != name),
            "the key of {name} still works while the verifier runs"
        );
        let _inside = self.0.verifying.enter();
        step(&plan).await;
        match plan.says {
            Says::Reward(reward) => Ok(Verdict {
                reward,
                scores: BTreeMap::new(),
                evidence: String::new(),
                seconds: 0.0,
            }),
            Says::Fails => Err(JudgeError::Failed("no number".into())),
            Says::SandboxDies => Err(JudgeError::SandboxLost("gone".into())),
            Says::Hangs => pending().await,
        }
    }
}

#[async_trait]
impl Provider for Ports {
    async fn create(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        let plan = self.0.of(&spec.name);
        self.0.creations.fetch_add(1, SeqCst);
        let sandbox = Box::new(Box_ {
            world: Arc::clone(&self.0),
            name: spec.name.clone(),
            home: spec.home,
        });
        let alive = self.0.sandboxes.fetch_add(1, SeqCst) + 1;
        self.0.sandboxes_max.fetch_max(alive, SeqCst);
        step(&plan).await;
        let failed = |name: &str| SandboxError::Create {
            name: name.to_owned(),
            reason: "no pids left".into(),
        };
        match plan.create {
            Does::Work => Ok(sandbox),
            Does::Hang => pending().await,
            Does::FailForGood => Err(SandboxError::Unsupported {
                what: "user namespaces".into(),
                hint: "enable them".into(),
            }),
            _ => Err(failed(&spec.name)),
        }
    }
}

pub struct Box_ {
    world: Arc<World>,
    name: String,
    home: PathBuf,
}

impl std::fmt::Debug for Box_ {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl Drop for Box_ {
    fn drop(&mut self) {
        self.world.sandboxes.fetch_sub(1, SeqCst);
    }
}

impl Box_ {
    fn gone(&self) -> SandboxError {
        SandboxError::Gone {
            name: self.name.clone(),
            reason: "connection reset".into(),
        }
    }
}

#[async_trait]
impl Sandbox for Box_ {
    async fn exec(&self, exec: Exec) -> Result<Output, SandboxError> {
        let plan = self.world.of(&self.name);
        assert!(
            exec.argv.iter().any(|part| part.contains("key-")),
            "{exec:?}"
        );
        let _inside = self.world.running.enter();
        step(&plan).await;
        for (id, session) in self.world.sessions.lock().unwrap().iter_mut() {
            if id.as_str() == self.name {
                session.calls = plan.calls;
                session.refused = u32::from(plan.refused);
            }
        }
        let exit = match plan.ends {
            Ends::Code(code) => Exit::Code(code),
            Ends::Signal => Exit::Signal(9),
            Ends::Limit => {
                sleep(exec.timeout).await;
                Exit::TimedOut
            }
            Ends::NotFound => {
                return Err(SandboxError::NotRunnable {
                    name: self.name.clone(),
                    program: exec.argv[0].clone(),
                    reason: "no such file".into(),
                });
            }
            Ends::SandboxDies => return Err(self.gone()),
            Ends::Hangs => pending().await,
        };
        Ok(Output {
            exit,
            stdout: format!("key-{} said something", self.name).into_bytes(),
            stderr: Vec::new(),
            dropped_bytes: 0,
            out_of_memory: false,
            seconds: 0.0,
        })
    }

    async fn upload(&self, files: Vec<File>) -> Result<(), SandboxError> {
        assert!(files.iter().all(|file| file.path.is_absolute()));
        let plan = self.world.of(&self.name);
        step(&plan).await;
        match plan.upload {
            Does::Work => Ok(()),
            Does::Hang => pending().await,
            Does::Die => Err(self.gone()),
            _ => Err(SandboxError::File {
                name: self.name.clone(),
                path: "/workspace/a".into(),
                reason: "no space left".into(),
            }),
        }
    }

    async fn download(&self, _path: PathBuf, _max: u64) -> Result<Vec<File>, SandboxError> {
        Err(self.gone())
    }

    async fn destroy(self: Box<Self>) {
        let plan = self.world.of(&self.name);
        step(&plan).await;
        if plan.destroy == Does::Hang {
            pending::<()>().await;
        }
    }
}

pub fn task(name: &str) -> Task {
    Task {
        id: TaskId::new(name).unwrap(),
        family: "toy".into(),
        instruction: "do it".into(),
        files: Vec::new(),
        workspace: "/workspace".into(),
        home: "/home/agent".into(),
        verifier: Verifier {
            files: Vec::new(),
            folder: ".verify".into(),
            argv: vec!["true".into()],
            cwd: None,
            timeout_s: 10,
            contract: Contract::LastLine,
            payload: Payload::default(),
            env: BTreeMap::new(),
        },
        solution: Vec::new(),
        metadata: BTreeMap::new(),
        format: Format::default(),
        grading: Grading::default(),
        environment: Environment::default(),
        digest: "d".into(),
    }
}

pub fn installed() -> Arc<Installed> {
    let mut profile = Profile::load(None, "react").unwrap();
    profile.startup_s = 100;
    profile.run_s = 1000;
    profile.habits.exit_truncates = BTreeMap::from([("3".to_owned(), "turns_limit".to_owned())]);
    Arc::new(Installed {
        profile,
        digest: "0".repeat(64),
        bundle: PathBuf::new(),
        node: String::new(),
        python: String::new(),
        mounts: Vec::new(),
    })
}

/// Jobs `s0000-t-react-k00`, `…-k01` …
pub fn jobs(count: u32) -> Vec<Job> {
    let task = Arc::new(task("t"));
    let installed = installed();
    plan_group(GroupPlan {
        run_seed: 1,
        step: 0,
        split: "train",
        task: &task.id,
        harness: "react",
        samples: count,
    })
    .unwrap()
    .into_iter()
    .map(|spec| Job {
        spec,
        task: Arc::clone(&task),
        installed: Arc::clone(&installed),
        sampling: Sampling::default(),
        budget: rollout::Budget::default(),
    })
    .collect()
}

pub fn runner(world: &Arc<World>) -> Runner {
    let ports = Arc::new(Ports(Arc::clone(world)));
    let mut settings = Settings::new("/run/gateway.sock".into());
    settings.stages = Stages {
        create_s: 60,
        harness_s: 300,
        settle_s: 20,
        settle_quiet_ms: 10,
        verify_s: 60,
        wait_s: 1000,
        destroy_s: 10,
    };
    Runner {
        provider: ports.clone(),
        capture: ports.clone(),
        store: ports.clone(),
        judge: ports,
        settings: Arc::new(settings),
        gauges: Arc::default(),
        warm: rollout::Warm::default(),
    }
}

/// A runtime with a virtual clock.
pub fn simulate<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap()
        .block_on(future)
}
