//! Makes sandboxes with work inside, and more of them for ever, until it is killed: the victim
//! of the leak test. `cargo run --release -p sandbox --example hold [N]`.

use std::{io::Write, time::Duration};

use futures::future::join_all;
use sandbox::{Exec, LocalConfig, LocalProvider, LocalSandbox, Sandbox, SandboxError, Spec};

fn spec(name: String) -> Spec {
    Spec {
        name,
        limits: sandbox::Limits {
            deadline_s: 60,
            ..Default::default()
        },
        mounts: Vec::new(),
        workspace: "/workspace".into(),
        home: "/home/agent".into(),
        env: [].into(),
        gateway_socket: None,
        gateway_port: 0,
    }
}

async fn work(sandbox: &LocalSandbox, seconds: u32) -> Result<(), SandboxError> {
    let script = format!(
        "(setsid sh -c 'while :; do date > $HOME/file; sleep 0.05; done' &) ; \
         mkfifo pipe; (cat pipe &); (trap '' TERM HUP INT; sleep 1000) & sleep {seconds}"
    );
    let exec = Exec {
        argv: ["sh", "-c", &script].map(str::to_owned).to_vec(),
        cwd: None,
        env: [].into(),
        stdin: Vec::new(),
        timeout: Duration::from_secs(100),
        output_bytes_max: 1 << 10,
        end_background: false,
    };
    sandbox.exec(exec).await.map(drop)
}

/// Holds one sandbox, or makes and destroys one after the other.
async fn hold(provider: &LocalProvider, number: usize) -> Result<(), SandboxError> {
    let churns = number % 2 == 1;
    loop {
        let sandbox = provider
            .create_local(spec(format!("hold-{number}")))
            .await?;
        work(&sandbox, if churns { 0 } else { 1000 }).await?;
        Box::new(sandbox).destroy().await;
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), SandboxError> {
    let count = std::env::args()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or(4);
    let provider = LocalProvider::start(LocalConfig::default()).await?;
    let _ = writeln!(
        std::io::stdout(),
        "warden {:?}",
        provider.warden_process_id()
    );
    let all = join_all((0..count).map(|number| hold(&provider, number))).await;
    all.into_iter().collect()
}
