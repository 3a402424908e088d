//! Which key belongs to which rollout.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use record::{RolloutId, Secret};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::serve::now_ms;
use crate::session::Session;
use crate::status::Status;
use crate::{Access, Config, GatewayError, Open};

#[derive(Debug, Clone)]
enum Entry {
    Open(Arc<Session>),
    Closed,
}

/// What a key stands for.
#[derive(Debug)]
pub(crate) enum Found {
    Open(Arc<Session>),
    Closed,
    Unknown,
}

#[derive(Debug, Default)]
struct Inner {
    by_key: HashMap<Secret, Entry>,
    open: HashMap<RolloutId, (Secret, Arc<Session>)>,
    closed: HashMap<RolloutId, Status>,
    /// In the order of closing, oldest first.
    tombstones: VecDeque<(RolloutId, Secret)>,
}

#[derive(Debug)]
pub(crate) struct Registry {
    inner: Mutex<Inner>,
    rollouts_max: usize,
    closed_kept_max: usize,
    replays_max: u32,
    abandon: CancellationToken,
    metrics: Arc<Metrics>,
}

impl Registry {
    pub(crate) fn new(config: &Config, metrics: Arc<Metrics>, abandon: CancellationToken) -> Self {
        Self {
            inner: Mutex::default(),
            rollouts_max: config.rollouts_max,
            closed_kept_max: config.closed_kept_max,
            replays_max: config.replays_max,
            abandon,
            metrics,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn open(&self, open: Open) -> Result<(Access, Arc<Session>), GatewayError> {
        let key = match &open.key {
            Some(key) => {
                let good = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'_';
                let text = key.expose();
                if !(8..=128).contains(&text.len()) || !text.bytes().all(good) {
                    return Err(GatewayError::Key);
                }
                key.clone()
            }
            None => Secret::new(random_key()?),
        };
        let id = open.spec.id.clone();
        let mut inner = self.lock();
        if inner.open.contains_key(&id) {
            return Err(GatewayError::RolloutOpen(id));
        }
        if inner.open.len() >= self.rollouts_max {
            return Err(GatewayError::TooManyRollouts {
                open: inner.open.len(),
            });
        }
        if matches!(inner.by_key.get(&key), Some(Entry::Open(_))) {
            return Err(GatewayError::Key);
        }
        let session = Arc::new(Session::new(
            open,
            self.replays_max,
            now_ms(),
            self.abandon.child_token(),
        ));
        inner
            .by_key
            .insert(key.clone(), Entry::Open(Arc::clone(&session)));
        inner.closed.remove(&id);
        inner.open.insert(id, (key.clone(), Arc::clone(&session)));
        drop(inner);
        self.metrics.rollouts.inc();
        let access = Access {
            path: format!("/r/{}", key.expose()),
            key: key.expose().to_owned(),
        };
        Ok((access, session))
    }

    pub(crate) fn find(&self, key: &str) -> Found {
        match self.lock().by_key.get(key) {
            Some(Entry::Open(session)) => Found::Open(Arc::clone(session)),
            Some(Entry::Closed) => Found::Closed,
            None => Found::Unknown,
        }
    }

    pub(crate) fn session(&self, id: &RolloutId) -> Option<Arc<Session>> {
        self.lock()
            .open
            .get(id)
            .map(|(_, session)| Arc::clone(session))
    }

    pub(crate) fn status(&self, id: &RolloutId) -> Option<Status> {
        let inner = self.lock();
        match inner.open.get(id) {
            Some((_, session)) => Some(session.status()),
            None => inner.closed.get(id).cloned(),
        }
    }

    pub(crate) async fn settle(
        &self,
        id: &RolloutId,
        quiet: Duration,
        limit: Duration,
    ) -> Result<Status, GatewayError> {
        if let Some(session) = self.session(id) {
            return Ok(session.settle(quiet, limit).await);
        }
        self.status(id)
            .ok_or_else(|| GatewayError::UnknownRollout(id.clone()))
    }

    /// The session that was closed, unless it was not open.
    pub(crate) fn close(&self, id: &RolloutId) -> Option<Arc<Session>> {
        let mut inner = self.lock();
        let (key, session) = inner.open.remove(id)?;
        let status = session.close();
        inner.by_key.insert(key.clone(), Entry::Closed);
        inner.closed.insert(id.clone(), status);
        inner.tombstones.push_back((id.clone(), key));
        while inner.tombstones.len() > self.closed_kept_max {
            let Some((id, key)) = inner.tombstones.pop_front() else {
                break;
            };
            if matches!(inner.by_key.get(&key), Some(Entry::Closed)) {
                inner.by_key.remove(&key);
            }
            if !inner.tombstones.iter().any(|(other, _)| *other == id) {
                inner.closed.remove(&id);
            }
        }
        drop(inner);
        self.metrics.rollouts.dec();
        Some(session)
    }
}

/// 32 random hexadecimal digits.
pub(crate) fn random_key() -> Result<String, GatewayError> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| GatewayError::Random(error.to_string()))?;
    Ok(hex::encode(bytes))
}
