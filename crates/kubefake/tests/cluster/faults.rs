//! Faults on demand.

use std::time::Duration;

use http::Method;
use kubefake::{ApiFault, Matcher};
use serde_json::{Value, json};

use crate::support::{
    Client, Given, IDLE, PODS, cluster, config_map, control_plane, exec_path, script_pod,
};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

#[tokio::test]
async fn requests_fail_as_often_as_they_were_told_to() {
    let (fake, client) = control_plane(|_| {}).await;
    let creates = || Matcher::of("create", "configmaps");
    fake.inject(creates(), ApiFault::TooManyRequests { retry_after_s: 3 }, 2);
    fake.inject(creates(), ApiFault::Internal, 1);
    fake.inject(creates(), ApiFault::Unavailable, 1);
    fake.inject(Matcher::of("list", "configmaps"), ApiFault::Gone, 1);
    let map = config_map("a", "x");
    for _ in 0..2 {
        let answer = client.post(MAPS, &map).await;
        assert_eq!(answer.code, 429);
        assert_eq!(answer.headers["retry-after"], "3");
        assert_eq!(answer.text, "Too many requests, please try again later.\n");
    }
    client.post(MAPS, &map).await.refused(500, "InternalError");
    client
        .post(MAPS, &map)
        .await
        .refused(503, "ServiceUnavailable");
    assert_eq!(client.post(MAPS, &map).await.code, 201);
    client.get(MAPS).await.refused(410, "Expired");
    client.get(MAPS).await.ok();
    fake.inject(Matcher::of("create", "pods"), ApiFault::Quota, 1);
    let status = client
        .post(PODS, &script_pod("a", "true"))
        .await
        .refused(403, "Forbidden");
    assert!(
        status["message"]
            .as_str()
            .unwrap()
            .contains("exceeded quota")
    );
    fake.inject(Matcher::of("update", "configmaps"), ApiFault::Conflict, 1);
    client
        .put(&format!("{MAPS}/a"), &map)
        .await
        .refused(409, "Conflict");
    fake.inject(
        Matcher::default(),
        ApiFault::Slow(Duration::from_millis(1)),
        1,
    );
    client.get(MAPS).await.ok();
    fake.inject(Matcher::default(), ApiFault::Internal, 5);
    assert_eq!(fake.clear_faults(), 5);
    client.get(MAPS).await.ok();
    let codes: Vec<u16> = fake.requests().iter().map(|r| r.code).take(5).collect();
    assert_eq!(codes, [429, 429, 500, 503, 201]);
    fake.end().await;
}

#[tokio::test]
async fn an_answer_may_be_lost_though_the_work_is_done() {
    let (fake, client) = control_plane(|_| {}).await;
    let send = async |name: &str| {
        let map = config_map(name, "x");
        client.send(Method::POST, MAPS, &[], Some(&map)).await
    };
    let creates = || Matcher::of("create", "configmaps");
    fake.inject(creates(), ApiFault::Refused, 1);
    assert!(send("a").await.is_err());
    assert!(fake.object("configmaps", "default", "a").is_none());
    fake.inject(creates(), ApiFault::LostAnswer, 1);
    assert!(send("a").await.is_err());
    // Who tries again is told so.
    client
        .post(MAPS, &config_map("a", "x"))
        .await
        .refused(409, "AlreadyExists");
    fake.end().await;
}

#[tokio::test]
async fn a_server_that_restarts_has_all_it_had() {
    let (fake, client) = control_plane(|_| {}).await;
    client.post(MAPS, &config_map("a", "x")).await.ok();
    let mut watcher = client.watch(&format!("{MAPS}?watch=1")).await;
    let seen = watcher.next().await.unwrap();
    let seen = seen["object"]["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .to_owned();
    fake.restart_api().await.unwrap();
    assert!(!matches!(watcher.try_next().await, Ok(Some(_))), "it broke");
    // A new connection, the same objects and revisions.
    let again = Client::new(&fake, "admin-token");
    again.post(MAPS, &config_map("b", "x")).await.ok();
    let mut watcher = again
        .watch(&format!("{MAPS}?watch=1&resourceVersion={seen}"))
        .await;
    assert_eq!(watcher.told().await, ("ADDED".to_owned(), "b".to_owned()));
    fake.end().await;
}

#[tokio::test]
async fn a_pod_is_evicted_or_killed_when_the_node_says_so() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    for name in ["evicted", "killed", "starved"] {
        client.post(PODS, &script_pod(name, IDLE)).await.ok();
    }
    for name in ["evicted", "killed", "starved"] {
        client.until_phase(name, "Running").await;
    }
    fake.evict("default", "evicted").unwrap();
    let pod = client.until_phase("evicted", "Failed").await;
    assert_eq!(pod["status"]["reason"], "Evicted");
    let message = pod["status"]["message"].as_str().unwrap();
    assert!(
        message.starts_with("The node was low on resource: memory."),
        "{message}"
    );
    fake.kill("default", "killed", "main", false).await.unwrap();
    fake.kill("default", "starved", "main", true).await.unwrap();
    for (name, reason) in [("killed", "Error"), ("starved", "OOMKilled")] {
        let pod = client.until_phase(name, "Failed").await;
        let state = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
        assert_eq!(state["exitCode"], 137);
        assert_eq!(state["reason"], reason);
    }
    assert!(fake.evict("default", "none").is_err());
    assert!(fake.kill("default", "killed", "main", false).await.is_err());
    fake.end().await;
}

#[tokio::test]
async fn a_lost_node_does_nothing_until_it_is_back() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    client.post(PODS, &script_pod("a", IDLE)).await.ok();
    client.until_phase("a", "Running").await;
    let mut session = client.exec("a", &["cat"], true).await;
    let mut given = Given::default();
    session.write(b"x").await;
    session.until_said(&mut given, "x").await;
    fake.lose_node();
    while session.step(&mut given).await {}
    let ready = |object: &Value| {
        let all = object["status"]["conditions"].as_array().unwrap();
        let ready = all.iter().find(|c| c["type"] == "Ready").unwrap();
        ready["status"].as_str().unwrap().to_owned()
    };
    let node = client.get("/api/v1/nodes/kubefake-node").await.ok();
    assert_eq!(ready(&node), "Unknown");
    let pod = client.get(&format!("{PODS}/a")).await.ok();
    assert_eq!(
        (ready(&pod).as_str(), &pod["status"]["phase"]),
        ("False", &json!("Running"))
    );
    let path = exec_path("a", &["true"], false);
    assert_eq!(
        client.session(&path, "v5.channel.k8s.io").await.err(),
        Some(500)
    );
    // New pods stay away.
    client.post(PODS, &script_pod("b", "true")).await.ok();
    let pod = client
        .until("b", |pod| {
            pod["status"]["conditions"][0]["reason"] == "Unschedulable"
        })
        .await;
    let message = pod["status"]["conditions"][0]["message"].as_str().unwrap();
    assert!(
        message.contains("node.kubernetes.io/unreachable"),
        "{message}"
    );
    // The cluster gives the pod up; its object stays, for nobody says that it is gone.
    fake.give_lost_pods_up();
    let pod = client.get(&format!("{PODS}/a")).await.ok();
    assert_eq!(pod["status"]["reason"], "NodeLost");
    assert!(pod["metadata"]["deletionTimestamp"].is_string());
    // Back again, it does what it was told.
    fake.find_node();
    fake.until(|fake| fake.object("pods", "default", "a").is_none())
        .await;
    client.until_phase("b", "Succeeded").await;
    fake.end().await;
}

#[tokio::test]
async fn by_force_a_pod_of_a_lost_node_goes_at_once() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    client.post(PODS, &script_pod("a", IDLE)).await.ok();
    client.until_phase("a", "Running").await;
    fake.lose_node();
    client
        .delete(&format!("{PODS}/a?gracePeriodSeconds=0"))
        .await
        .ok();
    client
        .get(&format!("{PODS}/a"))
        .await
        .refused(404, "NotFound");
    // The name is free though the processes live.
    client.post(PODS, &script_pod("a", "echo new")).await.ok();
    fake.find_node();
    client.until_phase("a", "Succeeded").await;
    assert_eq!(client.log("a").await, "new\n");
    fake.end().await;
}
