//! The suite on a cluster that the test brings with it: a fake API server whose pods really run
//! (crate `kubefake`). Needs root, `runc` and `busybox`, as the tests of the kind docker do.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kubefake::{Fake, Image, Settings};
use sandbox::{Exec, KubernetesConfig, KubernetesProvider, PullPolicy};
use tempfile::TempDir;

use crate::{
    conformance,
    suite::{World, rootfs, run_some, script},
};

const IMAGE: &str = "espalier-test:1";
/// Processes in one container, as a node's `podPidsLimit`.
const PIDS_MAX: u32 = 64;

/// A cluster whose node has the suite's image; `None` where pods cannot run.
async fn cluster(change: impl FnOnce(&mut Settings)) -> Option<(Fake, TempDir)> {
    if !rustix::process::geteuid().is_root() || !rootfs::can_be_made() {
        println!("skipped: pods of the fake cluster need root and busybox");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let unpacked = folder.path().join("rootfs");
    let bytes = rootfs::rootfs();
    let mut archive = tar::Archive::new(bytes.as_slice());
    archive.set_preserve_permissions(true);
    archive.unpack(&unpacked).unwrap();
    let image = Image {
        rootfs: unpacked,
        env: vec!["PATH=/bin:/usr/bin".to_owned()],
        present: true,
        ..Image::default()
    };
    let mut settings = Settings {
        images: BTreeMap::from([(IMAGE.to_owned(), image)]),
        pod_pids_max: PIDS_MAX,
        ..Settings::default()
    };
    change(&mut settings);
    Some((Fake::start(settings).await.unwrap(), folder))
}

fn config(fake: &Fake) -> KubernetesConfig {
    KubernetesConfig {
        kubeconfig: Some(fake.kubeconfig()),
        image: Some(IMAGE.to_owned()),
        pull: PullPolicy::Never,
        cpu_request_millis: Some(10),
        memory_request_bytes: Some(16 << 20),
        ..KubernetesConfig::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite_of_all_kinds_on_a_fake_cluster() {
    let Some((fake, _folder)) = cluster(|_| {}).await else {
        return;
    };
    conformance(config(&fake), |world| world.accounts = true).await;
    assert_eq!(fake.names("pods"), Vec::<(String, String)>::new());
    fake.end().await;
}

/// Pods without root hold no right to switch users: everybody else is refused, and nothing runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restricted_pods_have_one_user() {
    let Some((fake, _folder)) = cluster(|_| {}).await else {
        return;
    };
    let config = KubernetesConfig {
        restricted: true,
        ..config(&fake)
    };
    let provider = KubernetesProvider::start(config).await.expect("a cluster");
    let world = World {
        mounts: false,
        users: false,
        accounts: true,
        patience: Duration::from_secs(170),
        ..World::new(Arc::new(provider.clone()))
    };
    run_some(&world, 4, "user::").await;
    let sandbox = world.sandbox().await;
    let exec = Exec {
        user: Some("root".to_owned()),
        ..script("true")
    };
    let error = sandbox.exec(exec).await.unwrap_err().to_string();
    for word in ["rights to switch users", "restricted"] {
        assert!(error.contains(word), "{error}");
    }
    drop(sandbox);
    drop(world);
    provider.close().await;
    fake.end().await;
}
