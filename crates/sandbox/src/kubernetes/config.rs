//! Settings of the kind `kubernetes`: what a recipe's `[sandbox]` says.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

/// Settings of the kind `kubernetes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesConfig {
    /// The file that says where the cluster is. `None`: `KUBECONFIG`, else `~/.kube/config`, else
    /// the service account of the pod that we are in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
    /// The context of that file; its current one when `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<String>,
    /// Where everything is made; the context's own when `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The image of sandboxes whose spec names none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// When nodes pull an image.
    pub pull: PullPolicy,
    /// Secrets of the namespace with the passwords of registries.
    pub pull_secrets: Vec<String>,
    /// Images that nodes pull, and that are tried, before the provider is there.
    pub prepull: Vec<String>,
    /// On so many nodes.
    pub prepull_nodes: u32,
    /// Folders beside workspace, HOME and `/tmp` that can be written.
    pub folders: Vec<PathBuf>,
    /// Where folders of this machine that a spec mounts are in the cluster.
    pub volumes: Vec<SharedFolder>,
    /// CPU that is set aside for each sandbox, in thousandths of a core; its limit when `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_request_millis: Option<u64>,
    /// Memory that is set aside for each sandbox; its limit when `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_request_bytes: Option<u64>,
    /// Labels that a node must have: the pool.
    pub node_selector: BTreeMap<String, String>,
    /// Taints of nodes that do not matter.
    pub tolerations: Vec<Toleration>,
    /// A runtime class: gVisor, Kata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_class: Option<String>,
    /// A priority class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority_class: Option<String>,
    /// The service account, for image pull secrets and admission; its token is never mounted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_account: Option<String>,
    /// More labels of pods.
    pub labels: BTreeMap<String, String>,
    /// More annotations of pods.
    pub annotations: BTreeMap<String, String>,
    /// No container ever runs as root, as the Pod Security Standard `restricted` wants it. Costs:
    /// processes of the sandbox can end it, files of the image must be readable for others, and
    /// programs run as nobody but the sandbox's own user ([`crate::Exec::user`]).
    pub restricted: bool,
    /// Pods in user namespaces of their own (`hostUsers: false`).
    pub user_namespace: bool,
    /// Make a NetworkPolicy without any way out, and find out whether it holds.
    pub network_policy: bool,
    /// What the probe of the policy tries to reach, `ADDRESS:PORT` by TCP. `None`: the cluster's
    /// own API server, at the address that pods know.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress_target: Option<String>,
    /// Make no sandbox where the probe did not prove that there is no way out.
    pub egress_must_be_blocked: bool,
    /// For a pod to run, images pulled.
    pub start_timeout_s: u64,
    /// How long a pod may be unschedulable; more where nodes are made on demand.
    pub unschedulable_s: u64,
    /// How long a pull that may still succeed is waited for.
    pub pull_retry_s: u64,
    /// Have the controller of kubernetes-sigs/agent-sandbox make the pods: the version of its
    /// API `agents.x-k8s.io`, for example `v1beta1`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_sandbox: Option<String>,
    /// Living sandboxes at a time; one more is refused with [`crate::SandboxError::Create`].
    pub sandboxes_max: usize,
    /// Hosts that sandboxes may reach through a filtering proxy of the orchestrator's machine (see
    /// [`crate::Allowed`]); what each of them gets is for whoever makes it to say.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<String>,
    /// Whether these hosts may have addresses that are not of the public internet.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub egress_private: bool,
}

impl Default for KubernetesConfig {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            context: None,
            namespace: None,
            image: None,
            pull: PullPolicy::IfNotPresent,
            pull_secrets: Vec::new(),
            egress: Vec::new(),
            egress_private: false,
            prepull: Vec::new(),
            prepull_nodes: 1,
            // Where the field's task sets keep tests, solutions and rewards.
            folders: ["/tests", "/solution", "/logs"].map(PathBuf::from).to_vec(),
            volumes: Vec::new(),
            cpu_request_millis: None,
            memory_request_bytes: None,
            node_selector: BTreeMap::new(),
            tolerations: Vec::new(),
            runtime_class: None,
            priority_class: None,
            service_account: None,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            restricted: false,
            user_namespace: false,
            network_policy: true,
            egress_target: None,
            egress_must_be_blocked: false,
            start_timeout_s: 300,
            unschedulable_s: 30,
            pull_retry_s: 60,
            agent_sandbox: None,
            sandboxes_max: 256,
        }
    }
}

/// When nodes pull an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PullPolicy {
    /// When they have none of that name.
    IfNotPresent,
    /// For every pod: they ask the registry whether it changed.
    Always,
    /// Never: it has to be there.
    Never,
}

impl PullPolicy {
    /// As the cluster spells it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::IfNotPresent => "IfNotPresent",
            Self::Always => "Always",
            Self::Never => "Never",
        }
    }
}

/// A taint that does not matter.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Toleration {
    /// Its key; every taint when empty.
    pub key: String,
    /// Its value; any when `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`; all of them when `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<String>,
}

/// A folder of this machine, with all below it, that the cluster has as a volume: mounts of it
/// become mounts of the volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedFolder {
    /// On this machine, absolute.
    pub source: PathBuf,
    /// The PersistentVolumeClaim of the namespace with the same content.
    pub claim: String,
    /// Where in the volume that content is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sub_path: String,
}
