//! The program in a folder of its own, and a gateway that it serves.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "helpers of tests"
)]

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::Value;

pub const WAIT: Duration = Duration::from_secs(60);

/// A folder for one test, and the program in it.
pub struct World {
    pub folder: tempfile::TempDir,
}

pub struct Answer {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl World {
    pub fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_espalier"));
        command.args(arguments).current_dir(self.folder.path());
        for name in ["ESPALIER_LOG", "ESPALIER_HARNESSES", "ESPALIER_ADMIN_TOKEN"] {
            command.env_remove(name);
        }
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Answer {
        let output = self
            .command(arguments)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = |bytes: &[u8]| {
            let text = String::from_utf8_lossy(bytes).into_owned();
            let folder = self.folder.path().display().to_string();
            text.replace(&folder, "FOLDER")
                .replace(&policy().display().to_string(), "POLICY")
        };
        Answer {
            code: output.status.code(),
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        }
    }

    /// What a command says when it refuses, with its exit code.
    pub fn refusal(&self, arguments: &[&str]) -> String {
        let answer = self.run(arguments);
        assert_eq!(answer.stdout, "", "nothing of a refusal belongs on stdout");
        format!("exit {}\n{}", answer.code.unwrap(), answer.stderr)
    }

    /// A recipe over the built-in policy's tokenizer, with more lines.
    pub fn recipe(&self, more: &str) {
        let folder = policy();
        self.write(
            "recipe.toml",
            &format!("[policy]\nfolder = {folder:?}\n\n{more}"),
        );
    }
}

/// The built-in policy folder.
pub fn policy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../policy")
        .canonicalize()
        .unwrap()
}

/// A served gateway.
pub struct Served {
    pub child: Child,
    pub hello: Value,
}

impl Drop for Served {
    fn drop(&mut self) {
        // Only when a test failed half-way; it has ended otherwise.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn serve(world: &World) -> Served {
    world.write(
        "replies.jsonl",
        "{\"task\": \"*\", \"content\": \"Hello.\"}\n",
    );
    serve_with(world, &[])
}

/// Serves `replies.jsonl`.
pub fn serve_with(world: &World, more: &[&str]) -> Served {
    let policy = policy().display().to_string();
    let mut child = world
        .command(&[
            "serve",
            "--engine",
            "scripted:replies.jsonl",
            "--tokenizer",
            &policy,
            "--json",
        ])
        .args([
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
            "--run",
            "served",
        ])
        .args(more)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    Served {
        child,
        hello: serde_json::from_str(&line).unwrap(),
    }
}

/// Posts JSON; status and body.
pub fn post(base: &str, path: &str, token: &str, body: &Value) -> (u16, Value) {
    let host = base.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(host).unwrap();
    stream.set_read_timeout(Some(WAIT)).unwrap();
    let body = body.to_string();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {token}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let json = &body[body.find('{').unwrap()..=body.rfind('}').unwrap()];
    (status, serde_json::from_str(json).unwrap())
}
