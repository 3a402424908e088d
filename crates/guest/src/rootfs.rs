//! A root file system of one's own instead of the host's: an unpacked image. Its folders are
//! mounted read-only; those of the task are copied, so that they can be written.

use std::{
    fs, io,
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::fs::symlink,
    },
    path::{Path, PathBuf},
};

use crate::stage::{attach, clone_image, clone_tree};

/// Never taken from an image: a sandbox has its own.
const OWN: [&str; 5] = ["proc", "dev", "run", "sys", "tmp"];
/// Mounted even when workspace or HOME are below them.
const SYSTEM: [&str; 9] = [
    "usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "opt", "var",
];

/// What is at the top of an image.
#[derive(Debug)]
enum Top {
    Folder(String, OwnedFd),
    Link(String, PathBuf),
}

/// An image that was opened, with the rights of the warden.
#[derive(Debug)]
pub(crate) struct Rootfs {
    tops: Vec<Top>,
}

impl Rootfs {
    /// Opens what a sandbox will see; `users` are those that the owners of files are.
    pub(crate) fn open(
        folder: &Path,
        writable: [&Path; 2],
        users: Option<&OwnedFd>,
    ) -> Result<Self, String> {
        let say = |error: io::Error| format!("root file system {}: {error}", folder.display());
        let mut tops = Vec::new();
        for entry in fs::read_dir(folder).map_err(say)? {
            let entry = entry.map_err(say)?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if OWN.contains(&name.as_str()) {
                continue;
            }
            let kind = entry.file_type().map_err(say)?;
            if kind.is_symlink() {
                let target = fs::read_link(entry.path()).map_err(say)?;
                tops.push(Top::Link(name, target));
            } else if kind.is_dir() {
                let tree = clone_image(&entry.path(), users).map_err(say)?;
                let top = Path::new("/").join(&name);
                let holds = writable.iter().any(|path| path.starts_with(&top));
                if !holds || SYSTEM.contains(&name.as_str()) {
                    tops.push(Top::Folder(name, tree));
                }
            }
        }
        Ok(Self { tops })
    }

    /// The descriptors that must stay open for it.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        self.tops.iter().filter_map(|top| match top {
            Top::Folder(_, tree) => Some(tree.as_raw_fd()),
            Top::Link(..) => None,
        })
    }

    /// Puts it into a fresh root.
    pub(crate) fn attach(&self, root: &Path) -> io::Result<()> {
        for top in &self.tops {
            match top {
                Top::Folder(name, tree) => {
                    let target = root.join(name);
                    fs::create_dir(&target)?;
                    attach(tree, &target)?;
                }
                Top::Link(name, target) => symlink(target, root.join(name))?,
            }
        }
        Ok(())
    }
}

/// Makes a folder that can be written, also where a read-only one is; what that has is copied.
/// `spare` is an unused path on the writable file system, `image` the folder's place in an image.
pub(crate) fn writable_folder(target: &Path, spare: &Path, image: Option<&Path>) -> io::Result<()> {
    let covered = target.exists();
    let folder = if covered { spare } else { target };
    fs::create_dir_all(folder)?;
    match image {
        Some(image) if image.is_dir() => copy(image, folder)?,
        _ if covered => copy(target, folder)?,
        _ => {}
    }
    if covered {
        attach(&clone_tree(folder)?, target)?;
    }
    Ok(())
}

/// Copies folders, files and links.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let context = |path: &Path, error: io::Error| {
        io::Error::new(error.kind(), format!("copying {}: {error}", path.display()))
    };
    let mut open = vec![PathBuf::new()];
    while let Some(folder) = open.pop() {
        let source = from.join(&folder);
        for entry in fs::read_dir(&source).map_err(|e| context(&source, e))? {
            let entry = entry?;
            let path = folder.join(entry.file_name());
            let kind = entry.file_type()?;
            let copied = if kind.is_dir() {
                open.push(path.clone());
                fs::create_dir(to.join(&path))
            } else if kind.is_symlink() {
                fs::read_link(entry.path()).and_then(|target| symlink(target, to.join(&path)))
            } else if kind.is_file() {
                fs::copy(entry.path(), to.join(&path)).map(drop)
            } else {
                Ok(())
            };
            copied.map_err(|e| context(&entry.path(), e))?;
        }
    }
    Ok(())
}
