//! Which kind of sandbox: what a recipe chooses.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    Check, DockerConfig, DockerProvider, LocalConfig, LocalProvider, Provider, SandboxError,
};
#[cfg(feature = "kubernetes")]
use crate::{KubernetesConfig, KubernetesProvider};

/// A kind and its settings, as in `kind = "docker"` with the keys of [`DockerConfig`] beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum SandboxConfig {
    /// Namespaces on this machine.
    Local(LocalConfig),
    /// Containers of a Docker-compatible engine.
    Docker(DockerConfig),
    /// Pods of a cluster.
    #[cfg(feature = "kubernetes")]
    Kubernetes(Box<KubernetesConfig>),
}

impl Default for SandboxConfig {
    fn default() -> Self {
        Self::Local(LocalConfig::default())
    }
}

impl SandboxConfig {
    /// Hosts that sandboxes may reach, and whether their addresses may be private.
    #[must_use]
    pub fn egress(&self) -> (&[String], bool) {
        match self {
            Self::Local(config) => (&config.egress, config.egress_private),
            Self::Docker(config) => (&config.egress, config.egress_private),
            #[cfg(feature = "kubernetes")]
            Self::Kubernetes(config) => (&config.egress, config.egress_private),
        }
    }
}

/// Starts the provider of a kind. Needs a Tokio runtime.
///
/// # Errors
/// [`SandboxError::Unsupported`].
pub async fn start(config: &SandboxConfig) -> Result<Arc<dyn Provider>, SandboxError> {
    Ok(match config {
        SandboxConfig::Local(config) => Arc::new(LocalProvider::start(config.clone()).await?),
        SandboxConfig::Docker(config) => Arc::new(DockerProvider::start(config.clone()).await?),
        #[cfg(feature = "kubernetes")]
        SandboxConfig::Kubernetes(config) => {
            Arc::new(KubernetesProvider::start((**config).clone()).await?)
        }
    })
}

/// Looks at what a kind needs beside this machine; nothing for the local one. Changes nothing.
pub async fn doctor_kind(config: &SandboxConfig) -> Vec<Check> {
    match config {
        SandboxConfig::Local(_) => Vec::new(),
        SandboxConfig::Docker(config) => crate::docker_doctor(config).await,
        #[cfg(feature = "kubernetes")]
        SandboxConfig::Kubernetes(config) => crate::kubernetes::doctor(config).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_names_a_kind_and_its_settings() {
        let read = |text: serde_json::Value| serde_json::from_value::<SandboxConfig>(text);
        let config = read(serde_json::json!({"kind": "docker", "image": "debian:12"})).unwrap();
        let SandboxConfig::Docker(config) = config else {
            panic!("{config:?}");
        };
        assert_eq!(config.image.as_deref(), Some("debian:12"));
        let wrong = read(serde_json::json!({"kind": "docker", "imgae": "x"})).unwrap_err();
        assert!(wrong.to_string().contains("imgae"), "{wrong}");
        let wrong = read(serde_json::json!({"kind": "podman"})).unwrap_err();
        assert!(wrong.to_string().contains("docker"), "{wrong}");
        assert!(read(serde_json::json!({"kind": "local"})).is_ok());
    }

    #[cfg(feature = "kubernetes")]
    #[test]
    fn a_recipe_describes_a_pool() {
        let text = r#"
            kind = "kubernetes"
            namespace = "rl"
            image = "debian:12"
            pull = "always"
            node_selector = { pool = "rollouts" }
            tolerations = [{ key = "rollouts", effect = "NoSchedule" }]
            volumes = [{ source = "/bundles", claim = "bundles" }]
        "#;
        let SandboxConfig::Kubernetes(config) = toml::from_str(text).unwrap() else {
            panic!("another kind");
        };
        assert_eq!(config.namespace.as_deref(), Some("rl"));
        assert_eq!(config.pull, crate::PullPolicy::Always);
        assert_eq!(config.volumes[0].claim, "bundles");
        let wrong = toml::from_str::<SandboxConfig>("kind = \"kubernetes\"\nnamespcae = \"x\"");
        assert!(wrong.unwrap_err().to_string().contains("namespcae"));
    }
}
