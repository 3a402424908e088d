//! The life of one pod on the node.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};

use super::{Kubelet, container::Container, node::Node};
use crate::{
    core::now,
    logs::Log,
    store::Key,
    validate::{list, text},
};

/// Between kills of what does not end.
const KILL_EVERY: Duration = Duration::from_millis(50);

/// What is wanted of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Want {
    Run,
    /// End, with so many seconds to do it in.
    Stop {
        grace_s: u64,
    },
    /// End as failed, for this reason.
    Fail {
        reason: String,
        message: String,
    },
}

/// A pod that is or was on the node.
#[derive(Debug)]
pub(crate) struct Pod {
    pub(crate) key: Key,
    pub(crate) uid: String,
    pub(super) kubelet: Arc<Kubelet>,
    pub(super) node: Arc<Node>,
    pub(super) folder: PathBuf,
    pub(crate) want: watch::Sender<Want>,
    pub(super) running: Mutex<BTreeMap<String, Arc<Container>>>,
    pub(super) logs: Mutex<BTreeMap<String, Vec<Arc<Log>>>>,
    pub(super) statuses: Mutex<BTreeMap<String, Value>>,
    pub(crate) execs: AtomicU64,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets a condition; its time changes with its status.
pub(crate) fn condition(status: &mut Value, kind: &str, value: bool, reason: &str, message: &str) {
    let word = if value { "True" } else { "False" };
    let mut all: Vec<Value> = list(&status["conditions"]).cloned().collect();
    let old = all.iter().position(|c| c["type"] == kind);
    let before = old.and_then(|at| all.get(at)).cloned().unwrap_or_default();
    let mut new = json!({
        "type": kind, "status": word, "lastProbeTime": null,
        "lastTransitionTime": crate::api::write::transition(&before, word),
    });
    if !reason.is_empty() {
        new["reason"] = json!(reason);
    }
    if !message.is_empty() {
        new["message"] = json!(message);
    }
    match old.and_then(|at| all.get_mut(at)) {
        Some(place) => *place = new,
        None => all.push(new),
    }
    status["conditions"] = json!(all);
}

impl Pod {
    pub(crate) fn new(
        kubelet: &Arc<Kubelet>,
        node: &Arc<Node>,
        key: Key,
        uid: String,
    ) -> Arc<Self> {
        let folder = node.folder.join("pods").join(&uid);
        Arc::new(Self {
            key,
            uid,
            kubelet: Arc::clone(kubelet),
            node: Arc::clone(node),
            folder,
            want: watch::channel(Want::Run).0,
            running: Mutex::default(),
            logs: Mutex::default(),
            statuses: Mutex::default(),
            execs: AtomicU64::new(0),
        })
    }

    pub(crate) fn container(&self, name: &str) -> Option<Arc<Container>> {
        lock(&self.running).get(name).cloned()
    }

    pub(crate) fn log(&self, name: &str, previous: bool) -> Option<Arc<Log>> {
        let logs = lock(&self.logs);
        let all = logs.get(name)?;
        let at = all.len().checked_sub(1 + usize::from(previous))?;
        all.get(at).cloned()
    }

    pub(crate) fn exec_number(&self) -> u64 {
        self.execs.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn object(&self) -> Option<Arc<Value>> {
        let store = self.kubelet.core.store();
        let found = store.get(&self.key)?;
        (found["metadata"]["uid"] == self.uid.as_str()).then(|| Arc::clone(found))
    }

    pub(super) fn event(&self, kind: &str, reason: &str, message: &str) {
        if let Some(object) = self.object() {
            self.kubelet
                .core
                .event(&object, None, kind, reason, message);
        }
    }

    /// About one of its containers.
    pub(super) fn container_event(&self, name: &str, kind: &str, reason: &str, message: &str) {
        let Some(object) = self.object() else {
            return;
        };
        let init = list(&object["spec"]["initContainers"]).any(|c| c["name"] == name);
        let list = if init { "initContainers" } else { "containers" };
        let path = format!("spec.{list}{{{name}}}");
        let core = &self.kubelet.core;
        core.event(&object, Some(&path), kind, reason, message);
    }

    /// Writes the status, when the node can.
    pub(super) async fn status(&self, change: impl FnOnce(&mut Value)) {
        self.kubelet.up().await;
        self.kubelet
            .core
            .change(&self.key, &self.uid, |pod| change(&mut pod["status"]));
    }

    pub(super) fn is_stopping(&self) -> bool {
        *self.want.borrow() != Want::Run
    }

    pub(super) async fn stop_wanted(&self) {
        let mut want = self.want.subscribe();
        // The sender is ours: it does not go while we live.
        let _ = want.wait_for(|want| *want != Want::Run).await;
    }

    /// Lives to its end.
    pub(crate) async fn live(self: Arc<Self>) {
        let Some(object) = self.object() else {
            return;
        };
        self.begin(&object).await;
        let seconds = object["spec"]["activeDeadlineSeconds"].as_u64();
        let deadline = seconds.map(|s| Instant::now() + Duration::from_secs(s));
        let ended = {
            let work = self.work(&object);
            let stopper = self.stopper();
            let late = async {
                match deadline {
                    Some(deadline) => sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
                // A node that is lost does nothing.
                self.kubelet.up().await;
                self.want.send_if_modified(|want| {
                    let running = *want == Want::Run;
                    if running {
                        *want = Want::Fail {
                            reason: "DeadlineExceeded".to_owned(),
                            message: "Pod was active on the node longer than the specified \
                                      deadline"
                                .to_owned(),
                        };
                    }
                    running
                });
                std::future::pending::<()>().await;
            };
            tokio::select! {
                ended = work => ended,
                () = stopper => None,
                () = late => None,
            }
        };
        let failed = ended.is_none_or(|codes| codes.iter().any(|code| *code != 0));
        self.settle(&object, failed).await;
        let _ = fs::remove_dir_all(&self.folder);
    }

    async fn begin(&self, object: &Value) {
        let first = |spec: &Value, reason: &str| {
            json!({
                "name": spec["name"], "image": spec["image"], "imageID": "", "ready": false,
                "restartCount": 0, "started": false, "lastState": {},
                "state": {"waiting": {"reason": reason}},
            })
        };
        let spec = &object["spec"];
        let any_init = list(&spec["initContainers"]).next().is_some();
        let main = if any_init {
            "PodInitializing"
        } else {
            "ContainerCreating"
        };
        {
            let mut statuses = lock(&self.statuses);
            for container in list(&spec["initContainers"]) {
                let status = first(container, "PodInitializing");
                statuses.insert(text(&container["name"]).to_owned(), status);
            }
            for container in list(&spec["containers"]) {
                statuses.insert(text(&container["name"]).to_owned(), first(container, main));
            }
        }
        self.status(|status| {
            status["startTime"] = json!(now());
            status["hostIP"] = json!(super::HOST_ADDRESS);
            status["hostIPs"] = json!([{"ip": super::HOST_ADDRESS}]);
            condition(status, "PodReadyToStartContainers", false, "", "");
            let names: Vec<&str> = list(&spec["initContainers"])
                .map(|c| text(&c["name"]))
                .collect();
            if any_init {
                let message = format!("containers with incomplete status: [{}]", names.join(" "));
                condition(
                    status,
                    "Initialized",
                    false,
                    "ContainersNotInitialized",
                    &message,
                );
            } else {
                condition(status, "Initialized", true, "", "");
            }
        })
        .await;
        self.write_containers(object, |_| {}).await;
    }

    /// Writes the states of all containers, and what follows from them.
    pub(super) async fn write_containers(&self, object: &Value, more: impl FnOnce(&mut Value)) {
        let statuses = lock(&self.statuses).clone();
        let of = |kind: &str| -> Vec<Value> {
            list(&object["spec"][kind])
                .filter_map(|c| statuses.get(text(&c["name"])).cloned())
                .collect()
        };
        let (init, main) = (of("initContainers"), of("containers"));
        self.status(|status| {
            let unready: Vec<&str> = main
                .iter()
                .filter(|s| s["ready"] != true)
                .map(|s| text(&s["name"]))
                .collect();
            let over = !main.is_empty() && main.iter().all(|s| !s["state"]["terminated"].is_null());
            let (reason, message) = if unready.is_empty() {
                ("", String::new())
            } else if over {
                ("PodCompleted", String::new())
            } else {
                let message = format!("containers with unready status: [{}]", unready.join(" "));
                ("ContainersNotReady", message)
            };
            for kind in ["Ready", "ContainersReady"] {
                condition(status, kind, unready.is_empty(), reason, &message);
            }
            if !init.is_empty() {
                status["initContainerStatuses"] = json!(init);
            }
            status["containerStatuses"] = json!(main);
            more(status);
        })
        .await;
    }

    pub(super) async fn set(&self, object: &Value, name: &str, change: impl FnOnce(&mut Value)) {
        if let Some(status) = lock(&self.statuses).get_mut(name) {
            change(status);
        }
        self.write_containers(object, |_| {}).await;
    }

    /// Ends all containers when that is wanted: politely, then not.
    async fn stopper(&self) {
        self.stop_wanted().await;
        self.kubelet.up().await;
        let began = Instant::now();
        let mut want = self.want.subscribe();
        let own = self
            .object()
            .and_then(|object| object["spec"]["terminationGracePeriodSeconds"].as_u64());
        let all = || lock(&self.running).values().cloned().collect::<Vec<_>>();
        let polite = !matches!(*want.borrow(), Want::Stop { grace_s: 0 });
        let running = lock(&self.running).clone();
        for (name, container) in running {
            let message = format!("Stopping container {name}");
            self.container_event(&name, "Normal", "Killing", &message);
            if polite {
                container.signal("TERM").await;
            }
        }
        loop {
            let grace_s = match &*want.borrow_and_update() {
                Want::Stop { grace_s } => *grace_s,
                Want::Fail { .. } | Want::Run => own.unwrap_or(30),
            };
            tokio::select! {
                () = sleep_until(began + Duration::from_secs(grace_s)) => break,
                // Somebody is in a greater hurry.
                _ = want.changed() => {}
            }
        }
        loop {
            for container in all() {
                container.signal("KILL").await;
            }
            sleep(KILL_EVERY).await;
        }
    }

    /// Writes how it ended; removes the object if that is what was waited for.
    async fn settle(&self, object: &Value, failed: bool) {
        let want = self.want.borrow().clone();
        {
            // What never ran will not.
            let mut statuses = lock(&self.statuses);
            for status in statuses.values_mut() {
                if status["state"]["terminated"].is_null() && want != Want::Run {
                    status["state"] = json!({"terminated": {
                        "exitCode": 137, "reason": "ContainerStatusUnknown",
                        "message": "The container could not be located when the pod was terminated",
                        "startedAt": null, "finishedAt": null,
                    }});
                    status["ready"] = json!(false);
                    status["started"] = json!(false);
                }
            }
        }
        self.write_containers(object, |status| {
            let phase = match &want {
                Want::Fail { reason, message } => {
                    status["reason"] = json!(reason);
                    status["message"] = json!(message);
                    "Failed"
                }
                _ if failed => "Failed",
                _ => "Succeeded",
            };
            status["phase"] = json!(phase);
            condition(status, "PodReadyToStartContainers", false, "", "");
        })
        .await;
        self.finish_deletion();
    }

    /// The processes are gone: so may the object.
    pub(crate) fn finish_deletion(&self) {
        let core = &self.kubelet.core;
        core.change(&self.key, &self.uid, |pod| {
            if !pod["metadata"]["deletionTimestamp"].is_null() {
                pod["metadata"]["deletionGracePeriodSeconds"] = json!(0);
            }
        });
        let mut store = core.store();
        let over = store.get(&self.key).is_some_and(|pod| {
            pod["metadata"]["uid"] == self.uid.as_str()
                && !pod["metadata"]["deletionTimestamp"].is_null()
                && list(&pod["metadata"]["finalizers"]).next().is_none()
        });
        if over {
            store.remove(&self.key);
        }
    }
}
