//! One run of one container.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    process::{Child, ChildStdin},
    sync::{mpsc, watch},
    time::sleep,
};
use tokio_util::task::TaskTracker;

use super::{
    images::Image,
    node::{self, Node},
    spec::{Places, Process, config},
    volumes::Volumes,
};
use crate::{
    logs::Log,
    validate::{list, text},
};

/// Between looks for the file that says that a process runs. `runc` has no better way to tell.
const LOOK_EVERY: Duration = Duration::from_millis(5);
const PIECE_BYTES: usize = 32 << 10;
/// Pieces of output on their way to somebody who is attached.
const ATTACHED_PIECES: usize = 8;

/// A stream that a piece of output came on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// How a container ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    /// `Completed`, `Error`, `OOMKilled`, `StartError`.
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// What containers of a pod have in common.
#[derive(Debug)]
pub(crate) struct Common<'a> {
    pub(crate) node: &'a Arc<Node>,
    pub(crate) folder: &'a Path,
    pub(crate) uid: &'a str,
    pub(crate) volumes: &'a Volumes,
    pub(crate) pause: u32,
    pub(crate) pids_max: u32,
    pub(crate) tasks: &'a TaskTracker,
}

/// A container whose process was started.
#[derive(Debug)]
pub(crate) struct Container {
    /// As `runc` knows it.
    pub(crate) id: String,
    pub(crate) process: Process,
    pub(crate) log: Arc<Log>,
    node: Arc<Node>,
    folder: PathBuf,
    group: String,
    attached: Mutex<Vec<mpsc::Sender<(Stream, Bytes)>>>,
    pub(crate) stdin: tokio::sync::Mutex<Option<ChildStdin>>,
    /// Whether a first session closes standard input when it ends.
    pub(crate) stdin_once: bool,
    /// The kernel killed it for lack of memory, or somebody wants it to look so.
    memory_killed: AtomicBool,
    ended: watch::Sender<Option<Ended>>,
}

/// The mounts of a container.
fn binds(
    common: &Common<'_>,
    container: &Value,
    image: &Image,
    folder: &Path,
) -> (Vec<(PathBuf, String, bool)>, Vec<PathBuf>) {
    let mut binds: Vec<(PathBuf, String, bool)> = Vec::new();
    let mut needed = Vec::new();
    for (source, inside) in &image.mounts {
        binds.push((source.clone(), inside.display().to_string(), true));
    }
    for (file, inside) in [
        ("hosts", "/etc/hosts"),
        ("hostname", "/etc/hostname"),
        ("resolv.conf", "/etc/resolv.conf"),
    ] {
        binds.push((common.folder.join(file), inside.to_owned(), false));
    }
    let message = text(&container["terminationMessagePath"]).to_owned();
    binds.push((folder.join("message"), message, false));
    for mount in list(&container["volumeMounts"]) {
        let Some((source, read_only)) = common.volumes.folders.get(text(&mount["name"])) else {
            continue;
        };
        let sub = text(&mount["subPath"]);
        let source = if sub.is_empty() {
            source.clone()
        } else {
            let source = source.join(sub);
            needed.push(source.clone());
            source
        };
        let inside = text(&mount["mountPath"]).trim_end_matches('/').to_owned();
        binds.retain(|(_, taken, _)| *taken != inside);
        binds.push((source, inside, *read_only || mount["readOnly"] == true));
    }
    (binds, needed)
}

/// Fills the folder that `runc` makes a container of.
fn bundle(folder: &Path, config: &Value) -> io::Result<()> {
    for name in ["root", "upper", "work"] {
        fs::create_dir_all(folder.join(name))?;
    }
    let message = folder.join("message");
    fs::write(&message, "")?;
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o666);
    fs::set_permissions(message, open)?;
    fs::write(folder.join("config.json"), config.to_string())
}

impl Container {
    /// Makes a container and starts its process.
    pub(crate) async fn start(
        common: &Common<'_>,
        spec: &Value,
        image: &Image,
        process: Process,
        attempt: u32,
        log: Arc<Log>,
    ) -> Result<Arc<Self>, Ended> {
        let name = text(&spec["name"]);
        let failed = |message: String| Ended {
            code: 128,
            reason: "StartError",
            message: format!(
                "failed to create containerd task: failed to create shim task: OCI runtime create \
                 failed: {message}"
            ),
        };
        let id = format!("{}-{name}-{attempt}", common.uid);
        let folder = common.folder.join(format!("{name}-{attempt}"));
        let group = format!("{}/{}/{name}-{attempt}", common.node.group, common.uid);
        let (root, upper, work) = (
            folder.join("root"),
            folder.join("upper"),
            folder.join("work"),
        );
        let (binds, needed) = binds(common, spec, image, &folder);
        let places = Places {
            root: &root,
            binds,
            group: group.clone(),
            pause: common.pause,
            pids_max: common.pids_max,
        };
        let config = config(spec, &process, &places);
        bundle(&folder, &config).map_err(|e| failed(format!("preparing: {e}")))?;
        let script = "root=$1 lower=$2 upper=$3 work=$4 runc=$5 folder=$6 id=$7; shift 7; \
             for path in \"$@\"; do [ -e \"$path\" ] || mkdir -p -m 777 \"$path\"; done; \
             mount -t overlay overlay -o \"lowerdir=$lower,upperdir=$upper,workdir=$work\" \"$root\"; \
             exec runc --root \"$runc\" --log \"$folder/runc.log\" --log-format json run --keep \
             --bundle \"$folder\" --pid-file \"$folder/pid\" \"$id\"";
        let mut command = common.node.command("sh");
        command.args(["-e", "-c", script, "sh"]);
        command.args([&root, &image.rootfs, &upper, &work]);
        command
            .arg(common.node.folder.join("runc"))
            .arg(&folder)
            .arg(&id);
        command.args(&needed);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let stdin = spec["stdin"] == true;
        if stdin {
            command.stdin(Stdio::piped());
        }
        let mut child = command.spawn().map_err(|e| failed(e.to_string()))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let container = Arc::new(Self {
            id,
            process,
            log: Arc::clone(&log),
            node: Arc::clone(common.node),
            folder: folder.clone(),
            group,
            attached: Mutex::default(),
            stdin: tokio::sync::Mutex::new(child.stdin.take()),
            stdin_once: spec["stdinOnce"] == true,
            memory_killed: AtomicBool::new(false),
            ended: watch::channel(None).0,
        });
        let started = started(&mut child, &folder.join("pid")).await;
        if !started {
            // What `runc` says on its standard error is in its log, too.
            let said = complaint(&folder.join("runc.log"));
            let said = match (said, stderr) {
                (Some(said), _) => said,
                (None, Some(mut stderr)) => {
                    let mut text = String::new();
                    let _ = stderr.read_to_string(&mut text).await;
                    text
                }
                (None, None) => "no reason was given".to_owned(),
            };
            container.clean_up().await;
            log.end();
            return Err(failed(said.trim().to_owned()));
        }
        let watched = Arc::clone(&container);
        let fallback = text(&spec["terminationMessagePolicy"]) == "FallbackToLogsOnError";
        common.tasks.spawn(async move {
            let out = watched.copy(stdout, Stream::Stdout);
            let err = watched.copy(stderr, Stream::Stderr);
            let (status, (), ()) = tokio::join!(child.wait(), out, err);
            let code = status.ok().and_then(|s| s.code()).unwrap_or(137);
            watched.log.end();
            watched.finish(code, fallback).await;
        });
        Ok(container)
    }

    /// Passes output on: to the log, and to everybody who is attached.
    async fn copy(&self, source: Option<impl AsyncRead + Unpin>, stream: Stream) {
        let Some(mut source) = source else {
            return;
        };
        let mut buffer = vec![0; PIECE_BYTES];
        loop {
            let count = source.read(&mut buffer).await.unwrap_or(0);
            if count == 0 {
                return;
            }
            let piece = Bytes::copy_from_slice(buffer.get(..count).unwrap_or_default());
            self.log.add(piece.clone());
            let attached = self
                .attached
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            let mut left = false;
            for one in attached {
                // Whoever is slow holds the container up, as with the real thing.
                left |= one.send((stream, piece.clone())).await.is_err();
            }
            if left {
                let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
                attached.retain(|one| !one.is_closed());
            }
        }
    }

    async fn finish(&self, code: i32, fallback: bool) {
        let memory = self.memory_killed.load(Ordering::Relaxed)
            || (code == 137 && node::memory_kills(&self.group) > 0);
        let reason = match (code, memory) {
            (_, true) => "OOMKilled",
            (0, false) => "Completed",
            _ => "Error",
        };
        let mut message = fs::read(self.folder.join("message")).unwrap_or_default();
        message.truncate(4096);
        let mut message = String::from_utf8_lossy(&message).into_owned();
        if message.is_empty() && fallback && code != 0 {
            message = self.log.tail(2048, 80);
        }
        self.clean_up().await;
        let attached = &self.attached;
        attached
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
        self.ended.send_replace(Some(Ended {
            code: if memory { 137 } else { code },
            reason,
            message,
        }));
    }

    async fn clean_up(&self) {
        let mut command = self.node.runc(None);
        command.args(["delete", "--force", &self.id]);
        // It may never have been made.
        let _ = node::run(command).await;
        let root = self.folder.join("root").display().to_string();
        let _ = self.node.script("umount -l \"$1\"", &[&root]).await;
    }

    pub(crate) fn ended(&self) -> Option<Ended> {
        self.ended.borrow().clone()
    }

    pub(crate) async fn wait(&self) -> Ended {
        let mut ended = self.ended.subscribe();
        match ended.wait_for(Option::is_some).await {
            Ok(ended) => ended.clone().unwrap_or_else(lost),
            Err(_) => lost(),
        }
    }

    /// Its output from now on.
    pub(crate) fn attach(&self) -> mpsc::Receiver<(Stream, Bytes)> {
        let (sender, receiver) = mpsc::channel(ATTACHED_PIECES);
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if self.ended().is_none() {
            attached.push(sender);
        }
        receiver
    }

    /// Sends a signal to its first process.
    pub(crate) async fn signal(&self, name: &str) {
        let mut command = self.node.runc(None);
        command.args(["kill", &self.id, name]);
        // It may have ended just now.
        let _ = node::run(command).await;
    }

    /// Kills it; with `memory` it will look as if the kernel had for lack of memory.
    pub(crate) async fn kill(&self, memory: bool) {
        self.memory_killed.fetch_or(memory, Ordering::Relaxed);
        self.signal("KILL").await;
    }

    /// A process beside the first. `number` is one that no other exec of the container has.
    pub(crate) fn exec(&self, argv: &[String], number: u64, stdin: bool) -> io::Result<Exec> {
        let mut process = self.process.value.clone();
        process["args"] = json!(argv);
        let part = |name: &str| self.folder.join(format!("exec-{number}.{name}"));
        let (description, pid, log) = (part("json"), part("pid"), part("log"));
        fs::write(&description, process.to_string())?;
        let mut command = self.node.runc(Some(&log));
        command.arg("exec").arg("--process").arg(&description);
        command.arg("--pid-file").arg(&pid).arg(&self.id);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        if stdin {
            command.stdin(Stdio::piped());
        }
        let child = command.spawn()?;
        Ok(Exec {
            child,
            pid,
            log,
            description,
        })
    }
}

/// A process that was started in a running container.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) child: Child,
    pid: PathBuf,
    log: PathBuf,
    description: PathBuf,
}

impl Exec {
    /// Whether the program was found and runs; before that, output is not its own.
    pub(crate) async fn started(&mut self) -> bool {
        started(&mut self.child, &self.pid).await
    }

    /// Why it did not start.
    pub(crate) fn complaint(&self) -> String {
        complaint(&self.log).unwrap_or_else(|| "no reason was given".to_owned())
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        for file in [&self.pid, &self.log, &self.description] {
            let _ = fs::remove_file(file);
        }
    }
}

/// Waits until a process runs or its starter has given up.
async fn started(child: &mut Child, pid: &Path) -> bool {
    loop {
        if pid.exists() {
            return true;
        }
        tokio::select! {
            // One that is over before we look did run if it left its number.
            _ = child.wait() => return pid.exists(),
            () = sleep(LOOK_EVERY) => {}
        }
    }
}

/// The last error in a log of `runc`.
fn complaint(log: &Path) -> Option<String> {
    let text = fs::read_to_string(log).ok()?;
    let mut messages = text.lines().filter_map(|line| {
        let line: Value = serde_json::from_str(line).ok()?;
        (line["level"] == "error").then(|| text_of(&line["msg"]))
    });
    // The first says what was wrong. A real node's runtime makes and starts in two steps.
    let said = messages.next()?;
    Some(said.replacen("runc run failed", "runc create failed", 1))
}

fn text_of(value: &Value) -> String {
    text(value).to_owned()
}

fn lost() -> Ended {
    Ended {
        code: 137,
        reason: "Error",
        message: "the node ended".to_owned(),
    }
}
