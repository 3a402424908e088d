//! JSON over HTTP or HTTPS to one server.

use std::sync::Arc;

use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode, Uri, body::Bytes, header};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use serde::Serialize;
use serde_json::Value;

use super::{BODY_BYTES_MAX, Endpoint};
use crate::EngineError;

/// What is shown of a server's error.
const ERROR_CHARS_MAX: usize = 300;

/// A client of one server. Connections are kept and shared.
#[derive(Debug, Clone)]
pub(crate) struct Http {
    pub(crate) endpoint: Endpoint,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// Of one reply.
    bytes_max: usize,
}

impl Http {
    pub(crate) fn new(endpoint: Endpoint) -> Result<Self, EngineError> {
        Self::limited(endpoint, BODY_BYTES_MAX)
    }

    /// A client that reads at most so many bytes of a reply.
    pub(crate) fn limited(endpoint: Endpoint, bytes_max: usize) -> Result<Self, EngineError> {
        let uri: Uri = endpoint
            .url
            .parse()
            .map_err(|error| EngineError::Invalid(format!("{}: {error}", endpoint.url)))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none() {
            return Err(EngineError::Invalid(format!(
                "engine address {}: expected http://HOST:PORT or https://HOST",
                endpoint.url
            )));
        }
        if uri
            .authority()
            .is_some_and(|authority| authority.as_str().contains('@'))
        {
            return Err(EngineError::Invalid(
                "engine address: a name and password stand in it, where logs would show them; give a key instead"
                    .into(),
            ));
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.enforce_http(false);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls(&endpoint)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        Ok(Self {
            endpoint,
            client: Client::builder(TokioExecutor::new()).build(connector),
            bytes_max,
        })
    }

    fn at(&self, path: &str) -> String {
        format!("{}{path}", self.endpoint.url.trim_end_matches('/'))
    }

    /// Asks, and gives back status and body of whatever comes.
    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<(StatusCode, Bytes), EngineError> {
        let gone = |what: String| EngineError::Gone(format!("{}: {what}", self.at(path)));
        let mut request = Request::builder()
            .method(method)
            .uri(self.at(path))
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(key) = &self.endpoint.api_key {
            let mut bearer = header::HeaderValue::try_from(format!("Bearer {}", key.expose()))
                .map_err(|_| {
                    EngineError::Invalid(
                        "the engine's key has characters that no header may".into(),
                    )
                })?;
            bearer.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, bearer);
        }
        let request = request
            .body(Full::new(Bytes::from(body.unwrap_or_default())))
            .map_err(|error| gone(error.to_string()))?;
        let exchange = async {
            let response = self
                .client
                .request(request)
                .await
                .map_err(|error| gone(format!("no reply ({})", causes(&error))))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), self.bytes_max)
                .collect()
                .await
                .map_err(|error| gone(format!("the reply broke off ({error})")))?
                .to_bytes();
            Ok::<_, EngineError>((status, body))
        };
        let limit = self.endpoint.timeout;
        tokio::time::timeout(limit, exchange)
            .await
            .map_err(|_| gone(format!("no reply within {} s", limit.as_secs())))?
    }

    /// The status of the reply to a request, whatever it is.
    pub(crate) async fn status_of(&self, path: &str, body: &Value) -> Result<u16, EngineError> {
        let body = Some(self.json(path, body)?);
        let (status, _) = self.exchange(Method::POST, path, body).await?;
        Ok(status.as_u16())
    }

    /// Status and text of the reply to a question, whatever they are.
    pub(crate) async fn text(&self, path: &str) -> Result<(u16, String), EngineError> {
        let (status, body) = self.exchange(Method::GET, path, None).await?;
        let text = String::from_utf8_lossy(&body).into_owned();
        Ok((status.as_u16(), text))
    }

    /// Asks, and gives back the JSON of a reply with status 200.
    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<Value, EngineError> {
        let gone = |what: String| EngineError::Gone(format!("{}: {what}", self.at(path)));
        let (status, body) = self.exchange(method, path, body).await?;
        if status.is_success() {
            if body.is_empty() {
                return Ok(Value::Null);
            }
            return serde_json::from_slice(&body)
                .map_err(|error| gone(format!("the reply is not JSON: {error}")));
        }
        let text: String = String::from_utf8_lossy(&body)
            .chars()
            .take(ERROR_CHARS_MAX)
            .collect();
        let said = format!("status {}: {text}", status.as_u16());
        match status.as_u16() {
            // Neither server says how many wait.
            429 | 503 | 529 => Err(EngineError::Busy { waiting: 0 }),
            // Nothing that a repetition would change: the request, its key, or the address.
            400..=407 | 413 | 422 => {
                Err(EngineError::Invalid(format!("{}: {said}", self.at(path))))
            }
            _ => Err(gone(said)),
        }
    }

    pub(crate) async fn post(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<Value, EngineError> {
        let body = Some(self.json(path, body)?);
        self.ask(Method::POST, path, body).await
    }

    fn json(&self, path: &str, body: &impl Serialize) -> Result<Vec<u8>, EngineError> {
        serde_json::to_vec(body).map_err(|error| {
            EngineError::Invalid(format!(
                "{}: the request is no JSON: {error}",
                self.at(path)
            ))
        })
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Value, EngineError> {
        self.ask(Method::GET, path, None).await
    }

    /// Whether a path answers at all. Health pages have no JSON.
    pub(crate) async fn healthy(&self, path: &str) -> Result<(), EngineError> {
        match self.get(path).await {
            Err(EngineError::Gone(what)) if !what.contains("not JSON") => {
                Err(EngineError::Gone(what))
            }
            Err(EngineError::Busy { .. }) => Err(EngineError::Gone(format!(
                "{}: the server says that it is not healthy",
                self.at(path)
            ))),
            _ => Ok(()),
        }
    }

    /// The error for a reply that is not what the server documents.
    pub(crate) fn broken(&self, path: &str, expected: &str, found: &Value) -> EngineError {
        let found: String = found.to_string().chars().take(ERROR_CHARS_MAX).collect();
        EngineError::Gone(format!(
            "{}: expected {expected}, found {found}; is the server's version supported?",
            self.at(path)
        ))
    }
}

/// An error with what lies behind it: a TLS failure says nothing by itself.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

fn tls(endpoint: &Endpoint) -> Result<ClientConfig, EngineError> {
    let mut roots = RootCertStore::empty();
    match &endpoint.authorities {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(file) => {
            let wrong = |what: String| {
                EngineError::Invalid(format!(
                    "certificates of {}: {what}; expected a PEM file",
                    file.display()
                ))
            };
            let certificates =
                CertificateDer::pem_file_iter(file).map_err(|error| wrong(error.to_string()))?;
            for certificate in certificates {
                let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
                roots
                    .add(certificate)
                    .map_err(|error| wrong(error.to_string()))?;
            }
            if roots.is_empty() {
                return Err(wrong("there are none".into()));
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| EngineError::Invalid(format!("TLS: {error}")))?
        .with_root_certificates(roots)
        .with_no_client_auth())
}
