//! The kind `docker`, on real engines that the tests start for themselves: dockerd and podman,
//! each with data, socket and image of its own in a temporary folder. `scripts/setup.sh test`
//! installs them. With `ESPALIER_TEST_DOCKER_HOST` the same runs on an engine of the reader's
//! own; `ESPALIER_TEST_IMAGE` then names an image that it has.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests; clippy's own exception ends at their helper functions"
)]

mod engines;
mod lifetime;
mod pull;
#[path = "../suite/mod.rs"]
mod suite;

use std::sync::Arc;

use engines::{Engine, Kind};
use sandbox::{DockerConfig, DockerProvider, Exec, SandboxError};
use suite::{World, rootfs, run_all, script};

/// A provider over an engine, and the image that its sandboxes are made of.
async fn provider(host: &str, image: Option<String>) -> (DockerProvider, String) {
    let config = DockerConfig {
        host: Some(host.to_owned()),
        ..DockerConfig::default()
    };
    let provider = DockerProvider::start(config).await.expect("an engine");
    let image = match image {
        Some(image) => image,
        None => provider
            .import(suite::rootfs::rootfs(), "espalier-test:1")
            .await
            .expect("an imported image"),
    };
    (provider, image)
}

async fn conformance(host: &str, image: Option<String>, mounts: bool) {
    let accounts = image.is_none();
    let (provider, image) = provider(host, image).await;
    let world = World {
        image: Some(image),
        mounts,
        accounts,
        ..World::new(Arc::new(provider.clone()))
    };
    run_all(&world, 4).await;
    drop(world);
    provider.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite_of_all_kinds_on_dockerd() {
    let Some(engine) = Engine::start(Kind::Docker) else {
        return;
    };
    conformance(&engine.host, None, true).await;
    engine.assert_empty();
}

/// With the machine's `/proc/sys` open, root in a container would be root of its settings.
async fn root_is_refused(kind: Kind) {
    let Some(engine) = Engine::start(kind) else {
        return;
    };
    let config = DockerConfig {
        host: Some(engine.host.clone()),
        nested_sandboxes: true,
        ..DockerConfig::default()
    };
    let provider = DockerProvider::start(config).await.expect("an engine");
    let image = provider.import(rootfs::rootfs(), "espalier-test:1").await;
    let world = World {
        image: Some(image.expect("an imported image")),
        ..World::new(Arc::new(provider.clone()))
    };
    let sandbox = world.sandbox().await;
    let exec = |user: &str| Exec {
        user: Some(user.to_owned()),
        ..script("id -u")
    };
    match sandbox.exec(exec("root")).await {
        Err(SandboxError::CannotSwitchUser { reason, hint, .. }) => {
            assert!(reason.contains("/proc/sys"), "{reason}");
            assert!(hint.contains("nested_sandboxes"), "{hint}");
        }
        other => panic!("{other:?}"),
    }
    let build = sandbox.exec(exec("build")).await.expect("others can run");
    assert_eq!(build.stdout, b"2001\n");
    // What the setting is for: a fresh /proc in namespaces of one's own, which a covered one forbids.
    let nested = "unshare -U -r -m -p -f sh -c 'mount -t proc none /proc && echo $$'";
    let output = sandbox.exec(script(nested)).await.expect("a script");
    assert_eq!(output.stdout, b"1\n", "{output:?}");
    drop((sandbox, world));
    provider.close().await;
    engine.assert_empty();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn root_is_refused_where_the_machines_settings_are_open_on_dockerd() {
    root_is_refused(Kind::Docker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn root_is_refused_where_the_machines_settings_are_open_on_podman() {
    root_is_refused(Kind::Podman).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite_of_all_kinds_on_podman() {
    let Some(engine) = Engine::start(Kind::Podman) else {
        return;
    };
    conformance(&engine.host, None, true).await;
    engine.assert_empty();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite_of_all_kinds_on_an_engine_of_your_own() {
    let Some(host) = std::env::var("ESPALIER_TEST_DOCKER_HOST")
        .ok()
        .filter(|h| !h.is_empty())
    else {
        println!("skipped: ESPALIER_TEST_DOCKER_HOST names no engine");
        return;
    };
    let image = std::env::var("ESPALIER_TEST_IMAGE")
        .ok()
        .filter(|i| !i.is_empty());
    conformance(&host, image, host.starts_with("unix://")).await;
}
