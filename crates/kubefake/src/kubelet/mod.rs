//! The one node: what a kubelet does with the pods that are its own.

pub(crate) mod container;
pub(crate) mod images;
pub(crate) mod node;
pub(crate) mod pod;
mod run;
pub(crate) mod spec;
pub(crate) mod volumes;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use serde_json::Value;
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{
    container::Container,
    images::Images,
    node::Node,
    pod::{Pod, Want},
};
use crate::{
    core::Shared,
    error::ApiError,
    logs::Log,
    scheduler::NODE,
    selector::chooses,
    store::Key,
    validate::{list, text},
};

/// The node's own address, as pods' statuses name it.
pub(crate) const HOST_ADDRESS: &str = "10.0.0.1";

#[derive(Debug)]
pub(crate) struct Kubelet {
    pub(crate) core: Shared,
    node: Arc<Node>,
    images: Mutex<Images>,
    images_changed: watch::Sender<u64>,
    pods: Mutex<HashMap<String, Arc<Pod>>>,
    /// Whether the node can be reached and does its work.
    reachable: watch::Sender<bool>,
    addresses: AtomicU32,
    pub(crate) tasks: TaskTracker,
    stop: CancellationToken,
}

impl Kubelet {
    pub(crate) fn new(
        core: Shared,
        node: Node,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let images = Images {
            table: core.settings.images.clone(),
            ..Images::default()
        };
        Arc::new(Self {
            core,
            node: Arc::new(node),
            images: Mutex::new(images),
            images_changed: watch::channel(0).0,
            pods: Mutex::default(),
            reachable: watch::channel(true).0,
            addresses: AtomicU32::new(2),
            tasks,
            stop,
        })
    }

    /// Follows the pods of the node until it is stopped; then ends the node.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut changed = self.core.changes();
        loop {
            changed.borrow_and_update();
            if *self.reachable.borrow() {
                self.sync();
            }
            tokio::select! {
                _ = changed.changed() => {}
                () = self.stop.cancelled() => break,
            }
        }
        self.node.end().await;
        self.pods().clear();
    }

    fn pods(&self) -> MutexGuard<'_, HashMap<String, Arc<Pod>>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sync(self: &Arc<Self>) {
        let objects: HashMap<String, (Key, Arc<Value>)> = {
            let store = self.core.store();
            let own = store
                .list("pods", None)
                .filter(|(_, pod)| pod["spec"]["nodeName"] == NODE);
            own.map(|(key, pod)| {
                let uid = text(&pod["metadata"]["uid"]).to_owned();
                (uid, (key.clone(), Arc::clone(pod)))
            })
            .collect()
        };
        let mut pods = self.pods();
        for (uid, (key, object)) in &objects {
            let over = ["Succeeded", "Failed"].contains(&text(&object["status"]["phase"]));
            if !pods.contains_key(uid) && !over {
                let pod = Pod::new(self, &self.node, key.clone(), uid.clone());
                pods.insert(uid.clone(), Arc::clone(&pod));
                let stop = self.stop.clone();
                self.tasks.spawn(async move {
                    tokio::select! {
                        () = pod.live() => {}
                        // The node ends, and what runs on it.
                        () = stop.cancelled() => {}
                    }
                });
            }
            let Some(pod) = pods.get(uid) else {
                continue;
            };
            if !object["metadata"]["deletionTimestamp"].is_null() {
                let grace = object["metadata"]["deletionGracePeriodSeconds"].as_u64();
                stop_pod(pod, grace.unwrap_or(0));
            }
        }
        pods.retain(|uid, pod| {
            let known = objects.contains_key(uid);
            if !known {
                // Removed by force: its processes go all the same.
                stop_pod(pod, 0);
            }
            known
        });
    }

    /// Returns when the node can do something.
    pub(crate) async fn up(&self) {
        let mut reachable = self.reachable.subscribe();
        // The sender is ours.
        let _ = reachable.wait_for(|up| *up).await;
    }

    pub(crate) fn set_reachable(&self, up: bool) {
        self.reachable.send_replace(up);
        self.core.nudge();
    }

    pub(crate) fn images(&self) -> MutexGuard<'_, Images> {
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn change_images(&self, change: impl FnOnce(&mut Images)) {
        change(&mut self.images());
        self.images_changed.send_modify(|number| *number += 1);
    }

    pub(crate) fn image_news(&self) -> watch::Receiver<u64> {
        self.images_changed.subscribe()
    }

    pub(crate) fn next_address(&self) -> String {
        let number = self.addresses.fetch_add(1, Ordering::Relaxed);
        format!("10.244.{}.{}", (number >> 8) & 0xff, number & 0xff)
    }

    pub(crate) fn pod(&self, uid: &str) -> Option<Arc<Pod>> {
        self.pods().get(uid).cloned()
    }

    pub(crate) fn log(&self, uid: &str, container: &str, previous: bool) -> Option<Arc<Log>> {
        self.pod(uid)?.log(container, previous)
    }

    pub(crate) fn container(&self, uid: &str, name: &str) -> Option<Arc<Container>> {
        self.pod(uid)?.container(name)
    }

    /// Whether the API server can reach the node of a pod.
    pub(crate) fn reachable(&self, pod: &Value) -> Result<(), ApiError> {
        let node = text(&pod["spec"]["nodeName"]);
        if node.is_empty() {
            return Err(ApiError::bad_request(format!(
                "pod {} does not have a host assigned",
                text(&pod["metadata"]["name"])
            )));
        }
        if *self.reachable.borrow() && node == NODE {
            return Ok(());
        }
        let message = format!(
            "error dialing backend: dial tcp {HOST_ADDRESS}:10250: connect: no route to host"
        );
        Err(ApiError::internal(message))
    }

    /// Whether the policies of its namespace let a pod reach the API. Looked at once, when its
    /// network is made.
    pub(crate) fn may_reach_api(&self, pod: &Value) -> bool {
        if !self.core.settings.enforce_network_policies {
            return true;
        }
        let store = self.core.store();
        let namespace = text(&pod["metadata"]["namespace"]);
        let policies = store.list("networkpolicies.networking.k8s.io", Some(namespace));
        let mut chosen = policies
            .map(|(_, policy)| &policy["spec"])
            .filter(|spec| list(&spec["policyTypes"]).any(|t| t == "Egress"))
            .filter(|spec| chooses(&spec["podSelector"], &pod["metadata"]["labels"]))
            .peekable();
        if chosen.peek().is_none() {
            return true;
        }
        // One that allows is enough. Only rules about everywhere are understood.
        chosen.any(|spec| {
            list(&spec["egress"]).any(|rule| {
                let mut places = list(&rule["to"]);
                rule["to"].is_null() || places.any(|to| to["ipBlock"]["cidr"] == "0.0.0.0/0")
            })
        })
    }
}

/// Wants a pod to end, if nobody was in a greater hurry before.
fn stop_pod(pod: &Pod, grace_s: u64) {
    pod.want.send_if_modified(|want| {
        let news = match want {
            Want::Run | Want::Fail { .. } => true,
            Want::Stop { grace_s: before } => *before > grace_s,
        };
        if news {
            *want = Want::Stop { grace_s };
        }
        news
    });
}
