//! Both outputs of a container come on one stream, in pieces with a header of 8 bytes: which
//! output, three zeroes, length (u32 BE). Standard output is the guest's control stream; standard
//! error is what it says when it cannot even start.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, ReadBuf};

/// Bytes of standard error that are kept: the first.
const COMPLAINT_BYTES_MAX: usize = 4 << 10;

/// What a container wrote to standard error.
pub(crate) type Complaint = Arc<Mutex<Vec<u8>>>;

/// Reads standard output.
#[derive(Debug)]
pub(crate) struct Demux<R> {
    inner: R,
    header: [u8; 8],
    header_bytes: usize,
    /// Of the current piece.
    left: usize,
    complaint: Complaint,
}

impl<R> Demux<R> {
    pub(crate) fn new(inner: R) -> (Self, Complaint) {
        let complaint = Complaint::default();
        let demux = Self {
            inner,
            header: [0; 8],
            header_bytes: 0,
            left: 0,
            complaint: Arc::clone(&complaint),
        };
        (demux, complaint)
    }
}

/// The text of a complaint.
pub(crate) fn complaint_text(complaint: &Complaint) -> Option<String> {
    let bytes = complaint.lock().unwrap_or_else(PoisonError::into_inner);
    let text = String::from_utf8_lossy(&bytes).trim().to_owned();
    (!text.is_empty()).then_some(text)
}

impl<R: AsyncRead + Unpin> AsyncRead for Demux<R> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if this.left == 0 {
                let start = this.header_bytes;
                let Some(rest) = this.header.get_mut(start..) else {
                    return Poll::Ready(Err(io::Error::other("a header that is too long")));
                };
                let mut buffer = ReadBuf::new(rest);
                ready!(Pin::new(&mut this.inner).poll_read(cx, &mut buffer))?;
                let count = buffer.filled().len();
                if count == 0 {
                    return Poll::Ready(Ok(()));
                }
                this.header_bytes += count;
                if this.header_bytes < 8 {
                    continue;
                }
                let [kind, 0, 0, 0, a, b, c, d] = this.header else {
                    return Poll::Ready(Err(io::Error::other(
                        "the engine's stream has no piece where one should begin",
                    )));
                };
                if kind > 2 {
                    return Poll::Ready(Err(io::Error::other(format!(
                        "the engine's stream has a piece of kind {kind}"
                    ))));
                }
                this.left = u32::from_be_bytes([a, b, c, d]) as usize;
                this.header_bytes = 0;
                continue;
            }
            if this.header.first() == Some(&2) {
                let mut space = [0; 1024];
                let room = this.left.min(space.len());
                let mut buffer = ReadBuf::new(space.get_mut(..room).unwrap_or_default());
                ready!(Pin::new(&mut this.inner).poll_read(cx, &mut buffer))?;
                let bytes = buffer.filled();
                if bytes.is_empty() {
                    return Poll::Ready(Ok(()));
                }
                this.left -= bytes.len();
                let mut kept = this
                    .complaint
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                let room = COMPLAINT_BYTES_MAX.saturating_sub(kept.len());
                kept.extend(bytes.iter().take(room));
                continue;
            }
            let mut space = [0; 16 << 10];
            let room = this.left.min(out.remaining()).min(space.len());
            let mut piece = ReadBuf::new(space.get_mut(..room).unwrap_or_default());
            ready!(Pin::new(&mut this.inner).poll_read(cx, &mut piece))?;
            out.put_slice(piece.filled());
            let count = piece.filled().len();
            this.left -= count;
            return Poll::Ready(Ok(()));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::AsyncReadExt;

    use super::*;

    proptest! {
        #[test]
        fn outputs_are_told_apart_wherever_the_stream_is_cut(
            pieces in prop::collection::vec(
                (1_u8..3, prop::collection::vec(any::<u8>(), 0..40)), 0..20),
            cut in 1_usize..50,
        ) {
            let mut wire = Vec::new();
            for (kind, bytes) in &pieces {
                wire.extend([*kind, 0, 0, 0]);
                wire.extend((bytes.len() as u32).to_be_bytes());
                wire.extend(bytes);
            }
            let of = |wanted: u8| -> Vec<u8> {
                pieces.iter().filter(|(kind, _)| *kind == wanted).flat_map(|(_, b)| b.clone()).collect()
            };
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let (out, complaint) = runtime.block_on(async {
                let (client, mut server) = tokio::io::duplex(cut);
                let (mut demux, complaint) = Demux::new(client);
                let send = async {
                    tokio::io::AsyncWriteExt::write_all(&mut server, &wire).await.expect("a pipe");
                    drop(server);
                };
                let mut out = Vec::new();
                let (_, read) = tokio::join!(send, demux.read_to_end(&mut out));
                read.expect("well-formed");
                (out, complaint)
            });
            prop_assert_eq!(out, of(1));
            let kept = complaint.lock().unwrap_or_else(PoisonError::into_inner).clone();
            prop_assert_eq!(kept, of(2));
        }
    }

    #[tokio::test]
    async fn what_is_no_stream_of_an_engine_is_an_error() {
        let (mut demux, _) = Demux::new(&b"HTTP/1.1 200 OK\r\n"[..]);
        let error = demux.read_to_end(&mut Vec::new()).await.unwrap_err();
        assert!(error.to_string().contains("no piece"), "{error}");
    }
}
