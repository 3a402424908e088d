//! Nothing survives the death of the orchestrator: a program full of busy sandboxes is killed at
//! random moments, and 5 seconds later there is no trace of it.

use std::{
    collections::BTreeSet,
    process::{Command, Stdio},
    time::{Duration, SystemTime},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::{cgroups_of, until_empty};

/// A process, told apart from a later one with the same number.
type Process = (u32, u64);

struct Seen {
    parent: u32,
    start: u64,
    zombie: bool,
}

fn look(pid: u32) -> Option<Seen> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(Seen {
        parent: fields[1].parse().ok()?,
        start: fields[19].parse().ok()?,
        zombie: fields[0] == "Z",
    })
}

fn process_ids() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The process and all below it.
fn tree(root: u32) -> BTreeSet<Process> {
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

/// Processes in any group of a warden, whoever their parents are.
fn grouped(wardens: &[u32]) -> Vec<String> {
    let ours = |text: &str| wardens.iter().any(|w| text.contains(&format!("-{w}-")));
    process_ids()
        .filter(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/cgroup"))
                .is_ok_and(|text| text.contains("espalier-") && ours(&text))
        })
        .map(|pid| format!("process {pid} in a group"))
        .collect()
}

/// Files, folders and mounts with our name, where programs leave such things.
fn traces() -> BTreeSet<String> {
    let folders = [
        "/tmp",
        "/var/tmp",
        "/run",
        "/dev/shm",
        "/sys/kernel",
        "/mnt",
        "/srv",
    ];
    let entries = folders
        .iter()
        .flat_map(|f| std::fs::read_dir(f).into_iter().flatten().flatten());
    let named = entries
        .map(|e| e.path().display().to_string())
        .filter(|p| p.contains("espalier"));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mounts: Vec<String> = mounts
        .lines()
        .filter(|l| l.contains("espalier"))
        .map(str::to_owned)
        .collect();
    named.chain(mounts).collect()
}

/// The next of a sequence of random numbers (splitmix64).
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn kill_rounds(rounds: u32) {
    let seed = std::env::var("ESPALIER_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(|| {
            SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .unwrap()
                .as_nanos() as u64
        });
    println!("seed {seed} (ESPALIER_SEED={seed} repeats it)");
    let mut state = seed;
    let before = traces();
    let mut largest = 0;
    for round in 0..rounds {
        let count = 1 + next(&mut state) % 8;
        // Early moments find the warden half-made, late ones everything running.
        let wait = Duration::from_micros(next(&mut state) % 500_000);
        let mut program = Command::new(crate::suite::hold_program())
            .arg(count.to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(wait);
        let pid = Pid::from_raw(program.id() as i32).unwrap();
        // Standing still it makes no children between the look and the kill.
        kill_process(pid, Signal::STOP).unwrap();
        let family = tree(program.id());
        let wardens: Vec<u32> = family
            .iter()
            .map(|(pid, _)| *pid)
            .filter(|pid| look(*pid).is_some_and(|seen| seen.parent == program.id()))
            .collect();
        largest = largest.max(family.len());
        kill_process(pid, Signal::KILL).unwrap();
        program.wait().unwrap();
        let what = format!("seed {seed}, round {round}: {count} sandboxes killed after {wait:?}");
        until_empty(&what, || {
            let alive = |(pid, start): &&Process| {
                look(*pid).is_some_and(|seen| seen.start == *start && !seen.zombie)
            };
            let processes = family
                .iter()
                .filter(alive)
                .map(|(pid, _)| format!("process {pid}"));
            let mut left: Vec<String> = processes.collect();
            left.extend(wardens.iter().flat_map(|warden| cgroups_of(*warden)));
            left.extend(grouped(&wardens));
            left.extend(traces().difference(&before).cloned());
            left
        });
    }
    assert!(
        rounds < 5 || largest > 8,
        "the sandboxes never ran: at most {largest} processes"
    );
}

#[test]
fn a_killed_orchestrator_leaves_nothing() {
    kill_rounds(5);
}

#[test]
#[ignore = "long: 50 kills"]
fn a_killed_orchestrator_leaves_nothing_50_times() {
    kill_rounds(50);
}
