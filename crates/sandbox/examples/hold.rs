//! Makes sandboxes with work inside, and more of them for ever, until it is killed: the victim
//! of the leak tests. `cargo run --release -p sandbox --example hold [N]`. They are local ones, or
//! containers of the engine `ESPALIER_HOLD_DOCKER`, or pods of the cluster that
//! `ESPALIER_HOLD_KUBECONFIG` describes, with the image `ESPALIER_HOLD_IMAGE`.

use std::time::Duration;

use futures::future::join_all;
use sandbox::{
    DockerConfig, DockerProvider, Exec, LocalConfig, LocalProvider, Provider, Sandbox,
    SandboxError, Spec,
};

fn spec(name: String) -> Spec {
    Spec {
        name,
        limits: sandbox::Limits {
            deadline_s: 60,
            ..Default::default()
        },
        ..Spec::default()
    }
}

async fn work(sandbox: &dyn Sandbox, seconds: u32) -> Result<(), SandboxError> {
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
        user: None,
    };
    sandbox.exec(exec).await.map(drop)
}

/// Holds one sandbox, or makes and destroys one after the other.
async fn hold(provider: &dyn Provider, number: usize) -> Result<(), SandboxError> {
    let churns = number % 2 == 1;
    loop {
        let sandbox = provider.create(spec(format!("hold-{number}"))).await?;
        work(&*sandbox, if churns { 0 } else { 1000 }).await?;
        sandbox.destroy().await;
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), SandboxError> {
    let count = std::env::args()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or(4);
    let provider = provider().await?;
    let all = join_all((0..count).map(|number| hold(&*provider, number))).await;
    all.into_iter().collect()
}

#[cfg(feature = "kubernetes")]
async fn of_a_cluster(kubeconfig: String) -> Result<Box<dyn Provider>, SandboxError> {
    let namespace = std::env::var("ESPALIER_HOLD_NAMESPACE").ok();
    let config = sandbox::KubernetesConfig {
        kubeconfig: Some(kubeconfig.into()),
        namespace: namespace.filter(|n| !n.is_empty()),
        image: std::env::var("ESPALIER_HOLD_IMAGE").ok(),
        cpu_request_millis: Some(10),
        memory_request_bytes: Some(16 << 20),
        network_policy: false,
        ..sandbox::KubernetesConfig::default()
    };
    let provider = sandbox::KubernetesProvider::start(config).await?;
    Ok(Box::new(provider))
}

async fn provider() -> Result<Box<dyn Provider>, SandboxError> {
    #[cfg(feature = "kubernetes")]
    if let Ok(kubeconfig) = std::env::var("ESPALIER_HOLD_KUBECONFIG") {
        return of_a_cluster(kubeconfig).await;
    }
    Ok(match std::env::var("ESPALIER_HOLD_DOCKER") {
        Ok(host) => Box::new(
            DockerProvider::start(DockerConfig {
                host: Some(host),
                image: std::env::var("ESPALIER_HOLD_IMAGE").ok(),
                ..DockerConfig::default()
            })
            .await?,
        ),
        Err(_) => Box::new(LocalProvider::start(LocalConfig::default()).await?),
    })
}
