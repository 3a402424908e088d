//! Runs pods: each in a sandbox of the local kind. Volumes are folders; the init container sees
//! them through links, and when it is over they are moved to where the main container mounts them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use sandbox::{Chunk, Exec, Exit, Limits, LocalProvider, Output, Provider, Sandbox, Spec};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::store::{Key, Store, timestamp};

/// What one node has.
const NODE_MEMORY_BYTES: u64 = 1 << 40;
/// The image that no node has.
const MISSING: &str = "no-such-image";
/// The main container's first process has number 1, whatever the sandbox around it does.
const OWN_PIDS: [&str; 7] =
    ["unshare", "-U", "--map-user=1000", "--map-group=1000", "-pf", "--kill-child", "--mount-proc"];

/// A pod that runs.
pub(crate) struct Running {
    pub(crate) sandbox: Arc<dyn Sandbox>,
    pub(crate) logs: Mutex<HashMap<String, Vec<u8>>>,
    stop: CancellationToken,
    /// How the main container is made to end, if it is.
    verdict: watch::Sender<Option<Value>>,
}

pub(crate) struct Kubelet {
    provider: LocalProvider,
    store: Arc<Store>,
    pods: Mutex<HashMap<String, Arc<Running>>>,
}

fn exec(argv: Vec<String>) -> Exec {
    Exec {
        argv,
        cwd: Some("/".into()),
        env: [].into(),
        stdin: Vec::new(),
        timeout: Duration::from_secs(24 * 3600),
        output_bytes_max: 1 << 20,
        end_background: false,
    }
}

fn quantity(value: &Value) -> Option<u64> {
    let text = value.as_str()?;
    let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
    let number: u64 = digits.parse().ok()?;
    Some(match &text[digits.len()..] {
        "" => number,
        "Ki" => number << 10,
        "Mi" => number << 20,
        "Gi" => number << 30,
        "Ti" => number << 40,
        "m" => number.div_ceil(1000),
        _ => return None,
    })
}

fn argv_of(container: &Value) -> Vec<String> {
    let words = |key: &str| {
        let list = container[key].as_array().cloned().unwrap_or_default();
        list.iter().filter_map(|w| w.as_str().map(str::to_owned)).collect::<Vec<_>>()
    };
    [words("command"), words("args")].concat()
}

fn container_status(container: &Value, state: Value) -> Value {
    json!({
        "name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0,
        "ready": state.get("running").is_some(), "state": state,
    })
}

fn terminated(output: &Output) -> Value {
    let code = match output.exit {
        Exit::Code(code) => code,
        Exit::Signal(signal) => 128 + signal,
        Exit::TimedOut => 124,
    };
    let reason = match (output.out_of_memory, code) {
        (true, _) => "OOMKilled",
        (_, 0) => "Completed",
        _ => "Error",
    };
    json!({"terminated": {"exitCode": code, "reason": reason, "finishedAt": timestamp()}})
}

impl Kubelet {
    pub(crate) fn new(provider: LocalProvider, store: Arc<Store>) -> Self {
        Self {
            provider,
            store,
            pods: Mutex::default(),
        }
    }

    pub(crate) fn running(&self, uid: &str) -> Option<Arc<Running>> {
        self.pods.lock().unwrap().get(uid).cloned()
    }

    pub(crate) fn count(&self) -> usize {
        self.pods.lock().unwrap().len()
    }

    /// Ends a pod's processes; its object is somebody else's.
    pub(crate) fn stop(&self, uid: &str) {
        if let Some(running) = self.running(uid) {
            running.stop.cancel();
        }
    }

    /// Ends a pod with a status, as an eviction or the loss of its node does.
    pub(crate) fn end_with(&self, uid: &str, status: Value) {
        if let Some(running) = self.running(uid) {
            running.verdict.send_replace(Some(status));
        }
    }

    fn set_status(&self, key: &Key, uid: &str, change: impl FnOnce(&mut Value)) {
        self.store.update(key, |pod| {
            if pod["metadata"]["uid"] == uid {
                change(&mut pod["status"]);
            }
        });
    }

    /// A pod's whole life.
    pub(crate) async fn run(&self, key: Key, pod: Value, capacity: bool) {
        let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
        let spec = &pod["spec"];
        let init = spec["initContainers"][0].clone();
        let main = spec["containers"][0].clone();
        let memory = quantity(&main["resources"]["limits"]["memory"]).unwrap_or(256 << 20);
        if memory > NODE_MEMORY_BYTES || !capacity {
            self.set_status(&key, &uid, |status| {
                *status = json!({"phase": "Pending", "conditions": [{
                    "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                    "message": "0/1 nodes are available: 1 Insufficient memory.",
                }]});
            });
            return;
        }
        let first = if init.is_null() { &main } else { &init };
        let scheduled = json!([{"type": "PodScheduled", "status": "True"}]);
        if first["image"].as_str().is_some_and(|image| image.contains(MISSING)) {
            let waiting = json!({"waiting": {"reason": "ErrImagePull", "message": "not found"}});
            let statuses = if init.is_null() { "containerStatuses" } else { "initContainerStatuses" };
            self.set_status(&key, &uid, |status| {
                *status = json!({"phase": "Pending", "conditions": scheduled, statuses: [container_status(first, waiting)]});
            });
            return;
        }
        let cpu = main["resources"]["limits"]["cpu"].as_str().unwrap_or("2");
        let cpu_cores = match cpu.strip_suffix('m') {
            Some(milli) => milli.parse::<f64>().unwrap() / 1000.0,
            None => cpu.parse().unwrap(),
        };
        let disk = spec["volumes"].as_array().into_iter().flatten().filter_map(|v| quantity(&v["emptyDir"]["sizeLimit"])).max();
        let made = self
            .provider
            .create(Spec {
                name: format!("{}/{}", key.1, key.2),
                limits: Limits {
                    memory_bytes: memory,
                    // No pod has a limit of its own; the node's is what there is.
                    pids: 256,
                    cpu_cores,
                    // The guest that is brought counts elsewhere on a node.
                    disk_bytes: disk.unwrap_or(64 << 20) + (4 << 20),
                    deadline_s: 3600,
                },
                workspace: "/volumes".into(),
                home: "/fake-home".into(),
                ..Spec::default()
            })
            .await;
        let sandbox: Arc<dyn Sandbox> = match made {
            Ok(sandbox) => sandbox.into(),
            Err(error) => {
                self.set_status(&key, &uid, |status| {
                    *status = json!({"phase": "Failed", "reason": "FakeKubelet", "message": error.to_string()});
                });
                return;
            }
        };
        let running = Arc::new(Running {
            sandbox,
            logs: Mutex::default(),
            stop: CancellationToken::new(),
            verdict: watch::channel(None).0,
        });
        self.pods.lock().unwrap().insert(uid.clone(), Arc::clone(&running));
        let deadline = spec["activeDeadlineSeconds"].as_u64().unwrap_or(u64::from(u32::MAX));
        let mut verdict = running.verdict.subscribe();
        let end = tokio::select! {
            () = self.containers(&key, &uid, &running, &init, &main) => None,
            () = running.stop.cancelled() => None,
            () = tokio::time::sleep(Duration::from_secs(deadline)) => Some(json!({
                "phase": "Failed", "reason": "DeadlineExceeded",
                "message": "Pod was active on the node longer than the specified deadline",
            })),
            status = verdict.wait_for(Option::is_some) => status.unwrap().clone(),
        };
        if let Some(end) = end {
            self.set_status(&key, &uid, |status| *status = end);
        }
        self.pods.lock().unwrap().remove(&uid);
    }

    async fn containers(&self, key: &Key, uid: &str, running: &Running, init: &Value, main: &Value) {
        let scheduled = json!([{"type": "PodScheduled", "status": "True"}]);
        let run_state = json!({"running": {"startedAt": timestamp()}});
        let waiting = json!({"waiting": {"reason": "PodInitializing"}});
        let mut init_statuses = Vec::new();
        if !init.is_null() {
            link_mounts(&*running.sandbox, init).await;
            self.set_status(key, uid, |status| {
                *status = json!({"phase": "Pending", "conditions": scheduled,
                    "initContainerStatuses": [container_status(init, run_state.clone())],
                    "containerStatuses": [container_status(main, waiting)]});
            });
            let ended = self.container(running, init, argv_of(init)).await;
            let failed = ended["terminated"]["exitCode"] != 0;
            init_statuses.push(container_status(init, ended));
            if failed {
                self.set_status(key, uid, |status| {
                    *status = json!({"phase": "Failed", "conditions": scheduled, "initContainerStatuses": init_statuses});
                });
                return;
            }
            move_mounts(&*running.sandbox, main).await;
        }
        self.set_status(key, uid, |status| {
            *status = json!({"phase": "Running", "conditions": scheduled,
                "initContainerStatuses": init_statuses,
                "containerStatuses": [container_status(main, run_state)]});
        });
        let argv = OWN_PIDS.iter().map(|w| (*w).to_owned()).chain(argv_of(main)).collect();
        let ended = self.container(running, main, argv).await;
        let phase = if ended["terminated"]["exitCode"] == 0 { "Succeeded" } else { "Failed" };
        self.set_status(key, uid, |status| {
            *status = json!({"phase": phase, "conditions": scheduled,
                "initContainerStatuses": init_statuses,
                "containerStatuses": [container_status(main, ended)]});
        });
    }

    /// Runs a container's process and keeps its log; gives its last state.
    async fn container(&self, running: &Running, container: &Value, argv: Vec<String>) -> Value {
        let name = container["name"].as_str().unwrap_or_default().to_owned();
        let (sender, mut chunks) = mpsc::channel(4);
        let keep = async {
            while let Some(Chunk::Stdout(bytes) | Chunk::Stderr(bytes)) = chunks.recv().await {
                running.logs.lock().unwrap().entry(name.clone()).or_default().extend(bytes);
            }
        };
        let mut no_input = tokio::io::empty();
        let run = running.sandbox.exec_streaming(exec(argv), &mut no_input, sender);
        match tokio::join!(run, keep).0 {
            Ok(output) => terminated(&output),
            Err(error) => json!({"terminated": {"exitCode": 128, "reason": "ContainerCannotRun", "message": error.to_string()}}),
        }
    }
}

async fn script(sandbox: &dyn Sandbox, text: String) {
    let output = sandbox.exec(exec(vec!["sh".into(), "-c".into(), text])).await;
    if let Ok(output) = output {
        assert_eq!(output.exit, Exit::Code(0), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

fn mounts(container: &Value) -> Vec<(String, String, bool)> {
    let list = container["volumeMounts"].as_array().cloned().unwrap_or_default();
    list.iter()
        .map(|m| {
            let volume = m["name"].as_str().unwrap();
            let source = match m["subPath"].as_str() {
                Some(path) => format!("/volumes/{volume}/{path}"),
                None => format!("/volumes/{volume}"),
            };
            let target = m["mountPath"].as_str().unwrap().to_owned();
            (source, target, m["readOnly"] == true)
        })
        // What the local kind has there already.
        .filter(|(_, target, _)| !["/etc", "/dev", "/run/espalier"].iter().any(|p| target == p || target.starts_with(&format!("{p}/"))))
        .collect()
}

async fn link_mounts(sandbox: &dyn Sandbox, container: &Value) {
    let mut text = "set -e; ".to_owned();
    for (source, target, _) in mounts(container) {
        text.push_str(&format!("mkdir -p '{source}' \"$(dirname '{target}')\"; ln -s '{source}' '{target}'; "));
    }
    script(sandbox, text).await;
}

async fn move_mounts(sandbox: &dyn Sandbox, container: &Value) {
    let mut text = "set -e; ".to_owned();
    for (source, target, read_only) in mounts(container) {
        text.push_str(&format!(
            "mkdir -p \"$(dirname '{source}')\" \"$(dirname '{target}')\"; [ -e '{source}' ] || mkdir '{source}'; rm -rf '{target}'; mv '{source}' '{target}'; "
        ));
        if read_only {
            text.push_str(&format!("chmod -R a-w '{target}'; "));
        }
    }
    script(sandbox, text).await;
}
