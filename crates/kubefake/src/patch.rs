//! Patches: JSON merge (RFC 7386), JSON (RFC 6902: add, remove, replace, test), and strategic
//! merge as far as `kubectl` sends it for the kinds that are here.

use serde_json::{Map, Value, json};

use crate::error::ApiError;

/// Lists that are merged by a key instead of being replaced: the last part of the path, the key.
/// An empty key: a list of plain values, merged as a set.
const MERGED: [(&str, &str); 22] = [
    ("containers", "name"),
    ("initContainers", "name"),
    ("ephemeralContainers", "name"),
    ("volumes", "name"),
    ("env", "name"),
    ("volumeMounts", "mountPath"),
    ("volumeDevices", "devicePath"),
    ("ports", "containerPort"),
    ("imagePullSecrets", "name"),
    ("hostAliases", "ip"),
    ("topologySpreadConstraints", "topologyKey"),
    ("resourceClaims", "name"),
    ("schedulingGates", "name"),
    ("conditions", "type"),
    ("podIPs", "ip"),
    ("hostIPs", "ip"),
    ("addresses", "type"),
    ("taints", "key"),
    ("secrets", "name"),
    ("ownerReferences", "uid"),
    ("finalizers", ""),
    ("podCIDRs", ""),
];

/// Applies a patch of the given content type.
pub(crate) fn apply(content_type: &str, object: &Value, patch: &Value) -> Result<Value, ApiError> {
    let mut result = object.clone();
    match content_type {
        "application/merge-patch+json" => merge(&mut result, patch),
        "application/strategic-merge-patch+json" => strategic(&mut result, patch)?,
        "application/json-patch+json" => json_patch(&mut result, patch)?,
        "application/apply-patch+yaml" | "application/apply-patch+cbor" => {
            return Err(ApiError::not_faked("server-side apply"));
        }
        other => {
            return Err(ApiError::unsupported_media(
                other,
                &[
                    "application/json-patch+json",
                    "application/merge-patch+json",
                    "application/strategic-merge-patch+json",
                ],
            ));
        }
    }
    Ok(result)
}

fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    if let Value::Object(target) = target {
        for (key, value) in patch {
            if value.is_null() {
                target.remove(key);
            } else {
                merge(target.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
    }
}

fn strategic(target: &mut Value, patch: &Value) -> Result<(), ApiError> {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return Ok(());
    };
    let plain = |patch: &Map<String, Value>| -> Map<String, Value> {
        let own = |key: &String| !key.starts_with('$');
        let kept = patch
            .iter()
            .filter(|(key, value)| own(key) && !value.is_null());
        kept.map(|(k, v)| (k.clone(), v.clone())).collect()
    };
    match patch.get("$patch").and_then(Value::as_str) {
        Some("replace") => {
            *target = Value::Object(plain(patch));
            return Ok(());
        }
        Some("delete") => {
            *target = json!({});
            return Ok(());
        }
        Some("merge") | None => {}
        Some(other) => {
            return Err(ApiError::bad_request(format!(
                "unknown patch type: {other}"
            )));
        }
    }
    if !target.is_object() {
        *target = json!({});
    }
    let Value::Object(target) = target else {
        return Ok(());
    };
    if let Some(kept) = patch.get("$retainKeys").and_then(Value::as_array) {
        target.retain(|key, _| kept.iter().any(|k| k == key));
    }
    for (key, value) in patch {
        if let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/") {
            let gone = value.as_array().cloned().unwrap_or_default();
            if let Some(Value::Array(values)) = target.get_mut(list) {
                values.retain(|v| !gone.contains(v));
            }
        }
    }
    for (key, value) in patch.iter().filter(|(key, _)| !key.starts_with('$')) {
        let merged = MERGED.iter().find(|(name, _)| name == key);
        match (value, merged) {
            (Value::Null, _) => {
                target.remove(key);
            }
            (Value::Array(items), Some((_, by))) => {
                let list = target.entry(key.clone()).or_insert_with(|| json!([]));
                merge_list(list, items, by)?;
            }
            (Value::Object(_), _) => {
                strategic(target.entry(key.clone()).or_insert(Value::Null), value)?;
            }
            _ => {
                target.insert(key.clone(), value.clone());
            }
        }
    }
    for (key, order) in patch {
        let Some(list) = key.strip_prefix("$setElementOrder/") else {
            continue;
        };
        let by = MERGED.iter().find(|(name, _)| *name == list);
        if let (Some((_, by)), Some(Value::Array(values))) = (by, target.get_mut(list)) {
            let id = |v: &Value| {
                if by.is_empty() {
                    v.clone()
                } else {
                    v[*by].clone()
                }
            };
            let order: Vec<Value> = order.as_array().into_iter().flatten().map(id).collect();
            // Stable: what the patch does not name stays where it is, at the end.
            values.sort_by_key(|v| {
                let at = order.iter().position(|wanted| *wanted == id(v));
                at.unwrap_or(order.len())
            });
        }
    }
    Ok(())
}

fn merge_list(list: &mut Value, items: &[Value], by: &str) -> Result<(), ApiError> {
    let Value::Array(list) = list else {
        *list = Value::Array(items.to_vec());
        return Ok(());
    };
    if items.iter().any(|i| i["$patch"] == "replace") {
        let own = items.iter().filter(|i| i["$patch"].is_null());
        *list = own.cloned().collect();
        return Ok(());
    }
    for item in items {
        if by.is_empty() {
            if !list.contains(item) {
                list.push(item.clone());
            }
            continue;
        }
        if item[by].is_null() {
            return Err(ApiError::bad_request(format!(
                "map: {item} does not contain declared merge key: {by}"
            )));
        }
        if item["$patch"] == "delete" {
            list.retain(|old| old[by] != item[by]);
        } else if let Some(old) = list.iter_mut().find(|old| old[by] == item[by]) {
            strategic(old, item)?;
        } else {
            let mut fresh = json!({});
            strategic(&mut fresh, item)?;
            list.push(fresh);
        }
    }
    Ok(())
}

fn json_patch(target: &mut Value, patch: &Value) -> Result<(), ApiError> {
    let refuse = |reason: String| {
        ApiError::new(
            http::StatusCode::UNPROCESSABLE_ENTITY,
            "Invalid",
            format!("the server rejected our request due to an error in our request: {reason}"),
        )
    };
    let Value::Array(operations) = patch else {
        return Err(ApiError::bad_request("a JSON patch is a list"));
    };
    for operation in operations {
        let path = operation["path"].as_str().unwrap_or_default();
        let value = operation["value"].clone();
        let (parent, last) = path
            .rsplit_once('/')
            .ok_or_else(|| refuse(format!("path {path:?}")))?;
        let last = last.replace("~1", "/").replace("~0", "~");
        let name = operation["op"].as_str().unwrap_or_default();
        if name == "test" {
            if target.pointer(path) != Some(&value) {
                return Err(refuse(format!("testing value {path} failed")));
            }
            continue;
        }
        let missing = || {
            refuse(format!(
                "{name} operation does not apply: doc is missing path {path:?}"
            ))
        };
        let done = match (target.pointer_mut(parent).ok_or_else(missing)?, name) {
            (Value::Object(map), "add") => {
                map.insert(last, value);
                true
            }
            (Value::Object(map), "replace") => match map.get_mut(&last) {
                Some(old) => {
                    *old = value;
                    true
                }
                None => false,
            },
            (Value::Object(map), "remove") => map.remove(&last).is_some(),
            (Value::Array(list), "add") if last == "-" => {
                list.push(value);
                true
            }
            (Value::Array(list), _) => match (last.parse::<usize>(), name) {
                (Ok(at), "add") if at <= list.len() => {
                    list.insert(at, value);
                    true
                }
                (Ok(at), "replace") if at < list.len() => {
                    list[at] = value;
                    true
                }
                (Ok(at), "remove") if at < list.len() => {
                    list.remove(at);
                    true
                }
                _ => false,
            },
            _ => return Err(refuse(format!("unexpected kind: {name}"))),
        };
        if !done {
            return Err(missing());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merge_patches_remove_what_is_null_and_replace_lists() {
        let object = json!({"a": {"b": 1, "c": 2}, "l": [1, 2]});
        let patch = json!({"a": {"b": null, "d": {"e": null, "f": 1}}, "l": [3]});
        let result = apply("application/merge-patch+json", &object, &patch).unwrap();
        assert_eq!(result, json!({"a": {"c": 2, "d": {"f": 1}}, "l": [3]}));
    }

    #[test]
    fn strategic_patches_merge_lists_by_their_keys() {
        let object = json!({"metadata": {"finalizers": ["a", "b"]}, "spec": {
            "containers": [{"name": "x", "image": "1", "args": ["p"]}, {"name": "y"}],
            "volumes": [{"name": "v", "emptyDir": {}}]}});
        let patch = json!({
        "metadata": {"$deleteFromPrimitiveList/finalizers": ["a"], "finalizers": ["c"]},
        "spec": {
            "$setElementOrder/containers": [{"name": "z"}, {"name": "x"}],
            "containers": [{"name": "x", "image": "2"}, {"name": "y", "$patch": "delete"}, {"name": "z"}],
            "volumes": [{"name": "v", "$retainKeys": ["name", "secret"], "secret": {"secretName": "s"}}],
        }});
        let result = apply("application/strategic-merge-patch+json", &object, &patch).unwrap();
        assert_eq!(
            result,
            json!({"metadata": {"finalizers": ["b", "c"]}, "spec": {
                "containers": [{"name": "z"}, {"name": "x", "image": "2", "args": ["p"]}],
                "volumes": [{"name": "v", "secret": {"secretName": "s"}}]}})
        );
    }

    #[test]
    fn json_patches_do_what_they_say_or_say_why_not() {
        let kind = "application/json-patch+json";
        let object = json!({"m": {"l": {}}, "a": [1, 2]});
        let patch = json!([
            {"op": "test", "path": "/a/0", "value": 1},
            {"op": "add", "path": "/m/l/x~1y", "value": "v"},
            {"op": "remove", "path": "/a/0"},
            {"op": "add", "path": "/a/-", "value": 3},
        ]);
        let result = apply(kind, &object, &patch).unwrap();
        assert_eq!(result, json!({"m": {"l": {"x/y": "v"}}, "a": [2, 3]}));
        let wrong = json!([{"op": "remove", "path": "/none/x"}]);
        assert_eq!(apply(kind, &object, &wrong).unwrap_err().code, 422);
        let error = apply("application/apply-patch+yaml", &object, &json!({})).unwrap_err();
        assert!(error.message.contains("server-side apply"));
        assert_eq!(
            apply("text/plain", &object, &json!({})).unwrap_err().code,
            415
        );
    }
}
