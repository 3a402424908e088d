//! A socket that knows when a reply has really left.
//!
//! The HTTP library takes a body's last piece into its own buffer long before the kernel has it.
//! Here attempts whose last piece was taken are parked at the socket. The library flushes the
//! socket only with its own buffer empty, so a flush that succeeds means: the kernel has every
//! byte, the attempts parked so far are delivered. If the socket goes first, they are not.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::attempt::AttemptGuard;

/// Attempts whose last byte is on its way out of this connection.
#[derive(Debug, Default)]
pub(crate) struct Parked(Mutex<Vec<AttemptGuard>>);

impl Parked {
    pub(crate) fn park(&self, attempt: AttemptGuard) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(attempt);
    }

    fn take(&self) -> Vec<AttemptGuard> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[derive(Debug)]
pub(crate) struct Tracked<S> {
    stream: S,
    parked: Arc<Parked>,
}

impl<S> Tracked<S> {
    pub(crate) fn new(stream: S) -> (Self, Arc<Parked>) {
        let parked = Arc::<Parked>::default();
        (
            Self {
                stream,
                parked: Arc::clone(&parked),
            },
            parked,
        )
    }
}

impl<S> Drop for Tracked<S> {
    fn drop(&mut self) {
        // Guards that go without a word say "client gone".
        drop(self.parked.take());
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Tracked<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Tracked<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = ready!(Pin::new(&mut self.stream).poll_flush(context));
        for attempt in self.parked.take() {
            match result {
                Ok(()) => attempt.sent(),
                Err(_) => drop(attempt),
            }
        }
        Poll::Ready(result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
