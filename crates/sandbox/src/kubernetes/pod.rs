//! One pod from its creation to its removal.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use futures::StreamExt;
use guest::protocol::GUEST_PATH;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    api::{AttachParams, AttachedProcess, DeleteParams, DynamicObject, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};
use tokio_util::{sync::DropGuard, task::TaskTracker};

use super::{
    config::KubernetesConfig,
    error::{CallError, once, patiently},
    manifest::{CONTAINER, CONTROL_SOCKET, Run},
    run::parse,
    status::{Ended, Seen},
    watch::{Hears, State, Watch},
};
use crate::inhabited::Shell;

/// For the cluster to say how a pod ended, after its stream broke.
const REASON_TIMEOUT: Duration = Duration::from_secs(5);
/// For the guest to end by itself after its stream was closed.
const SELF_END_TIMEOUT: Duration = Duration::from_secs(5);
/// For a pod to be gone after it was deleted.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(60);
/// For the last words of a guest to arrive after its pod ended.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// For the node to let us in after it said that the container runs.
const RELAY_TIMEOUT: Duration = Duration::from_secs(20);
const RELAY_RETRY: Duration = Duration::from_millis(200);
/// Bytes between us and the connection, each way.
const RELAY_BYTES: usize = 256 << 10;
/// Dropped pods that are removed at a time.
const REMOVALS_MAX: usize = 16;
/// Bytes of the relay's standard error that are kept.
const COMPLAINT_BYTES_MAX: usize = 4 << 10;

/// What the pods of a run have in common. With its last handle the run ends.
pub(super) struct Cluster {
    pub(super) client: Client,
    pub(super) namespace: String,
    pub(super) pods: Api<Pod>,
    /// Where a controller makes the pods.
    pub(super) sandboxes: Option<Api<DynamicObject>>,
    pub(super) config: KubernetesConfig,
    pub(super) run: Run,
    pub(super) parts: usize,
    pub(super) watch: Watch,
    /// Somebody deleted the Lease.
    pub(super) lost: Arc<AtomicBool>,
    pub(super) _stop: DropGuard,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster")
            .field("namespace", &self.namespace)
            .field("run", &self.run)
            .finish_non_exhaustive()
    }
}

/// The API of agent-sandbox.
pub(super) fn sandboxes(client: &Client, namespace: &str, version: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("agents.x-k8s.io", version, "Sandbox");
    let resource = ApiResource::from_gvk_with_plural(&kind, "sandboxes");
    Api::namespaced_with(client.clone(), namespace, &resource)
}

impl Cluster {
    /// Makes a pod, or what makes one.
    pub(super) async fn create(&self, object: Value) -> Result<(), CallError> {
        let parameters = PostParams::default();
        let made = match &self.sandboxes {
            Some(api) => {
                let object: DynamicObject = parse(object)?;
                patiently("making a Sandbox", || api.create(&parameters, &object))
                    .await
                    .map(drop)
            }
            None => {
                let pod: Pod = parse(object)?;
                patiently("making a pod", || self.pods.create(&parameters, &pod))
                    .await
                    .map(drop)
            }
        };
        match made {
            // Our own, of the try whose answer was lost: names are never used twice.
            Err(error) if error.is_already_there() => Ok(()),
            other => other,
        }
    }

    async fn delete(&self, name: &str, grace_s: u32) -> Result<(), CallError> {
        let parameters = DeleteParams {
            grace_period_seconds: Some(grace_s),
            ..DeleteParams::background()
        };
        match &self.sandboxes {
            Some(api) => patiently("deleting a Sandbox", || api.delete(name, &parameters))
                .await
                .map(drop),
            None => patiently("deleting a pod", || self.pods.delete(name, &parameters))
                .await
                .map(drop),
        }
    }
}

/// Counts a living sandbox.
#[derive(Debug)]
pub(super) struct Place(pub(super) Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What is to be removed. The place is free when the node says that nothing runs any more.
#[derive(Debug)]
struct Left {
    name: String,
    hears: Hears,
    _place: Option<Place>,
}

/// Removes dropped pods.
#[derive(Debug, Clone)]
pub(super) struct Reaper {
    queue: mpsc::UnboundedSender<Left>,
}

impl Reaper {
    /// Ends when the last handle is gone and the last pod removed.
    pub(super) fn start(cluster: Arc<Cluster>, tasks: &TaskTracker) -> Self {
        let (queue, dropped) = mpsc::unbounded_channel::<Left>();
        tasks.spawn(async move {
            let dropped = futures::stream::unfold(dropped, |mut dropped| async move {
                Some((dropped.recv().await?, dropped))
            });
            dropped
                .for_each_concurrent(REMOVALS_MAX, |mut left| {
                    let cluster = &cluster;
                    async move { remove(cluster, &left.name, &mut left.hears.state).await }
                })
                .await;
        });
        Self { queue }
    }
}

/// Waits until the cluster says so; `false`: not in time.
async fn until(
    state: &mut watch::Receiver<State>,
    limit: Duration,
    is: impl Fn(&State) -> bool,
) -> bool {
    matches!(timeout(limit, state.wait_for(is)).await, Ok(Ok(_)))
}

/// Removes a pod; returns when it is gone, or with a warning when it does not go.
async fn remove(cluster: &Cluster, name: &str, state: &mut watch::Receiver<State>) {
    // A guest whose stream closed ends, and then its node says that nothing runs: sooner than it
    // would be killed, and known for sure.
    let runs = matches!(state.borrow().seen, Seen::Running { .. });
    if runs {
        until(state, SELF_END_TIMEOUT, State::over).await;
    }
    for grace_s in [1, 0] {
        match cluster.delete(name, grace_s).await {
            Ok(()) => {}
            Err(error) if error.is_not_found() => return,
            Err(error) => {
                tracing::warn!(pod = name, %error, "left to the end of the run: not deleted");
                return;
            }
        }
        if until(state, REMOVE_TIMEOUT, |state| state.removed).await {
            return;
        }
        tracing::warn!(
            pod = name,
            grace_s,
            "still there {REMOVE_TIMEOUT:?} after its deletion"
        );
    }
}

/// A connection to the guest, through the node's agent.
struct Relay(AttachedProcess);

impl Drop for Relay {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A pod. Dropping it removes it, a little later.
#[derive(Debug)]
pub(super) struct Guarded {
    name: String,
    pub(super) hears: Option<Hears>,
    cluster: Arc<Cluster>,
    reaper: Reaper,
    place: Option<Place>,
    /// What the node says it was made of.
    pub(super) image: String,
    complaint: Arc<Mutex<Vec<u8>>>,
}

impl Guarded {
    /// Before it is made: also what nobody knows whether it was made has to go.
    pub(super) fn new(
        name: &str,
        cluster: &Arc<Cluster>,
        reaper: &Reaper,
        place: Option<Place>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            hears: Some(cluster.watch.expect(name)),
            cluster: Arc::clone(cluster),
            reaper: reaper.clone(),
            place,
            image: String::new(),
            complaint: Arc::default(),
        }
    }

    pub(super) fn state(&self) -> Option<watch::Receiver<State>> {
        self.hears.as_ref().map(|hears| hears.state.clone())
    }

    /// Connects to the guest. The connection ends with the pod, also where nobody tells it.
    pub(super) async fn connect(
        &mut self,
        pod: &str,
        tasks: &TaskTracker,
    ) -> Result<
        (
            impl AsyncRead + Send + Unpin + use<>,
            impl tokio::io::AsyncWrite + Send + Unpin + use<>,
        ),
        String,
    > {
        let parameters = AttachParams {
            container: Some(CONTAINER.to_owned()),
            stdin: true,
            stdout: true,
            stderr: true,
            tty: false,
            max_stdin_buf_size: Some(RELAY_BYTES),
            max_stdout_buf_size: Some(RELAY_BYTES),
            max_stderr_buf_size: Some(COMPLAINT_BYTES_MAX),
        };
        let until = Instant::now() + RELAY_TIMEOUT;
        let mut process = loop {
            let command = [GUEST_PATH, "relay", CONTROL_SOCKET];
            let exec = self.cluster.pods.exec(pod, command, &parameters);
            match once("connecting to the guest", exec).await {
                Ok(process) => break process,
                Err(CallError::Status(status)) if matches!(status.code, 401 | 403) => {
                    return Err(format!("{} (exec in pods is needed)", status.message));
                }
                Err(error) if Instant::now() >= until => return Err(error.to_string()),
                Err(_) => sleep(RELAY_RETRY).await,
            }
        };
        let (Some(reader), Some(writer), Some(stderr)) =
            (process.stdout(), process.stdin(), process.stderr())
        else {
            return Err("the connection lacks a stream".to_owned());
        };
        let complaint = Arc::clone(&self.complaint);
        tasks.spawn(keep_complaint(stderr, complaint));
        let relay = Relay(process);
        if let Some(mut state) = self.state() {
            tasks.spawn(async move {
                // Also when nobody is left to hear of it.
                let _ = state
                    .wait_for(|state| matches!(state.seen, Seen::Ended(_)))
                    .await
                    .map(drop);
                sleep(LAST_WORDS).await;
                drop(relay);
            });
        }
        Ok((reader, writer))
    }
}

async fn keep_complaint(mut from: impl AsyncRead + Unpin, complaint: Arc<Mutex<Vec<u8>>>) {
    let mut buffer = [0; 1024];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let mut kept = complaint.lock().unwrap_or_else(PoisonError::into_inner);
        let room = COMPLAINT_BYTES_MAX.saturating_sub(kept.len());
        kept.extend(buffer.iter().take(count).take(room));
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let Some(hears) = self.hears.take() else {
            return;
        };
        let left = Left {
            name: std::mem::take(&mut self.name),
            hears,
            _place: self.place.take(),
        };
        let _ = self.reaper.queue.send(left);
    }
}

#[async_trait]
impl Shell for Guarded {
    fn users_hint(&self) -> String {
        "leave `restricted` out of the recipe where the namespace allows the Pod Security Standard \
         `baseline`: restricted pods hold no right to switch users"
            .to_owned()
    }

    fn image(&self) -> crate::Image {
        crate::Image {
            kind: "kubernetes".to_owned(),
            digest: self.image.clone(),
        }
    }

    async fn end_reason(&self) -> Option<String> {
        let mut state = self.state()?;
        let ended = until(&mut state, REASON_TIMEOUT, |state| {
            matches!(state.seen, Seen::Ended(_))
        });
        if ended.await
            && let Seen::Ended(Ended { reason, .. }) = &state.borrow().seen
        {
            return Some(reason.clone());
        }
        let kept = self
            .complaint
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&kept).trim().to_owned();
        match text.is_empty() {
            false => Some(format!("the connection to its guest ended: {text}")),
            true => self.cluster.watch.trouble().map(|trouble| {
                format!("its control stream broke, and the cluster does not answer: {trouble}")
            }),
        }
    }

    async fn destroy(mut self: Box<Self>) {
        if let Some(mut hears) = self.hears.take() {
            remove(&self.cluster, &self.name, &mut hears.state).await;
        }
    }
}
