//! Our side of the guest's tunnel: connections of the sandbox that travel as frames on its control
//! stream, each joined here with a connection to the socket behind its port, the gateway's first of all.

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use guest::protocol::{Frame, Kind, WINDOW_BYTES, decode_count, encode_count};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Semaphore, mpsc},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::stream::Outgoing;

/// Connections at a time; the guest has the same limit.
const CONNECTIONS_MAX: usize = 256;
/// How long a gateway with a full queue is asked again before the connection is dropped.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_RETRY: Duration = Duration::from_millis(10);
/// Read from the gateway at a time.
const PIECE_BYTES: usize = 32 << 10;

/// What the guest said about a connection.
#[derive(Debug)]
enum Said {
    Data(Vec<u8>),
    Shut,
}

#[derive(Debug)]
struct Open {
    /// The guest sends no more than its window before it hears of credit, so this cannot grow.
    said: mpsc::UnboundedSender<Said>,
    credit: Arc<Semaphore>,
    stop: CancellationToken,
}

/// The tunnelled connections of one sandbox.
#[derive(Debug)]
pub(crate) struct Tunnels {
    /// By port.
    sockets: HashMap<u16, PathBuf>,
    queue: mpsc::UnboundedSender<Outgoing>,
    tasks: TaskTracker,
    stop: CancellationToken,
    open: Arc<Mutex<HashMap<u32, Open>>>,
}

impl Tunnels {
    pub(crate) fn new(
        sockets: HashMap<u16, PathBuf>,
        queue: mpsc::UnboundedSender<Outgoing>,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        Self {
            sockets,
            queue,
            tasks,
            stop,
            open: Arc::default(),
        }
    }

    /// Takes in a frame of a connection. Frames of connections that are over are dropped.
    pub(crate) fn hear(&self, frame: Frame) -> Result<(), String> {
        let mut all = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if frame.kind == Kind::TunnelOpen {
            let port = decode_count(&frame.body).map_err(|e| e.to_string())?;
            let socket = u16::try_from(port)
                .ok()
                .and_then(|port| self.sockets.get(&port));
            let (Some(socket), false) = (socket, all.len() >= CONNECTIONS_MAX) else {
                let close = Frame::new(Kind::TunnelClose, frame.id, Vec::new());
                Outgoing::send(&self.queue, &close, None);
                return Ok(());
            };
            let (said, hears) = mpsc::unbounded_channel();
            let stop = self.stop.child_token();
            let credit = Arc::new(Semaphore::new(WINDOW_BYTES));
            all.insert(
                frame.id,
                Open {
                    said,
                    credit: Arc::clone(&credit),
                    stop: stop.clone(),
                },
            );
            let connection = Connection {
                id: frame.id,
                queue: self.queue.clone(),
                credit,
            };
            let (open, socket) = (Arc::clone(&self.open), socket.clone());
            self.tasks.spawn(async move {
                let id = connection.id;
                let carried = tokio::select! {
                    carried = connection.carry(&socket, hears) => carried,
                    () = stop.cancelled() => Ok(()),
                };
                if let Err(error) = carried {
                    tracing::debug!(%error, "a connection to the gateway broke");
                    connection.send(Kind::TunnelClose, Vec::new());
                }
                let mut all = open.lock().unwrap_or_else(PoisonError::into_inner);
                all.remove(&id);
            });
            return Ok(());
        }
        let Some(open) = all.get(&frame.id) else {
            return Ok(());
        };
        match frame.kind {
            Kind::TunnelData => {
                let _ = open.said.send(Said::Data(frame.body));
            }
            Kind::TunnelShut => {
                let _ = open.said.send(Said::Shut);
            }
            Kind::TunnelCredit => {
                let bytes = decode_count(&frame.body).map_err(|e| e.to_string())?;
                if bytes > WINDOW_BYTES {
                    return Err(format!("a credit of {bytes} bytes, more than the window"));
                }
                open.credit.add_permits(bytes);
            }
            _ => open.stop.cancel(),
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Connection {
    id: u32,
    queue: mpsc::UnboundedSender<Outgoing>,
    credit: Arc<Semaphore>,
}

impl Connection {
    fn send(&self, kind: Kind, body: Vec<u8>) {
        Outgoing::send(&self.queue, &Frame::new(kind, self.id, body), None);
    }

    async fn carry(&self, socket: &Path, hears: mpsc::UnboundedReceiver<Said>) -> io::Result<()> {
        let (reader, writer) = connect(socket).await?.into_split();
        tokio::try_join!(self.up(writer, hears), self.down(reader)).map(drop)
    }

    async fn up(
        &self,
        mut gateway: OwnedWriteHalf,
        mut hears: mpsc::UnboundedReceiver<Said>,
    ) -> io::Result<()> {
        while let Some(said) = hears.recv().await {
            match said {
                Said::Data(bytes) => {
                    gateway.write_all(&bytes).await?;
                    self.send(Kind::TunnelCredit, encode_count(bytes.len()));
                }
                Said::Shut => break,
            }
        }
        gateway.shutdown().await
    }

    async fn down(&self, mut gateway: OwnedReadHalf) -> io::Result<()> {
        let mut buffer = vec![0; PIECE_BYTES];
        loop {
            // Never closed, and a piece is smaller than the window.
            let room = self.credit.acquire_many(PIECE_BYTES as u32).await;
            let mut room = room.map_err(io::Error::other)?;
            let count = gateway.read(&mut buffer).await?;
            if count == 0 {
                self.send(Kind::TunnelShut, Vec::new());
                return Ok(());
            }
            if let Some(used) = room.split(count) {
                used.forget();
            }
            drop(room);
            let piece = buffer.get(..count).unwrap_or_default().to_vec();
            self.send(Kind::TunnelData, piece);
        }
    }
}

async fn connect(socket: &Path) -> io::Result<UnixStream> {
    let until = Instant::now() + CONNECT_TIMEOUT;
    loop {
        match UnixStream::connect(socket).await {
            // The queue is full: ask again.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                tokio::time::sleep(CONNECT_RETRY).await;
            }
            other => return other,
        }
    }
}
