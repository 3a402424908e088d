//! Which warm sandboxes there are and which there should be. Pure: whoever holds it passes the time
//! in, and does what it says.
//!
//! Each sandbox has a [`Key`]: everything that is fixed when it is made. Jobs that wait in line are
//! *expected*, in their order; a job that was given out is *promised* one until it takes or goes
//! without. What is expected is filled up to [`Settings::per_key`] of each key and
//! [`Settings::total`] of all, nearest first; what neither waits nor is promised is surplus.
//!
//! Invariants (checked by the model in `tests`):
//! - A sandbox that was taken is never given out again, and each that was put in comes out once:
//!   taken, surplus or drained.
//! - Those that stand and those being made are together at most [`Settings::total`].
//! - None that is older than [`Settings::idle`] is taken.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// After the first failure of a key; each further one doubles it.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
/// Doublings at most: some five minutes.
const DOUBLINGS_MAX: u32 = 6;

/// How many sandboxes wait for a task (`[rollout.warm]`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Of each kind (image, harness, limits); 0: none are kept.
    pub per_key: usize,
    /// Of all kinds together, those being made counted; beside `concurrency` and `pools.ready`.
    pub total: usize,
    /// One that nobody took for so long is destroyed, in seconds; also how long those of the
    /// batch before wait for the next.
    pub idle_s: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            per_key: 0,
            total: 16,
            idle_s: 600,
        }
    }
}

impl Settings {
    /// Whether any are kept.
    #[must_use]
    pub fn on(&self) -> bool {
        self.per_key > 0 && self.total > 0
    }

    pub(crate) fn idle(&self) -> Duration {
        Duration::from_secs(self.idle_s)
    }
}

/// Everything of a sandbox that is fixed when it is made.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    /// For people and gauges; `default` when nobody names one.
    pub(crate) image: String,
    /// Likewise.
    pub(crate) harness: String,
    /// Over all of it.
    pub(crate) digest: String,
}

/// Why a warm sandbox was not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Dropped {
    /// It waited longer than [`Settings::idle_s`].
    Old,
    /// No job that comes next could use it.
    Unwanted,
    /// It did not answer when it was to be taken, or led to a gateway that is gone.
    Dead,
    /// This machine's memory ran low.
    Memory,
    /// It could not be made.
    NotMade,
}

impl Dropped {
    /// The word used in gauges and logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Old => "old",
            Self::Unwanted => "unwanted",
            Self::Dead => "dead",
            Self::Memory => "memory",
            Self::NotMade => "not_made",
        }
    }
}

/// Sandboxes of one key.
#[derive(Debug)]
struct Bin<T> {
    /// Oldest first, with when it was put in.
    ready: VecDeque<(Instant, T)>,
    filling: usize,
    /// Jobs that wait in line.
    waiting: usize,
    /// Jobs that were given out and have neither taken nor gone without.
    promised: usize,
    failures: u32,
    /// Not filled before.
    again: Option<Instant>,
}

impl<T> Default for Bin<T> {
    fn default() -> Self {
        Self {
            ready: VecDeque::new(),
            filling: 0,
            waiting: 0,
            promised: 0,
            failures: 0,
            again: None,
        }
    }
}

/// The shelf.
#[derive(Debug)]
pub(crate) struct Shelf<T> {
    settings: Settings,
    bins: BTreeMap<Key, Bin<T>>,
    /// Keys that are expected, nearest first.
    order: Vec<Key>,
    /// When what is expected is forgotten: the batch is over, and the next may not come.
    until: Option<Instant>,
}

impl<T> Shelf<T> {
    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            settings,
            bins: BTreeMap::new(),
            order: Vec::new(),
            until: None,
        }
    }

    /// Says which jobs wait, in their order. Replaces what was said before.
    pub(crate) fn expect(&mut self, keys: impl IntoIterator<Item = Key>) {
        self.forget();
        for key in keys {
            self.add(key, 1);
        }
    }

    /// The batch is over: the next one will look like it, if it comes within the idle time.
    pub(crate) fn rest(&mut self, now: Instant) {
        let keys = std::mem::take(&mut self.order);
        self.forget();
        for key in keys {
            self.add(key, self.settings.per_key);
        }
        self.until = Some(now + self.settings.idle());
    }

    fn add(&mut self, key: Key, count: usize) {
        self.bins.entry(key.clone()).or_default().waiting += count;
        if !self.order.contains(&key) {
            self.order.push(key);
        }
    }

    fn forget(&mut self) {
        self.order.clear();
        self.until = None;
        for bin in self.bins.values_mut() {
            bin.waiting = 0;
        }
    }

    /// A job was given out: it waits no more and is promised one.
    pub(crate) fn promise(&mut self, key: &Key) {
        let bin = self.bins.entry(key.clone()).or_default();
        bin.waiting = bin.waiting.saturating_sub(1);
        bin.promised += 1;
    }

    /// A job that was promised one took it, or does without.
    pub(crate) fn release(&mut self, key: &Key) {
        if let Some(bin) = self.bins.get_mut(key) {
            bin.promised = bin.promised.saturating_sub(1);
        }
    }

    /// A sandbox for a job, the oldest first. It is the caller's.
    pub(crate) fn take(&mut self, key: &Key, now: Instant) -> Option<T> {
        let idle = self.settings.idle();
        let bin = self.bins.get_mut(key)?;
        // Those that are too old stand first; they are surplus.
        let at = bin
            .ready
            .iter()
            .position(|(since, _)| now.duration_since(*since) < idle)?;
        bin.ready.remove(at).map(|(_, item)| item)
    }

    /// The key that is to be filled next, nearest first, counted as being filled; `None` when there
    /// are enough, `ending` counted that are being destroyed. Must be followed by [`Shelf::filled`].
    pub(crate) fn fill(&mut self, now: Instant, ending: usize) -> Option<Key> {
        if self.until.is_some_and(|until| now >= until) {
            self.forget();
        }
        let standing: usize = self.bins.values().map(Bin::standing).sum();
        if standing + ending >= self.settings.total {
            return None;
        }
        let mut room = self.settings.total;
        for key in &self.order {
            let Some(bin) = self.bins.get_mut(key) else {
                continue;
            };
            let target = bin.waiting.min(self.settings.per_key).min(room);
            room -= target;
            let may = bin.again.is_none_or(|again| now >= again);
            if may && bin.standing() < target {
                bin.filling += 1;
                return Some(key.clone());
            }
        }
        None
    }

    /// One was made, or could not be.
    pub(crate) fn filled(&mut self, key: &Key, now: Instant, made: Option<T>) {
        let bin = self.bins.entry(key.clone()).or_default();
        bin.filling = bin.filling.saturating_sub(1);
        match made {
            Some(item) => {
                bin.ready.push_back((now, item));
                (bin.failures, bin.again) = (0, None);
            }
            None => {
                let wait = AGAIN_AFTER * (1 << bin.failures.min(DOUBLINGS_MAX));
                bin.failures = bin.failures.saturating_add(1);
                bin.again = Some(now + wait);
            }
        }
    }

    /// Takes out what is too old, and what nobody who comes next can use.
    pub(crate) fn surplus(&mut self, now: Instant) -> Vec<(Key, T, Dropped)> {
        let idle = self.settings.idle();
        if self.until.is_some_and(|until| now >= until) {
            self.forget();
        }
        // Nearest first, as they are filled; those that are promised one keep it in any case.
        let mut room = self.settings.total;
        let mut kept: BTreeMap<&Key, usize> = BTreeMap::new();
        for key in &self.order {
            let waiting = self.bins.get(key).map_or(0, |bin| bin.waiting);
            let target = waiting.min(self.settings.per_key).min(room);
            room -= target;
            kept.insert(key, target);
        }
        let mut out = Vec::new();
        for (key, bin) in &mut self.bins {
            let most = kept.get(key).copied().unwrap_or(0) + bin.promised;
            while let Some((since, _)) = bin.ready.front() {
                let old = now.duration_since(*since) >= idle;
                if !old && bin.ready.len() <= most {
                    break;
                }
                let why = if old { Dropped::Old } else { Dropped::Unwanted };
                if let Some((_, item)) = bin.ready.pop_front() {
                    out.push((key.clone(), item, why));
                }
            }
        }
        // A run may see very many keys; those without anything are forgotten.
        let order = &self.order;
        self.bins.retain(|key, bin| {
            let resting = bin.again.is_some_and(|again| now < again);
            bin.standing() + bin.promised > 0 || resting || order.contains(key)
        });
        out
    }

    /// Takes everything out.
    pub(crate) fn drain(&mut self) -> Vec<(Key, T)> {
        let mut out = Vec::new();
        for (key, bin) in &mut self.bins {
            out.extend(bin.ready.drain(..).map(|(_, item)| (key.clone(), item)));
        }
        out
    }

    /// Those that stand ready and those being made, of each key.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (&Key, usize, usize)> {
        let bins = self.bins.iter();
        bins.map(|(key, bin)| (key, bin.ready.len(), bin.filling))
    }
}

impl<T> Bin<T> {
    fn standing(&self) -> usize {
        self.ready.len() + self.filling
    }
}

#[cfg(test)]
mod tests;
