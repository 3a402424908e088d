//! All pods of a run through one watch.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, PoisonError},
};

use futures::{StreamExt, pin_mut};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    runtime::{WatchStreamExt, watcher},
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::sight::{Sight, look};

/// The pods that somebody waits for, by name.
#[derive(Debug, Default)]
pub(super) struct Pods {
    seen: Mutex<HashMap<String, watch::Sender<Sight>>>,
}

impl Pods {
    /// Hears of a pod from now on; to be called before it is made.
    pub(super) fn follow(&self, name: &str) -> watch::Receiver<Sight> {
        let (sender, receiver) = watch::channel(Sight::Waiting("it was not seen yet".to_owned()));
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.insert(name.to_owned(), sender);
        receiver
    }

    pub(super) fn forget(&self, name: &str) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.remove(name);
    }

    fn tell(&self, name: &str, sight: Sight) {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = seen.get(name) {
            // The first end that was seen is the one with the reason.
            sender.send_if_modified(|last| {
                let new = !matches!(last, Sight::Ended(_)) && *last != sight;
                if new {
                    *last = sight;
                }
                new
            });
        }
    }

    /// Pods that were seen and are not in a full list are gone.
    fn keep(&self, listed: &HashSet<String>) {
        let names: Vec<String> = {
            let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            let known = seen.iter().filter(|(_, sender)| {
                !matches!(&*sender.borrow(), Sight::Waiting(text) if text == "it was not seen yet")
            });
            known.map(|(name, _)| name.clone()).collect()
        };
        for name in names.iter().filter(|name| !listed.contains(*name)) {
            self.tell(name, Sight::Ended("its pod is gone".to_owned()));
        }
    }

    /// Watches until told to stop. The watch begins again by itself when the server ends it or
    /// has forgotten where we were.
    pub(super) async fn watch(&self, api: Api<Pod>, labels: String, stop: CancellationToken) {
        let events = watcher(api, watcher::Config::default().labels(&labels)).default_backoff();
        pin_mut!(events);
        let mut listed = HashSet::new();
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                () = stop.cancelled() => return,
            };
            match event {
                None => return,
                Some(Ok(watcher::Event::Init)) => listed.clear(),
                Some(Ok(watcher::Event::InitApply(pod))) => {
                    if let Some(name) = &pod.metadata.name {
                        listed.insert(name.clone());
                        self.tell(name, look(&pod));
                    }
                }
                Some(Ok(watcher::Event::InitDone)) => self.keep(&listed),
                Some(Ok(watcher::Event::Apply(pod))) => {
                    if let Some(name) = &pod.metadata.name {
                        self.tell(name, look(&pod));
                    }
                }
                Some(Ok(watcher::Event::Delete(pod))) => {
                    if let Some(name) = &pod.metadata.name {
                        if let last @ Sight::Ended(_) = look(&pod) {
                            self.tell(name, last);
                        }
                        self.tell(name, Sight::Ended("its pod is gone".to_owned()));
                    }
                }
                Some(Err(error)) => tracing::warn!(%error, "the watch of pods begins again"),
            }
        }
    }
}
