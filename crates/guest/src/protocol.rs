//! What the host, the warden and init say to each other.
//!
//! **Host and init** share one stream of frames per sandbox:
//! `length: u32 LE` (of the rest), `kind: u8`, `id: u32 LE`, body. The body is at most
//! [`BODY_BYTES_MAX`]; a longer frame or an unknown kind breaks the connection. `id` names the
//! operation, chosen by the host. Bodies are raw bytes or JSON, as said at each [`Kind`].
//!
//! **Host and warden** share one `SOCK_SEQPACKET` pair: one JSON message per packet, at most
//! [`PACKET_BYTES_MAX`]; [`ToWarden::Create`] carries the descriptor of init's end of its stream.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Version of both protocols; said in [`Hello`] and [`FromWarden::Ready`].
pub const VERSION: u32 = 3;
/// Most bytes of a frame's body.
pub const BODY_BYTES_MAX: usize = 1 << 20;
/// Bulk data goes in chunks of this many bytes.
pub const CHUNK_BYTES: usize = 128 << 10;
/// Most bytes of a packet between host and warden.
pub const PACKET_BYTES_MAX: usize = 128 << 10;
/// Where the guest binary is in every sandbox.
pub const GUEST_PATH: &str = "/run/espalier/guest";
/// Where the gateway's socket is in a sandbox that has one.
pub const GATEWAY_SOCKET_PATH: &str = "/run/espalier/gateway.sock";
/// Where the socket behind a forwarded port is: the first is the gateway's.
#[must_use]
pub fn forward_path(index: usize) -> String {
    if index == 0 {
        GATEWAY_SOCKET_PATH.to_owned()
    } else {
        format!("/run/espalier/forward-{index}.sock")
    }
}
/// The sandbox's own user and group, who everything runs as unless a request says otherwise.
pub const UID: u32 = 1000;
/// Bytes of a streamed output, and of each direction of a tunnelled connection, that may be on
/// their way before the receiver says that it took some.
pub const WINDOW_BYTES: usize = 256 << 10;
/// Processes that may run at the same time in one sandbox through `exec`.
pub const EXECS_MAX: usize = 256;

/// The degraded mode in which a sandbox has its own user alone.
pub const ONE_USER: &str = "one-user";

const HEADER_BYTES: usize = 4 + 1 + 4;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// To init: prepare a process; body is [`ExecRequest`]. Standard input follows.
    Exec = 1,
    /// To init: bytes of its standard input.
    Stdin = 2,
    /// To init: standard input is complete, run.
    Run = 3,
    /// To init: kill the process tree, or forget the operation. Answered with [`Kind::Exited`]
    /// when it ran.
    Cancel = 4,
    /// To init: write a file; body is [`encode_path`] of mode and path. Data follows.
    Put = 5,
    /// To init: bytes of the file.
    PutData = 6,
    /// To init: the file is complete. Answered with [`Kind::PutDone`] or [`Kind::FileFailed`].
    PutEnd = 7,
    /// To init: read files; body is [`encode_path`] of the limit in bytes and the path.
    Get = 8,
    /// To init: so many more bytes of a streamed output may be sent; body is `u32 LE`.
    Credit = 9,
    /// To init: the host is alive. No body.
    Ping = 10,
    /// To init: a standard input that was left open is complete.
    StdinEnd = 11,
    /// From init, once, first: it is ready; body is [`Hello`].
    Hello = 64,
    /// From the child that could not become init: body is text.
    SetupFailed = 65,
    /// From init: the program could not be started; body is text.
    ExecFailed = 66,
    /// From init, before [`Kind::Exited`]: kept standard output.
    Stdout = 67,
    /// From init, before [`Kind::Exited`]: kept standard error.
    Stderr = 68,
    /// From init: the process ended; body is [`Exited`].
    Exited = 69,
    /// From init: the file is written.
    PutDone = 70,
    /// From init: a file operation failed; body is [`FileFailure`].
    FileFailed = 71,
    /// From init: a file begins; body is [`encode_path`] of mode and path.
    GetFile = 72,
    /// From init: bytes of that file.
    GetData = 73,
    /// From init: there are no more files.
    GetDone = 74,
    /// From init, last: why it ends; body is text.
    Goodbye = 75,
    /// From init: somebody connected to a forwarded port, which is the body (`u32 LE`); the id
    /// names the connection from now on, in a space of its own. Only where no socket of the host
    /// is at hand.
    TunnelOpen = 76,
    /// Both ways: bytes of a connection, at most [`WINDOW_BYTES`] before they are credited.
    TunnelData = 77,
    /// Both ways: the sender has no more bytes.
    TunnelShut = 78,
    /// Both ways: the connection is broken; forget it.
    TunnelClose = 79,
    /// Both ways: so many bytes were taken; body is `u32 LE`.
    TunnelCredit = 80,
    /// From init: the process took so many bytes of an open standard input; body is `u32 LE`.
    StdinCredit = 81,
    /// From init: the program was not started, because it cannot run as the user that was asked
    /// for; body is [`UserFailure`].
    UserFailed = 82,
}

impl Kind {
    const ALL: [Self; 30] = [
        Self::Exec,
        Self::Stdin,
        Self::Run,
        Self::Cancel,
        Self::Put,
        Self::PutData,
        Self::PutEnd,
        Self::Get,
        Self::Credit,
        Self::Ping,
        Self::StdinEnd,
        Self::Hello,
        Self::SetupFailed,
        Self::ExecFailed,
        Self::Stdout,
        Self::Stderr,
        Self::Exited,
        Self::PutDone,
        Self::FileFailed,
        Self::GetFile,
        Self::GetData,
        Self::GetDone,
        Self::Goodbye,
        Self::TunnelOpen,
        Self::TunnelData,
        Self::TunnelShut,
        Self::TunnelClose,
        Self::TunnelCredit,
        Self::StdinCredit,
        Self::UserFailed,
    ];

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// One message of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// What it is.
    pub kind: Kind,
    /// The operation it belongs to; 0 for none.
    pub id: u32,
    /// Its content.
    pub body: Vec<u8>,
}

/// Why bytes are no frame, or a message no message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProtocolError {
    /// A frame says it is longer than any frame may be, or too short to be one.
    Length {
        /// The bytes it announces.
        bytes: usize,
    },
    /// No such kind of frame.
    UnknownKind(u8),
    /// The body is not what its kind promises.
    Body(String),
}

impl std::fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Length { bytes } => write!(
                f,
                "guest protocol: a frame of {bytes} bytes, expected 5 to {}",
                BODY_BYTES_MAX + HEADER_BYTES - 4
            ),
            Self::UnknownKind(kind) => write!(f, "guest protocol: unknown frame kind {kind}"),
            Self::Body(reason) => write!(f, "guest protocol: bad frame body: {reason}"),
        }
    }
}

impl std::error::Error for ProtocolError {}

impl Frame {
    /// A frame with raw bytes.
    #[must_use]
    pub fn new(kind: Kind, id: u32, body: Vec<u8>) -> Self {
        Self { kind, id, body }
    }

    /// A frame with JSON.
    #[must_use]
    pub fn json(kind: Kind, id: u32, value: &impl Serialize) -> Self {
        // Only maps with keys that are not strings fail, and no message has one.
        Self::new(kind, id, serde_json::to_vec(value).unwrap_or_default())
    }

    /// Reads the body as JSON.
    ///
    /// # Errors
    /// [`ProtocolError::Body`].
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, ProtocolError> {
        serde_json::from_slice(&self.body).map_err(|e| ProtocolError::Body(e.to_string()))
    }

    /// The bytes on the wire.
    ///
    /// # Errors
    /// [`ProtocolError::Length`] when the body is over [`BODY_BYTES_MAX`].
    pub fn encode(&self) -> Result<Vec<u8>, ProtocolError> {
        if self.body.len() > BODY_BYTES_MAX {
            return Err(ProtocolError::Length {
                bytes: self.body.len(),
            });
        }
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.body.len());
        let length = (HEADER_BYTES - 4 + self.body.len()) as u32;
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.push(self.kind as u8);
        bytes.extend_from_slice(&self.id.to_le_bytes());
        bytes.extend_from_slice(&self.body);
        Ok(bytes)
    }
}

/// Takes bytes as they come and gives frames. After an error the connection is unusable.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
}

impl Decoder {
    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete frame; `None` when more bytes are needed.
    ///
    /// # Errors
    /// [`ProtocolError::Length`] and [`ProtocolError::UnknownKind`].
    pub fn next_frame(&mut self) -> Result<Option<Frame>, ProtocolError> {
        let rest = &self.buffer[self.start..];
        let Some((length, rest)) = rest.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let bytes = u32::from_le_bytes(*length) as usize;
        if !(HEADER_BYTES - 4..=BODY_BYTES_MAX + HEADER_BYTES - 4).contains(&bytes) {
            return Err(ProtocolError::Length { bytes });
        }
        if let Some(kind) = rest.first()
            && Kind::from_byte(*kind).is_none()
        {
            return Err(ProtocolError::UnknownKind(*kind));
        }
        let Some(frame) = rest.get(..bytes) else {
            return Ok(None);
        };
        let Some((header, body)) = frame.split_first_chunk::<5>() else {
            return Ok(None);
        };
        let [kind, id @ ..] = *header;
        let kind = Kind::from_byte(kind).ok_or(ProtocolError::UnknownKind(kind))?;
        let frame = Frame {
            kind,
            id: u32::from_le_bytes(id),
            body: body.to_vec(),
        };
        self.start += 4 + bytes;
        Ok(Some(frame))
    }
}

/// A number and a path (any bytes) as a body: `number: u64 LE`, path.
#[must_use]
pub fn encode_path(number: u64, path: &[u8]) -> Vec<u8> {
    let mut body = number.to_le_bytes().to_vec();
    body.extend_from_slice(path);
    body
}

/// The inverse of [`encode_path`].
///
/// # Errors
/// [`ProtocolError::Body`] when it is too short.
pub fn decode_path(body: &[u8]) -> Result<(u64, &[u8]), ProtocolError> {
    body.split_first_chunk::<8>()
        .map(|(number, path)| (u64::from_le_bytes(*number), path))
        .ok_or_else(|| ProtocolError::Body("a number and a path expected".to_owned()))
}

/// A number of bytes as a body.
#[must_use]
pub fn encode_count(bytes: usize) -> Vec<u8> {
    u32::try_from(bytes)
        .unwrap_or(u32::MAX)
        .to_le_bytes()
        .to_vec()
}

/// The inverse of [`encode_count`].
///
/// # Errors
/// [`ProtocolError::Body`] when it has another length.
pub fn decode_count(body: &[u8]) -> Result<usize, ProtocolError> {
    body.try_into()
        .map(|bytes| u32::from_le_bytes(bytes) as usize)
        .map_err(|_| ProtocolError::Body("a count of 4 bytes expected".to_owned()))
}

/// What to run; see `sandbox::Exec`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecRequest {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Working folder.
    pub cwd: String,
    /// The whole environment.
    pub env: Vec<(String, String)>,
    /// Kill after this.
    pub timeout_ms: u64,
    /// Bytes kept of each of stdout and stderr.
    pub output_bytes_max: u64,
    /// Kill what the process leaves in the background when it ends by itself.
    pub end_background: bool,
    /// Send output as it comes, within [`WINDOW_BYTES`] and what [`Kind::Credit`] adds; the
    /// process waits when nobody takes it. `output_bytes_max` does not matter then. Standard input
    /// is a pipe that stays open: it comes after [`Kind::Run`], within [`WINDOW_BYTES`] and what
    /// [`Kind::StdinCredit`] adds, and ends with [`Kind::StdinEnd`].
    #[serde(default)]
    pub stream: bool,
    /// Who it runs as, `USER[:GROUP]`, looked up in the lists of the sandbox; the sandbox's own
    /// user when `None`. HOME, USER and LOGNAME are set by it where `env` has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// Why a program cannot run as a user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserFailure {
    /// What kind of no.
    pub cause: UserCause,
    /// In words.
    pub reason: String,
}

/// What kind of no a user met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UserCause {
    /// The sandbox knows no such user or group.
    Unknown,
    /// The sandbox cannot run anything as him.
    Refused,
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exited {
    /// Its exit code, when it ended by itself.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Whether init killed it at its timeout.
    pub timed_out: bool,
    /// Bytes of output that were not kept.
    pub dropped_bytes: u64,
    /// Wall-clock seconds.
    pub seconds: f64,
    /// Processes that the kernel killed meanwhile for lack of memory, where the sandbox can see
    /// its own control group; else 0.
    #[serde(default)]
    pub memory_kills: u64,
}

/// Why a file operation failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFailure {
    /// The path.
    pub path: String,
    /// The system's reason.
    pub reason: String,
}

/// First words of init.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`].
    pub version: u32,
    /// What the image sets for every process; empty where there is no image.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// A sandbox to make.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
    /// Cores.
    pub cpu_cores: f64,
    /// Bytes of all writable files.
    pub disk_bytes: u64,
    /// Seconds until it ends.
    pub deadline_s: u64,
    /// Host path and sandbox path of each read-only mount.
    pub mounts: Vec<(PathBuf, PathBuf)>,
    /// An unpacked image on the host instead of the host's own system.
    #[serde(default)]
    pub rootfs: Option<PathBuf>,
    /// Writable folder of the task.
    pub workspace: PathBuf,
    /// Writable HOME.
    pub home: PathBuf,
    /// Loopback ports and the sockets on the host that they lead to. The first is the gateway's.
    pub forwards: Vec<(u16, PathBuf)>,
}

/// A sandbox inside a container that somebody else made: the argument of `guest init`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerPlan {
    /// Seconds until it ends.
    pub deadline_s: u64,
    /// It ends when it heard nothing for this long.
    pub heartbeat_s: u64,
    /// Writable folder of the task.
    pub workspace: PathBuf,
    /// Writable HOME.
    pub home: PathBuf,
    /// More folders to make and to give to the sandbox's user.
    pub folders: Vec<PathBuf>,
    /// Ports whose connections are tunnelled to the host.
    pub ports: Vec<u16>,
    /// Where the one control connection is accepted; standard input and output when `None`.
    pub control_socket: Option<PathBuf>,
}

/// What an init container prepares for [`ContainerPlan`]: the argument of `guest install`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstallPlan {
    /// Folders of the image, which need not exist, and where to copy them: the sandbox's folders.
    pub copies: Vec<(PathBuf, PathBuf)>,
    /// Where to write `passwd` and `group`.
    pub users: PathBuf,
    /// HOME of the sandbox's user.
    pub home: PathBuf,
}

/// From the host to the warden.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ToWarden {
    /// Make a sandbox; the packet carries init's end of the control stream.
    Create {
        /// Chosen by the host, never used twice.
        id: u64,
        /// What to make.
        plan: Box<Plan>,
    },
    /// End it, if it is there.
    Destroy {
        /// The sandbox.
        id: u64,
    },
}

/// From the warden to the host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FromWarden {
    /// First packet: sandboxes can be made.
    Ready {
        /// [`VERSION`].
        version: u32,
        /// How limits are enforced.
        capabilities: Capabilities,
    },
    /// First and last packet: no sandbox can be made on this machine.
    Unsupported {
        /// What was refused.
        what: String,
        /// What to do about it.
        hint: String,
    },
    /// The process exists; it says hello on its own stream.
    Made {
        /// The sandbox.
        id: u64,
        /// The file that counts out-of-memory kills (`oom_kill N`).
        memory_events: Option<PathBuf>,
    },
    /// It could not be made; nothing is left of it.
    CreateFailed {
        /// The sandbox.
        id: u64,
        /// What failed, with the system's reason.
        reason: String,
    },
    /// It has ended and nothing is left of it. Also the answer to a `Destroy` of a sandbox that
    /// is not there.
    Ended {
        /// The sandbox.
        id: u64,
        /// How.
        reason: String,
    },
}

/// How the local kind isolates and limits on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Capabilities {
    /// The memory limit: `cgroup v1`, `cgroup v2` or `rlimit`.
    pub memory: String,
    /// The process limit: likewise.
    pub pids: String,
    /// The CPU limit: `cgroup v1`, `cgroup v2` or `none`.
    pub cpu: String,
    /// Whether a cgroup 2 tracks every process, so that `cgroup.kill` works.
    pub tracking: bool,
    /// The host's user that sandboxes run as.
    pub host_uid: u32,
    /// How many numbers of users a sandbox has: 1 is its own user alone.
    #[serde(default)]
    pub users: u32,
    /// What is missing and what that costs, one line each.
    pub degraded: Vec<Degraded>,
}

/// Something a machine lacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Degraded {
    /// The name of the degraded mode.
    pub name: String,
    /// What was found.
    pub found: String,
    /// What that costs.
    pub costs: String,
}

#[cfg(test)]
mod tests;
