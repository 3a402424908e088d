//! Clients that are not ours: `kubectl`, and the official Python client. `scripts/setup.sh test`
//! installs them.

use std::{
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::LazyLock,
};

use kubefake::Fake;
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::Command,
    time::timeout,
};

use crate::support::{IDLE, PATIENCE, cluster, control_plane, script_pod};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Where the packages are; installed if they are not.
static PACKAGES: LazyLock<PathBuf> = LazyLock::new(|| {
    let output = std::process::Command::new("sh")
        .args(["scripts/python-packages.sh", "kubernetes"])
        .current_dir(root())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8(output.stdout).unwrap().trim().into()
});

struct Kubectl {
    config: PathBuf,
    home: tempfile::TempDir,
}

impl Kubectl {
    fn new(fake: &Fake) -> Self {
        Self {
            config: fake.kubeconfig(),
            home: tempfile::tempdir().unwrap(),
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(PACKAGES.join("bin/kubectl"));
        command
            .env_clear()
            .env("HOME", self.home.path())
            .env("KUBECONFIG", &self.config)
            .env("PATH", std::env::var_os("PATH").unwrap())
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    async fn output(&self, arguments: &[&str], input: Option<&str>) -> Output {
        let mut command = self.command(arguments);
        if input.is_some() {
            command.stdin(Stdio::piped());
        }
        let mut child = command.spawn().unwrap();
        if let (Some(input), Some(mut stdin)) = (input, child.stdin.take()) {
            stdin.write_all(input.as_bytes()).await.unwrap();
        }
        let ended = timeout(PATIENCE, child.wait_with_output()).await;
        ended
            .unwrap_or_else(|_| panic!("no end: kubectl {arguments:?}"))
            .unwrap()
    }

    /// Succeeds; gives standard output.
    async fn run(&self, arguments: &[&str]) -> String {
        self.run_with(arguments, None).await
    }

    async fn run_with(&self, arguments: &[&str], input: Option<&str>) -> String {
        let output = self.output(arguments, input).await;
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "kubectl {arguments:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Fails with this exit code; gives standard error.
    async fn fails(&self, arguments: &[&str], input: Option<&str>, code: i32) -> String {
        let output = self.output(arguments, input).await;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(
            output.status.code(),
            Some(code),
            "kubectl {arguments:?}: {said}"
        );
        said
    }
}

#[tokio::test]
async fn kubectl_finds_its_way_and_writes_objects() {
    let (fake, client) = control_plane(|_| {}).await;
    let kubectl = Kubectl::new(&fake);
    assert!(kubectl.run(&["version"]).await.contains("v1.36.2"));
    let names = kubectl.run(&["api-resources", "-o", "name"]).await;
    assert!(names.contains("leases.coordination.k8s.io"), "{names}");
    // Apply: creates, changes, and says when there is nothing to do.
    let map = |value: &str| {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}, "data": {"a": value}})
            .to_string()
    };
    for (value, expected) in [("1", "created"), ("2", "configured"), ("2", "unchanged")] {
        let told = kubectl
            .run_with(&["apply", "-f", "-"], Some(&map(value)))
            .await;
        assert_eq!(told, format!("configmap/m {expected}\n"));
    }
    let value = ["get", "configmap", "m", "-o", "jsonpath={.data.a}"];
    assert_eq!(kubectl.run(&value).await, "2");
    // A strategic merge of a pod's labels, and of its list of containers.
    let mut pod = script_pod("p", "true");
    kubectl
        .run_with(&["apply", "-f", "-"], Some(&pod.to_string()))
        .await;
    pod["metadata"]["labels"] = json!({"b": "c"});
    pod["spec"]["containers"][0]["image"] = json!("host:2");
    let told = kubectl
        .run_with(&["apply", "-f", "-"], Some(&pod.to_string()))
        .await;
    assert_eq!(told, "pod/p configured\n");
    let now = client.get("/api/v1/namespaces/default/pods/p").await.ok();
    assert_eq!(now["metadata"]["labels"], json!({"b": "c"}));
    assert_eq!(now["spec"]["containers"][0]["image"], "host:2");
    assert_eq!(now["spec"]["containers"][0]["command"][0], "sh");
    let pods = kubectl.run(&["get", "pods"]).await;
    let words: Vec<Vec<&str>> = pods
        .lines()
        .map(|l| l.split_whitespace().collect())
        .collect();
    assert_eq!(words[0], ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]);
    assert_eq!(words[1][..4], ["p", "0/1", "Pending", "0"]);
    kubectl.run(&["label", "pod", "p", "x=y"]).await;
    let chosen = kubectl
        .run(&["get", "pods", "-l", "x=y", "-o", "name"])
        .await;
    assert_eq!(chosen, "pod/p\n");
    // Refusals arrive as what they are.
    let said = kubectl.fails(&["get", "pod", "none"], None, 1).await;
    assert_eq!(
        said,
        "Error from server (NotFound): pods \"none\" not found\n"
    );
    pod["metadata"]["name"] = json!("q");
    pod["spec"]["contaners"] = json!([]);
    pod["spec"]["nonsense"] = json!(1);
    let said = kubectl
        .fails(&["create", "-f", "-"], Some(&pod.to_string()), 1)
        .await;
    assert!(
        said.contains("strict decoding error: unknown field \"spec.nonsense\""),
        "{said}"
    );
    pod["spec"] = json!({"containers": [{"name": "main", "image": ""}]});
    let said = kubectl
        .fails(&["create", "-f", "-"], Some(&pod.to_string()), 1)
        .await;
    assert!(
        said.contains("spec.containers[0].image: Required value"),
        "{said}"
    );
    let said = kubectl
        .fails(&["apply", "--server-side", "-f", "-"], Some(&map("3")), 1)
        .await;
    assert!(
        said.contains("kubefake does not do this: server-side apply"),
        "{said}"
    );
    let told = kubectl.run(&["delete", "configmap/m", "pod/p"]).await;
    assert!(
        told.contains("configmap \"m\" deleted") && told.contains("pod \"p\" deleted"),
        "{told}"
    );
    // `kubectl create namespace` speaks protobuf, which this server refuses in words.
    let file = kubectl.home.path().join("namespace.json");
    let namespace = r#"{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}}"#;
    std::fs::write(&file, namespace).unwrap();
    kubectl.run(&["create", "-f", file.to_str().unwrap()]).await;
    kubectl.run(&["delete", "namespace", "n"]).await;
    assert!(
        fake.object("namespaces", "", "n").is_none(),
        "it waited for the end"
    );
    fake.end().await;
}

#[tokio::test]
async fn kubectl_runs_pods_and_gets_into_them() {
    let Some((fake, _, _folder)) = cluster().await else {
        return;
    };
    let kubectl = Kubectl::new(&fake);
    let script = format!("echo hello; {IDLE}");
    let pod = script_pod("p", &script).to_string();
    kubectl.run_with(&["create", "-f", "-"], Some(&pod)).await;
    let mut watching = kubectl
        .command(&["get", "pods", "--watch", "--output-watch-events"])
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let mut kinds: Vec<String> = Vec::new();
    let mut watched = async |last: &str| {
        while kinds.last().is_none_or(|kind| kind != last) {
            let line = timeout(PATIENCE, lines.next_line()).await;
            let line = line.expect("a line in time").unwrap();
            let line = line.expect("the watch goes on");
            let kind = line.split_whitespace().next().unwrap_or_default();
            kinds.push(kind.to_owned());
        }
        kinds.dedup();
        kinds.clone()
    };
    assert_eq!(watched("ADDED").await, ["EVENT", "ADDED"]);
    let told = kubectl
        .run(&["wait", "--for=condition=Ready", "pod/p", "--timeout=80s"])
        .await;
    assert_eq!(told, "pod/p condition met\n");
    // Followed, for it may run and not have written yet.
    let log = kubectl.run(&["logs", "-f", "p", "--limit-bytes=6"]).await;
    assert_eq!(log, "hello\n");
    let out = kubectl
        .run(&["exec", "p", "--", "sh", "-c", "echo $0 to you", "hello"])
        .await;
    assert_eq!(out, "hello to you\n");
    let out = kubectl
        .run_with(&["exec", "-i", "p", "--", "wc", "-c"], Some("12345"))
        .await;
    assert_eq!(out.trim(), "5");
    let said = kubectl
        .fails(&["exec", "p", "--", "sh", "-c", "exit 7"], None, 7)
        .await;
    assert!(said.contains("exit code 7"), "{said}");
    let said = kubectl
        .fails(&["exec", "p", "--", "nonsense"], None, 1)
        .await;
    assert!(said.contains("executable file not found"), "{said}");
    // A folder there and back again.
    let folder = kubectl.home.path().join("folder");
    std::fs::create_dir_all(folder.join("deep")).unwrap();
    std::fs::write(folder.join("deep/file"), "text").unwrap();
    let there = folder.display().to_string();
    kubectl.run(&["cp", &there, "p:/tmp/there"]).await;
    let back = kubectl.home.path().join("back");
    kubectl
        .run(&["cp", "p:/tmp/there", back.to_str().unwrap()])
        .await;
    let text = std::fs::read_to_string(back.join("deep/file")).unwrap();
    assert_eq!(text, "text");
    let told = kubectl.run(&["describe", "pod", "p"]).await;
    for word in ["Scheduled", "Pulled", "Created", "Started", "kubefake-node"] {
        assert!(told.contains(word), "no {word} in {told}");
    }
    kubectl.run(&["delete", "pod", "p"]).await;
    assert!(
        fake.object("pods", "default", "p").is_none(),
        "it waited for the end"
    );
    // The watch has seen all of it.
    assert_eq!(
        watched("DELETED").await,
        ["EVENT", "ADDED", "MODIFIED", "DELETED"]
    );
    watching.kill().await.unwrap();
    fake.end().await;
}

#[tokio::test]
async fn the_official_python_client_understands_every_answer() {
    let Some((fake, _, _folder)) = cluster().await else {
        return;
    };
    let mut command = Command::new("python3");
    command
        .arg(root().join("crates/kubefake/tests/client.py"))
        .arg(fake.kubeconfig())
        .env("PYTHONPATH", &*PACKAGES)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .kill_on_drop(true);
    let output = timeout(PATIENCE, command.output())
        .await
        .expect("an end in time")
        .unwrap();
    let (told, said) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{told}\n{said}");
    assert!(told.ends_with("all is well\n"), "{told}");
    assert!(fake.names("pods").is_empty(), "it deleted its pods");
    fake.end().await;
}
