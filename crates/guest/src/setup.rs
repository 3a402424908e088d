//! From a fresh clone in new namespaces to PID 1 of a sandbox: the file system, the loopback
//! interface, and then the loss of every privilege.

use std::{
    ffi::CString,
    fs, io,
    net::TcpListener,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use rustix::{
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, UnmountFlags,
        fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change,
    },
    net::{AddressFamily, SocketType},
    process::{Resource, Rlimit, Signal},
    thread::{Gid, Uid},
};

use crate::{
    checks::{check_limits, check_path, check_ports},
    privileges::drop_privileges,
    protocol::{Plan, UID, forward_path},
    rootfs::{Rootfs, writable_folder},
    stage::{Stage, attach, clone_read_only, clone_tree},
    sys, user,
};

/// Which step failed, and why.
#[derive(Debug)]
pub(crate) struct SetupError {
    step: String,
    error: io::Error,
}

impl std::fmt::Display for SetupError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.step, self.error)
    }
}

/// Names the step of a failure.
pub(crate) trait Step<T> {
    fn step(self, step: &str) -> Result<T, SetupError>;
}

impl<T, E: Into<io::Error>> Step<T> for Result<T, E> {
    fn step(self, step: &str) -> Result<T, SetupError> {
        self.map_err(|error| SetupError {
            step: step.to_owned(),
            error: error.into(),
        })
    }
}

/// What the warden prepared for one sandbox.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    pub(crate) stage: &'a Stage,
    pub(crate) plan: &'a Plan,
    /// Detached read-only trees, one for each of the plan's mounts.
    pub(crate) mounts: &'a [OwnedFd],
    /// Detached trees of the sockets behind forwarded ports.
    pub(crate) forwards: &'a [OwnedFd],
    /// The image, when it is not the host's system.
    pub(crate) rootfs: Option<&'a Rootfs>,
    /// Which limits need an rlimit: memory, processes.
    pub(crate) rlimits: (bool, bool),
}

/// Checks what the kernel would not: that paths are absolute, plain and out of the system's way.
pub(crate) fn check_plan(plan: &Plan) -> Result<(), String> {
    let targets = plan.mounts.iter().map(|(_, target)| target);
    for path in targets.chain([&plan.workspace, &plan.home]) {
        check_path(path)?;
    }
    check_ports(plan.forwards.iter().map(|(port, _)| *port))?;
    check_limits(
        plan.memory_bytes,
        plan.pids,
        plan.cpu_cores,
        plan.disk_bytes,
    )
}

/// Makes this process PID 1 of a finished sandbox. Gives the forwarder's listeners.
pub(crate) fn run(prepared: &Prepared<'_>) -> Result<Vec<TcpListener>, SetupError> {
    become_user(prepared.stage.ids.several())?;
    let _ = rustix::process::setsid();
    sys::new_session_keyring();
    rustix::system::sethostname(b"sandbox").step("sethostname")?;
    mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )
    .step("making mounts private")?;
    let root = prepared.stage.root();
    build_root(prepared, &root)?;
    let listeners = network(prepared.plan)?;
    rustix::process::chdir(&root).step("chdir to the new root")?;
    rustix::process::pivot_root(".", ".").step("pivot_root")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).step("detaching the host's files")?;
    rustix::process::chdir("/").step("chdir /")?;
    limits(prepared)?;
    drop_privileges()?;
    Ok(listeners)
}

fn become_user(groups_too: bool) -> Result<(), SetupError> {
    let (uid, gid) = (Uid::from_raw(UID), Gid::from_raw(UID));
    if groups_too {
        // An ordinary user with one number may not change groups here; they stay as they are.
        rustix::thread::set_thread_groups(&[]).step("setgroups")?;
    }
    let _ = rustix::thread::set_keep_capabilities(true);
    rustix::thread::set_thread_res_gid(gid, gid, gid).step("setresgid")?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).step("setresuid")?;
    let mut sets = rustix::thread::capabilities(None).step("capget")?;
    sets.effective = sets.permitted;
    rustix::thread::set_capabilities(None, sets).step("capset")?;
    // A change of user resets this, so it comes after.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .step("PR_SET_PDEATHSIG")?;
    rustix::process::umask(rustix::fs::Mode::WGRP | rustix::fs::Mode::WOTH);
    Ok(())
}

fn new_mount(
    kind: &str,
    options: &[(&str, &str)],
    attributes: MountAttrFlags,
) -> io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        fsconfig_set_string(context.as_fd(), *key, *value)?;
    }
    fsconfig_create(context.as_fd())?;
    Ok(fsmount(
        context.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        attributes,
    )?)
}

fn within(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn open_folder(root: &Path, path: &str, mode: u32) -> Result<(), SetupError> {
    let folder = within(root, Path::new(path));
    fs::create_dir_all(&folder).step(path)?;
    fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).step(path)
}

fn build_root(prepared: &Prepared<'_>, root: &Path) -> Result<(), SetupError> {
    let plan = prepared.plan;
    let safe = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let inodes = (plan.disk_bytes / 1024).clamp(16_384, 1 << 20);
    let options = [
        ("size", plan.disk_bytes.to_string()),
        ("nr_inodes", inodes.to_string()),
        ("mode", "0755".to_owned()),
    ];
    let options: Vec<_> = options
        .iter()
        .map(|(key, value)| (*key, value.as_str()))
        .collect();
    let tree = new_mount("tmpfs", &options, safe).step("mounting the root tmpfs")?;
    attach(&tree, root).step("attaching the root tmpfs")?;

    if let Some(rootfs) = prepared.rootfs {
        rootfs.attach(root).step("the root file system")?;
    }
    let system = prepared.rootfs.is_none();
    let ours = |target: &Path| target.starts_with("dev") || target.starts_with("run");
    let shared = prepared.stage.shared();
    for (source, target) in shared.filter(|(_, target)| system || ours(target)) {
        let tree = clone_tree(&source).step("system folders")?;
        attach_any(&tree, &root.join(target)).step("system folders")?;
    }
    fs::create_dir(root.join("proc")).step("/proc")?;
    let proc = new_mount("proc", &[], safe | MountAttrFlags::MOUNT_ATTR_NOEXEC)
        .step("mounting a fresh /proc (refused when the host covers parts of its own)")?;
    attach(&proc, &root.join("proc")).step("/proc")?;

    for folder in ["/tmp", "/run/shm"] {
        open_folder(root, folder, 0o1777)?;
    }
    let spare = |name: &str| within(root, Path::new("/run/espalier")).join(name);
    if within(root, Path::new("/var/tmp")).exists() {
        open_folder(root, "/run/espalier/var-tmp", 0o1777)?;
        let tree = clone_tree(&spare("var-tmp")).step("/var/tmp")?;
        attach(&tree, &within(root, Path::new("/var/tmp"))).step("/var/tmp")?;
    } else if system {
        open_folder(root, "/var/tmp", 0o1777)?;
    }
    // Shared memory counts as disk: the same tmpfs.
    let shm = clone_tree(&root.join("run/shm")).step("/dev/shm")?;
    attach(&shm, &root.join("dev/shm")).step("/dev/shm")?;
    // Not every kernel allows one here; programs that need a terminal then say so themselves.
    let options = [("newinstance", ""), ("ptmxmode", "0666"), ("mode", "0620")];
    let options = &options[1..];
    if let Ok(pts) = new_mount(
        "devpts",
        options,
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    ) {
        attach(&pts, &root.join("dev/pts")).step("/dev/pts")?;
    }

    for (folder, spare) in [
        (&plan.home, spare("home")),
        (&plan.workspace, spare("workspace")),
    ] {
        let image = plan.rootfs.as_ref().map(|image| within(image, folder));
        writable_folder(&within(root, folder), &spare, image.as_deref())
            .step(&folder.to_string_lossy())?;
    }
    name_users(prepared, root)?;

    for (tree, (source, target)) in prepared.mounts.iter().zip(&plan.mounts) {
        let step = format!("mounting {} at {}", source.display(), target.display());
        attach_any(tree, &within(root, target)).step(&step)?;
    }
    for (index, tree) in prepared.forwards.iter().enumerate() {
        let path = forward_path(index);
        attach_any(tree, &within(root, Path::new(&path))).step(&path)?;
    }
    Ok(())
}

/// Puts the sandbox's user into the lists of users and groups, and makes root's HOME where nobody else
/// has it.
fn name_users(prepared: &Prepared<'_>, root: &Path) -> Result<(), SetupError> {
    let home = prepared.plan.home.display();
    let agent = format!("agent:x:{UID}:{UID}::{home}:/bin/sh");
    for (path, line) in [
        (user::PASSWD, agent),
        (user::GROUP, format!("agent:x:{UID}:")),
    ] {
        let target = within(root, Path::new(path));
        // An image without one has no place for it.
        let Some(text) = user::read_list(&target, user::LIST_BYTES_MAX).step(path)? else {
            continue;
        };
        let spare = root.join("run/espalier/list");
        fs::write(&spare, user::with_number(&text, UID, &line)).step(path)?;
        let tree = clone_read_only(&spare).step(path)?;
        attach(&tree, &target).step(path)?;
        // Through its own name it could be written.
        fs::remove_file(&spare).step(path)?;
    }
    // A task whose HOME or workspace is in there has it for its own user.
    let plan = prepared.plan;
    let used = [&plan.home, &plan.workspace].map(|folder| folder.starts_with("/root"));
    let free = !used.contains(&true);
    if prepared.rootfs.is_none() && prepared.stage.ids.several() && free {
        let folder = within(root, Path::new("/root"));
        let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
        fs::create_dir_all(&folder).step("/root")?;
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).step("/root")?;
        rustix::fs::chown(&folder, Some(uid), Some(gid)).step("/root")?;
    }
    Ok(())
}

/// Attaches a tree at a path that need not exist.
fn attach_any(tree: &OwnedFd, target: &Path) -> io::Result<()> {
    let is_folder = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(tree)?.st_mode)
        == rustix::fs::FileType::Directory;
    if is_folder {
        fs::create_dir_all(target)?;
    } else {
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        if !target.exists() {
            fs::write(target, "")?;
        }
    }
    attach(tree, target)
}

fn network(plan: &Plan) -> Result<Vec<TcpListener>, SetupError> {
    let socket =
        rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).step("socket")?;
    sys::loopback_up(socket.as_fd()).step("switching the loopback interface on")?;
    plan.forwards
        .iter()
        .map(|(port, _)| listen(*port).step("listening on a forwarded port"))
        .collect()
}

/// 1, not 0: the kernel then writes no core file and does not start the host's core handler.
pub(crate) fn no_core_files() -> Result<(), SetupError> {
    let limit = Rlimit {
        current: Some(1),
        maximum: Some(1),
    };
    rustix::process::setrlimit(Resource::Core, limit).step("RLIMIT_CORE")
}

/// Listens on a loopback port, never waiting.
pub(crate) fn listen(port: u16) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn limits(prepared: &Prepared<'_>) -> Result<(), SetupError> {
    let limit = |resource, value| {
        rustix::process::setrlimit(
            resource,
            Rlimit {
                current: Some(value),
                maximum: Some(value),
            },
        )
    };
    no_core_files()?;
    let (memory, pids) = prepared.rlimits;
    if memory {
        limit(Resource::Data, prepared.plan.memory_bytes).step("RLIMIT_DATA")?;
    }
    if pids {
        limit(Resource::Nproc, u64::from(prepared.plan.pids)).step("RLIMIT_NPROC")?;
    }
    Ok(())
}

/// Points the standard streams at /dev/null.
pub(crate) fn silence() -> io::Result<()> {
    let null = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(())
}

/// The descriptors that setup needs.
pub(crate) fn descriptors(prepared: &Prepared<'_>) -> Vec<i32> {
    prepared
        .mounts
        .iter()
        .chain(prepared.forwards)
        .map(AsRawFd::as_raw_fd)
        .chain(prepared.rootfs.into_iter().flat_map(Rootfs::descriptors))
        .collect()
}

/// A C string, or an error that says which one was none.
pub(crate) fn c_string(text: &str) -> io::Result<CString> {
    CString::new(text).map_err(|_| io::Error::other(format!("a zero byte in {text:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            memory_bytes: 64 << 20,
            pids: 64,
            cpu_cores: 1.0,
            disk_bytes: 64 << 20,
            deadline_s: 60,
            mounts: Vec::new(),
            rootfs: None,
            workspace: "/workspace".into(),
            home: "/home/agent".into(),
            forwards: Vec::new(),
        }
    }

    #[test]
    fn plans_that_would_break_a_sandbox_are_refused_with_the_reason() {
        assert_eq!(check_plan(&plan()), Ok(()));
        let refused = |change: fn(&mut Plan)| {
            let mut plan = plan();
            change(&mut plan);
            check_plan(&plan).unwrap_err()
        };
        assert!(refused(|p| p.workspace = "work".into()).contains("absolute"));
        assert!(refused(|p| p.home = "/home/../etc".into()).contains(".."));
        assert!(refused(|p| p.home = "/".into()).contains("below /"));
        assert!(refused(|p| p.mounts = vec![("/x".into(), "/proc/x".into())]).contains("ours"));
        assert!(refused(|p| p.forwards = vec![(0, "/s".into())]).contains("port 0"));
        let twice = |p: &mut Plan| p.forwards = vec![(80, "/s".into()), (80, "/t".into())];
        assert!(refused(twice).contains("port 80"));
        assert!(refused(|p| p.cpu_cores = f64::NAN).contains("cpu_cores"));
        assert!(refused(|p| p.pids = 1).contains("pids"));
    }
}
