//! Sandboxes that stand ready before anybody needs them.
//!
//! One task of the pool's own fills the shelf (`shelf`) while jobs of its keys wait in line; a job
//! takes from it and has only its own files to write. Each is used for one rollout. It knows
//! nothing of that rollout before it is taken: no key, no file, no environment of the task.
//!
//! Invariants:
//! - A warm sandbox is made by the same provider with the same owner as any other, so that whatever
//!   ends those ends it (I8); [`Warm::close`] waits for it, dropping the last clone does not.
//! - Making one takes a place of `pools.create`, and only one that nobody waits for.
//! - A task whose sandbox has sockets of its own (services, granted hosts) has none: they are made
//!   with the sandbox.
//!
//! Limits: [`Settings`]; [`MAKES_MAX`] made at a time, each within the limit of `stages.create_s`;
//! a health check within [`HEALTHY_WITHIN`]; none are made below twice the memory at which places to
//! run are taken away, and below it those that stand are given up.

use std::{
    collections::BTreeMap,
    os::unix::fs::MetadataExt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use futures::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use sandbox::{Exec, Provider, Sandbox, SandboxError, Spec};
use sha2::{Digest, Sha256};
use tokio::{
    sync::Notify,
    task::JoinSet,
    time::{Instant, timeout},
};

pub use crate::shelf::Settings;
use crate::{
    gauges::{Gauges, Up},
    pace::{MEMORY_FREE_MIN, memory_free},
    places::Places,
    shelf::{Dropped, Key, Shelf},
};

/// Made at a time: the first rollouts of a batch are not to wait for those that come later.
pub const MAKES_MAX: usize = 4;
/// For a warm sandbox to show that it lives.
pub const HEALTHY_WITHIN: Duration = Duration::from_secs(5);
/// Ages, memory and places are looked at this often at least.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A sandbox, counted while it lives.
pub(crate) type Counted = (Box<dyn Sandbox>, Option<Up>);

/// What stands on the shelf.
#[derive(Debug)]
struct Stock {
    counted: Counted,
    /// The gateway's socket that it was made with.
    socket: Option<Socket>,
}

/// Which socket is at a path: device, inode, and when it was made. Kinds that mount it into the
/// sandbox keep the one that was there.
type Socket = (u64, u64, i64, i64);

/// The warm sandboxes of a runner. Clones are the same pool; it ends with the last of them.
#[derive(Debug, Clone, Default)]
pub struct Warm {
    pool: Option<Arc<Pool>>,
}

#[derive(Debug)]
struct Pool {
    inner: Arc<Inner>,
    /// It ends when this is dropped, and what it was making with it.
    keeper: Mutex<JoinSet<()>>,
}

#[derive(Debug)]
struct Inner {
    settings: Settings,
    limits: Limits,
    gauges: Arc<Gauges>,
    shelf: Mutex<Shelf<Stock>>,
    specs: Mutex<BTreeMap<Key, Spec>>,
    /// Those that did not live any more when they were to be taken: a rollout does not wait until
    /// they are gone.
    dead: Mutex<Vec<Counted>>,
    /// Of the batch that runs.
    places: Mutex<Weak<Places>>,
    changed: Notify,
    number: AtomicU64,
    memory: fn() -> Option<f64>,
}

/// For what takes long.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) make: Duration,
    pub(crate) destroy: Duration,
}

/// That a job was given out for which a sandbox may stand ready.
#[derive(Debug)]
pub(crate) struct Claim {
    inner: Arc<Inner>,
    key: Key,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.inner.shelf().release(&self.key);
        self.inner.changed.notify_one();
    }
}

/// The key of what is to be made, and how to make it: the same spec without what only its rollout
/// knows. `None` when it has sockets of its own.
pub(crate) fn key(spec: &Spec, harness: &str) -> Option<(Key, Spec)> {
    if !spec.forwards.is_empty() {
        return None;
    }
    let spec = Spec {
        name: String::new(),
        env: BTreeMap::new(),
        files: Vec::new(),
        ..spec.clone()
    };
    // Everything that is left; a field that is added later is in it by itself.
    let digest = hex::encode(Sha256::digest(format!("{spec:?}")));
    let key = Key {
        image: spec.image.clone().unwrap_or_else(|| "default".to_owned()),
        harness: harness.to_owned(),
        digest: digest.get(..12).unwrap_or_default().to_owned(),
    };
    Some((key, spec))
}

impl Warm {
    /// The pool of a runner with these settings; none when they keep none.
    #[must_use]
    pub fn of(settings: &crate::Settings, gauges: &Arc<Gauges>) -> Self {
        let limits = Limits {
            make: Duration::from_secs(settings.stages.create_s),
            destroy: Duration::from_secs(settings.stages.destroy_s),
        };
        Self::new(settings.warm, limits, Arc::clone(gauges), memory_free)
    }

    fn new(
        settings: Settings,
        limits: Limits,
        gauges: Arc<Gauges>,
        memory: fn() -> Option<f64>,
    ) -> Self {
        let inner = || Inner {
            settings,
            limits,
            gauges,
            shelf: Mutex::new(Shelf::new(settings)),
            specs: Mutex::default(),
            dead: Mutex::default(),
            places: Mutex::default(),
            changed: Notify::new(),
            number: AtomicU64::new(0),
            memory,
        };
        let pool = settings.on().then(|| {
            Arc::new(Pool {
                inner: Arc::new(inner()),
                keeper: Mutex::default(),
            })
        });
        Self { pool }
    }

    /// A batch begins whose jobs want these, in this order.
    pub(crate) fn begin(&self, places: &Arc<Places>, wanted: Vec<Option<(Key, Spec)>>) {
        let Some(pool) = &self.pool else { return };
        let inner = &pool.inner;
        *lock(&inner.places) = Arc::downgrade(places);
        let keys: Vec<Key> = {
            let mut specs = lock(&inner.specs);
            // Those that still stand are taken by their key alone.
            specs.clear();
            wanted
                .into_iter()
                .flatten()
                .map(|(key, spec)| {
                    specs.insert(key.clone(), spec);
                    key
                })
                .collect()
        };
        inner.shelf().expect(keys);
    }

    /// Jobs were given out: what is made now is for those that wait. Needs a Tokio runtime.
    pub(crate) fn look(&self, provider: &Arc<dyn Provider>) {
        let Some(pool) = &self.pool else { return };
        let mut keeper = lock(&pool.keeper);
        if keeper.is_empty() {
            keeper.spawn(keep(Arc::clone(&pool.inner), Arc::clone(provider)));
        }
        pool.inner.changed.notify_one();
    }

    /// The batch is over. After one that was stopped nobody is waited for.
    pub(crate) fn rest(&self, stopped: bool) {
        let Some(pool) = &self.pool else { return };
        match stopped {
            true => pool.inner.shelf().expect([]),
            false => pool.inner.shelf().rest(Instant::now()),
        }
        pool.inner.changed.notify_one();
    }

    /// A job with this key was given out.
    pub(crate) fn claim(&self, key: &Key) -> Option<Claim> {
        let pool = self.pool.as_ref()?;
        pool.inner.shelf().promise(key);
        Some(Claim {
            inner: Arc::clone(&pool.inner),
            key: key.clone(),
        })
    }

    /// A sandbox that stands ready and lives; `None` when one must be made. The claim is settled
    /// either way, after it.
    pub(crate) async fn take(
        &self,
        claim: Option<Claim>,
        spec: &Spec,
        harness: &str,
    ) -> Option<Counted> {
        let _settled = claim;
        let pool = self.pool.as_ref()?;
        let inner = &pool.inner;
        let Some((key, _)) = key(spec, harness) else {
            inner.gauges.warm_missed("own_sockets");
            return None;
        };
        loop {
            let taken = inner.shelf().take(&key, Instant::now());
            inner.changed.notify_one();
            let Some(stock) = taken else {
                inner.gauges.warm_missed("none_ready");
                return None;
            };
            let health = match stock.socket == socket(spec) {
                true => healthy(&*stock.counted.0).await,
                false => Err("the gateway was started anew after it was made".to_owned()),
            };
            match health {
                Ok(()) => {
                    inner.gauges.warm_taken(&key);
                    return Some(stock.counted);
                }
                Err(reason) => {
                    tracing::warn!(
                        rollout = %spec.name, harness, reason,
                        "a warm sandbox is of no use any more; another is taken or made"
                    );
                    inner.gauges.warm_dropped(&key, Dropped::Dead);
                    lock(&inner.dead).push(stock.counted);
                }
            }
        }
    }

    /// Ends the pool, and waits until its sandboxes are gone; each within the limit of destroying
    /// one. Nothing is made any more.
    pub async fn close(&self) {
        let Some(pool) = &self.pool else { return };
        let mut keeper = std::mem::take(&mut *lock(&pool.keeper));
        keeper.shutdown().await;
        pool.inner.shelf().expect([]);
        let all = pool.inner.shelf().drain();
        let mut rest = std::mem::take(&mut *lock(&pool.inner.dead));
        rest.extend(all.into_iter().map(|(key, stock)| {
            pool.inner.gauges.warm_dropped(&key, Dropped::Unwanted);
            stock.counted
        }));
        let ends = rest.into_iter().map(|one| pool.inner.destroy(one));
        futures::future::join_all(ends).await;
        // What was being made when the keeper ended is counted no more.
        *pool.inner.shelf() = Shelf::new(pool.inner.settings);
        pool.inner.show();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The gateway's socket as it is now; `None` when there is none.
fn socket(spec: &Spec) -> Option<Socket> {
    let meta = std::fs::metadata(spec.gateway_socket.as_ref()?).ok()?;
    Some((meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec()))
}

/// Whether somebody answers in there.
async fn healthy(sandbox: &dyn Sandbox) -> Result<(), String> {
    let exec = Exec {
        argv: vec!["true".into()],
        cwd: Some("/".into()),
        env: BTreeMap::new(),
        stdin: Vec::new(),
        timeout: HEALTHY_WITHIN,
        output_bytes_max: 1024,
        end_background: true,
        user: None,
    };
    match timeout(HEALTHY_WITHIN, sandbox.exec(exec)).await {
        // An image without `true` answers too.
        Ok(Ok(_) | Err(SandboxError::NotRunnable { .. })) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {HEALTHY_WITHIN:?}")),
    }
}

impl Inner {
    fn shelf(&self) -> MutexGuard<'_, Shelf<Stock>> {
        lock(&self.shelf)
    }

    fn show(&self) {
        self.gauges.warm(self.shelf().counts());
    }

    async fn destroy(&self, (sandbox, up): Counted) {
        let limit = self.limits.destroy;
        if timeout(limit, sandbox.destroy()).await.is_err() {
            tracing::warn!(
                limit_s = limit.as_secs(),
                "destroying a warm sandbox takes too long; it goes on without us"
            );
        }
        drop(up);
    }

    /// What is to go now.
    fn surplus(&self) -> Vec<Counted> {
        let low = (self.memory)().is_some_and(|free| free < MEMORY_FREE_MIN);
        let mut shelf = self.shelf();
        let mut surplus = shelf.surplus(Instant::now());
        if low {
            let rest = shelf.drain();
            let rest = rest
                .into_iter()
                .map(|(key, stock)| (key, stock, Dropped::Memory));
            surplus.extend(rest);
        }
        drop(shelf);
        let mut out = std::mem::take(&mut *lock(&self.dead));
        for (key, stock, why) in surplus {
            let (harness, why_name) = (&key.harness, why.name());
            tracing::debug!(harness, why = why_name, "a warm sandbox goes unused");
            self.gauges.warm_dropped(&key, why);
            out.push(stock.counted);
        }
        out
    }

    /// The next one to be made, when there is a place for it and memory.
    fn next(
        self: &Arc<Self>,
        provider: &Arc<dyn Provider>,
        ending: usize,
    ) -> Option<BoxFuture<'static, ()>> {
        if (self.memory)().is_some_and(|free| free < 2.0 * MEMORY_FREE_MIN) {
            return None;
        }
        let place = match lock(&self.places).upgrade() {
            Some(places) => Some(places.try_create()?),
            // Between batches nobody else makes any.
            None => None,
        };
        let key = self.shelf().fill(Instant::now(), ending)?;
        let (inner, provider) = (Arc::clone(self), Arc::clone(provider));
        let spec = lock(&self.specs).get(&key).cloned();
        Some(Box::pin(async move {
            let made = match spec {
                Some(spec) => inner.make(&*provider, &key, spec).await,
                None => None,
            };
            drop(place);
            if made.is_none() {
                inner.gauges.warm_dropped(&key, Dropped::NotMade);
            }
            inner.shelf().filled(&key, Instant::now(), made);
        }))
    }

    async fn make(&self, provider: &dyn Provider, key: &Key, mut spec: Spec) -> Option<Stock> {
        let socket = socket(&spec);
        spec.name = format!("warm-{}", self.number.fetch_add(1, Relaxed));
        // Its rollout has all of its time from when it takes it.
        spec.limits.deadline_s = spec.limits.deadline_s.saturating_add(self.settings.idle_s);
        let limit = self.limits.make;
        let failed = |reason: String| {
            tracing::warn!(
                harness = key.harness,
                image = key.image,
                reason,
                "a warm sandbox could not be made; rollouts make their own"
            );
        };
        match timeout(limit, provider.create(spec)).await {
            Ok(Ok(sandbox)) => {
                let up = self.gauges.sandbox(&sandbox.image().kind);
                let counted = (sandbox, up);
                Some(Stock { counted, socket })
            }
            Ok(Err(error)) => {
                failed(error.to_string());
                None
            }
            Err(_) => {
                failed(format!(
                    "not ready after {} s (stages.create_s)",
                    limit.as_secs()
                ));
                None
            }
        }
    }
}

/// Keeps the shelf as it should be, for ever.
async fn keep(inner: Arc<Inner>, provider: Arc<dyn Provider>) {
    let mut makes: FuturesUnordered<BoxFuture<'static, ()>> = FuturesUnordered::new();
    let mut ends: FuturesUnordered<BoxFuture<'static, ()>> = FuturesUnordered::new();
    loop {
        for counted in inner.surplus() {
            let inner = Arc::clone(&inner);
            ends.push(Box::pin(async move { inner.destroy(counted).await }));
        }
        while makes.len() < MAKES_MAX {
            let Some(make) = inner.next(&provider, ends.len()) else {
                break;
            };
            makes.push(make);
        }
        inner.show();
        tokio::select! {
            Some(()) = makes.next(), if !makes.is_empty() => {}
            Some(()) = ends.next(), if !ends.is_empty() => {}
            () = inner.changed.notified() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
    }
}

#[cfg(test)]
mod tests;
