//! Processes. Each runs below a small supervisor of its own, a fork of init:
//!
//! `init ── supervisor (subreaper) ── leader (own session) ── …`
//!
//! The kernel gives every orphan below a supervisor back to that supervisor, whatever sessions
//! and groups the processes make, so the tree of one `exec` can be found and killed while others
//! go on. When the leader ends by itself the supervisor ends too: what still runs then is a
//! background process; it is killed first when the request says so, else it belongs to init and
//! lives until the sandbox ends.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Seek, SeekFrom, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    fs::{MemfdFlags, memfd_create},
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair},
    process::{Pid, Signal, kill_process},
};

use super::supervise::supervise;
use crate::{
    privileges,
    protocol::{CHUNK_BYTES, ExecRequest, Exited, Frame, Kind, WINDOW_BYTES},
    sys,
};

/// The longest a process may run when nobody said: the sandbox ends long before.
const TIMEOUT_MAX: Duration = Duration::from_secs(u32::MAX as u64);

/// For a supervisor to kill its tree.
const SUPERVISOR_GRACE: Duration = Duration::from_secs(8);

/// A descriptor of a running process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Supervisor,
    Stdin,
    Stdout,
    Stderr,
}

/// What a supervisor said last.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The program could not be started.
    Failed(String),
    /// It cannot run as the user that was asked for: a `UserFailure`.
    NotAs(Vec<u8>),
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

/// The writing end of an open standard input, and what waits for it.
#[derive(Debug)]
struct Input {
    pipe: OwnedFd,
    waiting: VecDeque<u8>,
    ended: bool,
}

/// A process and what is known of it.
#[derive(Debug)]
pub(super) struct Running {
    supervisor: OwnedFd,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    kept_stdout: Halves,
    kept_stderr: Halves,
    /// Bytes of output that may be sent now; `None` when output is kept to the end.
    window: Option<usize>,
    input: Option<Input>,
    memory_kills: u64,
    started: Instant,
    deadline: Instant,
    supervisor_pid: Pid,
    killed: bool,
    timed_out: bool,
    /// When everything is killed, because the supervisor did not do it.
    kill_all_at: Option<Instant>,
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

/// Processes that the kernel killed in our control group for lack of memory, if we can see it.
fn memory_kills() -> u64 {
    let files = [
        "/sys/fs/cgroup/memory.events",
        "/sys/fs/cgroup/memory/memory.oom_control",
    ];
    let text = files.iter().find_map(|f| std::fs::read_to_string(f).ok());
    text.as_deref()
        .unwrap_or_default()
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
        .unwrap_or(0)
}

/// Reads once, at most `bytes_max`, and makes a frame of it; closes the pipe at its end.
fn read_chunk(
    pipe: &mut Option<OwnedFd>,
    (kind, id): (Kind, u32),
    bytes_max: usize,
    scratch: &mut [u8],
) -> Option<Frame> {
    let room = bytes_max.min(scratch.len());
    match rustix::io::read(pipe.as_ref()?, scratch.get_mut(..room)?) {
        Ok(0) => *pipe = None,
        Ok(count) => {
            return Some(Frame::new(
                kind,
                id,
                scratch.get(..count).unwrap_or_default().to_vec(),
            ));
        }
        Err(Errno::INTR | Errno::AGAIN) => {}
        Err(_) => *pipe = None,
    }
    None
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
        let (stdin, input) = if request.stream {
            let (read, pipe) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
            rustix::io::ioctl_fionbio(&pipe, true)?;
            let input = Input {
                pipe,
                waiting: VecDeque::new(),
                ended: false,
            };
            (Some(File::from(read)), Some(input))
        } else {
            (stdin, None)
        };
        let stdin = match stdin {
            Some(file) if input.is_some() => file,
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
        let guarded = request.user.is_some() && privileges::guard().is_ok();
        let forked = sys::fork();
        if let Ok(sys::Fork::Child) = forked {
            supervise(request, &theirs, &stdin, &stdout_write, &stderr_write);
        }
        if guarded {
            privileges::unguard()?;
        }
        let sys::Fork::Parent(supervisor_pid) = forked? else {
            return Err(io::Error::other("a supervisor came back"));
        };
        let output_bytes_max = usize::try_from(request.output_bytes_max).unwrap_or(usize::MAX);
        Ok(Self {
            supervisor: ours,
            stdout: Some(stdout),
            stderr: Some(stderr),
            kept_stdout: Halves::new(output_bytes_max),
            kept_stderr: Halves::new(output_bytes_max),
            window: request.stream.then_some(WINDOW_BYTES),
            input,
            memory_kills: memory_kills(),
            started,
            deadline: started + Duration::from_millis(request.timeout_ms).min(TIMEOUT_MAX),
            supervisor_pid,
            killed: false,
            timed_out: false,
            kill_all_at: None,
        })
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = (Part, BorrowedFd<'_>)> {
        let pipes = [(Part::Stdout, &self.stdout), (Part::Stderr, &self.stderr)];
        // A streamed output that nobody takes is not read: the process waits.
        let wanted = self.window != Some(0);
        let pipes = pipes
            .into_iter()
            .filter(move |_| wanted)
            .filter_map(|(part, pipe)| Some((part, pipe.as_ref()?.as_fd())));
        [(Part::Supervisor, self.supervisor.as_fd())]
            .into_iter()
            .chain(pipes)
    }

    /// The standard input, while something waits for it.
    pub(super) fn input(&self) -> Option<BorrowedFd<'_>> {
        let input = self.input.as_ref()?;
        (!input.waiting.is_empty()).then(|| input.pipe.as_fd())
    }

    /// More of an open standard input; `false` when it is more than may be on its way.
    pub(super) fn add_input(&mut self, bytes: &[u8]) -> bool {
        if let Some(input) = &mut self.input {
            input.waiting.extend(bytes);
            return input.waiting.len() <= WINDOW_BYTES;
        }
        true
    }

    /// There is no more of it.
    pub(super) fn end_input(&mut self) {
        if let Some(input) = &mut self.input {
            input.ended = true;
            if input.waiting.is_empty() {
                self.input = None;
            }
        }
    }

    /// The standard input can be written; gives how much was taken. A process that reads no more
    /// takes everything.
    pub(super) fn step_input(&mut self) -> usize {
        let Some(input) = &mut self.input else {
            return 0;
        };
        let mut taken = 0;
        while !input.waiting.is_empty() {
            match rustix::io::write(&input.pipe, input.waiting.as_slices().0) {
                Ok(count) => {
                    input.waiting.drain(..count);
                    taken += count;
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => {
                    taken += input.waiting.len();
                    input.waiting.clear();
                }
            }
        }
        if input.ended && input.waiting.is_empty() {
            self.input = None;
        }
        taken
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        if self.killed {
            self.kill_all_at
        } else {
            Some(self.deadline)
        }
    }

    pub(super) fn check_timeout(&mut self, now: Instant) {
        if now >= self.deadline {
            self.kill(true);
        }
        // Programs have the rights of their supervisor, and may stop it. Who does that has no
        // claim to anything else in here either.
        if self.kill_all_at.is_some_and(|at| now >= at) {
            self.kill_all_at = Some(now + SUPERVISOR_GRACE);
            sys::kill_all();
        }
    }

    /// Asks the supervisor to kill the tree; its answer is the usual one.
    pub(super) fn kill(&mut self, timed_out: bool) {
        if !self.killed {
            self.killed = true;
            self.timed_out = timed_out;
            self.kill_all_at = Some(Instant::now() + SUPERVISOR_GRACE);
            let _ = kill_process(self.supervisor_pid, Signal::CONT);
            let _ = send(
                &self.supervisor,
                b"k",
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            );
        }
    }

    /// The host took some of the streamed output.
    pub(super) fn credit(&mut self, bytes: usize) {
        if let Some(window) = &mut self.window {
            *window = window.saturating_add(bytes).min(WINDOW_BYTES);
        }
    }

    /// Something of a streamed output is readable.
    pub(super) fn step_stream(&mut self, id: u32, part: Part, scratch: &mut [u8]) -> Option<Frame> {
        // Used up by the other output since both were found ready: a read of nothing would look
        // like the end.
        let window = self.window.as_mut().filter(|window| **window > 0)?;
        let (kind, pipe) = match part {
            Part::Stdout => (Kind::Stdout, &mut self.stdout),
            Part::Stderr => (Kind::Stderr, &mut self.stderr),
            Part::Supervisor | Part::Stdin => return None,
        };
        let frame = read_chunk(pipe, (kind, id), *window, scratch)?;
        *window -= frame.body.len();
        Some(frame)
    }

    /// Something is readable. Gives the outcome when it is over.
    pub(super) fn step(&mut self, part: Part, scratch: &mut [u8]) -> Option<Outcome> {
        match part {
            Part::Stdout | Part::Stderr if self.window.is_some() => {}
            Part::Stdin => {}
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
                    Some((b'u', failure)) => Outcome::NotAs(failure.to_vec()),
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
        let mut rest = Vec::new();
        if self.window.is_some() {
            let pipes = [
                (Kind::Stdout, &mut self.stdout),
                (Kind::Stderr, &mut self.stderr),
            ];
            for (kind, pipe) in pipes {
                let chunks =
                    std::iter::from_fn(|| read_chunk(pipe, (kind, id), CHUNK_BYTES, scratch));
                rest.extend(chunks.take(reads_max as usize));
            }
        }
        read_pipe(&mut self.stdout, &mut self.kept_stdout, scratch, reads_max);
        read_pipe(&mut self.stderr, &mut self.kept_stderr, scratch, reads_max);
        let pipes = self.stdout.into_iter().chain(self.stderr).collect();
        let (code, signal) = match outcome {
            Outcome::Failed(reason) => {
                let frames = vec![Frame::new(Kind::ExecFailed, id, reason.into_bytes())];
                return Ended { frames, pipes };
            }
            Outcome::NotAs(failure) => {
                let frames = vec![Frame::new(Kind::UserFailed, id, failure)];
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
        let mut frames = rest;
        frames.extend(chunks(Kind::Stdout, &stdout));
        frames.extend(chunks(Kind::Stderr, &stderr));
        let exited = Exited {
            code,
            signal,
            timed_out: self.timed_out,
            dropped_bytes: dropped_stdout + dropped_stderr,
            seconds: self.started.elapsed().as_secs_f64(),
            memory_kills: memory_kills().saturating_sub(self.memory_kills),
        };
        frames.push(Frame::json(Kind::Exited, id, &exited));
        Ended { frames, pipes }
    }
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
}
