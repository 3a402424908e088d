//! Where the cluster is, and how to get there.

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};

use super::{config::KubernetesConfig, error::chain};
use crate::SandboxError;

fn unsupported(what: String) -> SandboxError {
    SandboxError::Unsupported {
        what,
        hint: "name a kubeconfig and a context that work (`kubectl auth can-i create pods`), or \
               run in a pod with a service account; docs/kubernetes.md"
            .to_owned(),
    }
}

/// Finds the cluster; gives its client and the namespace.
pub(super) async fn connect(config: &KubernetesConfig) -> Result<(Client, String), SandboxError> {
    let options = KubeConfigOptions {
        context: config.context.clone(),
        ..KubeConfigOptions::default()
    };
    let mut found = match (&config.kubeconfig, &config.context) {
        (Some(path), _) => {
            let file = Kubeconfig::read_from(path)
                .map_err(|e| unsupported(format!("{}: {}", path.display(), chain(&e))))?;
            Config::from_custom_kubeconfig(file, &options)
                .await
                .map_err(|e| unsupported(format!("{}: {}", path.display(), chain(&e))))?
        }
        (None, Some(context)) => Config::from_kubeconfig(&options)
            .await
            .map_err(|e| unsupported(format!("context {context}: {}", chain(&e))))?,
        (None, None) => Config::infer()
            .await
            .map_err(|e| unsupported(format!("no cluster is named: {}", chain(&e))))?,
    };
    let exceptions = ["NO_PROXY", "no_proxy"]
        .iter()
        .find_map(|name| std::env::var(name).ok())
        .unwrap_or_default();
    let host = found.cluster_url.host().unwrap_or_default();
    if found.proxy_url.is_some() && is_direct(host, &exceptions) {
        found.proxy_url = None;
    }
    let namespace = config.namespace.clone();
    let namespace = namespace.unwrap_or_else(|| found.default_namespace.clone());
    let client = Client::try_from(found).map_err(|e| unsupported(chain(&e)))?;
    Ok((client, namespace))
}

/// Whether a host is reached without the proxy of the environment: this machine always, and what
/// `NO_PROXY` lists (hosts, domains, addresses; not ranges of them). The library asks that list
/// about the proxy's own address.
fn is_direct(host: &str, exceptions: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let loopback = bare
        .parse::<std::net::IpAddr>()
        .is_ok_and(|address| address.is_loopback());
    if loopback || bare == "localhost" {
        return true;
    }
    exceptions
        .split(',')
        .map(|entry| {
            entry
                .trim()
                .trim_start_matches("*.")
                .trim_start_matches('.')
        })
        .filter(|entry| !entry.is_empty())
        .any(|entry| entry == "*" || bare == entry || bare.ends_with(&format!(".{entry}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_for_what_is_far_away() {
        for host in ["127.0.0.1", "[::1]", "localhost"] {
            assert!(is_direct(host, ""), "{host}");
        }
        let list = "10.0.0.7, .cluster.internal,*.lab";
        for host in [
            "10.0.0.7",
            "api.cluster.internal",
            "cluster.internal",
            "a.lab",
        ] {
            assert!(is_direct(host, list), "{host}");
        }
        for host in ["10.0.0.70", "api.example.org", "notcluster.internal", ""] {
            assert!(!is_direct(host, list), "{host}");
        }
        assert!(is_direct("api.example.org", "*"));
    }

    #[tokio::test]
    async fn what_is_no_kubeconfig_is_said_with_its_path() {
        let config = KubernetesConfig {
            kubeconfig: Some("/no/such/kubeconfig".into()),
            ..KubernetesConfig::default()
        };
        let error = connect(&config).await.err().unwrap().to_string();
        assert!(error.contains("/no/such/kubeconfig"), "{error}");
    }

    #[tokio::test]
    async fn a_kubeconfig_names_cluster_and_namespace() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config");
        let text = "
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]
users: [{name: u, user: {token: secret}}]
contexts:
- {name: here, context: {cluster: c, user: u, namespace: rl}}
- {name: there, context: {cluster: c, user: u, namespace: other}}
";
        std::fs::write(&path, text).unwrap();
        let mut config = KubernetesConfig {
            kubeconfig: Some(path),
            ..KubernetesConfig::default()
        };
        assert_eq!(connect(&config).await.unwrap().1, "rl");
        config.context = Some("there".to_owned());
        assert_eq!(connect(&config).await.unwrap().1, "other");
        config.namespace = Some("mine".to_owned());
        assert_eq!(connect(&config).await.unwrap().1, "mine");
        config.context = Some("nowhere".to_owned());
        let error = connect(&config).await.err().unwrap().to_string();
        assert!(error.contains("nowhere"), "{error}");
    }
}
