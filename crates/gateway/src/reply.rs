//! Response bodies: a plain text, a reply, or a stream that waits for its reply and says so.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use record::Dialect;
use tokio::time::Interval;
use wire::{Form, Reply, dialect};

use crate::attempt::AttemptGuard;
use crate::connection::Parked;
use crate::session::Outcome;

/// The future that a stream waits for.
pub(crate) type Pending = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// How a reply to one request is written.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) dialect: Dialect,
    pub(crate) form: Form,
}

impl Shape {
    /// As one body.
    pub(crate) fn body(&self, reply: &Reply) -> Bytes {
        Bytes::from(dialect::reply_body(self.dialect, reply, &self.form).to_string())
    }

    /// As a stream that begins when the outcome is there. Whole texts are one delta: every
    /// client takes them, and fewer frames are cheaper for both sides.
    pub(crate) fn events(&self, outcome: &Outcome) -> Bytes {
        match outcome {
            Ok(reply) => {
                let frames = dialect::reply_events(self.dialect, reply, &self.form, usize::MAX);
                Bytes::from(frames.concat())
            }
            Err(refusal) => refusal.event(self),
        }
    }

    pub(crate) fn content_type(&self, stream: bool) -> &'static str {
        if stream && !self.form.json_list {
            "text/event-stream"
        } else {
            "application/json"
        }
    }
}

/// What a stream does until its reply is there.
struct Waiting {
    outcome: Pending,
    keep_alive: Interval,
    shape: Shape,
}

/// The attempt that a body belongs to, and where it parks when its last piece was taken.
#[derive(Debug)]
pub(crate) struct Delivery {
    pub(crate) attempt: AttemptGuard,
    pub(crate) parked: Arc<Parked>,
}

/// The body of every response to a harness.
pub(crate) struct ReplyBody {
    last: Option<Bytes>,
    /// Whether the length is told in a header. Event streams are sent in chunks.
    sized: bool,
    waiting: Option<Waiting>,
    delivery: Option<Delivery>,
}

impl std::fmt::Debug for ReplyBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReplyBody")
            .field("waiting", &self.waiting.is_some())
            .finish_non_exhaustive()
    }
}

impl ReplyBody {
    /// Content that is no reply of the model.
    pub(crate) fn text(content: Bytes) -> Self {
        Self {
            last: Some(content),
            sized: true,
            waiting: None,
            delivery: None,
        }
    }

    /// A reply, or the error in its place.
    pub(crate) fn reply(content: Bytes, sized: bool, delivery: Delivery) -> Self {
        Self {
            last: Some(content),
            sized,
            waiting: None,
            delivery: Some(delivery),
        }
    }

    /// A stream whose reply is not there yet.
    pub(crate) fn waiting(
        outcome: Pending,
        keep_alive: Interval,
        shape: Shape,
        delivery: Delivery,
    ) -> Self {
        Self {
            last: None,
            sized: false,
            waiting: Some(Waiting {
                outcome,
                keep_alive,
                shape,
            }),
            delivery: Some(delivery),
        }
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(waiting) = &mut self.waiting {
            match waiting.outcome.as_mut().poll(context) {
                Poll::Ready(outcome) => {
                    self.last = Some(waiting.shape.events(&outcome));
                    self.waiting = None;
                }
                Poll::Pending => {
                    // Not every client takes signs of life: some get early headers and silence.
                    let Some(sign) = dialect::keep_alive(waiting.shape.dialect) else {
                        return Poll::Pending;
                    };
                    return waiting
                        .keep_alive
                        .poll_tick(context)
                        .map(|_| Some(Ok(Frame::data(Bytes::from_static(sign.as_bytes())))));
                }
            }
        }
        let Some(last) = self.last.take() else {
            return Poll::Ready(None);
        };
        if let Some(Delivery { attempt, parked }) = self.delivery.take() {
            parked.park(attempt);
        }
        Poll::Ready(Some(Ok(Frame::data(last))))
    }

    fn is_end_stream(&self) -> bool {
        self.waiting.is_none() && self.last.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.last {
            Some(last) if self.sized => SizeHint::with_exact(last.len() as u64),
            _ => SizeHint::default(),
        }
    }
}
