//! From a request to a response, in any dialect.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, Request as HttpRequest, Response, header};
use hyper::body::Incoming;
use record::Dialect;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};
use wire::Target;

use crate::attempt::{AttemptGuard, Place};
use crate::connection::Parked;
use crate::prompt;
use crate::receive::{self, Share};
use crate::refusal::{Cause, Refusal};
use crate::registry::Found;
use crate::reply::{Delivery, ReplyBody, Shape};
use crate::route;
use crate::serve::{Shared, now_ms};
use crate::session::{AdmissionKind, Arrival, Asked, Outcome, Session};
use crate::work::{self, Work};

/// Bodies above this are parsed off the async workers.
const PARSE_INLINE_BYTES_MAX: usize = 64 << 10;

/// Answers one request for a reply of the model. Never fails: what goes wrong is a response too.
pub(crate) async fn answer(
    shared: &Arc<Shared>,
    parked: &Arc<Parked>,
    dialect: Dialect,
    target: Target,
    request: HttpRequest<Incoming>,
) -> Response<ReplyBody> {
    let session = match find(shared, &request) {
        Ok(session) => session,
        Err(refusal) => {
            shared.metrics.refuse(refusal.cause);
            return refusal.response(dialect);
        }
    };
    match serve(shared, parked, &session, dialect, target, request).await {
        Ok(response) => response,
        Err(refusal) => {
            shared.metrics.refuse(refusal.cause);
            session.count_refused();
            refusal.response(dialect)
        }
    }
}

/// Answers a request for the number of tokens that a call's prompt would have now. Not a call:
/// nothing is recorded, and none of the rollout's calls is used.
pub(crate) async fn count(
    shared: &Arc<Shared>,
    dialect: Dialect,
    target: Target,
    request: HttpRequest<Incoming>,
) -> Response<ReplyBody> {
    let counted = async {
        let session = find(shared, &request)?;
        let Received { request, .. } = receive(shared, dialect, target, request).await?;
        let request = with_history(&session, request)?;
        let tokens = prompt::count(shared, &session, request.conversation).await?;
        Ok(wire::dialect::count_body(dialect, tokens).unwrap_or_default())
    };
    match counted.await {
        Ok(body) => crate::serve::json_response(&body),
        Err(refusal) => {
            let refusal: Refusal = refusal;
            shared.metrics.refuse(refusal.cause);
            refusal.response(dialect)
        }
    }
}

fn find(shared: &Shared, request: &HttpRequest<Incoming>) -> Result<Arc<Session>, Refusal> {
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

/// A request that has arrived and was read.
struct Received {
    headers: HeaderMap,
    /// The body as it came.
    body: Value,
    request: wire::Request,
    digest: String,
    place: Arc<Place>,
}

async fn receive(
    shared: &Arc<Shared>,
    dialect: Dialect,
    target: Target,
    request: HttpRequest<Incoming>,
) -> Result<Received, Refusal> {
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
    let (body, request, digest) = if body.len() > PARSE_INLINE_BYTES_MAX {
        tokio::task::spawn_blocking(move || read_request(dialect, &body, &target))
            .await
            .map_err(|_| Refusal::new(Cause::ShuttingDown, "the gateway is going down"))??
    } else {
        read_request(dialect, &body, &target)?
    };
    Ok(Received {
        headers: head.headers,
        body,
        request,
        digest,
        place,
    })
}

/// Puts the history that a request only names before what it says.
fn with_history(session: &Session, mut request: wire::Request) -> Result<wire::Request, Refusal> {
    if let Some(id) = request.previous.take() {
        session
            .responses
            .prepend(&id, &mut request.conversation, request.instructed)
            .map_err(|message| Refusal::new(Cause::BadRequest, message))?;
    }
    Ok(request)
}

async fn serve(
    shared: &Arc<Shared>,
    parked: &Arc<Parked>,
    session: &Arc<Session>,
    dialect: Dialect,
    target: Target,
    request: HttpRequest<Incoming>,
) -> Result<Response<ReplyBody>, Refusal> {
    let Received {
        headers,
        body,
        request,
        place,
        digest,
    } = receive(shared, dialect, target, request).await?;
    let mut request = with_history(session, request)?;
    check_ledger(shared).await?;
    session.undo_edits(&mut request.conversation);
    let asked = Asked::of(&request);
    let conversation = Arc::new(request.conversation);
    let admission = session.admit(&Arrival {
        digest: &digest,
        conversation: &conversation,
        asked: &asked,
        says_retry: route::says_retry(&headers),
        stream: request.stream,
        now_ms: now_ms(),
    })?;
    if admission.edited {
        shared.metrics.edited.inc();
    }
    let delivery = Delivery {
        attempt: AttemptGuard::new(
            Arc::clone(session),
            admission.index,
            admission.attempt,
            Arc::clone(&place),
        ),
        parked: Arc::clone(parked),
    };
    let stream = request.stream;
    let compaction = request
        .form
        .compaction
        .as_ref()
        .is_some_and(|compaction| compaction.route);
    let shape = Shape {
        dialect,
        form: request.form.clone(),
    };
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
        let mut kept = route::kept_headers(&headers);
        if compaction {
            // The record has no paths, and this one says of which class the call is.
            kept.push((":path".to_owned(), "/responses/compact".to_owned()));
        }
        let work = Work {
            index: admission.index,
            dialect,
            digest,
            headers: kept,
            body,
            conversation: admission.conversation,
            sampling: request.sampling,
            model: request.model,
            instructed: request.instructed,
        };
        let (shared_, session_) = (Arc::clone(shared), Arc::clone(session));
        shared.tasks.spawn(async move {
            work::run(&shared_, &session_, work, tell).await;
            drop(place);
        });
    }
    let outcome = outcome(Arc::clone(session), admission.outcome);
    Ok(if stream {
        respond_stream(shared, outcome, shape, delivery).await
    } else {
        respond_body(shared, outcome.await, &shape, delivery)
    })
}

fn read_request(
    dialect: Dialect,
    body: &[u8],
    target: &Target,
) -> Result<(Value, wire::Request, String), Refusal> {
    let body: Value = serde_json::from_slice(body).map_err(|error| {
        Refusal::new(
            Cause::NotJson,
            format!("the request body is not JSON: {error}"),
        )
    })?;
    let request = wire::dialect::parse(dialect, &body, target)
        .map_err(|error| Refusal::new(Cause::BadRequest, error.to_string()))?;
    let mut digest = wire::digest(dialect, &body);
    if target.compact {
        // The path is a part of what is asked.
        digest = wire::digest(dialect, &serde_json::json!({"compact": digest}));
    }
    Ok((body, request, digest))
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

fn respond_body(
    shared: &Shared,
    outcome: Outcome,
    shape: &Shape,
    delivery: Delivery,
) -> Response<ReplyBody> {
    match outcome {
        Ok(reply) => {
            let mut response = Response::new(ReplyBody::reply(shape.body(&reply), true, delivery));
            content_type(response.headers_mut(), shape.content_type(false));
            response
        }
        Err(refusal) => refuse(shared, &refusal, shape, delivery),
    }
}

/// The response to an attempt whose call failed.
fn refuse(
    shared: &Shared,
    refusal: &Refusal,
    shape: &Shape,
    delivery: Delivery,
) -> Response<ReplyBody> {
    shared.metrics.refuse(refusal.cause);
    // The outcome was decided with the call: nothing hangs on this delivery.
    drop(delivery);
    refusal.response(shape.dialect)
}

async fn respond_stream(
    shared: &Arc<Shared>,
    outcome: impl Future<Output = Outcome> + Send + 'static,
    shape: Shape,
    delivery: Delivery,
) -> Response<ReplyBody> {
    let mut outcome = Box::pin(outcome);
    let kind = shape.content_type(true);
    let patience = Duration::from_millis(shared.config.headers_after_ms);
    let body = match tokio::time::timeout(patience, outcome.as_mut()).await {
        Ok(outcome @ Ok(_)) => ReplyBody::reply(shape.events(&outcome), false, delivery),
        Ok(Err(refusal)) => return refuse(shared, &refusal, &shape, delivery),
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
            ReplyBody::waiting(Box::pin(counted), keep_alive, shape, delivery)
        }
    };
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    content_type(headers, kind);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

fn content_type(headers: &mut HeaderMap, value: &'static str) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(value));
}
