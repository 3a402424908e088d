//! The volumes of a pod as folders on the host.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::spec::{entries, field};
use crate::{
    quantity,
    store::{Key, Store},
    validate::{list, text},
};

/// The files of a volume: path within, content, mode.
type Files = Vec<(String, Vec<u8>, u32)>;

/// What one volume is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// An empty folder on disk.
    Empty,
    /// An empty folder in memory, of so many bytes if they are limited.
    Memory(Option<u64>),
    /// Files that are copied into a folder.
    Files(Files),
    /// A folder of the host, read-only or not.
    Folder(PathBuf, bool),
}

/// Prepared volumes of a pod, by name.
#[derive(Debug, Default)]
pub(crate) struct Volumes {
    pub(crate) folders: BTreeMap<String, (PathBuf, bool)>,
    /// To be mounted in the node: folder, bytes.
    pub(crate) memory: Vec<(PathBuf, Option<u64>)>,
}

/// What the pod's volumes are; the error is what a node would say when it cannot mount one.
pub(crate) fn sources(
    store: &Store,
    pod: &Value,
    claims: &BTreeMap<String, PathBuf>,
    images: &BTreeMap<String, super::images::Image>,
) -> Result<Vec<(String, Source)>, String> {
    let mut found = Vec::new();
    for volume in list(&pod["spec"]["volumes"]) {
        let name = text(&volume["name"]);
        let source = source(store, pod, volume, claims, images)
            .map_err(|why| format!("MountVolume.SetUp failed for volume \"{name}\" : {why}"))?;
        found.push((name.to_owned(), source));
    }
    Ok(found)
}

fn source(
    store: &Store,
    pod: &Value,
    volume: &Value,
    claims: &BTreeMap<String, PathBuf>,
    images: &BTreeMap<String, super::images::Image>,
) -> Result<Source, String> {
    if let Some(empty) = volume["emptyDir"].as_object() {
        let memory = empty.get("medium").is_some_and(|m| m == "Memory");
        let limit = empty.get("sizeLimit").and_then(quantity::of);
        let limit = limit.and_then(|milli| u64::try_from(milli / 1000).ok());
        return Ok(if memory {
            Source::Memory(limit)
        } else {
            Source::Empty
        });
    }
    for (key, resource) in [("configMap", "configmaps"), ("secret", "secrets")] {
        let of = &volume[key];
        if of.is_object() {
            return files_of(store, pod, key, resource, of, mode(&of["defaultMode"]))
                .map(Source::Files);
        }
    }
    if volume["downwardAPI"].is_object() {
        let of = &volume["downwardAPI"];
        return downward(pod, of, mode(&of["defaultMode"])).map(Source::Files);
    }
    if volume["projected"].is_object() {
        let mode = mode(&volume["projected"]["defaultMode"]);
        let mut files = Vec::new();
        for part in list(&volume["projected"]["sources"]) {
            for (key, resource) in [("configMap", "configmaps"), ("secret", "secrets")] {
                if part[key].is_object() {
                    files.extend(files_of(store, pod, key, resource, &part[key], mode)?);
                }
            }
            if part["downwardAPI"].is_object() {
                files.extend(downward(pod, &part["downwardAPI"], mode)?);
            }
        }
        return Ok(Source::Files(files));
    }
    if let Some(path) = volume["hostPath"]["path"].as_str() {
        return if Path::new(path).exists() {
            Ok(Source::Folder(path.into(), false))
        } else {
            Err(format!(
                "hostPath type check failed: {path} is not a directory"
            ))
        };
    }
    if let Some(name) = volume["image"]["reference"].as_str() {
        return images
            .get(name)
            .map(|image| Source::Folder(image.rootfs.clone(), true))
            .ok_or_else(|| format!("failed to pull image \"{name}\": not found"));
    }
    if let Some(claim) = volume["persistentVolumeClaim"]["claimName"].as_str() {
        let read_only = volume["persistentVolumeClaim"]["readOnly"] == true;
        return claims
            .get(claim)
            .map(|folder| Source::Folder(folder.clone(), read_only))
            .ok_or_else(|| format!("persistentvolumeclaim \"{claim}\" not found"));
    }
    Err("unknown kind of volume".to_owned())
}

fn mode(value: &Value) -> u32 {
    value
        .as_u64()
        .and_then(|mode| u32::try_from(mode).ok())
        .unwrap_or(0o644)
}

fn files_of(
    store: &Store,
    pod: &Value,
    key: &str,
    resource: &str,
    of: &Value,
    mode_default: u32,
) -> Result<Files, String> {
    let namespace = text(&pod["metadata"]["namespace"]);
    let name = match of["secretName"].as_str() {
        Some(name) => name,
        None => text(&of["name"]),
    };
    let Some(object) = store.get(&Key::new(resource, namespace, name)) else {
        if of["optional"] == true {
            return Ok(Vec::new());
        }
        return Err(format!("{} \"{name}\" not found", key.to_lowercase()));
    };
    let mut values = entries(object, resource);
    if of["items"].is_null() {
        let all = values
            .into_iter()
            .map(|(key, bytes)| (key, bytes, mode_default));
        return Ok(all.collect());
    }
    let mut files = Vec::new();
    for item in list(&of["items"]) {
        let wanted = text(&item["key"]);
        match values.remove(wanted) {
            Some(bytes) => {
                let mode = item["mode"].as_u64().and_then(|m| u32::try_from(m).ok());
                let path = text(&item["path"]).to_owned();
                files.push((path, bytes, mode.unwrap_or(mode_default)));
            }
            None if of["optional"] == true => {}
            None => return Err(format!("references non-existent key: {wanted}")),
        }
    }
    Ok(files)
}

fn downward(pod: &Value, of: &Value, mode: u32) -> Result<Files, String> {
    list(&of["items"])
        .map(|item| {
            let path = text(&item["fieldRef"]["fieldPath"]);
            let value = field(pod, path).ok_or_else(|| format!("unsupported fieldPath: {path}"))?;
            Ok((text(&item["path"]).to_owned(), value.into_bytes(), mode))
        })
        .collect()
}

/// Makes folders of them.
pub(crate) fn prepare(
    folder: &Path,
    sources: Vec<(String, Source)>,
    group: Option<u32>,
) -> io::Result<Volumes> {
    let mut volumes = Volumes::default();
    for (name, source) in sources {
        let own = folder.join(&name);
        let read_only = match source {
            Source::Folder(path, read_only) => {
                volumes.folders.insert(name, (path, read_only));
                continue;
            }
            Source::Files(files) => {
                make_folder(&own, group)?;
                for (path, bytes, mode) in files {
                    let path = own.join(path);
                    if let Some(parent) = path.parent() {
                        fs::create_dir_all(parent)?;
                    }
                    fs::write(&path, bytes)?;
                    let mode = if group.is_some() { mode | 0o040 } else { mode };
                    fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
                    std::os::unix::fs::chown(&path, None, group)?;
                }
                // Files of the cluster's are never written through a volume.
                true
            }
            Source::Empty => {
                make_folder(&own, group)?;
                false
            }
            Source::Memory(limit) => {
                make_folder(&own, group)?;
                volumes.memory.push((own.clone(), limit));
                false
            }
        };
        volumes.folders.insert(name, (own, read_only));
    }
    Ok(volumes)
}

fn make_folder(folder: &Path, group: Option<u32>) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    std::os::unix::fs::chown(folder, None, group)?;
    let mode = if group.is_some() { 0o2777 } else { 0o777 };
    fs::set_permissions(folder, fs::Permissions::from_mode(mode))
}
