//! The way to the gateway where no socket of the host can be put into the sandbox: connections to
//! a loopback port travel as frames on the control stream. Each direction of each connection has
//! [`WINDOW_BYTES`] of its own, so that one that nobody reads holds up nobody else.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::fd::{AsFd, BorrowedFd},
};

use rustix::event::PollFlags;

use crate::protocol::{Frame, Kind, ProtocolError, WINDOW_BYTES, decode_count, encode_count};

/// Connections at a time; more wait in the listen queue.
const CONNECTIONS_MAX: usize = 256;

/// A descriptor of the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Listener(usize),
    Connection(u32),
}

#[derive(Debug)]
struct Connection {
    inside: TcpStream,
    /// Bytes that may go to the host.
    credit: usize,
    up_ended: bool,
    /// Bytes from the host that the client has not taken.
    down: VecDeque<u8>,
    taken: usize,
    down_ended: bool,
    down_shut: bool,
}

/// The listeners and their connections.
#[derive(Debug)]
pub(super) struct Tunnel {
    listeners: Vec<(u16, TcpListener)>,
    connections: BTreeMap<u32, Connection>,
    next: u32,
}

impl Tunnel {
    pub(super) fn new(listeners: Vec<(u16, TcpListener)>) -> Self {
        Self {
            listeners,
            connections: BTreeMap::new(),
            next: 1,
        }
    }

    /// Names each descriptor with what it waits for.
    pub(super) fn descriptors<'a>(&'a self, mut add: impl FnMut(Part, BorrowedFd<'a>, PollFlags)) {
        if self.connections.len() < CONNECTIONS_MAX {
            for (index, (_, listener)) in self.listeners.iter().enumerate() {
                add(Part::Listener(index), listener.as_fd(), PollFlags::IN);
            }
        }
        for (id, connection) in &self.connections {
            let mut flags = PollFlags::empty();
            if connection.credit > 0 && !connection.up_ended {
                flags |= PollFlags::IN;
            }
            if !connection.down.is_empty() {
                flags |= PollFlags::OUT;
            }
            if !flags.is_empty() {
                add(Part::Connection(*id), connection.inside.as_fd(), flags);
            }
        }
    }

    /// A descriptor is ready; gives what the host must hear.
    pub(super) fn step(&mut self, part: Part, scratch: &mut [u8]) -> Vec<Frame> {
        let mut frames = Vec::new();
        match part {
            Part::Listener(index) => self.accept(index, &mut frames),
            Part::Connection(id) => {
                let Some(connection) = self.connections.get_mut(&id) else {
                    return frames;
                };
                if connection.step(id, scratch, &mut frames).is_err() {
                    frames.push(Frame::new(Kind::TunnelClose, id, Vec::new()));
                    self.connections.remove(&id);
                } else if connection.over() {
                    self.connections.remove(&id);
                }
            }
        }
        frames
    }

    /// The host said something about a connection.
    pub(super) fn hear(&mut self, frame: &Frame) -> Result<(), ProtocolError> {
        // Absent: it broke, and that was said.
        let Some(connection) = self.connections.get_mut(&frame.id) else {
            return Ok(());
        };
        match frame.kind {
            Kind::TunnelData => {
                connection.down.extend(&frame.body);
                if connection.down.len() > WINDOW_BYTES {
                    return Err(ProtocolError::Body(format!(
                        "more than {WINDOW_BYTES} bytes on their way in one connection"
                    )));
                }
            }
            Kind::TunnelShut => {
                connection.down_ended = true;
                connection.shut_when_empty();
                if connection.over() {
                    self.connections.remove(&frame.id);
                }
            }
            Kind::TunnelCredit => connection.credit += decode_count(&frame.body)?,
            _ => {
                self.connections.remove(&frame.id);
            }
        }
        Ok(())
    }

    fn accept(&mut self, index: usize, frames: &mut Vec<Frame>) {
        let Some((port, listener)) = self.listeners.get(index) else {
            return;
        };
        while self.connections.len() < CONNECTIONS_MAX {
            let Ok((inside, _)) = listener.accept() else {
                return;
            };
            let _ = inside.set_nodelay(true);
            if inside.set_nonblocking(true).is_err() {
                continue;
            }
            let id = self.next;
            self.next = self.next.wrapping_add(1);
            frames.push(Frame::new(
                Kind::TunnelOpen,
                id,
                encode_count(usize::from(*port)),
            ));
            self.connections.insert(
                id,
                Connection {
                    inside,
                    credit: WINDOW_BYTES,
                    up_ended: false,
                    down: VecDeque::new(),
                    taken: 0,
                    down_ended: false,
                    down_shut: false,
                },
            );
        }
    }
}

fn not_yet(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

impl Connection {
    fn over(&self) -> bool {
        self.up_ended && self.down_shut
    }

    fn shut_when_empty(&mut self) {
        if self.down_ended && self.down.is_empty() && !self.down_shut {
            self.down_shut = true;
            // A client that is gone has nothing to be told.
            let _ = self.inside.shutdown(Shutdown::Write);
        }
    }

    fn step(&mut self, id: u32, scratch: &mut [u8], frames: &mut Vec<Frame>) -> io::Result<()> {
        let room = self.credit.min(scratch.len());
        if room > 0 && !self.up_ended {
            match self
                .inside
                .read(scratch.get_mut(..room).unwrap_or_default())
            {
                Ok(0) => {
                    self.up_ended = true;
                    frames.push(Frame::new(Kind::TunnelShut, id, Vec::new()));
                }
                Ok(count) => {
                    self.credit -= count;
                    let body = scratch.get(..count).unwrap_or_default().to_vec();
                    frames.push(Frame::new(Kind::TunnelData, id, body));
                }
                Err(error) => not_yet(error)?,
            }
        }
        while !self.down.is_empty() {
            match self.inside.write(self.down.as_slices().0) {
                Ok(count) => {
                    self.down.drain(..count);
                    self.taken += count;
                }
                Err(error) => {
                    not_yet(error)?;
                    break;
                }
            }
        }
        if self.taken >= WINDOW_BYTES / 4 || (self.taken > 0 && self.down.is_empty()) {
            frames.push(Frame::new(Kind::TunnelCredit, id, encode_count(self.taken)));
            self.taken = 0;
        }
        self.shut_when_empty();
        Ok(())
    }
}
