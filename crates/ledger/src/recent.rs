//! The calls written last, in parts: what new calls are stored against.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use record::RolloutId;

use crate::body::{Parts, common};

/// Bytes of parts that are held. A rollout whose calls were dropped starts anew with a whole call.
pub(crate) const RECENT_BYTES_MAX: usize = 128 << 20;

/// Calls of one rollout that are held: parallel conversations each find their own.
const PER_ROLLOUT_MAX: usize = 8;

/// Longest chain of changes: a call is read from at most so many others. Then one is stored whole.
pub(crate) const CHAIN_MAX: u32 = 64;

/// A parent must have at least this share of a call, one in so many bytes, to be worth the tie.
const SHARE_MIN: usize = 4;

/// A call that is in the database.
#[derive(Debug)]
pub(crate) struct Recent {
    /// Of its body.
    pub(crate) number: i64,
    /// Its call.
    pub(crate) call: u32,
    /// Bodies that it is read from, besides its own.
    pub(crate) chain: u32,
    pub(crate) parts: Parts,
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
    /// The best parent for a call: the one it is said to carry on, else the one whose tokens it
    /// shares most.
    pub(crate) fn parent(
        &self,
        rollout: &RolloutId,
        said: Option<u32>,
        parts: &Parts,
    ) -> Option<Arc<Recent>> {
        let candidates: Vec<Arc<Recent>> = {
            let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
            held.rollouts.get(rollout)?.iter().cloned().collect()
        };
        let fits = |recent: &&Arc<Recent>| recent.chain < CHAIN_MAX;
        let named = said.and_then(|call| candidates.iter().rfind(|recent| recent.call == call));
        if let Some(named) = named.filter(fits)
            && worth_it(parts, &named.parts)
        {
            return Some(Arc::clone(named));
        }
        candidates
            .iter()
            .filter(fits)
            .max_by_key(|recent| (parts.tokens_shared(&recent.parts), recent.number))
            .filter(|recent| worth_it(parts, &recent.parts))
            .cloned()
    }

    /// A call that may share much though it differs early: the latest.
    pub(crate) fn latest(&self, rollout: &RolloutId) -> Option<Arc<Recent>> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let latest = held.rollouts.get(rollout)?.back().cloned();
        latest.filter(|recent| recent.chain < CHAIN_MAX)
    }

    /// Holds a call that was committed.
    pub(crate) fn add(&self, rollout: &RolloutId, recent: Recent) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let held = &mut *held;
        held.bytes += recent.parts.bytes();
        let calls = held.rollouts.entry(rollout.clone()).or_default();
        calls.push_back(Arc::new(recent));
        if calls.len() > PER_ROLLOUT_MAX
            && let Some(old) = calls.pop_front()
        {
            held.bytes -= old.parts.bytes();
        }
        held.clock += 1;
        if let Some(before) = held.used_at.insert(rollout.clone(), held.clock) {
            held.used.remove(&before);
        }
        held.used.insert(held.clock, rollout.clone());
        // First the older calls of everybody, then whole rollouts: one call each goes far.
        if held.bytes > RECENT_BYTES_MAX {
            for calls in held.rollouts.values_mut() {
                while calls.len() > 1
                    && let Some(old) = calls.pop_front()
                {
                    held.bytes -= old.parts.bytes();
                }
            }
        }
        while held.bytes > RECENT_BYTES_MAX
            && let Some((_, oldest)) = held.used.pop_first()
        {
            held.used_at.remove(&oldest);
            for old in held.rollouts.remove(&oldest).into_iter().flatten() {
                held.bytes -= old.parts.bytes();
            }
        }
    }

    /// Forgets a rollout.
    pub(crate) fn forget(&self, rollout: &RolloutId) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = held.used_at.remove(rollout) {
            held.used.remove(&at);
        }
        for old in held.rollouts.remove(rollout).into_iter().flatten() {
            held.bytes -= old.parts.bytes();
        }
    }
}

fn worth_it(parts: &Parts, parent: &Parts) -> bool {
    let whole = 4 * parts.prompt.len() + parts.conversation.len();
    let shared =
        4 * parts.tokens_shared(parent) + common(&parts.conversation, &parent.conversation);
    shared * SHARE_MIN >= whole && whole > 0
}
