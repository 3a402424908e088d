//! A sandbox with our guest in it: the same for every kind. What differs between the kinds, how
//! it is made and how it ends, is a [`Shell`].

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use async_trait::async_trait;
use guest::protocol::{ExecRequest, GUEST_PATH, UserCause, UserFailure};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    sync::{mpsc, oneshot},
    time::timeout,
};

use crate::{
    Chunk, Entry, Exec, Exit, File, Image, Output, ReadLimits, Sandbox, SandboxError, Snapshot,
    Spec,
    stream::{Answer, Broken, Stream},
};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// For PID 1 to say that the sandbox is ready.
pub(crate) const HELLO_TIMEOUT: Duration = Duration::from_secs(30);
/// For writing a tar stream that has arrived.
const UNPACK_TIMEOUT: Duration = Duration::from_secs(600);
/// Bytes of the standard error of a file operation that make it into the message.
const REASON_BYTES_MAX: usize = 4 << 10;
/// Bytes of a listing; some 500,000 entries.
const LISTING_BYTES_MAX: u64 = 128 << 20;
/// Pieces of output between the guest and a slow taker, beside the guest's window.
const CHUNKS_WAITING_MAX: usize = 4;

fn default_env(home: &Path) -> BTreeMap<String, String> {
    BTreeMap::from([
        ("PATH".to_owned(), PATH.to_owned()),
        ("HOME".to_owned(), home.to_string_lossy().into_owned()),
        ("LANG".to_owned(), "C.UTF-8".to_owned()),
    ])
}

/// What is around the guest.
#[async_trait]
pub(crate) trait Shell: Send + Sync + std::fmt::Debug + 'static {
    /// Why it ended, from whoever knows best, when the guest did not say.
    async fn end_reason(&self) -> Option<String>;

    /// Processes killed for lack of memory so far, where somebody outside counts them.
    fn memory_kills(&self) -> u64 {
        0
    }

    /// The most memory that its processes had at once, in bytes, where somebody counts.
    fn memory_peak_bytes(&self) -> Option<u64> {
        None
    }

    /// What it was made of.
    fn image(&self) -> Image;

    /// What to do where programs cannot run as other users than the sandbox's own.
    fn users_hint(&self) -> String {
        "leave `user` out, or use another kind of sandbox".to_owned()
    }

    /// Ends it; returns when nothing is left.
    async fn destroy(self: Box<Self>);
}

/// A living sandbox of any kind.
#[derive(Debug)]
pub(crate) struct Inhabited {
    name: String,
    workspace: PathBuf,
    home: PathBuf,
    /// The image that its spec names.
    image: Option<String>,
    env: BTreeMap<String, String>,
    /// Whether the spec itself says what HOME is.
    home_said: bool,
    // Before `shell`: closing the stream and destroying what is around go in this order.
    stream: Stream,
    shell: Box<dyn Shell>,
}

impl Inhabited {
    /// Waits for the guest's first word, and writes the files of the spec.
    pub(crate) async fn start(
        spec: Spec,
        stream: Stream,
        hello: oneshot::Receiver<Answer>,
        shell: Box<dyn Shell>,
    ) -> Result<Self, SandboxError> {
        let mut sandbox = Self {
            name: spec.name,
            workspace: spec.workspace,
            home: spec.home,
            image: spec.image,
            home_said: spec.env.contains_key("HOME"),
            env: spec.env,
            stream,
            shell,
        };
        let reason = match timeout(HELLO_TIMEOUT, hello).await {
            Ok(Ok(Answer::Hello(hello))) => {
                // The image's own settings are the weakest.
                let ours = std::mem::replace(&mut sandbox.env, default_env(&sandbox.home));
                sandbox.env.extend(hello.env);
                sandbox.env.extend(ours);
                if !spec.files.is_empty() {
                    sandbox.upload(spec.files).await?;
                }
                return Ok(sandbox);
            }
            Ok(Ok(Answer::SetupFailed(reason))) => reason,
            Ok(Ok(other)) => format!("unexpected first word {other:?}"),
            Ok(Err(_)) => {
                sandbox
                    .end_reason("its first process ended without a word")
                    .await
            }
            Err(_) => format!("it was not ready after {HELLO_TIMEOUT:?}"),
        };
        Err(SandboxError::Create {
            name: sandbox.name.clone(),
            reason,
        })
    }

    /// Why it ended, from whoever knows best.
    async fn end_reason(&self, otherwise: &str) -> String {
        if let Some(goodbye) = self.stream.goodbye() {
            return goodbye;
        }
        let reason = self.shell.end_reason().await;
        reason.unwrap_or_else(|| otherwise.to_owned())
    }

    async fn gone(&self, Broken(what): Broken) -> SandboxError {
        SandboxError::Gone {
            name: self.name.clone(),
            reason: self.end_reason(&what).await,
        }
    }

    async fn unexpected(&self, answer: Answer) -> SandboxError {
        match answer {
            Answer::FileFailed(failure) => self.file_error(&failure.path, failure.reason),
            other => self.gone(Broken(format!("it answered {other:?}"))).await,
        }
    }

    fn file_error(&self, path: &str, reason: String) -> SandboxError {
        SandboxError::File {
            name: self.name.clone(),
            path: path.to_owned(),
            reason,
        }
    }

    fn not_runnable(&self, argv: &[String], reason: String) -> SandboxError {
        SandboxError::NotRunnable {
            name: self.name.clone(),
            program: argv.first().cloned().unwrap_or_default(),
            reason,
        }
    }

    fn request(&self, exec: &Exec, stream: bool) -> Result<ExecRequest, SandboxError> {
        let cwd = exec.cwd.as_deref().unwrap_or(&self.workspace);
        let cwd = Path::to_str(cwd).ok_or_else(|| {
            let reason = format!("{}: the path is not UTF-8", cwd.display());
            self.not_runnable(&exec.argv, reason)
        })?;
        if let Some(user) = &exec.user {
            guest::user::check(user).map_err(|reason| self.no_such_user(user, reason))?;
        }
        let mut env = self.env.clone();
        if exec.user.is_some() && !self.home_said {
            // Ours is that of the sandbox's own user; the guest knows the other's.
            env.remove("HOME");
        }
        env.extend(exec.env.clone());
        Ok(ExecRequest {
            argv: exec.argv.clone(),
            cwd: cwd.to_owned(),
            env: env.into_iter().collect(),
            timeout_ms: u64::try_from(exec.timeout.as_millis()).unwrap_or(u64::MAX),
            output_bytes_max: exec.output_bytes_max as u64,
            end_background: exec.end_background,
            stream,
            user: exec.user.clone(),
        })
    }

    fn no_such_user(&self, user: &str, reason: String) -> SandboxError {
        let image = self.image.clone().unwrap_or_else(|| {
            let Image { kind, digest } = self.shell.image();
            format!("of kind {kind} {digest}")
        });
        SandboxError::NoSuchUser {
            name: self.name.clone(),
            user: user.into(),
            image: image.into(),
            reason: reason.into(),
        }
    }

    fn not_as(&self, user: &str, UserFailure { cause, reason }: UserFailure) -> SandboxError {
        match cause {
            UserCause::Unknown => self.no_such_user(user, reason),
            UserCause::Refused => SandboxError::CannotSwitchUser {
                name: self.name.clone(),
                user: user.into(),
                reason: reason.into(),
                hint: self.shell.users_hint().into(),
            },
        }
    }

    async fn output(
        &self,
        exec: &Exec,
        memory_kills: u64,
        answer: Result<Answer, Broken>,
    ) -> Result<Output, SandboxError> {
        match answer {
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
                out_of_memory: exited.memory_kills > 0 || self.shell.memory_kills() > memory_kills,
                seconds: exited.seconds,
            }),
            Ok(Answer::NotRunnable(reason)) => Err(self.not_runnable(&exec.argv, reason)),
            Ok(Answer::NotAs(failure)) => {
                Err(self.not_as(exec.user.as_deref().unwrap_or_default(), failure))
            }
            Ok(other) => Err(self.unexpected(other).await),
            Err(broken) => Err(self.gone(broken).await),
        }
    }

    /// An exec of the guest for a file operation.
    fn guest(&self, arguments: &[&str], timeout: Duration) -> Exec {
        Exec {
            argv: [GUEST_PATH]
                .iter()
                .chain(arguments)
                .map(|a| (*a).to_owned())
                .collect(),
            cwd: Some("/".into()),
            env: BTreeMap::new(),
            stdin: Vec::new(),
            timeout,
            output_bytes_max: REASON_BYTES_MAX,
            end_background: true,
            user: None,
        }
    }

    /// What a file operation by the guest came to.
    fn judge(&self, path: &str, exit: Exit, stderr: &[u8]) -> Result<(), SandboxError> {
        let reason = match exit {
            Exit::Code(0) => return Ok(()),
            Exit::TimedOut => "it took longer than its timeout".to_owned(),
            Exit::Signal(signal) => format!("it was killed by signal {signal}"),
            Exit::Code(_) => String::from_utf8_lossy(stderr).trim().to_owned(),
        };
        Err(self.file_error(path, reason))
    }

    fn text<'a>(&self, folder: &'a Path) -> Result<&'a str, SandboxError> {
        folder.to_str().ok_or_else(|| {
            self.file_error(
                &folder.to_string_lossy(),
                "the path is not UTF-8".to_owned(),
            )
        })
    }
}

#[async_trait]
impl Sandbox for Inhabited {
    fn memory_peak_bytes(&self) -> Option<u64> {
        self.shell.memory_peak_bytes()
    }

    fn image(&self) -> Image {
        self.shell.image()
    }

    async fn exec(&self, exec: Exec) -> Result<Output, SandboxError> {
        let request = self.request(&exec, false)?;
        let memory_kills = self.shell.memory_kills();
        let answer = self.stream.exec(&request, &exec.stdin).await;
        self.output(&exec, memory_kills, answer).await
    }

    async fn exec_streaming(
        &self,
        exec: Exec,
        stdin: &mut (dyn AsyncRead + Send + Unpin),
        chunks: mpsc::Sender<Chunk>,
    ) -> Result<Output, SandboxError> {
        let request = self.request(&exec, true)?;
        let memory_kills = self.shell.memory_kills();
        let answer = self
            .stream
            .exec_streaming(&request, &mut exec.stdin.as_slice().chain(stdin), &chunks)
            .await;
        // Whoever takes the output sees its end before he hears how the process ended.
        drop(chunks);
        self.output(&exec, memory_kills, answer).await
    }

    async fn upload_tar(
        &self,
        folder: PathBuf,
        tar: &mut (dyn AsyncRead + Send + Unpin),
    ) -> Result<(), SandboxError> {
        let path = self.text(&folder)?;
        let exec = self.guest(&["unpack", path], UNPACK_TIMEOUT);
        let (sender, mut receiver) = mpsc::channel(CHUNKS_WAITING_MAX);
        let take = async {
            let mut stderr = Vec::new();
            while let Some(Chunk::Stdout(bytes) | Chunk::Stderr(bytes)) = receiver.recv().await {
                stderr.extend(bytes);
                stderr.truncate(REASON_BYTES_MAX);
            }
            stderr
        };
        let (output, stderr) = tokio::join!(self.exec_streaming(exec, tar, sender), take);
        self.judge(path, output?.exit, &stderr)
    }

    async fn download_tar(
        &self,
        folder: PathBuf,
        limits: ReadLimits,
        into: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<(), SandboxError> {
        let path = self.text(&folder)?;
        let (bytes, files) = (limits.bytes_max.to_string(), limits.files_max.to_string());
        let exec = self.guest(&["pack", path, &bytes, &files], limits.timeout);
        let (sender, mut receiver) = mpsc::channel(CHUNKS_WAITING_MAX);
        let take = async {
            let mut stderr = Vec::new();
            while let Some(chunk) = receiver.recv().await {
                match chunk {
                    Chunk::Stdout(bytes) => into
                        .write_all(&bytes)
                        .await
                        .map_err(|e| self.file_error(path, format!("writing it here: {e}")))?,
                    Chunk::Stderr(bytes) => {
                        stderr.extend(bytes);
                        stderr.truncate(REASON_BYTES_MAX);
                    }
                }
            }
            into.flush()
                .await
                .map_err(|e| self.file_error(path, format!("writing it here: {e}")))?;
            Ok(stderr)
        };
        let mut no_input = tokio::io::empty();
        let run = self.exec_streaming(exec, &mut no_input, sender);
        let (output, stderr) = tokio::try_join!(run, take)?;
        self.judge(path, output.exit, &stderr)
    }

    async fn list(&self, folder: PathBuf, limits: ReadLimits) -> Result<Vec<Entry>, SandboxError> {
        let path = self.text(&folder)?;
        let files = limits.files_max.to_string();
        let exec = self.guest(&["list", path, &files], limits.timeout);
        let (sender, mut receiver) = mpsc::channel(CHUNKS_WAITING_MAX);
        let take = async {
            let (mut text, mut stderr) = (Vec::new(), Vec::new());
            while let Some(chunk) = receiver.recv().await {
                match chunk {
                    Chunk::Stdout(bytes) => text.extend(bytes),
                    Chunk::Stderr(bytes) => stderr.extend(bytes),
                }
                if (text.len() + stderr.len()) as u64 > LISTING_BYTES_MAX {
                    let reason = format!("a listing of more than {LISTING_BYTES_MAX} bytes");
                    return Err(self.file_error(path, reason));
                }
            }
            Ok((text, stderr))
        };
        let mut no_input = tokio::io::empty();
        let run = self.exec_streaming(exec, &mut no_input, sender);
        let (output, (text, stderr)) = tokio::try_join!(run, take)?;
        self.judge(path, output.exit, &stderr)?;
        serde_json::Deserializer::from_slice(&text)
            .into_iter()
            .collect::<Result<_, _>>()
            .map_err(|e| self.file_error(path, format!("the guest's listing: {e}")))
    }

    async fn snapshot(&self, limits: ReadLimits) -> Result<Snapshot, SandboxError> {
        let mut folders = Vec::new();
        let mut rest = limits;
        for folder in [&self.workspace, &self.home, &PathBuf::from("/tmp")] {
            let mut tar = Vec::new();
            self.download_tar(folder.clone(), rest, &mut tar).await?;
            rest.bytes_max = rest.bytes_max.saturating_sub(tar.len() as u64);
            folders.push((folder.clone(), tar));
        }
        Ok(Snapshot { folders })
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

    async fn destroy(self: Box<Self>) {
        let Self { stream, shell, .. } = *self;
        drop(stream);
        shell.destroy().await;
    }
}

/// Reads up to a chunk; empty at the end.
pub(crate) async fn next_piece(
    from: &mut (dyn AsyncRead + Send + Unpin),
    buffer: &mut Vec<u8>,
    bytes_max: usize,
) -> std::io::Result<()> {
    buffer.clear();
    from.take(bytes_max as u64).read_to_end(buffer).await?;
    Ok(())
}
