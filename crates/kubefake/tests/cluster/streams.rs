//! Exec and attach.

use serde_json::json;

use crate::support::{Given, IDLE, PODS, cluster, exec_path, script_pod};

#[tokio::test]
async fn a_process_in_a_pod_has_its_streams_and_its_exit_code() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    client.post(PODS, &script_pod("a", IDLE)).await.ok();
    client.until_phase("a", "Running").await;
    let script = "echo out; echo err >&2; exit 5";
    let given = client
        .exec("a", &["sh", "-c", script], false)
        .await
        .all()
        .await;
    assert_eq!(given.stdout(), "out\n");
    assert_eq!(given.stderr, b"err\n");
    assert_eq!(given.exit_code().as_deref(), Some("5"));
    assert!(given.closed, "it says goodbye");
    let given = client.exec("a", &["true"], false).await.all().await;
    assert!(given.succeeded(), "{given:?}");
    // Much in both directions, and the end of input is the end of input.
    let mut session = client.exec("a", &["sha256sum"], true).await;
    let megabyte: Vec<u8> = (0..1 << 20).map(|at| (at * 7 % 251) as u8).collect();
    for piece in megabyte.chunks(30_000) {
        session.write(piece).await;
    }
    session.end_input().await;
    let given = session.all().await;
    assert!(given.succeeded(), "{given:?}");
    // Of the same bytes, by another program.
    let expected = "import hashlib; print(hashlib.sha256(bytes(i * 7 % 251 for i in range(1 << 20))).hexdigest())";
    let other = client
        .exec("a", &["python3", "-c", expected], false)
        .await
        .all()
        .await;
    let digest = given.stdout().split_whitespace().next().unwrap().to_owned();
    assert_eq!(digest, other.stdout().trim());
    let zeros = ["head", "-c", "3000000", "/dev/zero"];
    let given = client.exec("a", &zeros, false).await.all().await;
    assert_eq!(given.stdout.len(), 3_000_000);
    fake.end().await;
}

#[tokio::test]
async fn what_cannot_be_run_is_said_on_the_status_channel_or_before() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    client.post(PODS, &script_pod("a", IDLE)).await.ok();
    client.until_phase("a", "Running").await;
    let given = client
        .exec("a", &["no-such-program"], false)
        .await
        .all()
        .await;
    let status = given.status.unwrap();
    assert_eq!(status["status"], "Failure");
    assert_eq!(status["reason"], "InternalError");
    let message = status["message"].as_str().unwrap();
    assert!(
        message.contains("executable file not found in $PATH"),
        "{message}"
    );
    assert!(given.stdout.is_empty() && given.stderr.is_empty());
    for (path, code) in [
        (exec_path("none", &["true"], false), 404),
        (exec_path("a", &[], false), 400),
        (format!("{PODS}/a/exec?command=true"), 400),
        (
            format!("{PODS}/a/exec?command=true&stdout=1&container=none"),
            400,
        ),
        (format!("{PODS}/a/exec?command=true&stdout=1&tty=1"), 400),
    ] {
        let refused = client.session(&path, "v5.channel.k8s.io").await;
        assert_eq!(refused.err(), Some(code), "{path}");
    }
    let path = exec_path("a", &["true"], false);
    assert_eq!(
        client.session(&path, "v9.channel.k8s.io").await.err(),
        Some(400)
    );
    client.get(&path).await.refused(400, "BadRequest");
    client.post(PODS, &script_pod("over", "true")).await.ok();
    client.until_phase("over", "Succeeded").await;
    let path = exec_path("over", &["true"], false);
    assert_eq!(
        client.session(&path, "v5.channel.k8s.io").await.err(),
        Some(400)
    );
    fake.end().await;
}

#[tokio::test]
async fn in_version_4_nothing_ends_standard_input() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    client.post(PODS, &script_pod("a", IDLE)).await.ok();
    client.until_phase("a", "Running").await;
    let path = exec_path("a", &["cat"], true);
    let mut session = client.session(&path, "v4.channel.k8s.io").await.unwrap();
    let mut given = Given::default();
    session.write(b"one\n").await;
    session.until_said(&mut given, "one\n").await;
    // What would end it in version 5 is not even looked at.
    session.end_input().await;
    session.write(b"two\n").await;
    session.until_said(&mut given, "two\n").await;
    assert!(given.status.is_none());
    drop(session);
    let path = exec_path("a", &["sh", "-c", "exit 7"], false);
    let session = client.session(&path, "v4.channel.k8s.io").await.unwrap();
    assert_eq!(session.all().await.exit_code().as_deref(), Some("7"));
    fake.end().await;
}

#[tokio::test]
async fn a_process_goes_on_when_its_client_is_gone() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    client
        .post(
            PODS,
            &script_pod("a", "mkfifo /go; mkfifo /done; cat /done"),
        )
        .await
        .ok();
    client.until_phase("a", "Running").await;
    let script = "echo here; until [ -p /done ]; do :; done; cat /go; echo survived > /done";
    let mut session = client.exec("a", &["sh", "-c", script], false).await;
    let mut given = Given::default();
    session.until_said(&mut given, "here\n").await;
    drop(session);
    let argv = ["sh", "-c", "echo > /go"];
    let given = client.exec("a", &argv, false).await.all().await;
    assert!(given.succeeded(), "{given:?}");
    client.until_phase("a", "Succeeded").await;
    assert_eq!(client.log("a").await, "survived\n");
    fake.end().await;
}

#[tokio::test]
async fn a_stream_that_is_cut_just_breaks() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    client.post(PODS, &script_pod("a", IDLE)).await.ok();
    client.until_phase("a", "Running").await;
    let mut session = client
        .exec("a", &["sh", "-c", "echo half; cat"], true)
        .await;
    let mut given = Given::default();
    session.until_said(&mut given, "half\n").await;
    assert_eq!(fake.cut_streams(), 1);
    while session.step(&mut given).await {}
    assert!(given.status.is_none() && !given.closed, "{given:?}");
    fake.end().await;
}

#[tokio::test]
async fn who_is_attached_speaks_with_the_first_process() {
    let Some((fake, client, _folder)) = cluster().await else {
        return;
    };
    let script = "while read line; do echo \"heard $line\"; done; echo over; exit 4";
    let mut pod = script_pod("a", script);
    pod["spec"]["containers"][0]["stdin"] = json!(true);
    pod["spec"]["containers"][0]["stdinOnce"] = json!(true);
    client.post(PODS, &pod).await.ok();
    client.until_phase("a", "Running").await;
    let path = format!("{PODS}/a/attach?stdin=1&stdout=1&stderr=1");
    let mut session = client.session(&path, "v5.channel.k8s.io").await.unwrap();
    let mut given = Given::default();
    session.write(b"me\n").await;
    session.until_said(&mut given, "heard me\n").await;
    // Two may listen.
    let path = format!("{PODS}/a/attach?stdout=1");
    let mut other = client.session(&path, "v5.channel.k8s.io").await.unwrap();
    let mut also = Given::default();
    // The greeting: it is attached now.
    other.step(&mut also).await;
    session.write(b"both\n").await;
    session.until_said(&mut given, "heard both\n").await;
    other.until_said(&mut also, "heard both\n").await;
    session.end_input().await;
    while session.step(&mut given).await {}
    assert_eq!(given.stdout(), "heard me\nheard both\nover\n");
    assert!(given.succeeded() && given.closed, "{given:?}");
    let pod = client.until_phase("a", "Failed").await;
    let state = &pod["status"]["containerStatuses"][0]["state"];
    assert_eq!(state["terminated"]["exitCode"], 4);
    assert_eq!(client.log("a").await, given.stdout());
    fake.end().await;
}
