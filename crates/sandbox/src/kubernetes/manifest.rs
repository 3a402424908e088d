//! What is sent to the cluster, as pure functions of settings and spec.

use std::{collections::BTreeMap, path::PathBuf};

use guest::{
    CAPABILITIES,
    protocol::{ContainerPlan, GUEST_PATH, InstallPlan},
};
use serde_json::{Map, Value, json};

use super::{HEARTBEAT_S, config::KubernetesConfig};
use crate::{Limits, Mount, RefusalCause, SandboxError, Spec};

/// The label that says whose an object is: the id of the run.
pub(super) const RUN: &str = "espalier.dev/run";
/// The label that names a sandbox within its run.
pub(super) const SANDBOX: &str = "espalier.dev/sandbox";
/// The label that says what a pod is for; the network policy goes by it.
pub(super) const ROLE: &str = "espalier.dev/role";
/// The container that is the sandbox.
pub(super) const CONTAINER: &str = "sandbox";
/// Where the guest accepts its one control connection.
pub(super) const CONTROL_SOCKET: &str = "/run/espalier-control/socket";

/// Where the init container sees what it works with.
const PARTS: &str = "/espalier/parts";
const GUEST_FOLDER: &str = "/espalier/guest";
const INTO: &str = "/espalier/into";
/// Seconds that a pod outlives the loss of its node; the cluster's own default is 300.
const NODE_LOSS_S: u64 = 30;
/// Puts the guest together, and has it prepare the rest. Needs `sh`, `cat` and `chmod` of the
/// image, and nothing of a registry of ours.
const INSTALL: &str = "set -e; cat /espalier/parts/part-* > /espalier/guest/guest; \
                       chmod 755 /espalier/guest/guest; exec /espalier/guest/guest install \"$0\"";

/// A run: one provider, the owner of all that it makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) id: String,
    /// Of its Lease.
    pub(super) lease_uid: String,
}

impl Run {
    /// The name of the Lease, the policy, and the beginning of all others.
    pub(super) fn name(&self) -> String {
        format!("espalier-{}", self.id)
    }

    pub(super) fn part(&self, index: usize) -> String {
        format!("{}-guest-{index}", self.name())
    }

    fn labels(&self) -> Map<String, Value> {
        let mut labels = Map::new();
        labels.insert("app.kubernetes.io/managed-by".into(), json!("espalier"));
        labels.insert(RUN.into(), json!(self.id));
        labels
    }

    fn metadata(&self, name: &str) -> Value {
        json!({
            "name": name,
            "labels": self.labels(),
            "ownerReferences": [{
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "name": self.name(),
                "uid": self.lease_uid,
            }],
        })
    }
}

/// What a pod is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Role {
    /// A sandbox.
    Sandbox,
    /// Tries to get out as a sandbox would.
    Probe(String),
    /// Tries the same without the policy.
    Control(String),
    /// Has a node pull the image, and tries the guest in it.
    Prepull,
}

impl Role {
    fn name(&self) -> &'static str {
        match self {
            // The policy must not know the difference.
            Self::Sandbox | Self::Probe(_) => "sandbox",
            Self::Control(_) => "control",
            Self::Prepull => "prepull",
        }
    }
}

/// The proof of life of a run.
pub(super) fn lease(id: &str, holder: &str, now: &str, lease_s: u64) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": format!("espalier-{id}"),
            "labels": {"app.kubernetes.io/managed-by": "espalier", RUN: id},
        },
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": lease_s,
            "acquireTime": now,
            "renewTime": now,
        },
    })
}

/// A piece of the guest; `data` is in base64.
pub(super) fn guest_part(run: &Run, index: usize, data: &str) -> Value {
    let mut binary = Map::new();
    binary.insert(format!("part-{index:03}"), json!(data));
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": run.metadata(&run.part(index)),
        "immutable": true,
        "binaryData": binary,
    })
}

/// No way out and no way in for the sandboxes of a run. Our own connection goes through the
/// node's agent, which no policy is about.
pub(super) fn network_policy(run: &Run) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": run.metadata(&run.name()),
        "spec": {
            "podSelector": {"matchLabels": {RUN: run.id, ROLE: "sandbox"}},
            "policyTypes": ["Ingress", "Egress"],
        },
    })
}

/// What a pod is made of.
#[derive(Debug)]
pub(super) struct PodPlan<'a> {
    pub(super) config: &'a KubernetesConfig,
    pub(super) run: &'a Run,
    pub(super) spec: &'a Spec,
    pub(super) image: &'a str,
    pub(super) name: &'a str,
    pub(super) role: Role,
    /// Pieces of the guest.
    pub(super) parts: usize,
}

/// The object that makes a pod: itself, or a Sandbox of agent-sandbox.
pub(super) fn object(plan: &PodPlan<'_>, shutdown: &str) -> Result<Value, SandboxError> {
    let pod = pod(plan)?;
    let Some(version) = &plan.config.agent_sandbox else {
        return Ok(pod);
    };
    let template = json!({
        "metadata": {
            "labels": pod.pointer("/metadata/labels"),
            "annotations": pod.pointer("/metadata/annotations"),
        },
        "spec": pod.get("spec"),
    });
    Ok(json!({
        "apiVersion": format!("agents.x-k8s.io/{version}"),
        "kind": "Sandbox",
        "metadata": plan.run.metadata(plan.name),
        "spec": {
            "podTemplate": template,
            "shutdownTime": shutdown,
            "shutdownPolicy": "Delete",
        },
    }))
}

/// The pod, as the API describes one.
pub(super) fn pod(plan: &PodPlan<'_>) -> Result<Value, SandboxError> {
    let PodPlan { config, spec, .. } = plan;
    let mut metadata = plan.run.metadata(plan.name);
    let mut labels: Map<String, Value> = config
        .labels
        .iter()
        .map(|(key, value)| (key.clone(), json!(value)))
        .collect();
    labels.extend(plan.run.labels());
    labels.insert("app.kubernetes.io/name".into(), json!("espalier-sandbox"));
    labels.insert(ROLE.into(), json!(plan.role.name()));
    labels.insert(SANDBOX.into(), json!(plan.name));
    let mut annotations: Map<String, Value> = config
        .annotations
        .iter()
        .map(|(key, value)| (key.clone(), json!(value)))
        .collect();
    annotations.insert("espalier.dev/name".into(), json!(spec.name));
    // Autoscalers: what runs here cannot be moved.
    let stay = "cluster-autoscaler.kubernetes.io/safe-to-evict";
    annotations.insert(stay.into(), json!("false"));
    annotations.insert("karpenter.sh/do-not-disrupt".into(), json!("true"));
    metadata["labels"] = Value::Object(labels);
    metadata["annotations"] = Value::Object(annotations);

    let folders = Folders::new(plan);
    let mut volumes = folders.volumes(plan);
    let mut mounts = folders.mounts(config.restricted);
    for (index, mount) in spec.mounts.iter().enumerate() {
        let (claim, sub_path) = shared(config, spec, mount)?;
        let name = format!("mount-{index}");
        let claim = json!({"claimName": claim, "readOnly": true});
        volumes.push(json!({"name": name, "persistentVolumeClaim": claim}));
        let mut entry = json!({"name": name, "mountPath": mount.target, "readOnly": true});
        if !sub_path.is_empty() {
            entry["subPath"] = json!(sub_path);
        }
        mounts.push(entry);
    }
    let resources = resources(config, &spec.limits);
    let mut pod = json!({
        "restartPolicy": "Never",
        "activeDeadlineSeconds": spec.limits.deadline_s + config.start_timeout_s + 60,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "hostname": "sandbox",
        // Names cannot be resolved, and nobody waits to learn that.
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "tolerations": tolerations(config),
        "initContainers": [{
            "name": "install",
            "image": plan.image,
            "imagePullPolicy": config.pull.name(),
            "command": ["/bin/sh", "-c", INSTALL, folders.install(plan)],
            "workingDir": "/",
            "resources": resources.clone(),
            "securityContext": security(config.restricted, &["CHOWN", "DAC_OVERRIDE"]),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": folders.install_mounts(),
        }],
        "containers": [{
            "name": CONTAINER,
            "image": plan.image,
            "imagePullPolicy": config.pull.name(),
            "command": command(plan),
            "workingDir": "/",
            "resources": resources,
            "securityContext": security(config.restricted, &CAPABILITIES),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": mounts,
        }],
        "volumes": volumes,
    });
    let mut set = |key: &str, value: Option<Value>| {
        if let (Some(value), Some(pod)) = (value, pod.as_object_mut()) {
            pod.insert(key.to_owned(), value);
        }
    };
    let some = |map: &BTreeMap<String, String>| (!map.is_empty()).then(|| json!(map));
    set("nodeSelector", some(&config.node_selector));
    set(
        "runtimeClassName",
        config.runtime_class.as_ref().map(|c| json!(c)),
    );
    set(
        "priorityClassName",
        config.priority_class.as_ref().map(|c| json!(c)),
    );
    set(
        "serviceAccountName",
        config.service_account.as_ref().map(|a| json!(a)),
    );
    set("hostUsers", config.user_namespace.then(|| json!(false)));
    let secrets: Vec<Value> = config
        .pull_secrets
        .iter()
        .map(|s| json!({"name": s}))
        .collect();
    set(
        "imagePullSecrets",
        (!secrets.is_empty()).then(|| json!(secrets)),
    );
    // Each on a node of its own.
    let spread = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{
        "labelSelector": {"matchLabels": {
            RUN: plan.run.id,
            ROLE: "prepull",
            "espalier.dev/image": image_label(plan.image),
        }},
        "topologyKey": "kubernetes.io/hostname",
    }]}});
    if plan.role == Role::Prepull {
        set("affinity", Some(spread));
        metadata["labels"]["espalier.dev/image"] = json!(image_label(plan.image));
    }
    Ok(json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}))
}

/// An image's name is no label; this tells images apart (FNV-1a).
fn image_label(image: &str) -> String {
    let hash = image.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

fn command(plan: &PodPlan<'_>) -> Vec<String> {
    let spec = plan.spec;
    let reach = |target: &String| {
        let words = ["reach", "tcp", target.as_str(), "3000"];
        words.map(str::to_owned).to_vec()
    };
    let rest = match &plan.role {
        Role::Sandbox => {
            let plan = ContainerPlan {
                deadline_s: spec.limits.deadline_s,
                heartbeat_s: HEARTBEAT_S,
                workspace: spec.workspace.clone(),
                home: spec.home.clone(),
                folders: plan.config.folders.clone(),
                ports: spec.all_forwards().iter().map(|(port, _)| *port).collect(),
                control_socket: Some(CONTROL_SOCKET.into()),
            };
            vec!["init".to_owned(), json!(plan).to_string()]
        }
        Role::Probe(target) | Role::Control(target) => reach(target),
        Role::Prepull => ["list", "/run/espalier", "10"].map(str::to_owned).to_vec(),
    };
    // The cluster replaces $(NAME) in commands and reads $$ as $.
    let quote = |text: String| match plan.role {
        Role::Sandbox => text.replace('$', "$$"),
        _ => text,
    };
    std::iter::once(GUEST_PATH.to_owned())
        .chain(rest.into_iter().map(quote))
        .collect()
}

fn resources(config: &KubernetesConfig, limits: &Limits) -> Value {
    let cpu_millis = ((limits.cpu_cores * 1000.0).ceil() as u64).max(1);
    let cpu = config
        .cpu_request_millis
        .unwrap_or(cpu_millis)
        .min(cpu_millis);
    let memory = config.memory_request_bytes.unwrap_or(limits.memory_bytes);
    let memory = memory.min(limits.memory_bytes);
    json!({
        "limits": {"cpu": format!("{cpu_millis}m"), "memory": limits.memory_bytes.to_string()},
        "requests": {"cpu": format!("{cpu}m"), "memory": memory.to_string()},
    })
}

fn tolerations(config: &KubernetesConfig) -> Vec<Value> {
    let loss = [
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ]
    .map(|key| {
        json!({
            "key": key,
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": NODE_LOSS_S,
        })
    });
    let own = config.tolerations.iter().map(|toleration| {
        let mut value = Map::new();
        if !toleration.key.is_empty() {
            value.insert("key".into(), json!(toleration.key));
        }
        match &toleration.value {
            Some(wanted) => {
                value.insert("operator".into(), json!("Equal"));
                value.insert("value".into(), json!(wanted));
            }
            None => {
                value.insert("operator".into(), json!("Exists"));
            }
        }
        if let Some(effect) = &toleration.effect {
            value.insert("effect".into(), json!(effect));
        }
        Value::Object(value)
    });
    loss.into_iter().chain(own).collect()
}

/// Root with few capabilities (all of the Pod Security Standard `baseline`), who becomes the
/// sandbox's user in the guest; or that user from the beginning.
fn security(restricted: bool, capabilities: &[&str]) -> Value {
    let mut context = json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": {"drop": ["ALL"]},
    });
    let user = if restricted { guest::protocol::UID } else { 0 };
    context["runAsUser"] = json!(user);
    context["runAsGroup"] = json!(user);
    context["runAsNonRoot"] = json!(restricted);
    if !restricted {
        context["capabilities"]["add"] = json!(capabilities);
    }
    context
}

/// The writable folders, each a volume in memory.
struct Folders {
    /// The first two are workspace and HOME.
    paths: Vec<PathBuf>,
}

impl Folders {
    fn new(plan: &PodPlan<'_>) -> Self {
        let spec = plan.spec;
        let mut paths = vec![spec.workspace.clone(), spec.home.clone()];
        for folder in ["/tmp", "/var/tmp", "/dev/shm"].map(PathBuf::from) {
            paths.push(folder);
        }
        paths.extend(plan.config.folders.iter().cloned());
        // A path named twice would be refused.
        let mut seen = std::collections::BTreeSet::new();
        paths.retain(|path| seen.insert(path.clone()));
        Self { paths }
    }

    fn volumes(&self, plan: &PodPlan<'_>) -> Vec<Value> {
        let parts: Vec<Value> = (0..plan.parts)
            .map(|index| json!({"configMap": {"name": plan.run.part(index)}}))
            .collect();
        let memory = |bytes: u64| json!({"medium": "Memory", "sizeLimit": bytes.to_string()});
        let mut volumes = vec![
            json!({"name": "parts", "projected": {"sources": parts}}),
            json!({"name": "guest", "emptyDir": {"sizeLimit": (64_u64 << 20).to_string()}}),
            json!({"name": "control", "emptyDir": memory(1 << 20)}),
        ];
        for index in 0..self.paths.len() {
            let empty = memory(plan.spec.limits.disk_bytes);
            volumes.push(json!({"name": format!("folder-{index}"), "emptyDir": empty}));
        }
        volumes
    }

    fn mounts(&self, restricted: bool) -> Vec<Value> {
        let control = PathBuf::from(CONTROL_SOCKET);
        let read_only = |path: &str, file: &str| json!({"name": "guest", "mountPath": path, "subPath": file, "readOnly": true});
        let mut mounts = vec![
            json!({"name": "guest", "mountPath": "/run/espalier", "readOnly": true}),
            json!({"name": "control", "mountPath": control.parent()}),
            read_only("/etc/passwd", "passwd"),
            read_only("/etc/group", "group"),
        ];
        for (index, path) in self.paths.iter().enumerate() {
            let mut mount = json!({"name": format!("folder-{index}"), "mountPath": path});
            // The volume itself belongs to root, whom nobody can ask then.
            if restricted && index < 2 {
                mount["subPath"] = json!("data");
            }
            mounts.push(mount);
        }
        mounts
    }

    fn install(&self, plan: &PodPlan<'_>) -> String {
        let below = if plan.config.restricted { "/data" } else { "" };
        let copies = self.paths.iter().take(2).enumerate();
        let install = InstallPlan {
            copies: copies
                .map(|(index, path)| (path.clone(), format!("{INTO}/{index}{below}").into()))
                .collect(),
            users: GUEST_FOLDER.into(),
            home: plan.spec.home.clone(),
        };
        json!(install).to_string().replace('$', "$$")
    }

    fn install_mounts(&self) -> Vec<Value> {
        let mut mounts = vec![
            json!({"name": "parts", "mountPath": PARTS, "readOnly": true}),
            json!({"name": "guest", "mountPath": GUEST_FOLDER}),
        ];
        for index in 0..self.paths.len().min(2) {
            let path = format!("{INTO}/{index}");
            mounts.push(json!({"name": format!("folder-{index}"), "mountPath": path}));
        }
        mounts
    }
}

/// Where a mounted folder of this machine is in the cluster.
fn shared(
    config: &KubernetesConfig,
    spec: &Spec,
    mount: &Mount,
) -> Result<(String, String), SandboxError> {
    for folder in &config.volumes {
        if let Ok(rest) = mount.source.strip_prefix(&folder.source) {
            let path = PathBuf::from(&folder.sub_path).join(rest);
            let path = path.to_string_lossy().trim_matches('/').to_owned();
            return Ok((folder.claim.clone(), path));
        }
    }
    Err(SandboxError::Refused {
        name: spec.name.clone(),
        cause: RefusalCause::Invalid,
        reason: format!(
            "mount {}: nodes of a cluster do not have the folders of this machine",
            mount.source.display()
        ),
        hint: "put its content into the image, or into a volume that [[sandbox.volumes]] names"
            .to_owned(),
    })
}
