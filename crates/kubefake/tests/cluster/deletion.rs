//! What goes, and with it what depended on it. Without pods that run.

use http::Method;
use serde_json::{Value, json};

use crate::support::{Client, PODS, config_map, control_plane, script_pod};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

async fn owned(client: &Client, owner: &Value, name: &str, block: bool) -> Value {
    let mut map = config_map(name, "x");
    map["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "v1", "kind": "ConfigMap", "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"], "blockOwnerDeletion": block,
    }]);
    client.post(MAPS, &map).await.ok()
}

fn is_there(fake: &kubefake::Fake, name: &str) -> bool {
    fake.object("configmaps", "default", name).is_some()
}

#[tokio::test]
async fn dependents_go_with_the_last_of_their_owners() {
    let (fake, client) = control_plane(|_| {}).await;
    let owner = client.post(MAPS, &config_map("owner", "x")).await.ok();
    let other = client.post(MAPS, &config_map("other", "x")).await.ok();
    let child = owned(&client, &owner, "child", false).await;
    owned(&client, &child, "grandchild", false).await;
    let both = owned(&client, &owner, "both", false).await;
    let patch = json!({"metadata": {"ownerReferences": [
        both["metadata"]["ownerReferences"][0],
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "other", "uid": other["metadata"]["uid"]},
    ]}});
    let path = format!("{MAPS}/both");
    client.patch(&path, "merge-patch", &patch).await.ok();
    client.delete(&format!("{MAPS}/owner")).await.ok();
    fake.until(|fake| !is_there(fake, "grandchild")).await;
    assert!(!is_there(&fake, "child"));
    assert!(is_there(&fake, "both"));
    client.delete(&format!("{MAPS}/other")).await.ok();
    fake.until(|fake| !is_there(fake, "both")).await;
    // One whose owner never was goes, too.
    let mut stranger = owner.clone();
    stranger["metadata"]["uid"] = json!("0-0-0");
    owned(&client, &stranger, "orphan", false).await;
    fake.until(|fake| !is_there(fake, "orphan")).await;
    fake.end().await;
}

#[tokio::test]
async fn a_deletion_says_what_becomes_of_dependents() {
    let (fake, client) = control_plane(|_| {}).await;
    // Foreground: the owner goes last.
    let owner = client.post(MAPS, &config_map("owner", "x")).await.ok();
    let mut child = owned(&client, &owner, "child", true).await;
    child["metadata"]["finalizers"] = json!(["espalier.dev/hold"]);
    let path = format!("{MAPS}/child");
    client.put(&path, &child).await.ok();
    let foreground = json!({"propagationPolicy": "Foreground"});
    let owner_path = format!("{MAPS}/owner");
    let going = client
        .call(Method::DELETE, &owner_path, Some(&foreground))
        .await
        .ok();
    assert_eq!(
        going["metadata"]["finalizers"],
        json!(["foregroundDeletion"])
    );
    let deleted = |fake: &kubefake::Fake, name: &str| {
        let object = fake.object("configmaps", "default", name);
        object.is_some_and(|o| o["metadata"]["deletionTimestamp"].is_string())
    };
    fake.until(|fake| deleted(fake, "child")).await;
    assert!(is_there(&fake, "owner"));
    let patch = json!({"metadata": {"finalizers": null}});
    client.patch(&path, "merge-patch", &patch).await.ok();
    fake.until(|fake| !is_there(fake, "child") && !is_there(fake, "owner"))
        .await;
    // Orphan: the dependent stays, without an owner.
    let owner = client.post(MAPS, &config_map("owner", "x")).await.ok();
    owned(&client, &owner, "child", true).await;
    client
        .delete(&format!("{owner_path}?propagationPolicy=Orphan"))
        .await
        .ok();
    let child = client.get(&path).await.ok();
    assert_eq!(child["metadata"]["ownerReferences"], json!([]));
    let wrong = client
        .delete(&format!("{path}?propagationPolicy=Sideways"))
        .await;
    wrong.refused(422, "Invalid");
    fake.end().await;
}

#[tokio::test]
async fn only_the_object_that_was_meant_is_deleted() {
    let (fake, client) = control_plane(|_| {}).await;
    let made = client.post(MAPS, &config_map("a", "x")).await.ok();
    let path = format!("{MAPS}/a");
    let wrong = json!({"preconditions": {"uid": "another"}});
    let status = client
        .call(Method::DELETE, &path, Some(&wrong))
        .await
        .refused(409, "Conflict");
    let message = status["message"].as_str().unwrap();
    assert!(
        message.contains("UID in precondition: another"),
        "{message}"
    );
    let right = json!({"preconditions": {"uid": made["metadata"]["uid"]}});
    client.call(Method::DELETE, &path, Some(&right)).await.ok();
    fake.end().await;
}

#[tokio::test]
async fn a_namespace_takes_all_it_has_with_it() {
    let (fake, client) = control_plane(|_| {}).await;
    let namespace = json!({"metadata": {"name": "run"}});
    client.post("/api/v1/namespaces", &namespace).await.ok();
    let maps = "/api/v1/namespaces/run/configmaps";
    client.post(maps, &config_map("a", "x")).await.ok();
    let mut held = config_map("held", "x");
    held["metadata"]["finalizers"] = json!(["espalier.dev/hold"]);
    client.post(maps, &held).await.ok();
    let going = client.delete("/api/v1/namespaces/run").await.ok();
    assert_eq!(going["status"]["phase"], "Terminating");
    fake.until(|fake| fake.object("configmaps", "run", "a").is_none())
        .await;
    let status = client
        .post(maps, &config_map("late", "x"))
        .await
        .refused(403, "Forbidden");
    assert_eq!(
        status["details"]["causes"][0]["reason"],
        "NamespaceTerminating"
    );
    let patch = json!({"metadata": {"finalizers": null}});
    client
        .patch(&format!("{maps}/held"), "merge-patch", &patch)
        .await
        .ok();
    fake.until(|fake| fake.object("namespaces", "", "run").is_none())
        .await;
    fake.end().await;
}

#[tokio::test]
async fn a_pod_without_a_node_waits_and_goes_at_once() {
    let (fake, client) = control_plane(|_| {}).await;
    client.post(PODS, &script_pod("a", "true")).await.ok();
    let pod = client
        .until("a", |pod| {
            pod["status"]["conditions"][0]["reason"] == "Unschedulable"
        })
        .await;
    assert_eq!(pod["status"]["phase"], "Pending");
    assert_eq!(
        pod["status"]["conditions"][0]["message"],
        "no nodes available to schedule pods"
    );
    let path = format!("{PODS}/a");
    client
        .get(&format!("{path}/log"))
        .await
        .refused(400, "BadRequest");
    let gone = client.delete(&path).await.ok();
    assert_eq!(gone["kind"], "Pod");
    client.get(&path).await.refused(404, "NotFound");
    fake.end().await;
}

#[tokio::test]
async fn a_sandbox_of_agent_sandbox_has_a_pod_until_it_goes_or_its_time_is_over() {
    let served = |settings: &mut kubefake::Settings| {
        settings.custom = vec![kubefake::agent_sandbox("v1alpha1")];
    };
    let (fake, client) = control_plane(served).await;
    let path = "/apis/agents.x-k8s.io/v1alpha1/namespaces/default/sandboxes";
    let pod = script_pod("ignored", "true");
    let sandbox = |name: &str, shutdown: &str| {
        json!({"apiVersion": "agents.x-k8s.io/v1alpha1", "kind": "Sandbox",
            "metadata": {"name": name}, "spec": {"shutdownTime": shutdown, "podTemplate": {
                "metadata": {"labels": {"a": "b"}}, "spec": pod["spec"]}}})
    };
    let pod_of = |fake: &kubefake::Fake, name: &str| fake.object("pods", "default", name);
    let later = "2999-01-01T00:00:00Z";
    client.post(path, &sandbox("s", later)).await.ok();
    fake.until(|fake| pod_of(fake, "s").is_some()).await;
    let made = pod_of(&fake, "s").unwrap();
    assert_eq!(made["metadata"]["labels"], json!({"a": "b"}));
    assert_eq!(made["metadata"]["ownerReferences"][0]["kind"], "Sandbox");
    let over = json!({"spec": {"shutdownTime": "2000-01-01T00:00:00Z"}});
    let own = format!("{path}/s");
    client.patch(&own, "merge-patch", &over).await.ok();
    fake.until(|fake| pod_of(fake, "s").is_none()).await;
    fake.until(|fake| {
        let sandbox = fake
            .object("sandboxes.agents.x-k8s.io", "default", "s")
            .unwrap();
        sandbox["status"]["conditions"][0]["reason"] == "SandboxExpired"
    })
    .await;
    client.post(path, &sandbox("t", later)).await.ok();
    fake.until(|fake| pod_of(fake, "t").is_some()).await;
    client.delete(&format!("{path}/t")).await.ok();
    fake.until(|fake| pod_of(fake, "t").is_none()).await;
    fake.end().await;
}
