//! The way to a guest in a pod, without a cluster: the guest serves on its socket and a relay
//! joins it, both as processes of a local sandbox. Between them and us is a loop that does one
//! thing at a time, as the client of the cluster's API does.

use std::{path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use guest::protocol::{ContainerPlan, GUEST_PATH};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    sync::mpsc,
};
use tokio_util::task::TaskTracker;

use crate::{
    Chunk, Exec, Exit, File, Image, LocalConfig, LocalProvider, Provider, Sandbox, Spec,
    inhabited::{Inhabited, Shell},
    stream::{Stream, StreamSettings},
};

#[derive(Debug)]
struct NoShell;

#[async_trait]
impl Shell for NoShell {
    async fn end_reason(&self) -> Option<String> {
        None
    }

    fn image(&self) -> Image {
        Image::default()
    }

    async fn destroy(self: Box<Self>) {}
}

fn exec(argv: &[&str]) -> Exec {
    Exec {
        argv: argv.iter().map(|a| (*a).to_owned()).collect(),
        cwd: None,
        env: [].into(),
        stdin: Vec::new(),
        timeout: Duration::from_secs(120),
        output_bytes_max: 1 << 20,
        end_background: false,
        user: None,
    }
}

/// Sends or receives: never both.
async fn one_at_a_time(
    mut ours: DuplexStream,
    mut into_relay: DuplexStream,
    mut from_relay: mpsc::Receiver<Chunk>,
) {
    let mut buffer = vec![0; 16 << 10];
    let (mut reader, mut writer) = tokio::io::split(&mut ours);
    loop {
        tokio::select! {
            chunk = from_relay.recv() => match chunk {
                Some(Chunk::Stdout(bytes)) => if writer.write_all(&bytes).await.is_err() { return },
                Some(Chunk::Stderr(bytes)) => panic!("{}", String::from_utf8_lossy(&bytes)),
                None => return,
            },
            count = reader.read(&mut buffer) => match count {
                Ok(0) | Err(_) => return,
                Ok(count) => into_relay.write_all(&buffer[..count]).await.unwrap(),
            },
        }
    }
}

/// Bytes that differ from place to place.
fn body(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|i| ((i + seed) * 31 % 251) as u8).collect()
}

async fn echo(sandbox: &Inhabited, seed: usize) {
    let body = body(3_000_000, seed);
    let (sender, mut chunks) = mpsc::channel(4);
    let mut stdin = body.as_slice();
    let take = async {
        let mut all = Vec::new();
        while let Some(Chunk::Stdout(bytes) | Chunk::Stderr(bytes)) = chunks.recv().await {
            all.extend(bytes);
        }
        all
    };
    let run = sandbox.exec_streaming(exec(&["cat"]), &mut stdin, sender);
    let (output, all) = tokio::join!(run, take);
    assert_eq!(output.unwrap().exit, Exit::Code(0));
    assert!(all == body, "{} of {} bytes", all.len(), body.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_behind_a_relay_is_a_sandbox_and_ends_with_its_stream() {
    let provider = LocalProvider::start(LocalConfig::default()).await.unwrap();
    let outer = provider.create(Spec::default()).await.unwrap();
    let outer: Arc<dyn Sandbox> = Arc::from(outer);
    let tasks = TaskTracker::new();
    let plan = ContainerPlan {
        deadline_s: 100,
        heartbeat_s: 60,
        workspace: "/workspace/inner".into(),
        home: "/home/agent".into(),
        folders: Vec::new(),
        ports: Vec::new(),
        control_socket: Some(PathBuf::from("/tmp/control")),
    };
    let made = outer.exec(exec(&["mkdir", "/workspace/inner"])).await;
    assert_eq!(made.unwrap().exit, Exit::Code(0));
    let plan = serde_json::to_string(&plan).unwrap();
    let (first, second) = (Arc::clone(&outer), Arc::clone(&outer));
    let init = tasks.spawn(async move { first.exec(exec(&[GUEST_PATH, "init", &plan])).await });
    let (into_relay, mut stdin) = duplex(16 << 10);
    let (sender, from_relay) = mpsc::channel(1);
    let relay = tasks.spawn(async move {
        let relay = exec(&[GUEST_PATH, "relay", "/tmp/control"]);
        second.exec_streaming(relay, &mut stdin, sender).await
    });
    let (ours, theirs) = duplex(16 << 10);
    tasks.spawn(one_at_a_time(theirs, into_relay, from_relay));
    let (reader, writer) = tokio::io::split(ours);
    let (stream, hello) = Stream::start(reader, writer, StreamSettings::default(), &tasks);
    let spec = Spec {
        workspace: "/workspace/inner".into(),
        files: vec![File {
            path: "/workspace/inner/first".into(),
            content: b"of the spec".to_vec(),
            mode: 0o644,
        }],
        ..Spec::default()
    };
    let inner = Inhabited::start(spec, stream, hello, Box::new(NoShell))
        .await
        .unwrap();
    let output = inner.exec(exec(&["cat", "first"])).await.unwrap();
    assert_eq!(output.stdout, b"of the spec");
    // Much both ways, from several at once: more than all that lies between can hold.
    tokio::join!(
        echo(&inner, 1),
        echo(&inner, 2),
        echo(&inner, 3),
        echo(&inner, 4)
    );
    // The socket is gone: nobody can take the guest over.
    let again = outer.exec(exec(&["ls", "/tmp/control"])).await.unwrap();
    assert_ne!(again.exit, Exit::Code(0));
    Box::new(inner).destroy().await;
    assert_eq!(init.await.unwrap().unwrap().exit, Exit::Code(0));
    assert_eq!(relay.await.unwrap().unwrap().exit, Exit::Code(0));
    drop(outer);
    provider.close().await;
}
