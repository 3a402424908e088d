//! All objects and what happened to them: one revision for the whole cluster, as in etcd.
//!
//! The log of changes answers watches and reads of the past. It is bounded; what is older than
//! its first entry is gone, as after a compaction.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use serde_json::{Value, json};

/// Which object: resource as `Resource::qualified`, namespace (empty when it has none), name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) resource: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl Key {
    pub(crate) fn new(
        resource: impl Into<String>,
        namespace: impl Into<String>,
        name: impl Into<String>,
    ) -> Self {
        Self {
            resource: resource.into(),
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

/// One change of one object.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) revision: u64,
    pub(crate) key: Key,
    pub(crate) before: Option<Arc<Value>>,
    /// `None`: it was removed.
    pub(crate) after: Option<Arc<Value>>,
}

/// What was asked for is older than the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooOld {
    pub(crate) oldest: u64,
}

#[derive(Debug)]
pub(crate) struct Store {
    objects: BTreeMap<Key, Arc<Value>>,
    log: VecDeque<Change>,
    log_max: usize,
    revision: u64,
    /// Everything after this revision is in the log.
    compacted: u64,
}

impl Store {
    pub(crate) fn new(log_max: usize) -> Self {
        // A real cluster has had a past when the first client comes.
        Self {
            objects: BTreeMap::new(),
            log: VecDeque::new(),
            log_max: log_max.max(1),
            revision: 100,
            compacted: 100,
        }
    }

    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Arc<Value>> {
        self.objects.get(key)
    }

    /// All of a resource, of one namespace or (`None`) all of them, in order of names.
    pub(crate) fn list<'a>(
        &'a self,
        resource: &'a str,
        namespace: Option<&'a str>,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<Value>)> + 'a {
        let start = Key::new(resource, namespace.unwrap_or(""), "");
        self.objects.range(start..).take_while(move |(key, _)| {
            key.resource == resource && namespace.is_none_or(|n| n == key.namespace)
        })
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (&Key, &Arc<Value>)> {
        self.objects.iter()
    }

    fn record(&mut self, key: Key, before: Option<Arc<Value>>, after: Option<Arc<Value>>) {
        self.log.push_back(Change {
            revision: self.revision,
            key,
            before,
            after,
        });
        while self.log.len() > self.log_max {
            if let Some(change) = self.log.pop_front() {
                self.compacted = change.revision;
            }
        }
    }

    /// Stores an object under a new revision. What is the same as before is left alone.
    pub(crate) fn put(&mut self, key: Key, mut object: Value) -> Arc<Value> {
        let before = self.objects.get(&key).cloned();
        if let Some(before) = &before {
            object["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"].clone();
            if object == **before {
                return Arc::clone(before);
            }
        }
        self.revision += 1;
        object["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        let object = Arc::new(object);
        self.objects.insert(key.clone(), Arc::clone(&object));
        self.record(key, before, Some(Arc::clone(&object)));
        object
    }

    /// Removes an object; gives its last state, with the revision of the removal.
    pub(crate) fn remove(&mut self, key: &Key) -> Option<Arc<Value>> {
        let before = self.objects.remove(key)?;
        self.revision += 1;
        let mut last = (*before).clone();
        last["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        self.record(key.clone(), Some(before), None);
        Some(Arc::new(last))
    }

    /// What happened after a revision.
    pub(crate) fn changes_after(&self, revision: u64) -> Result<Vec<Change>, TooOld> {
        self.check(revision)?;
        let first = self.log.partition_point(|c| c.revision <= revision);
        Ok(self.log.iter().skip(first).cloned().collect())
    }

    fn check(&self, revision: u64) -> Result<(), TooOld> {
        if revision < self.compacted {
            return Err(TooOld {
                oldest: self.compacted,
            });
        }
        Ok(())
    }

    /// A resource as it was at a revision.
    pub(crate) fn at(
        &self,
        revision: u64,
        resource: &str,
        namespace: Option<&str>,
    ) -> Result<BTreeMap<Key, Arc<Value>>, TooOld> {
        self.check(revision)?;
        let mut found: BTreeMap<Key, Arc<Value>> = self
            .list(resource, namespace)
            .map(|(key, object)| (key.clone(), Arc::clone(object)))
            .collect();
        let undone = self.log.iter().rev().take_while(|c| c.revision > revision);
        for change in undone {
            let here = change.key.resource == resource
                && namespace.is_none_or(|n| n == change.key.namespace);
            match (&change.before, here) {
                (Some(before), true) => {
                    found.insert(change.key.clone(), Arc::clone(before));
                }
                (None, true) => {
                    found.remove(&change.key);
                }
                (_, false) => {}
            }
        }
        Ok(found)
    }

    /// Forgets the past.
    pub(crate) fn compact(&mut self) {
        self.log.clear();
        self.compacted = self.revision;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(store: &mut Store, name: &str, value: u64) -> u64 {
        let object = json!({"metadata": {"name": name}, "value": value});
        store.put(Key::new("pods", "ns", name), object);
        store.revision()
    }

    fn values(found: &BTreeMap<Key, Arc<Value>>) -> Vec<(String, u64)> {
        found
            .iter()
            .map(|(key, object)| (key.name.clone(), object["value"].as_u64().unwrap()))
            .collect()
    }

    #[test]
    fn the_past_can_be_read_until_it_is_compacted() {
        let mut store = Store::new(100);
        let first = put(&mut store, "a", 1);
        let second = put(&mut store, "b", 2);
        put(&mut store, "a", 3);
        store.remove(&Key::new("pods", "ns", "b"));
        let at = |store: &Store, r| values(&store.at(r, "pods", Some("ns")).unwrap());
        assert_eq!(at(&store, first), [("a".to_owned(), 1)]);
        let both = [("a".to_owned(), 1), ("b".to_owned(), 2)];
        assert_eq!(at(&store, second), both);
        assert_eq!(at(&store, store.revision()), [("a".to_owned(), 3)]);
        assert_eq!(store.changes_after(second).unwrap().len(), 2);
        store.compact();
        let oldest = store.revision();
        assert_eq!(store.changes_after(second).unwrap_err(), TooOld { oldest });
        assert!(store.at(first, "pods", None).is_err());
        assert!(store.changes_after(oldest).unwrap().is_empty());
    }

    #[test]
    fn a_write_that_changes_nothing_is_no_revision() {
        let mut store = Store::new(100);
        let first = put(&mut store, "a", 1);
        assert_eq!(put(&mut store, "a", 1), first);
        assert_eq!(put(&mut store, "a", 2), first + 1);
    }

    #[test]
    fn the_log_is_bounded() {
        let mut store = Store::new(3);
        let first = put(&mut store, "a", 0);
        for value in 1..=3 {
            put(&mut store, "a", value);
        }
        assert!(store.changes_after(first).is_ok());
        assert!(store.changes_after(first - 1).is_err());
    }
}
