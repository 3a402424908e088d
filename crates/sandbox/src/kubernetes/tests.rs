//! The provider against a cluster of a few lines behind `kube::Client`: what is sent, and what
//! becomes of what comes back. No sockets, no clock: time is Tokio's, and paused.

mod api;
mod manifests;
mod relay;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use serde_json::{Value, json};

use self::api::Cluster;
use super::*;
use crate::RefusalCause;

fn config() -> KubernetesConfig {
    KubernetesConfig {
        image: Some("debian:12".to_owned()),
        network_policy: false,
        ..KubernetesConfig::default()
    }
}

async fn provider(cluster: &Cluster, config: KubernetesConfig) -> KubernetesProvider {
    KubernetesProvider::with_client(cluster.client(), "rl", config)
        .await
        .unwrap()
}

/// A status with one state of the sandbox's container.
fn container(phase: &str, state: Value) -> Value {
    json!({"phase": phase, "containerStatuses": [{
        "name": "sandbox", "image": "debian:12", "imageID": "debian@sha256:12",
        "ready": false, "restartCount": 0, "state": state,
    }]})
}

fn waiting(reason: &str, message: &str) -> Value {
    container(
        "Pending",
        json!({"waiting": {"reason": reason, "message": message}}),
    )
}

fn exited(code: i32) -> Value {
    let phase = if code == 0 { "Succeeded" } else { "Failed" };
    container(
        phase,
        json!({"terminated": {"exitCode": code, "reason": "Error"}}),
    )
}

fn running() -> Value {
    container("Running", json!({"running": {}}))
}

/// The refusal of a sandbox, which must come without a time limit running out.
async fn refusal(cluster: &Cluster, config: KubernetesConfig) -> (RefusalCause, String) {
    let provider = provider(cluster, config).await;
    let result = provider.create(Spec::default()).await;
    let Err(SandboxError::Refused {
        cause,
        reason,
        hint,
        ..
    }) = result
    else {
        panic!("{result:?}");
    };
    assert!(!hint.is_empty());
    provider.close().await;
    assert_eq!(cluster.pods(), Vec::<String>::new(), "nothing is left");
    (cause, reason)
}

#[tokio::test(start_paused = true)]
async fn an_image_that_is_not_there_is_refused_at_once() {
    let cluster = Cluster::new(|_| vec![waiting("ErrImagePull", "no:1: not found")]);
    let begun = Instant::now();
    let (cause, reason) = refusal(&cluster, config()).await;
    assert_eq!(cause, RefusalCause::Image);
    assert!(reason.contains("not found"), "{reason}");
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_is_down_gets_some_time() {
    let cluster = Cluster::new(|_| {
        vec![
            waiting("ErrImagePull", "i/o timeout"),
            waiting("ImagePullBackOff", "Back-off pulling image"),
        ]
    });
    let begun = Instant::now();
    let (cause, _) = refusal(&cluster, config()).await;
    assert_eq!(cause, RefusalCause::Image);
    let waited = begun.elapsed().as_secs();
    assert!((60..120).contains(&waited), "{waited}");
}

#[tokio::test(start_paused = true)]
async fn a_pod_for_which_there_is_no_room_is_refused_in_time() {
    let cluster = Cluster::new(|_| {
        vec![json!({"phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient cpu.",
        }]})]
    });
    let config = KubernetesConfig {
        unschedulable_s: 7,
        ..config()
    };
    let begun = Instant::now();
    let (cause, reason) = refusal(&cluster, config).await;
    assert_eq!(cause, RefusalCause::Unschedulable);
    assert!(reason.contains("Insufficient cpu"), "{reason}");
    let waited = begun.elapsed().as_secs();
    assert!((7..30).contains(&waited), "{waited}");
}

#[tokio::test(start_paused = true)]
async fn a_quota_is_named() {
    let cluster = Cluster::new(|_| Vec::new());
    cluster.refuse_pods(403, "exceeded quota: sandboxes, requested: pods=1");
    let (cause, reason) = refusal(&cluster, config()).await;
    assert_eq!(cause, RefusalCause::Quota);
    assert!(reason.contains("sandboxes"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_never_starts_says_what_it_waits_for() {
    let cluster = Cluster::new(|_| vec![waiting("ContainerCreating", "")]);
    let provider = provider(&cluster, config()).await;
    let result = provider.create(Spec::default()).await;
    let Err(SandboxError::Create { reason, .. }) = result else {
        panic!("{result:?}");
    };
    assert!(
        reason.contains("300 s") && reason.contains("ContainerCreating"),
        "{reason}"
    );
    provider.close().await;
    assert_eq!(cluster.pods(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn an_eviction_while_it_starts_can_be_tried_again() {
    let cluster = Cluster::new(|_| vec![json!({"phase": "Failed", "reason": "Evicted"})]);
    let provider = provider(&cluster, config()).await;
    let result = provider.create(Spec::default()).await;
    assert!(
        matches!(&result, Err(SandboxError::Create { reason, .. }) if reason.contains("evicted")),
        "{result:?}"
    );
    provider.close().await;
}

#[tokio::test(start_paused = true)]
async fn without_the_right_to_exec_the_reason_is_said() {
    let cluster = Cluster::new(|_| vec![running()]);
    let provider = provider(&cluster, config()).await;
    let result = provider.create(Spec::default()).await;
    let Err(SandboxError::Create { reason, .. }) = result else {
        panic!("{result:?}");
    };
    assert!(reason.contains("exec in pods is needed"), "{reason}");
    provider.close().await;
    assert_eq!(cluster.pods(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_creation_that_nobody_waits_for_leaves_no_pod() {
    let cluster = Cluster::new(|_| vec![waiting("ContainerCreating", "")]);
    let provider = provider(&cluster, config()).await;
    let create = provider.create(Spec::default());
    assert!(timeout(Duration::from_secs(3), create).await.is_err());
    provider.close().await;
    assert_eq!(cluster.pods(), Vec::<String>::new());
    assert!(
        cluster.log().iter().any(|l| l.starts_with("DELETE pods/")),
        "{:?}",
        cluster.log()
    );
}

#[tokio::test(start_paused = true)]
async fn more_than_may_live_are_refused() {
    let cluster = Cluster::new(|_| vec![waiting("ContainerCreating", "")]);
    let config = KubernetesConfig {
        sandboxes_max: 1,
        ..config()
    };
    let provider = provider(&cluster, config).await;
    let mut first = Box::pin(provider.create(Spec::default()));
    assert!(timeout(Duration::from_secs(1), &mut first).await.is_err());
    let second = provider.create(Spec::default()).await;
    assert!(
        matches!(&second, Err(SandboxError::Create { reason, .. }) if reason.contains("sandboxes_max")),
        "{second:?}"
    );
    drop(first);
    provider.close().await;
}

#[tokio::test(start_paused = true)]
async fn a_run_owns_what_it_makes_and_goes_with_its_lease() {
    let cluster = Cluster::new(|_| Vec::new());
    let config = KubernetesConfig {
        network_policy: true,
        ..config()
    };
    let provider = provider(&cluster, config).await;
    let modes: Vec<String> = provider.degraded().into_iter().map(|d| d.name).collect();
    assert_eq!(modes, ["pids-by-node"], "egress is not known yet");
    let objects = cluster.objects();
    let lease = &objects["leases"][0];
    let mut guest = Vec::new();
    for part in &objects["configmaps"] {
        assert_eq!(part["immutable"], json!(true));
        assert_eq!(
            part["metadata"]["ownerReferences"][0]["uid"],
            lease["metadata"]["uid"]
        );
        let data = part["binaryData"]
            .as_object()
            .unwrap()
            .values()
            .next()
            .unwrap();
        let ByteString(bytes) = serde_json::from_value(data.clone()).unwrap();
        assert!(bytes.len() < 1 << 20, "a ConfigMap holds no more");
        guest.extend(bytes);
    }
    assert!(guest == guest_binary::BYTES, "the pieces are the guest");
    assert_eq!(objects["networkpolicies"].len(), 1);
    // Two minutes of life.
    tokio::time::sleep(Duration::from_secs(120)).await;
    provider.close().await;
    let log = cluster.log();
    let renewals = log.iter().filter(|l| l.starts_with("PUT leases/")).count();
    assert!((7..10).contains(&renewals), "{renewals} renewals");
    assert!(
        log.last().unwrap().starts_with("DELETE leases/espalier-"),
        "{log:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn the_dead_are_removed_and_the_living_are_not() {
    let cluster = Cluster::new(|_| Vec::new());
    let old = |name: &str, renewed: &str| {
        json!({
            "metadata": {"name": name, "uid": name, "resourceVersion": "1",
                         "labels": {"espalier.dev/run": name}},
            "spec": {"renewTime": renewed},
        })
    };
    let now = MicroTime(Timestamp::now());
    let now = serde_json::to_value(now).unwrap();
    cluster.put("leases", old("dead", "2026-01-01T00:00:00.000000Z"));
    cluster.put("leases", old("alive", now.as_str().unwrap()));
    let provider = provider(&cluster, config()).await;
    let log = cluster.log();
    assert!(log.contains(&"DELETE leases/dead".to_owned()), "{log:?}");
    assert!(!log.contains(&"DELETE leases/alive".to_owned()), "{log:?}");
    provider.close().await;
}

/// A cluster in which pods under the policy get out or not, and others do or not.
fn network(inside: i32, outside: i32) -> Cluster {
    Cluster::new(move |pod| {
        let role = pod["metadata"]["labels"]["espalier.dev/role"]
            .as_str()
            .unwrap();
        let reaches = pod["spec"]["containers"][0]["command"][1] == json!("reach");
        match (reaches, role) {
            (true, "sandbox") => vec![running(), exited(inside)],
            (true, _) => vec![running(), exited(outside)],
            _ => vec![waiting("ErrImageNeverPull", "")],
        }
    })
}

async fn egress(inside: i32, outside: i32, must: bool) -> (Vec<String>, SandboxError, usize) {
    let cluster = network(inside, outside);
    let config = KubernetesConfig {
        network_policy: true,
        egress_must_be_blocked: must,
        ..config()
    };
    let provider = provider(&cluster, config).await;
    // Both want to know: one asks the cluster.
    let (one, two) = tokio::join!(
        provider.create(Spec::default()),
        provider.create(Spec::default())
    );
    let names = provider.degraded().into_iter().map(|d| d.name).collect();
    provider.close().await;
    assert!(two.is_err());
    let made = cluster.log();
    let made = made.iter().filter(|l| *l == "POST pods").count();
    (names, one.unwrap_err(), made)
}

#[tokio::test(start_paused = true)]
async fn a_policy_that_holds_is_proven_once() {
    let (modes, error, made) = egress(1, 0, true).await;
    assert_eq!(modes, ["pids-by-node"]);
    assert!(matches!(error, SandboxError::Refused { .. }), "{error:?}");
    assert_eq!(made, 4, "a probe, a control, and two sandboxes");
}

#[tokio::test(start_paused = true)]
async fn a_policy_that_nobody_enforces_is_a_degraded_mode() {
    let (modes, error, made) = egress(0, 0, false).await;
    assert_eq!(modes, ["pids-by-node", "egress-open"]);
    assert!(matches!(error, SandboxError::Refused { .. }), "{error:?}");
    assert_eq!(made, 6, "it was tried twice");
}

#[tokio::test(start_paused = true)]
async fn without_proof_there_is_no_sandbox_where_it_must_be_blocked() {
    for (inside, outside, mode) in [(0, 0, "egress-open"), (1, 1, "egress-unproven")] {
        let (_, error, _) = egress(inside, outside, true).await;
        assert!(
            matches!(&error, SandboxError::Unsupported { what, .. } if what.contains(mode)),
            "{error:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn images_are_tried_before_the_first_sandbox() {
    let cluster = Cluster::new(|pod| match pod["spec"]["containers"][0]["image"].as_str() {
        Some("good:1") => vec![running(), exited(0)],
        _ => vec![waiting("ErrImagePull", "bad:1: manifest unknown")],
    });
    let with = |image: &str| KubernetesConfig {
        prepull: vec![image.to_owned()],
        prepull_nodes: 2,
        ..config()
    };
    let provider = provider(&cluster, with("good:1")).await;
    assert_eq!(
        cluster.log().iter().filter(|l| *l == "POST pods").count(),
        2
    );
    provider.close().await;
    let result = KubernetesProvider::with_client(cluster.client(), "rl", with("bad:1")).await;
    let cause = RefusalCause::Image;
    assert!(
        matches!(&result, Err(SandboxError::Refused { cause: c, .. }) if *c == cause),
        "{result:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_controller_can_make_the_pods() {
    let cluster = Cluster::new(|_| vec![waiting("ErrImageNeverPull", "")]);
    let config = KubernetesConfig {
        agent_sandbox: Some("v1alpha1".to_owned()),
        ..config()
    };
    let (cause, _) = refusal(&cluster, config).await;
    assert_eq!(cause, RefusalCause::Image);
    let log = cluster.log();
    assert!(log.contains(&"POST sandboxes".to_owned()), "{log:?}");
    assert!(
        log.iter().any(|l| l.starts_with("DELETE sandboxes/")),
        "{log:?}"
    );
    assert!(!log.contains(&"POST pods".to_owned()), "{log:?}");
}

/// A watch, and a pod that it expects.
fn watching(cluster: &Cluster) -> (Watch, watch::Hears, CancellationToken) {
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let api: Api<Pod> = Api::namespaced(cluster.client(), "rl");
    let watch = Watch::start(api, "r", &tasks, stop.clone());
    let hears = watch.expect("p");
    (watch, hears, stop)
}

fn pod(uid: &str) -> Value {
    json!({"metadata": {"name": "p", "uid": uid, "labels": {
        "espalier.dev/run": "r", "espalier.dev/sandbox": "p"}}})
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_too_old_begins_again_and_misses_nothing() {
    let cluster = Cluster::new(|_| Vec::new());
    let (_watch, mut hears, _stop) = watching(&cluster);
    cluster.set("pods", pod("1"), Some(running()));
    let is_running = |s: &watch::State| matches!(s.seen, Seen::Running { .. });
    hears.state.wait_for(is_running).await.unwrap();
    // It is deleted while nobody hears of it, and the server has forgotten that time.
    cluster.forget();
    cluster.remove("pods", "p");
    let state = hears.state.wait_for(|s| s.removed).await.unwrap().clone();
    assert!(state.over());
    assert!(cluster.log().iter().filter(|l| *l == "LIST pods").count() >= 2);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_about_to_be_made_is_not_taken_for_gone() {
    let cluster = Cluster::new(|_| Vec::new());
    let (_watch, mut hears, _stop) = watching(&cluster);
    cluster.set(
        "pods",
        json!({"metadata": {"name": "other", "uid": "o", "labels": {
        "espalier.dev/run": "r", "espalier.dev/sandbox": "other"}}}),
        None,
    );
    cluster.forget();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(hears.state.borrow().seen, Seen::Nothing);
    cluster.set("pods", pod("1"), Some(running()));
    hears
        .state
        .wait_for(|s| matches!(s.seen, Seen::Running { .. }))
        .await
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn another_pod_of_the_same_name_is_not_ours() {
    let cluster = Cluster::new(|_| Vec::new());
    let (_watch, mut hears, _stop) = watching(&cluster);
    cluster.set("pods", pod("1"), Some(running()));
    let is_running = |s: &watch::State| matches!(s.seen, Seen::Running { .. });
    hears.state.wait_for(is_running).await.unwrap();
    cluster.set("pods", pod("2"), Some(running()));
    let state = hears.state.wait_for(|s| s.removed).await.unwrap().clone();
    assert!(matches!(state.seen, Seen::Ended(_)), "{state:?}");
}

#[tokio::test(start_paused = true)]
async fn the_first_reason_of_an_end_stays() {
    let cluster = Cluster::new(|_| Vec::new());
    let (_watch, mut hears, _stop) = watching(&cluster);
    cluster.set("pods", pod("1"), Some(running()));
    let is_running = |s: &watch::State| matches!(s.seen, Seen::Running { .. });
    hears.state.wait_for(is_running).await.unwrap();
    cluster.set("pods", pod("1"), Some(exited(40)));
    cluster.remove("pods", "p");
    let state = hears.state.wait_for(|s| s.removed).await.unwrap().clone();
    let Seen::Ended(ended) = state.seen else {
        panic!("{state:?}");
    };
    assert_eq!(
        (ended.reason.as_str(), ended.code),
        ("its deadline passed", Some(40))
    );
}
