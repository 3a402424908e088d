//! Whether a body has the shape of its kind, by the types that are generated from the real
//! server's own description.

use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{ConfigMap, Event, Namespace, Node, Pod, ResourceQuota, Secret, ServiceAccount},
    networking::v1::NetworkPolicy,
    node::v1::RuntimeClass,
    scheduling::v1::PriorityClass,
    storage::v1::StorageClass,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{error::ApiError, resources::Resource};

fn through<T: Serialize + DeserializeOwned>(object: &Value) -> Result<Value, String> {
    let typed = T::deserialize(object).map_err(|e| e.to_string())?;
    serde_json::to_value(typed).map_err(|e| e.to_string())
}

/// The object as its types write it; `None` for kinds without types (custom ones).
fn typed(resource: &Resource, object: &Value) -> Option<Result<Value, String>> {
    Some(match resource.kind.as_ref() {
        "ConfigMap" => through::<ConfigMap>(object),
        "Event" => through::<Event>(object),
        "Lease" => through::<Lease>(object),
        "Namespace" => through::<Namespace>(object),
        "NetworkPolicy" => through::<NetworkPolicy>(object),
        "Node" => through::<Node>(object),
        "Pod" => through::<Pod>(object),
        "PriorityClass" => through::<PriorityClass>(object),
        "ResourceQuota" => through::<ResourceQuota>(object),
        "RuntimeClass" => through::<RuntimeClass>(object),
        "Secret" => through::<Secret>(object),
        "ServiceAccount" => through::<ServiceAccount>(object),
        "StorageClass" => through::<StorageClass>(object),
        _ => return None,
    })
}

/// Checks the shape and drops what no field is for; gives the paths of what was dropped.
pub(crate) fn decode(
    resource: &Resource,
    mut object: Value,
) -> Result<(Value, Vec<String>), ApiError> {
    let cannot = |reason: &str| {
        ApiError::bad_request(format!(
            "{kind} in version \"{version}\" cannot be handled as a {kind}: {reason}",
            kind = resource.kind,
            version = resource.version,
        ))
    };
    if !object.is_object() {
        return Err(cannot("json: cannot unmarshal into Go value: no object"));
    }
    for (key, expected) in [
        ("apiVersion", resource.api_version()),
        ("kind", resource.kind.to_string()),
    ] {
        if object[key].is_null() {
            object[key] = Value::String(expected);
        } else if object[key] != expected.as_str() {
            return Err(ApiError::bad_request(format!(
                "the {key} in the data ({}) does not match the expected {key} ({expected})",
                object[key].as_str().unwrap_or_default()
            )));
        }
    }
    if object["metadata"].is_null() {
        object["metadata"] = Value::Object(serde_json::Map::new());
    }
    // A null is as good as nothing, and the types are not told of it.
    drop_nulls(&mut object);
    let mut unknown = Vec::new();
    if let Some(typed) = typed(resource, &object) {
        let typed = typed.map_err(|reason| cannot(&reason))?;
        drop_unknown(&mut object, &typed, "", &mut unknown);
    }
    Ok((object, unknown))
}

/// What strict validation says.
pub(crate) fn strict(resource: &Resource, unknown: &[String]) -> ApiError {
    let listed: Vec<String> = unknown
        .iter()
        .map(|path| format!("unknown field \"{path}\""))
        .collect();
    ApiError::bad_request(format!(
        "{kind} in version \"{version}\" cannot be handled as a {kind}: strict decoding error: {}",
        listed.join(", "),
        kind = resource.kind,
        version = resource.version,
    ))
}

fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, v| !v.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

fn drop_unknown(object: &mut Value, typed: &Value, path: &str, unknown: &mut Vec<String>) {
    match (object, typed) {
        (Value::Object(object), Value::Object(typed)) => {
            object.retain(|key, value| {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                let Some(typed) = typed.get(key) else {
                    // Optional lists and maps that are empty may be left out by the types.
                    let empty = value.as_object().is_some_and(serde_json::Map::is_empty)
                        || value.as_array().is_some_and(Vec::is_empty);
                    if !empty {
                        unknown.push(path);
                    }
                    return empty;
                };
                drop_unknown(value, typed, &path, unknown);
                true
            });
        }
        (Value::Array(object), Value::Array(typed)) => {
            for (at, (item, typed)) in object.iter_mut().zip(typed).enumerate() {
                drop_unknown(item, typed, &format!("{path}[{at}]"), unknown);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::find;
    use serde_json::json;

    #[test]
    fn shapes_are_checked_and_unknown_fields_named() {
        let pods = find("", "v1", "pods", &[]).unwrap();
        let pod = json!({"metadata": {"name": "a", "creationTimestamp": null, "labels": {}},
            "spec": {"containers": [{"name": "c", "image": "i", "comand": ["x"]}], "nope": 1}});
        let (object, unknown) = decode(&pods, pod).unwrap();
        assert_eq!(unknown, ["spec.containers[0].comand", "spec.nope"]);
        assert_eq!(
            object["spec"],
            json!({"containers": [{"name": "c", "image": "i"}]})
        );
        assert_eq!(object["kind"], "Pod");
        let said = strict(&pods, &unknown).message;
        assert!(
            said.contains("strict decoding error: unknown field \"spec.containers[0].comand\"")
        );
        let wrong = json!({"spec": {"containers": "x"}});
        assert_eq!(decode(&pods, wrong).unwrap_err().code, 400);
        assert!(decode(&pods, json!({"kind": "Secret"})).is_err());
    }
}
