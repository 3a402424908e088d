//! The local kind: namespaces on this machine.

use std::{
    collections::BTreeMap,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use guest::protocol::{Capabilities, ExecRequest, Plan};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::{
    Exec, Exit, File, Image, Output, Provider, Sandbox, SandboxError, Spec, guest_binary,
    stream::{Answer, Broken, Stream},
    warden::{Made, Warden},
};

/// For PID 1 to say that the sandbox is ready.
const HELLO_TIMEOUT: Duration = Duration::from_secs(30);
/// For the warden to say why a sandbox ended, after its stream broke.
const REASON_TIMEOUT: Duration = Duration::from_secs(2);
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Settings of the local kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LocalConfig {
    /// Living sandboxes at a time; one more is refused with [`SandboxError::Create`].
    pub sandboxes_max: usize,
}

impl Default for LocalConfig {
    fn default() -> Self {
        Self {
            sandboxes_max: 1024,
        }
    }
}

/// Makes sandboxes on this machine. Cheap to clone; the last clone and the last sandbox end the
/// warden.
#[derive(Debug, Clone)]
pub struct LocalProvider {
    current: Arc<Mutex<Arc<Warden>>>,
    /// Held by whoever replaces a warden that was lost.
    replacing: Arc<tokio::sync::Mutex<()>>,
    capabilities: Capabilities,
    config: LocalConfig,
}

impl LocalProvider {
    /// Starts the warden, which removes what dead ones left behind. Missing limits are logged
    /// once and named in [`LocalProvider::capabilities`]. Needs a Tokio runtime.
    ///
    /// # Errors
    /// [`SandboxError::Unsupported`].
    pub async fn start(config: LocalConfig) -> Result<Self, SandboxError> {
        let warden = Warden::start().await?;
        let degraded = &warden.capabilities().degraded;
        if !degraded.is_empty() {
            let names: Vec<_> = degraded.iter().map(|d| d.name.as_str()).collect();
            tracing::warn!(
                modes = names.join(", "),
                "sandboxes are limited in degraded modes; `espalier doctor` says what that costs"
            );
        }
        let capabilities = warden.capabilities().clone();
        Ok(Self {
            current: Arc::new(Mutex::new(warden)),
            replacing: Arc::default(),
            capabilities,
            config,
        })
    }

    fn current(&self) -> Arc<Warden> {
        Arc::clone(&self.current.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The warden, or a new one when it was killed: that costs its sandboxes, not the run.
    async fn warden(&self) -> Result<Arc<Warden>, SandboxError> {
        let _replacing = self.replacing.lock().await;
        let warden = self.current();
        let Some(reason) = warden.lost() else {
            return Ok(warden);
        };
        tracing::warn!(reason, "starting a new warden");
        let warden = Warden::start().await?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&warden);
        Ok(warden)
    }

    /// How sandboxes are limited on this machine, and what is missing.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// The process id of the warden, for whoever watches processes.
    #[must_use]
    pub fn warden_process_id(&self) -> Option<u32> {
        self.current().process_id()
    }

    /// Ends the warden and waits until it has cleaned up. Sandboxes must have been dropped; not
    /// calling this leaves nothing behind either, only a little later.
    pub async fn close(self) {
        let warden = self.current();
        drop(self);
        warden.close().await;
    }
}

fn plan(spec: &Spec) -> Plan {
    let limits = &spec.limits;
    Plan {
        memory_bytes: limits.memory_bytes,
        pids: limits.pids,
        cpu_cores: limits.cpu_cores,
        disk_bytes: limits.disk_bytes,
        deadline_s: limits.deadline_s,
        mounts: spec
            .mounts
            .iter()
            .map(|m| (m.source.clone(), m.target.clone()))
            .collect(),
        workspace: spec.workspace.clone(),
        home: spec.home.clone(),
        gateway_socket: spec.gateway_socket.clone(),
        gateway_port: spec.gateway_port,
    }
}

#[async_trait]
impl Provider for LocalProvider {
    async fn create(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        Ok(Box::new(self.create_local(spec).await?))
    }
}

impl LocalProvider {
    /// [`Provider::create`] with the type of this kind.
    ///
    /// # Errors
    /// [`SandboxError::Create`].
    pub async fn create_local(&self, spec: Spec) -> Result<LocalSandbox, SandboxError> {
        let failed = |reason: String| SandboxError::Create {
            name: spec.name.clone(),
            reason,
        };
        let warden = self.warden().await?;
        if warden.living() >= self.config.sandboxes_max {
            return Err(failed(format!(
                "{} sandboxes live already; raise sandboxes_max or run fewer at a time",
                self.config.sandboxes_max
            )));
        }
        let (ours, theirs) =
            UnixStream::pair().map_err(|e| failed(format!("making its control stream: {e}")))?;
        let made = warden
            .make(&spec.name, plan(&spec), OwnedFd::from(theirs))
            .await?;
        let (stream, hello) = Stream::start(ours, &warden.tasks)
            .map_err(|e| failed(format!("watching its control stream: {e}")))?;
        let mut env = BTreeMap::from([
            ("PATH".to_owned(), PATH.to_owned()),
            ("HOME".to_owned(), spec.home.to_string_lossy().into_owned()),
            ("LANG".to_owned(), "C.UTF-8".to_owned()),
        ]);
        env.extend(spec.env.clone());
        let sandbox = LocalSandbox {
            name: spec.name.clone(),
            workspace: spec.workspace.clone(),
            env,
            stream,
            made,
        };
        match timeout(HELLO_TIMEOUT, hello).await {
            Ok(Ok(Answer::Hello)) => Ok(sandbox),
            Ok(Ok(Answer::SetupFailed(reason))) => Err(failed(reason)),
            Ok(Ok(other)) => Err(failed(format!("unexpected first word {other:?}"))),
            Ok(Err(_)) => {
                let reason = sandbox
                    .end_reason("its first process ended without a word")
                    .await;
                Err(failed(reason))
            }
            Err(_) => Err(failed(format!("it was not ready after {HELLO_TIMEOUT:?}"))),
        }
    }
}

/// A living sandbox of the local kind.
#[derive(Debug)]
pub struct LocalSandbox {
    name: String,
    workspace: PathBuf,
    env: BTreeMap<String, String>,
    // Before `made`: closing the stream and asking the warden go in this order.
    stream: Stream,
    made: Made,
}

impl LocalSandbox {
    /// Out-of-memory kills so far; 0 where nobody counts them.
    fn memory_kills(&self) -> u64 {
        let Some(path) = &self.made.memory_events else {
            return 0;
        };
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
            .unwrap_or(0)
    }

    /// Why it ended, from whoever knows best.
    async fn end_reason(&self, otherwise: &str) -> String {
        if let Some(goodbye) = self.stream.goodbye() {
            return goodbye;
        }
        let mut ended = self.made.ended.clone();
        match timeout(REASON_TIMEOUT, ended.wait_for(Option::is_some)).await {
            Ok(Ok(reason)) => reason.clone().unwrap_or_else(|| otherwise.to_owned()),
            _ => otherwise.to_owned(),
        }
    }

    async fn gone(&self, Broken(what): Broken) -> SandboxError {
        SandboxError::Gone {
            name: self.name.clone(),
            reason: self.end_reason(&what).await,
        }
    }

    async fn unexpected(&self, answer: Answer) -> SandboxError {
        match answer {
            Answer::FileFailed(failure) => SandboxError::File {
                name: self.name.clone(),
                path: failure.path,
                reason: failure.reason,
            },
            other => self.gone(Broken(format!("it answered {other:?}"))).await,
        }
    }
}

#[async_trait]
impl Sandbox for LocalSandbox {
    async fn exec(&self, exec: Exec) -> Result<Output, SandboxError> {
        let not_runnable = |reason: String| SandboxError::NotRunnable {
            name: self.name.clone(),
            program: exec.argv.first().cloned().unwrap_or_default(),
            reason,
        };
        let cwd = exec.cwd.as_deref().unwrap_or(&self.workspace);
        let cwd = Path::to_str(cwd)
            .ok_or_else(|| not_runnable(format!("{}: the path is not UTF-8", cwd.display())))?;
        let mut env = self.env.clone();
        env.extend(exec.env.clone());
        let request = ExecRequest {
            argv: exec.argv.clone(),
            cwd: cwd.to_owned(),
            env: env.into_iter().collect(),
            timeout_ms: u64::try_from(exec.timeout.as_millis()).unwrap_or(u64::MAX),
            output_bytes_max: exec.output_bytes_max as u64,
            end_background: exec.end_background,
        };
        let memory_kills = self.memory_kills();
        match self.stream.exec(&request, &exec.stdin).await {
            Ok(Answer::Exited {
                stdout,
                stderr,
                exited,
            }) => Ok(Output {
                exit: match (exited.timed_out, exited.code, exited.signal) {
                    (true, _, _) => Exit::TimedOut,
                    (_, Some(code), _) => Exit::Code(code),
                    (_, None, signal) => Exit::Signal(signal.unwrap_or_default()),
                },
                stdout,
                stderr,
                dropped_bytes: exited.dropped_bytes,
                out_of_memory: self.memory_kills() > memory_kills,
                seconds: exited.seconds,
            }),
            Ok(Answer::NotRunnable(reason)) => Err(not_runnable(reason)),
            Ok(other) => Err(self.unexpected(other).await),
            Err(broken) => Err(self.gone(broken).await),
        }
    }

    async fn upload(&self, files: Vec<File>) -> Result<(), SandboxError> {
        match self.stream.put(&files).await {
            Ok(Answer::Put) => Ok(()),
            Ok(other) => Err(self.unexpected(other).await),
            Err(broken) => Err(self.gone(broken).await),
        }
    }

    async fn download(&self, path: PathBuf, bytes_max: u64) -> Result<Vec<File>, SandboxError> {
        match self.stream.get(&path, bytes_max).await {
            Ok(Answer::Files(files)) => Ok(files),
            Ok(other) => Err(self.unexpected(other).await),
            Err(broken) => Err(self.gone(broken).await),
        }
    }

    fn image(&self) -> Image {
        Image {
            kind: "local".to_owned(),
            digest: guest_binary::image_digest().to_owned(),
        }
    }

    async fn destroy(self: Box<Self>) {
        let Self { stream, made, .. } = *self;
        drop(stream);
        made.destroy().await;
    }
}
