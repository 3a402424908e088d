//! The few calls of the Docker Engine API that sandboxes need, the same on dockerd and podman.
//! One connection per call: they are rare, and nothing is shared that could break.

use std::{path::PathBuf, time::Duration};

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::{body::Incoming, client::conn::http1, upgrade::Upgraded};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    time::timeout,
};
use tokio_util::task::TaskTracker;

use super::{DockerConfig, tls::Tls};

/// Version of the API that is spoken: dockerd since 20.10, podman since 4.
const VERSION: &str = "v1.41";
/// For a call that does no work of its own.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a line of progress.
const LINE_BYTES_MAX: usize = 1 << 20;
/// Bytes of an answer, archives included.
const ANSWER_BYTES_MAX: usize = 512 << 20;

/// Where an engine listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Address {
    Unix(PathBuf),
    Tcp(String),
}

impl Address {
    /// Reads what `DOCKER_HOST` holds: `unix:///path` or `tcp://host:port`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix://") {
            return Ok(Self::Unix(path.into()));
        }
        if let Some(host) = text.strip_prefix("tcp://") {
            return Ok(Self::Tcp(host.trim_end_matches('/').to_owned()));
        }
        Err(format!(
            "engine address {text:?}: expected unix:///PATH or tcp://HOST:PORT"
        ))
    }
}

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum CallError {
    /// No answer: nobody listens, the connection broke, or it took too long.
    Transport(String),
    /// The engine said no.
    Status(StatusCode, String),
}

impl CallError {
    pub(crate) fn is(&self, wanted: StatusCode) -> bool {
        matches!(self, Self::Status(status, _) if *status == wanted)
    }
}

impl std::fmt::Display for CallError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Transport(reason) => write!(f, "the engine cannot be reached: {reason}"),
            Self::Status(status, message) => write!(f, "{message} ({status})"),
        }
    }
}

trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// An engine.
#[derive(Debug, Clone)]
pub(crate) struct Engine {
    address: Address,
    /// Over TCP; without it whoever can reach the engine may command it.
    tls: Option<Tls>,
    tasks: TaskTracker,
}

fn broken(error: impl std::fmt::Display) -> CallError {
    CallError::Transport(error.to_string())
}

/// A value in a query.
pub(crate) fn quote(text: &str) -> String {
    let mut quoted = String::new();
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                quoted.push(char::from(byte));
            }
            _ => quoted.push_str(&format!("%{byte:02X}")),
        }
    }
    quoted
}

impl Engine {
    /// The engine that the settings mean, at `host`. Nobody is asked anything.
    pub(super) fn of(
        config: &DockerConfig,
        host: &str,
        tasks: TaskTracker,
    ) -> Result<Self, String> {
        let address = Address::parse(host)?;
        let tls = match &address {
            Address::Tcp(host) => Tls::of(config, host)?,
            Address::Unix(_) => None,
        };
        Ok(Self {
            address,
            tls,
            tasks,
        })
    }

    /// Whether it sees the files that we see.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.address, Address::Unix(_))
    }

    async fn connect(&self) -> Result<http1::SendRequest<Full<Bytes>>, CallError> {
        let stream: Box<dyn Connection> = match &self.address {
            Address::Unix(path) => Box::new(
                UnixStream::connect(path)
                    .await
                    .map_err(|e| broken(format!("{}: {e}", path.display())))?,
            ),
            Address::Tcp(host) => {
                let connecting = timeout(CALL_TIMEOUT, TcpStream::connect(host)).await;
                let stream = connecting
                    .map_err(|_| broken(format!("{host}: not reached within {CALL_TIMEOUT:?}")))?
                    .map_err(|e| broken(format!("{host}: {e}")))?;
                match &self.tls {
                    None => Box::new(stream),
                    Some(tls) => Box::new(tls.connect(stream).await.map_err(broken)?),
                }
            }
        };
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        // Ends with the last of the sender, the answer's body and the upgraded stream.
        self.tasks.spawn(async move {
            let _ = connection.with_upgrades().await;
        });
        Ok(sender)
    }

    async fn send(
        &self,
        request: http::request::Builder,
        body: Bytes,
    ) -> Result<http::Response<Incoming>, CallError> {
        let request = request
            .header(header::HOST, "engine")
            .body(Full::new(body))
            .map_err(broken)?;
        let mut sender = self.connect().await?;
        let response = sender.send_request(request).await.map_err(broken)?;
        let status = response.status();
        if status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(response);
        }
        let body = collect(response.into_body()).await?;
        let message = serde_json::from_slice::<Value>(&body)
            .ok()
            .and_then(|v| Some(v.get("message")?.as_str()?.to_owned()))
            .unwrap_or_else(|| String::from_utf8_lossy(&body).trim().to_owned());
        Err(CallError::Status(status, message))
    }

    /// A call without its own time limit.
    pub(crate) async fn call_slowly(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: Bytes,
    ) -> Result<Bytes, CallError> {
        let request = Request::builder()
            .method(method)
            .uri(format!("/{VERSION}{path}"))
            .header(header::CONTENT_TYPE, content_type);
        collect(self.send(request, body).await?.into_body()).await
    }

    /// A call; the answer's bytes.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: Bytes,
    ) -> Result<Bytes, CallError> {
        timeout(
            CALL_TIMEOUT,
            self.call_slowly(method, path, content_type, body),
        )
        .await
        .unwrap_or_else(|_| {
            Err(CallError::Transport(format!(
                "no answer to {path} within {CALL_TIMEOUT:?}"
            )))
        })
    }

    /// A call whose answer comes in lines of JSON, each handed out as it comes. Without its own
    /// time limit.
    pub(super) async fn lines(
        &self,
        method: Method,
        path: &str,
        mut each: impl FnMut(Value) + Send,
    ) -> Result<(), CallError> {
        let request = Request::builder()
            .method(method)
            .uri(format!("/{VERSION}{path}"))
            .header(header::CONTENT_TYPE, "application/json");
        let mut body = self.send(request, Bytes::new()).await?.into_body();
        let mut rest = Vec::new();
        while let Some(frame) = body.frame().await {
            if let Ok(data) = frame.map_err(broken)?.into_data() {
                rest.extend_from_slice(&data);
            }
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                if let Ok(value) = serde_json::from_slice(&line) {
                    each(value);
                }
            }
            if rest.len() > LINE_BYTES_MAX {
                return Err(broken(format!("a line of its answer to {path} has no end")));
            }
        }
        if let Ok(value) = serde_json::from_slice(&rest) {
            each(value);
        }
        Ok(())
    }

    /// A call with JSON both ways.
    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<T, CallError> {
        let body = body.map(Value::to_string).unwrap_or_default();
        let answer = self
            .call(method, path, "application/json", Bytes::from(body))
            .await?;
        // Calls that answer nothing are read as null.
        let text: &[u8] = if answer.is_empty() { b"null" } else { &answer };
        serde_json::from_slice(text).map_err(|e| broken(format!("its answer to {path}: {e}")))
    }

    /// A call that turns the connection into a stream of bytes.
    pub(crate) async fn hijack(&self, path: &str) -> Result<TokioIo<Upgraded>, CallError> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("/{VERSION}{path}"))
            .header(header::CONNECTION, "Upgrade")
            .header(header::UPGRADE, "tcp");
        let response = timeout(CALL_TIMEOUT, self.send(request, Bytes::new()))
            .await
            .map_err(|_| broken(format!("no answer to {path} within {CALL_TIMEOUT:?}")))??;
        let status = response.status();
        if status != StatusCode::SWITCHING_PROTOCOLS {
            return Err(broken(format!("{path}: expected an upgrade, got {status}")));
        }
        let upgraded = hyper::upgrade::on(response).await.map_err(broken)?;
        Ok(TokioIo::new(upgraded))
    }
}

async fn collect(body: Incoming) -> Result<Bytes, CallError> {
    Limited::new(body, ANSWER_BYTES_MAX)
        .collect()
        .await
        .map(http_body_util::Collected::to_bytes)
        .map_err(broken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_the_field_writes_them() {
        assert_eq!(
            Address::parse("unix:///var/run/docker.sock"),
            Ok(Address::Unix("/var/run/docker.sock".into()))
        );
        assert_eq!(
            Address::parse("tcp://127.0.0.1:2375/"),
            Ok(Address::Tcp("127.0.0.1:2375".into()))
        );
        assert!(Address::parse("ssh://host").is_err_and(|e| e.contains("expected unix://")));
        assert_eq!(quote("a/b:c d{\"}"), "a%2Fb%3Ac%20d%7B%22%7D");
    }
}
