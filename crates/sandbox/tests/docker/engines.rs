//! Real engines, started for one test and ended by their process ids.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Docker,
    Podman,
}

/// A running engine.
pub(crate) struct Engine {
    kind: Kind,
    folder: tempfile::TempDir,
    process: Child,
    pub(crate) host: String,
}

fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}

const CONTAINERS_CONF: &str = r#"
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"#;

impl Engine {
    /// Starts one; `None` (and a line that says so) where this machine cannot.
    pub(crate) fn start(kind: Kind) -> Option<Self> {
        let name = match kind {
            Kind::Docker => "dockerd",
            Kind::Podman => "podman",
        };
        if !rustix::process::geteuid().is_root() {
            println!("skipped: {name} needs root");
            return None;
        }
        let Some(program) = program(name) else {
            println!("skipped: {name} is not installed (scripts/setup.sh test does it)");
            return None;
        };
        let folder = tempfile::Builder::new()
            .prefix("engine-")
            .tempdir()
            .unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let host = format!("unix://{}", at("socket"));
        let mut command = Command::new(program);
        // Podman's monitor leaves a file where it was started.
        command.current_dir(folder.path());
        match kind {
            Kind::Docker => {
                command.args(["--data-root", &at("data"), "--exec-root", &at("exec")]);
                command.args(["--pidfile", &at("pid"), "--host", &host]);
                // Network none is all that is used: no bridge, no firewall rule, no sysctl.
                command.args(["--bridge=none", "--iptables=false", "--ip6tables=false"]);
                command.args(["--ip-forward=false", "--ip-masq=false"]);
                // Its own groups, so that nothing is left among the host's.
                command.args(["--cgroup-parent", "espalier-test-docker"]);
            }
            Kind::Podman => {
                let conf = folder.path().join("containers.conf");
                fs::write(&conf, CONTAINERS_CONF).unwrap();
                command.env("CONTAINERS_CONF", conf);
                command.args(["--root", &at("data"), "--runroot", &at("run")]);
                command.args(["--tmpdir", &at("tmp")]);
                command.args(["system", "service", "--time", "0", &host]);
            }
        }
        let log = File::create(folder.path().join("log")).unwrap();
        let process = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap();
        let mut engine = Self {
            kind,
            folder,
            process,
            host,
        };
        let begun = Instant::now();
        let socket = engine.folder.path().join("socket");
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            let ended = engine.process.try_wait().unwrap();
            assert!(ended.is_none(), "{kind:?}: {}", engine.log());
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "{kind:?}: {}",
                engine.log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        println!(
            "{kind:?} listens after {:.1} s",
            begun.elapsed().as_secs_f64()
        );
        Some(engine)
    }

    pub(crate) fn log(&self) -> String {
        let text = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        let start = text.len().saturating_sub(4000);
        text.get(start..).unwrap_or(&text).to_owned()
    }

    /// Ids of all containers, whatever their state.
    pub(crate) fn containers(&self) -> Vec<String> {
        let answer = http_get(
            self.host.strip_prefix("unix://").unwrap(),
            "/v1.41/containers/json?all=1",
        );
        let listed: serde_json::Value = serde_json::from_str(&answer).unwrap_or_default();
        let listed = listed.as_array().cloned().unwrap_or_default();
        listed
            .iter()
            .map(|c| format!("{} {} {}", c["Id"], c["Names"], c["State"]))
            .collect()
    }

    /// Nothing is left, or will be left in a moment.
    pub(crate) fn assert_empty(&self) {
        let limit = Duration::from_secs(20);
        let begun = Instant::now();
        loop {
            let left = self.containers();
            if left.is_empty() {
                return;
            }
            assert!(begun.elapsed() < limit, "left after {limit:?}: {left:#?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// One request, by hand: the tests must not trust the client that they test.
fn http_get(socket: &str, path: &str) -> String {
    use std::io::{Read, Write};
    let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: engine\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text.split_once("\r\n\r\n").unwrap().1.to_owned()
}

/// Processes whose command line names the folder.
fn processes_of(folder: &Path) -> Vec<Pid> {
    let mark = folder.display().to_string();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            String::from_utf8_lossy(&line)
                .contains(&mark)
                .then_some(Pid::from_raw(pid)?)
        })
        .collect()
}

impl Drop for Engine {
    fn drop(&mut self) {
        let pid = Pid::from_raw(i32::try_from(self.process.id()).unwrap_or(0));
        let Some(pid) = pid else { return };
        let _ = kill_process(pid, Signal::TERM);
        let begun = Instant::now();
        while matches!(self.process.try_wait(), Ok(None)) {
            if begun.elapsed() > Duration::from_secs(20) {
                let _ = kill_process_group(pid, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        // containerd, shims and conmon carry the folder in their arguments.
        for pid in processes_of(self.folder.path()) {
            let _ = kill_process(pid, Signal::KILL);
        }
        unmount_below(self.folder.path());
        // Empty ones only: an engine of the machine's own that uses the same name keeps its groups.
        remove_groups(match self.kind {
            Kind::Docker => "espalier-test-docker",
            Kind::Podman => "libpod_parent",
        });
    }
}

fn unmount_below(folder: &Path) {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mark = folder.display().to_string();
    let mut points: Vec<&str> = table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|point| point.starts_with(&mark))
        .collect();
    points.sort_by_key(|point| std::cmp::Reverse(point.len()));
    for point in points {
        let _ = rustix::mount::unmount(point, rustix::mount::UnmountFlags::DETACH);
    }
}

fn remove_groups(name: &str) {
    for hierarchy in fs::read_dir("/sys/fs/cgroup")
        .into_iter()
        .flatten()
        .flatten()
    {
        let folder = hierarchy.path().join(name);
        // podman's helpers have one below, and what it forgot.
        for below in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let _ = fs::remove_dir(below.path());
        }
        let _ = fs::remove_dir(folder);
    }
}
