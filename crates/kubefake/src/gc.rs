//! What the controller manager does: dependents of what is gone, namespaces that end, quotas.

use std::{collections::HashMap, sync::Arc};

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    admission,
    api::write::DeleteOptions,
    core::{Core, Shared},
    quantity, resources,
    store::Key,
    validate::list,
};

/// Works whenever something changed.
pub(crate) async fn run(core: Shared, stop: CancellationToken) {
    let mut changed = core.changes();
    loop {
        changed.borrow_and_update();
        collect(&core);
        end_namespaces(&core);
        count_quotas(&core);
        tokio::select! {
            news = changed.changed() => if news.is_err() { return },
            () = stop.cancelled() => return,
        }
    }
}

fn delete(core: &Core, key: &Key, object: &Value, propagation: Option<&str>) {
    let all = resources::all(&core.settings.custom);
    let Some(resource) = all.into_iter().find(|r| r.qualified() == key.resource) else {
        return;
    };
    let options = DeleteOptions {
        uid: object["metadata"]["uid"].as_str().map(str::to_owned),
        propagation: propagation.map(str::to_owned),
        ..DeleteOptions::default()
    };
    // What went meanwhile is gone.
    let _ = core.delete(&resource, key, &options);
}

/// Deletes what all owners have left, and lets owners go that wait for their dependents.
fn collect(core: &Core) {
    let objects: Vec<(Key, Arc<Value>)> = {
        let store = core.store();
        let owned = |o: &Value| {
            list(&o["metadata"]["ownerReferences"]).next().is_some()
                || list(&o["metadata"]["finalizers"]).any(|f| f == "foregroundDeletion")
        };
        if !store.all().any(|(_, object)| owned(object)) {
            return;
        }
        store
            .all()
            .map(|(key, object)| (key.clone(), Arc::clone(object)))
            .collect()
    };
    let by_uid: HashMap<&str, (&Key, &Value)> = objects
        .iter()
        .filter_map(|(key, object)| Some((object["metadata"]["uid"].as_str()?, (key, &**object))))
        .collect();
    let ends = |object: &Value| {
        !object["metadata"]["deletionTimestamp"].is_null()
            && list(&object["metadata"]["finalizers"]).any(|f| f == "foregroundDeletion")
    };
    let mut blocked: Vec<&str> = Vec::new();
    for (key, object) in &objects {
        let owners: Vec<&Value> = list(&object["metadata"]["ownerReferences"]).collect();
        if owners.is_empty() {
            continue;
        }
        let living: Vec<&Value> = owners
            .iter()
            .filter_map(|owner| {
                let (place, found) = by_uid.get(owner["uid"].as_str()?)?;
                // An owner in another namespace is none.
                let near = place.namespace.is_empty() || place.namespace == key.namespace;
                near.then_some(*found)
            })
            .collect();
        let solid = living.iter().any(|owner| !ends(owner));
        let going = !object["metadata"]["deletionTimestamp"].is_null();
        if !solid && !going {
            let foreground = (!living.is_empty()).then_some("Foreground");
            delete(core, key, object, foreground);
        }
        if !solid {
            blocked.extend(
                owners
                    .iter()
                    .filter(|o| o["blockOwnerDeletion"] == true)
                    .filter_map(|o| o["uid"].as_str()),
            );
        }
    }
    for (key, object) in objects.iter().filter(|(_, o)| ends(o)) {
        let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
        if !blocked.contains(&uid) {
            release(core, key, uid);
        }
    }
}

/// Takes the finalizer of a foreground deletion, and the object when that was the last.
fn release(core: &Core, key: &Key, uid: &str) {
    let mut left = 1;
    let mut grace = 0;
    core.change(key, uid, |object| {
        let metadata = &mut object["metadata"];
        grace = metadata["deletionGracePeriodSeconds"].as_i64().unwrap_or(0);
        if let Some(finalizers) = metadata["finalizers"].as_array_mut() {
            finalizers.retain(|f| f != "foregroundDeletion");
            left = finalizers.len();
        }
    });
    if left == 0 && grace == 0 {
        let mut store = core.store();
        let same = store.get(key).is_some_and(|o| o["metadata"]["uid"] == uid);
        if same {
            store.remove(key);
        }
    }
}

/// Empties namespaces that were deleted; they go when they are empty.
fn end_namespaces(core: &Core) {
    let ending: Vec<Key> = {
        let store = core.store();
        let all = store.list("namespaces", None);
        all.filter(|(_, n)| !n["metadata"]["deletionTimestamp"].is_null())
            .map(|(key, _)| key.clone())
            .collect()
    };
    for namespace in ending {
        let content: Vec<(Key, Arc<Value>)> = {
            let store = core.store();
            let within = store
                .all()
                .filter(|(key, _)| key.namespace == namespace.name);
            within
                .map(|(key, object)| (key.clone(), Arc::clone(object)))
                .collect()
        };
        if content.is_empty() {
            core.store().remove(&namespace);
            continue;
        }
        for (key, object) in content {
            if object["metadata"]["deletionTimestamp"].is_null() {
                delete(core, &key, &object, None);
            }
        }
    }
}

/// Writes what quotas say is used.
fn count_quotas(core: &Core) {
    let mut store = core.store();
    let quotas: Vec<(Key, Arc<Value>)> = store
        .list("resourcequotas", None)
        .map(|(key, quota)| (key.clone(), Arc::clone(quota)))
        .collect();
    for (key, quota) in quotas {
        let hard = quota["spec"]["hard"].clone();
        let used = admission::used(&store, &key.namespace, &hard);
        let used: serde_json::Map<String, Value> = used
            .into_iter()
            .map(|(name, amount)| (name, json!(quantity::show(amount))))
            .collect();
        let mut quota = (*quota).clone();
        quota["status"] = json!({"hard": hard, "used": used});
        // Putting what is there already is no change, so this ends.
        store.put(key, quota);
    }
}
