//! Processes. Each runs below a small supervisor of its own, a fork of init:
//!
//! `init ── supervisor (subreaper) ── leader (own session) ── …`
//!
//! The kernel gives every orphan below a supervisor back to that supervisor, whatever sessions
//! and groups the processes make, so the tree of one `exec` can be found and killed while others
//! go on. When the leader ends by itself the supervisor ends too: what still runs then is a
//! background process, belongs to init, and lives until the sandbox ends.

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::CString,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{MemfdFlags, memfd_create},
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair},
    process::{DumpableBehavior, Pid, Signal, WaitOptions, getpid, kill_process, wait},
};

use crate::{
    protocol::{CHUNK_BYTES, ExecRequest, Exited, Frame, Kind},
    setup::c_string,
    sys,
};

/// The longest a process may run when nobody said: the sandbox ends long before.
const TIMEOUT_MAX: Duration = Duration::from_secs(u32::MAX as u64);
/// Rounds of finding and killing before everything in the sandbox is killed instead.
const KILL_ROUNDS_MAX: u32 = 200;
/// Wait for killed processes between rounds.
const KILL_ROUND: Duration = Duration::from_millis(5);
/// The kernel's out-of-memory killer prefers these processes to init.
const OOM_SCORE: &str = "500";

/// A descriptor of a running process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Supervisor,
    Stdout,
    Stderr,
}

/// What a supervisor said last.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The program could not be started.
    Failed(String),
    /// It ended with this wait status.
    Status(i32),
    /// The supervisor itself was killed.
    Lost,
}

/// Output kept: the first half and the last half.
#[derive(Debug)]
struct Halves {
    head: Vec<u8>,
    head_max: usize,
    tail: VecDeque<u8>,
    tail_max: usize,
    seen: u64,
}

impl Halves {
    fn new(bytes_max: usize) -> Self {
        let tail_max = bytes_max / 2;
        let head_max = bytes_max - tail_max;
        Self {
            head: Vec::new(),
            head_max,
            tail: VecDeque::new(),
            tail_max,
            seen: 0,
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        self.seen += bytes.len() as u64;
        let room = self.head_max - self.head.len();
        let (first, rest) = bytes.split_at(room.min(bytes.len()));
        self.head.extend_from_slice(first);
        let rest = rest
            .get(rest.len().saturating_sub(self.tail_max)..)
            .unwrap_or_default();
        let surplus = (self.tail.len() + rest.len()).saturating_sub(self.tail_max);
        self.tail.drain(..surplus);
        self.tail.extend(rest);
    }

    /// What was kept, and how many bytes were not.
    fn finish(mut self) -> (Vec<u8>, u64) {
        self.head.extend(self.tail);
        let dropped = self.seen - self.head.len() as u64;
        (self.head, dropped)
    }
}

/// A process and what is known of it.
#[derive(Debug)]
pub(super) struct Running {
    supervisor: OwnedFd,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    kept_stdout: Halves,
    kept_stderr: Halves,
    started: Instant,
    deadline: Instant,
    killed: bool,
    timed_out: bool,
}

/// Frames to send, and pipes that background processes still write to.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) frames: Vec<Frame>,
    pub(super) pipes: Vec<OwnedFd>,
}

/// Keeps standard input in memory: a file there can be read at any pace without us.
pub(super) fn add_stdin(file: &mut Option<File>, bytes: &[u8]) -> io::Result<()> {
    let file = match file {
        Some(file) => file,
        None => file.insert(File::from(memfd_create("stdin", MemfdFlags::CLOEXEC)?)),
    };
    file.write_all(bytes)
}

/// Reads until the pipe is empty for now; closes it at its end.
fn read_pipe(pipe: &mut Option<OwnedFd>, kept: &mut Halves, scratch: &mut [u8], reads_max: u32) {
    for _ in 0..reads_max {
        let Some(fd) = pipe else { return };
        match rustix::io::read(&*fd, &mut *scratch) {
            Ok(0) => *pipe = None,
            Ok(count) => kept.push(scratch.get(..count).unwrap_or_default()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return,
            Err(_) => *pipe = None,
        }
    }
}

impl Running {
    pub(super) fn start(request: &ExecRequest, stdin: Option<File>) -> io::Result<Self> {
        let stdin = match stdin {
            Some(mut file) => {
                file.seek(SeekFrom::Start(0))?;
                file
            }
            None => File::open("/dev/null")?,
        };
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let pipe = || -> io::Result<(OwnedFd, OwnedFd)> {
            let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
            rustix::io::ioctl_fionbio(&read, true)?;
            Ok((read, write))
        };
        let (stdout, stdout_write) = pipe()?;
        let (stderr, stderr_write) = pipe()?;
        let started = Instant::now();
        match sys::fork()? {
            sys::Fork::Child => supervise(request, &theirs, &stdin, &stdout_write, &stderr_write),
            sys::Fork::Parent(_) => {}
        }
        let output_bytes_max = usize::try_from(request.output_bytes_max).unwrap_or(usize::MAX);
        Ok(Self {
            supervisor: ours,
            stdout: Some(stdout),
            stderr: Some(stderr),
            kept_stdout: Halves::new(output_bytes_max),
            kept_stderr: Halves::new(output_bytes_max),
            started,
            deadline: started + Duration::from_millis(request.timeout_ms).min(TIMEOUT_MAX),
            killed: false,
            timed_out: false,
        })
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = (Part, BorrowedFd<'_>)> {
        let pipes = [(Part::Stdout, &self.stdout), (Part::Stderr, &self.stderr)];
        let pipes = pipes
            .into_iter()
            .filter_map(|(part, pipe)| Some((part, pipe.as_ref()?.as_fd())));
        [(Part::Supervisor, self.supervisor.as_fd())]
            .into_iter()
            .chain(pipes)
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        (!self.killed).then_some(self.deadline)
    }

    pub(super) fn check_timeout(&mut self, now: Instant) {
        if now >= self.deadline {
            self.kill(true);
        }
    }

    /// Asks the supervisor to kill the tree; its answer is the usual one.
    pub(super) fn kill(&mut self, timed_out: bool) {
        if !self.killed {
            self.killed = true;
            self.timed_out = timed_out;
            let _ = send(
                &self.supervisor,
                b"k",
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            );
        }
    }

    /// Something is readable. Gives the outcome when it is over.
    pub(super) fn step(&mut self, part: Part, scratch: &mut [u8]) -> Option<Outcome> {
        match part {
            Part::Stdout => read_pipe(&mut self.stdout, &mut self.kept_stdout, scratch, 4),
            Part::Stderr => read_pipe(&mut self.stderr, &mut self.kept_stderr, scratch, 4),
            Part::Supervisor => {
                let received = recv(&self.supervisor, &mut *scratch, RecvFlags::empty());
                let count = match received {
                    Ok((count, _)) => count,
                    Err(Errno::INTR) => return None,
                    Err(_) => 0,
                };
                let message = scratch.get(..count).unwrap_or_default();
                return Some(match message.split_first() {
                    Some((b'x', [a, b, c, d])) => {
                        Outcome::Status(i32::from_le_bytes([*a, *b, *c, *d]))
                    }
                    Some((b'f', text)) => {
                        Outcome::Failed(String::from_utf8_lossy(text).into_owned())
                    }
                    _ => Outcome::Lost,
                });
            }
        }
        None
    }

    pub(super) fn end(mut self, id: u32, outcome: Outcome, scratch: &mut [u8]) -> Ended {
        // All that the leader wrote is in the pipes by now. What a background process floods us
        // with meanwhile is not waited for.
        let reads_max = 64;
        read_pipe(&mut self.stdout, &mut self.kept_stdout, scratch, reads_max);
        read_pipe(&mut self.stderr, &mut self.kept_stderr, scratch, reads_max);
        let pipes = self.stdout.into_iter().chain(self.stderr).collect();
        let (code, signal) = match outcome {
            Outcome::Failed(reason) => {
                let frames = vec![Frame::new(Kind::ExecFailed, id, reason.into_bytes())];
                return Ended { frames, pipes };
            }
            Outcome::Lost => (None, Some(libc::SIGKILL)),
            Outcome::Status(status) if libc::WIFEXITED(status) => {
                (Some(libc::WEXITSTATUS(status)), None)
            }
            Outcome::Status(status) => (None, Some(libc::WTERMSIG(status))),
        };
        let (stdout, dropped_stdout) = self.kept_stdout.finish();
        let (stderr, dropped_stderr) = self.kept_stderr.finish();
        let chunks = |kind, bytes: &[u8]| -> Vec<Frame> {
            bytes
                .chunks(CHUNK_BYTES)
                .map(|chunk| Frame::new(kind, id, chunk.to_vec()))
                .collect()
        };
        let mut frames = chunks(Kind::Stdout, &stdout);
        frames.extend(chunks(Kind::Stderr, &stderr));
        let exited = Exited {
            code,
            signal,
            timed_out: self.timed_out,
            dropped_bytes: dropped_stdout + dropped_stderr,
            seconds: self.started.elapsed().as_secs_f64(),
        };
        frames.push(Frame::json(Kind::Exited, id, &exited));
        Ended { frames, pipes }
    }
}

/// The supervisor's life.
fn supervise(
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
    let message = match supervise_leader(
        request,
        init,
        [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
    ) {
        Ok(status) => [b"x".as_slice(), &status.to_le_bytes()].concat(),
        Err(error) => [b"f".as_slice(), error.to_string().as_bytes()].concat(),
    };
    let _ = send(init, &message, SendFlags::NOSIGNAL);
    sys::exit_now(0)
}

fn supervise_leader(
    request: &ExecRequest,
    init: &OwnedFd,
    streams: [BorrowedFd<'_>; 3],
) -> io::Result<i32> {
    rustix::process::set_child_subreaper(Some(getpid()))?;
    let signals = sys::child_signals()?;
    let (failure, failure_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let leader = match sys::fork()? {
        sys::Fork::Child => {
            let error = lead(request, streams);
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
fn lead(request: &ExecRequest, streams: [BorrowedFd<'_>; 3]) -> io::Error {
    match prepare_leader(request, streams) {
        Ok((argv, env)) => run_program(request, &argv, &env),
        Err(error) => error,
    }
}

fn prepare_leader(
    request: &ExecRequest,
    [stdin, stdout, stderr]: [BorrowedFd<'_>; 3],
) -> io::Result<(Vec<CString>, Vec<CString>)> {
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
    // Should someone kill the supervisor, its leader goes with it.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // Programs may be looked at by each other; only PID 1 may not.
    rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    let _ = fs::write("/proc/self/oom_score_adj", OOM_SCORE);
    rustix::process::chdir(&request.cwd).map_err(|error| {
        let error = io::Error::from(error);
        io::Error::new(
            error.kind(),
            format!("working folder {}: {error}", request.cwd),
        )
    })?;
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
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn halves_keep_the_first_and_the_last(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..30), 0..20),
            bytes_max in 0_usize..100,
        ) {
            let mut halves = Halves::new(bytes_max);
            for chunk in &chunks { halves.push(chunk); }
            let all = chunks.concat();
            let (kept, dropped) = halves.finish();
            prop_assert_eq!(kept.len() as u64 + dropped, all.len() as u64);
            if all.len() <= bytes_max {
                prop_assert_eq!(kept, all);
            } else {
                let head = bytes_max - bytes_max / 2;
                prop_assert_eq!(&kept[..head], &all[..head]);
                prop_assert_eq!(&kept[head..], &all[all.len() - bytes_max / 2..]);
            }
        }
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
