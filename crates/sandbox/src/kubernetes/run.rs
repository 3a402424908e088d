//! A run's proof of life, and what is done about runs without one.
//!
//! All that a provider makes belongs to its Lease (ownerReferences), which it renews. Deleting
//! the Lease deletes everything; the provider does that when it ends. When it dies, its guests
//! end by themselves (nothing heard), and the next provider in the namespace deletes the Lease
//! once nobody has renewed it for [`EXPIRED_S`]: much longer than [`LEASE_S`], because the clocks
//! of two machines are compared.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use k8s_openapi::{
    api::coordination::v1::Lease, apimachinery::pkg::apis::meta::v1::MicroTime, jiff::Timestamp,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, PostParams, Preconditions, PropagationPolicy},
};
use tokio::time::sleep;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    error::{CallError, once, patiently},
    manifest::{self, RUN, Run},
};

/// What the Lease itself says.
pub(super) const LEASE_S: u64 = 60;
const RENEW_EVERY: Duration = Duration::from_secs(15);
/// A run that was not renewed for so long is dead.
pub(super) const EXPIRED_S: i64 = 300;

/// Unique in every cluster.
fn new_id() -> String {
    let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
    let id: String = uuid
        .chars()
        .filter(char::is_ascii_hexdigit)
        .take(12)
        .collect();
    match id.is_empty() {
        // Not on Linux's /proc: the clock and our number have to do.
        true => format!(
            "{:x}{:x}",
            Timestamp::now().as_nanosecond(),
            std::process::id()
        ),
        false => id,
    }
}

fn holder() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}/{}", host.trim(), std::process::id())
}

/// Begins a run.
pub(super) async fn begin(api: &Api<Lease>) -> Result<(Run, Lease), CallError> {
    let id = new_id();
    let now = serde_json::to_value(MicroTime(Timestamp::now())).unwrap_or_default();
    let now = now.as_str().unwrap_or_default();
    let lease = manifest::lease(&id, &holder(), now, LEASE_S);
    let lease: Lease = parse(lease)?;
    let parameters = PostParams::default();
    let made = patiently("making the Lease", || api.create(&parameters, &lease)).await?;
    let run = Run {
        id,
        lease_uid: made.uid().unwrap_or_default(),
    };
    Ok((run, made))
}

/// What we write ourselves is what the cluster's types say; a mistake is ours.
pub(super) fn parse<T: serde::de::DeserializeOwned>(
    value: serde_json::Value,
) -> Result<T, CallError> {
    serde_json::from_value(value)
        .map_err(|e| CallError::Transport(format!("our own description does not fit: {e}")))
}

/// Renews until told to stop, then deletes the Lease and with it everything. Gives a flag that
/// says whether somebody else deleted it.
pub(super) fn keep(
    api: Api<Lease>,
    lease: Lease,
    tasks: &TaskTracker,
    stop: CancellationToken,
) -> Arc<AtomicBool> {
    let lost = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&lost);
    tasks.spawn(async move {
        let name = lease.name_any();
        let mut lease = lease;
        loop {
            tokio::select! {
                () = sleep(RENEW_EVERY) => {}
                () = stop.cancelled() => break,
            }
            match renew(&api, &lease).await {
                Ok(renewed) => lease = renewed,
                Err(error) if error.is_not_found() => {
                    flag.store(true, Ordering::Relaxed);
                    tracing::error!(
                        lease = name,
                        "the run's Lease was deleted, and with it all of its sandboxes"
                    );
                    return;
                }
                Err(error) => tracing::warn!(lease = name, %error, "the Lease was not renewed"),
            }
        }
        let parameters = DeleteParams::background();
        let deleted = patiently("deleting the Lease", || api.delete(&name, &parameters)).await;
        match deleted {
            Ok(_) => {}
            Err(error) if error.is_not_found() => {}
            Err(error) => {
                tracing::warn!(lease = name, %error, "left to the next start: not deleted");
            }
        }
    });
    lost
}

async fn renew(api: &Api<Lease>, lease: &Lease) -> Result<Lease, CallError> {
    let name = lease.name_any();
    let mut next = lease.clone();
    next.spec.get_or_insert_default().renew_time = Some(MicroTime(Timestamp::now()));
    let parameters = PostParams::default();
    let renewed = once("renewing the Lease", api.replace(&name, &parameters, &next)).await;
    match renewed {
        // Somebody edited it meanwhile: on top of that, then.
        Err(error) if error.code() == Some(409) => {
            let mut next = once("reading the Lease", api.get(&name)).await?;
            next.spec.get_or_insert_default().renew_time = Some(MicroTime(Timestamp::now()));
            once("renewing the Lease", api.replace(&name, &parameters, &next)).await
        }
        other => other,
    }
}

/// Whether nobody renews a Lease any more.
fn expired(lease: &Lease, now: Timestamp) -> bool {
    let renewed = lease
        .spec
        .as_ref()
        .and_then(|spec| spec.renew_time.as_ref());
    // One that was never renewed, by somebody else's hand, is left alone.
    renewed.is_some_and(|time| now.duration_since(time.0).as_secs() > EXPIRED_S)
}

/// One round. When the list cannot be had nothing is touched.
pub(super) async fn sweep(api: &Api<Lease>) {
    let parameters = ListParams::default().labels(RUN);
    let listed = patiently("listing runs", || api.list(&parameters)).await;
    let leases = match listed {
        Ok(list) => list.items,
        Err(error) => {
            tracing::warn!(%error, "runs of dead orchestrators are not looked for");
            return;
        }
    };
    let now = Timestamp::now();
    for lease in leases.iter().filter(|lease| expired(lease, now)) {
        let name = lease.name_any();
        let parameters = DeleteParams {
            propagation_policy: Some(PropagationPolicy::Background),
            // One that is renewed at this moment is another version.
            preconditions: Some(Preconditions {
                resource_version: lease.resource_version(),
                uid: lease.uid(),
            }),
            ..DeleteParams::default()
        };
        match once("deleting a dead run", api.delete(&name, &parameters)).await {
            Ok(_) => tracing::info!(lease = name, "removed: nobody renews it"),
            Err(error) if matches!(error.code(), Some(404 | 409)) => {}
            Err(error) => tracing::warn!(lease = name, %error, "not removed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_run_that_nobody_renews_is_dead() {
        let lease = |renewed: serde_json::Value| -> Lease {
            serde_json::from_value(serde_json::json!({
                "metadata": {"name": "espalier-x"}, "spec": {"renewTime": renewed},
            }))
            .unwrap()
        };
        let now: Timestamp = "2026-01-01T00:10:00Z".parse().unwrap();
        assert!(expired(&lease("2026-01-01T00:04:59.000000Z".into()), now));
        assert!(!expired(&lease("2026-01-01T00:05:00.000000Z".into()), now));
        assert!(
            !expired(&lease("2026-01-01T01:00:00.000000Z".into()), now),
            "a clock ahead"
        );
        assert!(
            !expired(&lease(serde_json::Value::Null), now),
            "not ours to judge"
        );
    }

    #[test]
    fn ids_are_labels_and_differ() {
        let (one, two) = (new_id(), new_id());
        assert_ne!(one, two);
        assert!(
            one.len() >= 12 && one.chars().all(|c| c.is_ascii_alphanumeric()),
            "{one}"
        );
    }
}
