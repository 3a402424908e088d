//! Prometheus counters of one gateway, in a registry of its own.

use prometheus::{
    Encoder, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts,
    Registry, TextEncoder,
};

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
    pub(crate) echoes: IntCounterVec,
    pub(crate) parse_failures: IntCounter,
    pub(crate) memory_full: IntCounter,
    pub(crate) refused: IntCounterVec,
    pub(crate) engine_failures: IntCounterVec,
    pub(crate) in_flight: IntGauge,
    pub(crate) rollouts: IntGauge,
    pub(crate) connections: IntGauge,
    pub(crate) render_s: Histogram,
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
                    "prompt_cached",
                    "generated",
                ],
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
            render_s: stages.with_label_values(&["render"]),
            engine_s: stages.with_label_values(&["engine"]),
            save_s: stages.with_label_values(&["save"]),
            registry,
        })
    }

    pub(crate) fn refuse(&self, cause: Cause) {
        self.refused.with_label_values(&[cause.name()]).inc();
    }

    pub(crate) fn text(&self) -> String {
        let mut out = Vec::new();
        match TextEncoder::new().encode(&self.registry.gather(), &mut out) {
            Ok(()) => String::from_utf8_lossy(&out).into_owned(),
            Err(error) => format!("# {error}\n"),
        }
    }
}
