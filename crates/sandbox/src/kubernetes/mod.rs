//! The kind `kubernetes`: pods of a cluster, over its API.
//!
//! A pod's init container waits until the guest is brought (through exec, so that any image with a
//! shell will do), then the guest is the first process of the container that is the sandbox. The
//! control stream is an exec of `guest relay` into it. All pods of a run are seen through one
//! watch, and belong to one ConfigMap.
//!
//! Who ends a pod: the guest (control stream closed, nothing heard for [`HEARTBEAT_S`], deadline);
//! the cluster (`activeDeadlineSeconds`); its garbage collector, when the run's ConfigMap goes;
//! and the next provider, which deletes the ConfigMaps of runs that were not heard of for
//! [`OWNER_STALE_S`]. A pod is never started again in its place.
//!
//! Network: connections to the gateway travel on the control stream. That nothing else can be
//! reached is the work of the cluster's network plugin: [`KubernetesProvider::probe_egress`] finds
//! out whether it does it.

mod description;
mod egress;
mod exec;
mod owner;
mod pods;
mod sight;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use guest::protocol::GUEST_PATH;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, Config,
    api::{DeleteParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{sleep, timeout},
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

pub use self::egress::Egress;
use self::{
    owner::Owner,
    pods::Pods,
    sight::{INIT, MAIN, Sight},
};
use crate::{
    Provider, RefusalCause, Sandbox, SandboxError, Spec, guest_binary,
    inhabited::{Inhabited, Shell},
    stream::{Stream, StreamSettings},
};

/// The guest ends when it heard nothing for so many seconds.
const HEARTBEAT_S: u64 = 60;
/// It hears of us this often.
const PING_EVERY: Duration = Duration::from_secs(15);
/// A run whose ConfigMap was not touched for so many seconds is dead.
const OWNER_STALE_S: u64 = 300;
/// The label that carries the run.
const LABEL_RUN: &str = "espalier.dev/run";
/// For a pod to be gone after the cluster was told to delete it.
const DELETE_TIMEOUT: Duration = Duration::from_secs(60);
const DELETE_RETRY: Duration = Duration::from_millis(200);
/// For the watch to say how a pod ended, after its stream broke.
const REASON_TIMEOUT: Duration = Duration::from_secs(5);

/// Settings of the kind `kubernetes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesConfig {
    /// The file that names the cluster. `None`: `KUBECONFIG`, `~/.kube/config`, or the pod that
    /// we run in.
    pub kubeconfig: Option<PathBuf>,
    /// The context in that file; its current one when `None`.
    pub context: Option<String>,
    /// Where pods are made.
    pub namespace: String,
    /// The image of sandboxes whose spec names none. It needs a shell, nothing else.
    pub image: Option<String>,
    /// `IfNotPresent`, `Never` or `Always`.
    pub image_pull_policy: String,
    /// Names of secrets for registries.
    pub image_pull_secrets: Vec<String>,
    /// Labels of the nodes to use: the pool.
    pub node_selector: BTreeMap<String, String>,
    /// Tolerations, as the API writes them.
    pub tolerations: Vec<Value>,
    /// A runtime class (gVisor, Kata).
    pub runtime_class: Option<String>,
    /// A priority class.
    pub priority_class: Option<String>,
    /// Cores that are reserved; the limit itself when `None`.
    pub cpu_request_cores: Option<f64>,
    /// Memory that is reserved; the limit itself when `None`.
    pub memory_request_bytes: Option<u64>,
    /// Folders beside workspace, HOME, `/tmp` and `/dev/shm` that can be written.
    pub folders: Vec<PathBuf>,
    /// From the creation of a pod to its guest's first word.
    pub start_s: u64,
    /// How long a pod that no node has room for waits for an autoscaler.
    pub unschedulable_s: u64,
    /// Living sandboxes at a time; one more is refused with [`SandboxError::Create`].
    pub sandboxes_max: usize,
}

impl Default for KubernetesConfig {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            context: None,
            namespace: "espalier".to_owned(),
            image: None,
            image_pull_policy: "IfNotPresent".to_owned(),
            image_pull_secrets: Vec::new(),
            node_selector: BTreeMap::new(),
            tolerations: Vec::new(),
            runtime_class: None,
            priority_class: None,
            cpu_request_cores: None,
            memory_request_bytes: None,
            folders: ["/tests", "/solution", "/logs"].map(PathBuf::from).to_vec(),
            start_s: 300,
            unschedulable_s: 60,
            sandboxes_max: 1024,
        }
    }
}

/// Makes sandboxes of pods. Cheap to clone. Dropping the last clone and the last sandbox leaves
/// nothing.
#[derive(Debug, Clone)]
pub struct KubernetesProvider {
    maker: Arc<Maker>,
    tasks: TaskTracker,
}

struct Maker {
    pods: Api<Pod>,
    config: KubernetesConfig,
    owner: Owner,
    seen: Arc<Pods>,
    reaper: mpsc::UnboundedSender<String>,
    tasks: TaskTracker,
    next: AtomicU64,
    living: Arc<AtomicUsize>,
    _stop: DropGuard,
}

impl std::fmt::Debug for Maker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Maker")
            .field("config", &self.config)
            .field("run", &self.owner.run)
            .finish_non_exhaustive()
    }
}

impl KubernetesProvider {
    /// Finds the cluster, makes the run's ConfigMap, and deletes those of dead runs. Needs a
    /// Tokio runtime.
    ///
    /// # Errors
    /// [`SandboxError::Unsupported`] with what the cluster said.
    pub async fn start(config: KubernetesConfig) -> Result<Self, SandboxError> {
        let client = client(&config).await?;
        let tasks = TaskTracker::new();
        let stop = CancellationToken::new();
        let owner = Owner::start(&client, &config.namespace, &tasks, stop.clone()).await?;
        let pods: Api<Pod> = Api::namespaced(client, &config.namespace);
        let seen = Arc::new(Pods::default());
        let labels = format!("{LABEL_RUN}={}", owner.run);
        let (api, watched, until) = (pods.clone(), Arc::clone(&seen), stop.clone());
        tasks.spawn(async move { watched.watch(api, labels, until).await });
        let (reaper, mut dropped) = mpsc::unbounded_channel::<String>();
        let api = pods.clone();
        tasks.spawn(async move {
            // Ends when the provider and the last sandbox are gone.
            while let Some(name) = dropped.recv().await {
                delete(&api, &name).await;
            }
        });
        Ok(Self {
            tasks: tasks.clone(),
            maker: Arc::new(Maker {
                pods,
                config,
                owner,
                seen,
                reaper,
                tasks,
                next: AtomicU64::new(1),
                living: Arc::default(),
                _stop: stop.drop_guard(),
            }),
        })
    }

    /// Tries from inside a sandbox what must not be possible. Hosts are addresses with a port that
    /// would answer from the node; the API server is always tried.
    ///
    /// # Errors
    /// What making a sandbox fails with.
    pub async fn probe_egress(&self, spec: Spec, hosts: &[String]) -> Result<Egress, SandboxError> {
        let sandbox = self.create(spec).await?;
        let egress = egress::probe(&*sandbox, hosts).await;
        sandbox.destroy().await;
        egress
    }

    /// The name of this run on the cluster: the value of the label `espalier.dev/run`.
    #[must_use]
    pub fn run(&self) -> &str {
        &self.maker.owner.run
    }

    /// Waits until all that this run made is deleted. Sandboxes must have been dropped.
    pub async fn close(self) {
        let Self { maker, tasks } = self;
        drop(maker);
        tasks.close();
        if timeout(DELETE_TIMEOUT, tasks.wait()).await.is_err() {
            tracing::warn!("what this run made was not deleted within {DELETE_TIMEOUT:?}");
        }
    }
}

async fn client(config: &KubernetesConfig) -> Result<Client, SandboxError> {
    let unsupported = |what: String| SandboxError::Unsupported {
        what,
        hint: "name a kubeconfig that `kubectl --kubeconfig FILE get pods` works with".to_owned(),
    };
    let options = KubeConfigOptions {
        context: config.context.clone(),
        ..KubeConfigOptions::default()
    };
    let mut settings = match &config.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)
                .map_err(|e| unsupported(format!("{}: {e}", path.display())))?;
            Config::from_custom_kubeconfig(file, &options)
                .await
                .map_err(|e| unsupported(format!("{}: {e}", path.display())))?
        }
        None if config.context.is_some() => Config::from_kubeconfig(&options)
            .await
            .map_err(|e| unsupported(format!("the kubeconfig: {e}")))?,
        None => Config::infer()
            .await
            .map_err(|e| unsupported(format!("no cluster is configured: {e}")))?,
    };
    settings.connect_timeout = Some(Duration::from_secs(10));
    // A control stream may be silent for long; the guest and the pings see to dead ones.
    settings.read_timeout = None;
    settings.write_timeout = None;
    Client::try_from(settings).map_err(|e| unsupported(format!("the cluster's client: {e}")))
}

/// Deletes a pod at once; returns when it is gone, or with a warning when it does not go.
async fn delete(api: &Api<Pod>, name: &str) {
    let deleting = async {
        loop {
            match api.delete(name, &DeleteParams::default().grace_period(0)).await {
                Err(kube::Error::Api(status)) if status.code == 404 => return,
                Ok(_) => {}
                Err(error) => tracing::debug!(pod = name, %error, "not deleted yet"),
            }
            sleep(DELETE_RETRY).await;
        }
    };
    if timeout(DELETE_TIMEOUT, deleting).await.is_err() {
        tracing::warn!(pod = name, "left to the garbage collector: not deleted");
    }
}

#[async_trait]
impl Provider for KubernetesProvider {
    async fn create(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        let (sender, made) = oneshot::channel();
        let name = spec.name.clone();
        let maker = Arc::clone(&self.maker);
        // A task, because the cluster goes on with what was asked of it when nobody waits. A
        // sandbox that nobody takes is dropped here, and a pod that nobody waits for deleted.
        self.maker.tasks.spawn(async move {
            let name = spec.name.clone();
            let limit = Duration::from_secs(maker.config.start_s);
            let mut sender = sender;
            let result = tokio::select! {
                result = timeout(limit, maker.make(spec)) => result,
                () = sender.closed() => return,
            };
            let _ = sender.send(result.unwrap_or_else(|_| {
                Err(SandboxError::Create {
                    name,
                    reason: format!("it was not ready within {limit:?} (start_s)"),
                })
            }));
        });
        made.await.unwrap_or_else(|_| {
            Err(SandboxError::Create {
                name,
                reason: "the task that made it ended".to_owned(),
            })
        })
    }
}

/// A pod from the moment that it is asked for. Dropping it deletes it, a little later.
#[derive(Debug)]
struct OwnPod {
    name: String,
    sight: watch::Receiver<Sight>,
    seen: Arc<Pods>,
    reaper: mpsc::UnboundedSender<String>,
    api: Api<Pod>,
    living: Arc<AtomicUsize>,
    deleted: bool,
}

impl Drop for OwnPod {
    fn drop(&mut self) {
        self.living.fetch_sub(1, Ordering::Relaxed);
        self.seen.forget(&self.name);
        if !self.deleted {
            let _ = self.reaper.send(self.name.clone());
        }
    }
}

#[async_trait]
impl Shell for OwnPod {
    async fn end_reason(&self) -> Option<String> {
        let mut sight = self.sight.clone();
        let ended = sight.wait_for(|sight| matches!(sight, Sight::Ended(_)));
        match timeout(REASON_TIMEOUT, ended).await {
            Ok(Ok(sight)) => match &*sight {
                Sight::Ended(reason) => Some(reason.clone()),
                _ => None,
            },
            _ => None,
        }
    }

    async fn destroy(mut self: Box<Self>) {
        delete(&self.api, &self.name).await;
        self.deleted = true;
    }
}

impl Maker {
    async fn make(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        crate::check(&spec)?;
        let image = spec.image.as_ref().or(self.config.image.as_ref());
        let Some(image) = image else {
            return Err(SandboxError::Unsupported {
                what: "neither the task nor the settings name an image".to_owned(),
                hint: "set `sandbox.image` in the recipe".to_owned(),
            });
        };
        let failed = |reason: String| SandboxError::Create {
            name: spec.name.clone(),
            reason,
        };
        // Before the cluster is asked: a bundle that is absent is our own mistake.
        let bundles = exec::pack_mounts(&spec).await.map_err(failed)?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let name = format!("espalier-{}-{number}", self.owner.run);
        let pod = description::pod(
            &self.config,
            &spec,
            image,
            &name,
            &self.owner.run,
            &self.owner.reference(),
        )?;
        let before = self.living.fetch_add(1, Ordering::Relaxed);
        let own = OwnPod {
            name: name.clone(),
            sight: self.seen.follow(&name),
            seen: Arc::clone(&self.seen),
            reaper: self.reaper.clone(),
            api: self.pods.clone(),
            living: Arc::clone(&self.living),
            deleted: false,
        };
        if before >= self.config.sandboxes_max {
            return Err(failed(format!(
                "{} sandboxes live already; raise sandboxes_max or run fewer at a time",
                self.config.sandboxes_max
            )));
        }
        self.pods
            .create(&PostParams::default(), &pod)
            .await
            .map_err(|error| refusal(&spec.name, error))?;
        let mut sight = own.sight.clone();
        self.wait(&spec.name, &mut sight, |s| matches!(s, Sight::Init | Sight::Running))
            .await?;
        exec::bring(&self.pods, &name, INIT, guest_binary::BYTES, &bundles)
            .await
            .map_err(failed)?;
        self.wait(&spec.name, &mut sight, |s| *s == Sight::Running).await?;
        let relay = [GUEST_PATH, "relay", description::CONTROL_SOCKET];
        let (reader, writer, attached) = exec::attach(&self.pods, &name, MAIN, &relay)
            .await
            .map_err(failed)?;
        let settings = StreamSettings {
            ping_every: Some(PING_EVERY),
            gateway_socket: spec.gateway_socket.clone(),
        };
        let (stream, hello) = Stream::start(reader, writer, settings, &self.tasks);
        let shell = exec::Attached {
            pod: own,
            _attached: attached,
        };
        Ok(Box::new(
            Inhabited::start(spec, stream, hello, Box::new(shell)).await?,
        ))
    }

    /// Waits for a state, or for the news that it will never come.
    async fn wait(
        &self,
        name: &str,
        sight: &mut watch::Receiver<Sight>,
        wanted: impl Fn(&Sight) -> bool,
    ) -> Result<(), SandboxError> {
        let patience = Duration::from_secs(self.config.unschedulable_s);
        loop {
            let now = sight.borrow_and_update().clone();
            if wanted(&now) {
                return Ok(());
            }
            let refused = |cause, reason: String, hint: &str| SandboxError::Refused {
                name: name.to_owned(),
                cause,
                reason,
                hint: hint.to_owned(),
            };
            match now {
                Sight::Refused(RefusalCause::Image, reason) => {
                    let hint = "put the image where the nodes can get it, or correct its name";
                    return Err(refused(RefusalCause::Image, reason, hint));
                }
                Sight::Refused(cause, reason) => {
                    return Err(refused(cause, reason, "`kubectl describe pod` says more"));
                }
                Sight::Ended(reason) => {
                    return Err(SandboxError::Create {
                        name: name.to_owned(),
                        reason: format!("its pod ended before it was ready: {reason}"),
                    });
                }
                Sight::Unschedulable(reason) => {
                    let other = |s: &Sight| !matches!(s, Sight::Unschedulable(_));
                    if timeout(patience, sight.wait_for(other)).await.is_err() {
                        let hint = "ask for less, add nodes, or wait for others to end";
                        return Err(refused(RefusalCause::Unschedulable, reason, hint));
                    }
                }
                Sight::Waiting(_) | Sight::Init | Sight::Running => {
                    if sight.changed().await.is_err() {
                        return Err(SandboxError::Create {
                            name: name.to_owned(),
                            reason: "nobody watches its pod any more".to_owned(),
                        });
                    }
                }
            }
        }
    }
}

/// What the API server said about a pod that it did not take.
fn refusal(name: &str, error: kube::Error) -> SandboxError {
    let refused = |cause, reason: String, hint: &str| SandboxError::Refused {
        name: name.to_owned(),
        cause,
        reason,
        hint: hint.to_owned(),
    };
    match error {
        kube::Error::Api(status) => match status.code {
            403 if status.message.contains("exceeded quota") => refused(
                RefusalCause::Quota,
                status.message,
                "run fewer at a time, or raise the namespace's quota",
            ),
            401 | 403 => refused(
                RefusalCause::Forbidden,
                status.message,
                "recipes/kubernetes has the role that is needed",
            ),
            400 | 404 | 422 => refused(
                RefusalCause::Invalid,
                status.message,
                "correct the recipe; the namespace must exist",
            ),
            _ => SandboxError::Create {
                name: name.to_owned(),
                reason: status.message,
            },
        },
        error => SandboxError::Create {
            name: name.to_owned(),
            reason: format!("the API server: {error}"),
        },
    }
}
