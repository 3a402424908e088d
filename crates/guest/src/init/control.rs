//! The stream to the host: frames in, frames out, neither ever waited for.

use std::{
    collections::VecDeque,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
};

use rustix::io::Errno;

use crate::protocol::{Decoder, Frame};

/// Both directions; they may be one socket or two pipes.
#[derive(Debug)]
pub(crate) struct Control {
    reader: OwnedFd,
    writer: OwnedFd,
    decoder: Decoder,
    outbox: VecDeque<Vec<u8>>,
    sent: usize,
    bytes: usize,
}

/// What reading gave.
#[derive(Debug)]
pub(super) enum Heard {
    Nothing,
    Bytes,
    Closed,
}

impl Control {
    /// Over a socket.
    pub(crate) fn of_socket(stream: &UnixStream) -> io::Result<Self> {
        Self::new(
            stream.as_fd().try_clone_to_owned()?,
            stream.as_fd().try_clone_to_owned()?,
        )
    }

    /// Over two descriptors, which must not be used by anybody else.
    pub(crate) fn new(reader: OwnedFd, writer: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&reader, true)?;
        rustix::io::ioctl_fionbio(&writer, true)?;
        Ok(Self {
            reader,
            writer,
            decoder: Decoder::default(),
            outbox: VecDeque::new(),
            sent: 0,
            bytes: 0,
        })
    }

    /// Both, for whoever closes everything else.
    pub(crate) fn descriptors(&self) -> [RawFd; 2] {
        [self.reader.as_raw_fd(), self.writer.as_raw_fd()]
    }

    pub(super) fn reader(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }

    /// The writing side, while something waits to be written.
    pub(super) fn writer(&self) -> Option<BorrowedFd<'_>> {
        (!self.outbox.is_empty()).then(|| self.writer.as_fd())
    }

    /// Bytes that wait to be written.
    pub(super) fn waiting_bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn send(&mut self, frame: &Frame) {
        // Bodies are made by us, in chunks: they fit.
        if let Ok(bytes) = frame.encode() {
            self.bytes += bytes.len();
            self.outbox.push_back(bytes);
        }
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        while let Some(first) = self.outbox.front() {
            match rustix::io::write(&self.writer, first.get(self.sent..).unwrap_or_default()) {
                Ok(count) => {
                    self.sent += count;
                    if self.sent == first.len() {
                        self.bytes -= self.sent;
                        self.sent = 0;
                        self.outbox.pop_front();
                    }
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Takes in what has come, once.
    pub(super) fn read(&mut self, scratch: &mut [u8]) -> io::Result<Heard> {
        match rustix::io::read(&self.reader, &mut *scratch) {
            Ok(0) => Ok(Heard::Closed),
            Ok(count) => {
                self.decoder.push(scratch.get(..count).unwrap_or_default());
                Ok(Heard::Bytes)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(Heard::Nothing),
            Err(error) if closed(&error.into()) => Ok(Heard::Closed),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn next_frame(&mut self) -> io::Result<Option<Frame>> {
        self.decoder.next_frame().map_err(io::Error::other)
    }
}

/// Whether an error means that the other side went.
pub(super) fn closed(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof
    )
}
