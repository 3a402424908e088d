//! Spans to an OpenTelemetry collector. Off unless an address is given.

use std::time::Duration;

use async_trait::async_trait;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::{Resource, trace::SdkTracerProvider};

use crate::error::CliError;

/// For one batch of spans; then it is dropped, and the next one is tried.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// The exporter's client, which is the one that judges use too. Batches are sent from a thread of
/// the exporter, so blocking here blocks nobody.
#[derive(Debug)]
struct Blocking(ureq::Agent);

#[async_trait]
impl HttpClient for Blocking {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let response = self.0.run(request.map(|bytes| bytes.to_vec()))?;
        let (head, mut body) = response.into_parts();
        let bytes = body.read_to_vec()?;
        Ok(Response::from_parts(head, Bytes::from(bytes)))
    }
}

/// Exports until it is ended.
#[derive(Debug)]
pub(crate) struct Telemetry(Option<SdkTracerProvider>);

impl Telemetry {
    /// Exports spans to `url`, an OTLP/HTTP collector (the path `/v1/traces` is added).
    ///
    /// # Errors
    /// When the address cannot be used. Whether somebody listens there shows later, in the log.
    pub(crate) fn start(url: Option<&str>) -> Result<Self, CliError> {
        let Some(url) = url else {
            return Ok(Self(None));
        };
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(EXPORT_TIMEOUT))
            .http_status_as_error(false)
            .build()
            .new_agent();
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Blocking(agent))
            .with_endpoint(format!("{}/v1/traces", url.trim_end_matches('/')))
            .with_timeout(EXPORT_TIMEOUT)
            .build()
            .map_err(|error| CliError::failed(format!("--otlp {url}"), error))?;
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(Resource::builder().with_service_name("espalier").build())
            .build();
        opentelemetry::global::set_tracer_provider(provider.clone());
        Ok(Self(Some(provider)))
    }

    /// Whether spans are wanted.
    pub(crate) fn on(&self) -> bool {
        self.0.is_some()
    }

    /// Sends what is left.
    pub(crate) fn end(self) {
        if let Some(provider) = self.0
            && let Err(error) = provider.shutdown()
        {
            tracing::warn!(%error, "the last spans did not reach the collector");
        }
    }
}
