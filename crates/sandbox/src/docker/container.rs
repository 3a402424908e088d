//! One container from its creation to its removal.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use http::{Method, StatusCode};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::{
    sync::{mpsc, watch},
    time::{sleep, timeout},
};
use tokio_util::task::TaskTracker;

use super::{
    Place,
    demux::{Complaint, complaint_text},
    engine::{CallError, Engine},
};
use crate::inhabited::Shell;

/// For the engine to say how a container ended, after its stream broke.
const REASON_TIMEOUT: Duration = Duration::from_secs(5);
/// For a container to be gone after the engine was told to remove it.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(60);
const REMOVE_RETRY: Duration = Duration::from_millis(100);
/// How often a removal that failed is tried again before it is left to the janitor.
const REMOVE_TRIES: u32 = 5;

/// Removes dropped containers.
#[derive(Debug, Clone)]
pub(super) struct Reaper {
    queue: mpsc::UnboundedSender<String>,
}

impl Reaper {
    /// Ends when the last handle is gone and the last container removed.
    pub(super) fn start(engine: Engine, tasks: &TaskTracker) -> Self {
        let (queue, mut dropped) = mpsc::unbounded_channel::<String>();
        tasks.spawn(async move {
            let mut waiting = VecDeque::new();
            while let Some(id) = dropped.recv().await {
                waiting.push_back(id);
                while let Some(id) = waiting.pop_front() {
                    remove(&engine, &id).await;
                }
            }
        });
        Self { queue }
    }
}

/// Removes a container; returns when it is gone, or with a warning when it does not go.
async fn remove(engine: &Engine, id: &str) {
    let until = Instant::now() + REMOVE_TIMEOUT;
    let mut failures = 0;
    loop {
        let path = format!("/containers/{id}?force=1&v=1");
        match engine.call(Method::DELETE, &path, "", Bytes::new()).await {
            Err(error) if error.is(StatusCode::NOT_FOUND) => return,
            // Somebody (its own end) removes it already: wait for that.
            Ok(_) => {}
            Err(error) if error.is(StatusCode::CONFLICT) => {}
            Err(error) => {
                failures += 1;
                if failures == REMOVE_TRIES {
                    tracing::warn!(container = id, %error, "left to the next start: not removed");
                    return;
                }
            }
        }
        if Instant::now() >= until {
            tracing::warn!(
                container = id,
                "still there {REMOVE_TIMEOUT:?} after its removal"
            );
            return;
        }
        sleep(REMOVE_RETRY).await;
    }
}

/// A container. Dropping it removes it, a little later.
#[derive(Debug)]
pub(super) struct Container {
    id: String,
    image: String,
    engine: Engine,
    reaper: Reaper,
    /// Its exit code, when it ended.
    ended: watch::Receiver<Option<i64>>,
    ended_sender: Option<watch::Sender<Option<i64>>>,
    complaint: Option<Complaint>,
    removed: Arc<Mutex<bool>>,
    _place: Place,
}

impl Container {
    pub(super) fn new(
        id: String,
        image: String,
        engine: Engine,
        reaper: Reaper,
        place: Place,
    ) -> Self {
        let (ended_sender, ended) = watch::channel(None);
        Self {
            id,
            image,
            engine,
            reaper,
            ended,
            ended_sender: Some(ended_sender),
            complaint: None,
            removed: Arc::default(),
            _place: place,
        }
    }

    pub(super) fn hear_complaints(&mut self, complaint: Complaint) {
        self.complaint = Some(complaint);
    }

    /// Takes hold of standard input and output, before the start.
    pub(super) async fn attach(&self) -> Result<TokioIo<Upgraded>, CallError> {
        let path = format!(
            "/containers/{}/attach?stream=1&stdin=1&stdout=1&stderr=1",
            self.id
        );
        self.engine.hijack(&path).await
    }

    /// Asks, before the start, to be told of the end.
    pub(super) fn watch_end(&mut self, tasks: &TaskTracker) {
        let Some(sender) = self.ended_sender.take() else {
            return;
        };
        let (engine, id) = (self.engine.clone(), self.id.clone());
        tasks.spawn(async move {
            let path = format!("/containers/{id}/wait?condition=next-exit");
            let call = engine.call_slowly(Method::POST, &path, "", Bytes::new());
            let answer = tokio::select! {
                answer = call => answer,
                () = sender.closed() => return,
            };
            let code = answer.ok().and_then(|bytes| {
                serde_json::from_slice::<Value>(&bytes)
                    .ok()?
                    .get("StatusCode")?
                    .as_i64()
            });
            sender.send_replace(code);
        });
    }

    pub(super) async fn start(&self) -> Result<(), CallError> {
        let path = format!("/containers/{}/start", self.id);
        self.engine
            .call(Method::POST, &path, "application/json", Bytes::new())
            .await
            .map(drop)
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let removed = *self.removed.lock().unwrap_or_else(PoisonError::into_inner);
        if !removed {
            let _ = self.reaper.queue.send(self.id.clone());
        }
    }
}

#[async_trait]
impl Shell for Container {
    fn image(&self) -> crate::Image {
        crate::Image {
            kind: "docker".to_owned(),
            digest: self.image.clone(),
        }
    }

    fn users_hint(&self) -> String {
        "name a user and groups whose numbers the engine maps (rootless engines and those with \
         userns-remap: /etc/subuid there); root is refused with `nested_sandboxes`, which leaves \
         the machine's settings open to him"
            .to_owned()
    }

    async fn end_reason(&self) -> Option<String> {
        let complaint = self.complaint.as_ref().and_then(complaint_text);
        if complaint.is_some() {
            return complaint;
        }
        let mut ended = self.ended.clone();
        let code = match timeout(REASON_TIMEOUT, ended.wait_for(Option::is_some)).await {
            Ok(Ok(code)) => *code,
            _ => None,
        };
        code.map(|code| match code {
            40 => "its deadline passed".to_owned(),
            42 => "it heard nothing from the orchestrator for too long".to_owned(),
            0 => "its control stream closed".to_owned(),
            137 => "its container was killed (exit code 137): by the kernel when the memory limit \
                    left nothing else to kill, or from outside"
                .to_owned(),
            code => format!("its container ended with code {code}"),
        })
    }

    async fn destroy(self: Box<Self>) {
        remove(&self.engine, &self.id).await;
        *self.removed.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }
}
