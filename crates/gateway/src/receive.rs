//! Reading a request body within limits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};

use crate::refusal::{Cause, Refusal};

/// A body that is too large is read to its end without keeping it, up to this many times the
/// limit: a client that is still sending would see a reset connection instead of the 413.
const DISCARD_TIMES: usize = 4;

/// Room that is made for a body because a client announced one, before a byte of it has come.
const RESERVED_BYTES_MAX: usize = 256 << 10;

/// Bytes of bodies in memory, over all requests.
#[derive(Debug)]
pub(crate) struct Budget {
    used: AtomicUsize,
    max: usize,
}

impl Budget {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            used: AtomicUsize::new(0),
            max,
        })
    }
}

/// A share of the budget, given back when dropped.
#[derive(Debug)]
pub(crate) struct Share {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Share {
    pub(crate) fn new(budget: &Arc<Budget>) -> Self {
        Self {
            budget: Arc::clone(budget),
            bytes: 0,
        }
    }

    fn grow(&mut self, bytes: usize) -> bool {
        let grown = self
            .budget
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                let used = used.checked_add(bytes)?;
                (used <= self.budget.max).then_some(used)
            });
        if grown.is_ok() {
            self.bytes += bytes;
        }
        grown.is_ok()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Reads a body of at most `bytes_max` bytes within `limit`.
pub(crate) async fn read(
    body: Incoming,
    bytes_max: usize,
    limit: Duration,
    share: &mut Share,
) -> Result<Bytes, Refusal> {
    tokio::time::timeout(limit, read_unhurried(body, bytes_max, share))
        .await
        .unwrap_or_else(|_| {
            Err(Refusal::new(
                Cause::BodyIncomplete,
                format!(
                    "the request body did not arrive within {} s",
                    limit.as_secs()
                ),
            ))
        })
}

async fn read_unhurried(
    mut body: Incoming,
    bytes_max: usize,
    share: &mut Share,
) -> Result<Bytes, Refusal> {
    let announced = body.size_hint().lower();
    let too_large = || {
        Refusal::new(
            Cause::BodyTooLarge,
            format!("the request body is larger than {bytes_max} bytes"),
        )
    };
    let mut failure = (announced > bytes_max as u64).then(too_large);
    let likely = usize::try_from(announced).unwrap_or(usize::MAX);
    let mut kept = BytesMut::with_capacity(likely.min(RESERVED_BYTES_MAX));
    let mut total = 0_usize;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            Refusal::new(
                Cause::BodyIncomplete,
                format!("the request body broke off: {error}"),
            )
        })?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        total = total.saturating_add(data.len());
        if failure.is_none() && total > bytes_max {
            failure = Some(too_large());
        }
        if failure.is_none() && !share.grow(data.len()) {
            failure = Some(Refusal::new(
                Cause::BodiesFull,
                "too many request bodies are in memory: try again later",
            ));
        }
        match failure {
            None => kept.extend_from_slice(&data),
            Some(_) if total > bytes_max.saturating_mul(DISCARD_TIMES) => break,
            Some(_) => kept = BytesMut::new(),
        }
    }
    match failure {
        Some(failure) => Err(failure),
        None => Ok(kept.freeze()),
    }
}
