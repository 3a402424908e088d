//! Which numbers of users and groups a sandbox has, and who these are on the host.
//!
//! A sandbox's own user, [`UID`], is always there, and is who the warden's sandboxes run as. The
//! others, so that programs can run as them, are a range of host numbers that nobody else has:
//!
//! * for a warden with root's rights [`FIRST`] and what follows, beyond all that systems hand out;
//! * for an ordinary user's the range that `/etc/subuid` and `/etc/subgid` give him, which only
//!   the set-uid programs `newuidmap` and `newgidmap` can map.
//!
//! All sandboxes of a host share them, as they share their own user: they are kept apart by
//! everything else.

use std::{
    fs,
    io::{self, Read, Write},
    os::fd::{AsFd, OwnedFd},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Signal, WaitOptions, kill_process, waitpid},
};

use crate::{
    protocol::UID,
    sys,
    user::{LIST_BYTES_MAX, read_list},
};

/// The most user numbers that a sandbox has.
pub(crate) const USERS_MAX: u32 = 65_536;
/// The first host number of a privileged warden's range.
const FIRST: u32 = 0x7000_0000;
/// For both helpers to do their work.
const HELPERS_TIMEOUT: Duration = Duration::from_secs(10);
/// What is said of a helper's complaint.
const COMPLAINT_BYTES_MAX: usize = 300;

/// Numbers that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) start: u32,
    pub(crate) count: u32,
}

impl Range {
    fn holds(self, number: u32) -> bool {
        number >= self.start && number - self.start < self.count
    }
}

/// Who the users and groups of sandboxes are on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ids {
    /// The host's user and group behind a sandbox's own.
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Users and groups behind the other numbers, or why there are none.
    others: Result<(Range, Range), String>,
}

impl Ids {
    /// A warden with root's rights, whose sandboxes run as `nobody`.
    pub(crate) fn of_root(nobody: u32) -> Self {
        let range = Range {
            start: FIRST,
            count: USERS_MAX,
        };
        let missing = ["/proc/self/uid_map", "/proc/self/gid_map"]
            .into_iter()
            .find(|file| !covers(&fs::read_to_string(file).unwrap_or_default(), range));
        let others = match missing {
            None => Ok((range, range)),
            Some(file) => Err(format!(
                "root may not map the numbers {FIRST} to {} here: {file} does not have them",
                FIRST + USERS_MAX - 1
            )),
        };
        Self {
            uid: nobody,
            gid: nobody,
            others,
        }
    }

    /// Moves an ordinary user's warden into a user namespace of its own, in which it keeps its
    /// number, with the numbers that were given to this user beside it.
    pub(crate) fn of_ordinary(uid: u32, gid: u32) -> io::Result<Self> {
        let others = match subordinate(uid) {
            Ok(ranges) => with_helpers((uid, gid), ranges)?,
            Err(reason) => {
                sys::unshare(libc::CLONE_NEWUSER)?;
                Err(reason)
            }
        };
        // Whatever the helpers did not do: one's own number needs nobody's help.
        if fs::read_to_string("/proc/self/uid_map")?.trim().is_empty() {
            fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
        }
        if fs::read_to_string("/proc/self/gid_map")?.trim().is_empty() {
            fs::write("/proc/self/setgroups", "deny")?;
            fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
        }
        Ok(Self { uid, gid, others })
    }

    /// Whether there are more than the sandbox's own.
    pub(crate) fn several(&self) -> bool {
        self.others.is_ok()
    }

    /// How many numbers of users there are.
    pub(crate) fn count(&self) -> u32 {
        match &self.others {
            Ok((users, groups)) => users
                .count
                .min(groups.count)
                .saturating_add(1)
                .min(USERS_MAX),
            Err(_) => 1,
        }
    }

    /// Why there is only one.
    pub(crate) fn why_one(&self) -> Option<&str> {
        self.others.as_ref().err().map(String::as_str)
    }

    /// A user namespace with these users, and nobody in it.
    pub(crate) fn namespace(&self) -> io::Result<OwnedFd> {
        let (wait, go) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let (pid, _descriptor) = match sys::clone3(libc::CLONE_NEWUSER, None)? {
            sys::Fork::Child => {
                drop(go);
                // Its end, or ours.
                let _ = rustix::io::read(&wait, &mut [0; 1][..]);
                sys::exit_now(0)
            }
            sys::Fork::Parent(child) => child,
        };
        let folder = format!("/proc/{}", pid.as_raw_nonzero());
        let opened = fs::write(format!("{folder}/uid_map"), self.users())
            .and_then(|()| fs::write(format!("{folder}/gid_map"), self.groups()))
            .and_then(|()| fs::File::open(format!("{folder}/ns/user")));
        drop(go);
        let _ = waitpid(Some(pid), WaitOptions::empty());
        opened.map(OwnedFd::from)
    }

    /// The content of a sandbox's `uid_map`.
    pub(crate) fn users(&self) -> String {
        map(self.uid, self.others.as_ref().ok().map(|(users, _)| *users))
    }

    /// The content of a sandbox's `gid_map`.
    pub(crate) fn groups(&self) -> String {
        map(
            self.gid,
            self.others.as_ref().ok().map(|(_, groups)| *groups),
        )
    }
}

/// The sandbox's own number in the middle, the range below and above it.
fn map(own: u32, others: Option<Range>) -> String {
    let own_line = format!("{UID} {own} 1\n");
    let Some(Range { start, count }) = others else {
        return own_line;
    };
    let below = count.min(UID);
    let above = count.min(USERS_MAX - 1) - below;
    let mut text = format!("0 {start} {below}\n{own_line}");
    if above > 0 {
        text.push_str(&format!("{} {} {above}\n", UID + 1, start + below));
    }
    text
}

/// The lines of a `uid_map`: the first number in here, the first out there, how many.
pub(crate) fn parse_map(text: &str) -> Vec<(u32, u32, u32)> {
    let line = |line: &str| {
        let mut numbers = line.split_whitespace().map(|n| n.parse::<u32>().ok());
        Some((numbers.next()??, numbers.next()??, numbers.next()??))
    };
    text.lines().filter_map(line).collect()
}

/// Whether all numbers of a range are in a map.
fn covers(map: &str, range: Range) -> bool {
    parse_map(map).iter().any(|&(start, _, count)| {
        let all = Range { start, count };
        all.holds(range.start) && all.holds(range.start + (range.count - 1))
    })
}

/// The largest range that a list gives to a user, by name or by number.
fn range_of(list: &str, uid: u32, name: Option<&str>) -> Option<Range> {
    let number = uid.to_string();
    let lines = list.lines().filter_map(|line| {
        let mut fields = line.trim().split(':');
        let who = fields.next()?;
        let start = fields.next()?.parse::<u32>().ok()?;
        let count = fields.next()?.parse::<u32>().ok()?;
        let his = who == number || name == Some(who);
        // A range that has his own number, or goes beyond all numbers, cannot be mapped beside it.
        let range = Range { start, count };
        let sane = count > 0 && start.checked_add(count).is_some() && !range.holds(uid);
        (his && sane).then_some(range)
    });
    let largest = lines.max_by_key(|range| range.count)?;
    Some(Range {
        count: largest.count.min(USERS_MAX - 1),
        ..largest
    })
}

/// What the system gives to an ordinary user beside his own number, or why nothing.
fn subordinate(uid: u32) -> Result<(Range, Range), String> {
    let read = |path: &str| {
        read_list(Path::new(path), LIST_BYTES_MAX)
            .map(Option::unwrap_or_default)
            .map_err(|e| e.to_string())
    };
    let passwd = read("/etc/passwd")?;
    let name = passwd
        .lines()
        .find(|line| line.split(':').nth(2) == Some(&uid.to_string()))
        .and_then(|line| line.split(':').next());
    let range = |path: &str| {
        range_of(&read(path)?, uid, name).ok_or_else(|| {
            format!(
                "{path} gives no numbers to {} (uid {uid})",
                name.unwrap_or("this user")
            )
        })
    };
    Ok((range("/etc/subuid")?, range("/etc/subgid")?))
}

/// Moves this process into a user namespace while a child that stays outside has the system's
/// helpers map it.
fn with_helpers(
    (uid, gid): (u32, u32),
    (users, groups): (Range, Range),
) -> io::Result<Result<(Range, Range), String>> {
    let (go, go_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let (said, said_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let target = rustix::process::getpid();
    let helper = match sys::fork()? {
        sys::Fork::Child => {
            drop(go_write);
            let outcome = help(
                &go,
                target,
                [("newuidmap", uid, users), ("newgidmap", gid, groups)],
            );
            let text = outcome.err().unwrap_or_else(|| "done".to_owned());
            let _ = fs::File::from(said_write).write_all(text.as_bytes());
            sys::exit_now(0)
        }
        sys::Fork::Parent(pid) => pid,
    };
    drop(said_write);
    let left = sys::unshare(libc::CLONE_NEWUSER);
    if left.is_ok() {
        let _ = rustix::io::write(&go_write, b"g");
    }
    drop(go_write);
    let text = hear(said, helper);
    left?;
    Ok(match text.as_str() {
        "done" => Ok((users, groups)),
        "" => Err("newuidmap and newgidmap did not end".to_owned()),
        reason => Err(reason.to_owned()),
    })
}

/// What the child said last; nothing when it takes too long, which ends it.
fn hear(said: OwnedFd, helper: Pid) -> String {
    let mut text = String::new();
    let mut fds = [PollFd::from_borrowed_fd(said.as_fd(), PollFlags::IN)];
    let heard = poll(&mut fds, Timespec::try_from(HELPERS_TIMEOUT).ok().as_ref());
    if heard.is_ok_and(|ready| ready > 0) {
        let _ = fs::File::from(said).take(4096).read_to_string(&mut text);
    } else {
        let _ = kill_process(helper, Signal::KILL);
    }
    let _ = waitpid(Some(helper), WaitOptions::empty());
    text
}

/// The child's part: waits until the other is in its namespace, then has both maps written.
fn help(go: &OwnedFd, target: Pid, maps: [(&str, u32, Range); 2]) -> Result<(), String> {
    let mut byte = [0];
    if !matches!(rustix::io::read(go, &mut byte[..]), Ok(1)) {
        return Err("there was no namespace to map".to_owned());
    }
    let target = target.as_raw_nonzero().to_string();
    for (program, own, Range { start, count }) in maps {
        let numbers = [own, own, 1, start, start, count].map(|number| number.to_string());
        let output = Command::new(program)
            .arg(&target)
            .args(numbers)
            .stdin(Stdio::null())
            .output()
            .map_err(|e| format!("{program} (package uidmap): {e}"))?;
        if !output.status.success() {
            let mut complaint = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            let end = complaint.floor_char_boundary(COMPLAINT_BYTES_MAX);
            complaint.truncate(end);
            return Err(format!("{program}: {complaint} ({})", output.status));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: Range = Range {
        start: 100_000,
        count: 65_535,
    };

    #[test]
    fn a_map_has_every_number_once_and_ones_own_in_the_middle() {
        assert_eq!(map(7, None), "1000 7 1\n");
        assert_eq!(
            map(7, Some(RANGE)),
            "0 100000 1000\n1000 7 1\n1001 101000 64535\n"
        );
        let few = Range {
            start: 5000,
            count: 10,
        };
        assert_eq!(map(7, Some(few)), "0 5000 10\n1000 7 1\n");
        let ids = Ids {
            uid: 7,
            gid: 8,
            others: Ok((RANGE, few)),
        };
        assert_eq!((ids.count(), ids.several()), (11, true));
        let parsed = parse_map(&map(7, Some(RANGE)));
        let total: u32 = parsed.iter().map(|(_, _, count)| count).sum();
        assert_eq!(total, USERS_MAX);
        assert_eq!(parsed[2], (1001, 101_000, 64_535));
    }

    #[test]
    fn a_map_of_the_kernel_is_read() {
        let initial = "         0          0 4294967295\n";
        assert_eq!(parse_map(initial), [(0, 0, u32::MAX)]);
        let root = Range {
            start: FIRST,
            count: USERS_MAX,
        };
        assert!(covers(initial, root));
        // In a container that maps a few, root cannot give what it does not have.
        assert!(!covers("0 100000 65536\n", root));
        assert!(!covers("0 1000 1\n", root));
        assert!(!covers("", root));
        assert!(!covers(&format!("0 0 {}\n", FIRST + 1), root));
        assert_eq!(parse_map("x y z\n1 2\n"), []);
    }

    #[test]
    fn the_largest_range_of_a_user_is_taken() {
        let list = "other:100000:65536\nme:200000:100\n1234:300000:70000\nme:x:1\nme:1:0\nme\n";
        let range = |uid, name| range_of(list, uid, name);
        assert_eq!(
            range(1234, Some("me")),
            Some(Range {
                start: 300_000,
                count: 65_535
            })
        );
        assert_eq!(
            range(5, Some("me")),
            Some(Range {
                start: 200_000,
                count: 100
            })
        );
        assert_eq!(range(5, Some("nobody")), None);
        assert_eq!(range(5, None), None);
        assert_eq!(range(200_050, Some("me")), None, "it has his own number");
        assert_eq!(range_of("me:4294967290:100\n", 5, Some("me")), None);
    }
}
