//! The ConfigMap of a run: all its pods belong to it, so that deleting it deletes them. It says
//! when its orchestrator was last alive; whoever starts later deletes those of the dead.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{LABEL_RUN, OWNER_STALE_S};
use crate::SandboxError;

/// How often it says that we live.
const TOUCH_EVERY: Duration = Duration::from_secs(60);
const ALIVE: &str = "alive_s";

/// The run's ConfigMap.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) run: String,
    name: String,
    uid: String,
}

fn now_s() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |d| d.as_secs())
}

/// Unique, short, and fit for a name.
fn new_run() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let nanos = now.map_or(0, |d| d.as_nanos() as u64);
    format!("{:x}{:x}", nanos ^ (nanos >> 40), std::process::id())
}

impl Owner {
    pub(super) async fn start(
        client: &Client,
        namespace: &str,
        tasks: &TaskTracker,
        stop: CancellationToken,
    ) -> Result<Self, SandboxError> {
        let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        sweep(&api).await;
        let run = new_run();
        let name = format!("espalier-run-{run}");
        let map = json!({
            "metadata": {"name": name, "labels": {LABEL_RUN: run, "app.kubernetes.io/managed-by": "espalier"}},
            "data": {ALIVE: now_s().to_string()},
        });
        let unsupported = |what: String| SandboxError::Unsupported {
            what,
            hint: format!(
                "make the namespace {namespace} and the role of recipes/kubernetes; \
                 `kubectl auth can-i create pods -n {namespace}` must say yes"
            ),
        };
        let map: ConfigMap =
            serde_json::from_value(map).map_err(|e| unsupported(format!("a ConfigMap: {e}")))?;
        let made = api
            .create(&PostParams::default(), &map)
            .await
            .map_err(|e| unsupported(format!("making the run's ConfigMap in {namespace}: {e}")))?;
        let owner = Self {
            run,
            name: name.clone(),
            uid: made.metadata.uid.unwrap_or_default(),
        };
        tasks.spawn(async move {
            let mut touch = interval(TOUCH_EVERY);
            touch.set_missed_tick_behavior(MissedTickBehavior::Delay);
            touch.reset();
            loop {
                tokio::select! {
                    _ = touch.tick() => {
                        let patch = json!({"data": {ALIVE: now_s().to_string()}});
                        let patch = Patch::Merge(&patch);
                        if let Err(error) = api.patch(&name, &PatchParams::default(), &patch).await {
                            tracing::warn!(%error, "the run's ConfigMap could not be touched");
                        }
                    }
                    () = stop.cancelled() => break,
                }
            }
            if let Err(error) = api.delete(&name, &DeleteParams::background()).await {
                tracing::warn!(%error, "the run's ConfigMap is left to a later run");
            }
        });
        Ok(owner)
    }

    /// What a pod says about whom it belongs to.
    pub(super) fn reference(&self) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": self.name,
            "uid": self.uid,
        })
    }
}

/// Deletes the ConfigMaps of dead runs. When the list cannot be had nothing is touched.
async fn sweep(api: &Api<ConfigMap>) {
    let listed = match api.list(&ListParams::default().labels(LABEL_RUN)).await {
        Ok(listed) => listed,
        Err(error) => {
            tracing::warn!(%error, "what dead runs left is not looked for");
            return;
        }
    };
    for map in listed {
        let alive = map.data.as_ref().and_then(|data| data.get(ALIVE)?.parse::<u64>().ok());
        let Some(name) = map.metadata.name else {
            continue;
        };
        if stale(alive, now_s()) {
            match api.delete(&name, &DeleteParams::background()).await {
                Ok(_) => tracing::info!(name, "deleted: its run is dead"),
                Err(error) => tracing::warn!(name, %error, "not deleted"),
            }
        }
    }
}

/// Whether a run is dead. One that does not say when it lived is left alone.
fn stale(alive_s: Option<u64>, now_s: u64) -> bool {
    alive_s.is_some_and(|alive| now_s > alive.saturating_add(OWNER_STALE_S))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_runs_that_were_silent_for_long_are_dead() {
        assert!(!stale(None, u64::MAX));
        assert!(!stale(Some(1000), 1000 + OWNER_STALE_S));
        assert!(stale(Some(1000), 1001 + OWNER_STALE_S));
        assert!(!stale(Some(2000), 1000), "a clock that is ahead");
    }
}
