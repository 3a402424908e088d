//! What a cluster does to pods, and what becomes of it.

use std::{sync::atomic::Ordering, time::Duration};

use sandbox::{Egress, KubernetesConfig, KubernetesProvider, Provider, RefusalCause, Sandbox, SandboxError, Spec};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, key},
    config, provider,
    suite::{say, script},
};

fn spec(name: &str) -> Spec {
    Spec {
        name: name.to_owned(),
        ..Spec::default()
    }
}

fn refusal(result: Result<Box<dyn Sandbox>, SandboxError>) -> (RefusalCause, String) {
    match result {
        Err(SandboxError::Refused { cause, reason, hint, .. }) => {
            assert!(!hint.is_empty());
            (cause, reason)
        }
        other => panic!("{other:?}"),
    }
}

/// Ends a pod with a status while something runs in it; gives the reason that is said.
async fn ended_with(status: Value) -> String {
    let cluster = Cluster::start().await;
    let provider = provider(&cluster).await;
    let sandbox = provider.create(spec("ended")).await.unwrap();
    let pod = cluster.pods().pop().unwrap();
    let end = async {
        say(&*sandbox, "true").await;
        cluster.end_pod(&pod, status);
    };
    let (result, ()) = tokio::join!(sandbox.exec(script("sleep 1000")), end);
    sandbox.destroy().await;
    // Never started again in its place.
    assert_eq!(cluster.pods(), Vec::<Value>::new());
    provider.close().await;
    cluster.assert_empty().await;
    match result {
        Err(SandboxError::Gone { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eviction_is_infrastructure() {
    let reason = ended_with(json!({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."})).await;
    assert!(reason.contains("Evicted: The node was low"), "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn death_for_lack_of_memory_is_infrastructure() {
    let status = json!({"phase": "Failed", "containerStatuses": [{
        "name": "sandbox", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
    }]});
    let reason = ended_with(status).await;
    assert!(reason.contains("OOMKilled"), "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_node_is_infrastructure() {
    let reason = ended_with(json!({"phase": "Unknown", "reason": "NodeLost", "message": "Node n1 which was running pod p is unresponsive"})).await;
    assert!(reason.contains("NodeLost"), "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_pod_is_infrastructure() {
    let cluster = Cluster::start().await;
    let provider = provider(&cluster).await;
    let sandbox = provider.create(spec("deleted")).await.unwrap();
    let owner = cluster.store.list("configmaps", None).0.pop().unwrap();
    let name = owner["metadata"]["name"].as_str().unwrap().to_owned();
    // Whoever deletes the run's ConfigMap deletes its pods.
    let end = async {
        say(&*sandbox, "true").await;
        let client = client(&cluster).await;
        let api: kube::Api<k8s_openapi::api::core::v1::ConfigMap> = kube::Api::namespaced(client, "espalier");
        api.delete(&name, &Default::default()).await.unwrap();
    };
    let (result, ()) = tokio::join!(sandbox.exec(script("sleep 1000")), end);
    assert!(matches!(result, Err(SandboxError::Gone { .. })), "{result:?}");
    drop(sandbox);
    provider.close().await;
    cluster.assert_empty().await;
}

async fn client(cluster: &Cluster) -> kube::Client {
    let file = kube::config::Kubeconfig::read_from(cluster.kubeconfig()).unwrap();
    let config = kube::Config::from_custom_kubeconfig(file, &Default::default()).await.unwrap();
    kube::Client::try_from(config).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_start_says_so_early() {
    let cluster = Cluster::start().await;
    let provider = provider(&cluster).await;
    let mut missing = spec("missing");
    missing.image = Some("registry/no-such-image:1".to_owned());
    let (cause, reason) = refusal(provider.create(missing).await);
    assert!(cause == RefusalCause::Image && reason.contains("ErrImagePull"), "{cause} {reason}");

    let mut large = spec("large");
    large.limits.memory_bytes = 2 << 40;
    let (cause, reason) = refusal(provider.create(large).await);
    assert!(cause == RefusalCause::Unschedulable && reason.contains("Insufficient memory"), "{cause} {reason}");

    *cluster.faults.quota.lock().unwrap() = Some(0);
    let (cause, reason) = refusal(provider.create(spec("quota")).await);
    assert!(cause == RefusalCause::Quota && reason.contains("exceeded quota"), "{cause} {reason}");
    *cluster.faults.quota.lock().unwrap() = None;

    cluster.faults.forbidden.store(true, Ordering::Relaxed);
    let (cause, reason) = refusal(provider.create(spec("forbidden")).await);
    assert!(cause == RefusalCause::Forbidden && reason.contains("cannot create"), "{cause} {reason}");
    cluster.faults.forbidden.store(false, Ordering::Relaxed);

    cluster.faults.errors.store(1, Ordering::Relaxed);
    let result = provider.create(spec("error")).await;
    assert!(matches!(&result, Err(SandboxError::Create { reason, .. }) if reason.contains("injected")), "{result:?}");

    assert_eq!(say(&*provider.create(spec("after")).await.unwrap(), "echo fine").await, "fine");
    provider.close().await;
    cluster.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_that_end_or_expire_begin_again() {
    let cluster = Cluster::start().await;
    let provider = provider(&cluster).await;
    for round in 0..3 {
        cluster.store.compact();
        cluster.cut_watches();
        let sandbox = provider.create(spec(&format!("watched-{round}"))).await.unwrap();
        assert_eq!(say(&*sandbox, "echo $((1 + 1))").await, "2");
        // Its end is heard of through the watch that began again.
        cluster.cut_watches();
        cluster.store.compact();
        let pod = cluster.pods().pop().unwrap();
        let end = async { cluster.end_pod(&pod, json!({"phase": "Failed", "reason": "Evicted"})) };
        let (result, ()) = tokio::join!(sandbox.exec(script("sleep 1000")), end);
        assert!(matches!(&result, Err(SandboxError::Gone { reason, .. }) if reason.contains("Evicted")), "{result:?}");
    }
    provider.close().await;
    cluster.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_cannot_close_standard_input_will_do() {
    let cluster = Cluster::start().await;
    cluster.faults.old_exec.store(true, Ordering::Relaxed);
    let provider = provider(&cluster).await;
    let sandbox = provider.create(spec("old")).await.unwrap();
    let mut exec = script("wc -c");
    exec.stdin = vec![0; 1000];
    assert_eq!(sandbox.exec(exec).await.unwrap().stdout.trim_ascii(), b"1000");
    sandbox.destroy().await;
    provider.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_runs_are_cleaned_up_by_the_next() {
    let cluster = Cluster::start().await;
    let dead = json!({"metadata": {"labels": {"espalier.dev/run": "dead"}}, "data": {"alive_s": "1000"}});
    let dead = cluster.store.create(&key("configmaps", "espalier", "espalier-run-dead"), dead).unwrap();
    let owned = json!({"metadata": {"ownerReferences": [{"uid": dead["metadata"]["uid"]}]}, "spec": {}});
    cluster.store.create(&key("pods", "espalier", "orphan"), owned).unwrap();
    let foreign = json!({"metadata": {}, "data": {"alive_s": "1000"}});
    cluster.store.create(&key("configmaps", "espalier", "somebody-elses"), foreign).unwrap();
    let provider = provider(&cluster).await;
    let begun = std::time::Instant::now();
    while !cluster.pods().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(10));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let names: Vec<_> = cluster.store.list("configmaps", None).0.iter().map(|m| m["metadata"]["name"].clone()).collect();
    assert_eq!(names, [json!(format!("espalier-run-{}", provider.run())), json!("somebody-elses")]);
    provider.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn egress_is_tried_and_not_believed() {
    let cluster = Cluster::start().await;
    let provider = provider(&cluster).await;
    assert_eq!(provider.probe_egress(spec("probe"), &[]).await.unwrap(), Egress::Blocked);
    // A way out that is there is found: the sandbox's own gateway stands for one.
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || listener.incoming().flatten().for_each(drop));
    let mut open = spec("open");
    open.gateway_socket = Some(socket);
    let hosts = ["127.0.0.1:8080".to_owned()];
    let egress = provider.probe_egress(open, &hosts).await.unwrap();
    assert_eq!(egress, Egress::Open(vec!["tcp 127.0.0.1:8080".to_owned()]));
    provider.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_is_not_there_says_how_to_name_one() {
    let error = KubernetesProvider::start(config("/absent/kubeconfig".into(), "i")).await.unwrap_err();
    let SandboxError::Unsupported { what, hint } = error else {
        panic!("{error:?}");
    };
    assert!(what.contains("/absent/kubeconfig") && hint.contains("kubectl"), "{what}; {hint}");
    let cluster = Cluster::start().await;
    let elsewhere = KubernetesConfig { namespace: "absent".into(), ..config(cluster.kubeconfig(), "i") };
    let error = KubernetesProvider::start(elsewhere).await.unwrap_err();
    assert!(matches!(&error, SandboxError::Unsupported { what, .. } if what.contains("absent")), "{error}");
}
