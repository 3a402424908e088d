//! Which call each call carries on, and in which segment it is.

use std::cmp::Reverse;
use std::collections::HashMap;

use record::{Call, Role};

use crate::classify::position;
use crate::digest::{Digest, Histories};
use crate::tree::Place;

/// Links of a rollout whose conversations were recorded.
pub(crate) struct Links<'a> {
    calls: &'a [&'a Call],
    digests: &'a [Digest],
    /// Replies by conversation: (thread, reply) to places, in order of arrival.
    replies: HashMap<(u32, u64), Vec<usize>>,
    /// The best call whose whole history is this one, by thread.
    whole: HashMap<(u32, u64), usize>,
    histories: Histories,
}

impl<'a> Links<'a> {
    pub(crate) fn new(calls: &'a [&'a Call], digests: &'a [Digest]) -> Self {
        Self {
            calls,
            digests,
            replies: HashMap::new(),
            whole: HashMap::new(),
            histories: Histories::default(),
        }
    }

    /// Fills in `previous` and `segment`.
    pub(crate) fn fill(mut self, places: &mut [Place]) {
        let mut current = 0;
        for at in 0..self.calls.len() {
            let thread = places[at].thread;
            if places[at].opens.is_some() {
                current += 1;
                places[at].segment = current;
            } else {
                let previous = self.previous(at, places);
                places[at].previous = previous.map(|found| self.calls[found].id.index);
                places[at].segment = if thread == 0 {
                    self.segment_like(at, previous, places)
                } else {
                    previous
                        .filter(|&previous| places[previous].thread == thread)
                        .map_or(current, |previous| places[previous].segment)
                };
            }
            self.add(at, places);
        }
    }

    /// The segment of the call that a main call carries on, else of the one that it shares most
    /// of its history with.
    fn segment_like(&self, at: usize, previous: Option<usize>, places: &[Place]) -> u32 {
        let nearest = || {
            self.histories
                .nearest(0, &self.digests[at], |_| true)
                .filter(|&(_, common)| common > 0)
                .map(|(found, _)| found)
        };
        previous
            .filter(|&previous| places[previous].thread == 0)
            .or_else(nearest)
            .map_or(0, |like| places[like].segment)
    }

    fn add(&mut self, at: usize, places: &[Place]) {
        let (thread, digest) = (places[at].thread, &self.digests[at]);
        if let Some(reply) = digest.reply {
            self.replies.entry((thread, reply)).or_default().push(at);
        }
        if let (true, Some(&history)) = (places[at].generated, digest.prefixes.last()) {
            let best = self.whole.entry((thread, history)).or_insert(at);
            if places[at].delivered >= places[*best].delivered {
                *best = at;
            }
        }
        self.histories.add(at, thread, digest);
    }

    fn previous(&self, at: usize, places: &[Place]) -> Option<usize> {
        let extended = places[at]
            .extends
            .and_then(|extended| position(places, extended));
        let depth = |earlier: usize| self.digests[earlier].messages.len();
        // An edited history may still extend an early call token by token, and yet carry on a
        // later one.
        match (extended, self.echoed(at, places)) {
            (Some(extended), Some(echoed)) if depth(echoed) > depth(extended) => Some(echoed),
            (Some(extended), _) => Some(extended),
            (None, Some(echoed)) => Some(echoed),
            (None, None) => self.rewritten(at, places),
        }
    }

    /// The last turn of the history that is a reply of ours; of equal replies the one that was
    /// said at that place, then a delivered one, then the latest.
    fn echoed(&self, at: usize, places: &[Place]) -> Option<usize> {
        let own = &self.digests[at];
        (0..own.messages.len()).rev().find_map(|turn| {
            if own.roles[turn] != Role::Assistant {
                return None;
            }
            let key = (places[at].thread, own.messages[turn]);
            self.replies
                .get(&key)?
                .iter()
                .copied()
                .min_by_key(|&earlier| {
                    (
                        self.digests[earlier].messages.len().abs_diff(turn),
                        !places[earlier].delivered,
                        Reverse(earlier),
                    )
                })
        })
    }

    /// The longest earlier history that this one starts with and answers with a turn of the
    /// model, though not in our words.
    fn rewritten(&self, at: usize, places: &[Place]) -> Option<usize> {
        let own = &self.digests[at];
        (1..own.messages.len()).rev().find_map(|length| {
            let key = (places[at].thread, own.prefixes[length]);
            let found = self.whole.get(&key).copied();
            found.filter(|_| own.roles[length] == Role::Assistant)
        })
    }
}
