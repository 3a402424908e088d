//! Rights in a sandbox: what PID 1 keeps, what the supervisor of a program takes, and what is left
//! for the program.
//!
//! PID 1 is the sandbox's own user and uses one right: to end processes of other users. Those that
//! a change of user needs ([`OF_INIT`]) it holds without using them, where it was given them, so
//! that a supervisor can: its files, sockets and mistakes are those of an ordinary user. Nobody
//! may look into it, and nobody gets a right by starting a program (`no_new_privs`).
//!
//! The supervisor of a program of another user is that user, so that the sandbox's own programs
//! cannot end or stop it (nor before it is: [`guard`]); it keeps the right to end what that program starts. Programs have no
//! rights at all, but root's: those have [`OF_ROOT`], for files and users of the sandbox only.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd},
};

use rustix::{
    fs::{FileType, StatVfsMountFlags},
    process::DumpableBehavior,
    thread::{CapabilitySet, CapabilitySets, Gid, Uid},
};

use crate::{
    ids::parse_map,
    protocol::{UID, UserCause, UserFailure},
    seccomp,
    setup::{SetupError, Step},
    user::Account,
};

/// What root may do in a sandbox: what concerns files and users.
pub(crate) const OF_ROOT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID);
/// What PID 1 holds: root's, and to give up what a program must never get.
pub(crate) const OF_INIT: CapabilitySet = OF_ROOT.union(CapabilitySet::SETPCAP);
/// The number of a user that nobody is: below 65,536, so that every sandbox with several has it.
const GUARD: u32 = 65_533;

/// The names of what PID 1 holds, for whoever makes a container for it.
pub const CAPABILITIES: [&str; 8] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETPCAP",
    "SETUID",
];
/// Without these nobody can be switched to, and what he starts cannot be ended.
const OF_SWITCHING: CapabilitySet = CapabilitySet::SETUID
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::KILL);

fn set(permitted: CapabilitySet, effective: CapabilitySet) -> io::Result<()> {
    let sets = CapabilitySets {
        effective,
        permitted,
        inheritable: CapabilitySet::empty(),
    };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

fn held() -> io::Result<CapabilitySet> {
    Ok(rustix::thread::capabilities(None)?.permitted)
}

/// Gives up for good, also for what will be started, all but these. Best effort: it takes a right
/// that not everybody has, and `no_new_privs` holds without it.
fn bound(keep: CapabilitySet) {
    for bit in 0..64_u32 {
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        if keep.contains(capability) {
            continue;
        }
        // The kernel ends the list with EINVAL.
        if rustix::thread::remove_capability_from_bounding_set(capability).is_err() {
            break;
        }
    }
    let _ = rustix::thread::clear_ambient_capability_set();
}

/// From root to the sandbox's user; the file system is somebody else's work.
pub(crate) fn become_plain_user() -> Result<(), SetupError> {
    let (uid, gid) = (Uid::from_raw(UID), Gid::from_raw(UID));
    rustix::thread::set_thread_groups(&[]).step("setgroups")?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).step("setresgid")?;
    rustix::thread::set_keep_capabilities(true).step("PR_SET_KEEPCAPS")?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).step("setresuid")?;
    let held = held().step("capget")?;
    set(held, held).step("capset")?;
    drop_privileges()
}

/// Leaves PID 1 what it needs for programs of other users, no way to get more, and no way for
/// others to look into it.
pub(crate) fn drop_privileges() -> Result<(), SetupError> {
    let _ = rustix::process::umask(rustix::fs::Mode::WGRP | rustix::fs::Mode::WOTH);
    bound(OF_INIT);
    let kept = held().step("capget")? & OF_INIT;
    set(kept, kept & CapabilitySet::KILL).step("capset")?;
    rustix::thread::set_no_new_privs(true).step("no_new_privs")?;
    seccomp::install().step("the filter of system calls")?;
    // PID 1 holds the control stream: nobody in here may look into it.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).step("PR_SET_DUMPABLE")
}

/// Puts PID 1, before it makes the supervisor of another user's program, out of the reach of the
/// sandbox's own programs: they may signal whose real and saved numbers are theirs. What it does
/// goes by the third number, which stays. The new process is out of reach from its first moment
/// then, until it is its user. An error where it may not; nothing is changed then.
pub(crate) fn guard() -> io::Result<()> {
    real_user(GUARD)
}

/// Undoes [`guard`].
pub(crate) fn unguard() -> io::Result<()> {
    real_user(UID)
}

fn real_user(number: u32) -> io::Result<()> {
    let held = held()?;
    let (real, effective) = (Uid::from_raw(number), Uid::from_raw(UID));
    set(held, held & (CapabilitySet::KILL | CapabilitySet::SETUID))?;
    let changed = rustix::thread::set_thread_res_uid(real, effective, real);
    set(held, held & CapabilitySet::KILL)?;
    Ok(changed?)
}

/// Leaves the supervisor of a program of the sandbox's own user no right at all.
pub(crate) fn give_up_all() -> io::Result<()> {
    if rustix::process::getuid().as_raw() == GUARD {
        unguard()?;
    }
    let held = held()?;
    if !held.is_empty() {
        set(held, held)?;
        bound(CapabilitySet::empty());
    }
    set(CapabilitySet::empty(), CapabilitySet::empty())
}

/// Leaves a program of another user no right, but root his.
pub(crate) fn give_up_supervising(uid: u32) -> io::Result<()> {
    match uid {
        0 => Ok(()),
        _ => set(CapabilitySet::empty(), CapabilitySet::empty()),
    }
}

/// Whether this is who we are already.
pub(crate) fn is_own(account: &Account) -> bool {
    account.uid == UID && account.groups == [UID]
}

fn refused(reason: String) -> UserFailure {
    UserFailure {
        cause: UserCause::Refused,
        reason,
    }
}

/// Makes a supervisor another user. Its streams become his, as far as they are pipes, and the
/// working folder is entered before, as engines do it, with the rights of root over files: whether
/// that worked; if not, his own may do.
pub(crate) fn switch(
    account: &Account,
    streams: [BorrowedFd<'_>; 3],
    cwd: &str,
) -> Result<bool, UserFailure> {
    let failed = |what: &'static str| {
        move |error: &dyn std::fmt::Display| refused(format!("{what}: {error}"))
    };
    let held = held().map_err(|e| failed("capget")(&e))?;
    check(account, held)?;
    set(held, held).map_err(|e| failed("capset")(&e))?;
    let (uid, gid) = (Uid::from_raw(account.uid), Gid::from_raw(account.gid));
    for stream in streams {
        // `/dev/stdout` is opened anew by many programs, which only its owner may.
        let pipe = rustix::fs::fstat(stream)
            .is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Fifo);
        if pipe {
            rustix::fs::fchown(stream.as_fd(), Some(uid), None)
                .map_err(|e| failed("giving him his streams")(&e))?;
        }
    }
    let entered = rustix::process::chdir(cwd).is_ok();
    let groups: Vec<Gid> = account.groups.iter().copied().map(Gid::from_raw).collect();
    rustix::thread::set_thread_groups(&groups).map_err(|e| failed("setgroups")(&e))?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(|e| failed("setresgid")(&e))?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(|e| failed("setresuid")(&e))?;
    let (left, kept) = match account.uid {
        0 => (OF_ROOT, OF_ROOT),
        _ => (CapabilitySet::empty(), CapabilitySet::KILL),
    };
    bound(left);
    set(kept, kept).map_err(|e| failed("capset")(&e))?;
    // The change of user may have undone this: what it does is the machine's to say.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|e| failed("PR_SET_DUMPABLE")(&e))?;
    Ok(entered)
}

/// Says early and in words what the kernel would say with a number.
fn check(account: &Account, held: CapabilitySet) -> Result<(), UserFailure> {
    let read = |file: &str| {
        let text = fs::read_to_string(file).map_err(|e| refused(format!("{file}: {e}")))?;
        Ok(parse_map(&text))
    };
    let users = read("/proc/self/uid_map")?;
    let groups = read("/proc/self/gid_map")?;
    mapped(&users, "user", &[account.uid])?;
    mapped(&groups, "group", &account.groups)?;
    let needed = if account.uid == 0 {
        OF_SWITCHING | OF_ROOT
    } else {
        OF_SWITCHING
    };
    if !held.contains(needed) {
        return Err(refused(format!(
            "the first process of this sandbox was started without the rights to switch users \
             (it holds the capabilities {:#x}, {:#x} are needed)",
            held.bits(),
            needed.bits()
        )));
    }
    // Without a user namespace root in here is the machine's, whose settings only a mount guards.
    if account.uid == 0 && users == [(0, 0, u32::MAX)] {
        let guarded = rustix::fs::statvfs("/proc/sys")
            .is_ok_and(|s| s.f_flag.contains(StatVfsMountFlags::RDONLY));
        if !guarded {
            return Err(refused(
                "/proc/sys can be written here, and without a user namespace this root is the \
                 machine's"
                    .to_owned(),
            ));
        }
    }
    Ok(())
}

/// Whether a sandbox has these numbers.
fn mapped(map: &[(u32, u32, u32)], what: &str, numbers: &[u32]) -> Result<(), UserFailure> {
    let has = |number: u32| {
        map.iter()
            .any(|&(start, _, count)| number >= start && number - start < count)
    };
    let Some(number) = numbers.iter().copied().find(|number| !has(*number)) else {
        return Ok(());
    };
    let ranges: Vec<String> = map
        .iter()
        .map(|&(start, _, count)| match count {
            1 => start.to_string(),
            _ => format!(
                "{start} to {}",
                start.saturating_add(count.saturating_sub(1))
            ),
        })
        .collect();
    Err(refused(format!(
        "the {what} number {number} is not among those of this sandbox ({})",
        ranges.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_not_mapped_is_named_with_those_that_are() {
        let map = [(0, 100_000, 1000), (1000, 7, 1), (1001, 101_000, 64_535)];
        for number in [0, 999, 1000, 1001, 65_535] {
            assert!(mapped(&map, "user", &[number]).is_ok(), "{number}");
        }
        let failure = mapped(&map, "group", &[5, 65_536]).unwrap_err();
        assert_eq!(failure.cause, UserCause::Refused);
        assert_eq!(
            failure.reason,
            "the group number 65536 is not among those of this sandbox (0 to 999, 1000, 1001 to 65535)"
        );
        let failure = mapped(&[(1000, 65_534, 1)], "user", &[0]).unwrap_err();
        assert!(failure.reason.ends_with("(1000)"), "{}", failure.reason);
        assert!(mapped(&[(0, 0, u32::MAX)], "user", &[u32::MAX - 1]).is_ok());
    }

    #[test]
    fn a_sandbox_without_rights_says_so() {
        let account = Account {
            uid: 0,
            gid: 0,
            groups: vec![0],
            name: None,
            home: "/".to_owned(),
        };
        let failure = check(&account, CapabilitySet::CHOWN).unwrap_err();
        assert_eq!(failure.cause, UserCause::Refused);
        // Where the tests themselves have one number only, that is the first reason.
        let said = ["without the rights", "not among those"];
        assert!(
            said.iter().any(|s| failure.reason.contains(s)),
            "{}",
            failure.reason
        );
    }

    #[test]
    fn a_container_is_asked_for_what_pid_1_holds() {
        let named = CAPABILITIES
            .iter()
            .filter_map(|n| CapabilitySet::from_name(n));
        assert_eq!(named.fold(CapabilitySet::empty(), |a, b| a | b), OF_INIT);
    }

    #[test]
    fn root_gets_nothing_that_reaches_beyond_files_and_users() {
        for capability in [
            CapabilitySet::SYS_ADMIN,
            CapabilitySet::SYS_PTRACE,
            CapabilitySet::NET_ADMIN,
            CapabilitySet::MKNOD,
            CapabilitySet::SYS_MODULE,
            CapabilitySet::SETPCAP,
            CapabilitySet::SETFCAP,
        ] {
            assert!(!OF_ROOT.contains(capability), "{capability:?}");
        }
    }
}
