//! Prometheus gauges of a run's rollouts: places, warm sandboxes, sandboxes alive, and the pace.
//! What each is called and counts stands in docs/rollouts.md.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use prometheus::{
    Encoder, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder, core::Collector,
};

use crate::{
    pace::Reason,
    shelf::{Dropped, Key},
};

/// Keys of warm sandboxes that have series of their own; further ones are shown together.
const KEYS_MAX: usize = 256;
/// The labels of those further ones.
const OTHER: [&str; 3] = ["other", "other", "other"];
const KEY_LABELS: [&str; 3] = ["image", "harness", "key"];

/// The stages that have places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// A sandbox is made.
    Create,
    /// The harness runs. Who waits here stands ready with its sandbox.
    Run,
    /// The verifier runs.
    Verify,
}

impl Stage {
    const ALL: [Self; 3] = [Self::Create, Self::Run, Self::Verify];

    fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Run => "run",
            Self::Verify => "verify",
        }
    }
}

/// One more, as long as this lives.
#[derive(Debug)]
pub(crate) struct Up(IntGauge);

impl Up {
    fn of(gauge: IntGauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// The gauges of one runner. Batches that it runs at the same time are added up.
#[derive(Debug)]
pub struct Gauges {
    /// `None` when the library refused a name, which a test would have seen.
    series: Option<Series>,
}

#[derive(Debug)]
struct Series {
    registry: Registry,
    limit: IntGaugeVec,
    used: IntGaugeVec,
    waiting: IntGaugeVec,
    sandboxes: IntGaugeVec,
    ready: IntGaugeVec,
    filling: IntGaugeVec,
    taken: IntCounterVec,
    missed: IntCounterVec,
    dropped: IntCounterVec,
    pace: IntGaugeVec,
    queue: IntGaugeVec,
    queue_failures: IntGauge,
    queue_degraded: IntGaugeVec,
    keys: Mutex<BTreeSet<Key>>,
}

impl Default for Gauges {
    fn default() -> Self {
        Self {
            series: Series::new().ok(),
        }
    }
}

impl Series {
    fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let opts = |name: &str, help: &str| Opts::new(format!("espalier_rollout_{name}"), help);
        fn known<C: Collector + Clone + 'static>(
            registry: &Registry,
            made: Result<C, prometheus::Error>,
        ) -> Result<C, prometheus::Error> {
            let made = made?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        }
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            known(&registry, IntGaugeVec::new(opts(name, help), labels))
        };
        let counters = |name: &str, help: &str, labels: &[&str]| {
            known(&registry, IntCounterVec::new(opts(name, help), labels))
        };
        let [image, harness, key] = KEY_LABELS;
        let series = Self {
            limit: gauges("places_limit", "Places of a stage.", &["stage"])?,
            used: gauges(
                "places_used",
                "Places of a stage that are taken.",
                &["stage"],
            )?,
            waiting: gauges(
                "places_waiting",
                "Rollouts that wait for a place of a stage.",
                &["stage"],
            )?,
            sandboxes: gauges(
                "sandboxes",
                "Sandboxes alive, warm ones included.",
                &["kind"],
            )?,
            ready: gauges(
                "warm_ready",
                "Warm sandboxes that wait for a rollout.",
                &KEY_LABELS,
            )?,
            filling: gauges("warm_filling", "Warm sandboxes being made.", &KEY_LABELS)?,
            taken: counters(
                "warm_taken_total",
                "Rollouts whose sandbox was warm.",
                &KEY_LABELS,
            )?,
            missed: counters(
                "warm_missed_total",
                "Rollouts that found no warm sandbox, by why.",
                &["reason"],
            )?,
            dropped: counters(
                "warm_dropped_total",
                "Warm sandboxes that no rollout used, by why.",
                &[image, harness, key, "reason"],
            )?,
            pace: gauges(
                "pace",
                "1 for what decided the number of places to run at the last look.",
                &["reason"],
            )?,
            queue: gauges(
                "engine_queue",
                "Calls that wait at the engine; no series when it cannot tell.",
                &[],
            )?,
            queue_failures: known(
                &registry,
                IntGauge::with_opts(opts(
                    "engine_queue_failures",
                    "Questions for the engine's queue that got no answer in form so far.",
                )),
            )?,
            queue_degraded: gauges(
                "engine_queue_degraded",
                "1 while the engine cannot tell its queue, by the name of that mode.",
                &["mode"],
            )?,
            keys: Mutex::default(),
            registry,
        };
        // What has not happened yet is 0, not absent.
        for stage in Stage::ALL {
            for gauge in [&series.limit, &series.used, &series.waiting] {
                gauge.with_label_values(&[stage.name()]);
            }
        }
        for reason in Reason::ALL {
            series.pace.with_label_values(&[reason.name()]);
        }
        Ok(series)
    }

    /// The labels of a key, which are few enough for a page.
    fn labels<'a>(&self, key: &'a Key) -> [&'a str; 3] {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if !keys.contains(key) {
            if keys.len() >= KEYS_MAX {
                return OTHER;
            }
            keys.insert(key.clone());
        }
        [&key.image, &key.harness, &key.digest]
    }
}

fn whole(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

impl Gauges {
    /// All of them in Prometheus' text form.
    #[must_use]
    pub fn text(&self) -> String {
        let Some(series) = &self.series else {
            return "# the gauges of rollouts could not be named\n".into();
        };
        let mut out = Vec::new();
        match TextEncoder::new().encode(&series.registry.gather(), &mut out) {
            Ok(()) => String::from_utf8_lossy(&out).into_owned(),
            Err(error) => format!("# {error}\n"),
        }
    }

    /// So many more places, or fewer.
    pub(crate) fn add_places(&self, stage: Stage, more: i64) {
        if let Some(series) = &self.series {
            series.limit.with_label_values(&[stage.name()]).add(more);
        }
    }

    /// Somebody has a place.
    pub(crate) fn using(&self, stage: Stage) -> Option<Up> {
        let series = self.series.as_ref()?;
        Some(Up::of(series.used.with_label_values(&[stage.name()])))
    }

    /// Somebody waits for a place.
    pub(crate) fn waiting(&self, stage: Stage) -> Option<Up> {
        let series = self.series.as_ref()?;
        Some(Up::of(series.waiting.with_label_values(&[stage.name()])))
    }

    /// A sandbox lives.
    pub(crate) fn sandbox(&self, kind: &str) -> Option<Up> {
        let kind = if kind.is_empty() { "unknown" } else { kind };
        let series = self.series.as_ref()?;
        Some(Up::of(series.sandboxes.with_label_values(&[kind])))
    }

    /// What was decided about the places to run, and why.
    pub(crate) fn paced(&self, reason: Reason) {
        let Some(series) = &self.series else { return };
        for each in Reason::ALL {
            let gauge = series.pace.with_label_values(&[each.name()]);
            gauge.set(i64::from(each == reason));
        }
    }

    /// What is known of the engine's queue.
    pub(crate) fn queue(&self, queue: engine::Queue) {
        let Some(series) = &self.series else { return };
        // What was known before is not claimed any more.
        series.queue.reset();
        series.queue_degraded.reset();
        if let Some(waiting) = queue.waiting {
            let waiting = i64::try_from(waiting).unwrap_or(i64::MAX);
            series.queue.with_label_values::<&str>(&[]).set(waiting);
        }
        if let Some(mode) = queue.degraded {
            series.queue_degraded.with_label_values(&[mode]).set(1);
        }
        let failures = i64::try_from(queue.failures).unwrap_or(i64::MAX);
        series.queue_failures.set(failures);
    }

    /// What stands on the shelf now.
    pub(crate) fn warm<'a>(&self, counts: impl Iterator<Item = (&'a Key, usize, usize)>) {
        let Some(series) = &self.series else { return };
        // Keys that are not on the shelf any more have none.
        series.ready.reset();
        series.filling.reset();
        for (key, ready, filling) in counts {
            let labels = series.labels(key);
            series.ready.with_label_values(&labels).add(whole(ready));
            series
                .filling
                .with_label_values(&labels)
                .add(whole(filling));
        }
    }

    /// A rollout took a warm sandbox.
    pub(crate) fn warm_taken(&self, key: &Key) {
        if let Some(series) = &self.series {
            series.taken.with_label_values(&series.labels(key)).inc();
        }
    }

    /// A rollout found none.
    pub(crate) fn warm_missed(&self, reason: &str) {
        if let Some(series) = &self.series {
            series.missed.with_label_values(&[reason]).inc();
        }
    }

    /// A warm sandbox was given up.
    pub(crate) fn warm_dropped(&self, key: &Key, why: Dropped) {
        if let Some(series) = &self.series {
            let [image, harness, digest] = series.labels(key);
            let labels = [image, harness, digest, why.name()];
            series.dropped.with_label_values(&labels).inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_every_gauge() {
        let gauges = Gauges::default();
        let key = Key {
            image: "default".into(),
            harness: "react".into(),
            digest: "3f2a".into(),
        };
        gauges.add_places(Stage::Create, 4);
        gauges.add_places(Stage::Run, 16);
        gauges.add_places(Stage::Run, -2);
        let _held = [gauges.using(Stage::Run), gauges.using(Stage::Run)];
        let _waits = gauges.waiting(Stage::Verify);
        let _alive = [gauges.sandbox("local"), gauges.sandbox("")];
        drop(gauges.sandbox("local"));
        gauges.paced(Reason::Memory);
        gauges.paced(Reason::Queue);
        gauges.warm([(&key, 3, 1)].into_iter());
        gauges.warm([(&key, 2, 1)].into_iter());
        gauges.warm_taken(&key);
        gauges.warm_missed("none_ready");
        for why in [Dropped::Old, Dropped::Dead, Dropped::Dead] {
            gauges.warm_dropped(&key, why);
        }
        gauges.queue(engine::Queue {
            waiting: None,
            degraded: Some("queue-unknown"),
            failures: 4,
        });
        insta::assert_snapshot!("unknown_queue", gauges.text());
        gauges.warm(std::iter::empty());
        gauges.queue(engine::Queue {
            waiting: Some(12),
            degraded: None,
            failures: 4,
        });
        let page = gauges.text();
        assert!(page.contains("espalier_rollout_engine_queue 12"), "{page}");
        assert!(!page.contains("queue-unknown") && !page.contains("warm_ready"));
    }

    #[test]
    fn very_many_keys_are_shown_together() {
        let gauges = Gauges::default();
        for number in 0..KEYS_MAX + 50 {
            let key = Key {
                image: "default".into(),
                harness: "react".into(),
                digest: format!("{number:04x}"),
            };
            gauges.warm_taken(&key);
        }
        let page = gauges.text();
        let lines = page
            .lines()
            .filter(|line| line.starts_with("espalier_rollout_warm_taken"));
        assert_eq!(lines.count(), KEYS_MAX + 1);
        let other = "{harness=\"other\",image=\"other\",key=\"other\"} 50";
        assert!(page.contains(other), "{page}");
    }
}
