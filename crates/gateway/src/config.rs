//! Settings of a gateway. Every limit of it is here.

use std::net::SocketAddr;
use std::path::PathBuf;

use record::Secret;

use crate::GatewayError;

/// Where harnesses may connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// A unix socket. A stale file of a process that has gone is replaced. Anybody may connect
    /// to it: the key is the secret, and sandboxes have other user ids.
    Unix(PathBuf),
    /// A TCP address. Port 0 takes a free one.
    Tcp(SocketAddr),
}

/// The admin API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admin {
    /// Its own listener, which sandboxes must not be able to reach.
    pub listen: SocketAddr,
    /// Bearer token, at least 16 bytes.
    pub token: Secret,
}

/// Settings of a gateway.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where harnesses connect. At least one.
    pub listen: Vec<Listen>,
    /// The admin API; none by default.
    pub admin: Option<Admin>,
    /// The model's name in replies to clients that name none, and in the list of models.
    pub model: String,
    /// A request body; then 413.
    pub body_bytes_max: usize,
    /// All request bodies in memory together; then 503.
    pub bodies_bytes_max: usize,
    /// Requests with a key that are being served, over all rollouts; then 429.
    pub calls_in_flight_max: usize,
    /// Open connections; further ones wait in the kernel's backlog.
    pub connections_max: usize,
    /// Open rollouts; then [`GatewayError::TooManyRollouts`].
    pub rollouts_max: usize,
    /// Closed rollouts whose status and key are remembered; older keys are unknown (401).
    pub closed_kept_max: usize,
    /// Seconds between keep-alive comments in a stream that waits for the engine.
    pub keep_alive_s: u64,
    /// Milliseconds that a stream's headers wait for a quick failure.
    pub headers_after_ms: u64,
    /// Seconds for a request body to arrive; then 400.
    pub body_timeout_s: u64,
    /// Seconds that a client may leave a reply unread; then its connection is cut.
    pub write_timeout_s: u64,
    /// Seconds for one generation; then it counts as an engine failure.
    pub engine_timeout_s: u64,
    /// Seconds that a generation goes on when no client waits for it any more; then it is
    /// cancelled. Longer than clients pause before they try again, or their work is done twice.
    pub abandon_after_s: u64,
    /// Seconds that a call waits while the gateway is paused; then 503.
    pub pause_timeout_s: u64,
    /// Whether calls become spans of the global OpenTelemetry tracer, which the program has
    /// installed.
    pub spans: bool,
    /// Unmarked repeats of a delivered call that are answered with the same reply.
    pub replays_max: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            admin: None,
            model: "policy".to_owned(),
            body_bytes_max: 64 << 20,
            bodies_bytes_max: 1 << 30,
            calls_in_flight_max: 1024,
            connections_max: 4096,
            rollouts_max: 4096,
            closed_kept_max: 65_536,
            keep_alive_s: 5,
            headers_after_ms: 500,
            body_timeout_s: 60,
            write_timeout_s: 60,
            engine_timeout_s: 600,
            abandon_after_s: 120,
            pause_timeout_s: 600,
            spans: false,
            replays_max: 2,
        }
    }
}

impl Config {
    /// Refuses settings that cannot work.
    pub(crate) fn check(&self) -> Result<(), GatewayError> {
        let refuse =
            |key: &'static str, expected: &'static str| Err(GatewayError::Config { key, expected });
        if self.listen.is_empty() {
            return refuse("listen", "at least one address");
        }
        if self.keep_alive_s == 0 {
            return refuse("keep_alive_s", "at least 1");
        }
        if self.engine_timeout_s == 0 {
            return refuse("engine_timeout_s", "at least 1");
        }
        if self.calls_in_flight_max == 0 || self.connections_max == 0 {
            return refuse("calls_in_flight_max and connections_max", "at least 1");
        }
        if let Some(admin) = &self.admin
            && admin.token.expose().len() < 16
        {
            return refuse("admin.token", "at least 16 bytes");
        }
        Ok(())
    }
}
