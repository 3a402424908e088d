//! The official SDKs of OpenAI, Anthropic and Google parse every reply of the gateway: text,
//! reasoning, two tool calls at once, streamed and not, the turn after it, and errors.
//! `scripts/setup.sh test` installs them, pinned, in a folder of the user's cache.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

const REPLIES: &str = r#"{"task": "*", "turn": 0, "content": "Looking – “now”.", "reasoning": "I look first.", "tool_calls": [{"name": "bash", "arguments": {"command": "ls -la"}}, {"name": "bash", "arguments": {"command": "printf '%s\\n' \"ü\"", "timeout": 1.5}}]}
{"task": "*", "turn": 1, "content": "Two files."}
"#;

/// A gateway that is ended with the test.
struct Served {
    child: Child,
    hello: String,
    _folder: tempfile::TempDir,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Where setup puts the packages; it prints the folder when asked.
fn packages() -> Option<PathBuf> {
    let output = Command::new("sh")
        .arg(root().join("scripts/sdks.sh"))
        .arg("where")
        .output()
        .unwrap();
    let folder = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
    if folder.join("complete").is_file() {
        return Some(folder);
    }
    println!(
        "skipped: no SDKs in {}; run: sh scripts/sdks.sh install",
        folder.display()
    );
    None
}

fn serve() -> Served {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("replies.jsonl"), REPLIES).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_espalier"))
        .args(["serve", "--engine", "scripted:replies.jsonl", "--json"])
        .args(["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
        .args(["--run", "served", "--tokenizer"])
        .arg(root().join("policy").canonicalize().unwrap())
        .current_dir(folder.path())
        .env_remove("ESPALIER_ADMIN_TOKEN")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut hello = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut hello)
        .unwrap();
    Served {
        child,
        hello,
        _folder: folder,
    }
}

/// Runs a client to its end and counts what it has proven.
fn prove(command: &mut Command, count: usize) {
    let output = command
        .env("NO_PROXY", "127.0.0.1")
        .env_remove("HTTP_PROXY")
        .env_remove("HTTPS_PROXY")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let proven = text
        .lines()
        .filter(|line| line.starts_with("proven "))
        .count();
    assert_eq!(proven, count, "{text}");
}

#[test]
fn python() {
    let Some(folder) = packages() else { return };
    let served = serve();
    let client = root().join("crates/espalier/tests/sdks/client.py");
    prove(
        Command::new("/usr/bin/python3")
            .arg(client)
            .arg(&served.hello)
            .env("PYTHONPATH", folder.join("site")),
        12,
    );
}

#[test]
fn typescript() {
    let Some(folder) = packages() else { return };
    let served = serve();
    let client = root().join("crates/espalier/tests/sdks/client.mjs");
    prove(
        Command::new("node")
            .arg(client)
            .arg(&served.hello)
            .arg(folder),
        10,
    );
}
