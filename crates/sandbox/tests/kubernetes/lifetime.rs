//! How pods end, whoever dies.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{
    Api, Client, Config, ResourceExt,
    api::{DeleteParams, ListParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use sandbox::{KubernetesConfig, KubernetesProvider, Provider, Spec};

use crate::{
    config,
    suite::{run, say},
};

const RUN: &str = "espalier.dev/run";

async fn look(config: &KubernetesConfig) -> (Api<Pod>, Api<Lease>) {
    let file = Kubeconfig::read_from(config.kubeconfig.as_ref().unwrap()).unwrap();
    let options = KubeConfigOptions::default();
    let found = Config::from_custom_kubeconfig(file, &options)
        .await
        .unwrap();
    let namespace = config.namespace.clone();
    let namespace = namespace.unwrap_or_else(|| found.default_namespace.clone());
    let client = Client::try_from(found).unwrap();
    (
        Api::namespaced(client.clone(), &namespace),
        Api::namespaced(client, &namespace),
    )
}

/// Runs whose Leases are there.
async fn runs(leases: &Api<Lease>) -> Vec<String> {
    let list = leases
        .list(&ListParams::default().labels(RUN))
        .await
        .unwrap();
    list.iter()
        .map(|lease| lease.labels()[RUN].clone())
        .collect()
}

/// Pods of a run, and whether each still runs.
async fn pods(pods: &Api<Pod>, run: &str) -> Vec<(String, bool)> {
    let parameters = ListParams::default().labels(&format!("{RUN}={run}"));
    let list = pods.list(&parameters).await.unwrap();
    list.iter()
        .map(|pod| {
            let phase = pod.status.as_ref().and_then(|s| s.phase.clone());
            let over = matches!(phase.as_deref(), Some("Succeeded" | "Failed"));
            (pod.name_any(), !over)
        })
        .collect()
}

/// Asks the cluster until it is so.
async fn until(what: &str, limit: Duration, is: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !is().await {
        assert!(begun.elapsed() < limit, "not within {limit:?}: {what}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_left_on_a_cluster() {
    let Some(config) = config() else { return };
    let (pod_api, leases) = look(&config).await;
    let before = runs(&leases).await;
    let provider = KubernetesProvider::start(config).await.expect("a cluster");
    let own = runs(&leases).await;
    let own = own
        .into_iter()
        .find(|run| !before.contains(run))
        .expect("a Lease");

    // Destroyed: gone when that returns.
    let sandbox = provider.create(Spec::default()).await.unwrap();
    assert_eq!(say(&*sandbox, "id -u").await, "1000");
    assert!(!sandbox.image().digest.is_empty());
    sandbox.destroy().await;
    assert!(pods(&pod_api, &own).await.is_empty());

    // Dropped, with something in it that would rather stay.
    let sandbox = provider.create(Spec::default()).await.unwrap();
    run(&*sandbox, "setsid sleep 1000 > /dev/null 2>&1 &").await;
    drop(sandbox);

    // Deleted by somebody else.
    let sandbox = provider.create(Spec::default()).await.unwrap();
    for (name, runs) in pods(&pod_api, &own).await {
        if runs {
            let _ = pod_api.delete(&name, &DeleteParams::default()).await;
        }
    }
    let result = sandbox.exec(crate::suite::script("sleep 100")).await;
    assert!(
        matches!(result, Err(sandbox::SandboxError::Gone { .. })),
        "{result:?}"
    );
    drop(sandbox);

    // Given up at any moment.
    for millis in [1, 100, 700, 1500] {
        let create = provider.create(Spec::default());
        drop(tokio::time::timeout(Duration::from_millis(millis), create).await);
    }
    provider.close().await;
    assert!(pods(&pod_api, &own).await.is_empty());
    assert!(
        !runs(&leases).await.contains(&own),
        "the Lease is still there"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_orchestrator_leaves_nothing_that_runs() {
    let Some(config) = config() else { return };
    let (pod_api, leases) = look(&config).await;
    let before = runs(&leases).await;
    let mut program = Command::new(crate::suite::hold_program())
        .arg("3")
        .env(
            "ESPALIER_HOLD_KUBECONFIG",
            config.kubeconfig.as_ref().unwrap(),
        )
        .env(
            "ESPALIER_HOLD_NAMESPACE",
            config.namespace.clone().unwrap_or_default(),
        )
        .env("ESPALIER_HOLD_IMAGE", config.image.clone().unwrap())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let own = async || {
        let all = runs(&leases).await;
        all.into_iter().find(|run| !before.contains(run))
    };
    until("a run", Duration::from_secs(60), async || {
        own().await.is_some()
    })
    .await;
    let own = own().await.unwrap();
    until("three pods", Duration::from_secs(180), async || {
        pods(&pod_api, &own)
            .await
            .iter()
            .filter(|(_, runs)| *runs)
            .count()
            >= 3
    })
    .await;
    program.kill().unwrap();
    program.wait().unwrap();
    // The guests hear nothing any more: 45 s, and some for the node to say so.
    until("all guests ended", Duration::from_secs(120), async || {
        pods(&pod_api, &own).await.iter().all(|(_, runs)| !*runs)
    })
    .await;
    // The next start removes what is left, once the Lease is old: as if it were.
    let name = format!("espalier-{own}");
    let mut lease = leases.get(&name).await.unwrap();
    let old = serde_json::json!("2026-01-01T00:00:00.000000Z");
    lease.spec.as_mut().unwrap().renew_time = serde_json::from_value(old).unwrap();
    leases
        .replace(&name, &Default::default(), &lease)
        .await
        .unwrap();
    let provider = KubernetesProvider::start(config).await.expect("a cluster");
    provider.close().await;
    until(
        "its objects are gone",
        Duration::from_secs(60),
        async || !runs(&leases).await.contains(&own) && pods(&pod_api, &own).await.is_empty(),
    )
    .await;
}
