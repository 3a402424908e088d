//! The kind `kubernetes`, on a cluster of our own (`cluster`), and with `ESPALIER_TEST_KUBECONFIG`
//! and `ESPALIER_TEST_IMAGE` on one of the reader's.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests; clippy's own exception ends at their helper functions"
)]

mod clients;
mod cluster;
mod faults;
#[path = "../suite/mod.rs"]
mod suite;

use std::{path::PathBuf, sync::Arc, time::Duration};

use cluster::Cluster;
use sandbox::{KubernetesConfig, KubernetesProvider};
use suite::{World, run_all};

fn config(kubeconfig: PathBuf, image: &str) -> KubernetesConfig {
    KubernetesConfig {
        kubeconfig: Some(kubeconfig),
        image: Some(image.to_owned()),
        unschedulable_s: 1,
        start_s: 60,
        ..KubernetesConfig::default()
    }
}

async fn provider(cluster: &Cluster) -> KubernetesProvider {
    KubernetesProvider::start(config(cluster.kubeconfig(), "test-image"))
        .await
        .expect("a cluster")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite_of_all_kinds_on_our_own_cluster() {
    let cluster = Cluster::start().await;
    let provider = provider(&cluster).await;
    let world = World {
        // Its pods have no control group that they could look into.
        memory_counted: false,
        ..World::new(Arc::new(provider.clone()))
    };
    run_all(&world, 6).await;
    drop(world);
    provider.close().await;
    cluster.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite_of_all_kinds_on_a_cluster_of_your_own() {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let (Some(kubeconfig), Some(image)) =
        (set("ESPALIER_TEST_KUBECONFIG"), set("ESPALIER_TEST_IMAGE"))
    else {
        println!("skipped: ESPALIER_TEST_KUBECONFIG and ESPALIER_TEST_IMAGE name no cluster");
        return;
    };
    let config = KubernetesConfig {
        namespace: set("ESPALIER_TEST_NAMESPACE").unwrap_or_else(|| "default".to_owned()),
        unschedulable_s: 60,
        start_s: 300,
        ..config(kubeconfig.into(), &image)
    };
    let provider = KubernetesProvider::start(config).await.expect("a cluster");
    let world = World {
        no_interface: false,
        patience: Duration::from_secs(300),
        ..World::new(Arc::new(provider.clone()))
    };
    run_all(&world, 3).await;
    drop(world);
    provider.close().await;
}
