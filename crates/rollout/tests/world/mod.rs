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
use proptest::prelude::*;
use record::{Disposition, Fault, PolicyVersion, Rollout, RolloutId, Sampling, TaskId, Verdict};
use rollout::{
    Capture, Captured, GroupPlan, Job, Judge, JudgeError, OpenSession, Runner, Session, Settings,
    Stages, Store, plan_group,
};
use sandbox::{Exec, Exit, File, Output, Provider, Sandbox, SandboxError, Spec};
use task::{Contract, Environment, Format, Grading, Payload, Task, Verifier};
use tokio::time::sleep;

/// How a boundary behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    Work,
    Fail,
    /// As `Fail`, and for good.
    FailForGood,
    /// The sandbox dies here.
    Die,
    Hang,
}

/// How the harness process ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ends {
    Code(i32),
    Signal,
    Limit,
    NotFound,
    SandboxDies,
    Hangs,
}

/// What the verifier says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Says {
    Reward(f64),
    Fails,
    SandboxDies,
    Hangs,
}

/// Everything that happens in one attempt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    pub record_start: Does,
    pub open: Does,
    pub create: Does,
    pub upload: Does,
    pub calls: u32,
    pub ends: Ends,
    pub engine_fault: bool,
    pub refused: bool,
    pub too_long: bool,
    pub settle: Does,
    pub settled: bool,
    pub says: Says,
    pub destroy: Does,
    pub record_end: Does,
    /// Virtual milliseconds of each working step.
    pub step_ms: u64,
}

pub const GOOD: Plan = Plan {
    record_start: Does::Work,
    open: Does::Work,
    create: Does::Work,
    upload: Does::Work,
    calls: 2,
    ends: Ends::Code(0),
    engine_fault: false,
    refused: false,
    too_long: false,
    settle: Does::Work,
    settled: true,
    says: Says::Reward(1.0),
    destroy: Does::Work,
    record_end: Does::Work,
    step_ms: 10,
};

/// Plans in which each boundary works most of the time.
pub fn plans() -> impl Strategy<Value = Plan> {
    let mostly = |others: Vec<Does>| prop_oneof![8 => Just(Does::Work), 1 => proptest::sample::select(others)];
    let two = || vec![Does::Fail, Does::Hang];
    (
        (
            mostly(vec![Does::Fail]),
            mostly(vec![Does::Fail]),
            mostly(vec![Does::Fail, Does::FailForGood, Does::Hang]),
            mostly(vec![Does::Fail, Does::Die, Does::Hang]),
            mostly(two()),
            mostly(vec![Does::Hang]),
            mostly(vec![Does::Fail]),
        ),
        prop_oneof![1 => Just(0_u32), 4 => 1_u32..4],
        prop_oneof![
            6 => Just(Ends::Code(0)),
            1 => Just(Ends::Code(1)),
            1 => Just(Ends::Code(3)),
            1 => Just(Ends::Signal),
            1 => Just(Ends::Limit),
            1 => Just(Ends::NotFound),
            1 => Just(Ends::SandboxDies),
            1 => Just(Ends::Hangs),
        ],
        proptest::bool::weighted(0.1),
        proptest::bool::weighted(0.1),
        proptest::bool::weighted(0.1),
        proptest::bool::weighted(0.9),
        prop_oneof![
            4 => Just(Says::Reward(1.0)),
            2 => Just(Says::Reward(0.0)),
            1 => Just(Says::Reward(0.25)),
            1 => Just(Says::Reward(1.5)),
            1 => Just(Says::Reward(f64::NAN)),
            1 => Just(Says::Fails),
            1 => Just(Says::SandboxDies),
            1 => Just(Says::Hangs),
        ],
        1_u64..2000,
    )
        .prop_map(
            |(
                (record_start, open, create, upload, settle, destroy, record_end),
                calls,
                ends,
                engine_fault,
                refused,
                too_long,
                settled,
                says,
                step_ms,
            )| Plan {
                record_start,
                open,
                create,
                upload,
                calls,
                ends,
                engine_fault,
                refused,
                too_long,
                settle,
                settled,
                says,
                destroy,
                record_end,
                step_ms,
            },
        )
}

/// What an attempt must end as, told in another way than the code does: the first line that
/// applies.
pub fn expected(plan: &Plan) -> (&'static str, Option<Fault>) {
    use Fault::*;
    let discard = |fault| ("discard", Some(fault));
    let lines: [(bool, (&'static str, Option<Fault>)); 22] = [
        (plan.record_end == Does::Fail, discard(GatewayFailed)),
        (plan.record_start == Does::Fail, discard(GatewayFailed)),
        (plan.open == Does::Fail, discard(GatewayFailed)),
        (plan.create != Does::Work, discard(SandboxStart)),
        (plan.upload != Does::Work, discard(SandboxStart)),
        (plan.ends == Ends::NotFound, discard(HarnessCrashed)),
        (plan.ends == Ends::SandboxDies, discard(SandboxLost)),
        // A process that hangs without calls is ended at the start-up limit.
        (
            plan.ends == Ends::Hangs && (plan.calls > 0 || plan.refused),
            discard(SandboxLost),
        ),
        (plan.settle != Does::Work, discard(GatewayFailed)),
        (plan.engine_fault, discard(EngineFailed)),
        (plan.ends == Ends::Signal, discard(HarnessCrashed)),
        (!plan.settled, discard(NotSettled)),
        (plan.calls == 0 && !plan.refused, discard(NoCalls)),
        (plan.says == Says::Fails, discard(VerifierFailed)),
        (plan.says == Says::Hangs, discard(VerifierFailed)),
        (plan.says == Says::SandboxDies, discard(SandboxLost)),
        (
            matches!(plan.says, Says::Reward(reward) if !(0.0..=1.0).contains(&reward)),
            discard(VerifierFailed),
        ),
        (plan.refused, ("truncate", None)),
        (plan.ends == Ends::Limit, ("truncate", None)),
        (plan.too_long, ("truncate", None)),
        (plan.ends == Ends::Code(3), ("truncate", None)),
        (true, ("train", None)),
    ];
    lines.into_iter().find(|(applies, _)| *applies).unwrap().1
}

/// Whether a fresh sandbox is tried after this attempt.
pub fn retried(plan: &Plan) -> bool {
    plan.record_start == Does::Work
        && plan.open == Does::Work
        && (matches!(plan.create, Does::Fail | Does::Hang)
            || (plan.create == Does::Work && plan.upload != Does::Work))
}

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
    /// Calls by session are known to the world, also after it was closed.
    pub opened: AtomicI64,
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
        destroy_s: 10,
    };
    Runner {
        provider: ports.clone(),
        capture: ports.clone(),
        store: ports.clone(),
        judge: ports,
        settings: Arc::new(settings),
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
