//! What every sandbox of one warden shares: the warden's own mount namespace, and in it a small
//! tmpfs with read-only binds of the system folders, a minimal `/etc` and `/dev`, and a copy of
//! this binary. A sandbox clones these mounts; the stage dies with the warden.
//!
//! An ordinary user's warden first makes a user namespace in which it keeps its own number, so
//! that it, too, may mount. A privileged one stays where it is.

use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::CWD,
    mount::{MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags},
    thread::CapabilitySet,
};

use crate::{ids::Ids, sys};

/// Attributes of every mount that a sandbox shares with the host.
pub(crate) const READ_ONLY: u64 =
    libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
/// Folders to hide in the warden's own namespace by the stage; the first that exists is taken.
/// Nothing that anybody would mount into a sandbox is below the first.
const PLACES: [&str; 4] = ["/sys/kernel", "/media", "/srv", "/mnt"];
const SYSTEM_FOLDERS: [&str; 7] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "nix"];
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
const ETC_FOLDERS: [&str; 5] = [
    "alternatives",
    "ssl/certs",
    "fonts",
    "pki/tls/certs",
    "pki/ca-trust/extracted",
];
const ETC_COPIES: [&str; 4] = ["ld.so.cache", "localtime", "mime.types", "os-release"];
/// [`crate::protocol::GUEST_PATH`], relative.
const GUEST: &str = "run/espalier/guest";
/// The user that sandboxes of a privileged warden run as on the host.
const NOBODY: u32 = 65534;

/// What this machine does not allow.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) what: String,
    pub(crate) hint: String,
}

/// The shared mounts.
#[derive(Debug)]
pub(crate) struct Stage {
    folder: PathBuf,
    system: Vec<&'static str>,
    /// Whether the warden has real root's power over mounts.
    pub(crate) privileged: bool,
    /// Who the users of sandboxes are on the host.
    pub(crate) ids: Ids,
    /// A user namespace with these users, for the owners of an image's files.
    pub(crate) users: Option<OwnedFd>,
}

const USER_NAMESPACE_HINT: &str = "allow user namespaces (sysctl user.max_user_namespaces, \
    kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in a \
    container: a seccomp profile that permits unshare and clone3), or use the docker kind";
const MOUNT_HINT: &str =
    "Linux 5.12 or newer with the new mount calls is needed; `espalier doctor` lists what is there";

impl Stage {
    /// Leaves the host's namespaces and prepares the mounts.
    pub(crate) fn prepare() -> Result<Self, Refusal> {
        let uid = rustix::process::geteuid().as_raw();
        let gid = rustix::process::getegid().as_raw();
        let privileged = uid == 0
            && rustix::thread::capabilities(None)
                .is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
        if uid == 0 && !privileged {
            return Err(Refusal {
                what: "root without CAP_SYS_ADMIN may not map another user".to_owned(),
                hint: "run as an ordinary user, or grant CAP_SYS_ADMIN".to_owned(),
            });
        }
        let ids = if privileged {
            Ids::of_root(NOBODY)
        } else {
            Ids::of_ordinary(uid, gid).map_err(|e| Refusal {
                what: format!("making a user namespace: {e}"),
                hint: USER_NAMESPACE_HINT.to_owned(),
            })?
        };
        try_namespaces()?;
        let folder = PLACES
            .iter()
            .map(Path::new)
            .find(|p| p.is_dir())
            .ok_or_else(|| Refusal {
                what: format!("none of the folders {PLACES:?} exists to stage mounts on"),
                hint: "create an empty /srv".to_owned(),
            })?;
        let mut stage = Self {
            folder: folder.to_owned(),
            system: Vec::new(),
            privileged,
            users: None,
            ids,
        };
        if privileged && stage.ids.several() {
            stage.users = stage.ids.namespace().ok();
        }
        stage.fill().map_err(|e| Refusal {
            what: format!("preparing the shared read-only mounts: {e}"),
            hint: MOUNT_HINT.to_owned(),
        })?;
        Ok(stage)
    }

    /// An empty folder for the root of a sandbox.
    pub(crate) fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    /// The shared folders and files: where they are on the stage, and where they belong in a sandbox.
    pub(crate) fn shared(&self) -> impl Iterator<Item = (PathBuf, PathBuf)> {
        let base = self.folder.join("base");
        let other = ["etc", "dev", GUEST];
        self.system
            .iter()
            .copied()
            .chain(other)
            .map(move |name| (base.join(name), name.into()))
    }

    fn fill(&mut self) -> io::Result<()> {
        sys::unshare(libc::CLONE_NEWNS)?;
        rustix::mount::mount_change(
            "/",
            MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
        )?;
        rustix::mount::mount(
            "espalier",
            &self.folder,
            "tmpfs",
            MountFlags::NOSUID | MountFlags::NODEV,
            c"mode=0755,size=64m",
        )?;
        let base = self.folder.join("base");
        fs::create_dir(self.root())?;
        for name in SYSTEM_FOLDERS {
            let source = Path::new("/").join(name);
            if source.is_dir() {
                let target = base.join(name);
                fs::create_dir_all(&target)?;
                attach(&clone_read_only(&source)?, &target)?;
                self.system.push(name);
            }
        }
        fill_etc(&base.join("etc"))?;
        fill_dev(&base.join("dev"))?;
        let guest = base.join(GUEST);
        if let Some(parent) = guest.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::copy("/proc/self/exe", &guest)?;
        fs::set_permissions(&guest, fs::Permissions::from_mode(0o755))?;
        attach(&clone_read_only(&guest)?, &guest)
    }
}

/// The namespaces of a sandbox.
pub(crate) const NAMESPACES: [(&str, libc::c_int); 7] = [
    ("user", libc::CLONE_NEWUSER),
    ("pid", libc::CLONE_NEWPID),
    ("mount", libc::CLONE_NEWNS),
    ("network", libc::CLONE_NEWNET),
    ("ipc", libc::CLONE_NEWIPC),
    ("uts", libc::CLONE_NEWUTS),
    ("cgroup", libc::CLONE_NEWCGROUP),
];

/// All of [`NAMESPACES`].
pub(crate) fn all_namespaces() -> libc::c_int {
    NAMESPACES.iter().fold(0, |all, (_, flag)| all | flag)
}

/// Makes a process in the given namespaces that ends at once.
pub(crate) fn try_clone(flags: libc::c_int) -> io::Result<()> {
    match sys::clone3(flags, None)? {
        sys::Fork::Child => sys::exit_now(0),
        sys::Fork::Parent((pid, _)) => {
            rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty())?;
            Ok(())
        }
    }
}

fn try_namespaces() -> Result<(), Refusal> {
    let Err(error) = try_clone(all_namespaces()) else {
        return Ok(());
    };
    for (name, flag) in NAMESPACES {
        if let Err(error) = try_clone(libc::CLONE_NEWUSER | flag) {
            return Err(Refusal {
                what: format!("clone3 with a new {name} namespace: {error}"),
                hint: USER_NAMESPACE_HINT.to_owned(),
            });
        }
    }
    Err(Refusal {
        what: format!("clone3 with all namespaces together: {error}"),
        hint: USER_NAMESPACE_HINT.to_owned(),
    })
}

fn context(what: &str, path: &Path) -> impl FnOnce(rustix::io::Errno) -> io::Error {
    let text = format!("{what} {}", path.display());
    move |errno| {
        let error = io::Error::from(errno);
        io::Error::new(error.kind(), format!("{text}: {error}"))
    }
}

/// A detached copy of the mount tree at `path` with its attributes as they are.
pub(crate) fn clone_tree(path: &Path) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    rustix::mount::open_tree(CWD, path, flags).map_err(context("open_tree", path))
}

/// A detached read-only copy of the mount tree at `path`.
pub(crate) fn clone_read_only(path: &Path) -> io::Result<OwnedFd> {
    let tree = clone_tree(path)?;
    read_only(&tree, path, None)?;
    Ok(tree)
}

/// The same of a folder of an image, whose owners are users of the sandbox: where they cannot be
/// (the file system does not know how, or we are an ordinary user), they are nobody in there.
pub(crate) fn clone_image(path: &Path, users: Option<&OwnedFd>) -> io::Result<OwnedFd> {
    let tree = clone_tree(path)?;
    if users.is_none() || read_only(&tree, path, users).is_err() {
        read_only(&tree, path, None)?;
    }
    Ok(tree)
}

fn read_only(tree: &OwnedFd, path: &Path, users: Option<&OwnedFd>) -> io::Result<()> {
    sys::add_mount_attributes(tree.as_fd(), READ_ONLY, true, users.map(AsFd::as_fd))
        .map_err(|e| io::Error::new(e.kind(), format!("mount_setattr {}: {e}", path.display())))
}

/// Attaches a detached mount.
pub(crate) fn attach(tree: &OwnedFd, target: &Path) -> io::Result<()> {
    rustix::mount::move_mount(
        tree,
        "",
        CWD,
        target,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )
    .map_err(context("move_mount to", target))
}

fn fill_etc(etc: &Path) -> io::Result<()> {
    fs::create_dir_all(etc)?;
    // Every sandbox adds its own user to both lists, with the HOME that it has there.
    let files = [
        (
            "passwd",
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
        ),
        ("group", "root:x:0:\nnogroup:x:65534:\n"),
        ("hosts", "127.0.0.1 localhost sandbox\n::1 localhost\n"),
        ("hostname", "sandbox\n"),
        (
            "nsswitch.conf",
            "passwd: files\ngroup: files\nhosts: files\n",
        ),
        ("resolv.conf", ""),
        ("shells", "/bin/sh\n/bin/bash\n"),
    ];
    for (name, content) in files {
        fs::write(etc.join(name), content)?;
    }
    for name in ETC_COPIES {
        let source = Path::new("/etc").join(name);
        if source.is_file() {
            fs::write(etc.join(name), fs::read(source)?)?;
        }
    }
    for name in ETC_FOLDERS {
        let source = Path::new("/etc").join(name);
        if source.is_dir() {
            let target = etc.join(name);
            fs::create_dir_all(&target)?;
            attach(&clone_read_only(&source)?, &target)?;
        }
    }
    attach(&clone_read_only(etc)?, etc)
}

fn fill_dev(dev: &Path) -> io::Result<()> {
    fs::create_dir_all(dev)?;
    for name in ["pts", "shm"] {
        fs::create_dir(dev.join(name))?;
    }
    let links = [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ];
    for (name, target) in links {
        symlink(target, dev.join(name))?;
    }
    for name in DEVICES {
        fs::write(dev.join(name), "")?;
    }
    // The folder read-only first, then the devices on it: theirs must not be `nodev`.
    attach(&clone_read_only(dev)?, dev)?;
    for name in DEVICES {
        let source = Path::new("/dev").join(name);
        if source.exists() {
            attach(&clone_tree(&source)?, &dev.join(name))?;
        }
    }
    Ok(())
}
