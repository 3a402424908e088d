//! TLS, HTTP, and which request goes where.

use std::{
    collections::VecDeque,
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures::StreamExt;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::{Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use tokio::{net::TcpListener, time::timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    api::{
        watch::{self, Watch},
        write::{DeleteOptions, WriteOptions, deleted_status},
    },
    auth::{self, User},
    core::Shared,
    error::ApiError,
    faults::ApiFault,
    kubelet::Kubelet,
    request::{Query, Target, split},
    resources::{self, Resource},
    store::Key,
    streams,
    table::Form,
};

pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

/// As the real server.
const BODY_BYTES_MAX: usize = 3 << 20;
/// For the body of a request to arrive, and for a TLS handshake.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(30);
/// Requests that are remembered.
const RECORDS_MAX: usize = 10_000;

/// A request that was answered (or dropped by a fault).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// As in [`crate::Rule`]; the method where no rule applies.
    pub verb: String,
    /// Path and query.
    pub path: String,
    /// Who; empty when unknown.
    pub user: String,
    /// HTTP status; 0: the connection was broken.
    pub code: u16,
}

#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) core: Shared,
    pub(crate) kubelet: Option<Arc<Kubelet>>,
    pub(crate) tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
    /// Ends all connections that are open; replaced by a fresh one after.
    pub(crate) connections: Mutex<CancellationToken>,
    pub(crate) records: Mutex<VecDeque<Record>>,
}

/// The connection is to be broken.
#[derive(Debug, thiserror::Error)]
#[error("an injected fault broke the connection")]
struct Broken;

fn json_response(code: StatusCode, value: &Value) -> Response<Body> {
    let mut body = value.to_string();
    body.push('\n');
    let mut response = Response::new(full(body));
    *response.status_mut() = code;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

fn full(text: impl Into<Bytes>) -> Body {
    Full::new(text.into())
        .map_err(|never: Infallible| match never {})
        .boxed_unsync()
}

fn text_response(code: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(full(text));
    *response.status_mut() = code;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

pub(crate) fn error_response(error: &ApiError) -> Response<Body> {
    let mut response = if error.reason.is_empty() {
        text_response(error.code, error.message.clone())
    } else {
        json_response(error.code, &error.status())
    };
    if let Some(seconds) = error.retry_after_s {
        let seconds = HeaderValue::from(seconds);
        response.headers_mut().insert(header::RETRY_AFTER, seconds);
    }
    response
}

/// A body that is sent as it comes.
pub(crate) fn streamed(
    kind: &'static str,
    chunks: tokio::sync::mpsc::Receiver<Result<Bytes, io::Error>>,
) -> Response<Body> {
    let stream = futures::stream::unfold(chunks, |mut chunks| async {
        let chunk = chunks.recv().await?;
        Some((chunk, chunks))
    });
    let body = StreamBody::new(stream.map(|chunk| chunk.map(Frame::data)));
    let mut response = Response::new(BodyExt::boxed_unsync(body));
    let kind = HeaderValue::from_static(kind);
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

impl Server {
    /// Accepts until it is stopped.
    pub(crate) async fn serve(self: Arc<Self>, listener: TcpListener, tls: TlsAcceptor) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.stop.cancelled() => return,
            };
            match accepted {
                Ok((stream, _)) => {
                    let (server, tls) = (Arc::clone(&self), tls.clone());
                    self.tasks
                        .spawn(async move { server.connection(stream, tls).await });
                }
                Err(error) => {
                    tracing::warn!(%error, "kubefake could not accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    async fn connection(self: Arc<Self>, stream: tokio::net::TcpStream, tls: TlsAcceptor) {
        let end = self
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let _ = stream.set_nodelay(true);
        let Ok(Ok(stream)) = timeout(RECEIVE_TIMEOUT, tls.accept(stream)).await else {
            return;
        };
        let server = Arc::clone(&self);
        let service = service_fn(move |request| {
            let server = Arc::clone(&server);
            async move { server.answer(request).await }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        tokio::select! {
            _ = connection => {}
            () = end.cancelled() => {}
            () = self.stop.cancelled() => {}
        }
    }

    fn record(&self, verb: &str, path: &str, user: &str, code: u16) {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        if records.len() == RECORDS_MAX {
            records.pop_front();
        }
        records.push_back(Record {
            verb: verb.to_owned(),
            path: path.to_owned(),
            user: user.to_owned(),
            code,
        });
    }

    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Result<Response<Body>, Broken> {
        let path = request.uri().path().to_owned();
        let whole = request
            .uri()
            .path_and_query()
            .map_or_else(|| path.clone(), ToString::to_string);
        let method = request.method().clone();
        let target = Target::parse(&self.core, &path);
        let query = Query::parse(request.uri().query().unwrap_or_default());
        let verb = target.as_ref().map_or_else(
            || method.as_str().to_lowercase(),
            |target| target.verb(&method, &query).to_owned(),
        );
        let user = auth::authenticate(&self.core.settings, request.headers()).cloned();
        let name = user
            .as_ref()
            .map_or("", |user| user.name.as_str())
            .to_owned();
        let result = self
            .answer_inner(request, user, target, &query, &verb)
            .await;
        let code = match &result {
            Ok(response) => response.status().as_u16(),
            Err(Broken) => 0,
        };
        self.record(&verb, &whole, &name, code);
        result
    }

    async fn answer_inner(
        self: &Arc<Self>,
        request: Request<Incoming>,
        user: Result<User, ApiError>,
        target: Option<Target>,
        query: &Query,
        verb: &str,
    ) -> Result<Response<Body>, Broken> {
        let user = match user {
            Ok(user) => user,
            Err(error) => return Ok(error_response(&error)),
        };
        let Some(target) = target else {
            return Ok(self
                .documents(request, &user)
                .await
                .unwrap_or_else(|error| error_response(&error)));
        };
        if let Err(error) = auth::authorize(&user, &target, verb) {
            return Ok(error_response(&error));
        }
        let name = target.name.clone().unwrap_or_default();
        let fault = self.core.faults.due(verb, &target.rule_name(), &name);
        let mut lost = false;
        match &fault {
            Some(ApiFault::Slow(time)) => tokio::time::sleep(*time).await,
            Some(ApiFault::LostAnswer) => lost = true,
            Some(ApiFault::Refused) => return Err(Broken),
            Some(other) => {
                if let Some(error) = other.error(&target) {
                    return Ok(error_response(&error));
                }
            }
            None => {}
        }
        let result = self.objects(request, target, query, verb).await;
        if lost {
            return Err(Broken);
        }
        Ok(result.unwrap_or_else(|error| error_response(&error)))
    }

    /// Everything that is not an object.
    async fn documents(
        &self,
        request: Request<Incoming>,
        user: &User,
    ) -> Result<Response<Body>, ApiError> {
        let custom = &self.core.settings.custom;
        let path = request.uri().path().trim_end_matches('/').to_owned();
        let ok = |value: Value| Ok(json_response(StatusCode::OK, &value));
        if request.method() == Method::POST {
            if let Some((group, "v1", rest)) = split(&path)
                && let [plural] = rest.as_slice()
                && let Some(kind) = auth::review_kind(group, plural)
            {
                let body = body_json(request, &kind).await?;
                let review = auth::review(plural, user, body);
                return Ok(json_response(StatusCode::CREATED, &review));
            }
            return Err(ApiError::unknown_resource());
        }
        match path.as_str() {
            "/healthz" | "/livez" | "/readyz" => {
                return Ok(text_response(StatusCode::OK, "ok"));
            }
            "/version" => return ok(resources::version()),
            "/api" => return ok(resources::core_versions()),
            "/apis" => return ok(resources::groups(custom)),
            "/openapi/v3" => return ok(resources::openapi_index(custom)),
            _ => {}
        }
        if let Some((group, version, rest)) = path.strip_prefix("/openapi/v3").and_then(split)
            && rest.is_empty()
            && let Some(document) = resources::openapi(group, version, custom)
        {
            return ok(document);
        }
        if let Some((group, version, rest)) = split(&path)
            && rest.is_empty()
            && let Some(list) = resources::resource_list(group, version, custom)
        {
            return ok(list);
        }
        match split(&path) {
            Some((_, _, rest)) if !rest.is_empty() => Err(ApiError::unknown_resource()),
            _ => Ok(text_response(StatusCode::NOT_FOUND, "404 page not found\n")),
        }
    }

    async fn objects(
        self: &Arc<Self>,
        request: Request<Incoming>,
        target: Target,
        query: &Query,
        verb: &str,
    ) -> Result<Response<Body>, ApiError> {
        let resource = target.resource.clone();
        let accept = request
            .headers()
            .get(header::ACCEPT)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default();
        let form = Form::of(accept);
        let name = target.name.clone().unwrap_or_default();
        let key = Key::new(resource.qualified(), target.namespace.clone(), name);
        let subresource = target.subresource.as_deref();
        match (subresource, &self.kubelet) {
            (Some("exec" | "attach" | "log"), None) => {
                self.core.get(&target, &key)?;
                return Err(ApiError::not_faked(
                    "processes of pods: it was started without a node",
                ));
            }
            (Some("log"), Some(kubelet)) => {
                if request.method() != Method::GET {
                    return Err(ApiError::method_not_allowed());
                }
                let pod = self.core.get(&target, &key)?;
                return crate::logs::answer(kubelet, &pod, query, &self.tasks).await;
            }
            (Some("exec" | "attach"), Some(kubelet)) => {
                let pod = self.core.get(&target, &key)?;
                let attach = subresource == Some("attach");
                let accepted = streams::Accepted::check(kubelet, &pod, query, attach).await?;
                let server = Arc::clone(self);
                return streams::upgrade(request, accepted, &server);
            }
            (Some("eviction"), _) => {
                let options = options_of_body(request, &resource, query).await?;
                let (_, _) = self.core.delete(&resource, &key, &options)?;
                let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {},
                    "status": "Success"});
                return Ok(json_response(StatusCode::CREATED, &status));
            }
            _ => {}
        }
        let whole = target.name.is_none();
        let options = write_options(query)?;
        match verb {
            "watch" => {
                let watch = Watch::parse(&target, query, form)?;
                let (sender, chunks) = watch::channel();
                let (core, stop) = (Arc::clone(&self.core), self.stop.clone());
                // From here on: a fault that comes before the task runs is not missed.
                let faults = core.faults.watches();
                self.tasks.spawn(watch.serve(core, sender, faults, stop));
                Ok(streamed("application/json", chunks))
            }
            "get" => {
                let object = self.core.get(&target, &key)?;
                Ok(json_response(StatusCode::OK, &form.object(&object)))
            }
            "list" => {
                let list = self.core.list(&target, query)?;
                Ok(json_response(StatusCode::OK, &form.list(list)))
            }
            "create" if whole => {
                let body = body_json(request, &resource).await?;
                if resource.namespaced && target.namespace.is_empty() {
                    return Err(ApiError::method_not_allowed());
                }
                let written = self
                    .core
                    .create(&resource, &target.namespace, body, &options)?;
                Ok(written_response(&written, form))
            }
            "update" if !whole => {
                let body = body_json(request, &resource).await?;
                let written = self
                    .core
                    .update(&resource, &key, subresource, body, &options)?;
                Ok(written_response(&written, form))
            }
            "patch" if !whole => {
                let kind = content_type(&request);
                if kind.starts_with("application/apply-patch") {
                    return Err(ApiError::not_faked("server-side apply"));
                }
                let body = read(request).await?;
                let change = parse_body(&body)?;
                let written =
                    self.core
                        .patch(&resource, &key, subresource, &kind, &change, &options)?;
                Ok(written_response(&written, form))
            }
            "delete" if subresource.is_none() => {
                let options = options_of_body(request, &resource, query).await?;
                let (object, gone) = self.core.delete(&resource, &key, &options)?;
                // Some kinds are returned, of the others only that they are gone is said.
                let shown = !gone
                    || ["pods", "serviceaccounts", "resourcequotas"]
                        .contains(&resource.plural.as_ref());
                let answer = if shown {
                    form.object(&object)
                } else {
                    deleted_status(&resource, &object)
                };
                Ok(json_response(StatusCode::OK, &answer))
            }
            "deletecollection" => {
                let options = options_of_body(request, &resource, query).await?;
                let mut deleted = Vec::new();
                for key in self.core.chosen(&target, query)? {
                    // One that went meanwhile is as good.
                    if let Ok((object, _)) = self.core.delete(&resource, &key, &options) {
                        deleted.push((*object).clone());
                    }
                }
                let list = json!({
                    "kind": format!("{}List", resource.kind),
                    "apiVersion": resource.api_version(),
                    "metadata": {"resourceVersion": self.core.store().revision().to_string()},
                    "items": deleted,
                });
                Ok(json_response(StatusCode::OK, &list))
            }
            _ => Err(ApiError::method_not_allowed()),
        }
    }
}

fn written_response(written: &crate::api::write::Written, form: Form) -> Response<Body> {
    let code = if written.created {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    let mut response = json_response(code, &form.object(&written.object));
    for warning in &written.warnings {
        let quoted = warning.replace('"', "\\\"");
        if let Ok(value) = HeaderValue::from_str(&format!("299 - \"{quoted}\"")) {
            response.headers_mut().append(header::WARNING, value);
        }
    }
    response
}

fn write_options(query: &Query) -> Result<WriteOptions, ApiError> {
    Ok(WriteOptions {
        dry_run: dry_run(query.get("dryRun"))?,
        field_validation: query.get("fieldValidation").unwrap_or("Warn").to_owned(),
    })
}

fn dry_run(word: Option<&str>) -> Result<bool, ApiError> {
    match word {
        None => Ok(false),
        Some("All") => Ok(true),
        Some(other) => Err(ApiError::bad_request(format!(
            "dryRun: Unsupported value: \"{other}\": supported values: \"All\""
        ))),
    }
}

fn content_type(request: &Request<Incoming>) -> String {
    let value = request.headers().get(header::CONTENT_TYPE);
    let value = value.and_then(|v| v.to_str().ok()).unwrap_or_default();
    let plain = value.split(';').next().unwrap_or_default().trim();
    plain.to_owned()
}

async fn read(request: Request<Incoming>) -> Result<Bytes, ApiError> {
    let body = Limited::new(request.into_body(), BODY_BYTES_MAX);
    let slow = || ApiError::bad_request("the body did not arrive in time");
    let collected = timeout(RECEIVE_TIMEOUT, body.collect())
        .await
        .map_err(|_| slow())?;
    collected
        .map(http_body_util::Collected::to_bytes)
        .map_err(|_| {
            ApiError::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "RequestEntityTooLarge",
                format!("Request entity too large: limit is {BODY_BYTES_MAX}"),
            )
        })
}

fn parse_body(body: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(body)
        .map_err(|error| ApiError::bad_request(format!("the request body is not JSON: {error}")))
}

async fn body_json(request: Request<Incoming>, resource: &Resource) -> Result<Value, ApiError> {
    let kind = content_type(&request);
    if !["application/json", ""].contains(&kind.as_str()) {
        return Err(ApiError::unsupported_media(&kind, &["application/json"]));
    }
    let body = read(request).await?;
    let mut value = parse_body(&body)?;
    if value["kind"].is_null() && value.is_object() {
        value["kind"] = json!(resource.kind);
        value["apiVersion"] = json!(resource.api_version());
    }
    Ok(value)
}

/// `DeleteOptions` of body and query; the query wins where both speak, as they should not.
async fn options_of_body(
    request: Request<Incoming>,
    resource: &Resource,
    query: &Query,
) -> Result<DeleteOptions, ApiError> {
    let body = read(request).await?;
    let mut body = if body.is_empty() {
        json!({})
    } else {
        parse_body(&body)?
    };
    if body["kind"] == "Eviction" {
        body = body["deleteOptions"].take();
    }
    let kind = body["kind"].as_str().unwrap_or("DeleteOptions");
    if kind != "DeleteOptions" {
        return Err(ApiError::bad_request(format!(
            "expected DeleteOptions for {}, found {kind}",
            resource.plural
        )));
    }
    let word = |key: &str| body["preconditions"][key].as_str().map(str::to_owned);
    let orphan = body["orphanDependents"] == true || query.flag("orphanDependents");
    let policy = query
        .get("propagationPolicy")
        .or_else(|| body["propagationPolicy"].as_str())
        .or(orphan.then_some("Orphan"));
    let grace = query
        .get("gracePeriodSeconds")
        .and_then(|text| text.parse().ok())
        .or_else(|| body["gracePeriodSeconds"].as_i64());
    Ok(DeleteOptions {
        grace_s: grace,
        uid: word("uid"),
        revision: word("resourceVersion"),
        propagation: policy.map(str::to_owned),
        dry_run: dry_run(query.get("dryRun").or_else(|| body["dryRun"][0].as_str()))?,
    })
}

/// Binds the address that a restarted server had before, too.
pub(crate) async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}
