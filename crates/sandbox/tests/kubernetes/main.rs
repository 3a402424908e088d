//! The kind `kubernetes` on a cluster. `ESPALIER_TEST_KUBECONFIG` names the file that says where
//! it is, `ESPALIER_TEST_IMAGE` an image that its nodes have or can pull, with a shell and the
//! usual small programs (`debian:12`, `busybox:1.36`).
//!
//! `ESPALIER_TEST_NAMESPACE` (default: the context's own) is where; nothing else in it is touched.
//! `ESPALIER_TEST_PIDS_LIMITED=1` when the nodes' `podPidsLimit` is at most 64,
//! `ESPALIER_TEST_MEMORY=whole` when a node kills all of a pod at its memory limit (cgroup v2
//! without `singleProcessOOMKill`): the cases about these limits are left out or in by that.

#![cfg(feature = "kubernetes")]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests; clippy's own exception ends at their helper functions"
)]

mod fake;
mod lifetime;
#[path = "../suite/mod.rs"]
mod suite;

use std::{path::PathBuf, sync::Arc, time::Duration};

use sandbox::{KubernetesConfig, KubernetesProvider, Provider, RefusalCause, SandboxError, Spec};
use suite::{World, run_all};

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Settings for the reader's cluster; `None` when none is named.
fn config() -> Option<KubernetesConfig> {
    let (Some(kubeconfig), Some(image)) = (
        variable("ESPALIER_TEST_KUBECONFIG"),
        variable("ESPALIER_TEST_IMAGE"),
    ) else {
        println!("skipped: ESPALIER_TEST_KUBECONFIG and ESPALIER_TEST_IMAGE name no cluster");
        return None;
    };
    Some(KubernetesConfig {
        kubeconfig: Some(PathBuf::from(kubeconfig)),
        namespace: variable("ESPALIER_TEST_NAMESPACE"),
        image: Some(image),
        // Many at a time, on nodes of any size.
        cpu_request_millis: Some(10),
        memory_request_bytes: Some(16 << 20),
        ..KubernetesConfig::default()
    })
}

/// The suite on a cluster; `change` says what is different there.
async fn conformance(config: KubernetesConfig, change: impl FnOnce(&mut World)) {
    let provider = KubernetesProvider::start(config).await.expect("a cluster");
    let mut world = World {
        mounts: false,
        patience: Duration::from_secs(170),
        ..World::new(Arc::new(provider.clone()))
    };
    change(&mut world);
    run_all(&world, 4).await;
    drop(world);
    println!("degraded modes: {:#?}", provider.degraded());
    provider.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite_of_all_kinds_on_a_cluster() {
    let Some(config) = config() else { return };
    conformance(config, |world| {
        // The policy may not be enforced here: then pods have an interface that leads somewhere.
        world.no_interface = false;
        world.pids_limited = variable("ESPALIER_TEST_PIDS_LIMITED").is_some();
        world.memory_kills_one = variable("ESPALIER_TEST_MEMORY").as_deref() != Some("whole");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_no_node_has_is_refused_before_the_time_limit() {
    let Some(config) = config() else { return };
    let config = KubernetesConfig {
        pull: sandbox::PullPolicy::Never,
        network_policy: false,
        ..config
    };
    let provider = KubernetesProvider::start(config).await.expect("a cluster");
    let spec = Spec {
        image: Some("espalier.invalid/no-such-image:1".to_owned()),
        ..Spec::default()
    };
    let create = tokio::time::timeout(Duration::from_secs(60), provider.create(spec));
    let result = create.await.expect("known early");
    let image = RefusalCause::Image;
    assert!(
        matches!(&result, Err(SandboxError::Refused { cause, .. }) if *cause == image),
        "{result:?}"
    );
    let spec = Spec {
        limits: sandbox::Limits {
            memory_bytes: 1 << 50,
            ..Default::default()
        },
        ..Spec::default()
    };
    provider.close().await;
    let config = KubernetesConfig {
        memory_request_bytes: None,
        unschedulable_s: 2,
        network_policy: false,
        ..crate::config().unwrap()
    };
    let provider = KubernetesProvider::start(config).await.expect("a cluster");
    let result = provider.create(spec).await;
    assert!(
        matches!(
            &result,
            Err(SandboxError::Refused {
                cause: RefusalCause::Unschedulable | RefusalCause::Quota,
                ..
            })
        ),
        "{result:?}"
    );
    provider.close().await;
}
