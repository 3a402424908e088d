//! A rollout that finds its pod ready does not wait for one: measured on a fake cluster whose pods
//! really run. Needs root and `runc`.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests"
)]

mod real;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use kubefake::{Fake, host_image};
use real::{Loop, Teacher, jobs, line, shell};
use record::{Disposition, Rollout};
use rollout::Runner;
use sandbox::{KubernetesConfig, KubernetesProvider, PullPolicy};
use task::{Split, Task, chores};
use tokio_util::sync::CancellationToken;

/// For pods to stand ready.
const PATIENCE: Duration = Duration::from_secs(60);

fn ready(runner: &Runner) -> u64 {
    let page = runner.metrics_text();
    let lines = page.lines();
    let ours = lines.filter(|line| line.starts_with("espalier_rollout_warm_ready{"));
    let counts = ours.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
    counts.sum()
}

async fn until_ready(runner: &Runner, count: u64) {
    let until = Instant::now() + PATIENCE;
    while ready(runner) < count {
        assert!(Instant::now() < until, "{}", runner.metrics_text());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn run(world: &Loop, tasks: &[Task]) -> Vec<Rollout> {
    let harness = shell("shell", "REACT", "");
    let batch = world.runner.run_batch(
        jobs(tasks, &harness, 1),
        1,
        CancellationToken::new(),
        |_| {},
    );
    let result = batch.await.unwrap();
    let rollouts: Vec<Rollout> = result.ended().cloned().collect();
    for rollout in &rollouts {
        println!("{} warm {}", line(rollout), rollout.lineage.warm);
        assert_eq!(rollout.disposition, Some(Disposition::Train));
        assert_eq!(rollout.lineage.sandbox, "kubernetes");
        assert_eq!(rollout.verdict.as_ref().unwrap().reward, 1.0);
    }
    rollouts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollout_that_finds_its_pod_ready_does_not_wait_for_one() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: pods of the fake cluster need root");
        return;
    }
    let tasks = chores::generate(Split::Train, 7, 4);
    let Some(world) = Loop::start(Teacher::of(&tasks)).await else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let image = host_image(folder.path().join("image")).unwrap();
    let fake = Fake::start(kubefake::Settings {
        images: BTreeMap::from([("host:1".to_owned(), image)]),
        ..kubefake::Settings::default()
    });
    let fake = fake.await.unwrap();
    let config = KubernetesConfig {
        kubeconfig: Some(fake.kubeconfig()),
        image: Some("host:1".into()),
        pull: PullPolicy::Never,
        cpu_request_millis: Some(10),
        memory_request_bytes: Some(16 << 20),
        ..KubernetesConfig::default()
    };
    let provider = KubernetesProvider::start(config).await.unwrap();
    let mut settings = (*world.runner.settings).clone();
    settings.warm.per_key = 2;
    let mut world = world.with(settings);
    world.runner.provider = Arc::new(provider.clone());

    let (first, rest) = tasks.split_at(1);
    let cold = run(&world, first).await;
    assert!(!cold[0].lineage.warm);
    // Between the batches as many are made as the next one may want.
    until_ready(&world.runner, 2).await;
    let (second, last) = rest.split_at(2);
    let warm = run(&world, second).await;
    assert!(warm.iter().all(|rollout| rollout.lineage.warm));
    let slowest = warm
        .iter()
        .map(|rollout| rollout.seconds.create)
        .fold(0.0, f64::max);
    println!(
        "prepared in {:.3} s without a pod that is ready, in {slowest:.3} s at most with one",
        cold[0].seconds.create
    );
    assert!(slowest < cold[0].seconds.create);
    // A pod that died while it waited is not used.
    until_ready(&world.runner, 2).await;
    let pods: Vec<(String, String)> = fake.names("pods");
    for (namespace, name) in &pods {
        // One that is on its way out anyway cannot be killed.
        fake.kill(namespace, name, "sandbox", false).await.ok();
    }
    let again = run(&world, last).await;
    assert!(!again[0].lineage.warm, "it was made afresh");
    let page = world.runner.metrics_text();
    let dead = page.lines().find(|line| {
        line.starts_with("espalier_rollout_warm_dropped_total") && line.contains("dead")
    });
    assert!(dead.is_some(), "{page}");

    world.runner.close().await;
    // The runner goes before the provider that it makes sandboxes with.
    world.close().await;
    provider.close().await;
    assert_eq!(fake.names("pods"), Vec::<(String, String)>::new());
    fake.end().await;
}
