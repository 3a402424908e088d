//! Objects without pods that run: names, shapes, conflicts, quotas, rights.

use http::Method;
use kubefake::{Resource, Rule, User};
use serde_json::json;

use crate::support::{Client, PODS, config_map, control_plane, script_pod};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/default/leases";

#[tokio::test]
async fn strangers_are_told_apart_from_those_without_rights() {
    let reader = User {
        name: "reader".to_owned(),
        token: "reader-token".to_owned(),
        rules: vec![Rule {
            verbs: vec!["get".to_owned(), "list".to_owned()],
            resources: vec!["pods".to_owned()],
            namespace: Some("default".to_owned()),
        }],
    };
    let (fake, admin) = control_plane(|settings| settings.users.push(reader)).await;
    for token in ["", "wrong"] {
        let stranger = Client::new(&fake, token);
        let status = stranger.get(PODS).await.refused(401, "Unauthorized");
        assert_eq!(status["message"], "Unauthorized");
        assert_eq!(stranger.get("/version").await.code, 401);
    }
    let reader = Client::new(&fake, "reader-token");
    assert_eq!(reader.get(PODS).await.ok()["kind"], "PodList");
    let status = reader
        .post(PODS, &script_pod("a", "true"))
        .await
        .refused(403, "Forbidden");
    assert_eq!(
        status["message"],
        "pods is forbidden: User \"reader\" cannot create resource \"pods\" in API group \"\" in \
         the namespace \"default\""
    );
    assert_eq!(status["details"]["kind"], "pods");
    let all = reader.get("/api/v1/pods").await.refused(403, "Forbidden");
    let message = all["message"].as_str().unwrap();
    assert!(message.ends_with("at the cluster scope"), "{message}");
    // Reading a pod is not getting into it.
    admin.post(PODS, &script_pod("a", "true")).await.ok();
    let exec = format!("{PODS}/a/exec?command=id&stdout=1");
    let status = reader.get(&exec).await.refused(403, "Forbidden");
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("resource \"pods/exec\""), "{message}");
    let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    let may = async |verb: &str| {
        let review = json!({"spec": {"resourceAttributes":
            {"verb": verb, "resource": "pods", "namespace": "default"}}});
        reader.post(path, &review).await.ok()["status"]["allowed"].clone()
    };
    assert_eq!(
        (may("list").await, may("delete").await),
        (json!(true), json!(false))
    );
    fake.end().await;
}

#[tokio::test]
async fn what_is_served_is_said_and_the_rest_is_not_found() {
    let custom = Resource {
        group: "test.example".into(),
        version: "v1alpha1".into(),
        plural: "things".into(),
        kind: "Thing".into(),
        namespaced: true,
        short: vec![],
    };
    let (fake, client) = control_plane(|settings| settings.custom = vec![custom]).await;
    assert_eq!(client.get("/version").await.ok()["minor"], "36");
    assert_eq!(client.get("/readyz").await.text, "ok");
    let core = client.get("/api/v1").await.ok();
    let names: Vec<&str> = core["resources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["name"].as_str().unwrap())
        .collect();
    for name in [
        "pods",
        "pods/exec",
        "pods/log",
        "pods/status",
        "namespaces",
        "nodes",
    ] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    let groups = client.get("/apis").await.ok();
    for group in groups["groups"].as_array().unwrap() {
        let version = group["preferredVersion"]["groupVersion"].as_str().unwrap();
        let list = client.get(&format!("/apis/{version}")).await.ok();
        assert_eq!(list["groupVersion"], version);
    }
    let index = client.get("/openapi/v3").await.ok();
    for (_, entry) in index["paths"].as_object().unwrap() {
        let url = entry["serverRelativeURL"].as_str().unwrap();
        assert_eq!(client.get(url).await.ok()["openapi"], "3.0.0");
    }
    client
        .get("/apis/apps/v1/namespaces/default/deployments")
        .await
        .refused(404, "NotFound");
    assert_eq!(client.get("/nonsense").await.code, 404);
    // A custom kind is a kind like any other.
    let path = "/apis/test.example/v1alpha1/namespaces/default/things";
    let object = json!({"apiVersion": "test.example/v1alpha1", "kind": "Thing",
        "metadata": {"name": "s"}, "spec": {"anything": [1, {"a": null}]}});
    let made = client.post(path, &object).await.ok();
    assert_eq!(made["spec"]["anything"][0], 1);
    let listed = client.get(path).await.ok();
    assert_eq!(listed["items"][0]["kind"], "Thing");
    fake.end().await;
}

#[tokio::test]
async fn an_object_lives_from_its_creation_to_its_deletion() {
    let (fake, client) = control_plane(|_| {}).await;
    let made = client.post(MAPS, &config_map("a", "1")).await;
    assert_eq!(made.code, 201);
    let made = made.json();
    assert!(made["metadata"]["uid"].as_str().unwrap().len() == 36);
    assert!(made["metadata"]["creationTimestamp"].is_string());
    let status = client
        .post(MAPS, &config_map("a", "2"))
        .await
        .refused(409, "AlreadyExists");
    assert_eq!(status["message"], "configmaps \"a\" already exists");
    assert_eq!(
        status["details"],
        json!({"name": "a", "kind": "configmaps"})
    );
    // An update with the version that was read, and one with an older.
    let mut changed = made.clone();
    changed["data"]["value"] = json!("2");
    let path = format!("{MAPS}/a");
    let newer = client.put(&path, &changed).await.ok();
    assert_ne!(
        newer["metadata"]["resourceVersion"],
        made["metadata"]["resourceVersion"]
    );
    let status = client.put(&path, &changed).await.refused(409, "Conflict");
    let message = status["message"].as_str().unwrap();
    assert!(
        message.contains("the object has been modified"),
        "{message}"
    );
    // Who names no version overwrites, but for leases.
    client.put(&path, &config_map("a", "3")).await.ok();
    let patch = json!({"data": {"value": null, "other": "4"}});
    let patched = client.patch(&path, "merge-patch", &patch).await.ok();
    assert_eq!(patched["data"], json!({"other": "4"}));
    let dry = client.delete(&format!("{path}?dryRun=All")).await;
    assert_eq!(dry.code, 200);
    let gone = client.delete(&path).await.ok();
    assert_eq!(gone["status"], "Success");
    assert_eq!(gone["details"]["uid"], made["metadata"]["uid"]);
    let status = client.get(&path).await.refused(404, "NotFound");
    assert_eq!(status["message"], "configmaps \"a\" not found");
    client.delete(&path).await.refused(404, "NotFound");
    let nowhere = "/api/v1/namespaces/none/configmaps";
    let status = client
        .post(nowhere, &config_map("a", "1"))
        .await
        .refused(404, "NotFound");
    assert_eq!(status["message"], "namespaces \"none\" not found");
    let generated = json!({"metadata": {"generateName": "map-"}});
    let names = [
        client.post(MAPS, &generated).await.ok(),
        client.post(MAPS, &generated).await.ok(),
    ]
    .map(|made| made["metadata"]["name"].as_str().unwrap().to_owned());
    assert!(names[0].starts_with("map-") && names[0].len() == 9 && names[0] != names[1]);
    fake.end().await;
}

#[tokio::test]
async fn leases_are_written_only_by_who_has_read_them() {
    let (fake, client) = control_plane(|_| {}).await;
    let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": "l"}, "spec": {"holderIdentity": "me", "leaseDurationSeconds": 15}});
    let path = format!("{LEASES}/l");
    let made = client.put(&path, &lease).await;
    assert_eq!(made.code, 201, "an update may make a lease: {}", made.text);
    let status = client.put(&path, &lease).await.refused(422, "Invalid");
    let message = status["message"].as_str().unwrap();
    assert!(
        message.starts_with("Lease.coordination.k8s.io \"l\" is invalid"),
        "{message}"
    );
    let mut mine = made.json();
    mine["spec"]["holderIdentity"] = json!("you");
    client.put(&path, &mine).await.ok();
    client.put(&path, &mine).await.refused(409, "Conflict");
    let mut wrong = lease.clone();
    wrong["metadata"]["name"] = json!("m");
    wrong["spec"]["leaseDurationSeconds"] = json!(0);
    client.post(LEASES, &wrong).await.refused(422, "Invalid");
    fake.end().await;
}

#[tokio::test]
async fn a_wrong_pod_is_refused_with_every_reason() {
    let (fake, client) = control_plane(|_| {}).await;
    let pod = json!({"metadata": {"name": "A_b", "labels": {"x": "a b"}}, "spec": {
    "activeDeadlineSeconds": 0,
    "containers": [
        {"name": "c", "image": "i", "volumeMounts": [{"name": "v", "mountPath": "/v"}],
         "resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi", "cpu": "x"}}},
        {"name": "c", "image": ""},
    ]}});
    let status = client.post(PODS, &pod).await.refused(422, "Invalid");
    let causes = status["details"]["causes"].as_array().unwrap();
    let found: Vec<(&str, &str)> = causes
        .iter()
        .map(|c| (c["field"].as_str().unwrap(), c["reason"].as_str().unwrap()))
        .collect();
    for expected in [
        ("metadata.name", "FieldValueInvalid"),
        ("metadata.labels", "FieldValueInvalid"),
        ("spec.activeDeadlineSeconds", "FieldValueInvalid"),
        (
            "spec.containers[0].volumeMounts[0].name",
            "FieldValueNotFound",
        ),
        (
            "spec.containers[0].resources.requests[memory]",
            "FieldValueInvalid",
        ),
        (
            "spec.containers[0].resources.limits[cpu]",
            "FieldValueInvalid",
        ),
        ("spec.containers[1].name", "FieldValueDuplicate"),
        ("spec.containers[1].image", "FieldValueRequired"),
    ] {
        assert!(
            found.contains(&expected),
            "{expected:?} is not in {found:?}"
        );
    }
    // Fields that nobody knows: refused when asked for, else named and dropped.
    let mut pod = script_pod("a", "true");
    pod["spec"]["containers"][0]["comand"] = json!(["x"]);
    let strict = format!("{PODS}?fieldValidation=Strict");
    let status = client.post(&strict, &pod).await.refused(400, "BadRequest");
    let message = status["message"].as_str().unwrap();
    assert!(
        message.contains("unknown field \"spec.containers[0].comand\""),
        "{message}"
    );
    let made = client.post(PODS, &pod).await;
    let warning = made.headers["warning"].to_str().unwrap();
    assert!(warning.contains("spec.containers[0].comand"), "{warning}");
    assert!(made.ok()["spec"]["containers"][0]["comand"].is_null());
    let mut pod = script_pod("b", "true");
    pod["spec"]["containers"] = json!("x");
    client.post(PODS, &pod).await.refused(400, "BadRequest");
    // What this server cannot do is said, not forgotten.
    let mut pod = script_pod("b", "true");
    pod["spec"]["containers"][0]["livenessProbe"] = json!({"exec": {"command": ["true"]}});
    let status = client.post(PODS, &pod).await.refused(400, "BadRequest");
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("kubefake does not do this"), "{message}");
    // A pod is what it was created as.
    let patch = json!({"spec": {"restartPolicy": "Always"}});
    let path = format!("{PODS}/a");
    let status = client
        .patch(&path, "merge-patch", &patch)
        .await
        .refused(422, "Invalid");
    let message = status["message"].as_str().unwrap();
    assert!(
        message.contains("pod updates may not change fields"),
        "{message}"
    );
    let patch = json!({"metadata": {"labels": {"b": "c"}}});
    let patched = client
        .patch(&path, "strategic-merge-patch", &patch)
        .await
        .ok();
    assert_eq!(patched["metadata"]["labels"], json!({"app": "a", "b": "c"}));
    let body = json!({"apiVersion": "v1"});
    let answer = client
        .call_with(
            Method::PATCH,
            &path,
            &[("content-type", "application/apply-patch+yaml")],
            Some(&body),
        )
        .await;
    let message = answer.refused(400, "BadRequest")["message"].to_string();
    assert!(message.contains("server-side apply"), "{message}");
    fake.end().await;
}

#[tokio::test]
async fn quotas_hold_and_count() {
    let (fake, client) = control_plane(|_| {}).await;
    let quota = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"},
        "spec": {"hard": {"pods": "2", "limits.memory": "300Mi"}}});
    let quotas = "/api/v1/namespaces/default/resourcequotas";
    client.post(quotas, &quota).await.ok();
    let pod = |name: &str, memory: &str| {
        let mut pod = script_pod(name, "true");
        pod["spec"]["containers"][0]["resources"] = json!({"limits": {"memory": memory}});
        pod
    };
    let status = client
        .post(PODS, &script_pod("a", "true"))
        .await
        .refused(403, "Forbidden");
    assert_eq!(
        status["message"],
        "pods \"a\" is forbidden: failed quota: q: must specify limits.memory for: main"
    );
    client.post(PODS, &pod("a", "200Mi")).await.ok();
    let status = client
        .post(PODS, &pod("b", "200Mi"))
        .await
        .refused(403, "Forbidden");
    assert_eq!(
        status["message"],
        "pods \"b\" is forbidden: exceeded quota: q, requested: limits.memory=200Mi, used: \
         limits.memory=200Mi, limited: limits.memory=300Mi"
    );
    client.post(PODS, &pod("b", "100Mi")).await.ok();
    let status = client
        .post(PODS, &pod("c", "0"))
        .await
        .refused(403, "Forbidden");
    let message = status["message"].as_str().unwrap();
    assert!(
        message.contains("used: pods=2, limited: pods=2"),
        "{message}"
    );
    fake.until(|fake| {
        let quota = fake.object("resourcequotas", "default", "q").unwrap();
        quota["status"]["used"] == json!({"pods": "2", "limits.memory": "300Mi"})
    })
    .await;
    client.delete(&format!("{PODS}/a")).await.ok();
    client.post(PODS, &pod("c", "1Mi")).await.ok();
    fake.end().await;
}

#[tokio::test]
async fn restricted_namespaces_refuse_pods_that_are_too_free() {
    let (fake, client) = control_plane(|_| {}).await;
    let namespace = json!({"metadata": {"name": "safe", "labels":
        {"pod-security.kubernetes.io/enforce": "restricted"}}});
    client.post("/api/v1/namespaces", &namespace).await.ok();
    let pods = "/api/v1/namespaces/safe/pods";
    let mut pod = script_pod("a", "true");
    let status = client.post(pods, &pod).await.refused(403, "Forbidden");
    let message = status["message"].as_str().unwrap();
    for part in [
        "violates PodSecurity \"restricted:latest\"",
        "allowPrivilegeEscalation != false (container \"main\"",
        "unrestricted capabilities",
        "runAsNonRoot != true",
        "seccompProfile",
    ] {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
    pod["spec"]["securityContext"] =
        json!({"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}});
    pod["spec"]["containers"][0]["securityContext"] =
        json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    client.post(pods, &pod).await.ok();
    fake.end().await;
}

#[tokio::test]
async fn what_a_pod_refers_to_must_be_there() {
    let (fake, client) = control_plane(|_| {}).await;
    for (key, value, expected) in [
        (
            "serviceAccountName",
            "robot",
            "serviceaccount \"robot\" not found",
        ),
        (
            "runtimeClassName",
            "gvisor",
            "RuntimeClass \"gvisor\" not found",
        ),
        (
            "priorityClassName",
            "high",
            "no PriorityClass with name high was found",
        ),
    ] {
        let mut pod = script_pod("a", "true");
        pod["spec"][key] = json!(value);
        let status = client.post(PODS, &pod).await.refused(403, "Forbidden");
        let message = status["message"].as_str().unwrap();
        assert!(message.contains(expected), "{message}");
    }
    fake.end().await;
}
