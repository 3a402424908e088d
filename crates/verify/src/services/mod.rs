//! The services of a task while it runs: made of data, on this machine.
//!
//! A service listens on a unix socket here; the sandbox reaches it through a forwarded loopback
//! port, so the harness sees `http://127.0.0.1:PORT`, and neither the state nor the log of what was
//! asked is in its reach: nothing of them is in the sandbox, and no route tells or resets them. Why
//! not inside: docs/decisions, the page on services.
//!
//! The tools of a task over its services are a tool server (streamable HTTP) on one more port.
//!
//! Limits: [`BODY_BYTES_MAX`] of a request (413), [`CALLS_MAX`] requests and [`AUDIT_BYTES_MAX`] of
//! log per rollout (429 beyond, counted in [`Audit::refused`]), [`CONNECTIONS_MAX`] connections at a
//! time (more are closed), [`CONNECTION_TIMEOUT`] for each.

mod audit;
mod serve;
mod state;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

pub use audit::{Asked, Audit, ServiceAudit};
use sandbox::{Exec, Exit, Sandbox};
use state::State;
use task::{McpServer, McpTransport, Task};
use tokio::net::UnixListener;
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use crate::{VerifyError, contract::cut, run::doing};

/// The largest body of a request.
pub(crate) const BODY_BYTES_MAX: usize = 1 << 20;
/// Requests of one rollout.
pub(crate) const CALLS_MAX: usize = 10_000;
/// Bytes of requests and answers that the log of one rollout keeps.
pub(crate) const AUDIT_BYTES_MAX: usize = 32 << 20;
/// Connections to all services of a rollout at a time.
pub(crate) const CONNECTIONS_MAX: usize = 64;
/// For one connection.
pub(crate) const CONNECTION_TIMEOUT: Duration = Duration::from_secs(3600);

/// Where the services' tools are served, unless a service has that port.
const TOOLS_PORT: u16 = 8765;
/// The name of that tool server.
const TOOLS_NAME: &str = "services";
/// Pause between looks at whether something is ready.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// For a tool server to become ready.
const SERVERS_TIMEOUT: Duration = Duration::from_secs(30);
/// Limit of one look.
const LOOK_TIMEOUT: Duration = Duration::from_secs(40);
/// Where the list of tool servers is while they are looked at.
const LIST: &str = "/tmp/.espalier-tool-servers.json";

/// The running services of one rollout. Dropping them ends every connection.
#[derive(Debug)]
pub struct Services {
    state: Arc<Mutex<State>>,
    forwards: Vec<(u16, PathBuf)>,
    _folder: tempfile::TempDir,
    _stop: DropGuard,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The port of the tool server over a task's services; `None` when it has no such tools.
fn tools_port(task: &Task) -> Option<u16> {
    let place = &task.environment;
    if place.tools.is_empty() {
        return None;
    }
    let free = |port: &u16| place.services.iter().all(|service| service.port != *port);
    (TOOLS_PORT..).find(free)
}

/// Every tool server that the harness is to be told of: the task's own, and the one over its
/// services.
#[must_use]
pub fn tool_servers(task: &Task) -> Vec<McpServer> {
    let mut servers = task.environment.mcp_servers.clone();
    if let Some(port) = tools_port(task) {
        servers.push(McpServer {
            name: TOOLS_NAME.to_owned(),
            transport: McpTransport::StreamableHttp {
                url: format!("http://127.0.0.1:{port}/mcp"),
            },
            env: BTreeMap::new(),
            headers: BTreeMap::new(),
            start: None,
        });
    }
    servers
}

impl Services {
    /// Starts the services of a task, before its sandbox is made; `None` when it has none. Needs a
    /// Tokio runtime.
    ///
    /// # Errors
    /// [`VerifyError::NotReady`] when this machine gives no socket.
    pub fn start(task: &Task) -> Result<Option<Self>, VerifyError> {
        if task.environment.services.is_empty() {
            return Ok(None);
        }
        let failed = |error: std::io::Error| VerifyError::NotReady {
            task: task.id.to_string(),
            command: "its services".to_owned(),
            reason: error.to_string(),
        };
        let folder = tempfile::Builder::new()
            .prefix("espalier-services-")
            .tempdir()
            .map_err(failed)?;
        let state = Arc::new(Mutex::new(State::new(task)));
        let (tracker, stop) = (TaskTracker::new(), CancellationToken::new());
        let server = serve::Server::new(Arc::clone(&state), tracker.clone(), stop.clone());
        let services = task.environment.services.iter();
        let ports = services.map(|service| (service.port, serve::Kind::Service(service.port)));
        let tools = tools_port(task).map(|port| (port, serve::Kind::Tools));
        let mut forwards = Vec::new();
        for (port, kind) in ports.chain(tools) {
            let socket = folder.path().join(format!("{port}.sock"));
            let listener = UnixListener::bind(&socket).map_err(failed)?;
            tracker.spawn(server.clone().accept(listener, kind));
            forwards.push((port, socket));
        }
        Ok(Some(Self {
            state,
            forwards,
            _folder: folder,
            _stop: stop.drop_guard(),
        }))
    }

    /// Ports of the sandbox and the sockets here that they lead to, for `Spec::forwards`.
    #[must_use]
    pub fn forwards(&self) -> Vec<(u16, PathBuf)> {
        self.forwards.clone()
    }

    /// Asks every service from inside the sandbox until it answers, then begins the log: what was
    /// asked before is not in it, and changed nothing.
    ///
    /// # Errors
    /// [`VerifyError::NotReady`], [`VerifyError::Sandbox`].
    pub async fn ready(&self, task: &Task, sandbox: &dyn Sandbox) -> Result<(), VerifyError> {
        for service in &task.environment.services {
            let url = format!("http://127.0.0.1:{}{}", service.port, service.health_check);
            let method = service.health_check_method.to_uppercase();
            let body = if method == "GET" { "" } else { "{}" };
            let argv = [sandbox::GUEST_PATH, "fetch", &method, &url, body];
            let limit = Duration::from_secs(service.ready_timeout_s);
            // 22: it answered, with an error; a health check may be a route that wants more.
            look(task, sandbox, &argv, &[0, 22], limit).await?;
        }
        lock(&self.state).begin();
        Ok(())
    }

    /// What was asked so far, and what it changed.
    #[must_use]
    pub fn audit(&self) -> Audit {
        lock(&self.state).audit()
    }
}

/// Starts what a task says of its tool servers and waits until each of them lists its tools.
/// To be called in the sandbox of the task, once its services are there.
///
/// # Errors
/// [`VerifyError::NotReady`], [`VerifyError::Sandbox`].
pub async fn start_tool_servers(task: &Task, sandbox: &dyn Sandbox) -> Result<(), VerifyError> {
    let servers = tool_servers(task);
    if servers.is_empty() {
        return Ok(());
    }
    for server in &servers {
        let Some(command) = &server.start else {
            continue;
        };
        // In a session of its own, so that it outlives this shell.
        let script = "setsid sh -c \"$1\" </dev/null >\"/tmp/.espalier-tool-server-$2.log\" 2>&1 &";
        let argv = ["sh", "-c", script, "sh", command, &server.name];
        let mut exec = exec(task, &argv, LOOK_TIMEOUT);
        exec.env.extend(server.env.clone());
        let output = sandbox
            .exec(exec)
            .await
            .map_err(doing(task, "starting a tool server"))?;
        if output.exit != Exit::Code(0) {
            return Err(VerifyError::NotReady {
                task: task.id.to_string(),
                command: cut(command, 200),
                reason: format!("{:?}", output.exit),
            });
        }
    }
    let list: serde_json::Map<String, serde_json::Value> = servers
        .iter()
        .map(|server| (server.name.clone(), described(server)))
        .collect();
    let list = serde_json::json!({"mcpServers": list}).to_string();
    let file = sandbox::File {
        path: LIST.into(),
        content: list.into_bytes(),
        mode: 0o600,
    };
    sandbox
        .upload(vec![file])
        .await
        .map_err(doing(task, "writing the list of tool servers"))?;
    let argv = [sandbox::GUEST_PATH, "tools", LIST];
    // A program that does not answer now will not do so later; an address may.
    let stdio = |server: &McpServer| matches!(server.transport, McpTransport::Stdio { .. });
    let limit = match servers.iter().all(stdio) {
        true => Duration::ZERO,
        false => SERVERS_TIMEOUT,
    };
    look(task, sandbox, &argv, &[0], limit).await?;
    let argv = ["rm", "-f", LIST];
    sandbox
        .exec(exec(task, &argv, LOOK_TIMEOUT))
        .await
        .map_err(doing(task, "removing the list of tool servers"))?;
    Ok(())
}

/// A server in the form of the guest's list.
fn described(server: &McpServer) -> serde_json::Value {
    match &server.transport {
        McpTransport::Stdio { command, args } => {
            serde_json::json!({"command": command, "args": args, "env": server.env})
        }
        McpTransport::StreamableHttp { url } | McpTransport::Sse { url } => {
            serde_json::json!({"type": "http", "url": url, "headers": server.headers})
        }
    }
}

fn exec(task: &Task, argv: &[&str], timeout: Duration) -> Exec {
    Exec {
        argv: argv.iter().map(|&word| word.to_owned()).collect(),
        cwd: Some(task.workspace.clone()),
        env: task.environment.env.clone(),
        stdin: Vec::new(),
        timeout,
        output_bytes_max: 8192,
        end_background: false,
        user: None,
    }
}

/// Runs a command until it ends with one of these codes.
async fn look(
    task: &Task,
    sandbox: &dyn Sandbox,
    argv: &[&str],
    fine: &[i32],
    limit: Duration,
) -> Result<(), VerifyError> {
    let started = Instant::now();
    loop {
        let output = sandbox
            .exec(exec(task, argv, LOOK_TIMEOUT))
            .await
            .map_err(doing(task, "looking whether it is ready"))?;
        if matches!(output.exit, Exit::Code(code) if fine.contains(&code)) {
            return Ok(());
        }
        if started.elapsed() >= limit {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(VerifyError::NotReady {
                task: task.id.to_string(),
                command: cut(&argv[1..].join(" "), 200),
                reason: format!("{:?}: {}", output.exit, cut(said.trim(), 400)),
            });
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Why the services and tool servers of a task cannot be had here, each a sentence.
pub(crate) fn refusals(task: &Task) -> Vec<String> {
    let place = &task.environment;
    let mut reasons = Vec::new();
    for service in &place.services {
        if service.mock.is_none() {
            reasons.push(format!(
                "its service {} is a program, and only services made of data are run",
                service.name
            ));
        }
    }
    for server in &place.mcp_servers {
        let name = &server.name;
        match &server.transport {
            McpTransport::Stdio { .. } => {}
            McpTransport::Sse { url } => reasons.push(format!(
                "its tool server {name} at {url} speaks server-sent events, which the protocol gave up; use streamable-http"
            )),
            McpTransport::StreamableHttp { url } if !is_here(url) => reasons.push(format!(
                "its tool server {name} is at {url}, outside of the sandbox"
            )),
            McpTransport::StreamableHttp { .. } => {}
        }
        if name == TOOLS_NAME && !place.tools.is_empty() {
            reasons.push(format!(
                "its tool server {name} has the name of that of its services"
            ));
        }
    }
    reasons
}

/// Whether an address is on the loopback, by plain HTTP.
fn is_here(url: &str) -> bool {
    let host = url
        .strip_prefix("http://")
        .and_then(|rest| rest.split('/').next())
        .map(|host| host.rsplit_once(':').map_or(host, |(name, _)| name));
    matches!(host, Some("127.0.0.1" | "localhost"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_loopback_is_here() {
        for here in [
            "http://127.0.0.1:9/mcp",
            "http://localhost/mcp",
            "http://localhost:1",
        ] {
            assert!(is_here(here), "{here}");
        }
        for away in [
            "https://localhost/x",
            "http://mcp:8000/mcp",
            "http://localhost.evil.org/",
        ] {
            assert!(!is_here(away), "{away}");
        }
    }
}
