//! A cluster of a few lines: objects by kind, lists, and a watch that replays.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard},
};

use bytes::Bytes;
use futures::channel::mpsc;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::Frame;
use kube::{Client, client::Body};
use serde_json::{Value, json};

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;
type Script = dyn Fn(&Value) -> Vec<Value> + Send + Sync;
type Line = Result<Frame<Bytes>, Infallible>;

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Vec<Value>>,
    /// Events of pods; the version of a list is how many there were.
    events: Vec<String>,
    /// Watches from before this are too old.
    forgotten: usize,
    watchers: Vec<mpsc::UnboundedSender<Line>>,
    log: Vec<String>,
    refuse_pods: Option<(u16, String)>,
}

/// The cluster.
#[derive(Clone)]
pub(super) struct Cluster {
    state: Arc<Mutex<State>>,
    /// What becomes of a pod that is made: its statuses, in order.
    script: Arc<Script>,
}

fn answer(code: u16, value: &Value) -> Answer {
    Response::builder()
        .status(code)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(value.to_string())).boxed_unsync())
        .unwrap()
}

fn failure(code: u16, message: &str) -> Answer {
    let reason = match code {
        404 => "NotFound",
        409 => "AlreadyExists",
        403 => "Forbidden",
        _ => "",
    };
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                        "reason": reason, "message": message, "metadata": {}});
    answer(code, &status)
}

fn name_of(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

impl State {
    fn event(&mut self, kind: &str, object: &Value) {
        let version = self.events.len() + 1;
        let mut object = object.clone();
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        let line = format!("{}\n", json!({"type": kind, "object": object}));
        self.events.push(line.clone());
        let data = Bytes::from(line);
        self.watchers
            .retain(|w| w.unbounded_send(Ok(Frame::data(data.clone()))).is_ok());
    }

    fn set(&mut self, kind: &str, object: Value) {
        let all = self.objects.entry(kind.to_owned()).or_default();
        let known = all.iter().position(|o| name_of(o) == name_of(&object));
        match known {
            Some(at) => all[at] = object.clone(),
            None => all.push(object.clone()),
        }
        if kind == "pods" {
            let what = if known.is_some() { "MODIFIED" } else { "ADDED" };
            self.event(what, &object);
        }
    }

    fn remove(&mut self, kind: &str, name: &str) -> Option<Value> {
        let all = self.objects.entry(kind.to_owned()).or_default();
        let at = all.iter().position(|o| name_of(o) == name)?;
        let object = all.remove(at);
        if kind == "pods" {
            self.event("DELETED", &object);
        }
        Some(object)
    }
}

impl Cluster {
    pub(super) fn new(script: impl Fn(&Value) -> Vec<Value> + Send + Sync + 'static) -> Self {
        Self {
            state: Arc::default(),
            script: Arc::new(script),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(super) fn client(&self) -> Client {
        let cluster = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let cluster = cluster.clone();
            async move { Ok::<_, Infallible>(cluster.serve(request).await) }
        });
        Client::new(service, "rl")
    }

    pub(super) fn log(&self) -> Vec<String> {
        self.state().log.clone()
    }

    pub(super) fn objects(&self) -> BTreeMap<String, Vec<Value>> {
        self.state().objects.clone()
    }

    pub(super) fn pods(&self) -> Vec<String> {
        let objects = self.objects();
        let pods = objects.get("pods").into_iter().flatten();
        pods.map(|pod| name_of(pod).to_owned()).collect()
    }

    pub(super) fn put(&self, kind: &str, object: Value) {
        self.state().set(kind, object);
    }

    pub(super) fn set(&self, kind: &str, mut object: Value, status: Option<Value>) {
        if let Some(status) = status {
            object["status"] = status;
        }
        self.put(kind, object);
    }

    pub(super) fn remove(&self, kind: &str, name: &str) {
        self.state().remove(kind, name);
    }

    pub(super) fn refuse_pods(&self, code: u16, message: &str) {
        self.state().refuse_pods = Some((code, message.to_owned()));
    }

    /// Ends all watches, and answers 410 to whoever asks for what was until now.
    pub(super) fn forget(&self) {
        let mut state = self.state();
        // So that a list from now on is newer than what is forgotten.
        state.events.push(String::new());
        state.forgotten = state.events.len();
        state.watchers.clear();
    }

    async fn serve(&self, request: Request<Body>) -> Answer {
        let (parts, body) = request.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let query = parts.uri.query().unwrap_or_default().to_owned();
        let path: Vec<&str> = parts.uri.path().split('/').collect();
        let at = path.iter().position(|p| *p == "namespaces").unwrap();
        let kind = path[at + 2];
        let name = path.get(at + 3).copied();
        let mut state = self.state();
        if path.get(at + 4) == Some(&"exec") {
            return failure(
                403,
                "pods \"p\" is forbidden: cannot get resource \"pods/exec\"",
            );
        }
        match (&parts.method, name) {
            (&Method::GET, None) if query.contains("watch=true") => watch(&mut state, &query),
            (&Method::GET, None) => {
                state.log.push(format!("LIST {kind}"));
                let items = state.objects.get(kind).cloned().unwrap_or_default();
                let version = state.events.len().to_string();
                let list = json!({"kind": "List", "apiVersion": "v1", "items": items,
                                  "metadata": {"resourceVersion": version}});
                answer(200, &list)
            }
            (&Method::GET, Some(name)) => {
                let all = state.objects.get(kind).cloned().unwrap_or_default();
                match all.iter().find(|o| name_of(o) == name) {
                    Some(object) => answer(200, object),
                    None => failure(404, "not found"),
                }
            }
            (&Method::POST, _) => {
                state.log.push(format!("POST {kind}"));
                if let (Some((code, message)), "pods") = (&state.refuse_pods, kind) {
                    return failure(*code, message);
                }
                let mut object = body;
                object["metadata"]["uid"] = json!(format!("uid-of-{}", name_of(&object)));
                object["metadata"]["resourceVersion"] = json!("1");
                state.set(kind, object.clone());
                let pod = match kind {
                    "pods" => Some(object.clone()),
                    "sandboxes" => {
                        let mut pod = object["spec"]["podTemplate"].clone();
                        pod["metadata"]["name"] = object["metadata"]["name"].clone();
                        pod["metadata"]["uid"] = json!("of-the-controller");
                        Some(pod)
                    }
                    _ => None,
                };
                if let Some(mut pod) = pod {
                    for status in (self.script)(&pod) {
                        pod["status"] = status;
                        state.set("pods", pod.clone());
                    }
                }
                answer(201, &object)
            }
            (&Method::PUT, Some(name)) => {
                state.log.push(format!("PUT {kind}/{name}"));
                state.set(kind, body.clone());
                answer(200, &body)
            }
            (&Method::DELETE, Some(name)) => {
                state.log.push(format!("DELETE {kind}/{name}"));
                if kind == "sandboxes" {
                    state.remove("pods", name);
                }
                match state.remove(kind, name) {
                    Some(object) => answer(200, &object),
                    None => failure(404, "not found"),
                }
            }
            (method, name) => panic!("{method} {kind} {name:?}"),
        }
    }
}

fn watch(state: &mut State, query: &str) -> Answer {
    let from = query
        .split('&')
        .find_map(|pair| pair.strip_prefix("resourceVersion="))
        .and_then(|version| version.parse::<usize>().ok())
        .unwrap_or_default();
    let (sender, lines) = mpsc::unbounded::<Line>();
    if from < state.forgotten {
        let line = json!({"type": "ERROR", "object": {"kind": "Status", "status": "Failure",
            "code": 410, "reason": "Expired", "message": "too old resource version"}});
        let line = Bytes::from(format!("{line}\n"));
        let _ = sender.unbounded_send(Ok(Frame::data(line)));
    } else {
        for line in &state.events[from.min(state.events.len())..] {
            let _ = sender.unbounded_send(Ok(Frame::data(Bytes::from(line.clone()))));
        }
        state.watchers.push(sender);
    }
    Response::builder()
        .status(200)
        .body(StreamBody::new(lines).boxed_unsync())
        .unwrap()
}
