//! Chat Completions: from a request to a response.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, header};
use hyper::body::Incoming;
use record::Dialect;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use crate::attempt::{AttemptGuard, Place};
use crate::connection::Parked;
use crate::receive::{self, Share};
use crate::refusal::{Cause, Refusal};
use crate::registry::Found;
use crate::reply::{Delivery, ReplyBody};
use crate::route;
use crate::serve::{Shared, now_ms};
use crate::session::{AdmissionKind, Arrival, Outcome, Session};
use crate::work::{self, Work};

/// Bodies above this are parsed off the async workers.
const PARSE_INLINE_BYTES_MAX: usize = 64 << 10;

/// Answers one request. Never fails: what goes wrong is a response too.
pub(crate) async fn answer(
    shared: &Arc<Shared>,
    parked: &Arc<Parked>,
    request: Request<Incoming>,
) -> Response<ReplyBody> {
    let session = match find(shared, &request) {
        Ok(session) => session,
        Err(refusal) => {
            shared.metrics.refuse(refusal.cause);
            return refusal.response();
        }
    };
    match serve(shared, parked, &session, request).await {
        Ok(response) => response,
        Err(refusal) => {
            shared.metrics.refuse(refusal.cause);
            session.count_refused();
            refusal.response()
        }
    }
}

fn find(shared: &Shared, request: &Request<Incoming>) -> Result<Arc<Session>, Refusal> {
    let key = route::key(request.uri(), request.headers())
        .map_err(|message| Refusal::new(Cause::Unauthorized, message))?;
    match shared.registry.find(key) {
        Found::Open(session) => Ok(session),
        Found::Closed => Err(Refusal::new(
            Cause::Settled,
            "this rollout has ended: its record is complete and takes no further calls",
        )),
        Found::Unknown => Err(Refusal::new(Cause::Unauthorized, "no rollout has this key")),
    }
}

async fn serve(
    shared: &Arc<Shared>,
    parked: &Arc<Parked>,
    session: &Arc<Session>,
    request: Request<Incoming>,
) -> Result<Response<ReplyBody>, Refusal> {
    if shared.refusing.load(Ordering::Relaxed) {
        return Err(Refusal::new(
            Cause::ShuttingDown,
            "the gateway is going down",
        ));
    }
    let permit = Arc::clone(&shared.in_flight)
        .try_acquire_owned()
        .map_err(|_| {
            Refusal::new(
                Cause::InFlightMax,
                format!(
                    "{} requests are being served, which is the limit",
                    shared.config.calls_in_flight_max
                ),
            )
        })?;
    let (head, body) = request.into_parts();
    let mut share = Share::new(&shared.budget);
    let limit = Duration::from_secs(shared.config.body_timeout_s);
    let body = receive::read(body, shared.config.body_bytes_max, limit, &mut share).await?;
    let place = Arc::new(Place::new(shared, permit, share));
    let (request, chat) = if body.len() > PARSE_INLINE_BYTES_MAX {
        tokio::task::spawn_blocking(move || read_request(&body))
            .await
            .map_err(|_| Refusal::new(Cause::ShuttingDown, "the gateway is going down"))??
    } else {
        read_request(&body)?
    };
    check_ledger(shared).await?;
    let digest = wire::digest(Dialect::Chat, &request);
    let admission = session.admit(&Arrival {
        digest: &digest,
        says_retry: route::says_retry(&head.headers),
        stream: chat.stream,
        now_ms: now_ms(),
    })?;
    let delivery = Delivery {
        attempt: AttemptGuard::new(
            Arc::clone(session),
            admission.index,
            admission.attempt,
            Arc::clone(&place),
        ),
        parked: Arc::clone(parked),
    };
    let (stream, include_usage) = (chat.stream, chat.include_usage);
    let count = |kind: &str| shared.metrics.retries.with_label_values(&[kind]).inc();
    let tell = match admission.kind {
        AdmissionKind::New(tell) => {
            shared.metrics.calls.inc();
            Some(tell)
        }
        AdmissionKind::AskAgain(tell) => {
            count("asked_again");
            Some(tell)
        }
        AdmissionKind::Joined => {
            count("joined");
            None
        }
        AdmissionKind::Replayed => {
            count("replayed");
            None
        }
    };
    if let Some(tell) = tell {
        let work = Work {
            index: admission.index,
            dialect: Dialect::Chat,
            digest,
            headers: route::kept_headers(&head.headers),
            request,
            chat,
        };
        let (shared_, session_) = (Arc::clone(shared), Arc::clone(session));
        shared.tasks.spawn(async move {
            work::run(&shared_, &session_, work, tell).await;
            drop(place);
        });
    }
    let outcome = outcome(Arc::clone(session), admission.outcome);
    Ok(if stream {
        respond_stream(shared, outcome, include_usage, delivery).await
    } else {
        respond_body(shared, outcome.await, delivery)
    })
}

fn read_request(body: &[u8]) -> Result<(Value, wire::chat::ChatRequest), Refusal> {
    let request: Value = serde_json::from_slice(body).map_err(|error| {
        Refusal::new(
            Cause::NotJson,
            format!("the request body is not JSON: {error}"),
        )
    })?;
    let chat = wire::chat::parse(&request)
        .map_err(|error| Refusal::new(Cause::BadRequest, error.to_string()))?;
    Ok((request, chat))
}

/// A ledger without space refuses calls before the engine works for nothing. A small write finds
/// out whether there is space again.
async fn check_ledger(shared: &Shared) -> Result<(), Refusal> {
    if !shared.ledger.is_full() {
        return Ok(());
    }
    shared
        .ledger
        .put_note("gateway.probe", now_ms().into())
        .await
        .map_err(|error| Refusal::new(Cause::LedgerFailed, error.to_string()))
}

/// Waits for what becomes of a call.
async fn outcome(session: Arc<Session>, mut told: watch::Receiver<Option<Outcome>>) -> Outcome {
    match told.wait_for(Option::is_some).await.as_deref() {
        Ok(Some(outcome)) => outcome.clone(),
        // The worker went without a word.
        _ => Err(Arc::new(session.refuse_abandoned())),
    }
}

fn respond_body(shared: &Shared, outcome: Outcome, delivery: Delivery) -> Response<ReplyBody> {
    match outcome {
        Ok(reply) => {
            let body = wire::chat::reply_body(&reply).to_string();
            let mut response = Response::new(ReplyBody::reply(Bytes::from(body), true, delivery));
            content_type(response.headers_mut(), "application/json");
            response
        }
        Err(refusal) => refuse(shared, &refusal, delivery),
    }
}

/// The response to an attempt whose call failed.
fn refuse(shared: &Shared, refusal: &Refusal, delivery: Delivery) -> Response<ReplyBody> {
    shared.metrics.refuse(refusal.cause);
    // The outcome was decided with the call: nothing hangs on this delivery.
    drop(delivery);
    refusal.response()
}

async fn respond_stream(
    shared: &Arc<Shared>,
    outcome: impl Future<Output = Outcome> + Send + 'static,
    include_usage: bool,
    delivery: Delivery,
) -> Response<ReplyBody> {
    let mut outcome = Box::pin(outcome);
    let patience = Duration::from_millis(shared.config.headers_after_ms);
    let body = match tokio::time::timeout(patience, outcome.as_mut()).await {
        Ok(Ok(reply)) => ReplyBody::reply(render(Ok(reply), include_usage), false, delivery),
        Ok(Err(refusal)) => return refuse(shared, &refusal, delivery),
        Err(_) => {
            let period = Duration::from_secs(shared.config.keep_alive_s);
            let mut keep_alive = tokio::time::interval_at(Instant::now() + period, period);
            keep_alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let shared = Arc::clone(shared);
            let counted = async move {
                let outcome = outcome.await;
                if let Err(refusal) = &outcome {
                    shared.metrics.refuse(refusal.cause);
                }
                outcome
            };
            ReplyBody::waiting(
                Box::pin(counted),
                keep_alive,
                include_usage,
                render,
                delivery,
            )
        }
    };
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    content_type(headers, "text/event-stream");
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

fn render(outcome: Outcome, include_usage: bool) -> Bytes {
    match outcome {
        Ok(reply) => Bytes::from(wire::chat::reply_events(&reply, include_usage).concat()),
        Err(refusal) => refusal.event(),
    }
}

fn content_type(headers: &mut HeaderMap, value: &'static str) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(value));
}
