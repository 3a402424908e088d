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
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

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
    write_timeout: Duration,
    /// Runs while a write waits.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> Tracked<S> {
    pub(crate) fn new(stream: S, write_timeout: Duration) -> (Self, Arc<Parked>) {
        let parked = Arc::<Parked>::default();
        (
            Self {
                stream,
                parked: Arc::clone(&parked),
                write_timeout,
                stalled: None,
            },
            parked,
        )
    }

    /// Turns a write that has waited for too long into an error.
    fn limited(
        &mut self,
        written: Poll<io::Result<usize>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let limit = self.write_timeout;
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        ready!(stalled.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
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
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limited(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.limited(written, context)
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

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn a_client_that_stops_reading_is_cut_off() {
        let (near, far) = tokio::io::duplex(4);
        let (mut tracked, _parked) = Tracked::new(near, Duration::from_millis(1));
        tracked.write_all(b"fits").await.unwrap();
        let error = tracked.write_all(b"does not").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(far);
    }
}
