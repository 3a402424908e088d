//! A provider that looks into each sandbox before and after the harness, and at its first call:
//! CPU time, memory, and what it tried on the network.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use sandbox::{Exec, File, LocalProvider, Output, Provider, Sandbox, SandboxError, Spec};
use tokio::sync::RwLock;

/// `sysconf(_SC_CLK_TCK)` is 100 on every Linux that we run on.
const TICKS_PER_S: f64 = 100.0;
/// For a look into the sandbox.
const LOOK_S: u64 = 30;

/// One look into a sandbox.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Look {
    /// CPU seconds of all processes so far, those that ended included.
    pub(crate) cpu_s: f64,
    /// The kernel's counters of the sandbox's network, as `Tcp.ActiveOpens`.
    pub(crate) network: BTreeMap<String, u64>,
}

/// What was seen of a harness.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    pub(crate) started: Option<Instant>,
    pub(crate) before: Look,
    pub(crate) first_call: Option<Look>,
    pub(crate) after: Look,
    pub(crate) wall_s: f64,
    pub(crate) memory_peak_bytes: Option<u64>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

type Living = Arc<RwLock<Option<Box<dyn Sandbox>>>>;

/// The provider. One sandbox at a time.
#[derive(Debug, Clone)]
pub(crate) struct Watched {
    inner: LocalProvider,
    living: Living,
    seen: Arc<Mutex<Seen>>,
}

impl Watched {
    pub(crate) fn new(inner: LocalProvider) -> Self {
        Self {
            inner,
            living: Living::default(),
            seen: Arc::default(),
        }
    }

    /// What was seen of the last harness.
    pub(crate) fn seen(&self) -> Seen {
        self.lock().clone()
    }

    /// Looks into the living sandbox while its harness waits for its first reply.
    pub(crate) async fn look_at_first_call(&self) {
        let place = self.living.read().await;
        if let Some(sandbox) = place.as_deref()
            && let Ok(look) = look(sandbox).await
        {
            self.lock().first_call = Some(look);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Provider for Watched {
    async fn create(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        let sandbox = self.inner.create(spec).await?;
        *self.living.write().await = Some(sandbox);
        *self.lock() = Seen::default();
        Ok(Box::new(WatchedSandbox(self.clone())))
    }
}

#[derive(Debug)]
struct WatchedSandbox(Watched);

fn gone() -> SandboxError {
    SandboxError::Gone {
        name: "of the check".to_owned(),
        reason: "it was destroyed".to_owned(),
    }
}

#[async_trait]
impl Sandbox for WatchedSandbox {
    async fn exec(&self, exec: Exec) -> Result<Output, SandboxError> {
        let place = self.0.living.read().await;
        let sandbox = place.as_deref().ok_or_else(gone)?;
        // Harnesses are run with it, verifiers without.
        if !exec.end_background {
            return sandbox.exec(exec).await;
        }
        let before = look(sandbox).await?;
        {
            let mut seen = self.0.lock();
            seen.before = before;
            seen.started = Some(Instant::now());
        }
        let output = sandbox.exec(exec).await?;
        let after = look(sandbox).await?;
        let mut seen = self.0.lock();
        seen.after = after;
        seen.wall_s = output.seconds;
        seen.memory_peak_bytes = sandbox.memory_peak_bytes();
        seen.stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        seen.stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        drop(seen);
        Ok(output)
    }

    async fn upload(&self, files: Vec<File>) -> Result<(), SandboxError> {
        let place = self.0.living.read().await;
        place.as_deref().ok_or_else(gone)?.upload(files).await
    }

    async fn download(
        &self,
        path: std::path::PathBuf,
        bytes_max: u64,
    ) -> Result<Vec<File>, SandboxError> {
        let place = self.0.living.read().await;
        let sandbox = place.as_deref().ok_or_else(gone)?;
        sandbox.download(path, bytes_max).await
    }

    async fn destroy(self: Box<Self>) {
        let sandbox = self.0.living.write().await.take();
        if let Some(sandbox) = sandbox {
            sandbox.destroy().await;
        }
    }
}

async fn look(sandbox: &dyn Sandbox) -> Result<Look, SandboxError> {
    let script = "cat /proc/[0-9]*/stat 2>/dev/null; cat /proc/net/snmp /proc/net/snmp6";
    let output = sandbox
        .exec(Exec {
            argv: ["sh", "-c", script].map(str::to_owned).to_vec(),
            cwd: None,
            env: BTreeMap::new(),
            stdin: Vec::new(),
            timeout: Duration::from_secs(LOOK_S),
            output_bytes_max: 1 << 20,
            end_background: false,
            user: None,
        })
        .await?;
    Ok(parse(&String::from_utf8_lossy(&output.stdout)))
}

/// Reads `stat` lines of processes, then pairs of lines of `snmp`, then lines of `snmp6`.
fn parse(text: &str) -> Look {
    let mut look = Look::default();
    let mut heads: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for line in text.lines() {
        if let Some((_, fields)) = line.rsplit_once(") ") {
            // utime, stime, and those of children that were waited for: fields 14 to 17 of the
            // whole line, 12 to 15 after the name.
            let ticks: f64 = fields
                .split_whitespace()
                .skip(11)
                .take(4)
                .filter_map(|ticks| ticks.parse::<f64>().ok())
                .sum();
            look.cpu_s += ticks / TICKS_PER_S;
        } else if let Some((group, fields)) = line.split_once(": ") {
            let fields: Vec<&str> = fields.split_whitespace().collect();
            match heads.get(group) {
                None => {
                    heads.insert(group, fields);
                }
                Some(names) => {
                    for (name, value) in names.iter().zip(fields) {
                        if let Ok(value) = value.parse() {
                            look.network.insert(format!("{group}.{name}"), value);
                        }
                    }
                }
            }
        } else if let [name, value] = line.split_whitespace().collect::<Vec<_>>()[..]
            && let Ok(value) = value.parse()
        {
            look.network.insert(name.to_owned(), value);
        }
    }
    look
}

impl Seen {
    /// CPU seconds of the harness and of what it ran.
    pub(crate) fn cpu_s(&self) -> f64 {
        self.after.cpu_s - self.before.cpu_s
    }

    /// CPU seconds until the first call.
    pub(crate) fn startup_cpu_s(&self) -> Option<f64> {
        Some(self.first_call.as_ref()?.cpu_s - self.before.cpu_s)
    }

    /// What was tried on the network beside the gateway, by the kernel's own counters: packets
    /// and connections without a route (every address but loopback is without one), datagrams (a
    /// name server), refused connections to loopback.
    pub(crate) fn network_attempts(&self) -> BTreeMap<String, u64> {
        let grown = |name: &str| {
            let count = |look: &Look| look.network.get(name).copied().unwrap_or(0);
            count(&self.after).saturating_sub(count(&self.before))
        };
        [
            ("no_route", "Ip.OutNoRoutes"),
            ("no_route_v6", "Ip6OutNoRoutes"),
            ("datagrams", "Udp.OutDatagrams"),
            ("datagrams_v6", "Udp6OutDatagrams"),
            ("refused_locally", "Tcp.AttemptFails"),
        ]
        .into_iter()
        .map(|(name, counter)| (name.to_owned(), grown(counter)))
        .filter(|(_, count)| *count > 0)
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_and_counters_are_read() {
        let look = parse(concat!(
            "1 (guest (x) y) S 0 1 1 0 -1 4194560 1 2 3 4 100 50 25 25 20 0\n",
            "7 (sh) R 1 7 1 0 -1 4194560 1 2 3 4 1 0 0 0 20 0\n",
            "Ip: Forwarding OutNoRoutes\nIp: 1 3\nUdp: OutDatagrams\nUdp: 2\n",
            "Ip6OutNoRoutes                  \t5\n",
        ));
        assert!((look.cpu_s - 2.01).abs() < 1e-9);
        assert_eq!(look.network["Ip.OutNoRoutes"], 3);
        assert_eq!(look.network["Udp.OutDatagrams"], 2);
        assert_eq!(look.network["Ip6OutNoRoutes"], 5);
        let seen = Seen {
            after: look,
            ..Seen::default()
        };
        let attempts = seen.network_attempts();
        assert_eq!(attempts["no_route"], 3);
        assert!(!attempts.contains_key("refused_locally"));
    }
}
