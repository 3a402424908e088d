//! The system calls that neither `std` nor `rustix` offers safely. The only unsafe code of the
//! crate; every function is safe to call from a process with one thread, which every process
//! made by the warden is.

#![expect(
    unsafe_code,
    reason = "raw system calls: clone3, fork, execve, signalfd, mount_setattr, seccomp"
)]

use std::{
    ffi::{CStr, CString, c_char, c_long},
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

use rustix::process::Pid;

/// The constant of libc has too narrow a type.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Who we are after a fork.
#[derive(Debug)]
pub(crate) enum Fork<T> {
    /// The new process.
    Child,
    /// The old one.
    Parent(T),
}

fn check(result: c_long) -> io::Result<c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn to_pid(raw: c_long) -> io::Result<Pid> {
    i32::try_from(raw)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| io::Error::other(format!("the kernel gave the process id {raw}")))
}

/// Makes a process in the new namespaces named by `flags`, inside `cgroup` (version 2) when
/// given. Works like `fork`. The parent gets the process id and a descriptor of the process.
pub(crate) fn clone3(
    flags: libc::c_int,
    cgroup: Option<BorrowedFd<'_>>,
) -> io::Result<Fork<(Pid, OwnedFd)>> {
    let mut descriptor: RawFd = -1;
    // SAFETY: all-zero is a valid clone_args; every field is a plain integer.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = u64::from(flags.cast_unsigned()) | libc::CLONE_PIDFD as u64;
    arguments.pidfd = ptr::from_mut(&mut descriptor) as u64;
    arguments.exit_signal = libc::SIGCHLD as u64;
    if let Some(cgroup) = cgroup {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = u64::from(cgroup.as_raw_fd().cast_unsigned());
    }
    // SAFETY: without CLONE_VM and with no stack given, the child continues here on its own copy
    // of the stack, as after fork. The process has one thread, so no lock is held by another.
    let pid = check(unsafe {
        libc::syscall(
            libc::SYS_clone3,
            ptr::from_mut(&mut arguments),
            std::mem::size_of::<libc::clone_args>(),
        )
    })?;
    if pid == 0 {
        return Ok(Fork::Child);
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    Ok(Fork::Parent((to_pid(pid)?, descriptor)))
}

/// Makes a copy of this process.
pub(crate) fn fork() -> io::Result<Fork<Pid>> {
    // SAFETY: the process has one thread.
    match check(c_long::from(unsafe { libc::fork() }))? {
        0 => Ok(Fork::Child),
        pid => Ok(Fork::Parent(to_pid(pid)?)),
    }
}

/// Ends the process at once, without destructors: for children that must not clean up what
/// belongs to their parent.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: _exit has no precondition.
    unsafe { libc::_exit(code) }
}

/// Replaces the program; returns only on failure.
pub(crate) fn execve(program: &CStr, argv: &[CString], env: &[CString]) -> io::Error {
    let pointers = |strings: &[CString]| -> Vec<*const c_char> {
        strings
            .iter()
            .map(|s| s.as_ptr())
            .chain([ptr::null()])
            .collect()
    };
    let (argv, env) = (pointers(argv), pointers(env));
    // SAFETY: both lists end with null and their strings live until the call returns.
    unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// Blocks SIGCHLD and gives a descriptor that is readable when one is pending.
pub(crate) fn child_signals() -> io::Result<OwnedFd> {
    // SAFETY: the set is initialised by sigemptyset before use; the descriptor is new and ours.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGCHLD);
        check(c_long::from(libc::sigprocmask(
            libc::SIG_BLOCK,
            &raw const set,
            ptr::null_mut(),
        )))?;
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        check(c_long::from(fd))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Gives a program the signal state it expects: nothing blocked, nothing ignored, whatever our
/// own runtime or whoever started the orchestrator (`nohup`) ignores.
pub(crate) fn default_signals() {
    // SAFETY: SIG_DFL is a valid handler and the set is initialised by sigemptyset.
    unsafe {
        for signal in 1..32 {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const set, ptr::null_mut());
    }
}

/// Sends SIGKILL to every process we may signal but ourselves and PID 1, in one atomic step.
pub(crate) fn kill_all() {
    // SAFETY: kill has no memory effects.
    unsafe { libc::kill(-1, libc::SIGKILL) };
}

/// Closes every descriptor that is not in `keep` (standard streams are kept only if listed).
pub(crate) fn close_all_but(keep: &[RawFd]) {
    let mut keep: Vec<u32> = keep
        .iter()
        .filter_map(|&fd| u32::try_from(fd).ok())
        .collect();
    keep.sort_unstable();
    let mut next = 0_u32;
    for fd in keep {
        if fd > next {
            // SAFETY: callers never use the closed descriptors again: they run in a fresh child
            // that owns nothing but what it keeps and ends with `exit_now`.
            unsafe { libc::syscall(libc::SYS_close_range, next, fd - 1, 0) };
        }
        next = fd + 1;
    }
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_close_range, next, u32::MAX, 0) };
}

/// Adds mount attributes (`MOUNT_ATTR_*`) to a mount, and to all below it when `recursive`. With
/// the users of a namespace, files belong to those that their owners' numbers are in there.
pub(crate) fn add_mount_attributes(
    tree: BorrowedFd<'_>,
    attributes: u64,
    recursive: bool,
    users: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mapped = users.map_or(0, |_| libc::MOUNT_ATTR_IDMAP);
    let attr = libc::mount_attr {
        attr_set: attributes | mapped,
        attr_clr: 0,
        propagation: 0,
        userns_fd: users.map_or(0, |users| u64::from(users.as_raw_fd().cast_unsigned())),
    };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is empty and null-terminated; `attr` outlives the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            flags,
            ptr::from_ref(&attr),
            std::mem::size_of::<libc::mount_attr>(),
        )
    })?;
    Ok(())
}

/// Moves this process into new namespaces.
pub(crate) fn unshare(flags: libc::c_int) -> io::Result<()> {
    // SAFETY: the process has one thread, and the flags used do not unshare the file table.
    check(c_long::from(unsafe { libc::unshare(flags) }))?;
    Ok(())
}

/// Switches the loopback interface of this network namespace on.
pub(crate) fn loopback_up(socket: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: all-zero is a valid ifreq; the name "lo" is null-terminated by the zeroes.
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as c_char;
        request.ifr_name[1] = b'o' as c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
        check(c_long::from(libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS,
            ptr::from_ref(&request),
        )))?;
    }
    Ok(())
}

/// Puts a filter of system calls on this process and all that it will start.
pub(crate) fn install_filter(program: &[libc::sock_filter]) -> io::Result<()> {
    let length = u16::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog {
        len: length,
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the program, which outlives the call, and does not write to it.
    check(c_long::from(unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            ptr::from_ref(&program),
            0,
            0,
        )
    }))?;
    Ok(())
}

/// Leaves the session keyring of the user behind. Best effort: kernels without keyrings have
/// nothing to leave.
pub(crate) fn new_session_keyring() {
    // SAFETY: a null name asks for a new anonymous keyring.
    unsafe { libc::syscall(libc::SYS_keyctl, 1, ptr::null::<c_char>()) };
}
