//! The official client of the Model Context Protocol, inside a sandbox, against our tool servers: the
//! guest's tools on standard input and output and on HTTP, and the tools over a task's services.
//! `scripts/setup.sh test` installs it, pinned, in a folder of the user's cache.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use sandbox::{
    Exec, Exit, File, GUEST_PATH, Limits, LocalConfig, LocalProvider, Mount, Provider, Sandbox,
    SandboxError,
};
use serde_json::Value;
use verify::Services;

const PACKAGES: &str = "/opt/mcp-client";
const CLIENT: &str = "/tmp/check-mcp.py";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn packages() -> PathBuf {
    let output = Command::new("sh")
        .args(["scripts/python-packages.sh", "mcp"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

fn task() -> task::Task {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join("t").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write(
        "task.toml",
        "format = 1\nid = \"t\"\nfamily = \"f\"\n[verifier]\nargv = [\"true\"]\n\
         [[services]]\nname = \"mail\"\nport = 9100\nrecords = \"messages\"\ndata = \"mail.json\"\n\
         [[services.routes]]\npath = \"/mail/messages\"\nact = \"list\"\ntool = {name = \"list_mails\", description = \"List\"}\n\
         [[mcp_servers]]\nname = \"far\"\ntransport = \"streamable-http\"\nurl = \"http://127.0.0.1:9300/mcp\"\nstart = \"/run/espalier/guest mcp --http 9300\"\n",
    );
    write("mail.json", "[{\"id\": \"m1\"}]");
    write("instruction.md", "x\n");
    write("verify/nothing", "");
    task::load_dir(&folder.path().join("t")).unwrap().remove(0)
}

async fn check(sandbox: &dyn Sandbox, arguments: &[&str]) -> Value {
    let argv = ["/usr/bin/python3", CLIENT].iter().chain(arguments);
    let output = sandbox
        .exec(Exec {
            argv: argv.map(|&word| word.to_owned()).collect(),
            cwd: None,
            env: [("PYTHONPATH".to_owned(), PACKAGES.to_owned())].into(),
            stdin: Vec::new(),
            timeout: Duration::from_secs(240),
            output_bytes_max: 1 << 20,
            end_background: true,
            user: None,
        })
        .await
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.exit, Exit::Code(0), "{arguments:?}: {errors}");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    println!("{arguments:?}: version {}", found["version"]);
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_client_uses_our_tool_servers() {
    let provider = match LocalProvider::start(LocalConfig::default()).await {
        Ok(provider) => provider,
        Err(error @ SandboxError::Unsupported { .. }) => {
            println!("skipped: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let task = task();
    let services = Services::start(&task).unwrap().unwrap();
    let mut spec = verify::spec(&task, "tool-client".to_owned(), Limits::default());
    spec.forwards = services.forwards();
    spec.mounts.push(Mount {
        source: packages(),
        target: PACKAGES.into(),
    });
    spec.files.push(File {
        path: CLIENT.into(),
        content: fs::read(root().join("scripts/check-mcp.py")).unwrap(),
        mode: 0o644,
    });
    let sandbox = provider.create(spec).await.unwrap();
    verify::prepare(&task, sandbox.as_ref()).await.unwrap();
    services.ready(&task, sandbox.as_ref()).await.unwrap();
    verify::start_tool_servers(&task, sandbox.as_ref())
        .await
        .unwrap();
    for arguments in [
        vec!["stdio", GUEST_PATH, "mcp"],
        vec!["http", "http://127.0.0.1:9300/mcp"],
    ] {
        let found = check(sandbox.as_ref(), &arguments).await;
        assert_eq!(found["version"], "2025-11-25");
        for way in ["by_itself", "by_handshake"] {
            let found = &found[way];
            assert_eq!(found["tools"].as_array().unwrap().len(), 8, "{found}");
            assert_eq!(found["write"], serde_json::json!(["ok", "ok"]));
            assert_eq!(found["search"][1], "./by-client.txt:2: two");
            assert_eq!(found["shell"], serde_json::json!(["ok", "2\nexit code 4"]));
            assert_eq!(found["todo"], serde_json::json!(["ok", "[ ] rest"]));
            assert_eq!(found["missing"][0], "error");
            assert_ne!(found["unknown"], "no error");
        }
    }
    let tools = verify::tool_servers(&task);
    let url = match &tools[1].transport {
        task::McpTransport::StreamableHttp { url } => url.clone(),
        other => panic!("{other:?}"),
    };
    let found = check(sandbox.as_ref(), &["http", &url]).await;
    for way in ["by_itself", "by_handshake"] {
        assert_eq!(found[way]["tools"], serde_json::json!(["list_mails"]));
        let said = found[way]["first"][1].as_str().unwrap();
        assert!(said.contains("m1"), "{found}");
    }
    let calls = services.audit().services["mail"].calls.len();
    assert_eq!(calls, 2, "one call each way, and none before the log began");
    sandbox.destroy().await;
    drop(services);
    provider.close().await;
}
