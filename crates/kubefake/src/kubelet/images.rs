//! Images: names, and the folders that stand for them.

use std::{collections::BTreeMap, path::PathBuf};

use serde_json::Value;

use crate::validate::text;

/// What stands for an image.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Image {
    /// An unpacked root file system. It is not changed: containers write into a layer above.
    pub rootfs: PathBuf,
    /// Folders of the host that containers see besides, read-only: host path, path inside.
    pub mounts: Vec<(PathBuf, PathBuf)>,
    /// `KEY=value`.
    pub env: Vec<String>,
    /// Program and first arguments.
    pub entrypoint: Vec<String>,
    /// Arguments after the entry point when a pod names none.
    pub command: Vec<String>,
    /// Working folder; `/` when empty.
    pub working_dir: String,
    /// Number of the user.
    pub user: u32,
    /// Whether the node has it without pulling.
    pub present: bool,
}

/// How a pull goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pull {
    /// As the table of images says.
    Works,
    /// It fails with these words of a registry.
    Fails(String),
    /// It does not end until this is changed.
    Hangs,
}

#[derive(Debug, Default)]
pub(crate) struct Images {
    pub(crate) table: BTreeMap<String, Image>,
    pub(crate) pulls: BTreeMap<String, Pull>,
}

/// Where a try to have an image on the node stands.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Tried {
    Here(Image),
    /// Reason, message.
    Not(&'static str, String),
    Hangs,
}

impl Images {
    /// One try for a container.
    pub(crate) fn attempt(&mut self, container: &Value) -> Tried {
        let name = text(&container["image"]);
        let policy = text(&container["imagePullPolicy"]);
        let bad = |c: char| c.is_ascii_uppercase() || c.is_whitespace();
        let path = name.rsplit_once(':').map_or(name, |(path, _)| path);
        if path.contains(bad) || name.contains("//") || name.ends_with(':') {
            let why = format!(
                "Failed to apply default image tag \"{name}\": couldn't parse image name \
                 \"{name}\": invalid reference format"
            );
            return Tried::Not("InvalidImageName", why);
        }
        let known = self.table.get_mut(name);
        let present = known.as_ref().is_some_and(|image| image.present);
        if policy == "Never" || (policy == "IfNotPresent" && present) {
            return match known {
                Some(image) if image.present => Tried::Here(image.clone()),
                _ => Tried::Not(
                    "ErrImageNeverPull",
                    format!("Container image \"{name}\" is not present with pull policy of Never"),
                ),
            };
        }
        let failed = |why: &str| {
            Tried::Not(
                "ErrImagePull",
                format!("failed to pull and unpack image \"{name}\": {why}"),
            )
        };
        match (self.pulls.get(name), known) {
            (Some(Pull::Hangs), _) => Tried::Hangs,
            (Some(Pull::Fails(why)), _) => failed(why),
            (_, Some(image)) => {
                image.present = true;
                Tried::Here(image.clone())
            }
            (_, None) => failed(&format!(
                "failed to resolve reference \"{name}\": {name}: not found"
            )),
        }
    }
}

/// The host's own system as an image: its `/usr`, read-only, and next to nothing else. `folder` is
/// filled.
///
/// # Errors
/// When the folder cannot be written.
pub fn host_image(folder: PathBuf) -> std::io::Result<Image> {
    use std::os::unix::fs::{PermissionsExt, symlink};
    for name in [
        "etc", "proc", "dev", "sys", "run", "tmp", "usr", "var/tmp", "root", "home",
    ] {
        std::fs::create_dir_all(folder.join(name))?;
    }
    for name in ["tmp", "var/tmp"] {
        let open = std::fs::Permissions::from_mode(0o1777);
        std::fs::set_permissions(folder.join(name), open)?;
    }
    for name in ["bin", "sbin", "lib", "lib32", "lib64"] {
        let there = std::path::Path::new("/usr").join(name).exists();
        if there && !folder.join(name).exists() {
            symlink(format!("usr/{name}"), folder.join(name))?;
        }
    }
    let users = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n";
    std::fs::write(folder.join("etc/passwd"), users)?;
    std::fs::write(folder.join("etc/group"), "root:x:0:\nnogroup:x:65534:\n")?;
    let mut mounts = vec![(PathBuf::from("/usr"), PathBuf::from("/usr"))];
    // Links into it are what `sh`, `awk` and the like are.
    let alternatives = PathBuf::from("/etc/alternatives");
    if alternatives.is_dir() {
        mounts.push((alternatives.clone(), alternatives));
    }
    Ok(Image {
        rootfs: folder,
        mounts,
        env: vec!["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()],
        entrypoint: Vec::new(),
        command: vec!["sh".to_owned()],
        working_dir: String::new(),
        user: 0,
        present: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pull_policy_means_what_it_says() {
        let mut images = Images::default();
        let image = Image::default();
        images.table.insert(
            "there:1".to_owned(),
            Image {
                present: true,
                ..image.clone()
            },
        );
        images.table.insert("far:1".to_owned(), image);
        let mut attempt = |name: &str, policy: &str| match images
            .attempt(&json!({"image": name, "imagePullPolicy": policy}))
        {
            Tried::Here(_) => "here",
            Tried::Not(reason, _) => reason,
            Tried::Hangs => "hangs",
        };
        assert_eq!(attempt("there:1", "Never"), "here");
        assert_eq!(attempt("far:1", "Never"), "ErrImageNeverPull");
        assert_eq!(attempt("far:1", "IfNotPresent"), "here");
        assert_eq!(attempt("far:1", "Never"), "here", "it was pulled meanwhile");
        assert_eq!(attempt("none:1", "Always"), "ErrImagePull");
        assert_eq!(attempt("No Name", "Always"), "InvalidImageName");
    }
}
