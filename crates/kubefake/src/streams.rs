//! Exec and attach: standard streams over a WebSocket, in the protocols `v5.channel.k8s.io` and
//! `v4.channel.k8s.io`.
//!
//! The first byte of a message is its channel: 0 standard input, 1 standard output, 2 standard
//! error, 3 the `Status` at the end, 4 sizes of a terminal. In version 5 a message `255 CHANNEL`
//! closes a channel, which is how standard input ends; in version 4 nothing ends it.

use std::{io, sync::Arc};

use bytes::Bytes;
use futures::{SinkExt, StreamExt, stream::SplitSink};
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty};
use hyper::{body::Incoming, upgrade::Upgraded};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    process::ChildStdin,
    sync::mpsc,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        handshake::derive_accept_key,
        protocol::{CloseFrame, Role, frame::coding::CloseCode},
    },
};

use crate::{
    error::ApiError,
    kubelet::{
        Kubelet,
        container::{Container, Stream},
    },
    logs::{container_of, status_of},
    request::Query,
    server::{Body, Server},
    validate::text,
};

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const STATUS: u8 = 3;
const CLOSE: u8 = 255;
const PIECE_BYTES: usize = 32 << 10;
/// Messages to a slow client.
const QUEUE: usize = 8;

/// A session that may begin.
#[derive(Debug)]
pub(crate) struct Accepted {
    container: Arc<Container>,
    /// Program and arguments; empty: attach.
    argv: Vec<String>,
    number: u64,
    stdin: bool,
    stdout: bool,
    stderr: bool,
}

impl Accepted {
    pub(crate) async fn check(
        kubelet: &Kubelet,
        pod: &Value,
        query: &Query,
        attach: bool,
    ) -> Result<Self, ApiError> {
        let name = container_of(pod, query.get("container"))?;
        let (stdin, stdout) = (query.flag("stdin"), query.flag("stdout"));
        let (stderr, tty) = (query.flag("stderr"), query.flag("tty"));
        if !(stdin || stdout || stderr) {
            return Err(ApiError::bad_request(
                "you must specify at least 1 of stdin, stdout, stderr",
            ));
        }
        if tty {
            return Err(ApiError::not_faked("terminals (tty)"));
        }
        let argv = query.all("command");
        if !attach && argv.is_empty() {
            return Err(ApiError::bad_request(
                "you must specify at least one command for the container",
            ));
        }
        kubelet.reachable(pod)?;
        let uid = text(&pod["metadata"]["uid"]);
        let (Some(container), Some(own)) = (kubelet.container(uid, &name), kubelet.pod(uid)) else {
            let over = status_of(pod, &name).is_some_and(|s| !s["state"]["terminated"].is_null());
            let why = if over {
                format!(
                    "cannot exec into a container in a completed pod; current phase is {}",
                    text(&pod["status"]["phase"])
                )
            } else {
                format!("unable to upgrade connection: container not found (\"{name}\")")
            };
            return Err(if over {
                ApiError::bad_request(why)
            } else {
                ApiError::internal(why)
            });
        };
        Ok(Self {
            container,
            argv,
            number: own.exec_number(),
            stdin,
            stdout,
            stderr,
        })
    }
}

/// Answers with 101 and serves the session once the connection is ours.
pub(crate) fn upgrade(
    mut request: Request<Incoming>,
    accepted: Accepted,
    server: &Arc<Server>,
) -> Result<Response<Body>, ApiError> {
    let get = |name: header::HeaderName| {
        let value = request.headers().get(name);
        value.and_then(|v| v.to_str().ok()).unwrap_or_default()
    };
    if !get(header::UPGRADE).eq_ignore_ascii_case("websocket") {
        return Err(ApiError::not_faked(
            "exec and attach over SPDY, only over WebSockets",
        ));
    }
    let offered = get(header::SEC_WEBSOCKET_PROTOCOL).to_owned();
    let protocol = offered
        .split(',')
        .map(str::trim)
        .find(|p| ["v5.channel.k8s.io", "v4.channel.k8s.io"].contains(p))
        .map(str::to_owned)
        .ok_or_else(|| {
            ApiError::bad_request(format!(
                "unable to upgrade: none of the protocols {offered:?} is known"
            ))
        })?;
    let accept = derive_accept_key(get(header::SEC_WEBSOCKET_KEY).as_bytes());
    let half_close = protocol.starts_with("v5");
    let upgraded = hyper::upgrade::on(&mut request);
    let mut faults = server.core.faults.streams();
    let stop = server.stop.clone();
    let tasks = server.tasks.clone();
    server.tasks.spawn(async move {
        let Ok(upgraded) = upgraded.await else {
            return;
        };
        let socket =
            WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, None).await;
        let session = async {
            if accepted.argv.is_empty() {
                attach(socket, accepted, half_close).await;
            } else {
                exec(socket, accepted, half_close, &tasks).await;
            }
        };
        tokio::select! {
            () = session => {}
            // Dropping the socket breaks the connection.
            _ = faults.recv() => {}
            () = stop.cancelled() => {}
        }
    });
    let mut response = Response::new(
        Empty::new()
            .map_err(|never: std::convert::Infallible| match never {})
            .boxed_unsync(),
    );
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    for (name, value) in [
        (header::SEC_WEBSOCKET_ACCEPT, accept),
        (header::SEC_WEBSOCKET_PROTOCOL, protocol),
    ] {
        let value = HeaderValue::from_str(&value)
            .map_err(|e| ApiError::internal(format!("header {name}: {e}")))?;
        headers.insert(name, value);
    }
    Ok(response)
}

type Socket = WebSocketStream<TokioIo<Upgraded>>;
type Sink = SplitSink<Socket, Message>;

fn message(channel: u8, bytes: &[u8]) -> Message {
    let mut all = Vec::with_capacity(1 + bytes.len());
    all.push(channel);
    all.extend_from_slice(bytes);
    Message::Binary(Bytes::from(all))
}

/// What the client wants next.
enum Input {
    Stdin(Bytes),
    StdinEnd,
}

/// Sends what comes through the queue, then the status, then says goodbye.
async fn write_all(mut sink: Sink, mut queue: mpsc::Receiver<Message>) {
    while let Some(message) = queue.recv().await {
        if sink.send(message).await.is_err() {
            return;
        }
    }
    // Clients take an end without a code for a broken connection.
    let end = CloseFrame {
        code: CloseCode::Normal,
        reason: "".into(),
    };
    let _ = sink.send(Message::Close(Some(end))).await;
    let _ = sink.close().await;
}

/// Reads what the client sends, until it goes.
async fn read_all(
    mut stream: futures::stream::SplitStream<Socket>,
    half_close: bool,
    inputs: mpsc::Sender<Input>,
) {
    while let Some(Ok(message)) = stream.next().await {
        let bytes = match message {
            Message::Binary(bytes) => bytes,
            Message::Text(text) => Bytes::copy_from_slice(text.as_bytes()),
            Message::Close(_) => return,
            _ => continue,
        };
        let input = match bytes.first() {
            Some(&STDIN) => Input::Stdin(bytes.slice(1..)),
            Some(&CLOSE) if half_close && bytes.get(1) == Some(&STDIN) => Input::StdinEnd,
            _ => continue,
        };
        // A process that does not read holds the client up; one that is over does not care.
        let _ = inputs.send(input).await;
    }
}

/// Writes what the client sends into a process, until that is over.
async fn feed(stdin: Option<ChildStdin>, mut inputs: mpsc::Receiver<Input>) {
    let mut stdin = stdin;
    while let Some(input) = inputs.recv().await {
        match (input, &mut stdin) {
            (Input::Stdin(bytes), Some(pipe)) => {
                if pipe.write_all(&bytes).await.is_err() || pipe.flush().await.is_err() {
                    stdin = None;
                }
            }
            (Input::StdinEnd, _) => stdin = None,
            (Input::Stdin(_), None) => {}
        }
    }
}

/// Passes output on while somebody takes it, and reads it to its end in any case.
async fn pass(
    source: Option<impl AsyncRead + Unpin>,
    channel: u8,
    wanted: bool,
    queue: mpsc::Sender<Message>,
) {
    let Some(mut source) = source else {
        return;
    };
    let mut buffer = vec![0; PIECE_BYTES];
    let mut wanted = wanted;
    loop {
        let count = source.read(&mut buffer).await.unwrap_or(0);
        if count == 0 {
            return;
        }
        if wanted {
            let piece = buffer.get(..count).unwrap_or_default();
            wanted = queue.send(message(channel, piece)).await.is_ok();
        }
    }
}

/// As the real server: an empty message tells that the session is open.
async fn greet(queue: &mpsc::Sender<Message>, accepted: &Accepted) {
    let channel = match (accepted.stdout, accepted.stderr) {
        (true, _) => STDOUT,
        (false, true) => STDERR,
        (false, false) => STATUS,
    };
    let _ = queue.send(message(channel, &[])).await;
}

fn success() -> Value {
    json!({"metadata": {}, "status": "Success"})
}

fn failure(argv: &[String], code: i32) -> Value {
    json!({
        "metadata": {}, "status": "Failure",
        "message": format!(
            "command terminated with non-zero exit code: error executing command [{}], exit code {code}",
            argv.join(" ")
        ),
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
    })
}

fn trouble(why: &str) -> Value {
    let mut status = ApiError::internal(format!("error executing command in container: {why}"));
    status.code = StatusCode::INTERNAL_SERVER_ERROR;
    let mut status = status.status();
    if let Some(map) = status.as_object_mut() {
        map.remove("kind");
        map.remove("apiVersion");
    }
    status
}

/// The process goes on when the client leaves, as on a real node: only the pod's end ends it.
async fn exec(
    socket: Socket,
    accepted: Accepted,
    half_close: bool,
    tasks: &tokio_util::task::TaskTracker,
) {
    let (sink, stream) = socket.split();
    let (queue, queued) = mpsc::channel(QUEUE);
    let (inputs, inputted) = mpsc::channel(QUEUE);
    let writer = write_all(sink, queued);
    let reader = read_all(stream, half_close, inputs);
    greet(&queue, &accepted).await;
    // Not part of the session: it outlives that.
    tasks.spawn(run(accepted, inputted, queue));
    tokio::select! {
        () = writer => {}
        // The client is gone; dropping the writer tells the process's side.
        () = reader => {}
    }
}

async fn run(accepted: Accepted, inputs: mpsc::Receiver<Input>, queue: mpsc::Sender<Message>) {
    let Accepted {
        container, argv, ..
    } = &accepted;
    let say = async |status: Value| {
        let _ = queue
            .send(message(STATUS, status.to_string().as_bytes()))
            .await;
    };
    let mut exec = match container.exec(argv, accepted.number, accepted.stdin) {
        Ok(exec) => exec,
        Err(error) => return say(trouble(&error.to_string())).await,
    };
    let stdin = exec.child.stdin.take();
    let (stdout, stderr) = (exec.child.stdout.take(), exec.child.stderr.take());
    if !exec.started().await {
        let why = format!(
            "failed to exec in container: failed to start exec \"{}\": OCI runtime exec failed: {}: unknown",
            accepted.number,
            exec.complaint()
        );
        return say(trouble(&why)).await;
    }
    let out = pass(stdout, STDOUT, accepted.stdout, queue.clone());
    let err = pass(stderr, STDERR, accepted.stderr, queue.clone());
    let work = async { tokio::join!(exec.child.wait(), out, err).0 };
    tokio::pin!(work);
    let feed = feed(stdin, inputs);
    tokio::pin!(feed);
    let mut feeding = true;
    let status = loop {
        tokio::select! {
            status = &mut work => break status,
            () = &mut feed, if feeding => feeding = false,
        }
    };
    match status.map(|s| s.code().unwrap_or(137)) {
        Ok(0) => say(success()).await,
        Ok(code) => say(failure(argv, code)).await,
        Err(error) => say(trouble(&error.to_string())).await,
    }
}

async fn attach(socket: Socket, accepted: Accepted, half_close: bool) {
    let container = &accepted.container;
    let mut output = container.attach();
    let (sink, stream) = socket.split();
    let (queue, queued) = mpsc::channel(QUEUE);
    let (inputs, mut inputted) = mpsc::channel(QUEUE);
    let writer = write_all(sink, queued);
    let reader = read_all(stream, half_close, inputs);
    greet(&queue, &accepted).await;
    let outwards = async {
        while let Some((stream, piece)) = output.recv().await {
            let (channel, wanted) = match stream {
                Stream::Stdout => (STDOUT, accepted.stdout),
                Stream::Stderr => (STDERR, accepted.stderr),
            };
            if wanted && queue.send(message(channel, &piece)).await.is_err() {
                return;
            }
        }
        container.wait().await;
        let status = success().to_string();
        let _ = queue.send(message(STATUS, status.as_bytes())).await;
        drop(queue);
    };
    let inwards = async {
        while let Some(input) = inputted.recv().await {
            if !accepted.stdin {
                continue;
            }
            let mut stdin = container.stdin.lock().await;
            let done: io::Result<()> = match (input, stdin.as_mut()) {
                (Input::Stdin(bytes), Some(pipe)) => match pipe.write_all(&bytes).await {
                    Ok(()) => pipe.flush().await,
                    Err(error) => Err(error),
                },
                (Input::StdinEnd, _) => Err(io::ErrorKind::UnexpectedEof.into()),
                (Input::Stdin(_), None) => Ok(()),
            };
            if done.is_err() && container.stdin_once {
                *stdin = None;
            }
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        ((), ()) = async { tokio::join!(writer, outwards) } => {}
        () = inwards => {}
        () = reader => {}
    }
    if accepted.stdin && accepted.container.stdin_once {
        *accepted.container.stdin.lock().await = None;
    }
}
