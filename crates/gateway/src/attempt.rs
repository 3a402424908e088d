//! One try of a call, from its arrival until its outcome is in the ledger.

use std::sync::Arc;

use record::AttemptOutcome;
use tokio::sync::OwnedSemaphorePermit;

use crate::receive::Share;
use crate::serve::{Shared, now_ms};
use crate::session::Session;

/// What a request occupies while it is served.
#[derive(Debug)]
pub(crate) struct Place {
    shared: Arc<Shared>,
    _permit: OwnedSemaphorePermit,
    _bytes: Share,
}

impl Place {
    pub(crate) fn new(shared: &Arc<Shared>, permit: OwnedSemaphorePermit, bytes: Share) -> Self {
        shared.metrics.in_flight.inc();
        Self {
            shared: Arc::clone(shared),
            _permit: permit,
            _bytes: bytes,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.metrics.in_flight.dec();
    }
}

#[derive(Debug)]
struct Inner {
    session: Arc<Session>,
    index: u32,
    attempt: usize,
    place: Arc<Place>,
}

/// Stands for an attempt. Whatever happens to the future or the body that holds it: when it goes
/// without having been told otherwise, the client has gone.
#[derive(Debug)]
pub(crate) struct AttemptGuard {
    inner: Option<Inner>,
}

impl AttemptGuard {
    pub(crate) fn new(
        session: Arc<Session>,
        index: u32,
        attempt: usize,
        place: Arc<Place>,
    ) -> Self {
        Self {
            inner: Some(Inner {
                session,
                index,
                attempt,
                place,
            }),
        }
    }

    /// The last byte was handed to the kernel. Of no effect when the call had failed and the bytes
    /// were those of an error.
    pub(crate) fn sent(mut self) {
        self.finish(AttemptOutcome::Delivered);
    }

    fn finish(&mut self, outcome: AttemptOutcome) {
        let Some(Inner {
            session,
            index,
            attempt,
            place,
        }) = self.inner.take()
        else {
            return;
        };
        let shared = Arc::clone(&place.shared);
        let name = match outcome {
            AttemptOutcome::Delivered => "delivered",
            _ => "client_gone",
        };
        let decided = session.decide(index, attempt, outcome, now_ms());
        if decided {
            shared.metrics.attempts.with_label_values(&[name]).inc();
        }
        let task = {
            let shared = Arc::clone(&shared);
            async move {
                // Attempts that failed were decided, and saved, together with their call.
                if decided {
                    save(&shared, &session, index).await;
                }
                session.release(index);
                drop(place);
            }
        };
        shared.tasks.spawn_on(task, &shared.runtime);
    }
}

impl Drop for AttemptGuard {
    fn drop(&mut self) {
        self.finish(AttemptOutcome::ClientGone);
    }
}

async fn save(shared: &Shared, session: &Session, index: u32) {
    let writing = session.writing(index);
    let _in_order = writing.lock().await;
    // Not there yet: the call will be saved with the attempts as they are then.
    if !session.is_saved(index) {
        return;
    }
    let id = session.call_id(index);
    let attempts = session.attempts(index);
    if let Err(error) = shared.ledger.put_attempts(&id, &attempts).await {
        // The record keeps saying "client gone", which is what a crash would have left.
        tracing::warn!(call = %id, %error, "the outcome of a delivery was not saved");
    }
}
