//! Create, update, patch, delete.

use serde_json::{Value, json};

use crate::{
    admission,
    core::{Core, at, now},
    error::ApiError,
    patch,
    resources::Resource,
    store::{Key, Store},
    typed,
    validate::{self, list, text},
};
use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

/// How a write is to be done.
#[derive(Debug, Clone, Default)]
pub(crate) struct WriteOptions {
    pub(crate) dry_run: bool,
    /// `Strict` refuses unknown fields, `Warn` (as when absent) names them, `Ignore` does not.
    pub(crate) field_validation: String,
}

/// A success: status, object, warnings.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) created: bool,
    pub(crate) object: Arc<Value>,
    pub(crate) warnings: Vec<String>,
}

/// How a deletion is to be done: `DeleteOptions`.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeleteOptions {
    pub(crate) grace_s: Option<i64>,
    pub(crate) uid: Option<String>,
    pub(crate) revision: Option<String>,
    /// `Background` when absent.
    pub(crate) propagation: Option<String>,
    pub(crate) dry_run: bool,
}

fn decoded(
    resource: &Resource,
    body: Value,
    options: &WriteOptions,
) -> Result<(Value, Vec<String>), ApiError> {
    let (object, unknown) = typed::decode(resource, body)?;
    let warnings = match options.field_validation.as_str() {
        "Strict" if !unknown.is_empty() => return Err(typed::strict(resource, &unknown)),
        "Strict" | "Ignore" => Vec::new(),
        _ => unknown
            .iter()
            .map(|path| format!("unknown field \"{path}\""))
            .collect(),
    };
    Ok((object, warnings))
}

fn strip_server_fields(object: &mut Value) {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        for key in [
            "uid",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "selfLink",
            "generation",
            "managedFields",
        ] {
            metadata.remove(key);
        }
    }
}

impl Core {
    pub(crate) fn create(
        &self,
        resource: &Resource,
        namespace: &str,
        body: Value,
        options: &WriteOptions,
    ) -> Result<Written, ApiError> {
        let (mut object, warnings) = decoded(resource, body, options)?;
        strip_server_fields(&mut object);
        let metadata = &mut object["metadata"];
        if !text(&metadata["resourceVersion"]).is_empty() {
            return Err(ApiError::internal(
                "resourceVersion should not be set on objects to be created",
            ));
        }
        let said = text(&metadata["namespace"]);
        if !said.is_empty() && said != namespace {
            return Err(ApiError::bad_request(format!(
                "the namespace of the provided object does not match the namespace sent on the \
                 request ({said} != {namespace})"
            )));
        }
        let prefix = text(&metadata["generateName"]).to_owned();
        if text(&metadata["name"]).is_empty() && !prefix.is_empty() {
            let prefix: String = prefix.chars().take(58).collect();
            metadata["name"] = json!(format!("{prefix}{}", self.suffix()));
        }
        let name = text(&metadata["name"]).to_owned();
        let key = Key::new(resource.qualified(), namespace, &name);
        if ["nodes", "resourcequotas"].contains(&resource.plural.as_ref()) {
            object["status"] = json!({});
        }
        validate::defaults(resource, &mut object);
        secret_strings(resource, &mut object);
        let mut store = self.store();
        if resource.namespaced {
            let namespaces = self.core_resource("namespaces");
            admission::namespace(&store, resource, namespace, &name, &namespaces)?;
        }
        if resource.is("pods") {
            admission::pod(&store, resource, namespace, &mut object)?;
        }
        let mut causes = validate::metadata(resource, &object);
        causes.extend(validate::object(resource, &object));
        if !causes.is_empty() {
            return Err(ApiError::invalid(resource, &name, &causes));
        }
        if resource.is("pods")
            && let Some(error) = validate::not_faked(&object)
        {
            return Err(error);
        }
        if store.get(&key).is_some() {
            return Err(ApiError::already_exists(resource, &name));
        }
        self.stamp(&mut object, namespace, &name);
        if !object["spec"].is_null() && !resource.is("namespaces") && !resource.is("leases") {
            object["metadata"]["generation"] = json!(1);
        }
        let object = if options.dry_run {
            Arc::new(object)
        } else {
            let object = store.put(key, object);
            if resource.is("namespaces") {
                self.default_account(&mut store, &name);
            }
            object
        };
        Ok(Written {
            created: true,
            object,
            warnings,
        })
    }

    pub(crate) fn update(
        &self,
        resource: &Resource,
        key: &Key,
        subresource: Option<&str>,
        body: Value,
        options: &WriteOptions,
    ) -> Result<Written, ApiError> {
        let (object, warnings) = decoded(resource, body, options)?;
        let said = text(&object["metadata"]["name"]).to_owned();
        if said != key.name {
            return Err(ApiError::bad_request(format!(
                "the name of the object ({said}) does not match the name on the URL ({})",
                key.name
            )));
        }
        let mut store = self.store();
        let Some(old) = store.get(key).cloned() else {
            drop(store);
            // Leases may be made by their first update.
            if resource.is("leases") && subresource.is_none() {
                return self.create(resource, &key.namespace, object, options);
            }
            return Err(ApiError::not_found(resource, &key.name));
        };
        let unconditional = object["metadata"]["resourceVersion"].is_null();
        if unconditional && resource.is("leases") {
            let cause = crate::error::Cause::invalid(
                "metadata.resourceVersion",
                &json!(0),
                "must be specified for an update",
            );
            return Err(ApiError::invalid(resource, &key.name, &[cause]));
        }
        let new = (object, warnings);
        self.replace(&mut store, (resource, key, subresource), &old, new, options)
    }

    pub(crate) fn patch(
        &self,
        resource: &Resource,
        key: &Key,
        subresource: Option<&str>,
        content_type: &str,
        change: &Value,
        options: &WriteOptions,
    ) -> Result<Written, ApiError> {
        let mut store = self.store();
        let Some(old) = store.get(key).cloned() else {
            return Err(ApiError::not_found(resource, &key.name));
        };
        if content_type.contains("strategic") && !resource.group.is_empty() {
            let built_in = crate::resources::all(&[]).iter().any(|r| r == resource);
            if !built_in {
                return Err(ApiError::unsupported_media(
                    content_type,
                    &[
                        "application/json-patch+json",
                        "application/merge-patch+json",
                    ],
                ));
            }
        }
        let object = patch::apply(content_type, &old, change)?;
        let (object, warnings) = decoded(resource, object, options)?;
        if text(&object["metadata"]["name"]) != key.name {
            return Err(ApiError::bad_request(
                "the name of the object does not match the name on the URL",
            ));
        }
        let new = (object, warnings);
        self.replace(&mut store, (resource, key, subresource), &old, new, options)
    }

    /// Puts what was decoded, with its warnings, in the place of the old.
    fn replace(
        &self,
        store: &mut Store,
        (resource, key, subresource): (&Resource, &Key, Option<&str>),
        old: &Arc<Value>,
        (mut new, warnings): (Value, Vec<String>),
        options: &WriteOptions,
    ) -> Result<Written, ApiError> {
        secret_strings(resource, &mut new);
        let said = &new["metadata"]["resourceVersion"];
        if !said.is_null() && *said != old["metadata"]["resourceVersion"] {
            return Err(ApiError::modified(resource, &key.name));
        }
        let said = &new["metadata"]["uid"];
        if !said.is_null() && *said != old["metadata"]["uid"] {
            let why = format!(
                "Precondition failed: UID in precondition: {}, UID in object meta: {}",
                text(said),
                text(&old["metadata"]["uid"])
            );
            return Err(ApiError::conflict(resource, &key.name, &why));
        }
        if subresource == Some("status") {
            let mut merged = (**old).clone();
            merged["status"] = new["status"].take();
            new = merged;
        } else {
            for name in [
                "uid",
                "creationTimestamp",
                "deletionTimestamp",
                "deletionGracePeriodSeconds",
                "generation",
                "namespace",
            ] {
                let value = old["metadata"][name].clone();
                if let Some(metadata) = new["metadata"].as_object_mut() {
                    if value.is_null() {
                        metadata.remove(name);
                    } else {
                        metadata.insert(name.to_owned(), value);
                    }
                }
            }
            if !old["status"].is_null() {
                new["status"] = old["status"].clone();
            }
            if new["spec"] != old["spec"]
                && let Some(generation) = old["metadata"]["generation"].as_u64()
            {
                new["metadata"]["generation"] = json!(generation + 1);
            }
        }
        let mut causes = validate::metadata(resource, &new);
        causes.extend(validate::object(resource, &new));
        causes.extend(validate::update(resource, old, &new));
        if !causes.is_empty() {
            return Err(ApiError::invalid(resource, &key.name, &causes));
        }
        let written = |object| Written {
            created: false,
            object,
            warnings,
        };
        if options.dry_run {
            return Ok(written(Arc::new(new)));
        }
        let object = store.put(key.clone(), new);
        // The last finalizer of a deleted object went.
        let metadata = &object["metadata"];
        let over = !metadata["deletionTimestamp"].is_null()
            && metadata["deletionGracePeriodSeconds"] == 0
            && list(&metadata["finalizers"]).next().is_none()
            && !resource.is("namespaces");
        if over {
            store.remove(key);
        }
        Ok(written(object))
    }

    /// Deletes; gives the object, and whether it is gone already.
    pub(crate) fn delete(
        &self,
        resource: &Resource,
        key: &Key,
        options: &DeleteOptions,
    ) -> Result<(Arc<Value>, bool), ApiError> {
        let mut store = self.store();
        self.delete_in(&mut store, resource, key, options)
    }

    pub(crate) fn delete_in(
        &self,
        store: &mut Store,
        resource: &Resource,
        key: &Key,
        options: &DeleteOptions,
    ) -> Result<(Arc<Value>, bool), ApiError> {
        let Some(old) = store.get(key).cloned() else {
            return Err(ApiError::not_found(resource, &key.name));
        };
        let mut object = (*old).clone();
        let metadata = &mut object["metadata"];
        for (wanted, found, what) in [
            (&options.uid, &metadata["uid"], "UID"),
            (
                &options.revision,
                &metadata["resourceVersion"],
                "ResourceVersion",
            ),
        ] {
            if let Some(wanted) = wanted
                && *found != wanted.as_str()
            {
                let why = format!(
                    "Precondition failed: {what} in precondition: {wanted}, {what} in object \
                     meta: {}",
                    text(found)
                );
                return Err(ApiError::conflict(resource, &key.name, &why));
            }
        }
        if options.grace_s.is_some_and(|s| s < 0) {
            return Err(ApiError::bad_request(
                "gracePeriodSeconds must not be negative",
            ));
        }
        let policy = options.propagation.as_deref().unwrap_or("Background");
        let finalizer = match policy {
            "Foreground" => Some("foregroundDeletion"),
            "Background" => None,
            "Orphan" => {
                if !options.dry_run {
                    orphan(store, text(&old["metadata"]["uid"]));
                }
                None
            }
            other => {
                let cause = crate::error::Cause::unsupported(
                    "propagationPolicy",
                    &json!(other),
                    &["Orphan", "Background", "Foreground"],
                );
                return Err(ApiError::invalid(resource, "", &[cause]));
            }
        };
        if let Some(finalizer) = finalizer {
            let mut finalizers: Vec<Value> = list(&metadata["finalizers"]).cloned().collect();
            if !finalizers.iter().any(|f| f == finalizer) {
                finalizers.push(json!(finalizer));
            }
            metadata["finalizers"] = json!(finalizers);
        }
        let grace_s = grace(resource, &old, options);
        let metadata = &mut object["metadata"];
        let before = metadata["deletionGracePeriodSeconds"].as_i64();
        // A second deletion may only be hastier than the first.
        let grace_s = before.map_or(grace_s, |before| before.min(grace_s));
        if before != Some(grace_s) {
            let time = Duration::from_secs(u64::try_from(grace_s).unwrap_or(0));
            metadata["deletionTimestamp"] = json!(at(SystemTime::now() + time));
            metadata["deletionGracePeriodSeconds"] = json!(grace_s);
        }
        let held = list(&metadata["finalizers"]).next().is_some() || resource.is("namespaces");
        if resource.is("namespaces") {
            object["status"]["phase"] = json!("Terminating");
        }
        if options.dry_run {
            return Ok((Arc::new(object), grace_s == 0 && !held));
        }
        if grace_s == 0 && !held {
            let gone = store.remove(key).unwrap_or(old);
            return Ok((gone, true));
        }
        Ok((store.put(key.clone(), object), false))
    }
}

/// Seconds until a deleted object may be removed: only pods on a node get any.
fn grace(resource: &Resource, object: &Value, options: &DeleteOptions) -> i64 {
    let settled = ["Succeeded", "Failed"].contains(&text(&object["status"]["phase"]));
    if !resource.is("pods") || settled || text(&object["spec"]["nodeName"]).is_empty() {
        return 0;
    }
    let own = object["spec"]["terminationGracePeriodSeconds"].as_i64();
    options.grace_s.or(own).unwrap_or(30)
}

/// Takes an owner from whatever it owns.
fn orphan(store: &mut Store, owner: &str) {
    let owned: Vec<(Key, Value)> = store
        .all()
        .filter(|(_, o)| list(&o["metadata"]["ownerReferences"]).any(|r| r["uid"] == owner))
        .map(|(key, object)| (key.clone(), (**object).clone()))
        .collect();
    for (key, mut object) in owned {
        if let Some(owners) = object["metadata"]["ownerReferences"].as_array_mut() {
            owners.retain(|r| r["uid"] != owner);
        }
        store.put(key, object);
    }
}

/// `stringData` becomes `data`.
fn secret_strings(resource: &Resource, object: &mut Value) {
    use base64::Engine;
    if !resource.is("secrets") {
        return;
    }
    let Some(map) = object.as_object_mut() else {
        return;
    };
    if let Some(Value::Object(strings)) = map.remove("stringData") {
        for (key, value) in strings {
            let encoded = base64::engine::general_purpose::STANDARD.encode(text(&value));
            object["data"][key.as_str()] = json!(encoded);
        }
    }
}

/// The `Status` of a deletion whose object is not returned.
pub(crate) fn deleted_status(resource: &Resource, object: &Value) -> Value {
    let metadata = &object["metadata"];
    let mut details = json!({"name": metadata["name"], "kind": resource.plural});
    if !resource.group.is_empty() {
        details["group"] = json!(resource.group);
    }
    details["uid"] = metadata["uid"].clone();
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
        "details": details,
    })
}

/// When something happened, for those who only know now.
pub(crate) fn transition(old: &Value, status: &str) -> Value {
    if old["status"] == status && !old["lastTransitionTime"].is_null() {
        old["lastTransitionTime"].clone()
    } else {
        json!(now())
    }
}
