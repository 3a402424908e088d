//! Our side of the stream to PID 1 of a sandbox: operations by number, answers to whoever asked.

use std::{
    collections::HashMap,
    ffi::OsString,
    os::unix::{ffi::OsStringExt, net::UnixStream as StdUnixStream},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use guest::protocol::{
    BODY_BYTES_MAX, CHUNK_BYTES, Decoder, ExecRequest, Exited, FileFailure, Frame, Hello, Kind,
    VERSION, decode_path, encode_path,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch},
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use crate::File;

/// Bulk bytes on their way to a sandbox.
const QUEUE_BYTES_MAX: usize = 4 << 20;

/// How an operation ended, when the sandbox lived to tell.
#[derive(Debug)]
pub(crate) enum Answer {
    Exited {
        stdout: Vec<u8>,
        stderr: Vec<u8>,
        exited: Exited,
    },
    NotRunnable(String),
    Put,
    Files(Vec<File>),
    FileFailed(FileFailure),
    Hello,
    SetupFailed(String),
}

/// The connection broke; the text says what is known.
#[derive(Debug)]
pub(crate) struct Broken(pub(crate) String);

/// What has come of an answer so far.
#[derive(Debug, Default)]
struct Partial {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    files: Vec<File>,
}

#[derive(Debug)]
struct Operation {
    partial: Partial,
    sender: oneshot::Sender<Answer>,
}

/// Bytes to write. A bulk frame holds its share of the queue until it is written.
#[derive(Debug)]
struct Outgoing {
    bytes: Vec<u8>,
    _room: Option<OwnedSemaphorePermit>,
}

#[derive(Debug, Default)]
struct Operations {
    open: HashMap<u32, Operation>,
    broken: bool,
}

#[derive(Debug)]
struct Shared {
    operations: Mutex<Operations>,
    goodbye: watch::Sender<Option<String>>,
}

/// The stream. Dropping it closes it, which ends the sandbox.
#[derive(Debug)]
pub(crate) struct Stream {
    shared: Arc<Shared>,
    queue: mpsc::UnboundedSender<Outgoing>,
    room: Arc<Semaphore>,
    next_id: AtomicU32,
    _stop: DropGuard,
}

impl Shared {
    fn operations(&self) -> MutexGuard<'_, Operations> {
        self.operations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells PID 1 to stop an operation whose asker went away.
struct Cancel<'a> {
    stream: &'a Stream,
    id: u32,
    armed: bool,
}

impl Drop for Cancel<'_> {
    fn drop(&mut self) {
        self.stream.shared.operations().open.remove(&self.id);
        if self.armed {
            self.stream
                .push(&Frame::new(Kind::Cancel, self.id, Vec::new()), None);
        }
    }
}

impl Stream {
    /// Takes over a connected stream; the first answer is [`Answer::Hello`] or
    /// [`Answer::SetupFailed`].
    pub(crate) fn start(
        stream: StdUnixStream,
        tasks: &TaskTracker,
    ) -> std::io::Result<(Self, oneshot::Receiver<Answer>)> {
        stream.set_nonblocking(true)?;
        let (reader, writer) = UnixStream::from_std(stream)?.into_split();
        let (sender, hello) = oneshot::channel();
        let mut operations = Operations::default();
        operations.open.insert(
            0,
            Operation {
                partial: Partial::default(),
                sender,
            },
        );
        let shared = Arc::new(Shared {
            operations: Mutex::new(operations),
            goodbye: watch::channel(None).0,
        });
        let (queue, outgoing) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        tasks.spawn(carry(
            Arc::clone(&shared),
            reader,
            writer,
            outgoing,
            stop.clone(),
        ));
        let stream = Self {
            shared,
            queue,
            room: Arc::new(Semaphore::new(QUEUE_BYTES_MAX)),
            next_id: AtomicU32::new(1),
            _stop: stop.drop_guard(),
        };
        Ok((stream, hello))
    }

    /// What PID 1 said last, if it said goodbye.
    pub(crate) fn goodbye(&self) -> Option<String> {
        self.shared.goodbye.borrow().clone()
    }

    fn broken(&self) -> Broken {
        Broken(
            self.goodbye()
                .unwrap_or_else(|| "its control stream broke".to_owned()),
        )
    }

    fn push(&self, frame: &Frame, room: Option<OwnedSemaphorePermit>) {
        // Every body is within the limit: chunks are cut here, requests are checked.
        if let Ok(bytes) = frame.encode() {
            let _ = self.queue.send(Outgoing { bytes, _room: room });
        }
    }

    async fn push_bulk(&self, kind: Kind, id: u32, bytes: &[u8]) {
        for chunk in bytes.chunks(CHUNK_BYTES) {
            // Never closed, and a chunk is smaller than the whole.
            let room = Arc::clone(&self.room)
                .acquire_many_owned(chunk.len() as u32)
                .await
                .ok();
            self.push(&Frame::new(kind, id, chunk.to_vec()), room);
        }
    }

    fn begin(&self) -> Result<(Cancel<'_>, oneshot::Receiver<Answer>), Broken> {
        let (sender, receiver) = oneshot::channel();
        let mut operations = self.shared.operations();
        if operations.broken {
            drop(operations);
            return Err(self.broken());
        }
        let mut id = self.next_id.fetch_add(1, Ordering::Relaxed);
        while id == 0 || operations.open.contains_key(&id) {
            id = self.next_id.fetch_add(1, Ordering::Relaxed);
        }
        operations.open.insert(
            id,
            Operation {
                partial: Partial::default(),
                sender,
            },
        );
        Ok((
            Cancel {
                stream: self,
                id,
                armed: true,
            },
            receiver,
        ))
    }

    async fn finish(
        &self,
        mut cancel: Cancel<'_>,
        receiver: oneshot::Receiver<Answer>,
    ) -> Result<Answer, Broken> {
        let answer = receiver.await;
        cancel.armed = false;
        answer.map_err(|_| self.broken())
    }

    /// Runs a process. Dropping the future kills it.
    pub(crate) async fn exec(&self, request: &ExecRequest, stdin: &[u8]) -> Result<Answer, Broken> {
        let (cancel, receiver) = self.begin()?;
        let frame = Frame::json(Kind::Exec, cancel.id, request);
        if frame.body.len() > BODY_BYTES_MAX {
            return Ok(Answer::NotRunnable(format!(
                "its arguments and environment are over {BODY_BYTES_MAX} bytes"
            )));
        }
        self.push(&frame, None);
        self.push_bulk(Kind::Stdin, cancel.id, stdin).await;
        self.push(&Frame::new(Kind::Run, cancel.id, Vec::new()), None);
        self.finish(cancel, receiver).await
    }

    /// Writes files, in order; the first failure is the answer.
    pub(crate) async fn put(&self, files: &[File]) -> Result<Answer, Broken> {
        use std::os::unix::ffi::OsStrExt;
        let mut begun = Vec::with_capacity(files.len());
        for file in files {
            let (cancel, receiver) = self.begin()?;
            let body = encode_path(u64::from(file.mode), file.path.as_os_str().as_bytes());
            self.push(&Frame::new(Kind::Put, cancel.id, body), None);
            self.push_bulk(Kind::PutData, cancel.id, &file.content)
                .await;
            self.push(&Frame::new(Kind::PutEnd, cancel.id, Vec::new()), None);
            begun.push((cancel, receiver));
        }
        for (cancel, receiver) in begun {
            match self.finish(cancel, receiver).await? {
                Answer::Put => {}
                failed => return Ok(failed),
            }
        }
        Ok(Answer::Put)
    }

    /// Reads files.
    pub(crate) async fn get(
        &self,
        path: &std::path::Path,
        bytes_max: u64,
    ) -> Result<Answer, Broken> {
        use std::os::unix::ffi::OsStrExt;
        let (cancel, receiver) = self.begin()?;
        let body = encode_path(bytes_max, path.as_os_str().as_bytes());
        self.push(&Frame::new(Kind::Get, cancel.id, body), None);
        self.finish(cancel, receiver).await
    }
}

/// Reads and writes until the stream breaks or we stop.
async fn carry(
    shared: Arc<Shared>,
    reader: OwnedReadHalf,
    writer: OwnedWriteHalf,
    outgoing: mpsc::UnboundedReceiver<Outgoing>,
    stop: CancellationToken,
) {
    tokio::select! {
        () = read(&shared, reader) => {}
        () = write(writer, outgoing) => {}
        () = stop.cancelled() => {}
    }
    let mut operations = shared.operations();
    operations.broken = true;
    // Dropping the senders tells everybody who waits.
    operations.open.clear();
}

async fn write(mut writer: OwnedWriteHalf, mut outgoing: mpsc::UnboundedReceiver<Outgoing>) {
    while let Some(next) = outgoing.recv().await {
        if writer.write_all(&next.bytes).await.is_err() {
            // The reading side will see the end, after whatever was said before it.
            std::future::pending::<()>().await;
        }
    }
    std::future::pending::<()>().await;
}

async fn read(shared: &Shared, mut reader: OwnedReadHalf) {
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; 64 << 10];
    loop {
        match reader.read(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(count) => decoder.push(buffer.get(..count).unwrap_or_default()),
        }
        loop {
            match decoder.next_frame() {
                Ok(None) => break,
                Ok(Some(frame)) => {
                    if let Err(reason) = hear(shared, frame) {
                        shared.goodbye.send_replace(Some(reason));
                        return;
                    }
                }
                Err(error) => {
                    shared.goodbye.send_replace(Some(error.to_string()));
                    return;
                }
            }
        }
    }
}

fn text(frame: &Frame) -> String {
    String::from_utf8_lossy(&frame.body).into_owned()
}

/// Takes in one frame. Frames of operations that nobody waits for any more are dropped.
fn hear(shared: &Shared, frame: Frame) -> Result<(), String> {
    let parsed = |error: guest::protocol::ProtocolError| error.to_string();
    if frame.kind == Kind::Goodbye {
        shared.goodbye.send_replace(Some(text(&frame)));
        return Ok(());
    }
    let mut operations = shared.operations();
    let Some(operation) = operations.open.get_mut(&frame.id) else {
        return Ok(());
    };
    let partial = &mut operation.partial;
    let answer = match frame.kind {
        Kind::Stdout => {
            partial.stdout.extend_from_slice(&frame.body);
            return Ok(());
        }
        Kind::Stderr => {
            partial.stderr.extend_from_slice(&frame.body);
            return Ok(());
        }
        Kind::GetFile => {
            let (mode, path) = decode_path(&frame.body).map_err(parsed)?;
            let path = PathBuf::from(OsString::from_vec(path.to_vec()));
            partial.files.push(File {
                path,
                content: Vec::new(),
                mode: (mode & 0o7777) as u32,
            });
            return Ok(());
        }
        Kind::GetData => {
            if let Some(file) = partial.files.last_mut() {
                file.content.extend_from_slice(&frame.body);
            }
            return Ok(());
        }
        Kind::Exited => Answer::Exited {
            exited: frame.parse().map_err(parsed)?,
            stdout: std::mem::take(&mut partial.stdout),
            stderr: std::mem::take(&mut partial.stderr),
        },
        Kind::ExecFailed => Answer::NotRunnable(text(&frame)),
        Kind::PutDone => Answer::Put,
        Kind::GetDone => Answer::Files(std::mem::take(&mut partial.files)),
        Kind::FileFailed => Answer::FileFailed(frame.parse().map_err(parsed)?),
        Kind::SetupFailed => Answer::SetupFailed(text(&frame)),
        Kind::Hello => {
            let hello: Hello = frame.parse().map_err(parsed)?;
            if hello.version != VERSION {
                return Err(format!(
                    "protocol version {}, expected {VERSION}",
                    hello.version
                ));
            }
            Answer::Hello
        }
        other => return Err(format!("unexpected frame {other:?}")),
    };
    if let Some(operation) = operations.open.remove(&frame.id) {
        let _ = operation.sender.send(answer);
    }
    Ok(())
}
