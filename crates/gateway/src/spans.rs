//! One OpenTelemetry span per call, in the conventions for generative models. Spans carry names,
//! numbers and ids, never text of a conversation, never a key.
//!
//! They go to the global tracer, which the program installs ([`crate::Config::spans`] says that it
//! did); without one nothing is built.

use std::time::SystemTime;

use opentelemetry::trace::{Span as _, SpanBuilder, SpanKind, Status, Tracer};
use opentelemetry::{Context, KeyValue, global};
use record::{FinishReason, Generation};

use crate::metrics::dialect_name;
use crate::refusal::Cause;
use crate::session::Session;
use crate::work::{Draft, Work};

/// The span of a call that has begun.
#[derive(Debug)]
pub(crate) struct Span {
    began: Option<SystemTime>,
}

impl Span {
    pub(crate) fn begin(wanted: bool) -> Self {
        Self {
            began: wanted.then(SystemTime::now),
        }
    }

    /// The engine has answered.
    pub(crate) fn answered(
        &self,
        session: &Session,
        work: &Work,
        draft: &Draft,
        generation: &Generation,
    ) {
        let Some(began) = self.began else { return };
        let finish = match generation.finish {
            FinishReason::Stop => "stop",
            FinishReason::Length | FinishReason::Context => "length",
        };
        let mut attributes = common(session, work, draft);
        attributes.extend([
            KeyValue::new(
                "gen_ai.response.finish_reasons",
                opentelemetry::Value::Array(vec![opentelemetry::StringValue::from(finish)].into()),
            ),
            KeyValue::new(
                "gen_ai.usage.output_tokens",
                count(generation.token_ids.len()),
            ),
            KeyValue::new(
                "gen_ai.usage.cache_read.input_tokens",
                i64::from(generation.cached_tokens),
            ),
        ]);
        if let Some(span) = generation.policy.last() {
            let version = i64::try_from(span.version).unwrap_or(i64::MAX);
            attributes.push(KeyValue::new("espalier.policy_version", version));
        }
        end(began, work, attributes, None);
    }

    /// There was no answer.
    pub(crate) fn failed(&self, session: &Session, work: &Work, draft: &Draft, cause: Cause) {
        let Some(began) = self.began else { return };
        let mut attributes = common(session, work, draft);
        attributes.push(KeyValue::new("error.type", cause.name()));
        end(began, work, attributes, Some(cause.name()));
    }
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn common(session: &Session, work: &Work, draft: &Draft) -> Vec<KeyValue> {
    let continuation = &draft.prompt.continuation;
    let sampling = &draft.sampling;
    vec![
        KeyValue::new("gen_ai.operation.name", "chat"),
        KeyValue::new("gen_ai.provider.name", "espalier"),
        KeyValue::new("gen_ai.request.model", work.model.clone()),
        KeyValue::new("gen_ai.request.max_tokens", i64::from(sampling.tokens_max)),
        KeyValue::new(
            "gen_ai.request.temperature",
            f64::from(sampling.temperature),
        ),
        KeyValue::new("gen_ai.request.top_p", f64::from(sampling.top_p)),
        KeyValue::new("gen_ai.usage.input_tokens", count(draft.prompt.ids.len())),
        KeyValue::new("gen_ai.conversation.id", session.spec.id.to_string()),
        KeyValue::new("espalier.call", i64::from(work.index)),
        KeyValue::new("espalier.harness", session.spec.harness.clone()),
        KeyValue::new("espalier.dialect", dialect_name(work.dialect)),
        KeyValue::new(
            "espalier.prompt.exact_tokens",
            i64::from(continuation.exact),
        ),
        KeyValue::new(
            "espalier.prompt.encoded_tokens",
            i64::from(continuation.encoded),
        ),
    ]
}

fn end(began: SystemTime, work: &Work, attributes: Vec<KeyValue>, error: Option<&'static str>) {
    let tracer = global::tracer("espalier.gateway");
    let builder = SpanBuilder::from_name(format!("chat {}", work.model))
        .with_kind(SpanKind::Server)
        .with_start_time(began)
        .with_attributes(attributes);
    let mut span = tracer.build_with_context(builder, &Context::new());
    if let Some(error) = error {
        span.set_status(Status::error(error));
    }
    span.end();
}
