//! How many requests wait at a server: asked now and then, beside the requests themselves.
//!
//! | server | asked | what is read |
//! |---|---|---|
//! | vLLM | `/metrics` | `vllm:num_requests_waiting`, all engines of the server together |
//! | SGLang | `/v1/loads`, an older one `/get_load`, else `/metrics` | `num_waiting_reqs` of all ranks, `sglang:num_queue_reqs` |
//!
//! vLLM's `/load` is not asked: it counts requests that it has, not those that wait, and says 0
//! where counting is off.
//!
//! Invariants:
//! - A number is at most [`FAILURES_MAX`] + 1 rounds old; after that the engine cannot tell
//!   ([`UNKNOWN`]), which is logged once per change. A server that is slow because it is full keeps
//!   its last number for that long, so that it is not taken for an idle one.
//! - The asking task ends with the engine.
//!
//! Limits: one question every [`EVERY`] ([`EVERY_UNKNOWN`] once it cannot tell), each at most
//! [`TIMEOUT`] and [`BYTES_MAX`].

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde_json::Value;
use tokio::task::JoinSet;

use super::{Endpoint, Http};
use crate::{EngineError, Queue};

/// Between two questions: as often as the number of places is looked at.
pub const EVERY: Duration = Duration::from_secs(1);
/// Between two questions to a server that cannot tell: it may be started anew with other flags.
pub const EVERY_UNKNOWN: Duration = Duration::from_secs(30);
/// For one question.
pub const TIMEOUT: Duration = Duration::from_secs(2);
/// Rounds in a row without a number after which the last one counts no more.
pub const FAILURES_MAX: u32 = 3;
/// Of one reply; a server with many models has some 500 KB of metrics.
pub const BYTES_MAX: usize = 8 << 20;
/// The name of the mode of an engine that cannot tell its queue though its kind can.
pub const UNKNOWN: &str = "queue-unknown";

/// One way to ask.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Way {
    path: &'static str,
    read: fn(&str) -> Result<u64, String>,
}

/// How vLLM is asked.
pub(crate) const VLLM: &[Way] = &[Way {
    path: "/metrics",
    read: |text| metric(text, "vllm:num_requests_waiting"),
}];

/// How SGLang is asked; its metrics stand last because they are off by default.
pub(crate) const SGLANG: &[Way] = &[
    Way {
        path: "/v1/loads?include=core",
        read: loads,
    },
    Way {
        path: "/get_load",
        read: loads,
    },
    Way {
        path: "/metrics",
        read: |text| metric(text, "sglang:num_queue_reqs"),
    },
];

/// Asks one server on and on.
#[derive(Debug)]
pub(crate) struct Watch {
    known: Arc<Mutex<Known>>,
    /// It ends when this is dropped.
    _asks: JoinSet<()>,
}

#[derive(Debug, Default)]
struct Known {
    waiting: Option<u64>,
    failures: u64,
    /// Rounds without a number since the last one with.
    in_a_row: u32,
    unknown: bool,
}

impl Watch {
    /// Begins to ask. Must be called within a Tokio runtime.
    pub(crate) fn start(endpoint: &Endpoint, ways: &'static [Way]) -> Result<Self, EngineError> {
        // A client of its own: a question does not wait behind requests.
        let http = Http::limited(
            Endpoint {
                timeout: TIMEOUT,
                ..endpoint.clone()
            },
            BYTES_MAX,
        )?;
        let known = Arc::new(Mutex::new(Known::default()));
        let mut asks = JoinSet::new();
        asks.spawn(ask_on(http, ways, Arc::clone(&known)));
        Ok(Self { known, _asks: asks })
    }

    /// What is known now.
    pub(crate) fn queue(&self) -> Queue {
        let known = lock(&self.known);
        Queue {
            waiting: known.waiting,
            degraded: known.unknown.then_some(UNKNOWN),
            failures: known.failures,
        }
    }
}

fn lock(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn ask_on(http: Http, ways: &'static [Way], known: Arc<Mutex<Known>>) {
    // The way that worked last is asked first.
    let mut first = 0;
    loop {
        let mut reasons = Vec::new();
        let mut found = None;
        for at in (0..ways.len()).map(|step| (first + step) % ways.len()) {
            let Some(way) = ways.get(at) else { continue };
            match ask(&http, way).await {
                Ok(waiting) => {
                    (first, found) = (at, Some(waiting));
                    break;
                }
                Err(reason) => reasons.push(reason),
            }
        }
        let engine = &http.endpoint.url;
        let wait = {
            let mut known = lock(&known);
            match known.note(found) {
                Some(false) => tracing::info!(%engine, "the engine tells its queue again"),
                Some(true) => tracing::warn!(
                    %engine,
                    mode = UNKNOWN,
                    reasons = reasons.join("; "),
                    "the engine cannot tell how many requests wait: places to run do not adapt to it; \
                     start vLLM without --disable-log-stats, SGLang with --enable-metrics"
                ),
                None => {}
            }
            if known.unknown { EVERY_UNKNOWN } else { EVERY }
        };
        tokio::time::sleep(wait).await;
    }
}

impl Known {
    /// Takes in what a round found. Whether it cannot tell any more, or can again.
    fn note(&mut self, found: Option<u64>) -> Option<bool> {
        let before = self.unknown;
        match found {
            Some(_) => {
                self.waiting = found;
                self.in_a_row = 0;
                self.unknown = false;
            }
            None => {
                self.failures += 1;
                self.in_a_row = self.in_a_row.saturating_add(1);
                // Without any number before there is nothing to keep.
                if self.waiting.is_none() || self.in_a_row > FAILURES_MAX {
                    self.waiting = None;
                    self.unknown = true;
                }
            }
        }
        (self.unknown != before).then_some(self.unknown)
    }
}

async fn ask(http: &Http, way: &Way) -> Result<u64, String> {
    let (status, text) = http
        .text(way.path)
        .await
        .map_err(|error| error.to_string())?;
    if status != 200 {
        return Err(format!("{}: expected status 200, found {status}", way.path));
    }
    (way.read)(&text).map_err(|reason| format!("{}: {reason}", way.path))
}

/// The sum of a metric over all its labels.
fn metric(text: &str, name: &str) -> Result<u64, String> {
    let mut sum = None;
    for line in text.lines() {
        let Some(rest) = line.strip_prefix(name) else {
            continue;
        };
        // Labels hold blanks and braces only in quotes, and no value has a brace.
        let value = match rest.strip_prefix('{') {
            Some(labelled) => labelled.rsplit_once('}').map(|(_, value)| value),
            None => rest.starts_with(' ').then_some(rest),
        };
        // Another metric whose name begins alike.
        let Some(value) = value else { continue };
        let count = value
            .split_whitespace()
            .next()
            .and_then(|value| value.parse::<f64>().ok())
            .filter(|value| value.is_finite() && *value >= 0.0)
            .ok_or_else(|| format!("expected a count of {name}, found {line:?}"))?;
        // Counts of requests are far below what a f64 holds exactly.
        sum = Some(sum.unwrap_or(0_u64).saturating_add(count as u64));
    }
    sum.ok_or_else(|| format!("expected the metric {name}, found none"))
}

/// The sum of `num_waiting_reqs` over all ranks.
fn loads(text: &str) -> Result<u64, String> {
    let expected = "expected a list of loads with num_waiting_reqs";
    let reply: Value = serde_json::from_str(text)
        .map_err(|error| format!("{expected}, found no JSON ({error})"))?;
    let ranks = reply.get("loads").unwrap_or(&reply).as_array();
    let counts = ranks.filter(|ranks| !ranks.is_empty()).and_then(|ranks| {
        let count = |rank: &Value| rank["num_waiting_reqs"].as_u64();
        ranks.iter().map(count).sum::<Option<u64>>()
    });
    counts.ok_or_else(|| {
        let found: String = text.chars().take(200).collect();
        format!("{expected}, found {found}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_summed_over_its_labels_and_not_confused_with_others() {
        let name = "vllm:num_requests_waiting";
        let text = "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.\n\
             # TYPE vllm:num_requests_waiting gauge\n\
             vllm:num_requests_waiting{engine=\"0\",model_name=\"a} b\"} 3.0\n\
             vllm:num_requests_waiting{engine=\"1\",model_name=\"a} b\"} 4.0 1700000000\n\
             vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 7.0\n";
        assert_eq!(metric(text, name), Ok(7));
        assert_eq!(metric("vllm:num_requests_waiting 2\n", name), Ok(2));
        for bad in [
            "",
            "vllm:num_requests_waiting{a=\"b\"} NaN",
            "vllm:num_requests_waiting -1",
        ] {
            assert!(metric(bad, name).is_err(), "{bad}");
        }
    }

    #[test]
    fn loads_are_summed_over_ranks() {
        let new = r#"{"version": "0.5.9", "loads": [{"dp_rank": 0, "num_waiting_reqs": 2}, {"dp_rank": 1, "num_waiting_reqs": 5}]}"#;
        assert_eq!(loads(new), Ok(7));
        assert_eq!(loads(r#"[{"dp_rank": 0, "num_waiting_reqs": 1}]"#), Ok(1));
        for bad in [
            "[]",
            "{}",
            "x",
            r#"{"loads": [{"num_reqs": 1}]}"#,
            r#"[{"num_waiting_reqs": -1}]"#,
        ] {
            assert!(loads(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_last_number_is_kept_for_a_few_rounds_and_then_is_unknown() {
        let mut known = Known::default();
        assert_eq!(known.note(None), Some(true), "nothing to keep");
        assert_eq!(known.note(Some(9)), Some(false));
        for _ in 0..FAILURES_MAX {
            assert_eq!((known.note(None), known.waiting), (None, Some(9)));
        }
        assert_eq!((known.note(None), known.waiting), (Some(true), None));
        assert_eq!((known.note(None), known.failures), (None, 6));
        assert_eq!((known.note(Some(0)), known.waiting), (Some(false), Some(0)));
    }
}
