//! The kind `docker`: containers of a Docker-compatible engine (dockerd, podman), over its API.
//!
//! A container's first process is our guest, and its standard input and
//! output are the control stream (attached, not logged). So nothing is shared with the host but
//! the mounts, the engine may be on another machine, and the container ends when we do: the engine
//! closes its standard input, the guest ends, the engine removes it. Should even that not happen,
//! the guest ends when it heard nothing for [`HEARTBEAT_S`]. Containers that were made and never
//! started are found by their labels (`janitor`).
//!
//! The guest comes as a layer on top of the image, made once for each image and kept by the engine
//! as `espalier-guest:…`: putting it into every container costs more, and podman 4 loses its way
//! when it mounts a container for that and for the start at nearly the same time.
//!
//! Network: none at all; connections to the gateway travel on the control stream.
//!
//! Files: workspace, HOME, `/tmp`, `/var/tmp` and the folders of [`DockerConfig::folders`] are in
//! memory, each with the disk limit; what the image has in workspace and HOME is copied there. The
//! rest of the image belongs to root and cannot be written.

mod container;
mod demux;
mod doctor;
mod engine;
mod image;
mod janitor;
mod pull;
mod tls;

pub use doctor::docker_doctor;

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use async_trait::async_trait;
use bytes::Bytes;
use guest::{
    CAPABILITIES,
    protocol::{ContainerPlan, GUEST_PATH},
};
use http::{Method, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::{
    sync::{Mutex, oneshot},
    time::timeout,
};
use tokio_util::task::TaskTracker;

use self::{
    container::{Container, Reaper},
    demux::Demux,
    engine::{CallError, Engine, quote},
    image::Image,
    janitor::Owner,
};
use crate::{
    Provider, RefusalCause, Sandbox, SandboxError, Spec,
    inhabited::Inhabited,
    stream::{Stream, StreamSettings},
};

/// The guest ends when it heard nothing for so many seconds.
const HEARTBEAT_S: u64 = 45;
/// It hears of us this often.
const PING_EVERY: Duration = Duration::from_secs(10);
/// For making, filling, attaching and starting a container.
const MAKE_TIMEOUT: Duration = Duration::from_secs(120);

/// Settings of the kind `docker`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DockerConfig {
    /// Where the engine listens: `unix:///PATH` or `tcp://HOST:PORT`. `None`: what `DOCKER_HOST`
    /// says, else `unix:///var/run/docker.sock`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Folder with `ca.pem`, `cert.pem` and `key.pem` for an engine behind TLS (`tcp://`). `None`:
    /// with `DOCKER_TLS_VERIFY` set, that of `DOCKER_CERT_PATH`, else no TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_path: Option<PathBuf>,
    /// The image of sandboxes whose spec names none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Whether images that the engine does not have are pulled.
    pub pull: bool,
    /// Limit of a pull, in seconds.
    pub pull_s: u64,
    /// Folders beside workspace, HOME and `/tmp` that can be written.
    pub folders: Vec<PathBuf>,
    /// Give containers what harnesses need that make sandboxes of their own: no seccomp filter,
    /// and a `/proc` without covered parts.
    pub nested_sandboxes: bool,
    /// Living sandboxes at a time; one more is refused with [`SandboxError::Create`].
    pub sandboxes_max: usize,
    /// Hosts that sandboxes may reach through a filtering proxy of the orchestrator's machine (see
    /// [`crate::Allowed`]); what each of them gets is for whoever makes it to say.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<String>,
    /// Whether these hosts may have addresses that are not of the public internet.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub egress_private: bool,
}

impl Default for DockerConfig {
    fn default() -> Self {
        Self {
            host: None,
            cert_path: None,
            image: None,
            pull: true,
            pull_s: 900,
            // Where the field's task sets keep tests, solutions and rewards.
            folders: ["/tests", "/solution", "/logs"].map(PathBuf::from).to_vec(),
            nested_sandboxes: false,
            sandboxes_max: 256,
            egress: Vec::new(),
            egress_private: false,
        }
    }
}

impl DockerConfig {
    /// Where the engine listens.
    fn host(&self) -> String {
        self.host
            .clone()
            .or_else(|| std::env::var("DOCKER_HOST").ok().filter(|h| !h.is_empty()))
            .unwrap_or_else(|| "unix:///var/run/docker.sock".to_owned())
    }
}

/// Makes sandboxes of containers. Cheap to clone. Dropping the last clone and the last sandbox
/// leaves nothing.
#[derive(Debug, Clone)]
pub struct DockerProvider {
    maker: Arc<Maker>,
}

#[derive(Debug)]
struct Maker {
    engine: Engine,
    config: DockerConfig,
    /// Whether the engine is podman, which has words of its own.
    podman: bool,
    owner: Owner,
    reaper: Reaper,
    tasks: TaskTracker,
    images: Mutex<HashMap<(String, PathBuf, PathBuf), Arc<Image>>>,
    next: AtomicU64,
    living: Arc<AtomicUsize>,
}

impl DockerProvider {
    /// Finds the engine, and removes what dead orchestrators left on it. Needs a Tokio runtime.
    ///
    /// # Errors
    /// [`SandboxError::Unsupported`].
    pub async fn start(config: DockerConfig) -> Result<Self, SandboxError> {
        let unsupported = |what: String| SandboxError::Unsupported {
            what,
            hint: "start dockerd or `podman system service`, and name its socket in DOCKER_HOST \
                   or in the recipe"
                .to_owned(),
        };
        let host = config.host();
        let tasks = TaskTracker::new();
        let engine = Engine::of(&config, &host, tasks.clone()).map_err(unsupported)?;
        engine
            .call(Method::GET, "/_ping", "text/plain", Bytes::new())
            .await
            .map_err(|e| unsupported(format!("{host}: {e}")))?;
        let podman = config.nested_sandboxes && is_podman(&engine).await;
        janitor::sweep(&engine).await;
        if let Some(image) = &config.image {
            // Now, so that no rollout waits for it.
            pull::ensure(&engine, &config, "the provider", image).await?;
        }
        let reaper = Reaper::start(engine.clone(), &tasks);
        Ok(Self {
            maker: Arc::new(Maker {
                engine,
                config,
                podman,
                owner: Owner::own(),
                reaper,
                tasks,
                images: Mutex::default(),
                next: AtomicU64::new(1),
                living: Arc::default(),
            }),
        })
    }

    /// Gets an image that the engine does not have, if that is allowed ([`DockerConfig::pull`]).
    ///
    /// # Errors
    /// [`SandboxError::Refused`] (no such image, or not for us), [`SandboxError::Create`] (may work
    /// next time).
    pub async fn pull(&self, image: &str) -> Result<(), SandboxError> {
        pull::ensure(
            &self.maker.engine,
            &self.maker.config,
            "the provider",
            image,
        )
        .await
    }

    /// Makes an image of a root file system: a tar stream, as `docker import` takes. Gives its id.
    ///
    /// # Errors
    /// [`SandboxError::Unsupported`] with the engine's words.
    pub async fn import(&self, rootfs: Vec<u8>, name: &str) -> Result<String, SandboxError> {
        image::import(&self.maker.engine, rootfs, name).await
    }

    /// Waits until all that dropped sandboxes left behind is removed. Sandboxes must have been
    /// dropped.
    pub async fn close(self) {
        let tasks = self.maker.tasks.clone();
        drop(self);
        tasks.close();
        if timeout(MAKE_TIMEOUT, tasks.wait()).await.is_err() {
            tracing::warn!("containers were not removed within {MAKE_TIMEOUT:?}");
        }
    }
}

#[async_trait]
impl Provider for DockerProvider {
    async fn create(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        let (sender, made) = oneshot::channel();
        let name = spec.name.clone();
        let maker = Arc::clone(&self.maker);
        // A task, because the engine goes on with what was asked of it when nobody waits: only
        // whoever hears its answer can undo it. A sandbox that nobody takes is dropped here.
        self.maker.tasks.spawn(async move {
            let name = spec.name.clone();
            // A pull has a limit of its own.
            let result = match maker.image(&spec).await {
                Ok(image) => timeout(MAKE_TIMEOUT, maker.make(spec, image)).await,
                Err(error) => Ok(Err(error)),
            };
            let _ = sender.send(result.unwrap_or_else(|_| {
                Err(SandboxError::Create {
                    name,
                    reason: format!("it was not ready within {MAKE_TIMEOUT:?}"),
                })
            }));
        });
        made.await.unwrap_or_else(|_| {
            Err(SandboxError::Create {
                name,
                reason: "the task that made it ended".to_owned(),
            })
        })
    }
}

/// Whether an engine says that it is podman; one that says nothing is taken for dockerd.
async fn is_podman(engine: &Engine) -> bool {
    let version: Value = engine
        .json(Method::GET, "/version", None)
        .await
        .unwrap_or_default();
    let parts = version.get("Components").and_then(Value::as_array);
    parts.into_iter().flatten().any(|part| {
        part.get("Name")
            .and_then(Value::as_str)
            .is_some_and(|name| name.starts_with("Podman"))
    })
}

/// Counts a living sandbox.
#[derive(Debug)]
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Maker {
    async fn make(&self, spec: Spec, image: Arc<Image>) -> Result<Box<dyn Sandbox>, SandboxError> {
        let failed = |doing: &str| {
            let (name, doing) = (spec.name.clone(), doing.to_owned());
            move |error: CallError| SandboxError::Create {
                name,
                reason: format!("{doing}: {error}"),
            }
        };
        if self.engine.is_local() {
            // podman would make an empty folder of what is not there.
            for mount in &spec.mounts {
                std::fs::metadata(&mount.source).map_err(|e| SandboxError::Create {
                    name: spec.name.clone(),
                    reason: format!("mount {}: {e}", mount.source.display()),
                })?;
            }
        }
        let place = Place(Arc::clone(&self.living));
        if self.living.fetch_add(1, Ordering::Relaxed) >= self.config.sandboxes_max {
            return Err(SandboxError::Create {
                name: spec.name.clone(),
                reason: format!(
                    "{} sandboxes live already; raise sandboxes_max or run fewer at a time",
                    self.config.sandboxes_max
                ),
            });
        }
        let id = self.create(&spec, &image).await?;
        let (engine, reaper) = (self.engine.clone(), self.reaper.clone());
        let mut container = Container::new(id, image.id.clone(), engine, reaper, place);
        let attached = container.attach().await.map_err(failed("attaching"))?;
        container.watch_end(&self.tasks);
        container.start().await.map_err(failed("starting"))?;
        let (reader, writer) = tokio::io::split(attached);
        let (demux, complaint) = Demux::new(reader);
        container.hear_complaints(complaint);
        let settings = StreamSettings {
            ping_every: Some(PING_EVERY),
            forwards: spec.all_forwards().into_iter().collect(),
        };
        let (stream, hello) = Stream::start(demux, writer, settings, &self.tasks);
        let mut spec = spec;
        let files = std::mem::take(&mut spec.files);
        let sandbox = Inhabited::start(spec, stream, hello, Box::new(container)).await?;
        for (folder, tar) in &image.content {
            sandbox.upload_tar(folder.clone(), &mut &tar[..]).await?;
        }
        if !files.is_empty() {
            sandbox.upload(files).await?;
        }
        Ok(Box::new(sandbox))
    }

    async fn image(&self, spec: &Spec) -> Result<Arc<Image>, SandboxError> {
        crate::check(spec)?;
        let Some(name) = spec.image.as_ref().or(self.config.image.as_ref()) else {
            return Err(SandboxError::Unsupported {
                what: "neither the task nor the settings name an image".to_owned(),
                hint: "set `sandbox.image` in the recipe".to_owned(),
            });
        };
        let key = (name.clone(), spec.workspace.clone(), spec.home.clone());
        // Held while one is looked at: a group's rollouts ask for the same at the same time.
        let mut images = self.images.lock().await;
        if let Some(image) = images.get(&key) {
            return Ok(Arc::clone(image));
        }
        pull::ensure(&self.engine, &self.config, &spec.name, name).await?;
        let labels = self.labels(60);
        let look = timeout(MAKE_TIMEOUT, Image::look(&self.engine, &labels, spec, name)).await;
        let image = look.unwrap_or_else(|_| {
            Err(SandboxError::Create {
                name: spec.name.clone(),
                reason: format!("image {name} was not looked at within {MAKE_TIMEOUT:?}"),
            })
        })?;
        let image = Arc::new(image);
        images.insert(key, Arc::clone(&image));
        Ok(image)
    }

    /// What tells whose a container is and until when.
    fn labels(&self, deadline_s: u64) -> Value {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |d| d.as_secs());
        // The guest is first; this is for whoever finds the container later.
        let until = now + deadline_s + HEARTBEAT_S + MAKE_TIMEOUT.as_secs();
        json!({
            janitor::OWNER: self.owner.to_string(),
            janitor::DEADLINE: until.to_string(),
        })
    }

    async fn create(&self, spec: &Spec, image: &Image) -> Result<String, SandboxError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let name = format!("espalier-{}-{number}", self.owner.short());
        let body = self.description(spec, image);
        let path = format!("/containers/create?name={}", quote(&name));
        let answer: Result<Value, CallError> =
            self.engine.json(Method::POST, &path, Some(&body)).await;
        let refused = |cause, reason, hint: &str| SandboxError::Refused {
            name: spec.name.clone(),
            cause,
            reason,
            hint: hint.to_owned(),
        };
        match answer {
            Ok(answer) => match answer.get("Id").and_then(Value::as_str) {
                Some(id) => Ok(id.to_owned()),
                None => Err(SandboxError::Create {
                    name: spec.name.clone(),
                    reason: format!("the engine's answer has no Id: {answer}"),
                }),
            },
            Err(CallError::Status(StatusCode::NOT_FOUND, reason)) => Err(refused(
                RefusalCause::Image,
                reason,
                "the image was removed meanwhile; pull or build it again",
            )),
            Err(CallError::Status(StatusCode::BAD_REQUEST, reason)) => Err(refused(
                RefusalCause::Invalid,
                reason,
                "correct limits and mounts",
            )),
            Err(CallError::Status(StatusCode::FORBIDDEN, reason)) => Err(refused(
                RefusalCause::Forbidden,
                reason,
                "ask whoever runs the engine",
            )),
            Err(error) => Err(SandboxError::Create {
                name: spec.name.clone(),
                reason: error.to_string(),
            }),
        }
    }

    /// The container, as the API describes one.
    fn description(&self, spec: &Spec, image: &Image) -> Value {
        let limits = &spec.limits;
        let mut folders = vec![PathBuf::from("/tmp"), PathBuf::from("/var/tmp")];
        folders.extend(self.config.folders.iter().cloned());
        let plan = ContainerPlan {
            deadline_s: limits.deadline_s,
            heartbeat_s: HEARTBEAT_S,
            workspace: spec.workspace.clone(),
            home: spec.home.clone(),
            folders: self.config.folders.clone(),
            ports: spec.all_forwards().iter().map(|(port, _)| *port).collect(),
            control_socket: None,
        };
        folders.extend([spec.workspace.clone(), spec.home.clone()]);
        let options = format!("rw,exec,nosuid,nodev,mode=1777,size={}", limits.disk_bytes);
        let tmpfs: serde_json::Map<String, Value> = folders
            .iter()
            .map(|folder| (folder.to_string_lossy().into_owned(), json!(options)))
            .collect();
        let mounts: Vec<Value> = spec
            .mounts
            .iter()
            .map(|mount| {
                json!({
                    "Type": "bind",
                    "Source": mount.source,
                    "Target": mount.target,
                    "ReadOnly": true,
                })
            })
            .collect();
        let mut security = vec!["no-new-privileges"];
        if self.config.nested_sandboxes {
            security.push("seccomp=unconfined");
            // podman's word for a whole /proc; dockerd knows none, and has fields for it.
            if self.podman {
                security.push("unmask=ALL");
            }
        }
        let mut description = json!({
            "Image": image.id,
            "Entrypoint": [GUEST_PATH],
            "Cmd": ["init", json!(plan).to_string()],
            // The guest becomes the sandbox's user as soon as it has given it its folders.
            "User": "0:0",
            "WorkingDir": "/",
            "Hostname": "sandbox",
            "OpenStdin": true,
            "StdinOnce": true,
            "AttachStdin": true,
            "AttachStdout": true,
            "AttachStderr": true,
            "Tty": false,
            "NetworkDisabled": true,
            "Labels": self.labels(limits.deadline_s),
            "HostConfig": {
                "AutoRemove": true,
                "NetworkMode": "none",
                "LogConfig": {"Type": "none"},
                "CapDrop": ["ALL"],
                // Held by the guest and used when a program is to run as another user.
                "CapAdd": CAPABILITIES,
                "SecurityOpt": security,
                "Memory": limits.memory_bytes,
                "MemorySwap": limits.memory_bytes,
                "PidsLimit": limits.pids,
                "NanoCpus": (limits.cpu_cores * 1e9) as u64,
                "ShmSize": limits.disk_bytes,
                "Tmpfs": tmpfs,
                "Mounts": mounts,
            },
        });
        if self.config.nested_sandboxes && !self.podman {
            description["HostConfig"]["MaskedPaths"] = json!([]);
            description["HostConfig"]["ReadonlyPaths"] = json!([]);
        }
        description
    }
}
