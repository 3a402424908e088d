//! A Kubernetes cluster for tests: a real API over TLS, pods that really run, and faults on demand.
//!
//! [`Fake::start`] gives a cluster with one node; [`Fake::kubeconfig`] is a file that `kubectl` and
//! every client library understand. It shares nothing with the code that is tested against it but
//! the Kubernetes API.
//!
//! Parts:
//! * `server`, `api`, `request`, `auth`, `resources`, `table`: HTTP and what it is about.
//! * `store`: all objects under one revision, with a bounded log of changes that answers watches
//!   and reads of the past.
//! * `typed`, `validate`, `admission`, `patch`, `selector`, `quantity`: what the real server accepts,
//!   fills in, and says when it does not.
//! * `scheduler`, `gc`, `agents`: which pods get onto the node; what goes when its owner or its
//!   namespace goes; pods for the Sandboxes of agent-sandbox.
//! * `kubelet`: the node. Each container is a real one, made by `runc` in a pid namespace that ends
//!   with this process (docs/decisions/0007-fake-cluster.md says why not by our own sandboxes).
//! * `streams`, `logs`: exec and attach over WebSockets, logs.
//! * `faults`: what goes wrong when a test says so.
//!
//! Invariants:
//! * What the real thing does and this does not is refused in words ("kubefake does not do this").
//! * No process, mount or control group outlives the [`Fake`] or this process, `kill -9` included;
//!   control groups of a killed one go with the next start.
//! * Nothing here waits for a time to pass but what is about time: grace, deadlines, back-off,
//!   bookmarks, the time limit of a watch.
//!
//! Limits: 3 MiB of a request, [`Settings::log_max`] changes remembered (older ones are 410 Gone),
//! 10 MiB of the log of a container, [`Settings::pod_pids_max`] processes in a container, 10,000
//! requests remembered. Not here: server-side apply, protobuf, SPDY and so port-forward, terminals,
//! probes, sidecars, user namespaces of pods, seccomp profiles (all run as if unconfined).

mod admission;
mod agents;
mod api;
mod auth;
mod core;
mod error;
mod fake;
mod faults;
mod gc;
mod kubelet;
mod logs;
mod patch;
mod quantity;
mod request;
mod resources;
mod scheduler;
mod selector;
mod server;
mod store;
mod streams;
mod table;
mod typed;
mod validate;

pub use agents::agent_sandbox;
pub use auth::{Rule, User};
pub use error::ApiError;
pub use fake::{Fake, FakeError};
pub use faults::{ApiFault, Matcher, WatchFault};
pub use kubelet::images::{Image, Pull, host_image};
pub use resources::Resource;
pub use server::Record;

use std::{collections::BTreeMap, path::PathBuf};

/// How a cluster is to be.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Whether there is a node. Without one pods stay pending; no root is needed.
    pub node: bool,
    /// Images by name. [`host_image`] makes one of the host's system.
    pub images: BTreeMap<String, Image>,
    /// PersistentVolumeClaims by name, in all namespaces: folders of the host.
    pub claims: BTreeMap<String, PathBuf>,
    /// Who may do what. The first is the one of the kubeconfig.
    pub users: Vec<User>,
    /// Kinds of custom resources.
    pub custom: Vec<Resource>,
    /// Whether pods that a NetworkPolicy cuts off cannot reach the API.
    pub enforce_network_policies: bool,
    /// What the node has room for, as in a node's `status.allocatable`.
    pub allocatable: BTreeMap<String, String>,
    /// Processes and threads of one container.
    pub pod_pids_max: u32,
    /// Changes that are remembered.
    pub log_max: usize,
    /// For ids and the ends of generated names.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        let room = [
            ("cpu", "64"),
            ("memory", "64Gi"),
            ("ephemeral-storage", "100Gi"),
            ("pods", "110"),
        ];
        Self {
            node: true,
            images: BTreeMap::new(),
            claims: BTreeMap::new(),
            users: vec![User {
                name: "admin".to_owned(),
                token: "admin-token".to_owned(),
                rules: vec![Rule::everything()],
            }],
            custom: Vec::new(),
            enforce_network_policies: true,
            allocatable: room.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            pod_pids_max: 4096,
            log_max: 10_000,
            seed: 0,
        }
    }
}
