//! One watch for all pods of a run: nobody polls. A watch that breaks or is too old (410) begins
//! again with a list, and a pod that is not in that list any more is gone.

use std::{
    collections::HashMap,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    runtime::{WatchStreamExt, watcher},
};
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    error::chain,
    manifest::{RUN, SANDBOX},
    status::{Ended, Seen, look},
};

/// What is known of an expected pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct State {
    pub(super) seen: Seen,
    /// Its name and uid, once it was seen.
    pub(super) pod: Option<(String, String)>,
    /// The object is gone.
    pub(super) removed: bool,
}

impl State {
    /// Nothing of it runs any more, as far as the cluster knows.
    pub(super) fn over(&self) -> bool {
        self.removed || matches!(&self.seen, Seen::Ended(ended) if ended.certain)
    }
}

#[derive(Debug)]
struct Expected {
    state: watch::Sender<State>,
    /// In the list that is being read.
    listed: bool,
}

#[derive(Debug, Default)]
struct Inner {
    pods: HashMap<String, Expected>,
    /// Why nothing is heard at the moment.
    trouble: Option<String>,
}

/// The watch. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct Watch {
    inner: Arc<Mutex<Inner>>,
}

/// Hears of one pod; what comes after its drop is not kept.
#[derive(Debug)]
pub(super) struct Hears {
    name: String,
    watch: Watch,
    pub(super) state: watch::Receiver<State>,
}

impl Drop for Hears {
    fn drop(&mut self) {
        self.watch.inner().pods.remove(&self.name);
    }
}

impl Watch {
    /// Watches until it is told to stop.
    pub(super) fn start(
        api: Api<Pod>,
        run: &str,
        tasks: &TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let watch = Self::default();
        let hears = watch.clone();
        let config = watcher::Config::default().labels(&format!("{RUN}={run}"));
        tasks.spawn(async move {
            let mut events = pin!(watcher(api, config).default_backoff());
            loop {
                let event = tokio::select! {
                    event = events.next() => event,
                    () = stop.cancelled() => return,
                };
                match event {
                    Some(Ok(event)) => hears.hear(event),
                    Some(Err(error)) => hears.break_off(chain(&error)),
                    None => return,
                }
            }
        });
        watch
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why nothing is heard at the moment, if so.
    pub(super) fn trouble(&self) -> Option<String> {
        self.inner().trouble.clone()
    }

    /// Before a pod is made.
    pub(super) fn expect(&self, name: &str) -> Hears {
        let (sender, state) = watch::channel(State {
            seen: Seen::Nothing,
            pod: None,
            removed: false,
        });
        let expected = Expected {
            state: sender,
            listed: false,
        };
        self.inner().pods.insert(name.to_owned(), expected);
        Hears {
            name: name.to_owned(),
            watch: self.clone(),
            state,
        }
    }

    fn break_off(&self, reason: String) {
        let mut inner = self.inner();
        if inner.trouble.is_none() {
            tracing::warn!(reason, "the watch of the pods broke; it is begun again");
        }
        inner.trouble = Some(reason);
    }

    fn hear(&self, event: watcher::Event<Pod>) {
        let mut inner = self.inner();
        inner.trouble = None;
        match event {
            watcher::Event::Init => {
                for expected in inner.pods.values_mut() {
                    expected.listed = false;
                }
            }
            watcher::Event::InitApply(pod) => inner.apply(&pod),
            watcher::Event::InitDone => {
                // Only what was seen before can be missing: the others are about to be made.
                for expected in inner.pods.values_mut().filter(|e| !e.listed) {
                    expected.state.send_if_modified(State::remove);
                }
            }
            watcher::Event::Apply(pod) => inner.apply(&pod),
            watcher::Event::Delete(pod) => {
                inner.apply(&pod);
                if let Some(expected) = name(&pod).and_then(|name| inner.pods.get_mut(name)) {
                    expected.state.send_if_modified(State::remove);
                }
            }
        }
    }
}

fn name(pod: &Pod) -> Option<&str> {
    let labels = pod.metadata.labels.as_ref()?;
    Some(labels.get(SANDBOX)?.as_str())
}

impl Inner {
    fn apply(&mut self, pod: &Pod) {
        let Some(expected) = name(pod).and_then(|name| self.pods.get_mut(name)) else {
            return;
        };
        expected.listed = true;
        let seen = look(pod);
        let own = (
            pod.metadata.name.clone().unwrap_or_default(),
            pod.metadata.uid.clone().unwrap_or_default(),
        );
        expected
            .state
            .send_if_modified(|state| state.take(seen, own));
    }
}

impl State {
    /// Whether anything is new.
    fn take(&mut self, seen: Seen, pod: (String, String)) -> bool {
        match &self.pod {
            None => self.pod = Some(pod),
            // A controller made another in its place; the one with our guest is gone.
            Some((_, uid)) if *uid != pod.1 => return self.remove(),
            Some(_) => {}
        }
        // The first reason stays; that its processes are gone may be news.
        let new = match (&self.seen, seen) {
            (Seen::Ended(old), Seen::Ended(new)) => {
                let certain = old.certain || new.certain;
                let kept = if old.certain { old.clone() } else { new };
                Seen::Ended(Ended { certain, ..kept })
            }
            (Seen::Ended(_), _) => return false,
            (_, new) => new,
        };
        if self.seen == new {
            return false;
        }
        self.seen = new;
        true
    }

    fn remove(&mut self) -> bool {
        if self.removed || self.pod.is_none() {
            return false;
        }
        self.removed = true;
        if !matches!(self.seen, Seen::Ended(_)) {
            self.seen = Seen::Ended(Ended {
                reason: "somebody deleted its pod".to_owned(),
                code: None,
                certain: true,
                trouble: None,
            });
        }
        true
    }
}
