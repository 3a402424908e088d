//! Whose group is it? Names are `espalier-{pid namespace}-{pid}-{start time}-{number}` of the owning
//! warden: a group whose owner is dead is garbage, one of another pid namespace is nobody's business.

use std::fs;

use super::PREFIX;

/// Our pid namespace, as a number.
pub(super) fn pid_namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino())
}

/// When a process started, in clock ticks since boot; `None` when no such process is alive.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may contain anything: count from the last bracket.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    // A zombie owns nothing any more.
    let alive = !matches!(fields.next()?, "Z" | "X");
    fields.nth(18)?.parse().ok().filter(|_| alive)
}

/// The first part of the names of this process's groups.
pub(crate) fn own_prefix() -> String {
    let pid = std::process::id();
    format!(
        "{PREFIX}{}-{pid}-{}",
        pid_namespace(),
        start_time(pid).unwrap_or(0)
    )
}

pub(super) fn is_garbage(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(PREFIX) else {
        return false;
    };
    let numbers: Vec<u64> = rest.split('-').filter_map(|n| n.parse().ok()).collect();
    let [namespace, pid, start, _number] = numbers[..] else {
        return false;
    };
    namespace == pid_namespace() && u32::try_from(pid).ok().and_then(start_time) != Some(start)
}
