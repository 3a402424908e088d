//! Other forms of answers: tables, which `kubectl get` prints, and metadata alone.

use std::time::SystemTime;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};

use crate::validate::{list, text};

/// How objects are to be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Plain,
    Table,
    Metadata,
}

impl Form {
    pub(crate) fn of(accept: &str) -> Self {
        // The first that we know: clients name the best first.
        for choice in accept.split(',').map(|c| c.replace(' ', "")) {
            let meta = choice.contains("g=meta.k8s.io") && choice.contains("v=v1");
            if !choice.starts_with("application/json") {
                continue;
            }
            if meta && choice.contains("as=Table") {
                return Self::Table;
            }
            if meta && choice.contains("as=PartialObjectMetadata") {
                return Self::Metadata;
            }
            if !choice.contains("as=") {
                return Self::Plain;
            }
        }
        Self::Plain
    }

    /// One object.
    pub(crate) fn object(self, object: &Value) -> Value {
        match self {
            Self::Plain => object.clone(),
            Self::Table => table(
                &[object],
                &json!({"resourceVersion": object["metadata"]["resourceVersion"]}),
                object["kind"] == "Pod",
            ),
            Self::Metadata => metadata(object),
        }
    }

    /// A list whose items are complete objects.
    pub(crate) fn list(self, whole: Value) -> Value {
        match self {
            Self::Plain => whole,
            Self::Table => {
                let items: Vec<&Value> = list(&whole["items"]).collect();
                table(&items, &whole["metadata"], whole["kind"] == "PodList")
            }
            Self::Metadata => {
                let items: Vec<Value> = list(&whole["items"]).map(metadata).collect();
                json!({
                    "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1",
                    "metadata": whole["metadata"], "items": items,
                })
            }
        }
    }
}

fn metadata(object: &Value) -> Value {
    json!({
        "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
        "metadata": object["metadata"],
    })
}

fn table(objects: &[&Value], list_metadata: &Value, pods: bool) -> Value {
    let column = |name: &str, priority: u32| {
        let format = if name == "Name" { "name" } else { "" };
        json!({"name": name, "type": "string", "format": format, "description": name, "priority": priority})
    };
    let columns = if pods {
        vec![
            column("Name", 0),
            column("Ready", 0),
            column("Status", 0),
            column("Restarts", 0),
            column("Age", 0),
            column("IP", 1),
            column("Node", 1),
        ]
    } else {
        vec![column("Name", 0), column("Age", 0)]
    };
    let rows: Vec<Value> = objects
        .iter()
        .map(|object| {
            let name = &object["metadata"]["name"];
            let age = age(text(&object["metadata"]["creationTimestamp"]));
            let cells = if pods {
                let statuses = list(&object["status"]["containerStatuses"]);
                let ready = statuses.clone().filter(|s| s["ready"] == true).count();
                let all = list(&object["spec"]["containers"]).count();
                let restarts: u64 = statuses.filter_map(|s| s["restartCount"].as_u64()).sum();
                json!([
                    name,
                    format!("{ready}/{all}"),
                    pod_status(object),
                    restarts.to_string(),
                    age,
                    object["status"]["podIP"],
                    object["spec"]["nodeName"],
                ])
            } else {
                json!([name, age])
            };
            json!({"cells": cells, "object": metadata(object)})
        })
        .collect();
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": list_metadata,
        "columnDefinitions": columns, "rows": rows,
    })
}

/// The one word that says how a pod is.
fn pod_status(pod: &Value) -> String {
    if !pod["metadata"]["deletionTimestamp"].is_null() {
        return "Terminating".to_owned();
    }
    if let Some(reason) = pod["status"]["reason"].as_str() {
        return reason.to_owned();
    }
    for status in list(&pod["status"]["initContainerStatuses"])
        .chain(list(&pod["status"]["containerStatuses"]))
    {
        let reasons = ["waiting", "terminated"].map(|s| &status["state"][s]["reason"]);
        if let Some(reason) = reasons.into_iter().find_map(Value::as_str) {
            return reason.to_owned();
        }
    }
    text(&pod["status"]["phase"]).to_owned()
}

fn age(created: &str) -> String {
    let Ok(created) = DateTime::parse_from_rfc3339(created) else {
        return "<unknown>".to_owned();
    };
    let now = DateTime::<Utc>::from(SystemTime::now());
    let seconds = (now - created.with_timezone(&Utc)).num_seconds().max(0);
    match seconds {
        0..=119 => format!("{seconds}s"),
        120..=7199 => format!("{}m", seconds / 60),
        7200..=172_799 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_is_the_first_that_is_known() {
        let kubectl = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        assert_eq!(Form::of(kubectl), Form::Table);
        assert_eq!(Form::of("application/json, */*"), Form::Plain);
        let kube = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
        assert_eq!(Form::of(kube), Form::Metadata);
        let proto = "application/vnd.kubernetes.protobuf,application/json";
        assert_eq!(Form::of(proto), Form::Plain);
    }

    #[test]
    fn a_pod_is_a_row() {
        let pod = json!({"kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [{}]},
            "status": {"phase": "Pending", "containerStatuses":
                [{"ready": false, "restartCount": 2, "state": {"waiting": {"reason": "ImagePullBackOff"}}}]}});
        let table = Form::Table.object(&pod);
        let cells = &table["rows"][0]["cells"];
        assert_eq!(cells[1], "0/1");
        assert_eq!(cells[2], "ImagePullBackOff");
        assert_eq!(cells[3], "2");
    }
}
