//! What this machine allows, what it lacks, and what that costs.

use std::{fs, process::Command};

use guest::{probe::Report, protocol::ONE_USER};
use serde::{Deserialize, Serialize};

use crate::guest_binary::GuestBinary;

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What was looked at.
    pub name: String,
    /// Whether it is as it should be.
    pub ok: bool,
    /// What was found.
    pub found: String,
    /// What the lack costs; empty when there is none.
    pub costs: String,
    /// What to do about it; empty when there is nothing to do.
    pub advice: String,
}

pub(crate) fn good(name: &str, found: impl Into<String>) -> Check {
    Check {
        name: name.to_owned(),
        ok: true,
        found: found.into(),
        costs: String::new(),
        advice: String::new(),
    }
}

pub(crate) fn bad(name: &str, found: impl Into<String>, costs: &str, advice: &str) -> Check {
    Check {
        ok: false,
        costs: costs.to_owned(),
        advice: advice.to_owned(),
        ..good(name, found)
    }
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path)
        .ok()
        .map(|text| text.trim().to_owned())
}

fn number(path: &str) -> Option<u64> {
    read(path)?.parse().ok()
}

/// Looks at this machine: tries namespaces and a whole sandbox for real, and reads what limits
/// density. Blocks for some milliseconds (20 s at most, when a try hangs); changes nothing.
#[must_use]
pub fn doctor() -> Vec<Check> {
    let mut checks = vec![kernel()];
    match probe() {
        Ok(report) => checks.extend(from_report(&report)),
        Err(reason) => checks.push(bad(
            "guest",
            reason,
            "no sandbox of any kind can be made",
            "the guest must be able to run from memory: allow exec of memfd (sysctl vm.memfd_noexec)",
        )),
    }
    checks.push(user_namespace_policy());
    checks.push(overlay());
    checks.push(process_ids());
    checks.push(inotify());
    checks.push(processor());
    checks
}

fn probe() -> Result<Report, String> {
    let binary = GuestBinary::new().map_err(|e| format!("keeping the guest in memory: {e}"))?;
    let output = Command::new(binary.path())
        .arg("probe")
        .env_clear()
        .current_dir("/")
        .output()
        .map_err(|e| format!("starting the guest: {e}"))?;
    serde_json::from_slice(&output.stdout).map_err(|e| {
        format!(
            "the guest's report is unreadable ({e}); it ended with {}",
            output.status
        )
    })
}

fn from_report(report: &Report) -> Vec<Check> {
    let refused: Vec<_> = report
        .namespaces
        .iter()
        .filter_map(|(name, refused)| Some(format!("{name}: {}", refused.as_ref()?)))
        .collect();
    let mut checks = Vec::new();
    checks.push(if refused.is_empty() {
        let names: Vec<_> = report
            .namespaces
            .iter()
            .map(|(name, _)| name.as_str())
            .collect();
        good("namespaces", format!("{} (clone3)", names.join(", ")))
    } else {
        bad(
            "namespaces",
            refused.join("; "),
            "the local kind of sandbox does not work",
            "allow user namespaces (see the next lines), or use the docker kind",
        )
    });
    checks.push(match &report.sandbox {
        None => good("sandbox", "one was made and ended"),
        Some(reason) => bad(
            "sandbox",
            reason.clone(),
            "the local kind of sandbox does not work",
            "Linux 5.12 or newer is needed, with a /proc that is not covered in parts; in a container: \
             seccomp=unconfined and systempaths=unconfined, or use the docker kind",
        ),
    });
    if let Some(capabilities) = &report.capabilities {
        let limits = [
            ("memory limit", &capabilities.memory, "memory"),
            ("process limit", &capabilities.pids, "pids"),
            ("cpu limit", &capabilities.cpu, "cpu"),
        ];
        for (name, how, key) in limits {
            let degraded = capabilities
                .degraded
                .iter()
                .find(|d| d.name.starts_with(key));
            checks.push(match degraded {
                None => good(name, how.clone()),
                Some(degraded) => bad(
                    name,
                    format!("{how} ({}): {}", degraded.name, degraded.found),
                    &degraded.costs,
                    "run as root, or in a delegated group: systemd-run --user --scope -p Delegate=yes",
                ),
            });
        }
        let tracking = capabilities
            .degraded
            .iter()
            .find(|d| d.name.contains("tracking"));
        checks.push(match tracking {
            None => good("cgroup.kill", "a cgroup2 tracks every sandbox"),
            Some(degraded) => bad(
                "cgroup.kill",
                degraded.found.clone(),
                &degraded.costs,
                "mount cgroup2 where this user may make groups",
            ),
        });
        let one_user = capabilities.degraded.iter().find(|d| d.name == ONE_USER);
        checks.push(match one_user {
            None => good(
                "users in a sandbox",
                format!("{} numbers", capabilities.users),
            ),
            Some(degraded) => bad(
                "users in a sandbox",
                degraded.found.clone(),
                &degraded.costs,
                "run as root; or install newuidmap and newgidmap (package uidmap) and give this user \
                 ranges: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 NAME",
            ),
        });
        checks.push(good(
            "user on the host",
            format!("uid {}", capabilities.host_uid),
        ));
    }
    checks
}

fn kernel() -> Check {
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned());
    let mut parts = release
        .split(['.', '-'])
        .map_while(|part| part.parse::<u32>().ok());
    let version = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    if version >= (5, 12) {
        good("kernel", release)
    } else {
        bad(
            "kernel",
            release,
            "the local kind of sandbox does not work",
            "Linux 5.12 or newer is needed",
        )
    }
}

fn user_namespace_policy() -> Check {
    let name = "user namespace policy";
    let root = rustix::process::geteuid().is_root();
    let maximum = number("/proc/sys/user/max_user_namespaces");
    if maximum == Some(0) {
        return bad(
            name,
            "user.max_user_namespaces = 0",
            "the local kind of sandbox does not work",
            "sysctl user.max_user_namespaces=16384",
        );
    }
    let switches = [
        (
            "kernel.unprivileged_userns_clone",
            "/proc/sys/kernel/unprivileged_userns_clone",
            0,
        ),
        (
            "kernel.apparmor_restrict_unprivileged_userns",
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            1,
        ),
    ];
    for (key, path, forbids) in switches {
        if !root && number(path) == Some(forbids) {
            return bad(
                name,
                format!("{key} = {forbids}"),
                "ordinary users cannot make sandboxes",
                &format!("sysctl {key}={}", 1 - forbids),
            );
        }
    }
    let found = maximum.map_or_else(
        || "no limit named".to_owned(),
        |m| format!("up to {m} per user"),
    );
    good(name, found)
}

fn overlay() -> Check {
    let filesystems = read("/proc/filesystems").unwrap_or_default();
    if filesystems.lines().any(|line| line.ends_with("\toverlay")) {
        good("overlay", "present (not needed by the local kind today)")
    } else {
        bad(
            "overlay",
            "not in /proc/filesystems (perhaps a module)",
            "image root file systems will not be shared between sandboxes; nothing today",
            "modprobe overlay",
        )
    }
}

fn process_ids() -> Check {
    let Some(maximum) = number("/proc/sys/kernel/pid_max") else {
        return bad(
            "process ids",
            "no /proc/sys/kernel/pid_max",
            "unknown",
            "mount /proc",
        );
    };
    // A harness with its tools is some 30 processes and threads.
    let sandboxes = maximum / 32;
    let found = format!("pid_max {maximum}: room for about {sandboxes} busy sandboxes");
    if sandboxes >= 256 {
        good("process ids", found)
    } else {
        bad(
            "process ids",
            found,
            "fewer sandboxes at a time",
            "sysctl kernel.pid_max=4194304",
        )
    }
}

fn inotify() -> Check {
    let name = "inotify instances";
    match number("/proc/sys/fs/inotify/max_user_instances") {
        Some(maximum) if maximum >= 1024 => good(name, maximum.to_string()),
        Some(maximum) => bad(
            name,
            format!("fs.inotify.max_user_instances = {maximum}, shared by all sandboxes"),
            "harnesses that watch files fail with EMFILE when more run at a time",
            "sysctl fs.inotify.max_user_instances=8192",
        ),
        None => good(name, "no limit named"),
    }
}

#[cfg(target_arch = "x86_64")]
fn processor() -> Check {
    let has = |yes: bool, name: &'static str| yes.then_some(name);
    let avx2 = std::arch::is_x86_feature_detected!("avx2");
    let fma = std::arch::is_x86_feature_detected!("fma");
    let avx512 = std::arch::is_x86_feature_detected!("avx512f");
    let found: Vec<_> = [has(avx2, "AVX2"), has(fma, "FMA"), has(avx512, "AVX-512")]
        .into_iter()
        .flatten()
        .collect();
    if avx2 && fma {
        good("processor", found.join(", "))
    } else {
        bad(
            "processor",
            format!("only [{}]", found.join(", ")),
            "the embedded engine and learner do not run",
            "use a machine with AVX2 and FMA (any x86 server since 2015), or a remote engine and learner",
        )
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn processor() -> Check {
    good("processor", std::env::consts::ARCH)
}
