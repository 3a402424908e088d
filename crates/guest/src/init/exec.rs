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
};

use super::supervise::supervise;
use crate::{
    protocol::{CHUNK_BYTES, ExecRequest, Exited, Frame, Kind},
    sys,
};

/// The longest a process may run when nobody said: the sandbox ends long before.
const TIMEOUT_MAX: Duration = Duration::from_secs(u32::MAX as u64);

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
