//! The page of a run for whoever scrapes it: `GET /metrics`, Prometheus text. Off unless the recipe
//! names an address (`rollout.metrics_listen`).
//!
//! Limits: [`CONNECTIONS_MAX`] connections at a time (more are closed), each within
//! [`CONNECTION_TIMEOUT`] and for one request.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode, body::Incoming, header, server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::timeout,
};

use crate::error::CliError;

/// Scrapers of one run: one, or a few.
const CONNECTIONS_MAX: usize = 8;
/// For a connection, request and reply included.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// After a connection that could not be taken (the process has no file left).
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Makes the page as things are now.
pub(crate) type Page = Arc<dyn Fn() -> String + Send + Sync>;

/// A page that is served until it is ended or dropped.
#[derive(Debug)]
pub(crate) struct Metrics {
    #[cfg(test)]
    address: SocketAddr,
    serving: JoinSet<()>,
}

impl Metrics {
    /// Serves the page at an address. Needs a Tokio runtime.
    ///
    /// # Errors
    /// When the address cannot be had.
    pub(crate) async fn start(listen: SocketAddr, page: Page) -> Result<Self, CliError> {
        let failed = |error: std::io::Error| {
            CliError::usage(
                format!(
                    "rollout.metrics_listen {listen}: expected an address that is free, found: {error}"
                ),
                "choose another port; port 0 takes any that is free",
            )
        };
        let listener = TcpListener::bind(listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        tracing::info!(%address, "metrics at http://{address}/metrics");
        let mut serving = JoinSet::new();
        serving.spawn(accept(listener, page));
        Ok(Self {
            #[cfg(test)]
            address,
            serving,
        })
    }

    /// Ends it, and waits until nobody is served any more.
    pub(crate) async fn end(mut self) {
        self.serving.shutdown().await;
    }
}

async fn accept(listener: TcpListener, page: Page) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                        continue;
                    };
                    let page = Arc::clone(&page);
                    connections.spawn(async move {
                        // A scraper that is slow or breaks off comes again by itself.
                        let _ = timeout(CONNECTION_TIMEOUT, serve(stream, page)).await;
                        drop(place);
                    });
                }
                Err(_) => tokio::time::sleep(AGAIN_AFTER).await,
            },
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
        }
    }
}

async fn serve(stream: TcpStream, page: Page) {
    let service = service_fn(move |request: Request<Incoming>| {
        let page = Arc::clone(&page);
        async move { Ok::<_, Infallible>(answer(&request, &page)) }
    });
    let served = http1::Builder::new()
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a connection for metrics broke");
    }
}

fn answer(request: &Request<Incoming>, page: &Page) -> Response<Full<Bytes>> {
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => (StatusCode::OK, page()),
        _ => (StatusCode::NOT_FOUND, "expected GET /metrics\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    let kind = header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn ask(address: SocketAddr, line: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("{line} HTTP/1.1\r\nHost: x\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).await.unwrap();
        reply
    }

    #[tokio::test]
    async fn the_page_is_served_as_it_is_now_and_nothing_else() {
        let any = "127.0.0.1:0".parse().unwrap();
        let page: Page = Arc::new(|| "espalier_rollout_sandboxes{kind=\"local\"} 3\n".to_owned());
        let metrics = Metrics::start(any, page).await.unwrap();
        let address = metrics.address;
        let reply = ask(address, "GET /metrics").await;
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
        assert!(reply.contains("text/plain; version=0.0.4"), "{reply}");
        assert!(reply.ends_with("{kind=\"local\"} 3\n"), "{reply}");
        for other in ["GET /", "POST /metrics"] {
            assert!(ask(address, other).await.starts_with("HTTP/1.1 404"));
        }
        // Taken: the error says what to do.
        let error = Metrics::start(address, Arc::new(String::new)).await;
        let error = error.unwrap_err().to_string();
        assert!(error.contains("rollout.metrics_listen"), "{error}");
        metrics.end().await;
        assert!(TcpStream::connect(address).await.is_err());
    }
}
