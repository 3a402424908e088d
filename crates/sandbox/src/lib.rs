//! The temporary isolated place where one rollout lives.
//!
//! [`Provider`] makes sandboxes, [`Sandbox`] is one. Every kind runs our `guest` as PID 1 and
//! speaks the same protocol with it, so semantics and errors are the same everywhere. The guest
//! is a static binary inside this library (`build.rs`), so nothing has to be installed.
//!
//! [`LocalProvider`] is the local kind: namespaces of our own, no daemon, no root needed. Its
//! parts: one *warden* process per provider, which makes sandboxes and cleans up after everybody
//! (docs/decisions/0002-warden.md says why), PID 1 in each sandbox, and here the asynchronous
//! side that talks to both.
//!
//! [`DockerProvider`] is the kind of Docker-compatible engines: the guest is put into a container
//! and speaks through its standard input and output.
//!
//! `KubernetesProvider` (feature `kubernetes`, on by default) is the kind of clusters: the guest is
//! put into a pod, and speaks through an `exec` that lasts as long as the sandbox.
//!
//! `tests/suite` is what all kinds promise; each runs it.
//!
//! Invariants:
//! * Nothing survives: a sandbox ends with its handle, with this process (`kill -9` included),
//!   with its deadline, and with the warden, whichever is first. No file is written to a folder
//!   of the host; the only traces outside of processes are control groups, which the warden
//!   removes, or the next warden if it was killed.
//! * Dropping any future of [`Provider`] and [`Sandbox`] undoes what it began.
//! * A program runs as the user whom its [`Exec::user`] names, or not at all. Where a set-up has one
//!   user only (local for an ordinary user without a range in `/etc/subuid`, pods that are
//!   `restricted`), any other is [`SandboxError::CannotSwitchUser`].
//! * No operation waits longer than the sandbox's deadline and 5 s; making one takes 30 s at most.
//!
//! Limits: [`LocalConfig::sandboxes_max`] sandboxes (more: [`SandboxError::Create`]), 256 `exec`s
//! at a time in each (more: [`SandboxError::NotRunnable`]), 1 MiB of arguments and environment,
//! 4 MiB on their way to a sandbox (senders wait), 256 KiB of a streamed output or of a tunnelled
//! connection each way (senders wait), `output_bytes_max` of each output (the middle
//! is dropped and counted), `bytes_max` of a download (more: [`SandboxError::File`]), 4 MiB of a
//! list of users or groups and 1024 groups of a user (more: [`SandboxError::CannotSwitchUser`]).

mod docker;
mod doctor;
mod egress;
mod guest_binary;
mod inhabited;
mod kind;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod local;
mod stream;
mod tunnel;
mod warden;

pub use docker::{DockerConfig, DockerProvider, docker_doctor};
pub use doctor::{Check, doctor};
pub use egress::{Allowed, Decision, EgressProxy, EgressRecord};
pub use guest::{
    archive::{Entry, EntryKind},
    mcp,
    protocol::{Capabilities, Degraded, GATEWAY_SOCKET_PATH, GUEST_PATH},
};
pub use kind::{SandboxConfig, doctor_kind, start};
#[cfg(feature = "kubernetes")]
pub use kubernetes::{KubernetesConfig, KubernetesProvider, PullPolicy, SharedFolder, Toleration};
pub use local::{LocalConfig, LocalProvider};

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::mpsc,
};

/// Limits of one sandbox. All are hard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Memory of all processes and of all files (they live in memory).
    pub memory_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
    /// CPU, in cores.
    pub cpu_cores: f64,
    /// Bytes of files in workspace, HOME and /tmp together.
    pub disk_bytes: u64,
    /// The sandbox ends this long after its creation, whatever happens to us.
    pub deadline_s: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory_bytes: 2 << 30,
            pids: 512,
            cpu_cores: 2.0,
            disk_bytes: 512 << 20,
            deadline_s: 1800,
        }
    }
}

/// A folder or file of the host that the sandbox sees, read-only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// On the host, absolute.
    pub source: PathBuf,
    /// In the sandbox, absolute.
    pub target: PathBuf,
}

/// What a sandbox was made of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Image {
    /// Kind of the sandbox, e.g. `local`.
    pub kind: String,
    /// SHA-256 over what is the same in all sandboxes of this image: for containers the image's,
    /// for kind `local` over the guest and the release of the system whose folders it shows.
    pub digest: String,
}

/// What to make. All but the name has a default.
#[derive(Debug, Clone)]
pub struct Spec {
    /// A name for logs; unique among the living sandboxes of the provider.
    pub name: String,
    /// What the root file system is made of: the name or id of an image that the engine or the
    /// cluster can get; for `local` the folder of an unpacked root file system. `None`: the kind's
    /// default, which for `local` is the host's system.
    pub image: Option<String>,
    /// Limits.
    pub limits: Limits,
    /// Written before [`Provider::create`] gives the sandbox.
    pub files: Vec<File>,
    /// Read-only mounts besides the system's.
    pub mounts: Vec<Mount>,
    /// Writable folder where tasks live; created, and the default working folder of `exec`.
    pub workspace: PathBuf,
    /// Writable HOME; created.
    pub home: PathBuf,
    /// Environment of every process, beside PATH, HOME, LANG which are set by us.
    pub env: BTreeMap<String, String>,
    /// The unix socket of the gateway on the host. Inside it is reached at
    /// `http://127.0.0.1:{gateway_port}`, and as [`GATEWAY_SOCKET_PATH`]. `None`: no network at
    /// all. Sandboxes made by root run as `nobody`, so its mode is widened to 0666 if it must be;
    /// the folder above it may stay private.
    pub gateway_socket: Option<PathBuf>,
    /// Port of the forwarder inside the sandbox.
    pub gateway_port: u16,
    /// More loopback ports of the sandbox, and the unix sockets on the host that they lead to, as
    /// for the gateway's: an [`EgressProxy`], a service of the task.
    pub forwards: Vec<(u16, PathBuf)>,
}

impl Default for Spec {
    /// An empty workspace, no network.
    fn default() -> Self {
        Self {
            name: "sandbox".to_owned(),
            image: None,
            limits: Limits::default(),
            files: Vec::new(),
            mounts: Vec::new(),
            workspace: "/workspace".into(),
            home: "/home/agent".into(),
            env: BTreeMap::new(),
            gateway_socket: None,
            gateway_port: 8080,
            forwards: Vec::new(),
        }
    }
}

impl Spec {
    /// The gateway's port and the others.
    fn all_forwards(&self) -> Vec<(u16, PathBuf)> {
        let gateway = self.gateway_socket.clone();
        let gateway = gateway.map(|socket| (self.gateway_port, socket));
        gateway.into_iter().chain(self.forwards.clone()).collect()
    }
}

/// A process to run. It is over when it ends itself: what it started in the background lives on
/// (unless `end_background`), until the sandbox ends, and its later output is dropped.
#[derive(Debug, Clone)]
pub struct Exec {
    /// Program and arguments; the program is looked up in PATH.
    pub argv: Vec<String>,
    /// Working folder; the workspace when `None`.
    pub cwd: Option<PathBuf>,
    /// Added to the sandbox's environment.
    pub env: BTreeMap<String, String>,
    /// Given on standard input, which is then closed.
    pub stdin: Vec<u8>,
    /// The whole process tree is killed after this.
    pub timeout: Duration,
    /// At most this many bytes are kept of each of stdout and stderr: the first half and the last
    /// half. The process is never blocked by output that nobody keeps.
    pub output_bytes_max: usize,
    /// Kill what the process leaves in the background when it ends: nothing of it may change the
    /// workspace while the next process looks at it.
    pub end_background: bool,
    /// Who it runs as: `USER[:GROUP]`, each a name or a number. Names are looked up in the
    /// sandbox's own `/etc/passwd` and `/etc/group`, as are the user's other groups (none when a
    /// group is named) and his HOME. HOME, USER and LOGNAME say who he is, unless the environment
    /// of the spec or of this process does. `None`: the sandbox's own user, whom workspace and
    /// HOME belong to, and who reads and writes files for [`Sandbox::upload`] and the like.
    pub user: Option<String>,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// By itself, with this code.
    Code(i32),
    /// By this signal, not ours (the kernel's out-of-memory killer sends 9).
    Signal(i32),
    /// We killed it at its timeout.
    TimedOut,
}

/// What a process left behind.
#[derive(Debug, Clone)]
pub struct Output {
    /// How it ended.
    pub exit: Exit,
    /// Standard output, see [`Exec::output_bytes_max`].
    pub stdout: Vec<u8>,
    /// Standard error, likewise.
    pub stderr: Vec<u8>,
    /// Bytes of stdout and stderr that were not kept.
    pub dropped_bytes: u64,
    /// Whether the kernel killed something in the sandbox for lack of memory meanwhile.
    pub out_of_memory: bool,
    /// Wall-clock seconds.
    pub seconds: f64,
}

/// A piece of the output of a running process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chunk {
    /// Of standard output.
    Stdout(Vec<u8>),
    /// Of standard error.
    Stderr(Vec<u8>),
}

/// Limits of what is read from a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadLimits {
    /// Bytes of all files together.
    pub bytes_max: u64,
    /// Files, folders and links together.
    pub files_max: u64,
    /// For the whole of it.
    pub timeout: Duration,
}

impl Default for ReadLimits {
    fn default() -> Self {
        Self {
            bytes_max: 256 << 20,
            files_max: 100_000,
            timeout: Duration::from_secs(120),
        }
    }
}

/// The files of a sandbox at one moment: workspace, HOME and `/tmp`. Processes are not in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Each folder and its content as a tar stream.
    pub folders: Vec<(PathBuf, Vec<u8>)>,
}

/// A file to put into a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Absolute path in the sandbox. Parents are created.
    pub path: PathBuf,
    /// Content.
    pub content: Vec<u8>,
    /// Permission bits, e.g. 0o644.
    pub mode: u32,
}

/// Why a sandbox operation failed.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The kernel or the machine lacks something. Not retryable; `espalier doctor` says more.
    #[error("this machine cannot make a sandbox: {what}; {hint}")]
    Unsupported {
        /// What was refused, with the system's reason.
        what: String,
        /// What to do about it.
        hint: String,
    },
    /// Making it failed. Retryable.
    #[error("sandbox {name} could not be made: {reason}")]
    Create {
        /// The sandbox.
        name: String,
        /// What failed, with the system's reason.
        reason: String,
    },
    /// Whoever makes the sandboxes said no, and will go on saying so until somebody changes
    /// something. Known early: nobody waits for a time limit.
    #[error("sandbox {name} was refused ({cause}): {reason}; {hint}")]
    Refused {
        /// The sandbox.
        name: String,
        /// What kind of no.
        cause: RefusalCause,
        /// What was said.
        reason: String,
        /// What to do about it.
        hint: String,
    },
    /// It has ended, or the connection with its guest broke. Infrastructure, never a reward.
    #[error("sandbox {name} is gone: {reason}")]
    Gone {
        /// The sandbox.
        name: String,
        /// What is known.
        reason: String,
    },
    /// A program could not be started (not found, not executable).
    #[error("sandbox {name}: cannot run {program:?}: {reason}")]
    NotRunnable {
        /// The sandbox.
        name: String,
        /// The program.
        program: String,
        /// The system's reason.
        reason: String,
    },
    /// A program was to run as a user whom the sandbox does not know.
    #[error(
        "sandbox {name}: cannot run as {user:?}: {reason} (image {image}); expected USER[:GROUP] \
         with names of the image's /etc/passwd and /etc/group, or numbers: add the user to the \
         image, or name him by number"
    )]
    NoSuchUser {
        /// The sandbox.
        name: String,
        /// The user, as he was named.
        user: Box<str>,
        /// The image.
        image: Box<str>,
        /// What was looked for, and where.
        reason: Box<str>,
    },
    /// The user may be known, and this sandbox cannot run anything as him. Nothing was run.
    #[error("sandbox {name}: cannot run as {user:?}: {reason}; {hint}")]
    CannotSwitchUser {
        /// The sandbox.
        name: String,
        /// The user, as he was named.
        user: Box<str>,
        /// Why not.
        reason: Box<str>,
        /// What to do about it.
        hint: Box<str>,
    },
    /// A file operation failed (no such file, disk limit reached …).
    #[error("sandbox {name}: {path}: {reason}")]
    File {
        /// The sandbox.
        name: String,
        /// The path in the sandbox.
        path: String,
        /// The system's reason.
        reason: String,
    },
}

/// Why a sandbox was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusalCause {
    /// The image is not there and cannot be got.
    Image,
    /// No node has room for it, or ever will have.
    Unschedulable,
    /// A quota is used up.
    Quota,
    /// We lack a permission.
    Forbidden,
    /// The description of the sandbox was not accepted.
    Invalid,
}

impl std::fmt::Display for RefusalCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Image => "image",
            Self::Unschedulable => "unschedulable",
            Self::Quota => "quota",
            Self::Forbidden => "forbidden",
            Self::Invalid => "invalid",
        })
    }
}

/// Makes sandboxes of one kind.
#[async_trait]
pub trait Provider: Send + Sync + std::fmt::Debug {
    /// Makes a sandbox. Dropping the future leaves nothing behind.
    ///
    /// # Errors
    /// [`SandboxError::Unsupported`], [`SandboxError::Create`], [`SandboxError::Refused`], and
    /// [`SandboxError::File`] when one of the files cannot be written.
    async fn create(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError>;
}

/// A living sandbox. Dropping it destroys it.
#[async_trait]
pub trait Sandbox: Send + Sync + std::fmt::Debug {
    /// Runs a process to its end. Dropping the future kills its process tree.
    ///
    /// # Errors
    /// [`SandboxError::NotRunnable`], [`SandboxError::Gone`]; with [`Exec::user`]
    /// [`SandboxError::NoSuchUser`] and [`SandboxError::CannotSwitchUser`].
    async fn exec(&self, exec: Exec) -> Result<Output, SandboxError>;

    /// Runs a process to its end, reads its standard input (after [`Exec::stdin`]) as it takes it,
    /// and hands its output out as it comes. While nobody takes that, the process waits (its
    /// timeout goes on). Dropping the future kills its process tree. The output that is returned has no bytes of stdout and
    /// stderr. When the receiver is dropped, the rest of the output is thrown away.
    ///
    /// # Errors
    /// As [`Sandbox::exec`]; [`SandboxError::Unsupported`] where the kind cannot.
    async fn exec_streaming(
        &self,
        exec: Exec,
        stdin: &mut (dyn AsyncRead + Send + Unpin),
        chunks: mpsc::Sender<Chunk>,
    ) -> Result<Output, SandboxError> {
        let _ = (exec, stdin, chunks);
        Err(not_offered("exec_streaming"))
    }

    /// Writes a tar stream into a folder, which is made. Files that are there are replaced; paths
    /// that leave the folder are an error. It is read as fast as it is written there.
    ///
    /// # Errors
    /// [`SandboxError::File`], [`SandboxError::Gone`]; [`SandboxError::Unsupported`] where the
    /// kind cannot.
    async fn upload_tar(
        &self,
        folder: PathBuf,
        tar: &mut (dyn AsyncRead + Send + Unpin),
    ) -> Result<(), SandboxError> {
        let _ = (folder, tar);
        Err(not_offered("upload_tar"))
    }

    /// Reads a folder as a tar stream, in order of names, as fast as the writer takes it. Links
    /// that leave the folder, FIFOs and sockets are left out; hard links come as files.
    ///
    /// # Errors
    /// [`SandboxError::File`] (also beyond the limits), [`SandboxError::Gone`];
    /// [`SandboxError::Unsupported`] where the kind cannot.
    async fn download_tar(
        &self,
        folder: PathBuf,
        limits: ReadLimits,
        into: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<(), SandboxError> {
        let _ = (folder, limits, into);
        Err(not_offered("download_tar"))
    }

    /// What is below a folder, folders before what they hold.
    ///
    /// # Errors
    /// As [`Sandbox::download_tar`].
    async fn list(&self, folder: PathBuf, limits: ReadLimits) -> Result<Vec<Entry>, SandboxError> {
        let _ = (folder, limits);
        Err(not_offered("list"))
    }

    /// Copies all files of workspace, HOME and `/tmp` out.
    ///
    /// # Errors
    /// As [`Sandbox::download_tar`].
    async fn snapshot(&self, limits: ReadLimits) -> Result<Snapshot, SandboxError> {
        let _ = limits;
        Err(not_offered("snapshot"))
    }

    /// Writes the files of a snapshot; what is there and not in it stays.
    ///
    /// # Errors
    /// As [`Sandbox::upload_tar`].
    async fn restore(&self, snapshot: &Snapshot) -> Result<(), SandboxError> {
        for (folder, tar) in &snapshot.folders {
            self.upload_tar(folder.clone(), &mut tar.as_slice()).await?;
        }
        Ok(())
    }

    /// Writes files.
    ///
    /// # Errors
    /// [`SandboxError::File`], [`SandboxError::Gone`].
    async fn upload(&self, files: Vec<File>) -> Result<(), SandboxError>;

    /// Reads all regular files under a folder (or one file), sorted by path, at most
    /// `bytes_max` in all.
    ///
    /// # Errors
    /// [`SandboxError::File`] (also when there is more than `bytes_max`), [`SandboxError::Gone`].
    async fn download(&self, path: PathBuf, bytes_max: u64) -> Result<Vec<File>, SandboxError>;

    /// The most memory that it had at a time, in bytes: processes, files that live in memory, and
    /// pages of read-only files that it was the first to touch. `None` where nobody counts.
    fn memory_peak_bytes(&self) -> Option<u64> {
        None
    }

    /// What it was made of, for the record. Kinds that cannot tell say nothing.
    fn image(&self) -> Image {
        Image::default()
    }

    /// Ends all processes and removes everything; returns when nothing is left.
    async fn destroy(self: Box<Self>);
}

fn not_offered(what: &str) -> SandboxError {
    SandboxError::Unsupported {
        what: format!("this kind of sandbox has no {what}"),
        hint: "use the kind local or docker".to_owned(),
    }
}

/// What an engine or a cluster would take and we do not.
fn check(spec: &Spec) -> Result<(), SandboxError> {
    let invalid = |reason: String| SandboxError::Refused {
        name: spec.name.clone(),
        cause: RefusalCause::Invalid,
        reason,
        hint: "correct the recipe or the task".to_owned(),
    };
    let targets = spec.mounts.iter().map(|mount| &mount.target);
    for path in targets.chain([&spec.workspace, &spec.home]) {
        guest::checks::check_path(path).map_err(invalid)?;
    }
    let ports = spec.all_forwards().into_iter().map(|(port, _)| port);
    guest::checks::check_ports(ports).map_err(invalid)?;
    let limits = &spec.limits;
    guest::checks::check_limits(
        limits.memory_bytes,
        limits.pids,
        limits.cpu_cores,
        limits.disk_bytes,
    )
    .map_err(invalid)
}
