//! The calls written last: what new calls are stored against.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use record::RolloutId;

use crate::source::Source;

/// Bytes of calls that are held. A rollout whose calls were dropped starts anew with a whole call.
pub(crate) const RECENT_BYTES_MAX: usize = 128 << 20;

/// Calls of one rollout that are held: parallel conversations each find their own.
const PER_ROLLOUT_MAX: usize = 8;

/// Longest chain of changes: a call is read from at most so many others. Then one is stored whole.
pub(crate) const CHAIN_MAX: u32 = 64;

/// A call that is in the database.
#[derive(Debug)]
pub(crate) struct Recent {
    /// Of its body.
    pub(crate) number: i64,
    /// Its call.
    pub(crate) call: u32,
    /// Bodies that it is read from, besides its own.
    pub(crate) chain: u32,
    /// Number of the body that this call only adds to: it need not be held any longer.
    pub(crate) extends: Option<i64>,
    pub(crate) source: Source,
}

#[derive(Debug, Default)]
struct Held {
    rollouts: HashMap<RolloutId, VecDeque<Arc<Recent>>>,
    /// Rollouts by last use.
    used: BTreeMap<u64, RolloutId>,
    used_at: HashMap<RolloutId, u64>,
    clock: u64,
    bytes: usize,
}

/// The calls written last.
#[derive(Debug, Default)]
pub(crate) struct Recents {
    held: Mutex<Held>,
}

impl Recents {
    /// The calls that are held of a rollout, oldest first.
    pub(crate) fn of(&self, rollout: &RolloutId) -> Vec<Arc<Recent>> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = held.rollouts.get(rollout);
        calls.into_iter().flatten().cloned().collect()
    }

    /// Holds a call that was committed.
    pub(crate) fn add(&self, rollout: &RolloutId, mut recent: Recent) {
        recent.source.strip();
        // Freeing a history takes a while: not under the lock.
        let mut dropped = Vec::new();
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.add(rollout, recent, &mut dropped);
        drop(held);
        drop(dropped);
    }

    /// Forgets a rollout.
    pub(crate) fn forget(&self, rollout: &RolloutId) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let dropped = held.forget(rollout);
        drop(held);
        drop(dropped);
    }
}

impl Held {
    fn add(&mut self, rollout: &RolloutId, recent: Recent, dropped: &mut Vec<Arc<Recent>>) {
        self.bytes += recent.source.bytes();
        let calls = self.rollouts.entry(rollout.clone()).or_default();
        let before = dropped.len();
        if let Some(extended) = recent.extends
            && let Some(at) = calls.iter().position(|call| call.number == extended)
        {
            dropped.extend(calls.remove(at));
        }
        calls.push_back(Arc::new(recent));
        if calls.len() > PER_ROLLOUT_MAX {
            dropped.extend(calls.pop_front());
        }
        for old in &dropped[before..] {
            self.bytes -= old.source.bytes();
        }
        self.clock += 1;
        if let Some(before) = self.used_at.insert(rollout.clone(), self.clock) {
            self.used.remove(&before);
        }
        self.used.insert(self.clock, rollout.clone());
        // First the older calls of everybody, then whole rollouts: one call each goes far.
        if self.bytes > RECENT_BYTES_MAX {
            for calls in self.rollouts.values_mut() {
                while calls.len() > 1
                    && let Some(old) = calls.pop_front()
                {
                    self.bytes -= old.source.bytes();
                    dropped.push(old);
                }
            }
        }
        while self.bytes > RECENT_BYTES_MAX
            && let Some((_, oldest)) = self.used.pop_first()
        {
            dropped.extend(self.forget(&oldest));
        }
    }

    fn forget(&mut self, rollout: &RolloutId) -> VecDeque<Arc<Recent>> {
        if let Some(at) = self.used_at.remove(rollout) {
            self.used.remove(&at);
        }
        let calls = self.rollouts.remove(rollout).unwrap_or_default();
        for old in &calls {
            self.bytes -= old.source.bytes();
        }
        calls
    }
}
