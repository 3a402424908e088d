//! Listeners, connections, shutdown.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::connection::{Parked, Tracked};
use crate::metrics::Metrics;
use crate::receive::Budget;
use crate::refusal::{Cause, Refusal};
use crate::registry::Registry;
use crate::reply::ReplyBody;
use crate::route::{Route, route};
use crate::{Config, GatewayError, Listen, admin, answer};

/// A connection on which nothing comes for so long is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
/// Pause after a failed accept (no file descriptors, mostly): not a busy loop.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Grace for abandoned calls to be answered, and for cut connections to end.
const CUT_GRACE: Duration = Duration::from_secs(2);

pub(crate) fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| u64::try_from(since.as_millis()).ok())
        .unwrap_or(0)
}

/// What all requests share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) engine: Arc<dyn engine::Engine>,
    pub(crate) info: engine::Info,
    pub(crate) codec: Arc<codec::Codec>,
    pub(crate) ledger: ledger::Ledger,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) registry: Registry,
    pub(crate) paused: watch::Sender<bool>,
    /// Requests that the engine is at work on.
    pub(crate) asking: watch::Sender<usize>,
    /// New calls are refused.
    pub(crate) refusing: AtomicBool,
    pub(crate) in_flight: Arc<Semaphore>,
    pub(crate) budget: Arc<Budget>,
    /// Calls, deliveries, connections and listeners.
    pub(crate) tasks: TaskTracker,
    pub(crate) runtime: tokio::runtime::Handle,
    connections: Arc<Semaphore>,
    /// Listeners end, connections end after their current request.
    stop: CancellationToken,
    /// Work on calls ends. Parent of every session's token.
    abandon: CancellationToken,
    /// Connections end now.
    cut: CancellationToken,
}

impl Shared {
    pub(crate) fn new(
        config: Config,
        engine: Arc<dyn engine::Engine>,
        codec: Arc<codec::Codec>,
        ledger: ledger::Ledger,
    ) -> Result<Self, GatewayError> {
        let metrics = Arc::new(Metrics::new().map_err(|_| GatewayError::Config {
            key: "metrics",
            expected: "counters that can be registered",
        })?);
        let abandon = CancellationToken::new();
        Ok(Self {
            registry: Registry::new(&config, Arc::clone(&metrics), abandon.clone()),
            in_flight: Arc::new(Semaphore::new(config.calls_in_flight_max)),
            connections: Arc::new(Semaphore::new(config.connections_max)),
            budget: Budget::new(config.bodies_bytes_max),
            info: engine.info(),
            config,
            engine,
            codec,
            ledger,
            metrics,
            paused: watch::Sender::new(false),
            asking: watch::Sender::new(0),
            refusing: AtomicBool::new(false),
            tasks: TaskTracker::new(),
            runtime: tokio::runtime::Handle::current(),
            stop: CancellationToken::new(),
            abandon,
            cut: CancellationToken::new(),
        })
    }

    /// Waits until the engine is at work on nothing; says whether that was so within `limit`.
    pub(crate) async fn drained(&self, limit: Duration) -> bool {
        let mut asking = self.asking.subscribe();
        let nothing = asking.wait_for(|asking| *asking == 0);
        tokio::time::timeout(limit, nothing).await.is_ok()
    }

    /// New weights for the engine; see [`engine::Engine::load_weights`].
    pub(crate) async fn load_weights(
        &self,
        folder: &Path,
        version: record::PolicyVersion,
    ) -> Result<(), GatewayError> {
        let started = tokio::time::Instant::now();
        let loaded = self.engine.load_weights(folder, version).await;
        let folder = folder.display();
        match &loaded {
            Ok(()) => tracing::info!(
                %folder, version, seconds = started.elapsed().as_secs_f64(), "new weights"
            ),
            Err(error) => tracing::warn!(%folder, version, %error, "weights were not loaded"),
        }
        loaded.map_err(GatewayError::Weights)
    }

    /// All metrics, with those of the engines as they are now.
    pub(crate) fn metrics_text(&self) -> String {
        self.metrics.engines(&self.engine.members());
        self.metrics
            .policy_version
            .set(i64::try_from(self.engine.policy_version()).unwrap_or(i64::MAX));
        self.metrics
            .engine_requests
            .set(i64::try_from(*self.asking.borrow()).unwrap_or(i64::MAX));
        self.metrics.paused.set(i64::from(*self.paused.borrow()));
        self.metrics.text()
    }

    /// Everything ends as soon as it is polled again.
    pub(crate) fn stop_now(&self) {
        self.refusing.store(true, Ordering::Relaxed);
        self.stop.cancel();
        self.abandon.cancel();
        self.cut.cancel();
    }

    pub(crate) async fn shutdown(&self, servers: &Servers, drain: Duration) {
        self.refusing.store(true, Ordering::Relaxed);
        self.stop.cancel();
        self.tasks.close();
        let mut rest = tokio::time::timeout(drain, self.tasks.wait()).await;
        if rest.is_err() {
            self.abandon.cancel();
            rest = tokio::time::timeout(CUT_GRACE, self.tasks.wait()).await;
        }
        if rest.is_err() {
            self.cut.cancel();
            rest = tokio::time::timeout(CUT_GRACE, self.tasks.wait()).await;
        }
        if rest.is_err() {
            tracing::warn!(
                tasks = self.tasks.len(),
                "tasks of the gateway did not end in time"
            );
        }
        servers.remove_sockets();
    }
}

/// An address that the gateway listens on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalAddr {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP address with its real port.
    Tcp(SocketAddr),
    /// The admin API.
    Admin(SocketAddr),
}

/// The running listeners.
#[derive(Debug)]
pub(crate) struct Servers {
    addresses: Vec<LocalAddr>,
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
    Admin(TcpListener, axum::Router),
}

impl Servers {
    /// Binds everything before anything is served.
    pub(crate) async fn start(shared: &Arc<Shared>) -> Result<Self, GatewayError> {
        let mut addresses = Vec::new();
        let mut listeners = Vec::new();
        for listen in &shared.config.listen {
            match listen {
                Listen::Tcp(address) => {
                    let (listener, address) = bind_tcp(*address).await?;
                    addresses.push(LocalAddr::Tcp(address));
                    listeners.push(Listener::Tcp(listener));
                }
                Listen::Unix(path) => {
                    listeners.push(Listener::Unix(bind_unix(path).await?));
                    addresses.push(LocalAddr::Unix(path.clone()));
                }
            }
        }
        if let Some(config) = &shared.config.admin {
            let (listener, address) = bind_tcp(config.listen).await?;
            let base = addresses.iter().find_map(|address| match address {
                LocalAddr::Tcp(address) => Some(format!("http://{address}")),
                _ => None,
            });
            addresses.push(LocalAddr::Admin(address));
            let router = admin::router(Arc::clone(shared), &config.token, base);
            listeners.push(Listener::Admin(listener, router));
        }
        for listener in listeners {
            shared
                .tasks
                .spawn(accept_until_stopped(Arc::clone(shared), listener));
        }
        Ok(Self { addresses })
    }

    pub(crate) fn addresses(&self) -> &[LocalAddr] {
        &self.addresses
    }

    fn remove_sockets(&self) {
        for address in &self.addresses {
            if let LocalAddr::Unix(path) = address {
                // Best effort: the next start replaces a stale socket.
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

fn refused(address: impl std::fmt::Display, error: &std::io::Error) -> GatewayError {
    GatewayError::Listen {
        address: address.to_string(),
        reason: match error.kind() {
            std::io::ErrorKind::AddrInUse => "the address is in use".to_owned(),
            _ => error.to_string(),
        },
    }
}

async fn bind_tcp(address: SocketAddr) -> Result<(TcpListener, SocketAddr), GatewayError> {
    let listener = TcpListener::bind(address)
        .await
        .map_err(|error| refused(address, &error))?;
    let address = listener
        .local_addr()
        .map_err(|error| refused(address, &error))?;
    Ok((listener, address))
}

async fn bind_unix(path: &Path) -> Result<UnixListener, GatewayError> {
    let name = path.display();
    if let Ok(metadata) = std::fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            let error = std::io::Error::other("a file that is not a socket is there");
            return Err(refused(name, &error));
        }
        if UnixStream::connect(path).await.is_ok() {
            return Err(refused(name, &std::io::ErrorKind::AddrInUse.into()));
        }
        std::fs::remove_file(path).map_err(|error| refused(name, &error))?;
    }
    let name = path.display();
    let listener = UnixListener::bind(path).map_err(|error| refused(name, &error))?;
    let name = path.display();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))
        .map_err(|error| refused(name, &error))?;
    Ok(listener)
}

enum Accepted {
    Tcp(TcpStream),
    Unix(UnixStream),
}

async fn accept_until_stopped(shared: Arc<Shared>, listener: Listener) {
    loop {
        let accepted = tokio::select! {
            biased;
            () = shared.stop.cancelled() => return,
            accepted = accept(&shared, &listener) => accepted,
        };
        let (accepted, permit) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let connection = Arc::clone(&shared);
        match (accepted, &listener) {
            (Accepted::Tcp(stream), Listener::Admin(_, router)) => {
                let router = router.clone();
                shared
                    .tasks
                    .spawn(serve_admin(connection, stream, router, permit));
            }
            (Accepted::Tcp(stream), _) => {
                // Replies are written whole: waiting for more would only delay them.
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "no TCP_NODELAY");
                }
                shared
                    .tasks
                    .spawn(serve_harness(connection, stream, permit));
            }
            (Accepted::Unix(stream), _) => {
                shared
                    .tasks
                    .spawn(serve_harness(connection, stream, permit));
            }
        }
    }
}

async fn accept(
    shared: &Shared,
    listener: &Listener,
) -> std::io::Result<(Accepted, OwnedSemaphorePermit)> {
    let permit = Arc::clone(&shared.connections)
        .acquire_owned()
        .await
        .map_err(std::io::Error::other)?;
    let accepted = match listener {
        Listener::Tcp(listener) | Listener::Admin(listener, _) => {
            Accepted::Tcp(listener.accept().await?.0)
        }
        Listener::Unix(listener) => Accepted::Unix(listener.accept().await?.0),
    };
    Ok((accepted, permit))
}

async fn serve_harness<S>(shared: Arc<Shared>, stream: S, _permit: OwnedSemaphorePermit)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    shared.metrics.connections.inc();
    let (stream, parked) = Tracked::new(stream, Duration::from_secs(shared.config.write_timeout_s));
    let service = {
        let shared = Arc::clone(&shared);
        service_fn(move |request| {
            let (shared, parked) = (Arc::clone(&shared), Arc::clone(&parked));
            async move { Ok::<_, Infallible>(dispatch(&shared, &parked, request).await) }
        })
    };
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    drive(&shared, connection).await;
    shared.metrics.connections.dec();
}

async fn serve_admin(
    shared: Arc<Shared>,
    stream: TcpStream,
    router: axum::Router,
    _permit: OwnedSemaphorePermit,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_TIMEOUT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    drive(&shared, connection).await;
}

/// A connection that can be asked to end after its current request.
trait Graceful: Future<Output = hyper::Result<()>> {
    fn end_soon(self: std::pin::Pin<&mut Self>);
}

impl<I, B, S> Graceful for http1::Connection<I, S>
where
    S: hyper::service::HttpService<Incoming, ResBody = B>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    I: hyper::rt::Read + hyper::rt::Write + Unpin,
    B: hyper::body::Body + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    fn end_soon(self: std::pin::Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

async fn drive(shared: &Shared, connection: impl Graceful) {
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        () = shared.stop.cancelled() => None,
    };
    let ended = match ended {
        Some(ended) => ended,
        None => {
            connection.as_mut().end_soon();
            tokio::select! {
                ended = connection.as_mut() => ended,
                () = shared.cut.cancelled() => Ok(()),
            }
        }
    };
    if let Err(error) = ended {
        // A client that goes away in mid-call is an everyday event.
        tracing::debug!(%error, "a connection broke");
    }
}

async fn dispatch(
    shared: &Arc<Shared>,
    parked: &Arc<Parked>,
    request: Request<Incoming>,
) -> Response<ReplyBody> {
    let configured = shared.config.model.as_str();
    match route(request.method(), request.uri(), request.headers()) {
        Route::Call(dialect, target) => {
            answer::answer(shared, parked, dialect, target, request).await
        }
        Route::Count(dialect, target) => answer::count(shared, dialect, target, request).await,
        Route::Models(dialect) => json_response(&wire::dialect::model_list(dialect, &[configured])),
        Route::Model(dialect, name) if name == configured => {
            json_response(&wire::dialect::model(dialect, configured))
        }
        Route::Probe => json_response(&json!({"status": "ok"})),
        Route::Upgrade(dialect) => {
            let mut response = Refusal::new(
                Cause::NotFound,
                "WebSockets are not served here: send the request over HTTP",
            )
            .response(dialect);
            *response.status_mut() = StatusCode::UPGRADE_REQUIRED;
            let headers = response.headers_mut();
            headers.insert(header::UPGRADE, HeaderValue::from_static("HTTP/1.1"));
            response
        }
        Route::Model(dialect, _) | Route::Unknown(dialect) => {
            shared.metrics.refuse(Cause::NotFound);
            let mut response = Refusal::new(
                Cause::NotFound,
                format!(
                    "nothing is served at {} {}: this gateway speaks POST chat/completions, responses, messages and models/MODEL:generateContent, and GET models",
                    request.method(),
                    without_key(request.uri().path()),
                ),
            )
            .response(dialect);
            // What is left of a body is not worth reading.
            if request.method() != http::Method::HEAD && request.method() != http::Method::GET {
                response
                    .headers_mut()
                    .insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            response
        }
    }
}

/// A path as it may be shown.
fn without_key(path: &str) -> &str {
    match path.strip_prefix("/r/") {
        Some(rest) => rest.find('/').map_or("/", |at| &rest[at..]),
        None => path,
    }
}

pub(crate) fn json_response(value: &serde_json::Value) -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::text(Bytes::from(value.to_string())));
    *response.status_mut() = StatusCode::OK;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}
