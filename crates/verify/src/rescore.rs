//! Scoring a kept end state again.
//!
//! A [`World`] is what a harness left in its workspace. It is put into a fresh sandbox and scored
//! there by any task's verifier: nothing of the rollout runs again. What lay outside of the
//! workspace and of the task's declared artifacts is not kept; a verifier that looks there scores
//! the state of a fresh system. Nor are times of files, modes of folders, and special files.

use std::{
    collections::BTreeMap,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use record::Verdict;
use sandbox::{Exec, Exit, File, Limits, Provider, Sandbox};
use task::Task;

use crate::{
    Audit, Told, VerifyError, artifacts,
    contract::{cut, evidence},
    run::{WORKSPACE_BYTES_MAX, doing},
    spec, verify_with,
};

/// Level of compression of kept worlds: fast, they are small.
const ZSTD_LEVEL: i32 = 3;

/// Why a kept world could not be written or read.
#[derive(Debug, thiserror::Error)]
#[error("kept world {path}: {reason}")]
pub struct WorldError {
    /// The file.
    pub path: PathBuf,
    /// The system's or the archive's words.
    pub reason: String,
}

/// Lists empty folders and links as records of kind, path and target, each ended by a NUL.
const LIST: &str = "find \"$1\" \\( -type d -empty -printf 'd\\0%p\\0\\0' \\) -o \\( -type l -printf 'l\\0%p\\0%l\\0' \\)";
/// Limit of that, and of making them again.
const LIST_TIMEOUT_S: u64 = 60;
/// Bytes of that list.
const LIST_BYTES_MAX: usize = 1 << 20;

/// Where the log of the services is among the kept files.
const AUDIT: &str = "/.espalier/services.json";

/// The files of a workspace, a task's artifacts, and what its services were asked, after the harness
/// ended.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct World {
    /// Absolute paths in the sandbox, sorted.
    pub files: Vec<File>,
    /// Folders of the workspace with nothing in them.
    pub folders: Vec<PathBuf>,
    /// Links of the workspace: where they are and what they say.
    pub links: Vec<(PathBuf, PathBuf)>,
    /// What the task's services were asked.
    pub audit: Option<Audit>,
}

/// Paths for `xargs -0`.
fn words<'a>(paths: impl Iterator<Item = &'a PathBuf>) -> Vec<u8> {
    paths
        .flat_map(|path| [path.as_os_str().as_encoded_bytes(), b"\0"].concat())
        .collect()
}

fn command(argv: &[&str], stdin: Vec<u8>) -> Exec {
    Exec {
        argv: argv.iter().map(|&word| word.to_owned()).collect(),
        cwd: Some("/".into()),
        env: BTreeMap::new(),
        stdin,
        timeout: Duration::from_secs(LIST_TIMEOUT_S),
        output_bytes_max: LIST_BYTES_MAX,
        end_background: false,
        user: None,
    }
}

impl World {
    /// Reads workspace and artifacts, at most `bytes_max` of each.
    ///
    /// # Errors
    /// [`VerifyError::Sandbox`], also when there is more.
    pub async fn read(
        task: &Task,
        sandbox: &dyn Sandbox,
        bytes_max: u64,
    ) -> Result<Self, VerifyError> {
        let mut files = sandbox
            .download(task.workspace.clone(), bytes_max)
            .await
            .map_err(doing(task, "keeping the workspace"))?;
        for file in artifacts(task, sandbox, bytes_max).await? {
            if files.iter().all(|known| known.path != file.path) {
                files.push(file);
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let mut world = Self {
            files,
            ..Self::default()
        };
        let workspace = task.workspace.to_string_lossy();
        let listed = sandbox
            .exec(command(&["sh", "-c", LIST, "sh", &workspace], Vec::new()))
            .await
            .map_err(doing(task, "listing folders and links"))?;
        let text = String::from_utf8_lossy(&listed.stdout).into_owned();
        let words: Vec<&str> = text.split('\0').collect();
        if listed.exit != Exit::Code(0) || listed.dropped_bytes > 0 {
            return Err(VerifyError::Contract {
                task: task.id.to_string(),
                expected: "a list of the workspace's folders and links",
                found: format!("{:?}, {} bytes dropped", listed.exit, listed.dropped_bytes),
                evidence: cut(&evidence(&listed), 400),
            });
        }
        for record in words.chunks_exact(3) {
            let path = PathBuf::from(record[1]);
            match record[0] {
                "d" if path != task.workspace => world.folders.push(path),
                "l" => world.links.push((path, record[2].into())),
                _ => {}
            }
        }
        world.folders.sort();
        world.links.sort();
        Ok(world)
    }

    /// Puts it into a sandbox.
    async fn restore(&self, task: &Task, sandbox: &dyn Sandbox) -> Result<(), VerifyError> {
        let failed = || doing(task, "putting the kept world back");
        if !self.files.is_empty() {
            sandbox.upload(self.files.clone()).await.map_err(failed())?;
        }
        let folders = words(self.folders.iter());
        let links = words(self.links.iter().flat_map(|(path, says)| [says, path]));
        for (argv, stdin) in [
            (&["xargs", "-0", "mkdir", "-p", "--"][..], folders),
            (&["xargs", "-0", "-n", "2", "ln", "-sfn", "--"][..], links),
        ] {
            if stdin.is_empty() {
                continue;
            }
            let output = sandbox.exec(command(argv, stdin)).await.map_err(failed())?;
            if output.exit != Exit::Code(0) {
                return Err(VerifyError::Contract {
                    task: task.id.to_string(),
                    expected: "folders and links of the kept world",
                    found: format!("{:?} of {argv:?}", output.exit),
                    evidence: cut(&evidence(&output), 400),
                });
            }
        }
        Ok(())
    }

    /// Writes it as a compressed tar file, whole or not at all.
    ///
    /// # Errors
    /// [`WorldError`].
    pub fn save(&self, path: &Path) -> Result<(), WorldError> {
        let failed = |error: io::Error| WorldError {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        let mut archive = tar::Builder::new(Vec::new());
        let audit = self.audit.as_ref().map(|audit| File {
            path: AUDIT.into(),
            content: serde_json::to_vec(audit).unwrap_or_default(),
            mode: 0o600,
        });
        for file in self.files.iter().chain(&audit) {
            let mut header = tar::Header::new_gnu();
            header.set_size(file.content.len() as u64);
            header.set_mode(file.mode);
            let place = file.path.strip_prefix("/").unwrap_or(&file.path);
            archive
                .append_data(&mut header, place, file.content.as_slice())
                .map_err(failed)?;
        }
        let inside = |path: &Path| path.strip_prefix("/").unwrap_or(path).to_owned();
        for folder in &self.folders {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::Directory);
            header.set_size(0);
            header.set_mode(0o755);
            archive
                .append_data(&mut header, inside(folder), io::empty())
                .map_err(failed)?;
        }
        for (path, says) in &self.links {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_size(0);
            header.set_mode(0o777);
            archive
                .append_link(&mut header, inside(path), says)
                .map_err(failed)?;
        }
        let bytes = archive.into_inner().map_err(failed)?;
        let packed = zstd::encode_all(bytes.as_slice(), ZSTD_LEVEL).map_err(failed)?;
        let draft = path.with_extension("draft");
        std::fs::write(&draft, packed).map_err(failed)?;
        std::fs::rename(&draft, path).map_err(failed)
    }

    /// Reads what [`World::save`] wrote.
    ///
    /// # Errors
    /// [`WorldError`].
    pub fn load(path: &Path) -> Result<Self, WorldError> {
        let failed = |error: io::Error| WorldError {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        let file = std::fs::File::open(path).map_err(failed)?;
        let unpacked = zstd::Decoder::new(file).map_err(failed)?;
        // A damaged file must not fill the memory.
        let mut archive = tar::Archive::new(unpacked.take(2 * WORKSPACE_BYTES_MAX));
        let mut world = Self::default();
        for entry in archive.entries().map_err(failed)? {
            let mut entry = entry.map_err(failed)?;
            let path = Path::new("/").join(entry.path().map_err(failed)?);
            match entry.header().entry_type() {
                tar::EntryType::Directory => world.folders.push(path),
                tar::EntryType::Symlink => {
                    let says = entry.link_name().map_err(failed)?.unwrap_or_default();
                    world.links.push((path, says.into_owned()));
                }
                _ => {
                    let mut content = Vec::new();
                    entry.read_to_end(&mut content).map_err(failed)?;
                    if path == Path::new(AUDIT) {
                        let audit = serde_json::from_slice(&content);
                        world.audit = Some(audit.map_err(|error| failed(error.into()))?);
                        continue;
                    }
                    world.files.push(File {
                        path,
                        content,
                        mode: entry.header().mode().map_err(failed)?,
                    });
                }
            }
        }
        Ok(world)
    }
}

/// Scores by a verifier with a sandbox of its own (Harbor's `separate`): a fresh one with nothing
/// but the artifacts in it, at the places where the agent left them.
///
/// # Errors
/// [`VerifyError`].
pub async fn apart(
    task: &Task,
    sandbox: &dyn Sandbox,
    provider: &dyn Provider,
    told: Told<'_>,
) -> Result<Verdict, VerifyError> {
    let files = artifacts(task, sandbox, WORKSPACE_BYTES_MAX).await?;
    let world = World {
        files,
        ..World::default()
    };
    rescore(task, &world, provider, told).await
}

/// Scores a kept world by the verifier of a task.
///
/// # Errors
/// [`VerifyError`].
pub async fn rescore(
    task: &Task,
    world: &World,
    provider: &dyn Provider,
    told: Told<'_>,
) -> Result<Verdict, VerifyError> {
    let limits = Limits {
        deadline_s: 120 + task.verifier.timeout_s,
        ..Limits::default()
    };
    let sandbox = provider
        .create(spec(task, name(task), limits))
        .await
        .map_err(doing(task, "making a sandbox"))?;
    let result = async {
        world.restore(task, sandbox.as_ref()).await?;
        let told = Told {
            audit: told.audit.or(world.audit.as_ref()),
            ..told
        };
        verify_with(task, sandbox.as_ref(), told).await
    }
    .await;
    sandbox.destroy().await;
    result
}

/// Names of sandboxes are unique among the living ones; several rollouts of a task may be scored
/// at a time.
fn name(task: &Task) -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    format!("rescore-{number}-{}", task.id)
}
