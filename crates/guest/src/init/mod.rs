//! PID 1 of a sandbox: one thread, one poll loop.
//!
//! It runs processes ([`exec`]), reads and writes files ([`files`]), forwards a loopback port to
//! the gateway's socket ([`forward`]) and reaps orphans. It ends, and with it everything in the
//! sandbox, when its control stream closes, when its deadline passes, or when the warden dies.
//! It has no more power than the processes it runs.
//!
//! Limits: [`EXECS_MAX`] processes at a time (more are refused), [`forward::CONNECTIONS_MAX`]
//! forwarded connections (more wait in the listen queue), `output_bytes_max` of each output,
//! [`OUTBOX_BYTES_HIGH`] of a download on its way (the rest waits in the file).

mod exec;
mod files;
mod forward;
mod supervise;

use std::{
    collections::{BTreeMap, VecDeque},
    fs::File,
    io::{self, Read, Write},
    net::TcpListener,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{WaitOptions, wait},
};

use crate::{
    protocol::{
        Decoder, EXECS_MAX, ExecRequest, FileFailure, Frame, Hello, Kind, ProtocolError, VERSION,
    },
    sys,
};

/// Exit code: the control stream closed.
pub(crate) const EXIT_CLOSED: i32 = 0;
/// Exit code: the deadline passed.
pub(crate) const EXIT_DEADLINE: i32 = 40;
/// Exit code: the host broke the protocol, or the kernel refused something basic.
pub(crate) const EXIT_BROKEN: i32 = 41;

/// Downloads add to the outbox only below this.
const OUTBOX_BYTES_HIGH: usize = 1 << 20;
/// Output pipes left open by processes that outlive their parent; the oldest are closed beyond.
const DRAINS_MAX: usize = 512;

/// What a descriptor in the poll set belongs to.
#[derive(Debug, Clone, Copy)]
enum Source {
    Control,
    Signals,
    Exec(u32, exec::Part),
    Drain,
    Forward(forward::Part),
}

struct Init {
    control: UnixStream,
    decoder: Decoder,
    outbox: VecDeque<Vec<u8>>,
    outbox_sent: usize,
    outbox_bytes: usize,
    signals: OwnedFd,
    /// Processes whose standard input is still arriving.
    prepared: BTreeMap<u32, (ExecRequest, Option<File>)>,
    running: BTreeMap<u32, exec::Running>,
    drains: VecDeque<OwnedFd>,
    uploads: BTreeMap<u32, files::Upload>,
    downloads: VecDeque<files::Download>,
    forwarder: Option<forward::Forwarder>,
    deadline: Instant,
    scratch: Vec<u8>,
}

/// Serves to the end; gives the exit code.
pub(crate) fn run(control: UnixStream, listener: Option<TcpListener>, deadline: Duration) -> i32 {
    let Ok(signals) = sys::child_signals() else {
        return EXIT_BROKEN;
    };
    if control.set_nonblocking(true).is_err() {
        return EXIT_BROKEN;
    }
    let mut init = Init {
        control,
        decoder: Decoder::default(),
        outbox: VecDeque::new(),
        outbox_sent: 0,
        outbox_bytes: 0,
        signals,
        prepared: BTreeMap::new(),
        running: BTreeMap::new(),
        drains: VecDeque::new(),
        uploads: BTreeMap::new(),
        downloads: VecDeque::new(),
        forwarder: listener.map(forward::Forwarder::new),
        deadline: Instant::now() + deadline.min(Duration::from_secs(u64::from(u32::MAX))),
        scratch: vec![0; 64 << 10],
    };
    init.send(&Frame::json(Kind::Hello, 0, &Hello { version: VERSION }));
    match init.serve() {
        Ok(code) => code,
        Err(error) => {
            init.send(&Frame::new(
                Kind::Goodbye,
                0,
                error.to_string().into_bytes(),
            ));
            let _ = init.flush();
            EXIT_BROKEN
        }
    }
}

fn closed(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof
    )
}

impl Init {
    fn serve(&mut self) -> io::Result<i32> {
        loop {
            self.pump_downloads();
            match self.flush() {
                Err(error) if closed(&error) => return Ok(EXIT_CLOSED),
                other => other?,
            }
            let ready = self.wait()?;
            for (source, flags) in ready {
                match source {
                    Source::Control
                        if flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) =>
                    {
                        if !self.read_control()? {
                            return Ok(EXIT_CLOSED);
                        }
                    }
                    Source::Control => {}
                    Source::Signals => self.reap(),
                    Source::Exec(id, part) => self.on_exec(id, part),
                    Source::Drain => self.drain(),
                    Source::Forward(part) => {
                        if let Some(forwarder) = &mut self.forwarder {
                            forwarder.step(part, flags);
                        }
                    }
                }
            }
            let now = Instant::now();
            if now >= self.deadline {
                self.send(&Frame::new(
                    Kind::Goodbye,
                    0,
                    b"its deadline passed".to_vec(),
                ));
                let _ = self.flush();
                return Ok(EXIT_DEADLINE);
            }
            for running in self.running.values_mut() {
                running.check_timeout(now);
            }
            if let Some(forwarder) = &mut self.forwarder {
                forwarder.retry(now);
            }
        }
    }

    /// Waits for something to do, at most until the next deadline.
    fn wait(&self) -> io::Result<Vec<(Source, PollFlags)>> {
        let mut fds = Vec::new();
        let mut sources = Vec::new();
        let mut add = |source, fd, flags| {
            sources.push(source);
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        };
        let mut control = PollFlags::IN;
        if !self.outbox.is_empty() {
            control |= PollFlags::OUT;
        }
        add(Source::Control, self.control.as_fd(), control);
        add(Source::Signals, self.signals.as_fd(), PollFlags::IN);
        let mut next = self.deadline;
        for (id, running) in &self.running {
            for (part, fd) in running.descriptors() {
                add(Source::Exec(*id, part), fd, PollFlags::IN);
            }
            next = running
                .next_deadline()
                .map_or(next, |deadline| next.min(deadline));
        }
        for fd in &self.drains {
            add(Source::Drain, fd.as_fd(), PollFlags::IN);
        }
        if let Some(forwarder) = &self.forwarder {
            forwarder.descriptors(|part, fd, flags| add(Source::Forward(part), fd, flags));
            next = forwarder
                .next_deadline()
                .map_or(next, |deadline| next.min(deadline));
        }
        let rest = next.saturating_duration_since(Instant::now());
        match poll(&mut fds, Timespec::try_from(rest).ok().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = sources.into_iter().zip(fds.iter().map(PollFd::revents));
        Ok(ready.filter(|(_, flags)| !flags.is_empty()).collect())
    }

    fn send(&mut self, frame: &Frame) {
        // Bodies are made by us, in chunks: they fit.
        if let Ok(bytes) = frame.encode() {
            self.outbox_bytes += bytes.len();
            self.outbox.push_back(bytes);
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while let Some(first) = self.outbox.front() {
            match self
                .control
                .write(first.get(self.outbox_sent..).unwrap_or_default())
            {
                Ok(count) => {
                    self.outbox_sent += count;
                    if self.outbox_sent == first.len() {
                        self.outbox_bytes -= self.outbox_sent;
                        self.outbox_sent = 0;
                        self.outbox.pop_front();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads what the host sent; whether it is still there.
    fn read_control(&mut self) -> io::Result<bool> {
        // A few reads only: others wait too.
        for _ in 0..16 {
            match self.control.read(&mut self.scratch) {
                Ok(0) => return Ok(false),
                Ok(count) => {
                    self.decoder
                        .push(self.scratch.get(..count).unwrap_or_default());
                    while let Some(frame) = self.decoder.next_frame().map_err(io::Error::other)? {
                        self.on_frame(frame).map_err(io::Error::other)?;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if closed(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn on_frame(&mut self, frame: Frame) -> Result<(), ProtocolError> {
        let id = frame.id;
        match frame.kind {
            Kind::Exec => {
                let request = frame.parse()?;
                self.prepared.insert(id, (request, None));
            }
            Kind::Stdin => self.add_stdin(id, &frame.body),
            Kind::Run => self.run_prepared(id),
            Kind::Cancel => {
                self.prepared.remove(&id);
                self.uploads.remove(&id);
                self.downloads.retain(|download| download.id != id);
                if let Some(running) = self.running.get_mut(&id) {
                    running.kill(false);
                }
            }
            Kind::Put => match files::Upload::begin(&frame.body)? {
                Ok(upload) => {
                    self.uploads.insert(id, upload);
                }
                Err(failure) => self.fail_file(id, &failure),
            },
            Kind::PutData => {
                if let Some(upload) = self.uploads.get_mut(&id)
                    && let Err(failure) = upload.add(&frame.body)
                {
                    self.uploads.remove(&id);
                    self.fail_file(id, &failure);
                }
            }
            Kind::PutEnd => match self.uploads.remove(&id).map(files::Upload::finish) {
                Some(Ok(())) => self.send(&Frame::new(Kind::PutDone, id, Vec::new())),
                Some(Err(failure)) => self.fail_file(id, &failure),
                // It failed before, and that was said.
                None => {}
            },
            Kind::Get => match files::Download::begin(id, &frame.body)? {
                Ok(download) => self.downloads.push_back(download),
                Err(failure) => self.fail_file(id, &failure),
            },
            _ => return Err(ProtocolError::UnknownKind(frame.kind as u8)),
        }
        Ok(())
    }

    fn fail_file(&mut self, id: u32, failure: &FileFailure) {
        self.send(&Frame::json(Kind::FileFailed, id, failure));
    }

    fn fail_exec(&mut self, id: u32, reason: &str) {
        self.send(&Frame::new(
            Kind::ExecFailed,
            id,
            reason.as_bytes().to_vec(),
        ));
    }

    fn add_stdin(&mut self, id: u32, bytes: &[u8]) {
        let Some((_, file)) = self.prepared.get_mut(&id) else {
            return;
        };
        if let Err(error) = exec::add_stdin(file, bytes) {
            self.prepared.remove(&id);
            self.fail_exec(id, &format!("keeping standard input: {error}"));
        }
    }

    fn run_prepared(&mut self, id: u32) {
        // Absent: it failed before, and that was said.
        let Some((request, stdin)) = self.prepared.remove(&id) else {
            return;
        };
        if self.running.len() >= EXECS_MAX {
            self.fail_exec(
                id,
                &format!("{EXECS_MAX} processes run already, none may be added"),
            );
            return;
        }
        match exec::Running::start(&request, stdin) {
            Ok(running) => {
                self.running.insert(id, running);
            }
            Err(error) => self.fail_exec(id, &error.to_string()),
        }
    }

    fn on_exec(&mut self, id: u32, part: exec::Part) {
        let Some(running) = self.running.get_mut(&id) else {
            return;
        };
        let Some(outcome) = running.step(part, &mut self.scratch) else {
            return;
        };
        let Some(running) = self.running.remove(&id) else {
            return;
        };
        let exec::Ended { frames, pipes } = running.end(id, outcome, &mut self.scratch);
        for frame in frames {
            self.send(&frame);
        }
        self.drains.extend(pipes);
        while self.drains.len() > DRAINS_MAX {
            self.drains.pop_front();
        }
    }

    /// Reads and forgets output of processes whose parent has ended.
    fn drain(&mut self) {
        let scratch = &mut self.scratch;
        self.drains
            .retain(|fd| match rustix::io::read(fd, &mut scratch[..]) {
                Ok(count) => count > 0,
                Err(error) => error == rustix::io::Errno::AGAIN || error == rustix::io::Errno::INTR,
            });
    }

    fn reap(&mut self) {
        let _ = rustix::io::read(&self.signals, &mut self.scratch[..]);
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
    }

    fn pump_downloads(&mut self) {
        while self.outbox_bytes < OUTBOX_BYTES_HIGH {
            let Some(download) = self.downloads.front_mut() else {
                return;
            };
            let (frame, more) = download.next_frame();
            if !more {
                self.downloads.pop_front();
            }
            self.send(&frame);
        }
    }
}
