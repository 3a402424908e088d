//! The pod of a sandbox, as the API describes one. Nothing in it needs root: the init container
//! makes the folders as the sandbox's user, in one volume in memory that carries the disk limit.

use std::path::{Path, PathBuf};

use guest::protocol::{ContainerPlan, GUEST_PATH, UID};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::{
    HEARTBEAT_S, KubernetesConfig, LABEL_RUN,
    sight::{INIT, MAIN},
};
use crate::{SandboxError, Spec};

/// Where the guest listens, in a volume of its own.
pub(super) const CONTROL_SOCKET: &str = "/run/espalier-control/socket";
/// Where the init container finds the volumes.
pub(super) const BIN: &str = "/espalier/bin";
const DATA: &str = "/espalier/data";
/// Mounts of the host, one folder each.
pub(super) const MOUNTS: &str = "/espalier/mounts";
/// The cluster ends a pod this long after the guest should have ended it.
const DEADLINE_GRACE_S: u64 = 60;

/// Runs in the init container with workspace and HOME as arguments. What the image has there is
/// copied; then it waits until the guest and the mounts were brought.
const INIT_SCRIPT: &str = r#"
set -e
d=/espalier/data; b=/espalier/bin
i=0; while [ $i -lt "$3" ]; do mkdir -p $d/f$i; i=$((i+1)); done
if [ -d "$1" ]; then cp -R "$1/." $d/f0/ 2>/dev/null || true; fi
if [ -d "$2" ]; then cp -R "$2/." $d/f1/ 2>/dev/null || true; fi
chmod 755 $d/f*; chmod 1777 $d/f2 $d/f3 $d/f4
{ cat /etc/passwd 2>/dev/null || true; } > $b/passwd
if ! grep -q '^[^:]*:[^:]*:1000:' $b/passwd; then echo "agent:x:1000:1000::$2:/bin/sh" >> $b/passwd; fi
while [ ! -e $b/ready ]; do sleep 0.1; done
"#;

/// The folders in the data volume, in the order of the script: workspace, HOME, then the rest.
fn folders(config: &KubernetesConfig, spec: &Spec) -> Vec<PathBuf> {
    let mut folders = vec![spec.workspace.clone(), spec.home.clone()];
    folders.extend(["/tmp", "/var/tmp", "/dev/shm"].map(PathBuf::from));
    let others = config.folders.iter().filter(|f| **f != spec.workspace && **f != spec.home);
    folders.extend(others.cloned());
    folders
}

/// The name under which a mount's content is kept in its folder: that of the file, or none.
pub(super) fn file_name(source: &Path) -> Option<String> {
    (!source.is_dir()).then(|| "file".to_owned())
}

pub(super) fn pod(
    config: &KubernetesConfig,
    spec: &Spec,
    image: &str,
    name: &str,
    run: &str,
    owner: &Value,
) -> Result<Pod, SandboxError> {
    let limits = &spec.limits;
    let plan = ContainerPlan {
        deadline_s: limits.deadline_s,
        heartbeat_s: HEARTBEAT_S,
        workspace: spec.workspace.clone(),
        home: spec.home.clone(),
        folders: Vec::new(),
        gateway_port: spec.gateway_socket.as_ref().map(|_| spec.gateway_port),
        control_socket: Some(CONTROL_SOCKET.into()),
    };
    let folders = folders(config, spec);
    let mut volumes = vec![
        json!({"name": "bin", "emptyDir": {}}),
        json!({"name": "control", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}),
        json!({"name": "data", "emptyDir": {"medium": "Memory", "sizeLimit": limits.disk_bytes.to_string()}}),
    ];
    let mut main_mounts = vec![
        json!({"name": "bin", "mountPath": "/run/espalier", "readOnly": true}),
        json!({"name": "bin", "mountPath": "/etc/passwd", "subPath": "passwd", "readOnly": true}),
        json!({"name": "control", "mountPath": "/run/espalier-control"}),
    ];
    for (index, folder) in folders.iter().enumerate() {
        main_mounts.push(json!({"name": "data", "mountPath": folder, "subPath": format!("f{index}")}));
    }
    let mut init_mounts = vec![
        json!({"name": "bin", "mountPath": BIN}),
        json!({"name": "data", "mountPath": DATA}),
    ];
    if !spec.mounts.is_empty() {
        volumes.push(json!({"name": "mounts", "emptyDir": {}}));
        init_mounts.push(json!({"name": "mounts", "mountPath": MOUNTS}));
        for (index, mount) in spec.mounts.iter().enumerate() {
            let path = match file_name(&mount.source) {
                Some(file) => format!("{index}/{file}"),
                None => index.to_string(),
            };
            main_mounts.push(json!({
                "name": "mounts", "mountPath": mount.target, "subPath": path, "readOnly": true,
            }));
        }
    }
    let security = json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": {"drop": ["ALL"]},
    });
    let ceiling = json!({
        "cpu": format!("{}m", (limits.cpu_cores * 1000.0).ceil() as u64),
        "memory": limits.memory_bytes.to_string(),
    });
    let asked = json!({
        "cpu": format!("{}m", (config.cpu_request_cores.unwrap_or(limits.cpu_cores) * 1000.0).ceil() as u64),
        "memory": config.memory_request_bytes.unwrap_or(limits.memory_bytes).to_string(),
    });
    let resources = json!({"limits": ceiling, "requests": asked});
    let mut pod_spec = json!({
        "restartPolicy": "Never",
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": 0,
        "activeDeadlineSeconds": limits.deadline_s + DEADLINE_GRACE_S,
        "hostname": "sandbox",
        // Names cannot be resolved, and a resolver is a way out.
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [{
            "name": INIT,
            "image": image,
            "imagePullPolicy": config.image_pull_policy,
            "command": ["sh", "-c", INIT_SCRIPT, "sh", spec.workspace, spec.home, folders.len().to_string()],
            "volumeMounts": init_mounts,
            "securityContext": security,
            "resources": resources,
        }],
        "containers": [{
            "name": MAIN,
            "image": image,
            "imagePullPolicy": config.image_pull_policy,
            "command": [GUEST_PATH, "init", json!(plan).to_string()],
            "volumeMounts": main_mounts,
            "securityContext": security,
            "resources": resources,
        }],
        "volumes": volumes,
        "nodeSelector": config.node_selector,
        "tolerations": config.tolerations,
        "imagePullSecrets": config.image_pull_secrets.iter().map(|n| json!({"name": n})).collect::<Vec<_>>(),
    });
    if let Some(map) = pod_spec.as_object_mut() {
        if let Some(class) = &config.runtime_class {
            map.insert("runtimeClassName".to_owned(), json!(class));
        }
        if let Some(class) = &config.priority_class {
            map.insert("priorityClassName".to_owned(), json!(class));
        }
    }
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {"app.kubernetes.io/managed-by": "espalier", LABEL_RUN: run},
            "annotations": {"espalier.dev/rollout": spec.name},
            "ownerReferences": [owner],
        },
        "spec": pod_spec,
    });
    serde_json::from_value(pod).map_err(|e| SandboxError::Create {
        name: spec.name.clone(),
        reason: format!("describing its pod: {e}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_asks_for_no_power_and_ends_by_itself() {
        let config = KubernetesConfig::default();
        let mut spec = Spec::default();
        spec.limits.deadline_s = 100;
        let owner = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "o", "uid": "u"});
        let pod = pod(&config, &spec, "image", "p", "r", &owner).unwrap();
        let value = serde_json::to_value(&pod).unwrap();
        let at = |pointer: &str| value.pointer(pointer).cloned().unwrap_or_default();
        assert_eq!(at("/spec/activeDeadlineSeconds"), 160);
        assert_eq!(at("/spec/restartPolicy"), "Never");
        assert_eq!(at("/spec/automountServiceAccountToken"), false);
        assert_eq!(at("/spec/securityContext/runAsNonRoot"), true);
        assert_eq!(at("/spec/containers/0/securityContext/capabilities/drop/0"), "ALL");
        assert_eq!(at("/metadata/ownerReferences/0/uid"), "u");
        assert_eq!(at("/spec/containers/0/volumeMounts/3/mountPath"), "/workspace");
        assert_eq!(at("/spec/containers/0/resources/limits/memory"), (2_u64 << 30).to_string());
        assert!(at("/spec/initContainers/0/command/2").as_str().unwrap().contains("ready"));
    }
}
