//! The way out of a task that was granted hosts: a filtering proxy of its own, for one rollout.
//!
//! The sandbox reaches it at a loopback port and by the usual variables. It is closed when the
//! harness has ended: verifiers have no network. What was asked for stays in a file per rollout.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use record::RolloutId;
use sandbox::{Allowed, EgressProxy, EgressRecord, Spec};
use task::Task;

/// Where the proxy is, in the sandbox.
pub const PORT: u16 = 3128;

/// Bytes of an audit log that are read.
const LOG_BYTES_MAX: u64 = 64 << 20;

/// Where the logs of a run's proxies are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Egress {
    /// One file per rollout that was granted hosts.
    pub folder: PathBuf,
    /// Whether hosts may have addresses that are not of the public internet.
    pub private_addresses: bool,
}

/// Name of a rollout's audit log, in the folder of logs.
#[must_use]
pub fn log_file(id: &RolloutId) -> String {
    format!("{id}.jsonl")
}

/// What a rollout asked for; `None` when it had no way out. Lines that were cut off by a crash are
/// left out.
///
/// # Errors
/// When the file cannot be read.
pub fn read_log(folder: &Path, id: &RolloutId) -> std::io::Result<Option<Vec<EgressRecord>>> {
    use std::io::Read;
    let file = match std::fs::File::open(folder.join(log_file(id))) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut text = Vec::new();
    file.take(LOG_BYTES_MAX).read_to_end(&mut text)?;
    let lines = text.split(|byte| *byte == b'\n');
    Ok(Some(
        lines
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect(),
    ))
}

/// Opens the way out of a rollout, when its task was granted one.
///
/// # Errors
/// A sentence.
pub(crate) fn open(
    egress: Option<&Egress>,
    gateway_socket: &Path,
    task: &Task,
    id: &RolloutId,
    spec: &mut Spec,
) -> Result<Option<EgressProxy>, String> {
    /// Names of sockets: short, because the kernel limits their paths, and beside the gateway's,
    /// whose path was found to be short enough.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let hosts = task.environment.egress.clone();
    if hosts.is_empty() {
        return Ok(None);
    }
    let egress = egress.ok_or("hosts were granted, and nobody says where to log what is asked")?;
    let number = NEXT.fetch_add(1, Ordering::Relaxed) % 1_000_000;
    let socket = gateway_socket.with_file_name(format!("e{number:06}.sock"));
    let start = || {
        std::fs::create_dir_all(&egress.folder)?;
        // Of an orchestrator that was killed.
        match std::fs::remove_file(&socket) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let allowed = Allowed {
            hosts: hosts.clone(),
            private_addresses: egress.private_addresses,
        };
        EgressProxy::start(&socket, allowed, &egress.folder.join(log_file(id)))
    };
    let proxy = start().map_err(|error| format!("the egress proxy: {error}"))?;
    spec.forwards.push((PORT, proxy.socket().to_owned()));
    let address = format!("http://127.0.0.1:{PORT}");
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"] {
        spec.env
            .entry(name.to_owned())
            .or_insert_with(|| address.clone());
    }
    for name in ["NO_PROXY", "no_proxy"] {
        spec.env
            .entry(name.to_owned())
            .or_insert_with(|| "127.0.0.1,localhost".to_owned());
    }
    Ok(Some(proxy))
}
