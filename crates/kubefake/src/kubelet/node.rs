//! The machine of the one node: a pid and a mount namespace in which `runc` makes containers.
//!
//! Everything of the node is a child of its first process, which ends when its standard input
//! closes: when we do, however we end. With it the kernel ends every process of the node, and
//! every mount goes. What is left on the host are control groups (removed at the end, and by the
//! next node if we were killed) and a temporary folder.

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpListener,
    process::{Child, Command},
    time::timeout,
};

/// For a helper program to do its work.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// A control group whose processes were killed is empty after at most this long.
const GROUP_EMPTY_TIMEOUT: Duration = Duration::from_secs(10);
/// Where pods find the API, when they may.
pub(crate) const SERVICE_ADDRESS: &str = "10.96.0.1";
/// Control groups of nodes begin with it.
const GROUP_PREFIX: &str = "kubefake-";

/// So that the nodes of one process have different names.
static NODES: AtomicU64 = AtomicU64::new(0);

#[derive(Debug)]
pub(crate) struct Node {
    /// The first process; its standard input is what keeps the node alive.
    process: Mutex<Option<Child>>,
    /// Of the node's process 1, as the host numbers it.
    pid: u32,
    /// On the host and in the node alike.
    pub(crate) folder: PathBuf,
    /// Of all control groups of the node.
    pub(crate) group: String,
}

/// The namespaces that the containers of a pod share.
#[derive(Debug)]
pub(crate) struct Pause {
    /// Ends when this is dropped.
    _process: Child,
    /// As the node numbers it.
    pub(crate) pid: u32,
    /// The API as pods see it.
    pub(crate) api: Option<TcpListener>,
}

impl Node {
    /// Makes the node. Needs root, `runc`, `busybox` and util-linux.
    pub(crate) async fn start(folder: PathBuf) -> io::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            return Err(io::Error::other(
                "pods that run need root (mounts, control groups); start kubefake without a node",
            ));
        }
        for (program, package) in [
            ("runc", "runc"),
            ("busybox", "busybox-static"),
            ("unshare", "util-linux"),
            ("nsenter", "util-linux"),
        ] {
            let path = std::env::var_os("PATH").unwrap_or_default();
            if !std::env::split_paths(&path).any(|p| p.join(program).exists()) {
                return Err(io::Error::other(format!(
                    "no {program}: `sh scripts/setup.sh test` installs the package {package}"
                )));
            }
        }
        sweep();
        let mut process = Command::new("unshare")
            .args(["--pid", "--mount", "--fork", "--kill-child", "--mount-proc"])
            .args(["--propagation", "private", "--", "sh", "-c"])
            .arg("echo ready; exec cat > /dev/null")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        let line = first_line(&mut process).await?;
        if line != "ready" {
            return Err(io::Error::other(format!("the node said {line:?}")));
        }
        let outer = process
            .id()
            .ok_or_else(|| io::Error::other("the node ended"))?;
        let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children"))?;
        let pid = children
            .split_whitespace()
            .next()
            .and_then(|pid| pid.parse().ok())
            .ok_or_else(|| io::Error::other("the node has no first process"))?;
        let number = NODES.fetch_add(1, Ordering::Relaxed);
        let group = format!("{GROUP_PREFIX}{}-{number}", owner());
        fs::create_dir_all(folder.join("runc"))?;
        Ok(Self {
            process: Mutex::new(Some(process)),
            pid,
            folder,
            group,
        })
    }

    /// A command that will run in the node.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.pid))
            .args(["--pid", "--mount", "--", program])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        command
    }

    /// `runc` in the node.
    pub(crate) fn runc(&self, log: Option<&Path>) -> Command {
        let mut command = self.command("runc");
        command.arg("--root").arg(self.folder.join("runc"));
        if let Some(log) = log {
            command.arg("--log").arg(log).args(["--log-format", "json"]);
        }
        command
    }

    /// Runs a script of `sh` in the node; its arguments are `$1` and so on.
    pub(crate) async fn script(&self, script: &str, arguments: &[&str]) -> io::Result<()> {
        let mut command = self.command("sh");
        command.args(["-e", "-c", script, "sh"]).args(arguments);
        run(command).await.map(drop)
    }

    /// Makes the namespaces of a pod. With `api` the pod may reach the API at its usual address.
    pub(crate) async fn pause(&self, hostname: &str, api: bool) -> io::Result<Pause> {
        let mut command = self.command("unshare");
        let script = "busybox hostname \"$1\"; busybox ip link set lo up; \
                      [ -z \"$2\" ] || busybox ip addr add \"$2/32\" dev lo; \
                      echo $$; exec busybox cat > /dev/null";
        let mut process = command
            .args([
                "--net", "--ipc", "--uts", "--", "busybox", "sh", "-c", script, "sh",
            ])
            .arg(hostname)
            .arg(if api { SERVICE_ADDRESS } else { "" })
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let line = first_line(&mut process).await?;
        let pid = line
            .parse()
            .map_err(|_| io::Error::other(format!("a pod's first process said {line:?}")))?;
        let api = if api {
            Some(self.listen_within(pid).await?)
        } else {
            None
        };
        Ok(Pause {
            _process: process,
            pid,
            api,
        })
    }

    /// Listens in a pod's network; who connects is in ours.
    async fn listen_within(&self, pid: u32) -> io::Result<TcpListener> {
        let proc = Path::new("/proc")
            .join(self.pid.to_string())
            .join("root")
            .join("proc");
        let namespace = proc.join(pid.to_string()).join("ns/net");
        let (sender, receiver) = tokio::sync::oneshot::channel();
        // A thread that changes its namespace is never used for anything else.
        std::thread::spawn(move || {
            let listen = || {
                let namespace = fs::File::open(&namespace)?;
                let kind = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), kind)?;
                let address: SocketAddr = (
                    SERVICE_ADDRESS
                        .parse::<std::net::IpAddr>()
                        .map_err(io::Error::other)?,
                    443,
                )
                    .into();
                let listener = std::net::TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok::<_, io::Error>(listener)
            };
            let _ = sender.send(listen());
        });
        let listener = receiver.await.map_err(io::Error::other)??;
        TcpListener::from_std(listener)
    }

    /// Ends the node and everything in it, and removes its control groups.
    pub(crate) async fn end(&self) {
        let process = self
            .process
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(mut process) = process {
            drop(process.stdin.take());
            // The kernel ends all processes of the node before the first is reaped.
            let _ = timeout(COMMAND_TIMEOUT, process.wait()).await;
        }
        remove_groups(&self.group);
    }
}

/// Runs a command to its end; an error has what it said.
pub(crate) async fn run(mut command: Command) -> io::Result<Output> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = timeout(COMMAND_TIMEOUT, command.output())
        .await
        .map_err(|_| io::Error::other(format!("no end after {COMMAND_TIMEOUT:?}")))??;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(said))
}

async fn first_line(process: &mut Child) -> io::Result<String> {
    let stdout = process
        .stdout
        .take()
        .ok_or_else(|| io::Error::other("no output"))?;
    let mut line = String::new();
    timeout(COMMAND_TIMEOUT, BufReader::new(stdout).read_line(&mut line))
        .await
        .map_err(|_| io::Error::other("nothing was said in time"))??;
    Ok(line.trim().to_owned())
}

/// This process, so that nobody is taken for it: number and start time.
fn owner() -> String {
    let pid = std::process::id();
    format!("{pid}-{}", start_time(pid).unwrap_or(0))
}

fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name, which may have spaces, the 20th word.
    let rest = stat.rsplit_once(')')?.1;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// Where control groups are: each hierarchy of version 1, and version 2.
pub(crate) fn hierarchies() -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            let kind = right.split_whitespace().next()?;
            let place = left.split_whitespace().nth(4)?;
            (kind == "cgroup" || kind == "cgroup2").then(|| PathBuf::from(place))
        })
        .collect()
}

/// How many processes the kernel killed in a group for lack of memory.
pub(crate) fn memory_kills(group: &str) -> u64 {
    for hierarchy in hierarchies() {
        for file in ["memory.oom_control", "memory.events"] {
            let path = hierarchy.join(group).join(file);
            let Ok(text) = fs::read_to_string(path) else {
                continue;
            };
            let kills = text
                .lines()
                .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
            if let Some(kills) = kills {
                return kills;
            }
        }
    }
    0
}

/// Removes the control groups of a node, the innermost first.
fn remove_groups(group: &str) {
    fn remove(folder: &Path) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                remove(&entry.path());
            }
        }
        let until = Instant::now() + GROUP_EMPTY_TIMEOUT;
        loop {
            match fs::remove_dir(folder) {
                // Killed processes are members until the kernel is done with them, and nothing
                // tells when that is.
                Err(error)
                    if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < until =>
                {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(%error, folder = %folder.display(), "a control group stays");
                    return;
                }
                _ => return,
            }
        }
    }
    for hierarchy in hierarchies() {
        let folder = hierarchy.join(group);
        if folder.exists() {
            remove(&folder);
        }
    }
}

/// Removes the control groups of nodes whose process was killed.
fn sweep() {
    for hierarchy in hierarchies() {
        for entry in fs::read_dir(hierarchy).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(rest) = name.strip_prefix(GROUP_PREFIX) else {
                continue;
            };
            let mut numbers = rest.split('-').map(|n| n.parse::<u64>().unwrap_or(0));
            let (pid, started) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
            let lives = u32::try_from(pid).ok().and_then(start_time) == Some(started);
            if !lives {
                remove_groups(&name);
            }
        }
    }
}
