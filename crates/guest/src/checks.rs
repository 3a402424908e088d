//! What is refused on every kind of sandbox, and what the kernel or an engine would not notice.

use std::path::{Component, Path};

/// Folders that belong to the sandbox itself.
const OURS: [&str; 3] = ["/proc", "/dev", "/run/espalier"];

/// A path where something may be mounted or made: absolute, plain, out of the system's way.
///
/// # Errors
/// The reason.
pub fn check_path(path: &Path) -> Result<(), String> {
    let plain = path.has_root()
        && path != Path::new("/")
        && path
            .components()
            .skip(1)
            .all(|c| matches!(c, Component::Normal(_)));
    if !plain {
        return Err(format!(
            "{}: expected an absolute path below / without . and ..",
            path.display()
        ));
    }
    if OURS.iter().any(|r| path.starts_with(r)) {
        return Err(format!(
            "{}: /proc, /dev and /run/espalier are ours",
            path.display()
        ));
    }
    Ok(())
}

/// Forwarded ports: each once, and none is 0.
///
/// # Errors
/// The reason.
pub fn check_ports(ports: impl IntoIterator<Item = u16>) -> Result<(), String> {
    let mut seen = std::collections::BTreeSet::new();
    for port in ports {
        if port == 0 || !seen.insert(port) {
            return Err(format!(
                "forwarded port {port}: expected numbers above 0, each once"
            ));
        }
    }
    Ok(())
}

/// Limits that leave room for PID 1 and one process.
///
/// # Errors
/// The reason.
pub fn check_limits(
    memory_bytes: u64,
    pids: u32,
    cpu_cores: f64,
    disk_bytes: u64,
) -> Result<(), String> {
    if !(cpu_cores.is_finite() && cpu_cores > 0.0) {
        return Err(format!("cpu_cores {cpu_cores}: expected more than 0"));
    }
    if pids < 4 || memory_bytes < 8 << 20 || disk_bytes < 1 << 20 {
        return Err("limits: expected pids >= 4, memory >= 8 MiB, disk >= 1 MiB".to_owned());
    }
    Ok(())
}
