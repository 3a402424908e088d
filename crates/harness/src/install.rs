//! Bundles in the cache: locked, complete or absent.
//!
//! A bundle is a folder `NAME-VERSION-DIGEST` where NAME is that of the profile, or of the package
//! when several profiles may share it, and the digest covers what the profile asks for,
//! the processor, and whether the machine's own Node.js or Python is used. It is filled as
//! `.partial-NAME-VERSION-DIGEST-PID` while an exclusive lock is held, flushed to disk, and renamed. Bundles
//! are never changed after that, so running sandboxes may share them.

use std::{
    env, fs,
    fs::{File, OpenOptions},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use sandbox::Mount;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{HarnessError, Install, Profile, lock, npm, pip, warm};

/// Where bundles appear in sandboxes: `/opt/harness/NAME`.
const BUNDLES: &str = "/opt/harness";

/// The file that says what a bundle is. Its presence under the final name is not the proof of
/// completeness (the rename is), but its absence is a proof of the contrary.
const MANIFEST: &str = "espalier-bundle.json";

/// A harness that is ready to be launched.
#[derive(Debug, Clone, PartialEq)]
pub struct Installed {
    /// The profile.
    pub profile: Profile,
    /// SHA-256 over what was really installed: every package with version and checksum. For kind
    /// `none`, over the profile's version. Hexadecimal.
    pub digest: String,
    /// The bundle in the sandbox; empty for kind `none`.
    pub bundle: PathBuf,
    /// Node.js in the sandbox; empty unless kind `npm`.
    pub node: String,
    /// Python in the sandbox; empty unless kind `pip`.
    pub python: String,
    /// What a sandbox must be made with.
    pub mounts: Vec<Mount>,
}

impl Installed {
    /// Name, version and the first digits of the digest, as recorded with each rollout.
    #[must_use]
    pub fn version(&self) -> String {
        let digest = self.digest.get(..12).unwrap_or(&self.digest);
        format!("{} {} ({digest})", self.profile.name, self.profile.version)
    }
}

/// What a finished bundle says about itself.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// See [`Installed::digest`].
    pub(crate) digest: String,
    /// Packages that were installed: name, version, checksum.
    pub(crate) packages: Vec<String>,
}

impl Manifest {
    /// Sorts the packages and takes their digest.
    pub(crate) fn new(mut packages: Vec<String>) -> Self {
        packages.sort();
        let digest = sha256(packages.join("\n").as_bytes());
        Self { digest, packages }
    }
}

/// The cache of bundles: `$XDG_CACHE_HOME/espalier/harness`, else `~/.cache/espalier/harness`.
///
/// # Errors
/// [`HarnessError::Cache`] when neither variable is set to an absolute path.
pub fn cache_folder() -> Result<PathBuf, HarnessError> {
    let absolute = |key: &str| {
        env::var_os(key)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .map(|base| base.join("espalier/harness"))
        .ok_or_else(|| HarnessError::Cache {
            path: PathBuf::from("~/.cache/espalier/harness"),
            reason: "neither XDG_CACHE_HOME nor HOME is an absolute path".into(),
        })
}

/// A runtime that the bundle needs beside its packages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Runtime {
    /// A program of the machine that sandboxes see as well.
    Machine(PathBuf),
    /// A package of the same registry: its name, and the program in the bundle.
    Bundled {
        /// Requirement, with version.
        package: String,
        /// The program, relative to the bundle.
        program: String,
    },
}

impl Runtime {
    /// The program as the sandbox sees it.
    fn program(&self, bundle: &Path) -> String {
        match self {
            Self::Machine(path) => path.display().to_string(),
            Self::Bundled { program, .. } => bundle.join(program).display().to_string(),
        }
    }

    /// What the folder's digest says of it: upgrades of the machine's own do not matter.
    fn kind(&self) -> &str {
        match self {
            Self::Machine(_) => "machine",
            Self::Bundled { package, .. } => package,
        }
    }
}

impl Profile {
    /// Makes sure that the harness is installed, and says where. A second call finds the bundle
    /// and needs neither network nor installer. Dropping the future ends the installer and removes
    /// what it left.
    ///
    /// # Errors
    /// [`HarnessError::Tool`], [`HarnessError::Install`], [`HarnessError::Incomplete`],
    /// [`HarnessError::Busy`], [`HarnessError::Cache`].
    pub async fn install(&self, cache: &Path) -> Result<Installed, HarnessError> {
        let bundle = PathBuf::from(BUNDLES).join(self.file());
        match &self.install {
            Install::None => Ok(Installed {
                profile: self.clone(),
                digest: sha256(format!("{} {}", self.file(), self.version).as_bytes()),
                bundle: PathBuf::new(),
                node: String::new(),
                python: String::new(),
                mounts: Vec::new(),
            }),
            Install::Npm { node_min, .. } => {
                let runtime = npm::runtime(&self.name, node_min.as_deref()).await?;
                let (folder, manifest) = self.bundle(cache, &runtime).await?;
                Ok(self.ready(
                    folder,
                    manifest,
                    &bundle,
                    runtime.program(&bundle),
                    String::new(),
                ))
            }
            Install::Pip { python_min, .. } => {
                let runtime = pip::runtime(&self.name, python_min.as_deref()).await?;
                let (folder, manifest) = self.bundle(cache, &runtime).await?;
                Ok(self.ready(
                    folder,
                    manifest,
                    &bundle,
                    String::new(),
                    runtime.program(&bundle),
                ))
            }
        }
    }

    fn ready(
        &self,
        folder: PathBuf,
        manifest: Manifest,
        bundle: &Path,
        node: String,
        python: String,
    ) -> Installed {
        Installed {
            profile: self.clone(),
            digest: manifest.digest,
            bundle: bundle.to_owned(),
            node,
            python,
            mounts: vec![Mount {
                source: folder,
                target: bundle.to_owned(),
            }],
        }
    }

    /// Finds or makes the bundle.
    async fn bundle(
        &self,
        cache: &Path,
        runtime: &Runtime,
    ) -> Result<(PathBuf, Manifest), HarnessError> {
        let folder_name = self.folder_name(runtime);
        let folder = cache.join(&folder_name);
        if let Some(manifest) = read_manifest(&folder) {
            return Ok((folder, manifest));
        }
        let cannot = |path: &Path, error: &dyn std::fmt::Display| HarnessError::Cache {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        fs::create_dir_all(cache).map_err(|error| cannot(cache, &error))?;
        let deadline = Instant::now() + Duration::from_secs(self.install_s);
        let lock_path = cache.join(format!("{folder_name}.lock"));
        let lock = lock::exclusive(&lock_path, deadline)
            .await
            .map_err(|error| cannot(&lock_path, &error))?;
        let Some(_lock) = lock else {
            return Err(HarnessError::Busy {
                name: self.name.clone(),
                waited_s: self.install_s,
                lock: lock_path,
            });
        };
        // Somebody may have finished it while we waited.
        if let Some(manifest) = read_manifest(&folder) {
            return Ok((folder, manifest));
        }
        let prefix = format!(".partial-{folder_name}-");
        remove_leftovers(cache, &prefix, &folder).map_err(|error| cannot(cache, &error))?;
        let partial = Partial(cache.join(format!("{prefix}{}", std::process::id())));
        fs::create_dir(&partial.0).map_err(|error| cannot(&partial.0, &error))?;
        tracing::info!(harness = %self.name, version = %self.version, folder = %folder.display(), "installing");
        let timeout = deadline.saturating_duration_since(Instant::now());
        let packages = match &self.install {
            Install::None => Vec::new(),
            Install::Npm {
                package, scripts, ..
            } => npm::install(self, package, *scripts, runtime, &partial.0, timeout).await?,
            Install::Pip { packages, .. } => {
                pip::install(self, packages, runtime, &partial.0, timeout).await?
            }
        };
        let program = match runtime {
            Runtime::Bundled { program, .. } => Some(program),
            Runtime::Machine(_) => None,
        };
        for path in self.provides.iter().chain(program) {
            if !partial.0.join(path).exists() {
                return Err(HarnessError::Incomplete {
                    name: self.name.clone(),
                    missing: path.clone(),
                });
            }
        }
        if !self.warm.is_empty() {
            let target = Path::new(BUNDLES).join(self.file());
            let (node, python) = match &self.install {
                Install::Npm { .. } => (runtime.program(&target), String::new()),
                _ => (String::new(), runtime.program(&target)),
            };
            match warm::warm(self, &partial.0, &target, &node, &python).await {
                Ok(files) => tracing::info!(harness = %self.name, files, "bundle warmed"),
                Err(error) => {
                    tracing::warn!(harness = %self.name, mode = "cold-bundle", %error, "every rollout compiles the harness anew");
                }
            }
        }
        let manifest = Manifest::new(packages);
        let seal = || -> std::io::Result<()> {
            let text = serde_json::to_vec_pretty(&manifest)?;
            fs::write(partial.0.join(MANIFEST), text)?;
            rustix::fs::syncfs(File::open(&partial.0)?)?;
            fs::rename(&partial.0, &folder)?;
            File::open(cache)?.sync_all()
        };
        seal().map_err(|error| cannot(&folder, &error))?;
        Ok((folder, manifest))
    }

    fn folder_name(&self, runtime: &Runtime) -> String {
        let asked = serde_json::json!({
            "format": 2,
            "install": self.install,
            "version": self.version,
            "provides": self.provides,
            "warm": self.warm,
            "runtime": runtime.kind(),
            "processor": env::consts::ARCH,
        });
        let digest = sha256(asked.to_string().as_bytes());
        // Profiles that run one program in different modes share its bundle. Not when it is warmed:
        // compiled code remembers its path in the sandbox, which has the profile's name.
        let name = match &self.install {
            Install::Npm { package, .. } if self.warm.is_empty() => {
                package.replace(['@', '/'], ".")
            }
            _ => self.file().to_owned(),
        };
        format!(
            "{}-{}-{}",
            name.trim_start_matches('.'),
            self.version,
            &digest[..12]
        )
    }
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

fn read_manifest(folder: &Path) -> Option<Manifest> {
    let text = fs::read(folder.join(MANIFEST)).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Removes what earlier installs of the same bundle left when they were killed, and a folder
/// under the final name that is no bundle. Only called under the lock.
fn remove_leftovers(cache: &Path, prefix: &str, folder: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(cache)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    Ok(())
}

/// A folder that is removed unless it was renamed away.
struct Partial(PathBuf);

impl Drop for Partial {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(folder = %self.0.display(), %error, "could not remove a broken install");
        }
    }
}

/// Opens a file for locking, without touching its content.
pub(crate) fn open_lock(path: &Path) -> std::io::Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
}
