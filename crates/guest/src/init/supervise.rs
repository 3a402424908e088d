//! Between init and a process: the supervisor, which finds and kills the process's whole tree, and
//! the process's own way to its program.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs::{self, File},
    io::{self, Read},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{SendFlags, send},
    process::{DumpableBehavior, Pid, Signal, WaitOptions, getpid, kill_process, wait},
};

use crate::{
    privileges,
    protocol::{ExecRequest, UserCause, UserFailure},
    setup::c_string,
    sys,
    user::{self, Account},
};

/// Rounds of finding and killing before everything in the sandbox is killed instead.
const KILL_ROUNDS_MAX: u32 = 200;
/// Wait for killed processes between rounds.
const KILL_ROUND: Duration = Duration::from_millis(5);
/// The kernel's out-of-memory killer prefers these processes to init.
const OOM_SCORE: &str = "500";

/// The supervisor's life.
pub(super) fn supervise(
    request: &ExecRequest,
    init: &OwnedFd,
    stdin: &File,
    stdout: &OwnedFd,
    stderr: &OwnedFd,
) -> ! {
    let keep = [
        0,
        1,
        2,
        init.as_raw_fd(),
        stdin.as_raw_fd(),
        stdout.as_raw_fd(),
        stderr.as_raw_fd(),
    ];
    sys::close_all_but(&keep);
    let streams = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
    let message = match become_whom(request, streams) {
        Err(failure) => {
            let failure = serde_json::to_vec(&failure).unwrap_or_default();
            [b"u".as_slice(), &failure].concat()
        }
        Ok(way) => match supervise_leader(&way, init, streams) {
            Ok(status) => [b"x".as_slice(), &status.to_le_bytes()].concat(),
            Err(error) => [b"f".as_slice(), error.to_string().as_bytes()].concat(),
        },
    };
    let _ = send(init, &message, SendFlags::NOSIGNAL);
    sys::exit_now(0)
}

/// A program's way, once its supervisor is who it runs as.
struct Way {
    request: ExecRequest,
    /// Its user, when he is not the sandbox's own.
    other: Option<Account>,
    /// Whether this process is in the working folder already.
    entered: bool,
}

/// Makes this supervisor the user whom the request names, and completes the environment.
fn become_whom(request: &ExecRequest, streams: [BorrowedFd<'_>; 3]) -> Result<Way, UserFailure> {
    let mut way = Way {
        request: request.clone(),
        other: None,
        entered: false,
    };
    if let Some(user) = &request.user {
        let account = user::of_system(user)?;
        add_environment(&mut way.request.env, &account);
        if !privileges::is_own(&account) {
            way.entered = privileges::switch(&account, streams, &request.cwd)?;
            way.other = Some(account);
            return Ok(way);
        }
    }
    privileges::give_up_all().map_err(|error| UserFailure {
        cause: UserCause::Refused,
        reason: format!("giving up the rights of the first process: {error}"),
    })?;
    Ok(way)
}

/// What every login sets, where nobody said otherwise.
fn add_environment(env: &mut Vec<(String, String)>, account: &Account) {
    let name = account.name.as_deref();
    for (key, value) in [
        ("HOME", Some(account.home.as_str())),
        ("USER", name),
        ("LOGNAME", name),
    ] {
        let said = env.iter().any(|(known, _)| known == key);
        if let Some(value) = value.filter(|_| !said) {
            env.push((key.to_owned(), value.to_owned()));
        }
    }
}

fn supervise_leader(way: &Way, init: &OwnedFd, streams: [BorrowedFd<'_>; 3]) -> io::Result<i32> {
    rustix::process::set_child_subreaper(Some(getpid()))?;
    let signals = sys::child_signals()?;
    let (failure, failure_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let leader = match sys::fork()? {
        sys::Fork::Child => {
            let error = lead(way, streams);
            let _ = rustix::io::write(&failure_write, error.to_string().as_bytes());
            sys::exit_now(127)
        }
        sys::Fork::Parent(pid) => pid,
    };
    drop(failure_write);
    // The streams are the leader's alone from here, so that their ends are seen.
    sys::close_all_but(&[
        0,
        1,
        2,
        init.as_raw_fd(),
        signals.as_raw_fd(),
        failure.as_raw_fd(),
    ]);
    let mut reason = String::new();
    let _ = File::from(failure).read_to_string(&mut reason);
    if !reason.is_empty() {
        return Err(io::Error::other(reason));
    }
    let mut buffer = [0; 128];
    loop {
        if let Some(status) = reap(leader) {
            if way.request.end_background {
                kill_tree(leader, &signals);
            }
            return Ok(status);
        }
        let mut fds = [
            PollFd::from_borrowed_fd(init.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
        ];
        let _ = poll(&mut fds, None);
        let [from_init, from_signals] = fds.map(|fd| !fd.revents().is_empty());
        if from_signals {
            let _ = rustix::io::read(&signals, &mut buffer[..]);
        }
        if from_init {
            // A word from init, or its end: kill.
            return Ok(kill_tree(leader, &signals).unwrap_or(libc::SIGKILL));
        }
    }
}

/// Reaps whatever has ended; the leader's wait status if it was among them.
fn reap(leader: Pid) -> Option<i32> {
    let mut found = None;
    while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
        if pid == leader {
            found = Some(status.as_raw());
        }
    }
    found
}

/// Kills everything below this process and waits for its end. Gives the leader's status.
fn kill_tree(leader: Pid, signals: &OwnedFd) -> Option<i32> {
    let mut status = None;
    let mut buffer = [0; 128];
    for round in 0..KILL_ROUNDS_MAX {
        let found = reap(leader);
        status = status.or(found);
        // Zombies count: their children may have come after we looked.
        let victims = descendants(getpid());
        if victims.is_empty() {
            break;
        }
        if round == KILL_ROUNDS_MAX / 2 {
            // They are made faster than we find them, or one hangs in the kernel.
            sys::kill_all();
        }
        for pid in victims {
            let _ = kill_process(pid, Signal::KILL);
        }
        let mut fds = [PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        if poll(&mut fds, Timespec::try_from(KILL_ROUND).ok().as_ref()).is_ok_and(|n| n > 0) {
            let _ = rustix::io::read(signals, &mut buffer[..]);
        }
    }
    status
}

/// All processes below `root`, zombies included.
fn descendants(root: Pid) -> Vec<Pid> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|n| n.parse::<i32>().ok())
        else {
            continue;
        };
        let stat = fs::read(entry.path().join("stat")).unwrap_or_default();
        let parent = stat.rsplit(|b| *b == b')').next().and_then(|rest| {
            std::str::from_utf8(rest)
                .ok()?
                .split_whitespace()
                .nth(1)?
                .parse::<i32>()
                .ok()
        });
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    let mut open = vec![root.as_raw_nonzero().get()];
    while let Some(pid) = open.pop() {
        for child in children.remove(&pid).unwrap_or_default() {
            found.extend(Pid::from_raw(child));
            open.push(child);
        }
    }
    found
}

/// The leader's way to its program; returns only on failure.
fn lead(way: &Way, streams: [BorrowedFd<'_>; 3]) -> io::Error {
    match prepare_leader(way, streams) {
        Ok((argv, env)) => run_program(&way.request, &argv, &env),
        Err(error) => error,
    }
}

fn prepare_leader(
    way: &Way,
    [stdin, stdout, stderr]: [BorrowedFd<'_>; 3],
) -> io::Result<(Vec<CString>, Vec<CString>)> {
    let request = &way.request;
    let argv = request
        .argv
        .iter()
        .map(|a| c_string(a))
        .collect::<io::Result<Vec<_>>>()?;
    let env = request
        .env
        .iter()
        .map(|(key, value)| c_string(&format!("{key}={value}")));
    let env = env.collect::<io::Result<Vec<_>>>()?;
    rustix::process::setsid()?;
    if let Some(account) = &way.other {
        privileges::give_up_supervising(account.uid)?;
    }
    // Should someone kill the supervisor, its leader goes with it.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // Programs may be looked at by each other; only PID 1 may not.
    rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    let _ = fs::write("/proc/self/oom_score_adj", OOM_SCORE);
    if !way.entered {
        rustix::process::chdir(&request.cwd).map_err(|error| {
            let error = io::Error::from(error);
            io::Error::new(
                error.kind(),
                format!("working folder {}: {error}", request.cwd),
            )
        })?;
    }
    rustix::stdio::dup2_stdin(stdin)?;
    rustix::stdio::dup2_stdout(stdout)?;
    rustix::stdio::dup2_stderr(stderr)?;
    rustix::process::umask(rustix::fs::Mode::WGRP | rustix::fs::Mode::WOTH);
    sys::default_signals();
    Ok((argv, env))
}

fn run_program(request: &ExecRequest, argv: &[CString], env: &[CString]) -> io::Error {
    let not_found = || io::Error::from(Errno::NOENT);
    let Some(program) = request.argv.first().filter(|p| !p.is_empty()) else {
        return io::Error::other("no program named");
    };
    if program.contains('/') {
        return try_program(program, argv, env);
    }
    let path = request.env.iter().rev().find(|(key, _)| key == "PATH");
    let path = path.map_or("/usr/bin:/bin", |(_, value)| value.as_str());
    let mut result = not_found();
    for folder in path.split(':').filter(|folder| !folder.is_empty()) {
        let error = try_program(&format!("{folder}/{program}"), argv, env);
        // The most telling error wins, as in every shell.
        if !matches!(
            error.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
        ) {
            result = error;
        }
    }
    result
}

fn try_program(path: &str, argv: &[CString], env: &[CString]) -> io::Error {
    let Ok(program) = c_string(path) else {
        return io::Error::from(Errno::NOENT);
    };
    let error = sys::execve(&program, argv, env);
    if error.raw_os_error() != Some(libc::ENOEXEC) {
        return error;
    }
    // A script without `#!` is for the shell.
    let mut shell = vec![c"/bin/sh".to_owned(), program];
    shell.extend(argv.iter().skip(1).cloned());
    sys::execve(c"/bin/sh", &shell, env)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_says_who_it_is_unless_somebody_said() {
        let account = Account {
            uid: 2001,
            gid: 2001,
            groups: vec![2001],
            name: Some("build".to_owned()),
            home: "/home/build".to_owned(),
        };
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let mut env = vec![pair("USER", "other")];
        add_environment(&mut env, &account);
        let expected = [
            pair("USER", "other"),
            pair("HOME", "/home/build"),
            pair("LOGNAME", "build"),
        ];
        assert_eq!(env, expected);
        // A number that no list knows has no name.
        let mut env = Vec::new();
        let nameless = Account {
            name: None,
            home: "/".to_owned(),
            ..account
        };
        add_environment(&mut env, &nameless);
        assert_eq!(env, [pair("HOME", "/")]);
    }

    #[test]
    fn descendants_are_found_through_proc() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "sleep 60 & echo $!; wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0; 16];
        let count = child.stdout.as_mut().unwrap().read(&mut line).unwrap();
        let grandchild: i32 = String::from_utf8_lossy(&line[..count])
            .trim()
            .parse()
            .unwrap();
        let found = descendants(getpid());
        child.kill().unwrap();
        let _ = kill_process(Pid::from_raw(grandchild).unwrap(), Signal::KILL);
        child.wait().unwrap();
        let found: Vec<i32> = found.iter().map(|p| p.as_raw_nonzero().get()).collect();
        assert!(found.contains(&grandchild), "{grandchild} not in {found:?}");
        assert!(found.contains(&i32::try_from(child.id()).unwrap()));
    }
}
