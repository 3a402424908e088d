//! The only way out: connections to a loopback port go to a unix socket of the host, the
//! gateway's first of all.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

use rustix::{
    event::PollFlags,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};

use crate::protocol::forward_path;

/// Connections at a time; more wait in the listen queue.
pub(super) const CONNECTIONS_MAX: usize = 256;
/// Bytes on their way in each direction of a connection.
const BUFFER_BYTES: usize = 64 << 10;
/// How long a gateway with a full queue is asked again before the connection is dropped.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_RETRY: Duration = Duration::from_millis(10);

/// A descriptor of the forwarder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Listener(usize),
    Inside(u64),
    Gateway(u64),
}

/// One direction.
#[derive(Debug, Default)]
struct Flow {
    buffer: Vec<u8>,
    sent: usize,
    /// The reading side has ended.
    ended: bool,
    /// The writing side knows.
    shut: bool,
}

impl Flow {
    fn wants_read(&self) -> bool {
        !self.ended && self.buffer.is_empty()
    }

    fn wants_write(&self) -> bool {
        !self.buffer.is_empty()
    }

    fn read(&mut self, from: &mut impl Read) -> io::Result<()> {
        if !self.wants_read() {
            return Ok(());
        }
        self.buffer.resize(BUFFER_BYTES, 0);
        let result = from.read(&mut self.buffer);
        self.buffer.truncate(*result.as_ref().unwrap_or(&0));
        match result {
            Ok(count) => {
                self.ended = count == 0;
                Ok(())
            }
            Err(error) => not_yet(error),
        }
    }

    fn write(&mut self, to: &mut impl Write) -> io::Result<()> {
        if self.wants_write() {
            match to.write(self.buffer.get(self.sent..).unwrap_or_default()) {
                Ok(count) => self.sent += count,
                Err(error) => return not_yet(error),
            }
            if self.sent == self.buffer.len() {
                self.buffer.clear();
                self.sent = 0;
            }
        }
        Ok(())
    }

    /// Whether the writing side must be told now.
    fn must_shut(&mut self) -> bool {
        let must = self.ended && self.buffer.is_empty() && !self.shut;
        self.shut |= must;
        must
    }
}

fn not_yet(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

#[derive(Debug)]
struct Connection {
    /// Which of the ports it came to.
    port: usize,
    inside: TcpStream,
    /// `None` until the gateway's queue has room.
    gateway: Option<UnixStream>,
    connect_until: Instant,
    up: Flow,
    down: Flow,
}

/// The listeners and their connections.
#[derive(Debug)]
pub(super) struct Forwarder {
    listeners: Vec<TcpListener>,
    connections: BTreeMap<u64, Connection>,
    next: u64,
}

/// Connects without waiting; `None` when the queue is full.
fn connect(port: usize) -> io::Result<Option<UnixStream>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(forward_path(port))?) {
        Ok(()) => Ok(Some(UnixStream::from(socket))),
        Err(rustix::io::Errno::AGAIN) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl Forwarder {
    pub(super) fn new(listeners: Vec<TcpListener>) -> Self {
        Self {
            listeners,
            connections: BTreeMap::new(),
            next: 0,
        }
    }

    /// Names each descriptor with what it waits for; one that waits for nothing is left out, or
    /// a closed peer would wake us for ever.
    pub(super) fn descriptors<'a>(&'a self, mut add: impl FnMut(Part, BorrowedFd<'a>, PollFlags)) {
        if self.connections.len() < CONNECTIONS_MAX {
            for (port, listener) in self.listeners.iter().enumerate() {
                add(Part::Listener(port), listener.as_fd(), PollFlags::IN);
            }
        }
        let flags = |read: bool, write: bool| {
            let read = if read {
                PollFlags::IN
            } else {
                PollFlags::empty()
            };
            read | if write {
                PollFlags::OUT
            } else {
                PollFlags::empty()
            }
        };
        for (id, connection) in &self.connections {
            let Some(gateway) = &connection.gateway else {
                continue;
            };
            let inside = flags(connection.up.wants_read(), connection.down.wants_write());
            if !inside.is_empty() {
                add(Part::Inside(*id), connection.inside.as_fd(), inside);
            }
            let outside = flags(connection.down.wants_read(), connection.up.wants_write());
            if !outside.is_empty() {
                add(Part::Gateway(*id), gateway.as_fd(), outside);
            }
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let waiting = self.connections.values().any(|c| c.gateway.is_none());
        waiting.then(|| Instant::now() + CONNECT_RETRY)
    }

    /// Asks a gateway whose queue was full again.
    pub(super) fn retry(&mut self, now: Instant) {
        self.connections.retain(|_, connection| {
            if connection.gateway.is_some() {
                return true;
            }
            match connect(connection.port) {
                Ok(gateway) => {
                    connection.gateway = gateway;
                    connection.gateway.is_some() || now < connection.connect_until
                }
                Err(_) => false,
            }
        });
    }

    pub(super) fn step(&mut self, part: Part, flags: PollFlags) {
        match part {
            Part::Listener(port) => self.accept(port),
            Part::Inside(id) | Part::Gateway(id) => {
                let Some(connection) = self.connections.get_mut(&id) else {
                    return;
                };
                if !connection.step(flags).unwrap_or(false) {
                    self.connections.remove(&id);
                }
            }
        }
    }

    fn accept(&mut self, port: usize) {
        let Some(listener) = self.listeners.get(port) else {
            return;
        };
        while self.connections.len() < CONNECTIONS_MAX {
            let Ok((inside, _)) = listener.accept() else {
                return;
            };
            let _ = inside.set_nodelay(true);
            // A gateway that is gone refuses; the client sees its connection closed.
            let Ok(gateway) = connect(port) else { continue };
            if inside.set_nonblocking(true).is_ok() {
                let connection = Connection {
                    port,
                    inside,
                    gateway,
                    connect_until: Instant::now() + CONNECT_TIMEOUT,
                    up: Flow::default(),
                    down: Flow::default(),
                };
                self.connections.insert(self.next, connection);
                self.next += 1;
            }
        }
    }
}

impl Connection {
    /// Moves what can be moved; whether the connection goes on.
    fn step(&mut self, flags: PollFlags) -> io::Result<bool> {
        let Some(gateway) = &mut self.gateway else {
            return Ok(true);
        };
        if flags.contains(PollFlags::NVAL) {
            return Ok(false);
        }
        self.up.read(&mut self.inside)?;
        self.up.write(gateway)?;
        self.down.read(gateway)?;
        self.down.write(&mut self.inside)?;
        if self.up.must_shut() {
            gateway.shutdown(Shutdown::Write)?;
        }
        if self.down.must_shut() {
            self.inside.shutdown(Shutdown::Write)?;
        }
        Ok(!(self.up.shut && self.down.shut))
    }
}
