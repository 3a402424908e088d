//! The containers of a pod, from their images to their last ends.

use std::{fs, io, net::SocketAddr, sync::Arc, time::Duration};

use futures::future::join_all;
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::sleep,
};

use super::{
    container::{Common, Container, Ended},
    images::{Image, Tried},
    node::Pause,
    pod::{Pod, condition, lock},
    spec,
    volumes::{self, Volumes},
};
use crate::{
    core::now,
    logs::Log,
    validate::{list, text},
};

/// A crashed container waits so long before its first restart, then twice as long each time.
const BACKOFF: Duration = Duration::from_secs(10);
const BACKOFF_MAX: Duration = Duration::from_secs(300);

impl Pod {
    /// Runs all containers to their ends; gives their exit codes, `None` when one never ran.
    pub(super) async fn work(&self, object: &Value) -> Option<Vec<i32>> {
        let volumes = self.volumes(object).await?;
        let open = self.kubelet.may_reach_api(object);
        let made = self.node.pause(&spec::hostname(object), open).await;
        let (pause, api) = match made {
            Ok(mut pause) => {
                let api = pause.api.take();
                (pause, api)
            }
            Err(error) => {
                let message = format!("Failed to create pod sandbox: {error}");
                self.event("Warning", "FailedCreatePodSandBox", &message);
                self.stop_wanted().await;
                return None;
            }
        };
        let address = self.kubelet.next_address();
        self.status(|status| {
            condition(status, "PodReadyToStartContainers", true, "", "");
            status["podIP"] = json!(address);
            status["podIPs"] = json!([{"ip": address}]);
        })
        .await;
        let run = self.run_all(object, &volumes, &pause);
        tokio::select! {
            codes = run => codes,
            () = forward(api, self.kubelet.core.address()) => None,
        }
    }

    async fn run_all(&self, object: &Value, volumes: &Volumes, pause: &Pause) -> Option<Vec<i32>> {
        for container in list(&object["spec"]["initContainers"]) {
            let ended = self.run(object, container, volumes, pause, true).await?;
            if ended.code != 0 {
                return Some(vec![ended.code]);
            }
        }
        if list(&object["spec"]["initContainers"]).next().is_some() {
            for container in list(&object["spec"]["containers"]) {
                self.set(object, text(&container["name"]), |status| {
                    status["state"] = json!({"waiting": {"reason": "PodInitializing"}});
                })
                .await;
            }
            self.status(|status| condition(status, "Initialized", true, "", ""))
                .await;
        }
        let runs = list(&object["spec"]["containers"])
            .map(|container| self.run(object, container, volumes, pause, false));
        let ended = join_all(runs).await;
        ended.into_iter().map(|e| e.map(|e| e.code)).collect()
    }

    /// Waits for what volumes refer to, and makes them.
    async fn volumes(&self, object: &Value) -> Option<Volumes> {
        let group = object["spec"]["securityContext"]["fsGroup"].as_u64();
        let group = group.and_then(|g| u32::try_from(g).ok());
        let mut changed = self.kubelet.core.changes();
        let mut said = None;
        let why = loop {
            changed.borrow_and_update();
            let sources = {
                let images = self.kubelet.images();
                let store = self.kubelet.core.store();
                let claims = &self.kubelet.core.settings.claims;
                volumes::sources(&store, object, claims, &images.table)
            };
            match sources {
                Ok(sources) => {
                    let prepared = self.prepare(object, sources, group).await;
                    match prepared {
                        Ok(volumes) => return Some(volumes),
                        Err(error) => break error.to_string(),
                    }
                }
                Err(why) => {
                    // Our own event is a change, too: not again for the same.
                    if said.as_ref() != Some(&why) {
                        self.event("Warning", "FailedMount", &why);
                        said = Some(why);
                    }
                    tokio::select! {
                        _ = changed.changed() => {}
                        () = self.stop_wanted() => return None,
                    }
                }
            }
        };
        self.event("Warning", "FailedMount", &why);
        self.stop_wanted().await;
        None
    }

    async fn prepare(
        &self,
        object: &Value,
        sources: Vec<(String, volumes::Source)>,
        group: Option<u32>,
    ) -> io::Result<Volumes> {
        fs::create_dir_all(self.folder.join("volumes"))?;
        let volumes = volumes::prepare(&self.folder.join("volumes"), sources, group)?;
        for (folder, bytes) in &volumes.memory {
            let size = bytes.map_or_else(|| "50%".to_owned(), |bytes| bytes.to_string());
            let options = match group {
                Some(group) => format!("size={size},mode=2777,gid={group}"),
                None => format!("size={size},mode=0777"),
            };
            let folder = folder.display().to_string();
            let script = "mount -t tmpfs -o \"$1\" tmpfs \"$2\"";
            self.node.script(script, &[&options, &folder]).await?;
        }
        let hostname = spec::hostname(object);
        let hosts = format!("127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.0.1\t{hostname}\n");
        fs::write(self.folder.join("hosts"), hosts)?;
        fs::write(self.folder.join("hostname"), format!("{hostname}\n"))?;
        let servers = list(&object["spec"]["dnsConfig"]["nameservers"]);
        let servers: String = servers
            .map(|server| format!("nameserver {}\n", text(server)))
            .collect();
        fs::write(self.folder.join("resolv.conf"), servers)?;
        Ok(volumes)
    }

    /// Gets the image of a container onto the node; `None` when the pod is stopped meanwhile.
    async fn pull(&self, object: &Value, container: &Value) -> Option<Image> {
        let name = text(&container["name"]);
        let image = text(&container["image"]);
        let mut failed_before = false;
        let mut news = self.kubelet.image_news();
        loop {
            news.borrow_and_update();
            let tried = self.kubelet.images().attempt(container);
            match tried {
                Tried::Here(image_found) => {
                    let message = format!("Container image \"{image}\" already present on machine");
                    self.container_event(name, "Normal", "Pulled", &message);
                    return Some(image_found);
                }
                Tried::Hangs => {
                    self.container_event(
                        name,
                        "Normal",
                        "Pulling",
                        &format!("Pulling image \"{image}\""),
                    );
                }
                Tried::Not(reason, why) => {
                    let message = format!("Failed to pull image \"{image}\": {why}");
                    self.container_event(name, "Warning", "Failed", &message);
                    self.waiting(object, name, reason, &why).await;
                    if reason == "ErrImagePull" && !failed_before {
                        let message = format!("Back-off pulling image \"{image}\"");
                        self.container_event(name, "Normal", "BackOff", &message);
                        let message = format!("{message}: ErrImagePull: {why}");
                        self.waiting(object, name, "ImagePullBackOff", &message)
                            .await;
                    }
                    failed_before = true;
                }
            }
            tokio::select! {
                _ = news.changed() => {}
                () = self.stop_wanted() => return None,
            }
        }
    }

    async fn waiting(&self, object: &Value, name: &str, reason: &str, message: &str) {
        self.set(object, name, |status| {
            status["state"] = json!({"waiting": {"reason": reason, "message": message}});
        })
        .await;
    }

    /// What a container is to run; waits while something that it refers to is missing.
    async fn process(
        &self,
        object: &Value,
        container: &Value,
        image: &Image,
    ) -> Option<spec::Process> {
        let mut changed = self.kubelet.core.changes();
        let mut said = None;
        loop {
            changed.borrow_and_update();
            // Its address is known only now.
            let current = self
                .object()
                .map_or_else(|| object.clone(), |o| (*o).clone());
            let made = {
                let store = self.kubelet.core.store();
                spec::environment(&store, &current, container, image)
                    .and_then(|env| spec::process(&current, container, image, &env))
            };
            match made {
                Ok(process) => return Some(process),
                Err((reason, message)) => {
                    if said.as_ref() != Some(&message) {
                        let name = text(&container["name"]);
                        let shown = format!("Error: {message}");
                        self.container_event(name, "Warning", "Failed", &shown);
                        self.waiting(object, name, reason, &message).await;
                        said = Some(message);
                    }
                    tokio::select! {
                        _ = changed.changed() => {}
                        () = self.stop_wanted() => return None,
                    }
                }
            }
        }
    }

    /// Runs a container as often as the pod's policy says; gives its last end.
    async fn run(
        &self,
        object: &Value,
        container: &Value,
        volumes: &Volumes,
        pause: &Pause,
        init: bool,
    ) -> Option<Ended> {
        let name = text(&container["name"]);
        let policy = text(&object["spec"]["restartPolicy"]);
        let mut backoff = BACKOFF;
        for attempt in 0.. {
            let image = self.pull(object, container).await?;
            let process = self.process(object, container, &image).await?;
            if self.is_stopping() {
                return None;
            }
            let log = Log::new();
            lock(&self.logs)
                .entry(name.to_owned())
                .or_default()
                .push(Arc::clone(&log));
            let message = format!("Created container: {name}");
            self.container_event(name, "Normal", "Created", &message);
            let common = Common {
                node: &self.node,
                folder: &self.folder,
                uid: &self.uid,
                volumes,
                pause: pause.pid,
                pids_max: self.kubelet.core.settings.pod_pids_max,
                tasks: &self.kubelet.tasks,
            };
            let began = now();
            let started = Container::start(&common, container, &image, process, attempt, log).await;
            let id = format!("containerd://{}-{name}-{attempt}", self.uid);
            let ended = match started {
                Ok(running) => {
                    lock(&self.running).insert(name.to_owned(), Arc::clone(&running));
                    let message = format!("Started container {name}");
                    self.container_event(name, "Normal", "Started", &message);
                    self.started(object, name, &id, &began, init).await;
                    let ended = running.wait().await;
                    lock(&self.running).remove(name);
                    ended
                }
                Err(ended) => {
                    let message = format!("Error: {}", ended.message);
                    self.container_event(name, "Warning", "Failed", &message);
                    ended
                }
            };
            let mut terminated = json!({
                "exitCode": ended.code, "reason": ended.reason, "startedAt": began,
                "finishedAt": now(), "containerID": id,
            });
            if !ended.message.is_empty() {
                terminated["message"] = json!(ended.message);
            }
            let again = match policy {
                "Always" => !init || ended.code != 0,
                "OnFailure" => ended.code != 0,
                _ => false,
            };
            let again = again && !self.is_stopping();
            self.set(object, name, |status| {
                status["ready"] = json!(init && ended.code == 0);
                status["started"] = json!(false);
                status["containerID"] = json!(id);
                if again {
                    status["lastState"] = json!({"terminated": terminated});
                    status["state"] = json!({"waiting": {
                        "reason": "CrashLoopBackOff",
                        "message": format!("back-off {}s restarting failed container={name} pod={}_{}({})",
                            backoff.as_secs(), self.key.name, self.key.namespace, self.uid),
                    }});
                } else {
                    status["state"] = json!({"terminated": terminated});
                }
            })
            .await;
            if !again {
                return Some(ended);
            }
            tokio::select! {
                () = sleep(backoff) => {}
                () = self.stop_wanted() => return Some(ended),
            }
            backoff = (backoff * 2).min(BACKOFF_MAX);
            if let Some(status) = lock(&self.statuses).get_mut(name) {
                status["restartCount"] = json!(attempt + 1);
            }
        }
        None
    }

    async fn started(&self, object: &Value, name: &str, id: &str, began: &str, init: bool) {
        if let Some(status) = lock(&self.statuses).get_mut(name) {
            status["state"] = json!({"running": {"startedAt": began}});
            status["ready"] = json!(!init);
            status["started"] = json!(true);
            status["containerID"] = json!(id);
            status["imageID"] = json!(format!("kubefake@{}", text(&status["image"])));
        }
        let all: bool = {
            let statuses = lock(&self.statuses);
            list(&object["spec"]["containers"]).all(|c| {
                let state = statuses.get(text(&c["name"])).map(|s| &s["state"]);
                state.is_some_and(|s| s["waiting"].is_null())
            })
        };
        self.write_containers(object, |status| {
            if all {
                status["phase"] = json!("Running");
            }
        })
        .await;
    }
}

/// Carries connections of a pod to the API, if it may have any; never ends.
async fn forward(listener: Option<TcpListener>, address: Option<SocketAddr>) {
    let (Some(listener), Some(address)) = (listener, address) else {
        return std::future::pending().await;
    };
    let mut connections = JoinSet::new();
    loop {
        let Ok((mut inside, _)) = listener.accept().await else {
            return std::future::pending().await;
        };
        connections.spawn(async move {
            if let Ok(mut outside) = TcpStream::connect(address).await {
                let _ = tokio::io::copy_bidirectional(&mut inside, &mut outside).await;
            }
        });
        while connections.try_join_next().is_some() {}
    }
}
