//! The local kind: namespaces on this machine.

use std::{
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use guest::protocol::{Capabilities, Plan};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::{
    Image, Provider, RefusalCause, Sandbox, SandboxError, Spec, guest_binary,
    inhabited::{Inhabited, Shell},
    stream::{Stream, StreamSettings},
    warden::{Made, Warden},
};

/// For the warden to say why a sandbox ended, after its stream broke.
const REASON_TIMEOUT: Duration = Duration::from_secs(2);

/// Settings of the local kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LocalConfig {
    /// Living sandboxes at a time; one more is refused with [`SandboxError::Create`].
    pub sandboxes_max: usize,
    /// Hosts that sandboxes may reach through a filtering proxy (see [`crate::Allowed`]); what each
    /// of them gets is for whoever makes it to say.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<String>,
    /// Whether these hosts may have addresses that are not of the public internet.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub egress_private: bool,
}

impl Default for LocalConfig {
    fn default() -> Self {
        Self {
            sandboxes_max: 1024,
            egress: Vec::new(),
            egress_private: false,
        }
    }
}

/// Makes sandboxes on this machine. Cheap to clone; the last clone and the last sandbox end the
/// warden.
#[derive(Debug, Clone)]
pub struct LocalProvider {
    current: Arc<Mutex<Arc<Warden>>>,
    /// Held by whoever replaces a warden that was lost.
    replacing: Arc<tokio::sync::Mutex<()>>,
    capabilities: Capabilities,
    config: LocalConfig,
}

impl LocalProvider {
    /// Starts the warden, which removes what dead ones left behind. Missing limits are logged
    /// once and named in [`LocalProvider::capabilities`]. Needs a Tokio runtime.
    ///
    /// # Errors
    /// [`SandboxError::Unsupported`].
    pub async fn start(config: LocalConfig) -> Result<Self, SandboxError> {
        let warden = Warden::start().await?;
        let degraded = &warden.capabilities().degraded;
        if !degraded.is_empty() {
            let names: Vec<_> = degraded.iter().map(|d| d.name.as_str()).collect();
            tracing::warn!(
                modes = names.join(", "),
                "sandboxes are limited in degraded modes; `espalier doctor` says what that costs"
            );
        }
        let capabilities = warden.capabilities().clone();
        Ok(Self {
            current: Arc::new(Mutex::new(warden)),
            replacing: Arc::default(),
            capabilities,
            config,
        })
    }

    fn current(&self) -> Arc<Warden> {
        Arc::clone(&self.current.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The warden, or a new one when it was killed: that costs its sandboxes, not the run.
    async fn warden(&self) -> Result<Arc<Warden>, SandboxError> {
        let _replacing = self.replacing.lock().await;
        let warden = self.current();
        let Some(reason) = warden.lost() else {
            return Ok(warden);
        };
        tracing::warn!(reason, "starting a new warden");
        let warden = Warden::start().await?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&warden);
        Ok(warden)
    }

    /// How sandboxes are limited on this machine, and what is missing.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// The process id of the warden, for whoever watches processes.
    #[must_use]
    pub fn warden_process_id(&self) -> Option<u32> {
        self.current().process_id()
    }

    /// Ends the warden and waits until it has cleaned up. Sandboxes must have been dropped; not
    /// calling this leaves nothing behind either, only a little later.
    pub async fn close(self) {
        let warden = self.current();
        drop(self);
        warden.close().await;
    }
}

fn plan(spec: &Spec) -> Plan {
    let limits = &spec.limits;
    Plan {
        memory_bytes: limits.memory_bytes,
        pids: limits.pids,
        cpu_cores: limits.cpu_cores,
        disk_bytes: limits.disk_bytes,
        deadline_s: limits.deadline_s,
        mounts: spec
            .mounts
            .iter()
            .map(|m| (m.source.clone(), m.target.clone()))
            .collect(),
        rootfs: spec.image.as_ref().map(Into::into),
        workspace: spec.workspace.clone(),
        home: spec.home.clone(),
        forwards: spec.all_forwards(),
    }
}

#[async_trait]
impl Provider for LocalProvider {
    async fn create(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        if let Some(image) = &spec.image {
            check_image(&spec.name, image)?;
        }
        crate::check(&spec)?;
        let failed = |reason: String| SandboxError::Create {
            name: spec.name.clone(),
            reason,
        };
        let warden = self.warden().await?;
        if warden.living() >= self.config.sandboxes_max {
            return Err(failed(format!(
                "{} sandboxes live already; raise sandboxes_max or run fewer at a time",
                self.config.sandboxes_max
            )));
        }
        let (ours, theirs) =
            UnixStream::pair().map_err(|e| failed(format!("making its control stream: {e}")))?;
        let made = warden
            .make(&spec.name, plan(&spec), OwnedFd::from(theirs))
            .await?;
        let ours = ours
            .set_nonblocking(true)
            .and_then(|()| tokio::net::UnixStream::from_std(ours))
            .map_err(|e| failed(format!("watching its control stream: {e}")))?;
        let (reader, writer) = ours.into_split();
        let (stream, hello) =
            Stream::start(reader, writer, StreamSettings::default(), &warden.tasks);
        Ok(Box::new(
            Inhabited::start(spec, stream, hello, Box::new(made)).await?,
        ))
    }
}

/// The folder of an unpacked root file system, or the reason why not.
fn check_image(name: &str, image: &str) -> Result<(), SandboxError> {
    let folder = std::path::Path::new(image);
    if !folder.is_absolute() {
        return Err(SandboxError::Unsupported {
            what: format!("image {image}: the kind local has no images by name"),
            hint: "name the folder of an unpacked root file system, use the kind docker, or leave \
                   `image` out"
                .to_owned(),
        });
    }
    if !folder.is_dir() {
        return Err(SandboxError::Refused {
            name: name.to_owned(),
            cause: RefusalCause::Image,
            reason: format!("{image} is no folder here"),
            hint: "unpack an image there, for example with `docker export`".to_owned(),
        });
    }
    Ok(())
}

#[async_trait]
impl Shell for Made {
    async fn end_reason(&self) -> Option<String> {
        let mut ended = self.ended.clone();
        match timeout(REASON_TIMEOUT, ended.wait_for(Option::is_some)).await {
            Ok(Ok(reason)) => reason.clone(),
            _ => None,
        }
    }

    fn memory_kills(&self) -> u64 {
        let Some(path) = &self.memory_events else {
            return 0;
        };
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
            .unwrap_or(0)
    }

    fn memory_peak_bytes(&self) -> Option<u64> {
        let group = self.memory_events.as_ref()?.parent()?;
        ["memory.peak", "memory.max_usage_in_bytes"]
            .iter()
            .find_map(|name| std::fs::read_to_string(group.join(name)).ok())
            .and_then(|text| text.trim().parse().ok())
    }

    fn image(&self) -> Image {
        Image {
            kind: "local".to_owned(),
            digest: guest_binary::image_digest().to_owned(),
        }
    }

    fn users_hint(&self) -> String {
        match &self.one_user {
            Some(found) => format!(
                "{found}: run as root, or install newuidmap and newgidmap (package uidmap) and \
                 give this user ranges in /etc/subuid and /etc/subgid (usermod --add-subuids \
                 100000-165535 --add-subgids 100000-165535 NAME); `espalier doctor` shows it"
            ),
            None => "name a user and groups with numbers that the sandbox has".to_owned(),
        }
    }

    async fn destroy(self: Box<Self>) {
        (*self).destroy().await;
    }
}
