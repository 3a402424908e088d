//! The controller of kubernetes-sigs/agent-sandbox, as far as one pod per Sandbox goes: it makes the
//! pod of the Sandbox's name, tells in `Ready` how that is, and deletes it at the shutdown time.
//! Works when the custom kind is served ([`crate::agent_sandbox`]).

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    api::write::{DeleteOptions, WriteOptions},
    core::{Core, Shared},
    kubelet::pod::condition,
    resources::Resource,
    store::Key,
    validate::{list, text},
};

const GROUP: &str = "agents.x-k8s.io";
const PLURAL: &str = "sandboxes";
/// When no Sandbox has a shutdown time.
const IDLE: Duration = Duration::from_secs(3600);

/// The custom kind `Sandbox` of agent-sandbox, for [`crate::Settings::custom`].
#[must_use]
pub fn agent_sandbox(version: &str) -> Resource {
    Resource {
        group: GROUP.into(),
        version: version.to_owned().into(),
        plural: PLURAL.into(),
        kind: "Sandbox".into(),
        namespaced: true,
        short: Vec::new(),
    }
}

/// Works whenever something changed, or a shutdown time has come.
pub(crate) async fn run(core: Shared, stop: CancellationToken) {
    let mut changed = core.changes();
    loop {
        changed.borrow_and_update();
        let next = reconcile(&core);
        tokio::select! {
            news = changed.changed() => if news.is_err() { return },
            () = sleep(next) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Does what is due; gives the time until something else will be.
fn reconcile(core: &Core) -> Duration {
    let mut next = IDLE;
    let all: Vec<(Key, Arc<Value>)> = {
        let store = core.store();
        let sandboxes = store.list("sandboxes.agents.x-k8s.io", None);
        sandboxes
            .map(|(key, object)| (key.clone(), Arc::clone(object)))
            .collect()
    };
    for (key, sandbox) in all {
        if !sandbox["metadata"]["deletionTimestamp"].is_null() {
            continue;
        }
        let pod_key = Key::new("pods", key.namespace.clone(), key.name.clone());
        let pod = core.store().get(&pod_key).cloned();
        let owned = pod.as_ref().is_some_and(|pod| {
            list(&pod["metadata"]["ownerReferences"])
                .any(|owner| owner["uid"] == sandbox["metadata"]["uid"])
        });
        let left = time_left(&sandbox);
        let (ready, reason, message) = match (&pod, left) {
            (Some(pod), Some(Duration::ZERO)) => {
                if owned && pod["metadata"]["deletionTimestamp"].is_null() {
                    let pods = core.core_resource("pods");
                    // One that went meanwhile is as good.
                    let _ = core.delete(&pods, &pod_key, &DeleteOptions::default());
                }
                (false, "SandboxExpired", "Sandbox has expired".to_owned())
            }
            (None, Some(Duration::ZERO)) => {
                (false, "SandboxExpired", "Sandbox has expired".to_owned())
            }
            (Some(_), _) if !owned => {
                let message = "a pod of this name belongs to somebody else".to_owned();
                (false, "ReconcilerError", message)
            }
            (Some(pod), _) => {
                let ready = list(&pod["status"]["conditions"])
                    .any(|c| c["type"] == "Ready" && c["status"] == "True");
                let message = format!("Pod is {}", text(&pod["status"]["phase"]));
                (ready, "DependenciesReady", message)
            }
            (None, _) => match make_pod(core, &key, &sandbox) {
                Ok(()) => (false, "DependenciesNotReady", "Pod was created".to_owned()),
                Err(error) => (false, "ReconcilerError", error),
            },
        };
        next = left
            .filter(|left| !left.is_zero())
            .map_or(next, |left| left.min(next));
        let uid = text(&sandbox["metadata"]["uid"]);
        core.change(&key, uid, |sandbox| {
            condition(&mut sandbox["status"], "Ready", ready, reason, &message);
        });
    }
    next
}

/// Until the shutdown time of a Sandbox, if it has one.
fn time_left(sandbox: &Value) -> Option<Duration> {
    let time = DateTime::parse_from_rfc3339(text(&sandbox["spec"]["shutdownTime"])).ok()?;
    let now = DateTime::<Utc>::from(SystemTime::now());
    let left = time.with_timezone(&Utc) - now;
    Some(left.to_std().unwrap_or(Duration::ZERO))
}

fn make_pod(core: &Core, key: &Key, sandbox: &Value) -> Result<(), String> {
    let template = &sandbox["spec"]["podTemplate"];
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": key.name,
            "ownerReferences": [{
                "apiVersion": sandbox["apiVersion"], "kind": "Sandbox", "name": key.name,
                "uid": sandbox["metadata"]["uid"], "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "spec": template["spec"],
    });
    for part in ["labels", "annotations"] {
        if template["metadata"][part].is_object() {
            pod["metadata"][part] = template["metadata"][part].clone();
        }
    }
    let pods = core.core_resource("pods");
    core.create(&pods, &key.namespace, pod, &WriteOptions::default())
        .map(drop)
        .map_err(|error| error.message)
}
