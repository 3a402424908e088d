//! Prometheus counters of one gateway, in a registry of its own.

use prometheus::{
    Encoder, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder,
};
use record::Dialect;

use crate::refusal::Cause;

const STAGE_BUCKETS_S: [f64; 14] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 25.0, 100.0, 600.0,
];

#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) calls: IntCounter,
    pub(crate) attempts: IntCounterVec,
    pub(crate) retries: IntCounterVec,
    pub(crate) tokens: IntCounterVec,
    /// Encoded tokens of prompts by the cause for which they did not continue.
    pub(crate) encoded: IntCounterVec,
    pub(crate) echoes: IntCounterVec,
    pub(crate) shapes: IntCounterVec,
    pub(crate) parse_failures: IntCounter,
    pub(crate) memory_full: IntCounter,
    pub(crate) abandoned: IntCounter,
    pub(crate) edited: IntCounter,
    pub(crate) images: IntCounter,
    pub(crate) refused: IntCounterVec,
    pub(crate) engine_failures: IntCounterVec,
    pub(crate) in_flight: IntGauge,
    pub(crate) rollouts: IntGauge,
    pub(crate) connections: IntGauge,
    pub(crate) engine_requests: IntGauge,
    pub(crate) paused: IntGauge,
    pub(crate) policy_version: IntGauge,
    engine_up: IntGaugeVec,
    engine_in_flight: IntGaugeVec,
    engine_outages: IntGaugeVec,
    pub(crate) engine_degraded: IntCounterVec,
    calls_s: HistogramVec,
    pub(crate) render_s: Histogram,
    pub(crate) paused_s: Histogram,
    pub(crate) engine_s: Histogram,
    pub(crate) save_s: Histogram,
}

impl Metrics {
    pub(crate) fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let name = |name: &str| format!("espalier_gateway_{name}");
        let counter = |short: &str, help: &str| -> Result<IntCounter, prometheus::Error> {
            let counter = IntCounter::new(name(short), help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let counters = |short: &str, help: &str, label: &str, values: &[&str]| {
            let counters = IntCounterVec::new(Opts::new(name(short), help), &[label])?;
            registry.register(Box::new(counters.clone()))?;
            // A counter that has not counted yet is 0, not absent.
            for value in values {
                counters.with_label_values(&[*value]);
            }
            Ok::<_, prometheus::Error>(counters)
        };
        let gauge = |short: &str, help: &str| -> Result<IntGauge, prometheus::Error> {
            let gauge = IntGauge::new(name(short), help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let gauges = |short: &str, help: &str, label: &str| {
            let gauges = IntGaugeVec::new(Opts::new(name(short), help), &[label])?;
            registry.register(Box::new(gauges.clone()))?;
            Ok::<_, prometheus::Error>(gauges)
        };
        let calls_s = HistogramVec::new(
            HistogramOpts::new(
                name("call_seconds"),
                "Seconds from a call's admission to its reply or refusal, by dialect.",
            )
            .buckets(STAGE_BUCKETS_S.to_vec()),
            &["dialect"],
        )?;
        registry.register(Box::new(calls_s.clone()))?;
        let stages = HistogramVec::new(
            HistogramOpts::new(name("stage_seconds"), "Seconds of a call by stage.")
                .buckets(STAGE_BUCKETS_S.to_vec()),
            &["stage"],
        )?;
        registry.register(Box::new(stages.clone()))?;
        Ok(Self {
            calls: counter("calls_total", "Calls, retries not counted again.")?,
            attempts: counters(
                "attempts_total",
                "Attempts by outcome.",
                "outcome",
                &["delivered", "client_gone", "engine_failed", "too_long"],
            )?,
            retries: counters(
                "retries_total",
                "Attempts after the first of their call, by what was done.",
                "kind",
                &["joined", "asked_again", "replayed"],
            )?,
            tokens: counters(
                "tokens_total",
                "Tokens by origin.",
                "kind",
                &[
                    "prompt_exact",
                    "prompt_encoded",
                    "prompt_repaired",
                    "prompt_cached",
                    "generated",
                ],
            )?,
            encoded: counters(
                "encoded_tokens_total",
                "Tokens of prompts that were encoded, by why they did not continue.",
                "cause",
                &[
                    "first",
                    "new_messages",
                    "foreign_turn",
                    "other_root",
                    "no_exact_mode",
                ],
            )?,
            shapes: counters(
                "calls_by_shape_total",
                "Calls by what is seen of them at once; classes are told from the whole tree.",
                "shape",
                &["continued", "root", "root_without_tools", "compaction"],
            )?,
            echoes: counters(
                "echoes_total",
                "Assistant turns in requests, by whether they are ours.",
                "kind",
                &["matched", "foreign"],
            )?,
            parse_failures: counter(
                "parse_failures_total",
                "Generations whose reasoning or tool calls could not be parsed.",
            )?,
            memory_full: counter(
                "memory_full_total",
                "Calls that the rollout's memory could not take.",
            )?,
            abandoned: counter(
                "abandoned_total",
                "Generations cancelled because no client waited any more.",
            )?,
            edited: counter(
                "edited_total",
                "Attempts whose client had edited the history after it lost a reply.",
            )?,
            images: counter(
                "images_total",
                "Images in prompts that the model was told of instead of shown.",
            )?,
            refused: counters(
                "refused_total",
                "Refused requests by cause.",
                "cause",
                &Cause::ALL.map(Cause::name),
            )?,
            engine_failures: counters(
                "engine_failures_total",
                "Engine failures by kind.",
                "kind",
                &[
                    "busy",
                    "gone",
                    "invalid",
                    "no_script",
                    "timeout",
                    "bad_generation",
                ],
            )?,
            in_flight: gauge("requests_in_flight", "Requests with a key being served.")?,
            rollouts: gauge("rollouts_open", "Open rollouts.")?,
            connections: gauge("connections", "Open connections.")?,
            engine_requests: gauge("engine_requests", "Requests that the engine has now.")?,
            paused: gauge("paused", "Whether calls are held back from the engine.")?,
            policy_version: gauge("policy_version", "The weights that the next call sees.")?,
            engine_up: gauges(
                "engine_up",
                "Whether an engine of the pool is served.",
                "engine",
            )?,
            engine_in_flight: gauges(
                "engine_in_flight",
                "Requests that an engine of the pool has now.",
                "engine",
            )?,
            engine_degraded: counters(
                "engine_degraded_total",
                "Replies of an engine that did less than its kind can, by the name of that mode.",
                "mode",
                &[],
            )?,
            engine_outages: gauges(
                "engine_outages",
                "How often an engine of the pool was taken out.",
                "engine",
            )?,
            calls_s,
            paused_s: stages.with_label_values(&["paused"]),
            render_s: stages.with_label_values(&["render"]),
            engine_s: stages.with_label_values(&["engine"]),
            save_s: stages.with_label_values(&["save"]),
            registry,
        })
    }

    pub(crate) fn refuse(&self, cause: Cause) {
        self.refused.with_label_values(&[cause.name()]).inc();
    }

    pub(crate) fn call_took(&self, dialect: Dialect, seconds: f64) {
        self.calls_s
            .with_label_values(&[dialect_name(dialect)])
            .observe(seconds);
    }

    pub(crate) fn engines(&self, members: &[engine::Member]) {
        let set = |gauges: &IntGaugeVec, name: &str, value: u64| {
            gauges
                .with_label_values(&[name])
                .set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        for member in members {
            set(&self.engine_up, &member.name, u64::from(member.up));
            set(&self.engine_in_flight, &member.name, member.in_flight);
            set(&self.engine_outages, &member.name, member.outages);
        }
    }

    pub(crate) fn text(&self) -> String {
        let mut out = Vec::new();
        match TextEncoder::new().encode(&self.registry.gather(), &mut out) {
            Ok(()) => String::from_utf8_lossy(&out).into_owned(),
            Err(error) => format!("# {error}\n"),
        }
    }
}

/// The word used in metrics and spans.
pub(crate) fn dialect_name(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Chat => "chat",
        Dialect::Responses => "responses",
        Dialect::Messages => "messages",
        Dialect::Gemini => "gemini",
    }
}
