//! Which kind of sandbox: what a recipe chooses.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{DockerConfig, DockerProvider, LocalConfig, LocalProvider, Provider, SandboxError};

/// A kind and its settings, as in `kind = "docker"` with the keys of [`DockerConfig`] beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum SandboxConfig {
    /// Namespaces on this machine.
    Local(LocalConfig),
    /// Containers of a Docker-compatible engine.
    Docker(DockerConfig),
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
    })
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
}
