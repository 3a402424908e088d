//! What all parts share: the store under its lock, the news that it changed, ids and time.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::SystemTime,
};

use chrono::{DateTime, SecondsFormat, Utc};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::{
    Settings,
    faults::Faults,
    resources::{self, Resource},
    store::{Key, Store},
};

/// Names that the real server makes up are of these.
const SUFFIX: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) settings: Settings,
    pub(crate) faults: Faults,
    store: Mutex<Store>,
    /// The revision; told after each change.
    changed: watch::Sender<u64>,
    random: Mutex<StdRng>,
    /// Where the API listens.
    pub(crate) listens: OnceLock<SocketAddr>,
}

pub(crate) fn now() -> String {
    at(SystemTime::now())
}

pub(crate) fn at(time: SystemTime) -> String {
    DateTime::<Utc>::from(time).to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// The store, locked. When it is let go, whoever watches hears of what changed.
pub(crate) struct Locked<'a> {
    store: MutexGuard<'a, Store>,
    changed: &'a watch::Sender<u64>,
}

impl std::ops::Deref for Locked<'_> {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
}

impl std::ops::DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Store {
        &mut self.store
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let revision = self.store.revision();
        self.changed.send_if_modified(|known| {
            let news = *known != revision;
            *known = revision;
            news
        });
    }
}

impl Core {
    pub(crate) fn new(settings: Settings) -> Self {
        let store = Store::new(settings.log_max);
        let (changed, _) = watch::channel(store.revision());
        let random = StdRng::seed_from_u64(settings.seed);
        Self {
            settings,
            faults: Faults::default(),
            store: Mutex::new(store),
            changed,
            random: Mutex::new(random),
            listens: OnceLock::new(),
        }
    }

    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.listens.get().copied()
    }

    pub(crate) fn store(&self) -> Locked<'_> {
        Locked {
            store: self.store.lock().unwrap_or_else(PoisonError::into_inner),
            changed: &self.changed,
        }
    }

    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Wakes whoever watches though nothing changed.
    pub(crate) fn nudge(&self) {
        self.changed.send_modify(|_| {});
    }

    pub(crate) fn resource(&self, group: &str, version: &str, plural: &str) -> Option<Resource> {
        resources::find(group, version, plural, &self.settings.custom)
    }

    /// A core resource that is always there.
    pub(crate) fn core_resource(&self, plural: &str) -> Resource {
        self.resource("", "v1", plural).unwrap_or(Resource {
            group: "".into(),
            version: "v1".into(),
            plural: plural.to_owned().into(),
            kind: plural.to_owned().into(),
            namespaced: true,
            short: Vec::new(),
        })
    }

    pub(crate) fn uid(&self) -> String {
        let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
        let (a, b): (u64, u64) = (random.random(), random.random());
        format!(
            "{:08x}-{:04x}-4{:03x}-a{:03x}-{:012x}",
            a >> 32,
            (a >> 16) & 0xffff,
            a & 0xfff,
            (b >> 48) & 0xfff,
            b & 0xffff_ffff_ffff
        )
    }

    pub(crate) fn suffix(&self) -> String {
        let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
        (0..5)
            .map(|_| char::from(SUFFIX[random.random_range(0..SUFFIX.len())]))
            .collect()
    }

    /// Changes an object, if it is there and still the one meant; whether it was.
    pub(crate) fn change(&self, key: &Key, uid: &str, change: impl FnOnce(&mut Value)) -> bool {
        let mut store = self.store();
        let Some(object) = store.get(key).filter(|o| o["metadata"]["uid"] == uid) else {
            return false;
        };
        let mut object = (**object).clone();
        change(&mut object);
        store.put(key.clone(), object);
        true
    }

    /// An object with what the server gives to each.
    pub(crate) fn stamp(&self, object: &mut Value, namespace: &str, name: &str) {
        let metadata = &mut object["metadata"];
        metadata["name"] = json!(name);
        if !namespace.is_empty() {
            metadata["namespace"] = json!(namespace);
        }
        metadata["uid"] = json!(self.uid());
        metadata["creationTimestamp"] = json!(now());
    }

    /// Writes an event about an object, or the part of it that a path names. A repeated one counts
    /// up.
    pub(crate) fn event(
        &self,
        about: &Value,
        path: Option<&str>,
        kind: &str,
        reason: &str,
        message: &str,
    ) {
        let metadata = &about["metadata"];
        let namespace = metadata["namespace"].as_str().unwrap_or("default");
        let component = if reason.ends_with("cheduled") || reason.ends_with("cheduling") {
            "default-scheduler"
        } else {
            "kubelet"
        };
        let mut store = self.store();
        let known = store.list("events", Some(namespace)).find(|(_, event)| {
            let involved = &event["involvedObject"];
            involved["uid"] == metadata["uid"]
                && involved["fieldPath"].as_str() == path
                && event["reason"] == reason
                && event["message"] == message
        });
        if let Some((key, event)) = known.map(|(k, e)| (k.clone(), (**e).clone())) {
            let mut event = event;
            event["count"] = json!(event["count"].as_u64().unwrap_or(1) + 1);
            event["lastTimestamp"] = json!(now());
            store.put(key, event);
            return;
        }
        let name = metadata["name"].as_str().unwrap_or_default();
        // Unique: no two events are written at the same revision.
        let name = format!("{name}.{:016x}", store.revision() + 1);
        let mut event = json!({
            "apiVersion": "v1", "kind": "Event", "metadata": {},
            "involvedObject": {
                "kind": about["kind"], "apiVersion": about["apiVersion"],
                "namespace": metadata["namespace"], "name": metadata["name"],
                "uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"],
            },
            "reason": reason, "message": message, "type": kind, "count": 1,
            "firstTimestamp": now(), "lastTimestamp": now(), "eventTime": null,
            "source": {"component": component}, "reportingComponent": component,
            "reportingInstance": "",
        });
        if let Some(path) = path {
            event["involvedObject"]["fieldPath"] = json!(path);
        }
        self.stamp(&mut event, namespace, &name);
        store.put(Key::new("events", namespace, name), event);
    }

    /// Creates what every cluster has: its namespaces with their accounts.
    pub(crate) fn bootstrap(&self) {
        for name in ["default", "kube-system"] {
            let mut namespace = json!({
                "apiVersion": "v1", "kind": "Namespace", "metadata": {
                    "labels": {"kubernetes.io/metadata.name": name}},
                "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"},
            });
            self.stamp(&mut namespace, "", name);
            let mut store = self.store();
            store.put(Key::new("namespaces", "", name), namespace);
            self.default_account(&mut store, name);
        }
    }

    /// The account that pods of a namespace have when they name none.
    pub(crate) fn default_account(&self, store: &mut Store, namespace: &str) {
        let key = Key::new("serviceaccounts", namespace, "default");
        if store.get(&key).is_none() {
            let mut account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {}});
            self.stamp(&mut account, namespace, "default");
            store.put(key, account);
        }
    }
}

pub(crate) type Shared = Arc<Core>;
