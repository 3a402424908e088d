//! The kind `kubernetes`: pods of a cluster, over its API.
//!
//! A pod's first process is our guest. It is put there by an init container of the task's own
//! image out of ConfigMaps (docs/decisions/0006), so no registry has to hold anything of ours.
//! The control stream is one `exec` of `guest relay` for the life of the sandbox: what goes
//! through it is not written to the log of the container, which `attach` would do. Everything
//! else, processes, files, connections to the gateway, travels on that stream as in kind `docker`.
//!
//! Whose a pod is: each provider is a *run* with a Lease that it renews and that owns all it
//! makes (`run`). One watch per run hears of all pods (`watch`); what a status means is pure
//! (`status`), as is what is sent (`manifest`).
//!
//! Ends, whichever is first: the stream closes; the guest heard nothing for [`HEARTBEAT_S`]; the
//! deadline in the guest; `activeDeadlineSeconds`; the Lease is deleted by us or, when we died, by
//! the next provider. A pod is never started again in place (`restartPolicy: Never`): a node that
//! is lost, an eviction or the memory limit end it, and operations answer
//! [`SandboxError::Gone`] with the cluster's reason.
//!
//! Limits: pods are made [`CREATIONS_MAX`] at a time; the rest is as for all kinds. Not enforced
//! by a cluster, and named so in [`KubernetesProvider::degraded`]: `limits.pids`.

mod config;
mod connect;
mod doctor;
mod error;
mod manifest;
mod pod;
mod probe;
mod run;
mod status;
#[cfg(test)]
mod tests;
mod watch;

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use k8s_openapi::{
    ByteString,
    api::{
        coordination::v1::Lease,
        core::v1::{ConfigMap, Event, Pod},
        networking::v1::NetworkPolicy,
    },
    jiff::{SignedDuration, Timestamp},
};
use kube::{
    Api, Client,
    api::{ListParams, PostParams},
};
use tokio::{
    sync::{OnceCell, Semaphore, oneshot},
    time::{Instant, timeout, timeout_at},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use self::config::{KubernetesConfig, PullPolicy, SharedFolder, Toleration};
pub(crate) use self::doctor::doctor;
use self::{
    connect::connect,
    error::{CallError, once, patiently},
    manifest::{PodPlan, Role, Run},
    pod::{Cluster, Guarded, Place, Reaper, sandboxes},
    probe::Egress,
    run::parse,
    status::{Ended, Patience, Seen, Trouble, Waiting},
    watch::Watch,
};
use crate::{
    Degraded, Provider, Sandbox, SandboxError, Spec, guest_binary,
    inhabited::Inhabited,
    stream::{Stream, StreamSettings},
};

/// The guest ends when it heard nothing for so many seconds.
const HEARTBEAT_S: u64 = 45;
/// It hears of us this often.
const PING_EVERY: Duration = Duration::from_secs(10);
/// Bytes of a piece of the guest: a ConfigMap holds 1 MiB with everything in it.
const PART_BYTES: usize = 900 << 10;
/// Pods that are ordered at a time.
const CREATIONS_MAX: usize = 16;
/// For connecting, and for the first files, beside `start_timeout_s`.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// For all that dropped sandboxes left behind.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(180);
/// Events of a pod in the message when it did not start.
const EVENTS_MAX: usize = 3;

/// Makes sandboxes of pods. Cheap to clone. Dropping the last clone and the last sandbox leaves
/// nothing.
#[derive(Debug, Clone)]
pub struct KubernetesProvider {
    maker: Arc<Maker>,
}

#[derive(Debug)]
struct Maker {
    cluster: Arc<Cluster>,
    reaper: Reaper,
    tasks: TaskTracker,
    next: AtomicU64,
    living: Arc<AtomicUsize>,
    creations: Semaphore,
    egress: OnceCell<Egress>,
    degraded: Mutex<Vec<Degraded>>,
}

impl KubernetesProvider {
    /// Finds the cluster, removes what dead orchestrators left in the namespace, and puts there
    /// what a run needs; then has `prepull` images pulled. Needs a Tokio runtime.
    ///
    /// # Errors
    /// [`SandboxError::Unsupported`], [`SandboxError::Refused`], [`SandboxError::Create`].
    pub async fn start(config: KubernetesConfig) -> Result<Self, SandboxError> {
        let (client, namespace) = connect(&config).await?;
        Self::with_client(client, &namespace, config).await
    }

    /// The same over a client that is there.
    pub(crate) async fn with_client(
        client: Client,
        namespace: &str,
        config: KubernetesConfig,
    ) -> Result<Self, SandboxError> {
        let refused = |error: CallError| error.refusal("run");
        let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
        run::sweep(&leases).await;
        let (run, lease) = run::begin(&leases).await.map_err(refused)?;
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        // From here on everything goes with the Lease, and that with this guard.
        let lost = run::keep(leases, lease, &tasks, stop.clone());
        let guard = stop.clone().drop_guard();
        let parts = put_guest(&client, namespace, &run).await.map_err(refused)?;
        if config.network_policy {
            let api: Api<NetworkPolicy> = Api::namespaced(client.clone(), namespace);
            let policy: NetworkPolicy = parse(manifest::network_policy(&run)).map_err(refused)?;
            make(&api, &policy).await.map_err(refused)?;
        }
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let cluster = Arc::new(Cluster {
            watch: Watch::start(pods.clone(), &run.id, &tasks, stop),
            sandboxes: config
                .agent_sandbox
                .as_deref()
                .map(|version| sandboxes(&client, namespace, version)),
            client,
            namespace: namespace.to_owned(),
            pods,
            config,
            run,
            parts,
            lost,
            _stop: guard,
        });
        let maker = Arc::new(Maker {
            reaper: Reaper::start(Arc::clone(&cluster), &tasks),
            cluster,
            tasks,
            next: AtomicU64::new(1),
            living: Arc::default(),
            creations: Semaphore::new(CREATIONS_MAX),
            egress: OnceCell::new(),
            degraded: Mutex::default(),
        });
        maker.degrade(Degraded {
            name: "pids-by-node".to_owned(),
            found: "a pod cannot name its own limit of processes".to_owned(),
            costs: "limits.pids is not enforced; podPidsLimit of the node's agent is".to_owned(),
        });
        for image in &maker.cluster.config.prepull {
            maker.prepull(image).await?;
        }
        Ok(Self { maker })
    }

    /// What this cluster lacks, and what that costs. Whether egress is blocked is known from the
    /// first sandbox on.
    #[must_use]
    pub fn degraded(&self) -> Vec<Degraded> {
        let degraded = self.maker.degraded.lock();
        degraded.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until all that dropped sandboxes left behind is removed. Sandboxes must have been
    /// dropped.
    pub async fn close(self) {
        let tasks = self.maker.tasks.clone();
        drop(self);
        tasks.close();
        if timeout(CLOSE_TIMEOUT, tasks.wait()).await.is_err() {
            tracing::warn!("pods were not removed within {CLOSE_TIMEOUT:?}");
        }
    }
}

/// Makes an object; one that is there is our own, of the try whose answer was lost.
async fn make<K>(api: &Api<K>, object: &K) -> Result<(), CallError>
where
    K: Clone + serde::de::DeserializeOwned + serde::Serialize + std::fmt::Debug,
{
    let parameters = PostParams::default();
    let made = patiently("making an object of the run", || {
        api.create(&parameters, object)
    });
    match made.await {
        Err(error) if error.is_already_there() => Ok(()),
        other => other.map(drop),
    }
}

/// Puts the guest into the namespace; gives the number of pieces.
async fn put_guest(client: &Client, namespace: &str, run: &Run) -> Result<usize, CallError> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let parts = guest_binary::BYTES.chunks(PART_BYTES);
    let count = parts.len();
    for (index, bytes) in parts.enumerate() {
        let data = serde_json::to_value(ByteString(bytes.to_vec())).unwrap_or_default();
        let data = data.as_str().unwrap_or_default();
        let part: ConfigMap = parse(manifest::guest_part(run, index, data))?;
        make(&api, &part).await?;
    }
    Ok(count)
}

#[async_trait]
impl Provider for KubernetesProvider {
    async fn create(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        let (sender, made) = oneshot::channel();
        let name = spec.name.clone();
        let maker = Arc::clone(&self.maker);
        // A task, because the cluster goes on with what was asked of it when nobody waits. A
        // sandbox that nobody takes is dropped here; a creation that nobody waits for is given up.
        self.maker.tasks.spawn(async move {
            let mut sender = sender;
            let result = tokio::select! {
                result = maker.make(spec) => result,
                () = sender.closed() => return,
            };
            let _ = sender.send(result);
        });
        made.await.unwrap_or_else(|_| {
            Err(SandboxError::Create {
                name,
                reason: "the task that made it ended".to_owned(),
            })
        })
    }
}

impl Maker {
    fn degrade(&self, degraded: Degraded) {
        let Degraded { name, found, costs } = &degraded;
        tracing::warn!(
            mode = name,
            found,
            costs,
            "sandboxes run in a degraded mode"
        );
        let mut all = self.degraded.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(degraded);
    }

    fn next_name(&self) -> String {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        format!("{}-{number}", self.cluster.run.name())
    }

    async fn make(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        crate::check(&spec)?;
        let config = &self.cluster.config;
        let failed = |reason: String| SandboxError::Create {
            name: spec.name.clone(),
            reason,
        };
        if self.cluster.lost.load(Ordering::Relaxed) {
            let lease = self.cluster.run.name();
            return Err(failed(format!(
                "somebody deleted the run's Lease {lease}, which owns all pods: start again"
            )));
        }
        let place = Place(Arc::clone(&self.living));
        if self.living.fetch_add(1, Ordering::Relaxed) >= config.sandboxes_max {
            return Err(failed(format!(
                "{} sandboxes live already; raise sandboxes_max or run fewer at a time",
                config.sandboxes_max
            )));
        }
        let Some(image) = spec.image.clone().or_else(|| config.image.clone()) else {
            return Err(SandboxError::Unsupported {
                what: "neither the task nor the settings name an image".to_owned(),
                hint: "set `sandbox.image` in the recipe".to_owned(),
            });
        };
        let name = self.next_name();
        let plan = PodPlan {
            config,
            run: &self.cluster.run,
            spec: &spec,
            image: &image,
            name: &name,
            role: Role::Sandbox,
            parts: self.cluster.parts,
        };
        // What is wrong with it is said before a probe is made for it.
        manifest::pod(&plan)?;
        self.know_egress(&image).await?;
        let mut pod = Guarded::new(&name, &self.cluster, &self.reaper, Some(place));
        self.order(&plan).await?;
        let (own_name, digest) = self.running(&spec.name, &pod).await?;
        pod.image = digest;
        let (reader, writer) = pod
            .connect(&own_name, &self.tasks)
            .await
            .map_err(|e| failed(format!("connecting to its guest: {e}")))?;
        let settings = StreamSettings {
            ping_every: Some(PING_EVERY),
            forwards: spec.all_forwards().into_iter().collect(),
        };
        let (stream, hello) = Stream::start(reader, writer, settings, &self.tasks);
        let name = spec.name.clone();
        let started = Inhabited::start(spec, stream, hello, Box::new(pod));
        match timeout(CONNECT_TIMEOUT, started).await {
            Ok(sandbox) => Ok(Box::new(sandbox?)),
            Err(_) => Err(SandboxError::Create {
                name,
                reason: format!("its guest was not ready within {CONNECT_TIMEOUT:?}"),
            }),
        }
    }

    /// Once per run, before the first sandbox.
    async fn know_egress(&self, image: &str) -> Result<(), SandboxError> {
        let egress = self
            .egress
            .get_or_try_init(|| async {
                let found = self.try_egress(image).await?;
                match found.degraded() {
                    Some(degraded) => self.degrade(degraded),
                    None => tracing::info!("the network policy holds: a probe found no way out"),
                }
                Ok(found)
            })
            .await?;
        if self.cluster.config.egress_must_be_blocked
            && let Some(degraded) = egress.degraded()
        {
            return Err(SandboxError::Unsupported {
                what: format!(
                    "egress must be blocked: {}: {}",
                    degraded.name, degraded.found
                ),
                hint: degraded.costs,
            });
        }
        Ok(())
    }

    /// Has the cluster make a pod.
    async fn order(&self, plan: &PodPlan<'_>) -> Result<(), SandboxError> {
        let seconds = plan.spec.limits.deadline_s + self.cluster.config.start_timeout_s;
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
        let shutdown = Timestamp::now()
            .checked_add(SignedDuration::from_secs(seconds))
            .unwrap_or(Timestamp::MAX);
        let object = manifest::object(plan, &shutdown.strftime("%Y-%m-%dT%H:%M:%SZ").to_string())?;
        // Never closed.
        let _turn = self.creations.acquire().await;
        let ordered = self.cluster.create(object).await;
        ordered.map_err(|error| error.refusal(&plan.spec.name))
    }

    /// Waits until the guest runs; gives the pod's name and its image.
    async fn running(&self, name: &str, pod: &Guarded) -> Result<(String, String), SandboxError> {
        match self.arrive(name, pod, false).await? {
            Arrival::Running(name, image) => Ok((name, image)),
            Arrival::Ended(ended) => Err(SandboxError::Create {
                name: name.to_owned(),
                reason: format!("it ended before it was ready: {}", ended.reason),
            }),
        }
    }

    /// Waits until a pod that runs once is over.
    async fn ended(&self, name: &str, pod: &Guarded) -> Result<Ended, SandboxError> {
        match self.arrive(name, pod, true).await? {
            Arrival::Ended(ended) => Ok(ended),
            Arrival::Running(..) => Err(SandboxError::Create {
                name: name.to_owned(),
                reason: "it did not end".to_owned(),
            }),
        }
    }

    async fn arrive(
        &self,
        name: &str,
        pod: &Guarded,
        to_its_end: bool,
    ) -> Result<Arrival, SandboxError> {
        let config = &self.cluster.config;
        let until = Instant::now() + Duration::from_secs(config.start_timeout_s);
        let failed = |reason: String| SandboxError::Create {
            name: name.to_owned(),
            reason,
        };
        let mut state = pod
            .state()
            .ok_or_else(|| failed("it is being removed".to_owned()))?;
        let mut since: Option<(Trouble, Instant)> = None;
        loop {
            let now = state.borrow_and_update().clone();
            let mut limit = until;
            let mut why = "a first sign of it".to_owned();
            match now.seen {
                Seen::Running { image } if !to_its_end => {
                    let (own_name, _) = now.pod.unwrap_or_default();
                    return Ok(Arrival::Running(own_name, image));
                }
                Seen::Ended(ended) => {
                    return match ended.trouble {
                        Some(trouble) => Err(refused(name, trouble, ended.reason)),
                        None => Ok(Arrival::Ended(ended)),
                    };
                }
                Seen::Waiting(Waiting {
                    why: waits_for,
                    trouble,
                }) => {
                    if let Some(trouble) = trouble {
                        let begun = match since {
                            Some((old, begun)) if old.cause == trouble.cause => begun,
                            _ => Instant::now(),
                        };
                        since = Some((trouble, begun));
                        limit = limit.min(begun + patience(config, trouble.patience));
                        if Instant::now() >= limit {
                            return Err(refused(name, trouble, waits_for));
                        }
                    } else {
                        since = None;
                    }
                    why = waits_for;
                }
                Seen::Running { .. } | Seen::Nothing => {}
            }
            match timeout_at(limit, state.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err(failed("nobody watches it any more".to_owned())),
                // The loop finds out which limit it was.
                Err(_) if limit < until => {}
                Err(_) => {
                    let events = match now.pod {
                        Some((pod, _)) => self.events(&pod).await,
                        None => self.cluster.watch.trouble().unwrap_or_default(),
                    };
                    return Err(failed(format!(
                        "it was not there within {} s (start_timeout_s); it waits for {why}; {events}",
                        config.start_timeout_s
                    )));
                }
            }
        }
    }

    /// What the cluster reported of a pod last; nothing where we may not read that.
    async fn events(&self, pod: &str) -> String {
        let api: Api<Event> = Api::namespaced(self.cluster.client.clone(), &self.cluster.namespace);
        let parameters = ListParams::default().fields(&format!("involvedObject.name={pod}"));
        let Ok(events) = once("reading events", api.list(&parameters)).await else {
            return "its events cannot be read".to_owned();
        };
        let messages: Vec<String> = events
            .items
            .into_iter()
            .rev()
            .filter_map(|event| Some(format!("{}: {}", event.reason?, event.message?)))
            .take(EVENTS_MAX)
            .collect();
        messages.join("; ")
    }
}

/// Where a pod got to.
#[derive(Debug)]
enum Arrival {
    Running(String, String),
    Ended(Ended),
}

fn patience(config: &KubernetesConfig, patience: Patience) -> Duration {
    Duration::from_secs(match patience {
        Patience::None => 0,
        Patience::Pull => config.pull_retry_s,
        Patience::Scheduling => config.unschedulable_s,
    })
}

fn refused(name: &str, trouble: Trouble, reason: String) -> SandboxError {
    SandboxError::Refused {
        name: name.to_owned(),
        cause: trouble.cause,
        reason,
        hint: trouble.hint.to_owned(),
    }
}
