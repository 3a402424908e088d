//! Nothing outlives the cluster, or the process that it is in.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Command, Stdio},
};

use serde_json::json;

use crate::support::{Client, IDLE, PODS, can_run_pods, cluster, script_pod};

/// Control groups of a process's clusters, on all hierarchies.
fn groups(pid: u32) -> Vec<String> {
    let mut found = Vec::new();
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = fs::read_dir(root).into_iter().flatten().flatten();
    let folders = hierarchies.map(|e| e.path()).chain([root.to_owned()]);
    for folder in folders {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(&format!("kubefake-{pid}-")) {
                found.push(entry.path().display().to_string());
            }
        }
    }
    found
}

/// A pod that holds a pipe of the host's open for as long as it lives.
fn holder(folder: &Path) -> serde_json::Value {
    let mut pod = script_pod("holder", &format!("exec 9> /host/pipe; {IDLE}"));
    pod["spec"]["volumes"] = json!([{"name": "host", "hostPath": {"path": folder}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "host", "mountPath": "/host"}]);
    pod
}

fn make_pipe(folder: &Path) {
    let made = Command::new("mkfifo").arg(folder.join("pipe")).status();
    assert!(made.unwrap().success());
}

/// Our end of a pipe that a running pod holds open.
async fn held(client: &Client, folder: &Path) -> fs::File {
    make_pipe(folder);
    client.post(PODS, &holder(folder)).await.ok();
    let pipe = folder.join("pipe");
    // Opens when the pod has opened its end.
    let pipe = tokio::task::spawn_blocking(|| fs::File::open(pipe));
    let pipe = pipe.await.unwrap().unwrap();
    client.until_phase("holder", "Running").await;
    pipe
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_when_a_cluster_ends() {
    let Some((fake, client, folder)) = cluster().await else {
        return;
    };
    let mut pipe = held(&client, folder.path()).await;
    assert!(!groups(std::process::id()).is_empty());
    let own = fake.folder().to_owned();
    fake.end().await;
    // The end of the pipe is the end of the last process that held it.
    let read = tokio::task::spawn_blocking(move || pipe.read(&mut [0]))
        .await
        .unwrap();
    assert_eq!(read.unwrap(), 0);
    assert_eq!(groups(std::process::id()), Vec::<String>::new());
    assert!(!own.exists());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(own.to_str().unwrap()), "{mounts}");
}

#[tokio::test(flavor = "multi_thread")]
async fn by_force_deleted_pods_die_too() {
    let Some((fake, client, folder)) = cluster().await else {
        return;
    };
    let mut pipe = held(&client, folder.path()).await;
    client
        .delete(&format!("{PODS}/holder?gracePeriodSeconds=0"))
        .await
        .ok();
    client
        .get(&format!("{PODS}/holder"))
        .await
        .refused(404, "NotFound");
    let read = tokio::task::spawn_blocking(move || pipe.read(&mut [0]))
        .await
        .unwrap();
    assert_eq!(read.unwrap(), 0);
    fake.end().await;
}

/// Names a folder for the process that is to be killed, in which alone this test does something.
const VICTIM: &str = "KUBEFAKE_TEST_VICTIM";

#[tokio::test]
async fn a_cluster_that_is_killed() {
    let Some(folder) = std::env::var_os(VICTIM) else {
        // By itself this is nothing: the test below starts it and kills it.
        return;
    };
    let (_fake, client, _folder) = cluster().await.unwrap();
    client.post(PODS, &holder(Path::new(&folder))).await.ok();
    client.until_phase("holder", "Running").await;
    println!("\nready");
    std::future::pending::<()>().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_when_the_process_is_killed() {
    if !can_run_pods() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    make_pipe(folder.path());
    let path = folder.path().to_owned();
    tokio::task::spawn_blocking(move || {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "leaks::a_cluster_that_is_killed", "--nocapture"])
            .env(VICTIM, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut pipe = fs::File::open(path.join("pipe")).unwrap();
        let lines = BufReader::new(victim.stdout.take().unwrap()).lines();
        let ready = lines
            .map_while(Result::ok)
            .any(|line| line.contains("ready"));
        assert!(ready, "the victim ended by itself");
        victim.kill().unwrap();
        victim.wait().unwrap();
        assert_eq!(pipe.read(&mut [0]).unwrap(), 0);
        assert!(
            !groups(victim.id()).is_empty(),
            "control groups do not go by themselves"
        );
        // The next cluster removes what the killed one left.
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let (fake, ..) = cluster().await.unwrap();
            assert_eq!(groups(victim.id()), Vec::<String>::new());
            fake.end().await;
        });
    })
    .await
    .unwrap();
}
