//! Pods that really run.

use kubefake::{Image, Pull, host_image};
use serde_json::{Value, json};

use crate::support::{Client, IDLE, PODS, cluster, cluster_with, config_map, script_pod};

fn terminated(pod: &Value) -> &Value {
    &pod["status"]["containerStatuses"][0]["state"]["terminated"]
}

fn waiting(pod: &Value) -> &Value {
    &pod["status"]["containerStatuses"][0]["state"]["waiting"]
}

async fn events(client: &Client, pod: &str) -> Vec<String> {
    let path =
        format!("/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3D{pod}");
    let list = client.get(&path).await.ok();
    let mut found: Vec<(u64, String)> = list["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| {
            let revision = e["metadata"]["resourceVersion"].as_str().unwrap();
            (
                revision.parse().unwrap(),
                e["reason"].as_str().unwrap().to_owned(),
            )
        })
        .collect();
    found.sort();
    found.into_iter().map(|(_, reason)| reason).collect()
}

#[tokio::test]
async fn a_pod_runs_its_init_containers_and_then_its_own_with_all_that_they_refer_to() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    let maps = "/api/v1/namespaces/default/configmaps";
    let mut map = config_map("map", "from a map");
    map["binaryData"] = json!({"raw": "AP8="});
    client.post(maps, &map).await.ok();
    let secret = json!({"metadata": {"name": "secret"}, "stringData": {"key": "hush"}});
    client
        .post("/api/v1/namespaces/default/secrets", &secret)
        .await
        .ok();
    let script = "cat /shared/one; cat /map/value; echo; od -An -tx1 /map/raw; cat /key; echo; \
                  echo $NAME $VALUE $KEY $BOTH $LIMIT; id -u; cat /proc/1/comm; hostname; \
                  touch /denied 2>/dev/null || echo read-only; echo wrong >&2; \
                  stat -f -c %T /shared; exit 3";
    let pod = json!({
        "metadata": {"name": "a", "labels": {"x": "y"}},
        "spec": {
            "restartPolicy": "Never", "hostname": "sandbox",
            "initContainers": [{
                "name": "first", "image": "host:1", "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", "echo one > /into/one; echo done"],
                "volumeMounts": [{"name": "shared", "mountPath": "/into"}],
            }],
            "containers": [{
                "name": "main", "image": "host:1", "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", script],
                "securityContext": {
                    "runAsUser": 1000, "runAsGroup": 1000, "readOnlyRootFilesystem": true,
                    "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
                },
                "resources": {"limits": {"memory": "64Mi", "cpu": "1"}},
                "env": [
                    {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                    {"name": "VALUE", "valueFrom": {"configMapKeyRef": {"name": "map", "key": "value"}}},
                    {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "key"}}},
                    {"name": "BOTH", "value": "$(NAME)-$(KEY)"},
                    {"name": "LIMIT", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}}},
                ],
                "volumeMounts": [
                    {"name": "shared", "mountPath": "/shared"},
                    {"name": "map", "mountPath": "/map", "readOnly": true},
                    {"name": "secret", "mountPath": "/key", "subPath": "key"},
                ],
            }],
            "volumes": [
                {"name": "shared", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
                {"name": "map", "projected": {"sources": [{"configMap": {"name": "map"}}]}},
                {"name": "secret", "secret": {"secretName": "secret"}},
            ],
        },
    });
    client.post(PODS, &pod).await.ok();
    let pod = client.until_phase("a", "Failed").await;
    assert_eq!(terminated(&pod)["exitCode"], 3);
    assert_eq!(terminated(&pod)["reason"], "Error");
    let init = &pod["status"]["initContainerStatuses"][0];
    assert_eq!(init["state"]["terminated"]["reason"], "Completed");
    assert_eq!(init["ready"], true);
    let log = client.log("a").await;
    let (out, err): (Vec<&str>, Vec<&str>) = log.lines().partition(|line| *line != "wrong");
    assert_eq!(
        out,
        [
            "one",
            "from a map",
            " 00 ff",
            "hush",
            "a from a map hush a-hush 67108864",
            "1000",
            "sh",
            "sandbox",
            "read-only",
            "tmpfs",
        ]
    );
    assert_eq!(err, ["wrong"]);
    let first = client.get(&format!("{PODS}/a/log?container=first")).await;
    assert_eq!(first.text, "done\n");
    let tail = client
        .get(&format!("{PODS}/a/log?container=first&tailLines=0"))
        .await;
    assert_eq!(tail.text, "");
    client
        .get(&format!("{PODS}/a/log?container=none"))
        .await
        .refused(400, "BadRequest");
    let events = events(&client, "a").await;
    assert_eq!(
        events,
        [
            "Scheduled",
            "Pulled",
            "Created",
            "Started",
            "Pulled",
            "Created",
            "Started"
        ]
        .map(str::to_owned)
        .to_vec(),
        "in this order"
    );
    // It is over: nobody has to wait for its processes.
    client.delete(&format!("{PODS}/a")).await.ok();
    client
        .get(&format!("{PODS}/a"))
        .await
        .refused(404, "NotFound");
    fake.end().await;
}

#[tokio::test]
async fn the_states_of_a_pod_follow_each_other_as_on_a_real_node() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    let path = format!("{PODS}?watch=1&fieldSelector=metadata.name%3Da");
    let mut watcher = client.watch(&path).await;
    client.post(PODS, &script_pod("a", IDLE)).await.ok();
    client.until_phase("a", "Running").await;
    let going = client.delete(&format!("{PODS}/a")).await.ok();
    assert!(going["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(going["metadata"]["deletionGracePeriodSeconds"], 1);
    let mut phases: Vec<String> = Vec::new();
    loop {
        let event = watcher.next().await.unwrap();
        let pod = &event["object"];
        let node = if pod["spec"]["nodeName"].is_null() {
            ""
        } else {
            "@node"
        };
        let leaving = if pod["metadata"]["deletionTimestamp"].is_null() {
            ""
        } else {
            "-"
        };
        let phase = format!(
            "{leaving}{}{node}",
            pod["status"]["phase"].as_str().unwrap()
        );
        if phases.last() != Some(&phase) {
            phases.push(phase);
        }
        if event["type"] == "DELETED" {
            break;
        }
    }
    assert_eq!(
        phases,
        [
            "Pending",
            "Pending@node",
            "Running@node",
            "-Running@node",
            "-Succeeded@node"
        ]
    );
    fake.end().await;
}

#[tokio::test]
async fn one_that_does_not_hear_is_killed_when_its_grace_is_over() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    let deaf = "trap '' TERM; echo ready; while :; do sleep 1000 & wait $!; done";
    client.post(PODS, &script_pod("a", deaf)).await.ok();
    client.until_phase("a", "Running").await;
    let path = format!("{PODS}?watch=1&fieldSelector=metadata.name%3Da");
    let mut watcher = client.watch(&path).await;
    client.delete(&format!("{PODS}/a")).await.ok();
    let last = loop {
        let event = watcher.next().await.unwrap();
        if event["type"] == "DELETED" {
            break event["object"].clone();
        }
    };
    assert_eq!(terminated(&last)["exitCode"], 137);
    assert_eq!(last["status"]["phase"], "Failed");
    fake.end().await;
}

#[tokio::test]
async fn a_pod_over_its_deadline_fails_and_stays() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    let mut pod = script_pod("a", IDLE);
    pod["spec"]["activeDeadlineSeconds"] = json!(1);
    client.post(PODS, &pod).await.ok();
    let pod = client.until_phase("a", "Failed").await;
    assert_eq!(pod["status"]["reason"], "DeadlineExceeded");
    let path = format!("{PODS}/a");
    assert_eq!(client.get(&path).await.ok()["status"]["phase"], "Failed");
    client.delete(&path).await.ok();
    client.get(&path).await.refused(404, "NotFound");
    fake.end().await;
}

#[tokio::test]
async fn memory_is_limited_for_real() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    let hog = "python3 -c 'x = bytearray(300 << 20)'";
    let mut pod = script_pod("a", &format!("exec {hog}"));
    pod["spec"]["containers"][0]["resources"] = json!({"limits": {"memory": "32Mi"}});
    client.post(PODS, &pod).await.ok();
    let pod = client.until_phase("a", "Failed").await;
    assert_eq!(terminated(&pod)["reason"], "OOMKilled");
    assert_eq!(terminated(&pod)["exitCode"], 137);
    // In an exec it is that process that goes, and the pod lives.
    let mut pod = script_pod("b", IDLE);
    pod["spec"]["containers"][0]["resources"] = json!({"limits": {"memory": "32Mi"}});
    client.post(PODS, &pod).await.ok();
    client.until_phase("b", "Running").await;
    let argv = ["sh", "-c", &format!("exec {hog}")];
    let given = client.exec("b", &argv, false).await.all().await;
    assert_eq!(given.exit_code().as_deref(), Some("137"));
    let given = client
        .exec("b", &["echo", "alive"], false)
        .await
        .all()
        .await;
    assert_eq!(given.stdout(), "alive\n");
    fake.end().await;
}

#[tokio::test]
async fn images_are_pulled_or_it_is_said_why_not() {
    let Some((fake, client, folder)) = cluster().await else {
        return;
    };
    let named = |name: &str, image: &str, policy: &str| {
        let mut pod = script_pod(name, "true");
        pod["spec"]["containers"][0]["image"] = json!(image);
        pod["spec"]["containers"][0]["imagePullPolicy"] = json!(policy);
        pod
    };
    client
        .post(PODS, &named("never", "none:1", "Never"))
        .await
        .ok();
    let pod = client
        .until("never", |pod| waiting(pod)["reason"] == "ErrImageNeverPull")
        .await;
    assert_eq!(pod["status"]["phase"], "Pending");
    let path = format!("{PODS}?watch=1&fieldSelector=metadata.name%3Dfar");
    let mut watcher = client.watch(&path).await;
    fake.set_pull(
        "far:1",
        Pull::Fails("toomanyrequests: slow down".to_owned()),
    );
    client
        .post(PODS, &named("far", "far:1", "Always"))
        .await
        .ok();
    let mut reasons = Vec::new();
    while !reasons.contains(&"ImagePullBackOff".to_owned()) {
        let event = watcher.next().await.unwrap();
        if let Some(reason) = waiting(&event["object"])["reason"].as_str() {
            let message = waiting(&event["object"])["message"]
                .as_str()
                .unwrap_or_default();
            if reason == "ErrImagePull" {
                assert!(message.contains("toomanyrequests: slow down"), "{message}");
            }
            reasons.push(reason.to_owned());
        }
    }
    reasons.dedup();
    assert_eq!(
        reasons,
        ["ContainerCreating", "ErrImagePull", "ImagePullBackOff"]
    );
    client
        .get(&format!("{PODS}/far/log"))
        .await
        .refused(400, "BadRequest");
    // The registry comes to its senses.
    let image = host_image(folder.path().join("far")).unwrap();
    fake.set_image(
        "far:1",
        Image {
            present: false,
            ..image
        },
    );
    fake.set_pull("far:1", Pull::Works);
    client.until_phase("far", "Succeeded").await;
    fake.set_pull("far:1", Pull::Hangs);
    client
        .post(PODS, &named("slow", "far:1", "Always"))
        .await
        .ok();
    fake.until(|fake| {
        let all = fake.names("events");
        let reason = |name: &str| fake.object("events", "default", name).unwrap()["reason"].clone();
        all.iter()
            .any(|(_, name)| name.starts_with("slow.") && reason(name) == "Pulling")
    })
    .await;
    // One that was never started goes, though its pull hangs.
    client.delete(&format!("{PODS}/slow")).await.ok();
    fake.until(|fake| fake.object("pods", "default", "slow").is_none())
        .await;
    fake.end().await;
}

#[tokio::test]
async fn a_pod_waits_for_what_it_refers_to() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    let mut mounted = script_pod("mounted", "cat /map/value");
    mounted["spec"]["volumes"] = json!([{"name": "map", "configMap": {"name": "late"}}]);
    mounted["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "map", "mountPath": "/map"}]);
    let mut named = script_pod("named", "echo $VALUE");
    named["spec"]["containers"][0]["env"] = json!([{"name": "VALUE", "valueFrom":
        {"configMapKeyRef": {"name": "late", "key": "value"}}}]);
    for pod in [&mounted, &named] {
        client.post(PODS, pod).await.ok();
    }
    let pod = client
        .until("named", |pod| {
            waiting(pod)["reason"] == "CreateContainerConfigError"
        })
        .await;
    assert_eq!(waiting(&pod)["message"], "configmap \"late\" not found");
    fake.until(|fake| {
        let all = fake.names("events");
        let event = |name: &str| fake.object("events", "default", name).unwrap();
        all.iter()
            .any(|(_, name)| name.starts_with("mounted.") && event(name)["reason"] == "FailedMount")
    })
    .await;
    let maps = "/api/v1/namespaces/default/configmaps";
    client.post(maps, &config_map("late", "here")).await.ok();
    for name in ["mounted", "named"] {
        client.until_phase(name, "Succeeded").await;
        assert_eq!(client.log(name).await.trim(), "here");
    }
    fake.end().await;
}

#[tokio::test]
async fn a_program_that_is_not_there_is_a_start_error() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    let mut pod = script_pod("a", "");
    pod["spec"]["containers"][0]["command"] = json!(["no-such-program"]);
    client.post(PODS, &pod).await.ok();
    let pod = client.until_phase("a", "Failed").await;
    assert_eq!(terminated(&pod)["reason"], "StartError");
    assert_eq!(terminated(&pod)["exitCode"], 128);
    let message = terminated(&pod)["message"].as_str().unwrap();
    assert!(
        message.contains("executable file not found in $PATH"),
        "{message}"
    );
    // What a container writes about its end is in its status.
    let script = "echo because > /dev/termination-log; exit 1";
    client.post(PODS, &script_pod("b", script)).await.ok();
    let pod = client.until_phase("b", "Failed").await;
    assert_eq!(terminated(&pod)["message"], "because\n");
    let mut pod = script_pod("c", "echo last words; exit 1");
    pod["spec"]["containers"][0]["terminationMessagePolicy"] = json!("FallbackToLogsOnError");
    client.post(PODS, &pod).await.ok();
    let pod = client.until_phase("c", "Failed").await;
    assert_eq!(terminated(&pod)["message"], "last words\n");
    fake.end().await;
}

#[tokio::test]
async fn pods_find_room_on_the_node_or_wait_for_it() {
    let changed = |settings: &mut kubefake::Settings| {
        settings
            .allocatable
            .insert("cpu".to_owned(), "2".to_owned());
    };
    let Some((fake, client, _folder)) = cluster_with(changed).await else {
        return;
    };
    let sized = |name: &str, cpu: &str| {
        let mut pod = script_pod(name, IDLE);
        pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": cpu}});
        pod
    };
    client.post(PODS, &sized("a", "1500m")).await.ok();
    client.until_phase("a", "Running").await;
    client.post(PODS, &sized("b", "1")).await.ok();
    let unschedulable = |pod: &Value| pod["status"]["conditions"][0]["reason"] == "Unschedulable";
    let pod = client.until("b", unschedulable).await;
    let message = pod["status"]["conditions"][0]["message"].as_str().unwrap();
    assert!(
        message.starts_with("0/1 nodes are available: 1 Insufficient cpu."),
        "{message}"
    );
    assert_eq!(events(&client, "b").await, ["FailedScheduling"]);
    client.delete(&format!("{PODS}/a")).await.ok();
    client.until_phase("b", "Running").await;
    let mut picky = script_pod("c", "true");
    picky["spec"]["nodeSelector"] = json!({"disk": "fast"});
    client.post(PODS, &picky).await.ok();
    let pod = client.until("c", unschedulable).await;
    let message = pod["status"]["conditions"][0]["message"].as_str().unwrap();
    assert!(
        message.contains("didn't match Pod's node affinity/selector"),
        "{message}"
    );
    let label = json!({"metadata": {"labels": {"disk": "fast"}}});
    let node = "/api/v1/nodes/kubefake-node";
    client.patch(node, "merge-patch", &label).await.ok();
    client.until_phase("c", "Succeeded").await;
    let cordon = json!({"spec": {"unschedulable": true}});
    client.patch(node, "merge-patch", &cordon).await.ok();
    client.post(PODS, &script_pod("d", "true")).await.ok();
    let pod = client.until("d", unschedulable).await;
    let message = pod["status"]["conditions"][0]["message"].as_str().unwrap();
    assert!(message.contains("were unschedulable"), "{message}");
    fake.end().await;
}

#[tokio::test]
async fn a_policy_without_a_way_out_leaves_none() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    let policy = json!({"metadata": {"name": "closed"}, "spec": {
        "podSelector": {"matchLabels": {"closed": "yes"}}, "policyTypes": ["Egress"]}});
    let path = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies";
    client.post(path, &policy).await.ok();
    let script = "python3 -c 'import os, socket; socket.create_connection((os.environ[\"KUBERNETES_SERVICE_HOST\"], 443), 5)'";
    let mut closed = script_pod("closed", script);
    closed["metadata"]["labels"] = json!({"closed": "yes"});
    client.post(PODS, &closed).await.ok();
    client.post(PODS, &script_pod("open", script)).await.ok();
    client.until_phase("closed", "Failed").await;
    let log = client.log("closed").await;
    assert!(log.contains("unreachable"), "{log}");
    client.until_phase("open", "Succeeded").await;
    fake.end().await;
}

#[tokio::test]
async fn a_container_that_fails_is_started_again_when_the_pod_wants_that() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    let script =
        "[ -e /keep/seen ] && { echo second; exit 0; }; touch /keep/seen; echo first; exit 1";
    let mut pod = script_pod("a", script);
    pod["spec"]["restartPolicy"] = json!("OnFailure");
    pod["spec"]["volumes"] = json!([{"name": "keep", "emptyDir": {}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "keep", "mountPath": "/keep"}]);
    client.post(PODS, &pod).await.ok();
    client
        .until("a", |pod| waiting(pod)["reason"] == "CrashLoopBackOff")
        .await;
    let pod = client.until_phase("a", "Succeeded").await;
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 1);
    assert_eq!(client.log("a").await, "second\n");
    let before = client.get(&format!("{PODS}/a/log?previous=true")).await;
    assert_eq!(before.text, "first\n");
    fake.end().await;
}

#[tokio::test]
async fn a_log_is_followed_to_its_end() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    let script = "echo early; mkfifo /go; cat /go; echo late";
    client.post(PODS, &script_pod("a", script)).await.ok();
    client.until_phase("a", "Running").await;
    let path = format!("{PODS}/a/log?follow=true");
    let response = client
        .send(http::Method::GET, &path, &[], None)
        .await
        .unwrap();
    let mut body = response.into_body();
    let mut read = String::new();
    let mut told = false;
    while let Some(frame) = http_body_util::BodyExt::frame(&mut body).await {
        let data = frame.unwrap().into_data().unwrap();
        read.push_str(std::str::from_utf8(&data).unwrap());
        if read.contains("early") && !told {
            told = true;
            let argv = ["sh", "-c", "until [ -p /go ]; do :; done; echo now > /go"];
            let given = client.exec("a", &argv, false).await.all().await;
            assert!(given.succeeded(), "{given:?}");
        }
    }
    assert_eq!(read, "early\nnow\nlate\n");
    fake.end().await;
}
