//! Several engines that look like one.
//!
//! A rollout **sticks** to the engine of its first call, whose prefix cache has its history; a new
//! rollout goes to the engine with the fewest requests. An engine that does not answer its health
//! check is **taken out**: its requests in flight end as [`EngineError::Gone`], which a harness
//! repeats, and the repetition goes to another engine. It is asked on, and **comes back** once it
//! answers and has the weights of the others.
//!
//! Invariants:
//! - No request is given to an engine that is out.
//! - After [`Pool::load_weights`](Engine::load_weights) no engine serves with other weights: one
//!   that could not load them is out until it can.
//! - The watching task ends with the pool.
//!
//! Limits: [`Settings::rollouts_kept_max`] rollouts are remembered, then the oldest is forgotten
//! (and is placed anew at its next call). A health check takes at most [`Settings::timeout`].

use std::{
    collections::{HashMap, VecDeque},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use async_trait::async_trait;
use record::{Generation, PolicyVersion, RolloutId};
use tokio::{sync::watch, task::JoinSet, time::MissedTickBehavior};

use crate::{Engine, EngineError, Info, Member, Queue, Request};

/// How engines are watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Between two health checks of an engine.
    pub every: Duration,
    /// For one health check; then it has failed.
    pub timeout: Duration,
    /// Failed checks in a row after which an engine is taken out. A failed request counts as
    /// one, and is followed by a check at once.
    pub failures_max: u32,
    /// Rollouts whose engine is remembered.
    pub rollouts_kept_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            every: Duration::from_secs(5),
            timeout: Duration::from_secs(5),
            failures_max: 2,
            rollouts_kept_max: 65_536,
        }
    }
}

/// One engine of the pool.
#[derive(Debug)]
struct Slot {
    engine: Arc<dyn Engine>,
    name: String,
    up: watch::Sender<bool>,
    failures: AtomicU64,
    in_flight: AtomicU64,
    requests: AtomicU64,
    outages: AtomicU64,
}

/// Which rollout is where.
#[derive(Debug, Default)]
struct Places {
    by_rollout: HashMap<RolloutId, usize>,
    /// Oldest first.
    order: VecDeque<RolloutId>,
}

#[derive(Debug)]
struct Inner {
    slots: Vec<Slot>,
    settings: Settings,
    places: Mutex<Places>,
    /// The weights that all must have, once some were loaded.
    weights: tokio::sync::Mutex<Option<(PathBuf, PolicyVersion)>>,
}

/// Several engines that look like one.
#[derive(Debug)]
pub struct Pool {
    inner: Arc<Inner>,
    /// They end when this is dropped.
    _watchers: JoinSet<()>,
}

/// Counts a request while it runs, however it ends.
struct Running<'a>(&'a Slot);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

impl Slot {
    fn is_up(&self) -> bool {
        *self.up.borrow()
    }

    fn take_out(&self, why: &str) {
        if self.up.send_if_modified(|up| std::mem::replace(up, false)) {
            self.outages.fetch_add(1, Relaxed);
            tracing::warn!(engine = %self.name, why, "engine taken out");
        }
    }
}

impl Inner {
    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The engine of a rollout; `None` when all are out.
    fn place(&self, rollout: Option<&RolloutId>) -> Option<&Slot> {
        let mut places = self.places();
        let known = rollout.and_then(|rollout| places.by_rollout.get(rollout).copied());
        if let Some(slot) = known.and_then(|at| self.slots.get(at))
            && slot.is_up()
        {
            return Some(slot);
        }
        let (at, slot) = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.is_up())
            .min_by_key(|(_, slot)| (slot.in_flight.load(Relaxed), slot.requests.load(Relaxed)))?;
        if let Some(rollout) = rollout {
            if places.by_rollout.insert(rollout.clone(), at).is_none() {
                places.order.push_back(rollout.clone());
            } else {
                tracing::info!(%rollout, engine = %slot.name, "rollout moved: its engine is out");
            }
            while places.order.len() > self.settings.rollouts_kept_max {
                if let Some(oldest) = places.order.pop_front() {
                    places.by_rollout.remove(&oldest);
                }
            }
        }
        Some(slot)
    }

    /// Asks one engine whether it is well, and takes it out or in accordingly.
    async fn check(&self, slot: &Slot) {
        let limit = self.settings.timeout;
        let well = tokio::time::timeout(limit, slot.engine.health())
            .await
            .unwrap_or_else(|_| {
                Err(EngineError::Gone(format!(
                    "no answer to a health check within {} s",
                    limit.as_secs()
                )))
            });
        match well {
            Err(error) => {
                let failures = slot.failures.fetch_add(1, Relaxed) + 1;
                if failures >= u64::from(self.settings.failures_max) {
                    slot.take_out(&error.to_string());
                }
            }
            Ok(()) => {
                slot.failures.store(0, Relaxed);
                if !slot.is_up() {
                    self.take_in(slot).await;
                }
            }
        }
    }

    /// Brings an engine back, with the weights that the others have.
    async fn take_in(&self, slot: &Slot) {
        let weights = self.weights.lock().await;
        if let Some((folder, version)) = weights.as_ref()
            && slot.engine.policy_version() != *version
            && let Err(error) = slot.engine.load_weights(folder, *version).await
        {
            tracing::warn!(engine = %slot.name, %error, "engine is well but cannot load the weights of the others");
            return;
        }
        slot.up.send_replace(true);
        tracing::info!(engine = %slot.name, "engine is back");
    }
}

impl Pool {
    /// Puts engines together, all of them taken for well, and begins to watch them. Must be
    /// called within a Tokio runtime.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] when there is none.
    pub fn start(engines: Vec<Arc<dyn Engine>>, settings: Settings) -> Result<Self, EngineError> {
        if engines.is_empty() {
            return Err(EngineError::Invalid("a pool of no engines".into()));
        }
        let slots = engines
            .into_iter()
            .map(|engine| Slot {
                name: engine.info().name,
                engine,
                up: watch::Sender::new(true),
                failures: AtomicU64::new(0),
                in_flight: AtomicU64::new(0),
                requests: AtomicU64::new(0),
                outages: AtomicU64::new(0),
            })
            .collect();
        let inner = Arc::new(Inner {
            slots,
            settings,
            places: Mutex::default(),
            weights: tokio::sync::Mutex::default(),
        });
        let mut watchers = JoinSet::new();
        for at in 0..inner.slots.len() {
            let inner = Arc::clone(&inner);
            watchers.spawn(async move {
                let mut tick = tokio::time::interval(inner.settings.every);
                tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
                loop {
                    tick.tick().await;
                    if let Some(slot) = inner.slots.get(at) {
                        inner.check(slot).await;
                    }
                }
            });
        }
        Ok(Self {
            inner,
            _watchers: watchers,
        })
    }
}

#[async_trait]
impl Engine for Pool {
    fn info(&self) -> Info {
        let infos: Vec<Info> = self
            .inner
            .slots
            .iter()
            .map(|slot| slot.engine.info())
            .collect();
        let names: Vec<&str> = infos.iter().map(|info| info.name.as_str()).collect();
        let least = |of: fn(&Info) -> u32| infos.iter().map(of).min().unwrap_or_default();
        Info {
            name: names.join(" + "),
            context_tokens_max: least(|info| info.context_tokens_max),
            vocabulary: least(|info| info.vocabulary),
        }
    }

    fn policy_version(&self) -> PolicyVersion {
        let slots = self.inner.slots.iter();
        let versions = slots
            .filter(|slot| slot.is_up())
            .map(|slot| slot.engine.policy_version());
        versions.min().unwrap_or_default()
    }

    async fn generate(&self, request: Request) -> Result<Generation, EngineError> {
        let rollout = request.hint.as_ref().and_then(|hint| hint.rollout.as_ref());
        let Some(slot) = self.inner.place(rollout.map(|spec| &spec.id)) else {
            return Err(EngineError::Gone(format!(
                "all {} engines are out",
                self.inner.slots.len()
            )));
        };
        slot.in_flight.fetch_add(1, Relaxed);
        slot.requests.fetch_add(1, Relaxed);
        let running = Running(slot);
        let mut up = slot.up.subscribe();
        let result = tokio::select! {
            result = slot.engine.generate(request) => result,
            _ = up.wait_for(|up| !up) => Err(EngineError::Gone(format!(
                "{} was taken out while it worked on this",
                slot.name
            ))),
        };
        drop(running);
        if matches!(result, Err(EngineError::Gone(_))) && slot.is_up() {
            slot.failures.fetch_add(1, Relaxed);
            // Before the harness hears of it: its repetition must not come here in vain.
            self.inner.check(slot).await;
        }
        result
    }

    async fn health(&self) -> Result<(), EngineError> {
        match self.inner.slots.iter().any(Slot::is_up) {
            true => Ok(()),
            false => Err(EngineError::Gone("all engines are out".into())),
        }
    }

    /// On all engines at once. One that fails is taken out, and loads them before it comes back.
    async fn load_weights(&self, folder: &Path, version: PolicyVersion) -> Result<(), EngineError> {
        let mut weights = self.inner.weights.lock().await;
        let loads = self.inner.slots.iter().map(|slot| async move {
            let loaded = slot.engine.load_weights(folder, version).await;
            (slot, loaded)
        });
        let mut first_failure = None;
        let mut loaded_somewhere = false;
        for (slot, loaded) in futures::future::join_all(loads).await {
            match loaded {
                Ok(()) => loaded_somewhere = true,
                Err(error) => {
                    first_failure.get_or_insert((slot, error));
                }
            }
        }
        match first_failure {
            // All have what they had before.
            Some((_, error)) if !loaded_somewhere => return Err(error),
            Some(_) => {
                for slot in &self.inner.slots {
                    if slot.engine.policy_version() != version {
                        slot.take_out("it could not load new weights");
                    }
                }
            }
            None => {}
        }
        *weights = Some((folder.to_owned(), version));
        Ok(())
    }

    fn degraded(&self) -> Option<&'static str> {
        let slots = &self.inner.slots;
        slots.iter().find_map(|slot| slot.engine.degraded())
    }

    /// The sum over the engines that are served: what waits is weighed against the places of all
    /// rollouts, wherever they are. One that cannot tell makes it a lower bound, and degraded.
    fn queue(&self) -> Queue {
        let slots = self.inner.slots.iter();
        let served = slots.filter(|slot| slot.is_up());
        served.fold(Queue::default(), |all, slot| {
            let own = slot.engine.queue();
            let sum = match (all.waiting, own.waiting) {
                (Some(all), Some(own)) => Some(all.saturating_add(own)),
                (all, own) => all.or(own),
            };
            Queue {
                waiting: sum,
                degraded: all.degraded.or(own.degraded),
                failures: all.failures.saturating_add(own.failures),
            }
        })
    }

    fn members(&self) -> Vec<Member> {
        self.inner
            .slots
            .iter()
            .map(|slot| Member {
                name: slot.name.clone(),
                up: slot.is_up(),
                in_flight: slot.in_flight.load(Relaxed),
                requests: slot.requests.load(Relaxed),
                outages: slot.outages.load(Relaxed),
            })
            .collect()
    }
}
