//! The orchestrator under test, a process of its own: gateway, scripted engine, local sandboxes,
//! ledger, and faults at their boundaries.

use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use codec::Codec;
use engine::{
    Engine, EngineError, Hint, Info, Request,
    scripted::{Script, Scripted},
};
use gateway::{Config, Gateway, Listen};
use ledger::Ledger;
use record::{Generation, Message, PolicyVersion, Role, Rollout, RolloutId};
use rollout::{Capture, Captured, Event, OpenSession, Runner, Session, Settings, Store};
use rustix::process::{Pid, Signal, kill_process};
use sandbox::{
    Entry, Exec, File, Image, LocalConfig, LocalProvider, Output, Provider, ReadLimits, Sandbox,
    SandboxError, Spec,
};
use serde::{Deserialize, Serialize};
use task::{Step, teacher};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use crate::{
    look, plan,
    plan::Fate,
    real::{CONTEXT, shell, workspace_root},
};

/// Variable that holds the [`Orders`].
pub(crate) const ORDERS: &str = "ESPALIER_STORM";

/// What the process is to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) folder: PathBuf,
    pub(crate) seed: u64,
    pub(crate) rollouts: u32,
    pub(crate) faults_percent: u64,
    pub(crate) concurrency: usize,
    /// The gateway is restarted when so many rollouts have ended.
    pub(crate) restarts: Vec<u32>,
    /// Sandboxes that stand ready.
    pub(crate) warm: usize,
}

/// What the process says when it is through.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) rollouts: u64,
    pub(crate) seconds: f64,
    /// CPU of the orchestrator with gateway, scripted engine, and ledger.
    pub(crate) own_cpu_ms: u64,
    /// CPU of warden, sandboxes, harnesses, verifiers.
    pub(crate) children_cpu_ms: u64,
}

fn fate(fates: &[Fate], id: &str) -> Fate {
    fates[plan::index(id)]
}

#[derive(Debug)]
struct Policy {
    fates: Arc<Vec<Fate>>,
    steps: Vec<Step>,
}

impl Script for Policy {
    fn reply(&self, hint: &Hint) -> Result<Message, EngineError> {
        let spec = hint.rollout.as_ref().unwrap();
        match fate(&self.fates, spec.id.as_str()) {
            Fate::GivesUp => Ok(Message::text(Role::Assistant, "I give up.")),
            Fate::EngineError if teacher::steps_made(&hint.conversation) > 0 => {
                Err(EngineError::Gone("status 500".into()))
            }
            _ => teacher::next_message(&self.steps, &hint.conversation)
                .map_err(|error| EngineError::NoScript(error.to_string())),
        }
    }
}

/// An engine that never answers some.
#[derive(Debug)]
struct Hanging {
    inner: Arc<dyn Engine>,
    fates: Arc<Vec<Fate>>,
}

#[async_trait]
impl Engine for Hanging {
    fn info(&self) -> Info {
        self.inner.info()
    }

    fn policy_version(&self) -> PolicyVersion {
        self.inner.policy_version()
    }

    async fn generate(&self, request: Request) -> Result<Generation, EngineError> {
        let hint = request.hint.as_ref().unwrap();
        let spec = hint.rollout.as_ref().unwrap();
        if fate(&self.fates, spec.id.as_str()) == Fate::EngineHang {
            std::future::pending::<()>().await;
        }
        self.inner.generate(request).await
    }
}

/// A ledger whose disk is full for some.
#[derive(Debug)]
struct Full {
    inner: Arc<dyn Store>,
    fates: Arc<Vec<Fate>>,
}

#[async_trait]
impl Store for Full {
    async fn put(&self, rollout: Rollout) -> Result<(), String> {
        let fate = fate(&self.fates, rollout.spec.id.as_str());
        if rollout.disposition.is_none() && fate == Fate::LedgerDisk {
            return Err("no space left on device".into());
        }
        self.inner.put(rollout).await
    }

    async fn close(&self, rollout: Rollout) -> Result<Rollout, String> {
        self.inner.close(rollout).await
    }

    async fn get(&self, id: &RolloutId) -> Result<Option<Rollout>, String> {
        self.inner.get(id).await
    }
}

/// The gateway of the moment.
#[derive(Debug)]
struct Newest(RwLock<Arc<dyn Capture>>);

impl Newest {
    fn now(&self) -> Arc<dyn Capture> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

#[async_trait]
impl Capture for Newest {
    async fn open(&self, open: OpenSession) -> Result<Session, String> {
        self.now().open(open).await
    }

    fn status(&self, id: &RolloutId) -> Option<Captured> {
        self.now().status(id)
    }

    async fn settle(
        &self,
        id: &RolloutId,
        quiet: Duration,
        limit: Duration,
    ) -> Result<Captured, String> {
        self.now().settle(id, quiet, limit).await
    }

    fn close(&self, id: &RolloutId) {
        self.now().close(id);
    }

    fn policy(&self) -> PolicyVersion {
        self.now().policy()
    }
}

/// Sandboxes whose PID 1 is killed as soon as a marked process runs in them.
#[derive(Debug)]
struct Deadly(LocalProvider);

#[derive(Debug)]
struct Mortal(Box<dyn Sandbox>);

#[async_trait]
impl Provider for Deadly {
    async fn create(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        Ok(Box::new(Mortal(self.0.create(spec).await?)))
    }
}

async fn kill_the_guest(mark: &str) {
    loop {
        if let Some(guest) = look::guest_of(mark) {
            let pid = Pid::from_raw(guest as i32).unwrap();
            // It may be gone by itself: the orchestrator was cancelled.
            let _ = kill_process(pid, Signal::KILL);
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[async_trait]
impl Sandbox for Mortal {
    async fn exec(&self, exec: Exec) -> Result<Output, SandboxError> {
        let marked = exec.argv.iter().find_map(|part| {
            let from = part.find("kill-the-guest-of-")?;
            let mark = &part[from..];
            let mark = mark.split(';').next()?;
            Some(mark.to_owned())
        });
        match marked {
            None => self.0.exec(exec).await,
            Some(mark) => tokio::select! {
                output = self.0.exec(exec) => output,
                () = kill_the_guest(&mark) => panic!("it goes on"),
            },
        }
    }

    async fn upload_tar(
        &self,
        folder: PathBuf,
        tar: &mut (dyn AsyncRead + Send + Unpin),
    ) -> Result<(), SandboxError> {
        self.0.upload_tar(folder, tar).await
    }

    async fn download_tar(
        &self,
        folder: PathBuf,
        limits: ReadLimits,
        into: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<(), SandboxError> {
        self.0.download_tar(folder, limits, into).await
    }

    async fn list(&self, folder: PathBuf, limits: ReadLimits) -> Result<Vec<Entry>, SandboxError> {
        self.0.list(folder, limits).await
    }

    async fn upload(&self, files: Vec<File>) -> Result<(), SandboxError> {
        self.0.upload(files).await
    }

    async fn download(&self, path: PathBuf, bytes_max: u64) -> Result<Vec<File>, SandboxError> {
        self.0.download(path, bytes_max).await
    }

    fn memory_peak_bytes(&self) -> Option<u64> {
        self.0.memory_peak_bytes()
    }

    fn image(&self) -> Image {
        self.0.image()
    }

    async fn destroy(self: Box<Self>) {
        self.0.destroy().await;
    }
}

/// What a gateway is made of, again and again.
struct Rooms {
    socket: PathBuf,
    engine: Arc<dyn Engine>,
    codec: Arc<Codec>,
    ledger: Ledger,
    provider: Arc<dyn Provider>,
    settings: Settings,
}

impl Rooms {
    async fn gateway(&self) -> (Arc<Gateway>, Runner) {
        let config = Config {
            listen: vec![Listen::Unix(self.socket.clone())],
            engine_timeout_s: 8,
            ..Config::default()
        };
        let (engine, codec) = (Arc::clone(&self.engine), Arc::clone(&self.codec));
        let gateway = Gateway::start(config, engine, codec, self.ledger.clone()).await;
        let gateway = Arc::new(gateway.unwrap());
        let runner = Runner::new(
            Arc::clone(&self.provider),
            Arc::clone(&gateway),
            Arc::clone(&self.engine),
            self.ledger.clone(),
            self.settings.clone(),
        );
        (gateway, runner)
    }
}

fn now_ms() -> u128 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_millis()
}

fn append(file: &Path, line: &str) {
    let mut file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(file)
        .unwrap();
    writeln!(file, "{line}").unwrap();
}

/// Runs the batch to its end, or until somebody kills it.
pub(crate) async fn run(orders: Orders) -> Report {
    let provider = LocalProvider::start(LocalConfig::default()).await.unwrap();
    let fates = Arc::new(plan::fates(
        orders.seed,
        orders.rollouts,
        orders.faults_percent,
    ));
    let run = orders.folder.join("run");
    let ledger = match run.exists() {
        true => Ledger::open(&run),
        false => Ledger::create(&run),
    }
    .unwrap();
    let codec = Arc::new(Codec::load(&workspace_root().join("policy")).unwrap());
    let speaker = Arc::clone(&codec);
    let policy = Policy {
        fates: Arc::clone(&fates),
        steps: plan::chore().1,
    };
    let scripted = Scripted::new(
        "storm",
        Arc::new(policy),
        Arc::new(move |message| {
            let text = speaker.speak(message).map_err(|error| error.to_string())?;
            speaker.encode(&text).map_err(|error| error.to_string())
        }),
        CONTEXT,
        codec.vocabulary(),
    );
    let socket = orders.folder.join("gateway.sock");
    let mut settings = Settings::new(socket.clone());
    settings.context_tokens = CONTEXT;
    settings.reply_tokens_max = 8192;
    settings.codec_digest = codec.digest().to_owned();
    settings.pools.ready = 2;
    settings.pools.create = 4;
    settings.warm.per_key = orders.warm;
    let rooms = Rooms {
        socket,
        engine: Arc::new(Hanging {
            inner: Arc::new(scripted),
            fates: Arc::clone(&fates),
        }),
        codec,
        ledger: ledger.clone(),
        provider: Arc::new(Deadly(provider.clone())),
        settings,
    };
    let nonce = format!("{:x}", orders.seed);
    let jobs = plan::jobs(&nonce, &fates, |script| shell("s", script, ""));

    let (gateway, mut runner) = rooms.gateway().await;
    let newest = Arc::new(Newest(RwLock::new(Arc::clone(&runner.capture))));
    let capture: Arc<dyn Capture> = newest.clone();
    runner.capture = capture;
    runner.store = Arc::new(Full {
        inner: Arc::clone(&runner.store),
        fates,
    });
    let started = Instant::now();
    let ended = AtomicU32::new(0);
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let progress = |event: &Event| {
        if let Event::Finished {
            superseded: false,
            reused: false,
            id,
            ..
        } = event
        {
            println!("finished {id}");
            let count = ended.fetch_add(1, SeqCst) + 1;
            if orders.restarts.contains(&count) {
                tell.send(()).unwrap();
            }
        }
    };
    let result = {
        let cancel = CancellationToken::new();
        let batch = runner.run_batch(jobs, orders.concurrency, cancel, progress);
        // Goes on until the batch ends.
        let restarts = async {
            let mut gateway = gateway;
            while told.recv().await.is_some() {
                let begun = now_ms();
                gateway.shutdown(Duration::ZERO).await;
                let (another, runner) = rooms.gateway().await;
                *newest.0.write().unwrap_or_else(PoisonError::into_inner) = runner.capture;
                gateway = another;
                let line = format!("{begun} {}", now_ms());
                append(&orders.folder.join("restarts"), &line);
            }
            drop(gateway);
        };
        tokio::select! {
            result = batch => result.unwrap(),
            () = restarts => panic!("nobody tells any more"),
        }
    };
    assert!(result.counts.conserved());
    assert!(result.rollouts.iter().all(Option::is_some));
    let seconds = started.elapsed().as_secs_f64();
    let own_cpu_ms = look::cpu_ms().0;
    runner.close().await;
    drop((runner, newest, rooms));
    ledger.close().await.unwrap();
    provider.close().await;
    Report {
        rollouts: result.counts.started,
        seconds,
        own_cpu_ms,
        children_cpu_ms: look::cpu_ms().1,
    }
}
