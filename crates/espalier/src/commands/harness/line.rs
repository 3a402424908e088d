//! The line between sandbox and gateway, with faults on it: a proxy on a unix socket that answers
//! 500, drops connections, and cuts replies in two, each once, at chosen turns.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{
    body::{Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use record::Dialect;
use tokio::{
    net::{UnixListener, UnixStream},
    task::JoinSet,
};

use super::play::{self, highest_mark};

/// Connections at a time; further ones wait in the kernel's backlog.
const CONNECTIONS_MAX: usize = 256;
/// A request or a reply has at most this long to pass.
const PASS_S: u64 = 900;

/// What happens to a request, once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It never reaches the gateway: 500 in the client's own error shape.
    Status500,
    /// The gateway has answered, and the connection is closed before the first byte.
    Reset,
    /// The gateway has answered, and the connection is closed in the midst of the body.
    Cut,
    /// The same right behind the first event with text: the client has what was said, and not what
    /// was to be done.
    CutBehindText,
}

impl Fault {
    /// How much of a reply passes.
    fn passes(self, body: &[u8]) -> usize {
        let text = match self {
            Self::CutBehindText => find(body, play::SAYS.as_bytes()),
            _ => None,
        };
        let end = text.and_then(|at| Some(at + find(&body[at..], b"\n\n")? + 2));
        // A reply that is no stream has no events.
        end.filter(|end| *end < body.len())
            .unwrap_or(body.len() / 2)
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

/// A broken line, on purpose.
#[derive(Debug, thiserror::Error)]
#[error("the line was cut on purpose")]
struct CutHere;

type Body = BoxBody<Bytes, CutHere>;

#[derive(Debug)]
struct Shared {
    gateway: PathBuf,
    dialect: Dialect,
    faults: Mutex<BTreeMap<usize, Fault>>,
    played: AtomicU32,
    first_post: Mutex<Option<Instant>>,
    /// Told of the first request, and waited for before it goes on.
    first: tokio::sync::watch::Sender<bool>,
    go_on: tokio::sync::watch::Receiver<bool>,
}

/// The proxy; it ends when dropped.
#[derive(Debug)]
pub(crate) struct Line {
    shared: Arc<Shared>,
    _accepting: JoinSet<()>,
}

/// What is told to whoever wants to look at the sandbox when the first request comes.
#[derive(Debug)]
pub(crate) struct FirstCall {
    /// Becomes true when it has come.
    pub(crate) came: tokio::sync::watch::Receiver<bool>,
    /// To be set when it may go on.
    pub(crate) go_on: tokio::sync::watch::Sender<bool>,
}

impl Line {
    /// Listens at `socket` and forwards to `gateway`. The first request waits until
    /// [`FirstCall::go_on`] is set or dropped.
    ///
    /// # Errors
    /// The system's reason why the socket cannot be bound.
    pub(crate) fn start(
        socket: &Path,
        gateway: PathBuf,
        dialect: Dialect,
        faults: BTreeMap<usize, Fault>,
    ) -> std::io::Result<(Self, FirstCall)> {
        let listener = UnixListener::bind(socket)?;
        let (first, came) = tokio::sync::watch::channel(false);
        let (go_on, may_go) = tokio::sync::watch::channel(false);
        let shared = Arc::new(Shared {
            gateway,
            dialect,
            faults: Mutex::new(faults),
            played: AtomicU32::new(0),
            first_post: Mutex::new(None),
            first,
            go_on: may_go,
        });
        let mut accepting = JoinSet::new();
        accepting.spawn(accept(listener, Arc::clone(&shared)));
        Ok((
            Self {
                shared,
                _accepting: accepting,
            },
            FirstCall { came, go_on },
        ))
    }

    /// Faults that were played.
    pub(crate) fn played(&self) -> u32 {
        self.shared.played.load(Relaxed)
    }

    /// When the first model request came.
    pub(crate) fn first_post(&self) -> Option<Instant> {
        *lock(&self.shared.first_post)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn accept(listener: UnixListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        while connections.len() >= CONNECTIONS_MAX {
            connections.join_next().await;
        }
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "the proxy of the check takes no more connections");
                    return;
                }
            },
            Some(_) = connections.join_next() => continue,
        };
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            let service = service_fn(|request| pass(Arc::clone(&shared), request));
            let served = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
            // Faults end connections in this way.
            if let Err(error) = served {
                tracing::debug!(%error, "a connection of the check ended early");
            }
        });
    }
}

async fn pass(shared: Arc<Shared>, request: Request<Incoming>) -> Result<Response<Body>, CutHere> {
    let (mut parts, body) = request.into_parts();
    let limit = Duration::from_secs(PASS_S);
    let body = tokio::time::timeout(limit, body.collect()).await;
    let body = body.map_err(|_| CutHere)?.map_err(|_| CutHere)?.to_bytes();
    let mut fault = None;
    if parts.method == Method::POST {
        let is_first = lock(&shared.first_post).is_none();
        if is_first {
            lock(&shared.first_post).get_or_insert_with(Instant::now);
            shared.first.send_replace(true);
            let mut go_on = shared.go_on.clone();
            // An error means that nobody looks.
            let _ = go_on.wait_for(|go| *go).await;
        }
        let text = String::from_utf8_lossy(&body);
        // Side calls have no tools and are let through.
        if text.contains("\"tools\"") {
            fault = lock(&shared.faults).remove(&(highest_mark(&text) + 1));
        }
    }
    if fault.is_some() {
        shared.played.fetch_add(1, Relaxed);
    }
    if fault == Some(Fault::Status500) {
        let kind = wire::ErrorKind::Engine;
        let (_, body) = wire::dialect::error_body(shared.dialect, &kind, "a fault on purpose");
        let mut response = Response::new(full(Bytes::from(body.to_string())));
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        response.headers_mut().insert(
            http::header::CONTENT_TYPE,
            http::HeaderValue::from_static("application/json"),
        );
        return Ok(response);
    }
    // Framing is this connection's own matter.
    parts.headers.remove(http::header::TRANSFER_ENCODING);
    parts.headers.remove(http::header::CONNECTION);
    let asked = Request::from_parts(parts, Full::new(body));
    let answered = tokio::time::timeout(limit, ask(&shared.gateway, asked)).await;
    let (mut head, body) = answered.map_err(|_| CutHere)??.into_parts();
    match fault {
        None => Ok(Response::from_parts(head, full(body))),
        Some(cut @ (Fault::Cut | Fault::CutBehindText)) => {
            let half = body.slice(..cut.passes(&body));
            let frames = vec![Ok(Frame::data(half)), Err(CutHere)];
            head.headers.remove(http::header::CONTENT_LENGTH);
            let body = StreamBody::new(futures::stream::iter(frames));
            Ok(Response::from_parts(head, BoxBody::new(body)))
        }
        Some(_) => Err(CutHere),
    }
}

fn full(bytes: Bytes) -> Body {
    BoxBody::new(Full::new(bytes).map_err(|never: Infallible| match never {}))
}

/// One request over a connection of its own; the whole reply.
async fn ask(gateway: &Path, request: Request<Full<Bytes>>) -> Result<Response<Bytes>, CutHere> {
    let gone = |error: &dyn std::fmt::Display| {
        tracing::warn!(%error, "the proxy of the check cannot reach the gateway");
        CutHere
    };
    let stream = UnixStream::connect(gateway).await.map_err(|e| gone(&e))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|e| gone(&e))?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(|e| gone(&e))?;
        let (mut head, body) = response.into_parts();
        let body = body.collect().await.map_err(|e| gone(&e))?.to_bytes();
        head.headers.remove(http::header::TRANSFER_ENCODING);
        Ok(Response::from_parts(head, body))
    };
    tokio::pin!(connection, exchange);
    let mut driving = true;
    loop {
        tokio::select! {
            answer = &mut exchange => return answer,
            ended = &mut connection, if driving => {
                driving = false;
                if let Err(error) = ended {
                    return Err(gone(&error));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_is_cut_in_half_or_behind_its_text() {
        let stream =
            b"data: {\"role\": 1}\n\ndata: {\"text\": \"Turn 7.\"}\n\ndata: {\"tool\": 2}\n\n";
        let end = Fault::CutBehindText.passes(stream);
        assert!(stream[..end].ends_with(b"Turn 7.\"}\n\n"));
        assert_eq!(Fault::Cut.passes(stream), stream.len() / 2);
        assert_eq!(Fault::CutBehindText.passes(b"{\"text\": \"Turn 7.\"}"), 9);
    }
}
