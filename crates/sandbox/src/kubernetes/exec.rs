//! Processes in containers through the API server: only to bring the guest and to reach it. All
//! else goes through the guest.

use std::{io, path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{AttachParams, AttachedProcess},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::timeout,
};

use super::{OwnPod, description};
use crate::{Spec, inhabited::Shell};

/// For bringing one thing.
const BRING_TIMEOUT: Duration = Duration::from_secs(240);
/// Buffers of an attached process, each way.
const BUFFER_BYTES: usize = 256 << 10;

/// A pod and the exec whose stream reaches its guest.
pub(super) struct Attached {
    pub(super) pod: OwnPod,
    pub(super) _attached: AttachedProcess,
}

impl std::fmt::Debug for Attached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attached").field("pod", &self.pod).finish_non_exhaustive()
    }
}

#[async_trait]
impl Shell for Attached {
    async fn end_reason(&self) -> Option<String> {
        self.pod.end_reason().await
    }

    async fn destroy(self: Box<Self>) {
        Box::new(self.pod).destroy().await;
    }
}

fn parameters(container: &str) -> AttachParams {
    AttachParams::default()
        .container(container)
        .stdin(true)
        .stdout(true)
        .stderr(false)
        .max_stdin_buf_size(BUFFER_BYTES)
        .max_stdout_buf_size(BUFFER_BYTES)
}

/// Starts a process and gives its streams; they live as long as the handle.
pub(super) async fn attach(
    api: &Api<Pod>,
    pod: &str,
    container: &str,
    argv: &[&str],
) -> Result<
    (
        impl AsyncRead + Send + Unpin + use<>,
        impl AsyncWrite + Send + Unpin + use<>,
        AttachedProcess,
    ),
    String,
> {
    let mut attached = api
        .exec(pod, argv.iter().copied(), &parameters(container))
        .await
        .map_err(|e| format!("exec of {argv:?} in container {container}: {e}"))?;
    let missing = || "the exec has no streams".to_owned();
    let reader = attached.stdout().ok_or_else(missing)?;
    let writer = attached.stdin().ok_or_else(missing)?;
    Ok((reader, writer, attached))
}

/// Runs a process that reads a known number of bytes; so nothing depends on the end of its input
/// being passed on, which servers before protocol version 5 do not.
async fn feed(
    api: &Api<Pod>,
    (pod, container): (&str, &str),
    argv: &[&str],
    input: &[u8],
) -> Result<(), String> {
    let run = async {
        let (mut reader, mut writer, mut attached) = attach(api, pod, container, argv).await?;
        let status = attached.take_status();
        let mut said = Vec::new();
        let give = async {
            // A process that ended has said why; that is more than "broken pipe".
            let _ = writer.write_all(input).await;
            let _ = writer.flush().await;
            writer
        };
        let (writer, read) = tokio::join!(give, reader.read_to_end(&mut said));
        drop(writer);
        let _ = read;
        let status = match status {
            Some(status) => status.await,
            None => None,
        };
        match status {
            Some(status) if status.status.as_deref() == Some("Success") => Ok(()),
            Some(status) => Err(format!(
                "{}: {}",
                status.message.unwrap_or_default(),
                String::from_utf8_lossy(&said).trim()
            )),
            None => Err("the exec ended without a status".to_owned()),
        }
    };
    timeout(BRING_TIMEOUT, run)
        .await
        .unwrap_or_else(|_| Err(format!("not over after {BRING_TIMEOUT:?}")))
}

/// Brings the guest and the mounts to the init container, and lets it end.
pub(super) async fn bring(
    api: &Api<Pod>,
    pod: &str,
    container: &str,
    guest: &[u8],
    bundles: &[Arc<Vec<u8>>],
) -> Result<(), String> {
    let bin = description::BIN;
    let count = guest.len();
    let script = format!(
        "exec 2>&1; umask 022; head -c {count} > {bin}/guest.new && \
         chmod 755 {bin}/guest.new && mv {bin}/guest.new {bin}/guest"
    );
    feed(api, (pod, container), &["sh", "-c", &script], guest)
        .await
        .map_err(|e| format!("bringing the guest: {e}"))?;
    for (index, bundle) in bundles.iter().enumerate() {
        let folder = format!("{}/{index}", description::MOUNTS);
        let count = bundle.len();
        let script = format!("exec 2>&1; head -c {count} | {bin}/guest unpack {folder}");
        feed(api, (pod, container), &["sh", "-c", &script], bundle)
            .await
            .map_err(|e| format!("bringing mount {index}: {e}"))?;
    }
    let script = format!("exec 2>&1; echo ready > {bin}/ready");
    feed(api, (pod, container), &["sh", "-c", &script], b"")
        .await
        .map_err(|e| format!("letting the init container end: {e}"))
}

/// The content of each mount as a tar stream.
pub(super) async fn pack_mounts(spec: &Spec) -> Result<Vec<Arc<Vec<u8>>>, String> {
    let mut bundles = Vec::with_capacity(spec.mounts.len());
    for mount in &spec.mounts {
        let source = mount.source.clone();
        let packed = tokio::task::spawn_blocking(move || pack(&source))
            .await
            .map_err(|e| format!("packing {}: {e}", mount.source.display()))?
            .map_err(|e| format!("packing {}: {e}", mount.source.display()))?;
        bundles.push(Arc::new(packed));
    }
    Ok(bundles)
}

fn pack(source: &Path) -> io::Result<Vec<u8>> {
    let mut builder = tar::Builder::new(Vec::new());
    builder.follow_symlinks(false);
    builder.mode(tar::HeaderMode::Deterministic);
    match description::file_name(source) {
        Some(name) => builder.append_path_with_name(source, name)?,
        None => builder.append_dir_all(".", source)?,
    }
    builder.into_inner()
}
