//! Places of the stages of one batch: how many rollouts may make a sandbox, run, and be verified
//! at a time. Whoever is ready and has no place waits with its sandbox, and its harness's clock does
//! not run.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use record::Fault;
use serde::{Deserialize, Serialize};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit},
    time::Instant,
};

use crate::{
    classify::Broken,
    gauges::{Gauges, Stage, Up},
    pace::{self, Load, Reason},
};

/// Starts of sandboxes that are remembered.
const STARTS_MAX: usize = 16;
/// The number of places is looked at this often at most.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Places of stages beside [`crate::Runner::run_batch`]'s own number, which is that of rollouts that
/// run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Pools {
    /// Sandboxes that are made at a time; 0: as many as there are rollouts.
    pub create: usize,
    /// Sandboxes that stand ready beside those that run.
    pub ready: usize,
    /// Rollouts that are verified at a time; 0: as many as there are rollouts.
    pub verify: usize,
    /// The least places to run: with a number, there are between this and the batch's own, as
    /// engine and sandboxes allow ([`crate::pace`]); 0: always the batch's own.
    pub run_min: usize,
    /// The part of the places that one task may have while others wait.
    pub task_share: f64,
}

impl Default for Pools {
    fn default() -> Self {
        Self {
            create: 0,
            ready: 0,
            verify: 0,
            run_min: 0,
            task_share: 0.5,
        }
    }
}

impl Pools {
    /// Places of one task in a batch of so many, while others wait.
    #[must_use]
    pub fn share(&self, concurrency: usize) -> usize {
        let share = (concurrency as f64 * self.task_share).ceil();
        (share as usize).clamp(1, concurrency.max(1))
    }
}

/// The places of a batch.
#[derive(Debug)]
pub(crate) struct Places {
    create: Arc<Semaphore>,
    run: Semaphore,
    verify: Arc<Semaphore>,
    /// How many places to make a sandbox and to verify there are.
    limits: [(Stage, usize); 2],
    gauges: Arc<Gauges>,
    bounds: Option<(usize, usize)>,
    create_limit_s: f64,
    pacing: Mutex<Pacing>,
}

#[derive(Debug)]
struct Pacing {
    places: usize,
    /// Places that are gone and still held.
    debt: usize,
    looked: Option<Instant>,
    starts: VecDeque<f64>,
    waiting: usize,
    lowest: usize,
    highest: usize,
}

/// A place to make a sandbox, or to be verified.
#[derive(Debug)]
pub(crate) struct Place {
    _permit: OwnedSemaphorePermit,
    _used: Option<Up>,
}

/// A place to run.
#[derive(Debug)]
pub(crate) struct RunPlace<'a> {
    permit: Option<SemaphorePermit<'a>>,
    places: &'a Places,
    _used: Option<Up>,
}

impl Drop for RunPlace<'_> {
    fn drop(&mut self) {
        let mut pacing = self.places.lock();
        if pacing.debt > 0
            && let Some(permit) = self.permit.take()
        {
            pacing.debt -= 1;
            permit.forget();
        }
    }
}

fn limited(places: usize, all: usize) -> usize {
    let places = if places == 0 { all } else { places };
    places.clamp(1, Semaphore::MAX_PERMITS)
}

fn whole(places: usize) -> i64 {
    i64::try_from(places).unwrap_or(i64::MAX)
}

impl Places {
    /// Of a batch of so many rollouts at a time.
    pub(crate) fn new(
        pools: &Pools,
        concurrency: usize,
        create_limit_s: u64,
        gauges: &Arc<Gauges>,
    ) -> Self {
        let concurrency = concurrency.clamp(1, Semaphore::MAX_PERMITS);
        let all = concurrency.saturating_add(pools.ready);
        let (create, verify) = (limited(pools.create, all), limited(pools.verify, all));
        let limits = [(Stage::Create, create), (Stage::Verify, verify)];
        for (stage, places) in limits {
            gauges.add_places(stage, whole(places));
        }
        gauges.add_places(Stage::Run, whole(concurrency));
        if pools.run_min == 0 {
            gauges.paced(Reason::Fixed);
        }
        Self {
            create: Arc::new(Semaphore::new(create)),
            run: Semaphore::new(concurrency),
            verify: Arc::new(Semaphore::new(verify)),
            limits,
            gauges: Arc::clone(gauges),
            bounds: (pools.run_min > 0).then_some((pools.run_min.min(concurrency), concurrency)),
            create_limit_s: create_limit_s as f64,
            pacing: Mutex::new(Pacing {
                places: concurrency,
                debt: 0,
                looked: None,
                starts: VecDeque::new(),
                waiting: 0,
                lowest: concurrency,
                highest: concurrency,
            }),
        }
    }

    /// For one rollout by itself.
    pub(crate) fn of_one(gauges: &Arc<Gauges>) -> Self {
        Self::new(&Pools::default(), 1, 1, gauges)
    }

    fn lock(&self) -> MutexGuard<'_, Pacing> {
        self.pacing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place to make a sandbox. `None` never happens: nobody closes it.
    pub(crate) async fn create(&self) -> Option<Place> {
        self.place(Stage::Create, &self.create).await
    }

    /// A place to make a sandbox, when there is one that nobody waits for.
    pub(crate) fn try_create(&self) -> Option<Place> {
        let permit = Arc::clone(&self.create).try_acquire_owned().ok()?;
        Some(Place {
            _permit: permit,
            _used: self.gauges.using(Stage::Create),
        })
    }

    async fn place(&self, stage: Stage, of: &Arc<Semaphore>) -> Option<Place> {
        let waits = self.gauges.waiting(stage);
        let permit = Arc::clone(of).acquire_owned().await.ok()?;
        drop(waits);
        Some(Place {
            _permit: permit,
            _used: self.gauges.using(stage),
        })
    }

    /// A place to be verified.
    pub(crate) async fn verify(&self) -> Option<Place> {
        self.place(Stage::Verify, &self.verify).await
    }

    /// A place to run.
    pub(crate) async fn run(&self) -> RunPlace<'_> {
        self.lock().waiting += 1;
        // Counted down also when the wait is given up.
        let _waits = Waits {
            places: self,
            _shown: self.gauges.waiting(Stage::Run),
        };
        let permit = self.run.acquire().await.ok();
        RunPlace {
            permit,
            places: self,
            _used: self.gauges.using(Stage::Run),
        }
    }

    /// A sandbox took so long to be made.
    pub(crate) fn note_start(&self, seconds: f64) {
        let mut pacing = self.lock();
        pacing.starts.push_back(seconds);
        if pacing.starts.len() > STARTS_MAX {
            pacing.starts.pop_front();
        }
    }

    /// Looks at the load, now and then, and changes the number of places to run.
    pub(crate) fn adapt(&self, queued: Option<u64>, memory_free: impl Fn() -> Option<f64>) {
        let Some(bounds) = self.bounds else { return };
        let mut pacing = self.lock();
        if pacing.looked.is_some_and(|at| at.elapsed() < LOOK_EVERY) {
            return;
        }
        pacing.looked = Some(Instant::now());
        let load = Load {
            queued,
            memory_free: memory_free(),
            create_part: pace::median(pacing.starts.iter().copied())
                .map(|seconds| seconds / self.create_limit_s.max(1.0)),
            waiting: pacing.waiting > 0,
        };
        let (before, (after, reason)) = (pacing.places, pace::next(pacing.places, bounds, &load));
        self.gauges.paced(reason);
        if after == before {
            return;
        }
        tracing::info!(before, after, ?reason, ?load, "places to run");
        self.gauges
            .add_places(Stage::Run, whole(after) - whole(before));
        pacing.places = after;
        pacing.lowest = pacing.lowest.min(after);
        pacing.highest = pacing.highest.max(after);
        if after < before {
            let gone = self.run.forget_permits(before - after);
            pacing.debt += before - after - gone;
        } else {
            // What is still owed comes first.
            let more = after - before;
            let forgiven = more.min(pacing.debt);
            pacing.debt -= forgiven;
            self.run.add_permits(more - forgiven);
        }
    }

    /// The least and the most places that there were.
    pub(crate) fn range(&self) -> (usize, usize) {
        let pacing = self.lock();
        (pacing.lowest, pacing.highest)
    }
}

/// What keeps a sandbox from being there, as the end of a rollout.
pub(crate) fn not_started(error: impl ToString) -> Broken {
    (Fault::SandboxStart, error.to_string())
}

/// Nobody gave up a place in time.
pub(crate) fn no_place(fault: Fault, to: &str, waited: Duration) -> Broken {
    let seconds = waited.as_secs();
    let reason = format!("ready, and no place to {to} within {seconds} s (stages.wait_s)");
    (fault, reason)
}

struct Waits<'a> {
    places: &'a Places,
    _shown: Option<Up>,
}

impl Drop for Places {
    fn drop(&mut self) {
        for (stage, places) in self.limits {
            self.gauges.add_places(stage, -whole(places));
        }
        let left = self.lock().places;
        self.gauges.add_places(Stage::Run, -whole(left));
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.places.lock().waiting -= 1;
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn calm() -> Option<f64> {
        Some(0.5)
    }

    fn pools(run_min: usize) -> Pools {
        Pools {
            run_min,
            ..Pools::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn places_that_are_held_go_when_they_are_given_back() {
        let places = Places::new(&pools(2), 8, 60, &Arc::default());
        let mut held = Vec::new();
        for _ in 0..8 {
            held.push(places.run().await);
        }
        places.adapt(Some(1000), calm);
        assert_eq!(
            (places.range(), places.run.available_permits()),
            ((7, 8), 0)
        );
        // Not again so soon.
        places.adapt(Some(1000), calm);
        assert_eq!(places.range(), (7, 8));
        held.pop();
        assert_eq!(places.run.available_permits(), 0, "its place is gone");
        held.pop();
        assert_eq!(places.run.available_permits(), 1);
        drop(held);
        assert_eq!(places.run.available_permits(), 7);
        for _ in 0..20 {
            advance(LOOK_EVERY).await;
            places.adapt(Some(1000), calm);
        }
        assert_eq!(
            (places.range(), places.run.available_permits()),
            ((2, 8), 2)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn slow_starts_take_places_and_without_a_minimum_nothing_changes() {
        let places = Places::new(&pools(1), 8, 60, &Arc::default());
        (0..20).for_each(|_| places.note_start(59.0));
        places.adapt(None, calm);
        assert_eq!(places.range(), (6, 8));
        let fixed = Places::new(&pools(0), 8, 60, &Arc::default());
        (0..20).for_each(|_| fixed.note_start(59.0));
        fixed.adapt(Some(1000), calm);
        assert_eq!((fixed.range(), fixed.run.available_permits()), ((8, 8), 8));
    }

    #[test]
    fn a_share_is_at_least_one_place() {
        let share = |task_share, concurrency| {
            Pools {
                task_share,
                ..Pools::default()
            }
            .share(concurrency)
        };
        assert_eq!(
            (share(0.5, 32), share(0.0, 32), share(2.0, 32)),
            (16, 1, 32)
        );
        assert_eq!((share(0.5, 1), share(0.5, 0)), (1, 1));
    }
}
