//! A way out for tasks that need one: a forward proxy on this machine that lets through what an
//! allow list names, and writes down what was asked. Sandboxes reach it through a forwarded port
//! ([`crate::Spec::forwards`]) and `HTTPS_PROXY=http://127.0.0.1:PORT`; they still have no network
//! of their own, and names are resolved here.
//!
//! `CONNECT` is tunnelled; requests with a full address are sent on, one by one, with the `Host` of
//! that address. Addresses that are not of the public internet are refused whatever name leads to
//! them, so that a name on the list cannot be pointed at this machine or its neighbours.
//!
//! Not covered: what is inside TLS. Whoever may reach a host may talk to everything that host
//! serves under other names.
//!
//! Limits: [`CONNECTIONS_MAX`] connections (more are closed), [`CONNECT_TIMEOUT`] for name and
//! connection, [`CONNECTION_TIMEOUT`] for a connection. A record is written by whoever made it: a
//! slow disk slows requests and loses no record.

use std::{
    convert::Infallible,
    io::{self, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use http::{HeaderName, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Either, Full};
use hyper::{body::Incoming, client::conn, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::{
    io::copy_bidirectional,
    net::{TcpStream, UnixListener, UnixStream, lookup_host},
    sync::Semaphore,
    time::timeout,
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

/// Connections at a time.
const CONNECTIONS_MAX: usize = 64;
/// For resolving a name and connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// For a whole connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(3600);

/// Headers that are for the proxy or for one connection only.
const HOP_HEADERS: [HeaderName; 6] = [
    header::CONNECTION,
    header::PROXY_AUTHORIZATION,
    header::PROXY_AUTHENTICATE,
    header::TE,
    header::UPGRADE,
    HeaderName::from_static("proxy-connection"),
];

/// What may be reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allowed {
    /// `example.org` (the ports 80 and 443), `example.org:8443`, `*.example.org` (every name below
    /// it, not itself), `*` (every name). Addresses instead of names are taken as they are written.
    pub hosts: Vec<String>,
    /// Also addresses that are not of the public internet. For services of one's own.
    #[serde(default)]
    pub private_addresses: bool,
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// Let through.
    Allowed,
    /// Not on the list, or not a public address.
    Denied,
    /// Allowed, and could not be reached.
    Failed,
}

/// One line of the audit log, written when the request is over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EgressRecord {
    /// When it began, in seconds since 1970.
    pub time_s: f64,
    /// `CONNECT`, `GET` …
    pub method: String,
    /// The host that was asked for.
    pub host: String,
    /// The port.
    pub port: u16,
    /// What became of it.
    pub decision: Decision,
    /// Why, when it was not let through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Bytes from the sandbox, of a tunnel.
    pub up_bytes: u64,
    /// Bytes to the sandbox, of a tunnel.
    pub down_bytes: u64,
    /// How long it took.
    pub seconds: f64,
}

impl Allowed {
    /// Whether a host and port are on the list.
    #[must_use]
    pub fn names(&self, host: &str, port: u16) -> bool {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        self.hosts.iter().any(|rule| {
            let rule = rule.trim().to_ascii_lowercase();
            let (name, ports_fit) = match rule.rsplit_once(':') {
                Some((name, number)) if number.parse::<u16>().is_ok() && !name.contains(':') => {
                    (name, number.parse() == Ok(port))
                }
                _ => (rule.as_str(), port == 80 || port == 443),
            };
            let name_fits = match name.strip_prefix("*.") {
                Some(parent) => host
                    .strip_suffix(parent)
                    .and_then(|rest| rest.strip_suffix('.'))
                    .is_some_and(|rest| !rest.is_empty()),
                None => host == name || name == "*",
            };
            ports_fit && name_fits
        })
    }
}

/// Whether an address belongs to the public internet.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            let shared = a == 100 && (64..128).contains(&b);
            let special =
                (a == 192 && b == 0 && (c == 0 || c == 2)) || (a == 198 && (b == 18 || b == 19));
            !(v4.is_private()
                || v4.is_loopback()
                || v4.is_link_local()
                || v4.is_multicast()
                || v4.is_documentation()
                || v4.is_broadcast()
                || shared
                || special
                || a == 0
                || a >= 240)
        }
        IpAddr::V6(v6) => {
            let segments = v6.segments();
            if let Some(v4) = v6.to_ipv4_mapped() {
                return is_public(IpAddr::V4(v4));
            }
            // 6to4 and NAT64 carry an IPv4 address.
            if segments[0] == 0x2002 || segments[..6] == [0x64, 0xff9b, 0, 0, 0, 0] {
                let (high, low) = if segments[0] == 0x2002 {
                    (segments[1], segments[2])
                } else {
                    (segments[6], segments[7])
                };
                let v4 = Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
                return is_public(IpAddr::V4(v4));
            }
            // Global unicast, but for documentation.
            (segments[0] & 0xe000) == 0x2000 && !(segments[0] == 0x2001 && segments[1] == 0x0db8)
        }
    }
}

/// A proxy for one task, or for all that share a list. Dropping it closes every connection and
/// removes its socket.
#[derive(Debug)]
pub struct EgressProxy {
    socket: PathBuf,
    tasks: TaskTracker,
    stop: Option<DropGuard>,
}

#[derive(Debug)]
struct Proxy {
    allowed: Allowed,
    audit: Mutex<std::fs::File>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl EgressProxy {
    /// Listens on a unix socket, which must not be there, and appends a line of JSON for each
    /// request to the audit log ([`EgressRecord`]). Needs a Tokio runtime.
    ///
    /// # Errors
    /// When the socket or the log cannot be made.
    pub fn start(socket: &Path, allowed: Allowed, audit: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(socket)?;
        let audit = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(audit)?;
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let proxy = Arc::new(Proxy {
            allowed,
            audit: Mutex::new(audit),
            tasks: tasks.clone(),
            stop: stop.clone(),
        });
        tasks.spawn(accept(proxy, listener));
        Ok(Self {
            socket: socket.to_owned(),
            tasks,
            stop: Some(stop.drop_guard()),
        })
    }

    /// The socket for [`crate::Spec::forwards`].
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Ends all connections and waits until their records are written.
    pub async fn close(mut self) {
        drop(self.stop.take());
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for EgressProxy {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

async fn accept(proxy: Arc<Proxy>, listener: UnixListener) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = proxy.stop.cancelled() => return,
        };
        let Ok((stream, _)) = accepted else { continue };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            tracing::warn!("an egress connection beyond {CONNECTIONS_MAX} was closed");
            continue;
        };
        let serving = Arc::clone(&proxy);
        proxy.tasks.spawn(async move {
            let stop = serving.stop.clone();
            tokio::select! {
                _ = timeout(CONNECTION_TIMEOUT, serve(serving, stream)) => {}
                () = stop.cancelled() => {}
            }
            drop(place);
        });
    }
}

async fn serve(proxy: Arc<Proxy>, stream: UnixStream) {
    let service = service_fn(move |request| {
        let proxy = Arc::clone(&proxy);
        async move { Ok::<_, Infallible>(proxy.answer(request).await) }
    });
    // A client may say that it has nothing more to send and still wait for its answer.
    let connection = http1::Builder::new()
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.with_upgrades().await {
        tracing::debug!(%error, "an egress connection broke");
    }
}

type Body = Either<Full<Bytes>, Incoming>;

fn text(status: StatusCode, text: &str) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::new(Bytes::from(format!("{text}\n")))));
    *response.status_mut() = status;
    response
}

/// Host and port of what is asked for.
fn target(method: &Method, uri: &Uri) -> Option<(String, u16)> {
    let host = uri.host()?.trim_start_matches('[').trim_end_matches(']');
    let port = match uri.port_u16() {
        Some(port) => port,
        // A tunnel says where to.
        None if *method == Method::CONNECT => return None,
        None if uri.scheme_str() == Some("http") => 80,
        None => return None,
    };
    Some((host.to_owned(), port))
}

impl Proxy {
    async fn answer(self: &Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        let Some((host, port)) = target(request.method(), request.uri()) else {
            return text(
                StatusCode::BAD_REQUEST,
                "this is a proxy: expected CONNECT host:port, or a request for http://host/path",
            );
        };
        let began = Instant::now();
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut record = EgressRecord {
            time_s: now.map_or(0.0, |d| d.as_secs_f64()),
            method: request.method().to_string(),
            host,
            port,
            decision: Decision::Denied,
            reason: None,
            up_bytes: 0,
            down_bytes: 0,
            seconds: 0.0,
        };
        let stream = match self.reach(&record.host, record.port).await {
            Ok(stream) => stream,
            Err((decision, reason)) => {
                let status = match decision {
                    Decision::Failed => StatusCode::BAD_GATEWAY,
                    _ => StatusCode::FORBIDDEN,
                };
                let answer = text(status, &format!("{}:{port}: {reason}", record.host));
                record.decision = decision;
                record.reason = Some(reason);
                self.write(record, began);
                return answer;
            }
        };
        record.decision = Decision::Allowed;
        if request.method() == Method::CONNECT {
            self.tunnel(request, stream, record, began);
            return Response::new(Either::Left(Full::default()));
        }
        match self.forward(request, stream, &record).await {
            Ok(response) => {
                self.write(record, began);
                response.map(Either::Right)
            }
            Err(error) => {
                let answer = text(StatusCode::BAD_GATEWAY, &error);
                record.decision = Decision::Failed;
                record.reason = Some(error);
                self.write(record, began);
                answer
            }
        }
    }

    /// Connects, if that is allowed.
    async fn reach(&self, host: &str, port: u16) -> Result<TcpStream, (Decision, String)> {
        if !self.allowed.names(host, port) {
            return Err((
                Decision::Denied,
                "not on the task's list of hosts".to_owned(),
            ));
        }
        let failed = |reason: String| (Decision::Failed, reason);
        let connecting = async {
            let addresses: Vec<SocketAddr> = lookup_host((host, port))
                .await
                .map_err(|e| failed(format!("resolving the name: {e}")))?
                .collect();
            // All of them: whoever answers with one public address beside a private one is up to
            // something.
            let private = addresses.iter().find(|address| !is_public(address.ip()));
            if let (Some(address), false) = (private, self.allowed.private_addresses) {
                let reason = format!("{} is no address of the public internet", address.ip());
                return Err((Decision::Denied, reason));
            }
            let mut last = failed("the name has no address".to_owned());
            for address in addresses {
                match TcpStream::connect(address).await {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = failed(format!("connecting to {address}: {error}")),
                }
            }
            Err(last)
        };
        timeout(CONNECT_TIMEOUT, connecting)
            .await
            .unwrap_or_else(|_| Err(failed(format!("not reached within {CONNECT_TIMEOUT:?}"))))
    }

    fn tunnel(
        self: &Arc<Self>,
        request: Request<Incoming>,
        mut stream: TcpStream,
        mut record: EgressRecord,
        began: Instant,
    ) {
        let proxy = Arc::clone(self);
        self.tasks.spawn(async move {
            let carry = async {
                let upgraded = hyper::upgrade::on(request)
                    .await
                    .map_err(io::Error::other)?;
                copy_bidirectional(&mut TokioIo::new(upgraded), &mut stream).await
            };
            let carried = tokio::select! {
                carried = timeout(CONNECTION_TIMEOUT, carry) => carried,
                () = proxy.stop.cancelled() => Ok(Err(io::Error::other("the proxy was closed"))),
            };
            match carried {
                Ok(Ok((up, down))) => (record.up_bytes, record.down_bytes) = (up, down),
                Ok(Err(error)) => record.reason = Some(error.to_string()),
                Err(_) => record.reason = Some(format!("cut after {CONNECTION_TIMEOUT:?}")),
            }
            proxy.write(record, began);
        });
    }

    /// Sends one request on, in its own connection.
    async fn forward(
        &self,
        request: Request<Incoming>,
        stream: TcpStream,
        record: &EgressRecord,
    ) -> Result<Response<Incoming>, String> {
        let (mut parts, body) = request.into_parts();
        let path = parts.uri.path_and_query().map_or("/", |p| p.as_str());
        let authority = parts.uri.authority().map(ToString::to_string);
        parts.uri = path.parse().map_err(|e| format!("its path: {e}"))?;
        for name in &HOP_HEADERS {
            parts.headers.remove(name);
        }
        // What was checked is what is asked for.
        let host = authority.unwrap_or_else(|| record.host.clone());
        let host = host.parse().map_err(|e| format!("its host: {e}"))?;
        parts.headers.insert(header::HOST, host);
        let io = TokioIo::new(stream);
        let (mut sender, connection) = conn::http1::handshake(io)
            .await
            .map_err(|e| e.to_string())?;
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                _ = timeout(CONNECTION_TIMEOUT, connection) => {}
                () = stop.cancelled() => {}
            }
        });
        let request = Request::from_parts(parts, body.boxed());
        let mut response = sender
            .send_request(request)
            .await
            .map_err(|e| e.to_string())?;
        for name in &HOP_HEADERS {
            response.headers_mut().remove(name);
        }
        Ok(response)
    }

    fn write(&self, mut record: EgressRecord, began: Instant) {
        record.seconds = began.elapsed().as_secs_f64();
        if record.decision == Decision::Denied {
            tracing::info!(host = record.host, port = record.port, "egress denied");
        }
        let Ok(mut line) = serde_json::to_vec(&record) else {
            return;
        };
        line.push(b'\n');
        // One write of one line: lines of several proxies in one file stay whole.
        let mut audit = self.audit.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = audit.write_all(&line) {
            tracing::error!(%error, "the audit log of egress cannot be written");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_named_exactly_or_by_what_is_above_them() {
        let allowed = Allowed {
            hosts: [
                "pypi.org",
                "*.example.com",
                "db.internal:5432",
                "10.0.0.7:80",
            ]
            .map(str::to_owned)
            .to_vec(),
            private_addresses: false,
        };
        for (host, port) in [
            ("pypi.org", 443),
            ("PyPI.org.", 80),
            ("a.example.com", 443),
            ("a.b.example.com", 80),
            ("db.internal", 5432),
            ("10.0.0.7", 80),
        ] {
            assert!(allowed.names(host, port), "{host}:{port}");
        }
        for (host, port) in [
            ("pypi.org", 22),
            ("evil-pypi.org", 443),
            ("pypi.org.evil.com", 443),
            ("example.com", 443),
            ("evilexample.com", 443),
            (".example.com", 443),
            ("db.internal", 443),
            ("", 443),
        ] {
            assert!(!allowed.names(host, port), "{host}:{port}");
        }
    }

    #[test]
    fn only_addresses_of_the_public_internet_are_public() {
        for address in [
            "1.1.1.1",
            "8.8.8.8",
            "2606:4700::1111",
            "::ffff:8.8.8.8",
            "64:ff9b::808:808",
        ] {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
        for address in [
            "127.0.0.1",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "198.18.0.1",
            "192.0.2.1",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "ff02::1",
            "2001:db8::1",
            "::ffff:127.0.0.1",
            "2002:7f00:1::",
            "64:ff9b::7f00:1",
        ] {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
    }
}
