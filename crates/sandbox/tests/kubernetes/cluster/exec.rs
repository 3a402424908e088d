//! Processes in containers over WebSocket: protocols `v5.channel.k8s.io` (which can close standard
//! input) and `v4.channel.k8s.io` (which cannot).

use std::{sync::{Arc, atomic::Ordering}, time::Duration};

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, upgrade::Upgraded};
use hyper_util::rt::TokioIo;
use sandbox::{Chunk, Exec, Exit};
use serde_json::json;
use tokio::{
    io::{AsyncWriteExt, duplex},
    sync::mpsc,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, handshake::derive_accept_key, protocol::Role},
};

use super::{
    Cluster,
    http::{Body, Query, failure, status_object},
    key,
    kubelet::Running,
};

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const CLOSE: u8 = 255;
const MESSAGE_BYTES_MAX: usize = 32 << 10;

pub(super) async fn answer(
    cluster: Arc<Cluster>,
    mut request: Request<Incoming>,
    namespace: &str,
    name: &str,
    query: Query,
) -> Response<Body> {
    let header = |name: &str| {
        let values = request.headers().get_all(name).iter();
        values.filter_map(|v| v.to_str().ok()).collect::<Vec<_>>().join(",")
    };
    let Some(pod) = cluster.store.get(&key("pods", namespace, name)) else {
        return failure(StatusCode::NOT_FOUND, "NotFound", &format!("pods \"{name}\" not found"));
    };
    let (key, offered) = (header("sec-websocket-key"), header("sec-websocket-protocol"));
    let known: &[&str] = if cluster.faults.old_exec.load(Ordering::Relaxed) {
        &["v4.channel.k8s.io"]
    } else {
        &["v5.channel.k8s.io", "v4.channel.k8s.io"]
    };
    let protocol = known.iter().find(|p| offered.split(',').any(|o| o.trim() == **p));
    let (Some(protocol), false) = (protocol, key.is_empty()) else {
        return failure(StatusCode::BAD_REQUEST, "BadRequest", "expected a WebSocket with v5.channel.k8s.io");
    };
    let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
    let Some(running) = cluster.kubelet.running(uid) else {
        return failure(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", "container not running");
    };
    let upgrade = hyper::upgrade::on(&mut request);
    let stop = cluster.stop.clone();
    cluster.tasks.spawn(async move {
        let Ok(upgraded) = upgrade.await else { return };
        let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, None).await;
        tokio::select! {
            () = run(socket, &running, query) => {}
            () = stop.cancelled() => {}
        }
    });
    Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-accept", derive_accept_key(key.as_bytes()))
        .header("sec-websocket-protocol", *protocol)
        .body(Full::new(Bytes::new()).boxed_unsync())
        .unwrap()
}

async fn run(socket: WebSocketStream<TokioIo<Upgraded>>, running: &Running, query: Query) {
    let (mut sink, mut source) = socket.split();
    let exec = Exec {
        argv: query.all("command"),
        cwd: Some("/".into()),
        env: [].into(),
        stdin: Vec::new(),
        timeout: Duration::from_secs(24 * 3600),
        output_bytes_max: 0,
        end_background: false,
    };
    let (mut to_process, mut stdin) = duplex(64 << 10);
    let (sender, mut chunks) = mpsc::channel(4);
    let listen = async {
        let mut open = query.is("stdin");
        if !open {
            let _ = to_process.shutdown().await;
        }
        while let Some(Ok(message)) = source.next().await {
            let Message::Binary(bytes) = message else { continue };
            match bytes.split_first() {
                Some((&STDIN, bytes)) if open => open = to_process.write_all(bytes).await.is_ok(),
                Some((&CLOSE, [STDIN])) => {
                    open = false;
                    let _ = to_process.shutdown().await;
                }
                _ => {}
            }
        }
        // The client is gone; on a real node its process would go on.
    };
    let work = async {
        let process = running.sandbox.exec_streaming(exec, &mut stdin, sender);
        let talk = async {
            while let Some(chunk) = chunks.recv().await {
                let (channel, bytes) = match chunk {
                    Chunk::Stdout(bytes) => (STDOUT, bytes),
                    Chunk::Stderr(bytes) => (STDERR, bytes),
                };
                for piece in bytes.chunks(MESSAGE_BYTES_MAX) {
                    let message = [&[channel], piece].concat();
                    let _ = sink.send(Message::Binary(message.into())).await;
                }
            }
        };
        let (output, ()) = tokio::join!(process, talk);
        let status = match output {
            Ok(output) => match output.exit {
                Exit::Code(0) => json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}),
                exit => {
                    let code = match exit {
                        Exit::Code(code) => code,
                        Exit::Signal(signal) => 128 + signal,
                        Exit::TimedOut => 124,
                    };
                    let mut status = status_object(500, "NonZeroExitCode", &format!("command terminated with non-zero exit code: exit status {code}"));
                    status["details"] = json!({"causes": [{"reason": "ExitCode", "message": code.to_string()}]});
                    status
                }
            },
            Err(error) => status_object(500, "InternalError", &error.to_string()),
        };
        let message = [&[ERROR], status.to_string().as_bytes()].concat();
        let _ = sink.send(Message::Binary(message.into())).await;
        let _ = sink.send(Message::Close(None)).await;
        let _ = sink.flush().await;
    };
    tokio::select! {
        () = listen => {}
        () = work => {}
    }
}
