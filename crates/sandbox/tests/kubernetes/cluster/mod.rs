//! A cluster for tests: an API server of our own over TLS, with one node whose pods are sandboxes
//! of the local kind. What it does it does as the real one: versions and watches that expire
//! (410), exec over WebSocket (protocols v5 and v4), logs, deletion with and without grace,
//! garbage collection by owner, `activeDeadlineSeconds`. What it does not do: admission beyond a
//! quota, other resources than pods, ConfigMaps and namespaces, a network.

mod exec;
mod http;
mod kubelet;
mod store;

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use rcgen::{CertificateParams, KeyPair};
use sandbox::{LocalConfig, LocalProvider};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_rustls::{TlsAcceptor, rustls};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{
    kubelet::Kubelet,
    store::{Key, Store},
};

/// Faults on demand.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Pods in the namespace; more are refused.
    pub(crate) quota: Mutex<Option<usize>>,
    /// Pods are not taken: no permission.
    pub(crate) forbidden: AtomicBool,
    /// No node has room.
    pub(crate) full: AtomicBool,
    /// So many of the next requests that change something fail with 500.
    pub(crate) errors: AtomicUsize,
    /// Exec speaks version 4 at most, which cannot close standard input.
    pub(crate) old_exec: AtomicBool,
}

pub(crate) struct Cluster {
    pub(crate) store: Arc<Store>,
    pub(crate) faults: Faults,
    pub(crate) kubelet: Kubelet,
    tasks: TaskTracker,
    stop: CancellationToken,
    /// Ends all watches; replaced each time.
    cut: Mutex<CancellationToken>,
    token: String,
    folder: tempfile::TempDir,
}

impl Cluster {
    pub(crate) async fn start() -> Arc<Self> {
        let provider = LocalProvider::start(LocalConfig::default()).await.expect("local sandboxes");
        let store = Arc::new(Store::new());
        let cluster = Arc::new(Self {
            kubelet: Kubelet::new(provider, Arc::clone(&store)),
            store,
            faults: Faults::default(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            cut: Mutex::default(),
            token: format!("token-{}", std::process::id()),
            folder: tempfile::tempdir().unwrap(),
        });
        for name in ["default", "espalier"] {
            let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {}});
            cluster.store.create(&key("namespaces", "", name), namespace);
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let own = KeyPair::generate().unwrap();
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        let certificate = CertificateParams::new(names).unwrap().self_signed(&own).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                rustls::pki_types::PrivatePkcs8KeyDer::from(own.serialize_der()).into(),
            )
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        let authority = cluster.folder.path().join("ca.pem");
        std::fs::write(&authority, certificate.pem()).unwrap();
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {
                "server": format!("https://127.0.0.1:{port}"), "certificate-authority": authority}}],
            "users": [{"name": "test", "user": {"token": cluster.token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "espalier"}}],
        });
        std::fs::write(cluster.kubeconfig(), kubeconfig.to_string()).unwrap();
        let (serving, stop) = (Arc::clone(&cluster), cluster.stop.clone());
        cluster.tasks.spawn(async move {
            loop {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    () = stop.cancelled() => return,
                };
                let Ok((stream, _)) = accepted else { continue };
                let (cluster, acceptor) = (Arc::clone(&serving), acceptor.clone());
                serving.tasks.spawn(async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        http::serve(cluster, stream).await;
                    }
                });
            }
        });
        cluster
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    pub(crate) fn pods(&self) -> Vec<Value> {
        self.store.list("pods", None).0
    }

    /// Ends all watches, as a server that restarts does.
    pub(crate) fn cut_watches(&self) {
        std::mem::take(&mut *self.cut.lock().unwrap()).cancel();
    }

    fn cut(&self) -> CancellationToken {
        self.cut.lock().unwrap().clone()
    }

    /// Waits until no object of ours and no process is left.
    pub(crate) async fn assert_empty(&self) {
        let begun = std::time::Instant::now();
        loop {
            let pods = self.pods();
            let maps = self.store.list("configmaps", None).0;
            if pods.is_empty() && maps.is_empty() && self.kubelet.count() == 0 {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{pods:#?}\n{maps:#?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// A pod object is new.
    fn pod_created(self: &Arc<Self>, key: Key, pod: Value) {
        let capacity = !self.faults.full.load(Ordering::Relaxed);
        let cluster = Arc::clone(self);
        self.tasks.spawn(async move {
            tokio::select! {
                () = cluster.kubelet.run(key, pod, capacity) => {}
                () = cluster.stop.cancelled() => {}
            }
        });
    }

    /// Deletes an object and, a little later, what belongs to it.
    fn delete(self: &Arc<Self>, key: &Key, grace_s: u64) -> Option<Value> {
        let object = self.store.get(key)?;
        let uid = object["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        if key.0 == "pods" && grace_s > 0 {
            let marked = self.store.update(key, |pod| {
                pod["metadata"]["deletionTimestamp"] = json!(store::timestamp());
                pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace_s);
            });
            let (cluster, key) = (Arc::clone(self), key.clone());
            self.tasks.spawn(async move {
                // A process that does not listen to SIGTERM is killed when its time is over; ours
                // does not listen, and nobody here waits for its time.
                cluster.kubelet.stop(&uid);
                cluster.store.remove(&key);
            });
            return marked;
        }
        let removed = self.store.remove(key);
        self.kubelet.stop(&uid);
        let cluster = Arc::clone(self);
        self.tasks.spawn(async move {
            for owned in cluster.store.owned_by(&uid) {
                // Pods own nothing, so one level is all there is.
                if let Some(object) = cluster.store.remove(&owned) {
                    cluster.kubelet.stop(object["metadata"]["uid"].as_str().unwrap_or_default());
                }
            }
        });
        removed
    }

    /// Ends the processes of a pod with a status.
    pub(crate) fn end_pod(&self, pod: &Value, status: Value) {
        self.kubelet.end_with(pod["metadata"]["uid"].as_str().unwrap(), status);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub(crate) fn key(resource: &str, namespace: &str, name: &str) -> Key {
    (resource.to_owned(), namespace.to_owned(), name.to_owned())
}
