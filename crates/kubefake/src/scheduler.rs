//! Which pods get onto the node, and why the others do not.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    admission::charges,
    core::{Core, Shared},
    kubelet::pod::condition,
    quantity,
    selector::chooses,
    store::{Key, Store},
    validate::{list, text},
};

/// The name of the one node.
pub(crate) const NODE: &str = "kubefake-node";

/// What a node is when it registers.
pub(crate) fn node_object(allocatable: &Value) -> Value {
    let mut status = json!({
        "capacity": allocatable, "allocatable": allocatable,
        "addresses": [{"type": "InternalIP", "address": crate::kubelet::HOST_ADDRESS},
            {"type": "Hostname", "address": NODE}],
        "nodeInfo": {"kubeletVersion": "v1.36.2", "containerRuntimeVersion": "runc",
            "operatingSystem": "linux", "architecture": "amd64", "osImage": "", "kernelVersion": "",
            "bootID": "", "machineID": "", "systemUUID": "", "kubeProxyVersion": ""},
    });
    condition(
        &mut status,
        "Ready",
        true,
        "KubeletReady",
        "kubelet is posting ready status",
    );
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": NODE, "labels": {
            "kubernetes.io/hostname": NODE, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
        }},
        "spec": {}, "status": status,
    })
}

/// Works whenever something changed.
pub(crate) async fn run(core: Shared, stop: CancellationToken) {
    let mut changed = core.changes();
    loop {
        changed.borrow_and_update();
        schedule(&core);
        tokio::select! {
            news = changed.changed() => if news.is_err() { return },
            () = stop.cancelled() => return,
        }
    }
}

fn schedule(core: &Core) {
    let waiting: Vec<(Key, Arc<Value>)> = {
        let store = core.store();
        let pods = store.list("pods", None);
        pods.filter(|(_, pod)| {
            text(&pod["spec"]["nodeName"]).is_empty()
                && pod["metadata"]["deletionTimestamp"].is_null()
                && pod["spec"]["schedulerName"] == "default-scheduler"
                && list(&pod["spec"]["schedulingGates"]).next().is_none()
        })
        .map(|(key, pod)| (key.clone(), Arc::clone(pod)))
        .collect()
    };
    for (key, pod) in waiting {
        let why_not = obstacles(&core.store(), &pod);
        if why_not.is_none() {
            // Before the node can say anything about it.
            let message = format!(
                "Successfully assigned {}/{} to {NODE}",
                key.namespace, key.name
            );
            core.event(&pod, None, "Normal", "Scheduled", &message);
        }
        let uid = text(&pod["metadata"]["uid"]);
        let mut news = false;
        core.change(&key, uid, |object| {
            let status = &mut object["status"];
            let before = status["conditions"].clone();
            match &why_not {
                None => condition(status, "PodScheduled", true, "", ""),
                Some(why) => condition(status, "PodScheduled", false, "Unschedulable", why),
            }
            news = status["conditions"] != before;
            if why_not.is_none() {
                object["spec"]["nodeName"] = json!(NODE);
            }
        });
        if let (Some(message), true) = (why_not, news) {
            core.event(&pod, None, "Warning", "FailedScheduling", &message);
        }
    }
}

/// Why a pod cannot be on the node now.
fn obstacles(store: &Store, pod: &Value) -> Option<String> {
    let Some(node) = store.get(&Key::new("nodes", "", NODE)) else {
        return Some("no nodes available to schedule pods".to_owned());
    };
    let mut reasons = Vec::new();
    if node["spec"]["unschedulable"] == true {
        reasons.push("1 node(s) were unschedulable".to_owned());
    }
    let tolerated = |taint: &Value| {
        list(&pod["spec"]["tolerations"]).any(|toleration| {
            let key = toleration["key"].is_null() || toleration["key"] == taint["key"];
            let effect = toleration["effect"].is_null() || toleration["effect"] == taint["effect"];
            let value = toleration["operator"] == "Exists" || toleration["value"] == taint["value"];
            key && effect && value
        })
    };
    let hard = |taint: &&Value| taint["effect"] != "PreferNoSchedule";
    for taint in list(&node["spec"]["taints"]).filter(hard) {
        if !tolerated(taint) {
            reasons.push(format!(
                "1 node(s) had untolerated taint(s) {{{}: {}}}",
                text(&taint["key"]),
                text(&taint["value"])
            ));
        }
    }
    let labels = &node["metadata"]["labels"];
    for (key, value) in pod["spec"]["nodeSelector"]
        .as_object()
        .into_iter()
        .flatten()
    {
        if labels[key] != *value {
            reasons.push("1 node(s) didn't match Pod's node affinity/selector".to_owned());
            break;
        }
    }
    let terms = &pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let namespace = text(&pod["metadata"]["namespace"]);
    let others = || {
        store
            .list("pods", None)
            .filter(|(_, other)| {
                other["spec"]["nodeName"] == NODE
                    && !["Succeeded", "Failed"].contains(&text(&other["status"]["phase"]))
            })
            .map(|(key, other)| (key.namespace.as_str(), other))
    };
    for term in list(terms) {
        let taken = others().any(|(place, other)| {
            place == namespace && chooses(&term["labelSelector"], &other["metadata"]["labels"])
        });
        if taken {
            reasons.push("1 node(s) didn't match pod anti-affinity rules".to_owned());
            break;
        }
    }
    let wanted = charges(pod);
    let room = &node["status"]["allocatable"];
    for (resource, charge) in [
        ("pods", "pods"),
        ("cpu", "requests.cpu"),
        ("memory", "requests.memory"),
        ("ephemeral-storage", "requests.ephemeral-storage"),
    ] {
        let (Some(want), Some(all)) = (wanted.get(charge), quantity::of(&room[resource])) else {
            continue;
        };
        let used: i128 = others()
            .filter_map(|(_, other)| charges(other).get(charge).copied())
            .sum();
        if used + want > all {
            reasons.push(if resource == "pods" {
                "1 Too many pods".to_owned()
            } else {
                format!("1 Insufficient {resource}")
            });
        }
    }
    if reasons.is_empty() {
        return None;
    }
    Some(format!(
        "0/1 nodes are available: {}. preemption: 0/1 nodes are available: 1 No preemption \
         victims found for incoming pod.",
        reasons.join(", ")
    ))
}
