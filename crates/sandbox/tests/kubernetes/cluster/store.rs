//! Objects, their versions, and the log that watches read.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard},
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::{Map, Value, json};
use tokio::sync::watch;

/// Events that are kept; a watch from before them gets 410.
const LOG_MAX: usize = 1000;

/// Resource, namespace, name.
pub(crate) type Key = (String, String, String);

#[derive(Debug, Clone)]
pub(crate) struct Event {
    pub(crate) version: u64,
    pub(crate) resource: String,
    pub(crate) namespace: String,
    pub(crate) kind: &'static str,
    pub(crate) object: Value,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<Key, Value>,
    log: VecDeque<Event>,
    /// Events up to this one are forgotten.
    forgotten: u64,
    version: u64,
    uids: u64,
}

#[derive(Debug)]
pub(crate) struct Store {
    state: Mutex<State>,
    changed: watch::Sender<u64>,
}

/// Seconds since 1970 as the API writes times.
pub(crate) fn timestamp() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let (days, rest) = (now / 86_400, now % 86_400);
    // Civil from days, for years after 1970.
    let z = days as i64 + 719_468;
    let era = z / 146_097;
    let doe = z - era * 146_097;
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// A selector like `a=b,c!=d,e`.
pub(crate) fn selects(selector: &str, labels: Option<&Value>) -> bool {
    let label = |key: &str| labels.and_then(|l| l.get(key)?.as_str());
    selector.split(',').map(str::trim).filter(|term| !term.is_empty()).all(|term| {
        if let Some((key, value)) = term.split_once("!=") {
            label(key) != Some(value)
        } else if let Some((key, value)) = term.split_once('=') {
            label(key) == Some(value.trim_start_matches('='))
        } else {
            label(term).is_some()
        }
    })
}

impl Store {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::default(),
            changed: watch::channel(0).0,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn write(&self, state: &mut State, key: &Key, kind: &'static str, mut object: Value) -> Value {
        state.version += 1;
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        state.log.push_back(Event {
            version: state.version,
            resource: key.0.clone(),
            namespace: key.1.clone(),
            kind,
            object: object.clone(),
        });
        while state.log.len() > LOG_MAX {
            if let Some(event) = state.log.pop_front() {
                state.forgotten = event.version;
            }
        }
        if kind == "DELETED" {
            state.objects.remove(key);
        } else {
            state.objects.insert(key.clone(), object.clone());
        }
        self.changed.send_replace(state.version);
        object
    }

    /// `None` when the name is taken.
    pub(crate) fn create(&self, key: &Key, mut object: Value) -> Option<Value> {
        let mut state = self.state();
        if state.objects.contains_key(key) {
            return None;
        }
        state.uids += 1;
        let uid = format!("00000000-0000-4000-8000-{:012x}", state.uids);
        if !object["metadata"].is_object() {
            object["metadata"] = Value::Object(Map::new());
        }
        object["metadata"]["uid"] = json!(uid);
        object["metadata"]["name"] = json!(key.2);
        object["metadata"]["namespace"] = json!(key.1);
        object["metadata"]["creationTimestamp"] = json!(timestamp());
        Some(self.write(&mut state, key, "ADDED", object))
    }

    pub(crate) fn get(&self, key: &Key) -> Option<Value> {
        self.state().objects.get(key).cloned()
    }

    /// Changes an object that is there.
    pub(crate) fn update(&self, key: &Key, change: impl FnOnce(&mut Value)) -> Option<Value> {
        let mut state = self.state();
        let mut object = state.objects.get(key)?.clone();
        let before = object.clone();
        change(&mut object);
        if object == before {
            return Some(object);
        }
        Some(self.write(&mut state, key, "MODIFIED", object))
    }

    pub(crate) fn remove(&self, key: &Key) -> Option<Value> {
        let mut state = self.state();
        let object = state.objects.get(key)?.clone();
        Some(self.write(&mut state, key, "DELETED", object))
    }

    /// All of a resource, and the version of the list.
    pub(crate) fn list(&self, resource: &str, namespace: Option<&str>) -> (Vec<Value>, u64) {
        let state = self.state();
        let listed = state
            .objects
            .iter()
            .filter(|(key, _)| key.0 == resource && namespace.is_none_or(|n| n == key.1))
            .map(|(_, object)| object.clone())
            .collect();
        (listed, state.version)
    }

    /// Objects that belong to the owner.
    pub(crate) fn owned_by(&self, uid: &str) -> Vec<Key> {
        let state = self.state();
        let owned = state.objects.iter().filter(|(_, object)| {
            object["metadata"]["ownerReferences"]
                .as_array()
                .is_some_and(|owners| owners.iter().any(|o| o["uid"] == uid))
        });
        owned.map(|(key, _)| key.clone()).collect()
    }

    /// Events after a version; `None` when some of them are forgotten.
    pub(crate) fn after(&self, version: u64) -> Option<Vec<Event>> {
        let state = self.state();
        if version < state.forgotten {
            return None;
        }
        Some(state.log.iter().filter(|e| e.version > version).cloned().collect())
    }

    /// Forgets all events, as a server does after a while.
    pub(crate) fn compact(&self) {
        let mut state = self.state();
        state.log.clear();
        state.version += 1;
        state.forgotten = state.version;
        self.changed.send_replace(state.version);
    }
}
