//! Looks at processes and control groups.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    time::{Duration, Instant},
};

/// A process, told apart from a later one with the same number.
pub(crate) type Process = (u32, u64);

struct Seen {
    parent: u32,
    start: u64,
    zombie: bool,
}

fn fields(pid: &str) -> Option<Vec<String>> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

fn look(pid: u32) -> Option<Seen> {
    let fields = fields(&pid.to_string())?;
    Some(Seen {
        parent: fields[1].parse().ok()?,
        start: fields[19].parse().ok()?,
        zombie: fields[0] == "Z",
    })
}

pub(crate) fn process_ids() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The process and all below it.
pub(crate) fn family(root: u32) -> BTreeSet<Process> {
    let all: Vec<(u32, Seen)> = process_ids()
        .filter_map(|pid| Some((pid, look(pid)?)))
        .collect();
    let mut found = BTreeSet::new();
    let mut open = vec![root];
    while let Some(parent) = open.pop() {
        for (pid, seen) in &all {
            if *pid == parent {
                found.insert((*pid, seen.start));
            }
            if seen.parent == parent {
                open.push(*pid);
            }
        }
    }
    found
}

/// Children of a process, from its family.
pub(crate) fn children(family: &BTreeSet<Process>, root: u32) -> Vec<u32> {
    let of_root = |pid: &u32| look(*pid).is_some_and(|seen| seen.parent == root);
    family.iter().map(|(pid, _)| *pid).filter(of_root).collect()
}

/// Control groups whose name says that they belong to one of these wardens.
fn groups_of(wardens: &[u32]) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                let name = entry.file_name().to_string_lossy().into_owned();
                let own = |warden: &u32| name.contains(&format!("-{warden}-"));
                if name.starts_with("espalier-") && wardens.iter().any(own) {
                    found.push(entry.path().display().to_string());
                }
                open.push(entry.path());
            }
        }
    }
    found
}

/// Waits until nothing of a family is left; what is left after 10 s fails the test.
pub(crate) fn until_gone(what: &str, family: &BTreeSet<Process>, wardens: &[u32]) {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let alive = |(pid, start): &&Process| {
            look(*pid).is_some_and(|seen| seen.start == *start && !seen.zombie)
        };
        let processes = family.iter().filter(alive);
        let mut left: Vec<String> = processes.map(|(pid, _)| format!("process {pid}")).collect();
        left.extend(groups_of(wardens));
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < until, "{what}: there still is {left:#?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// CPU milliseconds of this process, and of its children that were reaped.
pub(crate) fn cpu_ms() -> (u64, u64) {
    let fields = fields("self").unwrap();
    let ticks = |at: usize| fields[at].parse::<u64>().unwrap();
    (10 * (ticks(11) + ticks(12)), 10 * (ticks(13) + ticks(14)))
}

/// The PID 1, as this machine numbers it, of the sandbox in which a process runs whose command line
/// has this mark.
pub(crate) fn guest_of(mark: &str) -> Option<u32> {
    let marked = process_ids().find(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.windows(mark.len()).any(|part| part == mark.as_bytes())
    });
    let mut pid = marked?;
    loop {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = |key: &str| {
            let line = status.lines().find(|line| line.starts_with(key))?;
            line.split_whitespace().last()
        };
        // In its own namespace it is the first; on a process of this one's own that line has one
        // number only.
        let numbers = status.lines().find(|line| line.starts_with("NSpid:"))?;
        if numbers.split_whitespace().count() > 2 && line("NSpid:") == Some("1") {
            return Some(pid);
        }
        pid = line("PPid:")?.parse().ok().filter(|parent| *parent > 1)?;
    }
}
