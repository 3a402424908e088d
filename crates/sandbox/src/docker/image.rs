//! The image with the guest on top, and what an image brings: what it has where a sandbox's own folders will be.

use std::path::PathBuf;

use bytes::Bytes;
use guest::protocol::GUEST_PATH;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::engine::{CallError, Engine, quote};
use crate::{RefusalCause, SandboxError, Spec, guest_binary};

/// The name of images with the guest on top.
const REPOSITORY: &str = "espalier-guest";

/// An image that was looked at.
#[derive(Debug)]
pub(super) struct Image {
    /// Engines name imported images differently; the id is the same everywhere.
    pub(super) id: String,
    /// Tar streams and the folders they are to be unpacked in.
    pub(super) content: Vec<(PathBuf, Bytes)>,
}

impl Image {
    /// Looks at an image: by a container of it that is never started.
    pub(super) async fn look(
        engine: &Engine,
        labels: &Value,
        spec: &Spec,
        name: &str,
    ) -> Result<Self, SandboxError> {
        let failed = |error: CallError| SandboxError::Create {
            name: spec.name.clone(),
            reason: format!("looking at image {name}: {error}"),
        };
        let path = format!("/images/{}/json", quote(name));
        let description: Value = match engine.json(Method::GET, &path, None).await {
            Ok(description) => description,
            Err(CallError::Status(StatusCode::NOT_FOUND, reason)) => {
                return Err(SandboxError::Refused {
                    name: spec.name.clone(),
                    cause: RefusalCause::Image,
                    reason,
                    hint: format!("pull, load or build {name} on the engine"),
                });
            }
            Err(error) => return Err(failed(error)),
        };
        let id = description.get("Id").and_then(Value::as_str);
        let id = id.unwrap_or(name).to_owned();
        let body = json!({
            "Image": id,
            "Entrypoint": ["/never"],
            "Labels": labels,
            "NetworkDisabled": true,
            "HostConfig": {"NetworkMode": "none"},
        });
        let probe: Value = engine
            .json(Method::POST, "/containers/create", Some(&body))
            .await
            .map_err(failed)?;
        let probe = probe.get("Id").and_then(Value::as_str).unwrap_or_default();
        let mut content = Vec::new();
        let mut result = Ok(());
        let id = match with_guest(engine, &id, probe).await {
            Ok(id) => id,
            Err(error) => {
                result = Err(failed(error));
                id
            }
        };
        for folder in [&spec.workspace, &spec.home] {
            let path = format!(
                "/containers/{probe}/archive?path={}",
                quote(&folder.to_string_lossy())
            );
            let parent = folder.parent().unwrap_or(folder).to_owned();
            match engine.call(Method::GET, &path, "", Bytes::new()).await {
                Ok(tar) => content.push((parent, tar)),
                Err(error) if error.is(StatusCode::NOT_FOUND) => {}
                Err(error) => result = Err(failed(error)),
            }
        }
        let path = format!("/containers/{probe}?force=1&v=1");
        let removed = engine.call(Method::DELETE, &path, "", Bytes::new()).await;
        result?;
        removed.map_err(failed)?;
        Ok(Self { id, content })
    }
}

/// The image with the guest on top; made of the container if the engine does not have it yet.
async fn with_guest(engine: &Engine, id: &str, container: &str) -> Result<String, CallError> {
    let tag = format!("{:016x}", digest([id.as_bytes(), guest_binary::BYTES]));
    let path = format!("/images/{REPOSITORY}:{tag}/json");
    let id_of = |value: &Value| value.get("Id").and_then(Value::as_str).map(str::to_owned);
    match engine.json::<Value>(Method::GET, &path, None).await {
        Ok(known) => {
            if let Some(id) = id_of(&known) {
                return Ok(id);
            }
        }
        Err(error) if error.is(StatusCode::NOT_FOUND) => {}
        Err(error) => return Err(error),
    }
    let tar = guest_tar(guest_binary::BYTES).map_err(|e| CallError::Transport(e.to_string()))?;
    let path = format!("/containers/{container}/archive?path=%2F");
    engine
        .call(Method::PUT, &path, "application/x-tar", Bytes::from(tar))
        .await?;
    let path = format!("/commit?container={container}&repo={REPOSITORY}&tag={tag}");
    let made: Value = engine.json(Method::POST, &path, Some(&json!({}))).await?;
    id_of(&made).ok_or_else(|| CallError::Transport(format!("its answer has no Id: {made}")))
}

/// Tells contents apart (FNV-1a); whoever may write to the engine needs no collision.
fn digest<const N: usize>(parts: [&[u8]; N]) -> u64 {
    parts
        .iter()
        .copied()
        .flatten()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        })
}

fn guest_tar(guest: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut builder = tar::Builder::new(Vec::with_capacity(guest.len() + 4096));
    let path = GUEST_PATH.trim_start_matches('/');
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o755);
    header.set_uid(0);
    header.set_gid(0);
    if let Some((folder, _)) = path.rsplit_once('/') {
        let mut header = header.clone();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_size(0);
        builder.append_data(&mut header, format!("{folder}/"), std::io::empty())?;
    }
    header.set_entry_type(tar::EntryType::Regular);
    header.set_size(guest.len() as u64);
    builder.append_data(&mut header, path, guest)?;
    builder.into_inner()
}

/// Makes an image of a tar stream; gives its id.
pub(super) async fn import(
    engine: &Engine,
    rootfs: Vec<u8>,
    name: &str,
) -> Result<String, SandboxError> {
    let failed = |what: String| SandboxError::Unsupported {
        what: format!("importing image {name}: {what}"),
        hint: "the engine's log says more".to_owned(),
    };
    let (repository, tag) = name.split_once(':').unwrap_or((name, "latest"));
    let path = format!(
        "/images/create?fromSrc=-&repo={}&tag={}",
        quote(repository),
        quote(tag)
    );
    let answer = engine
        .call(Method::POST, &path, "application/x-tar", rootfs.into())
        .await
        .map_err(|e| failed(e.to_string()))?;
    // Lines of progress; the last names the image.
    serde_json::Deserializer::from_slice(&answer)
        .into_iter::<Value>()
        .flatten()
        .filter_map(|line| Some(line.get("status")?.as_str()?.trim().to_owned()))
        .last()
        .filter(|id| !id.is_empty())
        .ok_or_else(|| failed(String::from_utf8_lossy(&answer).into_owned()))
}
