//! What the tests share.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use sandbox::{Limits, LocalConfig, LocalProvider, Provider, Sandbox, Spec};

pub(crate) use crate::suite::{command, run, say, script};

pub(crate) fn spec(name: &str) -> Spec {
    Spec {
        name: name.to_owned(),
        limits: Limits {
            memory_bytes: 256 << 20,
            pids: 64,
            cpu_cores: 2.0,
            disk_bytes: 32 << 20,
            deadline_s: 120,
        },
        env: [("FROM_SPEC".to_owned(), "spec".to_owned())].into(),
        ..Spec::default()
    }
}

pub(crate) async fn provider() -> LocalProvider {
    LocalProvider::start(LocalConfig::default())
        .await
        .expect("a provider on this machine")
}

pub(crate) async fn sandbox() -> Box<dyn Sandbox> {
    provider()
        .await
        .create(spec("test"))
        .await
        .expect("a sandbox")
}

/// Polls until nothing remains; what remained after 5 s otherwise.
pub(crate) fn until_empty(what: &str, mut remaining: impl FnMut() -> Vec<String>) {
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        let left = remaining();
        if left.is_empty() {
            return;
        }
        assert!(
            Instant::now() < until,
            "{what}: after 5 s there still is {left:#?}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Every folder of every cgroup hierarchy whose name says that it belongs to this warden.
pub(crate) fn cgroups_of(warden: u32) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                let name = entry.file_name().to_string_lossy().into_owned();
                if name.starts_with("espalier-") && name.contains(&format!("-{warden}-")) {
                    found.push(entry.path().display().to_string());
                }
                open.push(entry.path());
            }
        }
    }
    found
}

/// Living processes whose folder in /proc the predicate wants.
pub(crate) fn processes(mut wanted: impl FnMut(&Path) -> bool) -> Vec<String> {
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter(|e| {
            e.file_name()
                .to_string_lossy()
                .bytes()
                .all(|b| b.is_ascii_digit())
        })
        // Zombies wait for their parent only.
        .filter(|e| {
            std::fs::read_to_string(e.path().join("stat")).is_ok_and(|s| !s.contains(") Z "))
        })
        .filter(|e| wanted(&e.path()))
        .map(|e| {
            let line = std::fs::read(e.path().join("cmdline")).unwrap_or_default();
            format!(
                "{} {}",
                e.path().display(),
                String::from_utf8_lossy(&line).replace('\0', " ")
            )
        })
        .collect()
}

/// The user that runs the tests.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
