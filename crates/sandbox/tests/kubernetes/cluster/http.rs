//! The API over HTTP.

use std::{collections::VecDeque, convert::Infallible, sync::{Arc, atomic::Ordering}};

use bytes::Bytes;
use futures::stream;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::{Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::{Cluster, exec, key, store::selects};

pub(super) type Body = UnsyncBoxBody<Bytes, Infallible>;

/// The query of a request, decoded.
#[derive(Debug, Clone, Default)]
pub(super) struct Query(Vec<(String, String)>);

fn decode(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'+' => bytes.push(b' '),
            b'%' => {
                let hex: Vec<u8> = rest.by_ref().take(2).collect();
                let text = std::str::from_utf8(&hex).unwrap_or("00");
                bytes.push(u8::from_str_radix(text, 16).unwrap_or(0));
            }
            byte => bytes.push(byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Query {
    fn parse(text: &str) -> Self {
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        Self(
            pairs
                .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
                .map(|(key, value)| (decode(key), decode(value)))
                .collect(),
        )
    }

    pub(super) fn all(&self, name: &str) -> Vec<String> {
        self.0.iter().filter(|(key, _)| key == name).map(|(_, value)| value.clone()).collect()
    }

    pub(super) fn get(&self, name: &str) -> Option<String> {
        self.all(name).into_iter().next()
    }

    pub(super) fn is(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| value == "true" || value == "1")
    }
}

pub(super) fn json_answer(status: StatusCode, value: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(value.to_string()));
    let response = Response::builder().status(status).header("content-type", "application/json");
    response.body(body.boxed_unsync()).unwrap()
}

pub(super) fn failure(status: StatusCode, reason: &str, message: &str) -> Response<Body> {
    json_answer(status, &status_object(status.as_u16(), reason, message))
}

pub(super) fn status_object(code: u16, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "reason": reason, "message": message, "code": code,
    })
}

pub(super) async fn serve(cluster: Arc<Cluster>, stream: TlsStream<TcpStream>) {
    let stop = cluster.stop.clone();
    let service = service_fn(move |request| {
        let cluster = Arc::clone(&cluster);
        async move { Ok::<_, Infallible>(answer(cluster, request).await) }
    });
    let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        _ = connection.with_upgrades() => {}
        () = stop.cancelled() => {}
    }
}

async fn answer(cluster: Arc<Cluster>, mut request: Request<Incoming>) -> Response<Body> {
    let token = format!("Bearer {}", cluster.token);
    let authorised = request.headers().get("authorization").is_some_and(|v| v.as_bytes() == token.as_bytes());
    if !authorised {
        return failure(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized");
    }
    let query = Query::parse(request.uri().query().unwrap_or_default());
    let path = request.uri().path().trim_matches('/').to_owned();
    let parts: Vec<&str> = path.split('/').collect();
    let method = request.method().clone();
    let subresource = parts.get(6).copied().unwrap_or_default().to_owned();
    if subresource == "exec" {
        return exec::answer(cluster, request, parts[3], parts[5], query).await;
    }
    let body = match request.body_mut().collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => return failure(StatusCode::BAD_REQUEST, "BadRequest", &error.to_string()),
    };
    let changing = method != Method::GET;
    if changing && take_one(&cluster.faults.errors) {
        return failure(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", "injected");
    }
    match parts.as_slice() {
        ["version"] => json_answer(StatusCode::OK, &json!({
            "major": "1", "minor": "32", "gitVersion": "v1.32.0", "gitCommit": "", "gitTreeState": "clean",
            "buildDate": "2026-01-01T00:00:00Z", "goVersion": "none", "compiler": "none", "platform": "linux/amd64",
        })),
        ["api"] => json_answer(StatusCode::OK, &json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})),
        ["apis"] => json_answer(StatusCode::OK, &json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})),
        ["api", "v1"] => json_answer(StatusCode::OK, &resources()),
        ["api", "v1", resource] => list(&cluster, resource, None, &query),
        ["api", "v1", "namespaces", name] => one(&cluster, &method, "namespaces", "", name, &body, &query),
        ["api", "v1", "namespaces", namespace, resource] => match method {
            Method::POST => create(&cluster, resource, namespace, &body),
            Method::GET => list(&cluster, resource, Some(namespace), &query),
            _ => failure(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", "not here"),
        },
        ["api", "v1", "namespaces", namespace, "pods", name, "log"] => log(&cluster, namespace, name, &query),
        ["api", "v1", "namespaces", namespace, resource, name] | ["api", "v1", "namespaces", namespace, resource, name, "status"] => {
            one(&cluster, &method, resource, namespace, name, &body, &query)
        }
        _ => failure(StatusCode::NOT_FOUND, "NotFound", "the server could not find the requested resource"),
    }
}

fn take_one(count: &std::sync::atomic::AtomicUsize) -> bool {
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok()
}

fn resources() -> Value {
    let verbs = json!(["create", "delete", "get", "list", "patch", "update", "watch"]);
    let resource = |name: &str, kind: &str, short: &str| {
        json!({"name": name, "singularName": kind.to_lowercase(), "namespaced": true, "kind": kind, "verbs": verbs, "shortNames": [short]})
    };
    let mut namespaces = resource("namespaces", "Namespace", "ns");
    namespaces["namespaced"] = json!(false);
    json!({"kind": "APIResourceList", "groupVersion": "v1", "resources": [
        resource("pods", "Pod", "po"), resource("configmaps", "ConfigMap", "cm"), namespaces,
        {"name": "pods/log", "singularName": "", "namespaced": true, "kind": "Pod", "verbs": ["get"]},
        {"name": "pods/exec", "singularName": "", "namespaced": true, "kind": "PodExecOptions", "verbs": ["create", "get"]},
    ]})
}

fn kind_of(resource: &str) -> Option<&'static str> {
    match resource {
        "pods" => Some("Pod"),
        "configmaps" => Some("ConfigMap"),
        "namespaces" => Some("Namespace"),
        _ => None,
    }
}

fn not_found(resource: &str, name: &str) -> Response<Body> {
    failure(StatusCode::NOT_FOUND, "NotFound", &format!("{resource} \"{name}\" not found"))
}

fn matches(object: &Value, query: &Query) -> bool {
    let labels = selects(&query.get("labelSelector").unwrap_or_default(), object["metadata"].get("labels"));
    let fields = query.get("fieldSelector").unwrap_or_default();
    labels
        && fields.split(',').filter(|f| !f.is_empty()).all(|field| {
            let (path, value) = field.split_once('=').unwrap_or((field, ""));
            let pointer = format!("/{}", path.replace('.', "/"));
            object.pointer(&pointer).and_then(Value::as_str) == Some(value.trim_start_matches('='))
        })
}

fn list(cluster: &Arc<Cluster>, resource: &str, namespace: Option<&str>, query: &Query) -> Response<Body> {
    let Some(kind) = kind_of(resource) else {
        return failure(StatusCode::NOT_FOUND, "NotFound", "the server could not find the requested resource");
    };
    if query.is("watch") {
        return watch(cluster, resource, namespace, query);
    }
    let (objects, version) = cluster.store.list(resource, namespace);
    let items: Vec<_> = objects.into_iter().filter(|object| matches(object, query)).collect();
    json_answer(StatusCode::OK, &json!({
        "kind": format!("{kind}List"), "apiVersion": "v1",
        "metadata": {"resourceVersion": version.to_string()}, "items": items,
    }))
}

fn watch(cluster: &Arc<Cluster>, resource: &str, namespace: Option<&str>, query: &Query) -> Response<Body> {
    let from = query.get("resourceVersion").and_then(|v| v.parse::<u64>().ok());
    // Without a version a watch begins with what is there.
    let mut waiting = VecDeque::new();
    let from = match from {
        Some(from) if from > 0 => from,
        _ => {
            let (objects, version) = cluster.store.list(resource, namespace);
            for object in objects.into_iter().filter(|object| matches(object, query)) {
                waiting.push_back(json!({"type": "ADDED", "object": object}));
            }
            version
        }
    };
    let state = Watch {
        cluster: Arc::clone(cluster),
        resource: resource.to_owned(),
        namespace: namespace.map(str::to_owned),
        query: query.clone(),
        from,
        waiting,
        changes: cluster.store.changes(),
        cut: cluster.cut(),
        over: false,
    };
    let events = stream::unfold(state, |mut state| async move {
        let event = state.next().await?;
        let line = Bytes::from(format!("{event}\n"));
        Some((Ok::<_, Infallible>(Frame::data(line)), state))
    });
    let response = Response::builder().header("content-type", "application/json");
    response.body(StreamBody::new(events).boxed_unsync()).unwrap()
}

struct Watch {
    cluster: Arc<Cluster>,
    resource: String,
    namespace: Option<String>,
    query: Query,
    from: u64,
    waiting: VecDeque<Value>,
    changes: tokio::sync::watch::Receiver<u64>,
    cut: tokio_util::sync::CancellationToken,
    over: bool,
}

impl Watch {
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                return Some(event);
            }
            if self.over {
                return None;
            }
            self.changes.borrow_and_update();
            match self.cluster.store.after(self.from) {
                None => {
                    self.over = true;
                    return Some(json!({"type": "ERROR", "object": status_object(410, "Expired", "too old resource version")}));
                }
                Some(events) => {
                    for event in events {
                        self.from = event.version;
                        let ours = event.resource == self.resource
                            && self.namespace.as_ref().is_none_or(|n| *n == event.namespace);
                        if ours && matches(&event.object, &self.query) {
                            self.waiting.push_back(json!({"type": event.kind, "object": event.object}));
                        }
                    }
                }
            }
            if self.waiting.is_empty() {
                tokio::select! {
                    changed = self.changes.changed() => changed.ok()?,
                    () = self.cut.cancelled() => return None,
                }
            }
        }
    }
}

fn create(cluster: &Arc<Cluster>, resource: &str, namespace: &str, body: &Bytes) -> Response<Body> {
    let Some(kind) = kind_of(resource) else {
        return failure(StatusCode::NOT_FOUND, "NotFound", "the server could not find the requested resource");
    };
    if cluster.store.get(&key("namespaces", "", namespace)).is_none() {
        return not_found("namespaces", namespace);
    }
    let Ok(mut object) = serde_json::from_slice::<Value>(body) else {
        return failure(StatusCode::BAD_REQUEST, "BadRequest", "the body is not JSON");
    };
    let Some(name) = object["metadata"]["name"].as_str().map(str::to_owned) else {
        return failure(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", "metadata.name: Required value");
    };
    object["kind"] = json!(kind);
    object["apiVersion"] = json!("v1");
    if resource == "pods" {
        if cluster.faults.forbidden.load(Ordering::Relaxed) {
            return failure(StatusCode::FORBIDDEN, "Forbidden", "pods is forbidden: User \"test\" cannot create resource \"pods\"");
        }
        let quota = *cluster.faults.quota.lock().unwrap();
        let pods = cluster.store.list("pods", Some(namespace)).0.len();
        if quota.is_some_and(|quota| pods >= quota) {
            let message = format!("pods \"{name}\" is forbidden: exceeded quota: q, requested: pods=1, used: pods={pods}, limited: pods={pods}");
            return failure(StatusCode::FORBIDDEN, "Forbidden", &message);
        }
        if object["spec"]["containers"].as_array().is_none_or(Vec::is_empty) {
            return failure(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", "spec.containers: Required value");
        }
        object["status"] = json!({"phase": "Pending"});
    }
    let key = key(resource, namespace, &name);
    match cluster.store.create(&key, object) {
        Some(made) => {
            if resource == "pods" {
                cluster.pod_created(key, made.clone());
            }
            json_answer(StatusCode::CREATED, &made)
        }
        None => failure(StatusCode::CONFLICT, "AlreadyExists", &format!("{resource} \"{name}\" already exists")),
    }
}

fn merge(into: &mut Value, patch: &Value) {
    match (into, patch) {
        (Value::Object(into), Value::Object(patch)) => {
            for (name, value) in patch {
                if value.is_null() {
                    into.remove(name);
                } else {
                    merge(into.entry(name.clone()).or_insert(Value::Null), value);
                }
            }
        }
        (into, patch) => *into = patch.clone(),
    }
}

fn one(cluster: &Arc<Cluster>, method: &Method, resource: &str, namespace: &str, name: &str, body: &Bytes, query: &Query) -> Response<Body> {
    let key = key(resource, namespace, name);
    let sent = serde_json::from_slice::<Value>(body).unwrap_or_default();
    let answer = match *method {
        Method::GET => cluster.store.get(&key),
        Method::PATCH => cluster.store.update(&key, |object| merge(object, &sent)),
        Method::PUT => cluster.store.update(&key, |object| {
            let metadata = object["metadata"].clone();
            *object = sent.clone();
            object["metadata"]["uid"] = metadata["uid"].clone();
        }),
        Method::DELETE => {
            let asked = query.get("gracePeriodSeconds").and_then(|g| g.parse().ok());
            let asked = asked.or_else(|| sent["gracePeriodSeconds"].as_u64());
            let own = || cluster.store.get(&key)?["spec"]["terminationGracePeriodSeconds"].as_u64();
            let grace = asked.or_else(own).unwrap_or(30);
            cluster.delete(&key, grace)
        }
        _ => return failure(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", "not here"),
    };
    match answer {
        Some(object) => json_answer(StatusCode::OK, &object),
        None => not_found(resource, name),
    }
}

fn log(cluster: &Arc<Cluster>, namespace: &str, name: &str, query: &Query) -> Response<Body> {
    let Some(pod) = cluster.store.get(&key("pods", namespace, name)) else {
        return not_found("pods", name);
    };
    let default = pod["spec"]["containers"][0]["name"].as_str().unwrap_or_default().to_owned();
    let container = query.get("container").filter(|c| !c.is_empty()).unwrap_or(default);
    let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
    let text = cluster.kubelet.running(uid).and_then(|r| r.logs.lock().unwrap().get(&container).cloned());
    let body = Full::new(Bytes::from(text.unwrap_or_default()));
    Response::builder().header("content-type", "text/plain").body(body.boxed_unsync()).unwrap()
}
