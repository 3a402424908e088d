//! Why a request is refused. Each cause has a name (metrics, logs), a status and a sentence.

use bytes::Bytes;
use http::{Response, StatusCode, header};
use record::Dialect;
use serde_json::Value;
use wire::ErrorKind;

use crate::reply::{ReplyBody, Shape};

/// Why a request got no answer of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// No key, an unknown one, or two different ones.
    Unauthorized,
    /// No such path.
    NotFound,
    /// The body is not JSON.
    NotJson,
    /// The body is JSON, but no request that can be served.
    BadRequest,
    /// The prompt does not fit.
    TooLong,
    /// Over `body_bytes_max`.
    BodyTooLarge,
    /// The body did not arrive in time or broke off.
    BodyIncomplete,
    /// Over `bodies_bytes_max`.
    BodiesFull,
    /// The rollout is settled or closed.
    Settled,
    /// Over the rollout's `calls_max`.
    CallsMax,
    /// Over the rollout's `generated_tokens_max`.
    TokensMax,
    /// Over the rollout's `seconds_max`.
    SecondsMax,
    /// Over `calls_in_flight_max`.
    InFlightMax,
    /// The engine's queue is full.
    EngineBusy,
    /// The engine failed.
    EngineFailed,
    /// The engine will never answer this request.
    EngineRefused,
    /// No client waited for the answer any more.
    Abandoned,
    /// Paused for longer than `pause_timeout_s`.
    Paused,
    /// The ledger cannot save.
    LedgerFailed,
    /// The gateway is going down.
    ShuttingDown,
}

impl Cause {
    /// Every cause, for the counters.
    pub const ALL: [Self; 20] = [
        Self::Unauthorized,
        Self::NotFound,
        Self::NotJson,
        Self::BadRequest,
        Self::TooLong,
        Self::BodyTooLarge,
        Self::BodyIncomplete,
        Self::BodiesFull,
        Self::Settled,
        Self::CallsMax,
        Self::TokensMax,
        Self::SecondsMax,
        Self::InFlightMax,
        Self::EngineBusy,
        Self::EngineFailed,
        Self::EngineRefused,
        Self::Abandoned,
        Self::Paused,
        Self::LedgerFailed,
        Self::ShuttingDown,
    ];

    /// The word used in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::NotFound => "not_found",
            Self::NotJson => "not_json",
            Self::BadRequest => "bad_request",
            Self::TooLong => "too_long",
            Self::BodyTooLarge => "body_too_large",
            Self::BodyIncomplete => "body_incomplete",
            Self::BodiesFull => "bodies_full",
            Self::Settled => "settled",
            Self::CallsMax => "calls_max",
            Self::TokensMax => "tokens_max",
            Self::SecondsMax => "seconds_max",
            Self::InFlightMax => "in_flight_max",
            Self::EngineBusy => "engine_busy",
            Self::EngineFailed => "engine_failed",
            Self::EngineRefused => "engine_refused",
            Self::Abandoned => "abandoned",
            Self::Paused => "paused",
            Self::LedgerFailed => "ledger_failed",
            Self::ShuttingDown => "shutting_down",
        }
    }

    /// What a dialect makes of it. A rollout that is over, or has used up a budget, is told so in
    /// the way on which harnesses stop ([`ErrorKind::Ended`]); engine failures are 503, which all
    /// retry, unless a repetition cannot help.
    #[must_use]
    pub fn kind(self) -> ErrorKind {
        match self {
            Self::Unauthorized => ErrorKind::Unauthorized,
            Self::NotFound => ErrorKind::NotFound,
            Self::NotJson | Self::BadRequest | Self::BodyIncomplete | Self::EngineRefused => {
                ErrorKind::InvalidRequest
            }
            Self::TooLong => ErrorKind::TooLong,
            Self::BodyTooLarge => ErrorKind::TooLarge,
            Self::Settled | Self::CallsMax | Self::TokensMax | Self::SecondsMax => ErrorKind::Ended,
            Self::InFlightMax | Self::EngineBusy => ErrorKind::RateLimit { retry_after_s: 1 },
            Self::BodiesFull
            | Self::EngineFailed
            | Self::Abandoned
            | Self::Paused
            | Self::LedgerFailed
            | Self::ShuttingDown => ErrorKind::Overloaded,
        }
    }
}

/// A refusal with the sentence that the client sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) cause: Cause,
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn new(cause: Cause, message: impl Into<String>) -> Self {
        Self {
            cause,
            message: message.into(),
        }
    }

    /// As a response.
    pub(crate) fn response(&self, dialect: Dialect) -> Response<ReplyBody> {
        let kind = self.cause.kind();
        let (status, mut body) = wire::dialect::error_body(dialect, &kind, &self.message);
        let budget = matches!(
            self.cause,
            Cause::CallsMax | Cause::TokensMax | Cause::SecondsMax
        );
        if budget
            && let Some(code @ (Value::String(_) | Value::Null)) = body.pointer_mut("/error/code")
        {
            *code = self.cause.name().into();
        }
        let mut response = Response::new(ReplyBody::text(Bytes::from(body.to_string())));
        *response.status_mut() =
            StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            header::HeaderValue::from_static("application/json"),
        );
        if !kind.retryable() {
            // The SDKs of OpenAI and Anthropic obey it, whatever the status.
            headers.insert("x-should-retry", header::HeaderValue::from_static("false"));
        }
        if let Some(seconds) = kind.retry_after_s() {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }

    /// As the last event of a stream that has begun.
    pub(crate) fn event(&self, shape: &Shape) -> Bytes {
        Bytes::from(wire::dialect::error_event(
            shape.dialect,
            &self.cause.kind(),
            &self.message,
            &shape.form,
        ))
    }
}
