//! The cluster as a test holds it.

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{sync::watch, task::JoinHandle, time::timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    ApiFault, Image, Matcher, Pull, Record, Settings, WatchFault, agents,
    api::write::DeleteOptions,
    core::{Core, Shared, now},
    gc,
    kubelet::{
        Kubelet,
        node::Node,
        pod::{Want, condition},
    },
    scheduler::{self, NODE, node_object},
    server::{self, Server},
    store::Key,
    validate::list,
};

/// For all tasks to end.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// Why there is no cluster.
#[derive(Debug, thiserror::Error)]
pub enum FakeError {
    /// Its folder could not be made or filled.
    #[error("fake cluster: {0}")]
    Io(#[from] io::Error),
    /// Its certificates could not be made.
    #[error("fake cluster: certificates: {0}")]
    Certificates(String),
    /// There is no such pod or container, or no node that it could be on.
    #[error("fake cluster: {0}: not running on the node")]
    NotRunning(String),
}

/// A running cluster. Dropping it ends everything a little later; [`Fake::end`] waits for it.
#[derive(Debug)]
pub struct Fake {
    core: Shared,
    server: Arc<Server>,
    kubelet: Option<Arc<Kubelet>>,
    address: SocketAddr,
    tls: Arc<rustls::ServerConfig>,
    listener: Mutex<Option<(CancellationToken, JoinHandle<()>)>>,
    stop: CancellationToken,
    tasks: TaskTracker,
    authority: String,
    /// Last: tasks may still use it.
    folder: TempDir,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn certificates()
-> Result<(String, Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), FakeError> {
    let wrong = |error: rcgen::Error| FakeError::Certificates(error.to_string());
    let key = KeyPair::generate().map_err(wrong)?;
    let mut authority = CertificateParams::new(Vec::new()).map_err(wrong)?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    authority
        .distinguished_name
        .push(rcgen::DnType::CommonName, "kubefake");
    let signed = authority.self_signed(&key).map_err(wrong)?;
    let issuer = Issuer::new(authority, key);
    let names = [
        "127.0.0.1",
        "localhost",
        "kubernetes.default.svc",
        "10.96.0.1",
    ];
    let names = names.map(str::to_owned).to_vec();
    let own_key = KeyPair::generate().map_err(wrong)?;
    let mut own = CertificateParams::new(names).map_err(wrong)?;
    own.use_authority_key_identifier_extension = true;
    let own = own.signed_by(&own_key, &issuer).map_err(wrong)?;
    let own_key = PrivatePkcs8KeyDer::from(own_key.serialize_der());
    Ok((signed.pem(), vec![own.der().clone()], own_key.into()))
}

impl Fake {
    /// Starts a cluster on a port of 127.0.0.1. Needs a Tokio runtime; with a node also root and
    /// `runc`.
    ///
    /// # Errors
    /// [`FakeError::Io`], [`FakeError::Certificates`].
    pub async fn start(settings: Settings) -> Result<Self, FakeError> {
        let folder = tempfile::Builder::new().prefix("kubefake-").tempdir()?;
        let (authority, chain, key) = certificates()?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|config| config.with_no_client_auth().with_single_cert(chain, key))
            .map_err(|error| FakeError::Certificates(error.to_string()))?;
        let tls = Arc::new(tls);
        let listener = server::listen(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
        let address = listener.local_addr()?;
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let with_node = settings.node;
        let allocatable = json!(settings.allocatable);
        let core = Arc::new(Core::new(settings));
        // Nobody has set it before.
        let _ = core.listens.set(address);
        core.bootstrap();
        let kubelet = if with_node {
            let node = Node::start(folder.path().join("node")).await?;
            let mut object = node_object(&allocatable);
            core.stamp(&mut object, "", NODE);
            core.store().put(Key::new("nodes", "", NODE), object);
            Some(Kubelet::new(
                Arc::clone(&core),
                node,
                tasks.clone(),
                stop.clone(),
            ))
        } else {
            None
        };
        let server = Arc::new(Server {
            core: Arc::clone(&core),
            kubelet: kubelet.clone(),
            tasks: tasks.clone(),
            stop: stop.clone(),
            connections: Mutex::default(),
            records: Mutex::default(),
        });
        tasks.spawn(gc::run(Arc::clone(&core), stop.clone()));
        tasks.spawn(scheduler::run(Arc::clone(&core), stop.clone()));
        tasks.spawn(agents::run(Arc::clone(&core), stop.clone()));
        if let Some(kubelet) = &kubelet {
            tasks.spawn(Arc::clone(kubelet).run());
        }
        let fake = Self {
            core,
            server,
            kubelet,
            address,
            tls,
            listener: Mutex::default(),
            stop,
            tasks,
            authority,
            folder,
        };
        fake.serve(listener);
        fs::write(fake.folder.path().join("ca.pem"), &fake.authority)?;
        let token = fake.core.settings.users.first().map(|u| u.token.clone());
        fake.write_kubeconfig(&fake.kubeconfig(), &token.unwrap_or_default(), "default")?;
        Ok(fake)
    }

    fn serve(&self, listener: tokio::net::TcpListener) {
        let server = Arc::clone(&self.server);
        let tls = TlsAcceptor::from(Arc::clone(&self.tls));
        let until = CancellationToken::new();
        let end = until.clone();
        let task = self.tasks.spawn(async move {
            tokio::select! {
                () = server.serve(listener, tls) => {}
                () = until.cancelled() => {}
            }
        });
        *lock(&self.listener) = Some((end, task));
    }

    /// `https://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// The certificate that signed the server's, as PEM.
    #[must_use]
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// The kubeconfig of the first user, for the namespace `default`.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    /// A folder that goes with the cluster, for what tests need beside it.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a kubeconfig for a token and a namespace.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_kubeconfig(&self, path: &Path, token: &str, namespace: &str) -> io::Result<()> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "kubefake",
            "clusters": [{"name": "kubefake", "cluster": {
                "server": self.url(),
                "certificate-authority": self.folder.path().join("ca.pem"),
            }}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "kubefake", "context": {
                "cluster": "kubefake", "user": "user", "namespace": namespace,
            }}],
        });
        // Every JSON document is a YAML document.
        fs::write(path, format!("{config:#}\n"))
    }

    /// Ends everything and waits until nothing is left.
    pub async fn end(self) {
        self.stop.cancel();
        self.tasks.close();
        if timeout(END_TIMEOUT, self.tasks.wait()).await.is_err() {
            tracing::warn!("a fake cluster did not end within {END_TIMEOUT:?}");
        }
    }

    // --- What a test may look at ---------------------------------------------------------------

    /// An object as it is now: plural with group (`pods`, `leases.coordination.k8s.io`),
    /// namespace (empty for kinds without), name.
    #[must_use]
    pub fn object(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        let store = self.core.store();
        let found = store.get(&Key::new(resource, namespace, name))?;
        Some((**found).clone())
    }

    /// The names of all objects of a kind, with their namespaces.
    #[must_use]
    pub fn names(&self, resource: &str) -> Vec<(String, String)> {
        let store = self.core.store();
        let all = store.list(resource, None);
        all.map(|(key, _)| (key.namespace.clone(), key.name.clone()))
            .collect()
    }

    /// Waits until something is true of the objects; it is asked after each change.
    pub async fn until(&self, mut holds: impl FnMut(&Self) -> bool) {
        let mut changed: watch::Receiver<u64> = self.core.changes();
        loop {
            changed.borrow_and_update();
            if holds(self) {
                return;
            }
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    /// All requests so far, oldest first.
    #[must_use]
    pub fn requests(&self) -> Vec<Record> {
        lock(&self.server.records).iter().cloned().collect()
    }

    // --- What a test may do that no client can ---------------------------------------------------

    /// The next `times` requests that fit are hit by a fault.
    pub fn inject(&self, matcher: Matcher, fault: ApiFault, times: u32) {
        self.core.faults.inject(matcher, fault, times);
    }

    /// Forgets faults that are still due; gives how many that were.
    pub fn clear_faults(&self) -> u32 {
        self.core.faults.clear()
    }

    /// Hits all open watches; gives how many.
    pub fn hit_watches(&self, fault: WatchFault) -> usize {
        self.core.faults.hit_watches(fault)
    }

    /// Breaks all connections of exec and attach; gives how many.
    pub fn cut_streams(&self) -> usize {
        self.core.faults.cut_streams()
    }

    /// Forgets the past: older resource versions are 410 Gone.
    pub fn compact(&self) {
        self.core.store().compact();
        self.core.nudge();
    }

    /// Breaks all connections and listens again, at the same address and with the same objects.
    ///
    /// # Errors
    /// When the port is taken meanwhile.
    pub async fn restart_api(&self) -> Result<(), FakeError> {
        let listening = lock(&self.listener).take();
        if let Some((end, task)) = listening {
            end.cancel();
            // Then the port is free.
            let _ = task.await;
        }
        std::mem::take(&mut *lock(&self.server.connections)).cancel();
        self.cut_streams();
        self.hit_watches(WatchFault::Cut);
        let listener = server::listen(self.address).await?;
        self.serve(listener);
        Ok(())
    }

    /// Changes an image of the table, or adds one.
    pub fn set_image(&self, name: &str, image: Image) {
        if let Some(kubelet) = &self.kubelet {
            kubelet.change_images(|images| {
                images.table.insert(name.to_owned(), image);
            });
        }
    }

    /// Says how pulls of an image go from now on.
    pub fn set_pull(&self, image: &str, pull: Pull) {
        if let Some(kubelet) = &self.kubelet {
            kubelet.change_images(|images| {
                images.pulls.insert(image.to_owned(), pull);
            });
        }
    }

    fn running(
        &self,
        namespace: &str,
        pod: &str,
    ) -> Result<Arc<crate::kubelet::pod::Pod>, FakeError> {
        let none = || FakeError::NotRunning(format!("pod {namespace}/{pod}"));
        let object = self.object("pods", namespace, pod).ok_or_else(none)?;
        let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
        let kubelet = self.kubelet.as_ref().ok_or_else(none)?;
        kubelet.pod(uid).ok_or_else(none)
    }

    /// Evicts a pod as a node does that runs out of something: it fails, and its object stays.
    ///
    /// # Errors
    /// [`FakeError::NotRunning`].
    pub fn evict(&self, namespace: &str, pod: &str) -> Result<(), FakeError> {
        let running = self.running(namespace, pod)?;
        running.want.send_replace(Want::Fail {
            reason: "Evicted".to_owned(),
            message: "The node was low on resource: memory. Threshold quantity: 100Mi, available: \
                      1Mi. "
                .to_owned(),
        });
        Ok(())
    }

    /// Kills the first process of a container; with `memory` it looks like the kernel's
    /// out-of-memory killer.
    ///
    /// # Errors
    /// [`FakeError::NotRunning`].
    pub async fn kill(
        &self,
        namespace: &str,
        pod: &str,
        container: &str,
        memory: bool,
    ) -> Result<(), FakeError> {
        let running = self.running(namespace, pod)?;
        let found = running.container(container);
        let found = found.ok_or_else(|| {
            FakeError::NotRunning(format!("container {container} of {namespace}/{pod}"))
        })?;
        found.kill(memory).await;
        Ok(())
    }

    /// The node can be reached no more: its state is unknown, its pods are not ready, nothing is
    /// done for them. Processes go on.
    pub fn lose_node(&self) {
        let Some(kubelet) = &self.kubelet else {
            return;
        };
        kubelet.set_reachable(false);
        self.cut_streams();
        let change_node = |node: &mut Value| {
            let status = &mut node["status"];
            let message = "Kubelet stopped posting node status.";
            condition(status, "Ready", false, "NodeStatusUnknown", message);
            if let Some(all) = status["conditions"].as_array_mut() {
                for one in all.iter_mut().filter(|c| c["type"] == "Ready") {
                    one["status"] = json!("Unknown");
                }
            }
            node["spec"]["taints"] = ["NoSchedule", "NoExecute"]
                .map(|effect| {
                    json!({"key": "node.kubernetes.io/unreachable", "effect": effect, "timeAdded": now()})
                })
                .to_vec()
                .into();
        };
        self.change_node(change_node);
        for (key, uid) in self.pods_of_node() {
            self.core.change(&key, &uid, |pod| {
                condition(&mut pod["status"], "Ready", false, "", "");
            });
        }
    }

    /// What the cluster does about pods of a lost node when their time is over: it deletes them.
    /// They stay until the node is back, or somebody removes them by force.
    pub fn give_lost_pods_up(&self) {
        let pods = self.core.core_resource("pods");
        for (key, uid) in self.pods_of_node() {
            self.core.change(&key, &uid, |pod| {
                let status = &mut pod["status"];
                status["reason"] = json!("NodeLost");
                status["message"] = json!(format!(
                    "Node {NODE} which was running pod {} is unresponsive",
                    key.name
                ));
                let message = "Taint manager: deleting due to NoExecute taint";
                condition(
                    status,
                    "DisruptionTarget",
                    true,
                    "DeletionByTaintManager",
                    message,
                );
            });
            // One that went meanwhile is as good.
            let _ = self.core.delete(&pods, &key, &DeleteOptions::default());
        }
    }

    /// The node is back.
    pub fn find_node(&self) {
        self.change_node(|node| {
            let message = "kubelet is posting ready status";
            condition(&mut node["status"], "Ready", true, "KubeletReady", message);
            node["spec"]["taints"] = json!([]);
        });
        if let Some(kubelet) = &self.kubelet {
            kubelet.set_reachable(true);
        }
    }

    fn change_node(&self, change: impl FnOnce(&mut Value)) {
        let uid = self.object("nodes", "", NODE);
        let uid = uid.map(|node| node["metadata"]["uid"].clone());
        let uid = uid.unwrap_or_default();
        let key = Key::new("nodes", "", NODE);
        self.core
            .change(&key, uid.as_str().unwrap_or_default(), change);
    }

    fn pods_of_node(&self) -> Vec<(Key, String)> {
        let store = self.core.store();
        let all = store.list("pods", None);
        all.filter(|(_, pod)| pod["spec"]["nodeName"] == NODE)
            .filter(|(_, pod)| list(&pod["status"]["containerStatuses"]).next().is_some())
            .map(|(key, pod)| {
                let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
                (key.clone(), uid.to_owned())
            })
            .collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
