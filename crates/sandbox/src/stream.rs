//! Our side of the stream to PID 1 of a sandbox: operations by number, answers to whoever asked.

use std::{
    collections::HashMap,
    ffi::OsString,
    os::unix::ffi::OsStringExt,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use guest::protocol::{
    BODY_BYTES_MAX, CHUNK_BYTES, Decoder, ExecRequest, Exited, FileFailure, Frame, Hello, Kind,
    UserFailure, VERSION, WINDOW_BYTES, decode_count, decode_path, encode_count, encode_path,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch},
    time::MissedTickBehavior,
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use crate::{Chunk, File, inhabited::next_piece, tunnel::Tunnels};

/// Read of an open standard input at a time.
const PIECE_BYTES: usize = 32 << 10;
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
    NotAs(UserFailure),
    Put,
    Files(Vec<File>),
    FileFailed(FileFailure),
    Hello(Hello),
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
    /// How much more of an open standard input may be sent.
    credit: Option<Arc<Semaphore>>,
    /// Where output goes as it comes. The guest sends no more than its window before it hears of
    /// credit, so this cannot grow.
    chunks: Option<mpsc::UnboundedSender<Chunk>>,
}

/// What differs between the ways to a guest.
#[derive(Debug, Default)]
pub(crate) struct StreamSettings {
    /// Say that we live, this often; never when `None`.
    pub(crate) ping_every: Option<Duration>,
    /// Forwarded ports and the sockets here that they lead to, for guests that tunnel.
    pub(crate) forwards: HashMap<u16, PathBuf>,
}

/// Bytes to write. A bulk frame holds its share of the queue until it is written.
#[derive(Debug)]
pub(crate) struct Outgoing {
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
    tunnels: Tunnels,
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

impl Outgoing {
    pub(crate) fn send(
        queue: &mpsc::UnboundedSender<Self>,
        frame: &Frame,
        room: Option<OwnedSemaphorePermit>,
    ) {
        // Every body is within the limit: chunks are cut by us, requests are checked.
        if let Ok(bytes) = frame.encode() {
            let _ = queue.send(Self { bytes, _room: room });
        }
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
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
        settings: StreamSettings,
        tasks: &TaskTracker,
    ) -> (Self, oneshot::Receiver<Answer>) {
        let (sender, hello) = oneshot::channel();
        let mut operations = Operations::default();
        operations.open.insert(
            0,
            Operation {
                partial: Partial::default(),
                sender,
                credit: None,
                chunks: None,
            },
        );
        let (queue, outgoing) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            operations: Mutex::new(operations),
            goodbye: watch::channel(None).0,
            tunnels: Tunnels::new(
                settings.forwards,
                queue.clone(),
                tasks.clone(),
                stop.clone(),
            ),
        });
        tasks.spawn(carry(
            Arc::clone(&shared),
            reader,
            writer,
            outgoing,
            settings.ping_every,
            stop.clone(),
        ));
        let stream = Self {
            shared,
            queue,
            room: Arc::new(Semaphore::new(QUEUE_BYTES_MAX)),
            next_id: AtomicU32::new(1),
            _stop: stop.drop_guard(),
        };
        (stream, hello)
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
        Outgoing::send(&self.queue, frame, room);
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

    fn begin(
        &self,
        streamed: Option<(mpsc::UnboundedSender<Chunk>, Arc<Semaphore>)>,
    ) -> Result<(Cancel<'_>, oneshot::Receiver<Answer>), Broken> {
        let (chunks, credit) = streamed.unzip();
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
                credit,
                chunks,
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

    /// Sends a request and its standard input; `None` when all of it is on its way.
    async fn ask(
        &self,
        id: u32,
        request: &ExecRequest,
        stdin: &mut (dyn AsyncRead + Send + Unpin),
    ) -> Option<Answer> {
        let frame = Frame::json(Kind::Exec, id, request);
        if frame.body.len() > BODY_BYTES_MAX {
            return Some(Answer::NotRunnable(format!(
                "its arguments and environment are over {BODY_BYTES_MAX} bytes"
            )));
        }
        self.push(&frame, None);
        let mut piece = Vec::new();
        loop {
            if let Err(error) = next_piece(stdin, &mut piece, CHUNK_BYTES).await {
                return Some(Answer::NotRunnable(format!(
                    "reading its standard input here: {error}"
                )));
            }
            if piece.is_empty() {
                break;
            }
            self.push_bulk(Kind::Stdin, id, &piece).await;
        }
        self.push(&Frame::new(Kind::Run, id, Vec::new()), None);
        None
    }

    /// Runs a process. Dropping the future kills it.
    pub(crate) async fn exec(&self, request: &ExecRequest, stdin: &[u8]) -> Result<Answer, Broken> {
        let (cancel, mut receiver) = self.begin(None)?;
        let mut stdin = stdin;
        // It may fail before its input is complete (no memory left for it).
        tokio::select! {
            biased;
            early = self.ask(cancel.id, request, &mut stdin) => if let Some(answer) = early {
                return Ok(answer);
            },
            answer = &mut receiver => return self.finished(cancel, answer),
        }
        let answer = receiver.await;
        self.finished(cancel, answer)
    }

    /// Runs a process and hands its output out. Dropping the future kills it.
    pub(crate) async fn exec_streaming(
        &self,
        request: &ExecRequest,
        stdin: &mut (dyn AsyncRead + Send + Unpin),
        chunks: &mpsc::Sender<Chunk>,
    ) -> Result<Answer, Broken> {
        let (sender, mut arrived) = mpsc::unbounded_channel();
        let credit = Arc::new(Semaphore::new(WINDOW_BYTES));
        let (cancel, receiver) = self.begin(Some((sender, Arc::clone(&credit))))?;
        // Its standard input is what comes after it began.
        if let Some(answer) = self.ask(cancel.id, request, &mut tokio::io::empty()).await {
            return Ok(answer);
        }
        let take = async {
            // Ends with the operation, which holds the sender.
            while let Some(chunk) = arrived.recv().await {
                let (Chunk::Stdout(bytes) | Chunk::Stderr(bytes)) = &chunk;
                let credit = encode_count(bytes.len());
                // Nobody there any more: the rest is thrown away.
                let _ = chunks.send(chunk).await;
                self.push(&Frame::new(Kind::Credit, cancel.id, credit), None);
            }
            receiver.await
        };
        let answer = tokio::select! {
            answer = take => answer,
            never = self.give(cancel.id, stdin, &credit) => match never {},
        };
        self.finished(cancel, answer)
    }

    /// Sends standard input as the process takes it. It may end before; then nobody takes it.
    async fn give(
        &self,
        id: u32,
        stdin: &mut (dyn AsyncRead + Send + Unpin),
        credit: &Semaphore,
    ) -> std::convert::Infallible {
        let mut piece = vec![0; PIECE_BYTES];
        // Never closed, and a piece is smaller than the window.
        while let Ok(mut room) = credit.acquire_many(PIECE_BYTES as u32).await {
            // A source that fails is one that ends.
            let count = stdin.read(&mut piece).await.unwrap_or(0);
            if count == 0 {
                break;
            }
            if let Some(used) = room.split(count) {
                used.forget();
            }
            let bytes = piece.get(..count).unwrap_or_default().to_vec();
            self.push(&Frame::new(Kind::Stdin, id, bytes), None);
        }
        self.push(&Frame::new(Kind::StdinEnd, id, Vec::new()), None);
        std::future::pending().await
    }

    fn finished(
        &self,
        mut cancel: Cancel<'_>,
        answer: Result<Answer, oneshot::error::RecvError>,
    ) -> Result<Answer, Broken> {
        cancel.armed = false;
        answer.map_err(|_| self.broken())
    }

    /// Writes files, in order; the first failure is the answer.
    pub(crate) async fn put(&self, files: &[File]) -> Result<Answer, Broken> {
        use std::os::unix::ffi::OsStrExt;
        let mut begun = Vec::with_capacity(files.len());
        for file in files {
            let (cancel, receiver) = self.begin(None)?;
            let body = encode_path(u64::from(file.mode), file.path.as_os_str().as_bytes());
            self.push(&Frame::new(Kind::Put, cancel.id, body), None);
            self.push_bulk(Kind::PutData, cancel.id, &file.content)
                .await;
            self.push(&Frame::new(Kind::PutEnd, cancel.id, Vec::new()), None);
            begun.push((cancel, receiver));
        }
        for (cancel, receiver) in begun {
            let answer = receiver.await;
            match self.finished(cancel, answer)? {
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
        let (cancel, receiver) = self.begin(None)?;
        let body = encode_path(bytes_max, path.as_os_str().as_bytes());
        self.push(&Frame::new(Kind::Get, cancel.id, body), None);
        let answer = receiver.await;
        self.finished(cancel, answer)
    }
}

/// Reads and writes until the stream breaks or we stop.
async fn carry(
    shared: Arc<Shared>,
    reader: impl AsyncRead + Send + Unpin,
    writer: impl AsyncWrite + Send + Unpin,
    outgoing: mpsc::UnboundedReceiver<Outgoing>,
    ping_every: Option<Duration>,
    stop: CancellationToken,
) {
    tokio::select! {
        () = read(&shared, reader) => {}
        () = write(writer, outgoing, ping_every) => {}
        () = stop.cancelled() => {}
    }
    // Connections through the tunnel end with the stream.
    stop.cancel();
    let mut operations = shared.operations();
    operations.broken = true;
    // Dropping the senders tells everybody who waits.
    operations.open.clear();
}

async fn write(
    mut writer: impl AsyncWrite + Unpin,
    mut outgoing: mpsc::UnboundedReceiver<Outgoing>,
    ping_every: Option<Duration>,
) {
    let ping = Frame::new(Kind::Ping, 0, Vec::new()).encode();
    let ping = ping.unwrap_or_default();
    // A year is never.
    let every = ping_every.unwrap_or(Duration::from_secs(365 * 24 * 3600));
    let mut pings = tokio::time::interval(every);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pings.reset();
    loop {
        let written = tokio::select! {
            next = outgoing.recv() => match next {
                Some(next) => writer.write_all(&next.bytes).await,
                None => break,
            },
            _ = pings.tick() => writer.write_all(&ping).await,
        };
        let flushed = match written {
            Ok(()) if outgoing.is_empty() => writer.flush().await,
            other => other,
        };
        if flushed.is_err() {
            break;
        }
    }
    // The reading side will see the end, after whatever was said before it.
    std::future::pending::<()>().await;
}

async fn read(shared: &Arc<Shared>, mut reader: impl AsyncRead + Unpin) {
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
    if matches!(
        frame.kind,
        Kind::TunnelOpen
            | Kind::TunnelData
            | Kind::TunnelShut
            | Kind::TunnelClose
            | Kind::TunnelCredit
    ) {
        return shared.tunnels.hear(frame);
    }
    let mut operations = shared.operations();
    let Some(operation) = operations.open.get_mut(&frame.id) else {
        return Ok(());
    };
    let partial = &mut operation.partial;
    let answer = match frame.kind {
        Kind::Stdout | Kind::Stderr if operation.chunks.is_some() => {
            let chunk = match frame.kind {
                Kind::Stdout => Chunk::Stdout(frame.body),
                _ => Chunk::Stderr(frame.body),
            };
            if let Some(chunks) = &operation.chunks {
                let _ = chunks.send(chunk);
            }
            return Ok(());
        }
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
        Kind::StdinCredit => {
            let bytes = decode_count(&frame.body).map_err(parsed)?;
            if bytes > WINDOW_BYTES {
                return Err(format!("a credit of {bytes} bytes, more than the window"));
            }
            if let Some(credit) = &operation.credit {
                credit.add_permits(bytes);
            }
            return Ok(());
        }
        Kind::Exited => Answer::Exited {
            exited: frame.parse().map_err(parsed)?,
            stdout: std::mem::take(&mut partial.stdout),
            stderr: std::mem::take(&mut partial.stderr),
        },
        Kind::ExecFailed => Answer::NotRunnable(text(&frame)),
        Kind::UserFailed => Answer::NotAs(frame.parse().map_err(parsed)?),
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
            Answer::Hello(hello)
        }
        other => return Err(format!("unexpected frame {other:?}")),
    };
    if let Some(operation) = operations.open.remove(&frame.id) {
        let _ = operation.sender.send(answer);
    }
    Ok(())
}
