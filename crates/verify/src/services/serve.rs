//! HTTP in front of the state.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::{Map, Value, json};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{BODY_BYTES_MAX, CONNECTION_TIMEOUT, CONNECTIONS_MAX, lock, state::State};

/// The name that the tool server gives itself.
const NAME: &str = "espalier-services";

/// What is behind a socket.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    /// The service with this port.
    Service(u16),
    /// The tools over all services.
    Tools,
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Server {
    state: Arc<Mutex<State>>,
    places: Arc<Semaphore>,
    tracker: TaskTracker,
    stop: CancellationToken,
}

fn json_response(status: u16, value: &Value) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(value.to_string())));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::OK);
    let kind = header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

fn told(status: u16, text: &str) -> Response<Full<Bytes>> {
    json_response(status, &json!({"error": text}))
}

impl Server {
    pub(super) fn new(
        state: Arc<Mutex<State>>,
        tracker: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        Self {
            state,
            places: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            tracker,
            stop,
        }
    }

    /// Takes connections until the services end.
    pub(super) async fn accept(self, listener: UnixListener, kind: Kind) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.stop.cancelled() => return,
            };
            let Ok((stream, _)) = accepted else { continue };
            let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
                tracing::warn!("a connection to a service beyond {CONNECTIONS_MAX} was closed");
                continue;
            };
            let server = self.clone();
            self.tracker.spawn(async move {
                let stop = server.stop.clone();
                tokio::select! {
                    _ = timeout(CONNECTION_TIMEOUT, server.serve(stream, kind)) => {}
                    () = stop.cancelled() => {}
                }
                drop(place);
            });
        }
    }

    async fn serve(self, stream: UnixStream, kind: Kind) {
        let service = service_fn(move |request| {
            let server = self.clone();
            async move { Ok::<_, Infallible>(server.answer(request, kind).await) }
        });
        // A client may say that it has nothing more to send and still wait for its answer.
        let connection = http1::Builder::new()
            .half_close(true)
            .serve_connection(TokioIo::new(stream), service);
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to a service broke");
        }
    }

    async fn answer(&self, request: Request<Incoming>, kind: Kind) -> Response<Full<Bytes>> {
        let (head, body) = request.into_parts();
        let body = match Limited::new(body, BODY_BYTES_MAX).collect().await {
            Ok(body) => body.to_bytes(),
            Err(_) => return told(413, "the body is too large, or broke off"),
        };
        let path = head.uri.path();
        match kind {
            Kind::Service(port) => {
                let asked = if body.is_empty() {
                    query(head.uri.query().unwrap_or_default())
                } else {
                    match serde_json::from_slice(&body) {
                        Ok(asked) => asked,
                        Err(error) => return told(422, &format!("the body is not JSON: {error}")),
                    }
                };
                let (status, value) =
                    lock(&self.state).ask(port, head.method.as_str(), path, &asked);
                json_response(status, &value)
            }
            Kind::Tools if path != "/mcp" => told(404, "the tools are at /mcp"),
            Kind::Tools if head.method != Method::POST => told(405, "POST is expected"),
            Kind::Tools => {
                let answer = sandbox::mcp::answer(NAME, &mut *lock(&self.state), &body);
                match answer {
                    Some(answer) => json_response(200, &answer),
                    None => {
                        let mut response = Response::new(Full::default());
                        *response.status_mut() = StatusCode::ACCEPTED;
                        response
                    }
                }
            }
        }
    }
}

/// The pairs of a query as an object of texts.
fn query(text: &str) -> Value {
    let pairs = text.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(key), Value::String(decoded(value)))
    });
    Value::Object(pairs.collect::<Map<_, _>>())
}

/// `%20` and `+` as what they stand for; what is no code stays as it is.
fn decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut found = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let code = (*byte == b'%')
            .then(|| text.get(at + 1..at + 3))
            .flatten()
            .and_then(|code| u8::from_str_radix(code, 16).ok());
        match (code, byte) {
            (Some(code), _) => {
                found.push(code);
                at += 2;
            }
            (None, b'+') => found.push(b' '),
            (None, byte) => found.push(*byte),
        }
        at += 1;
    }
    String::from_utf8_lossy(&found).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded() {
        assert_eq!(
            query("q=a%20b+c&x=%e2%82%ac&y&z=50%"),
            json!({"q": "a b c", "x": "€", "y": "", "z": "50%"})
        );
        assert_eq!(query(""), json!({}));
    }
}
