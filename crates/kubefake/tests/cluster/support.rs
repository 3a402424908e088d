//! A small client of our own, and clusters to use it on.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::{SinkExt, StreamExt};
use http::{Method, Request, header};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client as Http, connect::HttpConnector},
    rt::TokioExecutor,
};
use kubefake::{Fake, Settings, host_image};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use serde_json::{Value, json};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_tungstenite::{WebSocketStream, tungstenite::Message};

/// For anything that must happen; a test that waits longer has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
pub(crate) const PODS: &str = "/api/v1/namespaces/default/pods";

/// Settings of a cluster whose image `host:1` is this system.
pub(crate) fn with_host(folder: &std::path::Path) -> Settings {
    let image = host_image(folder.join("image")).unwrap();
    Settings {
        images: BTreeMap::from([("host:1".to_owned(), image)]),
        ..Settings::default()
    }
}

/// Whether pods can run here; says so if not.
pub(crate) fn can_run_pods() -> bool {
    let root = std::fs::metadata("/proc/self").is_ok_and(|m| {
        use std::os::unix::fs::MetadataExt;
        m.uid() == 0
    });
    if !root {
        println!("skipped: pods that run need root");
    }
    root
}

/// A cluster with a node, a client of it, and the folder of its image; `None` without root.
pub(crate) async fn cluster() -> Option<(Fake, Client, tempfile::TempDir)> {
    cluster_with(|_| {}).await
}

pub(crate) async fn cluster_with(
    change: impl FnOnce(&mut Settings),
) -> Option<(Fake, Client, tempfile::TempDir)> {
    if !can_run_pods() {
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut settings = with_host(folder.path());
    change(&mut settings);
    let fake = Fake::start(settings).await.unwrap();
    let client = Client::new(&fake, "admin-token");
    Some((fake, client, folder))
}

/// A cluster without a node.
pub(crate) async fn control_plane(change: impl FnOnce(&mut Settings)) -> (Fake, Client) {
    let mut settings = Settings {
        node: false,
        ..Settings::default()
    };
    change(&mut settings);
    let fake = Fake::start(settings).await.unwrap();
    let client = Client::new(&fake, "admin-token");
    (fake, client)
}

#[derive(Debug)]
pub(crate) struct Client {
    http: Http<HttpsConnector<HttpConnector>, Full<Bytes>>,
    tls: Arc<ClientConfig>,
    url: String,
    token: String,
}

/// An answer: status, headers, body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) headers: http::HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    pub(crate) fn ok(self) -> Value {
        assert!(self.code < 300, "{} {}", self.code, self.text);
        self.json()
    }

    /// A refusal with this status and reason; gives the `Status`.
    pub(crate) fn refused(self, code: u16, reason: &str) -> Value {
        assert_eq!(self.code, code, "{}", self.text);
        let status = self.json();
        assert_eq!(status["kind"], "Status", "{}", self.text);
        assert_eq!(status["status"], "Failure");
        assert_eq!(status["reason"], reason, "{}", self.text);
        assert_eq!(status["code"], code);
        status
    }
}

impl Client {
    pub(crate) fn new(fake: &Fake, token: &str) -> Self {
        let mut roots = RootCertStore::empty();
        let authority = CertificateDer::from_pem_slice(fake.authority().as_bytes()).unwrap();
        roots.add(authority).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls.clone())
            .https_only()
            .enable_http1()
            .build();
        Self {
            http: Http::builder(TokioExecutor::new()).build(connector),
            tls: Arc::new(tls),
            url: fake.url(),
            token: token.to_owned(),
        }
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Result<http::Response<Incoming>, hyper_util::client::legacy::Error> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.url));
        if !self.token.is_empty() {
            let token = format!("Bearer {}", self.token);
            request = request.header(header::AUTHORIZATION, token);
        }
        if body.is_some() && !headers.iter().any(|(name, _)| *name == "content-type") {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = request.body(Full::new(Bytes::from(body))).unwrap();
        timeout(PATIENCE, self.http.request(request))
            .await
            .expect("an answer in time")
    }

    pub(crate) async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Answer {
        self.call_with(method, path, &[], body).await
    }

    pub(crate) async fn call_with(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Answer {
        let response = self.send(method, path, headers, body).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = timeout(PATIENCE, body.collect())
            .await
            .expect("a body in time");
        let text = String::from_utf8(body.unwrap().to_bytes().to_vec()).unwrap();
        Answer {
            code: parts.status.as_u16(),
            headers: parts.headers,
            text,
        }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, None).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.call(Method::POST, path, Some(body)).await
    }

    pub(crate) async fn put(&self, path: &str, body: &Value) -> Answer {
        self.call(Method::PUT, path, Some(body)).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answer {
        self.call(Method::DELETE, path, None).await
    }

    pub(crate) async fn patch(&self, path: &str, kind: &str, body: &Value) -> Answer {
        let kind = format!("application/{kind}+json");
        let headers = [("content-type", kind.as_str())];
        self.call_with(Method::PATCH, path, &headers, Some(body))
            .await
    }

    pub(crate) async fn watch(&self, path: &str) -> Watcher {
        let response = self.send(Method::GET, path, &[], None).await.unwrap();
        assert_eq!(response.status(), 200);
        Watcher {
            body: response.into_body(),
            buffer: Vec::new(),
        }
    }

    /// Follows a pod until it is as wanted; gives it.
    pub(crate) async fn until(&self, pod: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let path = format!("{PODS}?watch=1&fieldSelector=metadata.name%3D{pod}");
        let mut watcher = self.watch(&path).await;
        loop {
            let event = watcher.next().await.expect("the watch goes on");
            if event["type"] != "DELETED" && holds(&event["object"]) {
                return event["object"].clone();
            }
        }
    }

    pub(crate) async fn until_phase(&self, pod: &str, phase: &str) -> Value {
        self.until(pod, |pod| pod["status"]["phase"] == phase).await
    }

    pub(crate) async fn log(&self, pod: &str) -> String {
        self.get(&format!("{PODS}/{pod}/log")).await.text
    }

    /// Starts a session: `query` as in `stdin=1&stdout=1&command=cat`.
    pub(crate) async fn session(&self, path: &str, protocol: &str) -> Result<Session, u16> {
        let address = self.url.strip_prefix("https://").unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let stream = TlsConnector::from(Arc::clone(&self.tls))
            .connect(name, stream)
            .await
            .unwrap();
        let request = Request::builder()
            .uri(format!("wss://{address}{path}"))
            .header(header::HOST, address)
            .header(header::CONNECTION, "Upgrade")
            .header(header::UPGRADE, "websocket")
            .header(header::SEC_WEBSOCKET_VERSION, "13")
            .header(header::SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ==")
            .header(header::SEC_WEBSOCKET_PROTOCOL, protocol)
            .header(header::AUTHORIZATION, format!("Bearer {}", self.token))
            .body(())
            .unwrap();
        match tokio_tungstenite::client_async(request, stream).await {
            Ok((socket, answer)) => {
                assert_eq!(answer.headers()[header::SEC_WEBSOCKET_PROTOCOL], protocol);
                Ok(Session { socket })
            }
            Err(tokio_tungstenite::tungstenite::Error::Http(answer)) => {
                Err(answer.status().as_u16())
            }
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) async fn exec(&self, pod: &str, argv: &[&str], stdin: bool) -> Session {
        let path = exec_path(pod, argv, stdin);
        self.session(&path, "v5.channel.k8s.io").await.unwrap()
    }
}

pub(crate) fn exec_path(pod: &str, argv: &[&str], stdin: bool) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    for (key, on) in [("stdin", stdin), ("stdout", true), ("stderr", true)] {
        if on {
            query.append_pair(key, "true");
        }
    }
    for word in argv {
        query.append_pair("command", word);
    }
    format!("{PODS}/{pod}/exec?{}", query.finish())
}

#[derive(Debug)]
pub(crate) struct Watcher {
    body: Incoming,
    buffer: Vec<u8>,
}

impl Watcher {
    /// The next event; `None` at an orderly end, an error when the connection broke.
    pub(crate) async fn try_next(&mut self) -> Result<Option<Value>, hyper::Error> {
        loop {
            if let Some(at) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=at).collect();
                return Ok(Some(serde_json::from_slice(&line).unwrap()));
            }
            let frame = timeout(PATIENCE, self.body.frame())
                .await
                .expect("an event in time");
            match frame {
                None => return Ok(None),
                Some(frame) => {
                    let data = frame?.into_data().unwrap_or_default();
                    self.buffer.extend_from_slice(&data);
                }
            }
        }
    }

    pub(crate) async fn next(&mut self) -> Option<Value> {
        self.try_next().await.expect("the connection holds")
    }

    /// The next event: its type and the name of its object.
    pub(crate) async fn told(&mut self) -> (String, String) {
        let event = self.next().await.expect("the watch goes on");
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (
            word(&event["type"]),
            word(&event["object"]["metadata"]["name"]),
        )
    }
}

#[derive(Debug)]
pub(crate) struct Session {
    socket: WebSocketStream<TlsStream<TcpStream>>,
}

/// What a session gave in all.
#[derive(Debug, Default)]
pub(crate) struct Given {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) status: Option<Value>,
    /// Whether it ended with a goodbye.
    pub(crate) closed: bool,
}

impl Given {
    pub(crate) fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub(crate) fn succeeded(&self) -> bool {
        self.status
            .as_ref()
            .is_some_and(|s| s["status"] == "Success")
    }

    pub(crate) fn exit_code(&self) -> Option<String> {
        let status = self.status.as_ref()?;
        assert_eq!(status["reason"], "NonZeroExitCode", "{status}");
        let cause = &status["details"]["causes"][0];
        assert_eq!(cause["reason"], "ExitCode");
        cause["message"].as_str().map(str::to_owned)
    }
}

impl Session {
    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        let mut message = vec![0];
        message.extend_from_slice(bytes);
        self.socket
            .send(Message::Binary(message.into()))
            .await
            .unwrap();
    }

    /// Version 5: there is no more standard input.
    pub(crate) async fn end_input(&mut self) {
        self.socket
            .send(Message::Binary(vec![255, 0].into()))
            .await
            .unwrap();
    }

    /// Takes one message into what was given; whether there may be more.
    pub(crate) async fn step(&mut self, given: &mut Given) -> bool {
        let message = timeout(PATIENCE, self.socket.next())
            .await
            .expect("a message in time");
        match message {
            Some(Ok(Message::Binary(bytes))) => {
                let (channel, rest) = bytes.split_first().unwrap();
                match channel {
                    1 => given.stdout.extend_from_slice(rest),
                    2 => given.stderr.extend_from_slice(rest),
                    3 => given.status = Some(serde_json::from_slice(rest).unwrap()),
                    other => panic!("channel {other}"),
                }
                true
            }
            Some(Ok(Message::Close(_))) => {
                given.closed = true;
                true
            }
            Some(Ok(_)) => true,
            Some(Err(_)) | None => false,
        }
    }

    pub(crate) async fn all(mut self) -> Given {
        let mut given = Given::default();
        while self.step(&mut given).await {}
        given
    }

    /// Reads until standard output ends with this.
    pub(crate) async fn until_said(&mut self, given: &mut Given, end: &str) {
        while !given.stdout.ends_with(end.as_bytes()) {
            assert!(self.step(given).await, "it ended early: {given:?}");
        }
    }
}

/// A pod with one container that runs a script of `sh`.
pub(crate) fn script_pod(name: &str, script: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [{
            "name": "main", "image": "host:1", "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", script],
        }]},
    })
}

/// What holds a pod until it is stopped, and lets go at once when asked.
pub(crate) const IDLE: &str = "trap 'exit 0' TERM; while :; do sleep 1000 & wait $!; done";

pub(crate) fn config_map(name: &str, value: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name},
        "data": {"value": value}})
}
