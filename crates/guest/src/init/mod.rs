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

mod control;
mod exec;
mod files;
mod forward;
mod supervise;
mod tunnel;

use std::{
    collections::{BTreeMap, VecDeque},
    fs::File,
    io,
    net::TcpListener,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{WaitOptions, wait},
};

pub(crate) use self::control::Control;
use self::control::{Heard, closed};
use crate::{
    protocol::{
        EXECS_MAX, ExecRequest, FileFailure, Frame, Hello, Kind, ProtocolError, decode_count,
        encode_count,
    },
    sys,
};

/// Exit code: the control stream closed.
pub(crate) const EXIT_CLOSED: i32 = 0;
/// Exit code: the deadline passed.
pub(crate) const EXIT_DEADLINE: i32 = 40;
/// Exit code: nothing was heard for too long.
pub(crate) const EXIT_UNHEARD: i32 = 42;
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
    Tunnel(tunnel::Part),
}

/// How connections to forwarded ports get out.
#[derive(Debug)]
pub(crate) enum WayOut {
    /// Through the host's sockets, which are in the sandbox: `protocol::forward_path`.
    Sockets(Vec<TcpListener>),
    /// Through the control stream.
    Tunnel(Vec<(u16, TcpListener)>),
}

/// When init ends by itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ends {
    /// After this.
    pub(crate) deadline: Duration,
    /// When nothing was heard for this long.
    pub(crate) heartbeat: Option<Duration>,
}

struct Init {
    control: Control,
    signals: OwnedFd,
    /// Processes whose standard input is still arriving.
    prepared: BTreeMap<u32, (ExecRequest, Option<File>)>,
    running: BTreeMap<u32, exec::Running>,
    drains: VecDeque<OwnedFd>,
    uploads: BTreeMap<u32, files::Upload>,
    downloads: VecDeque<files::Download>,
    forwarder: Option<forward::Forwarder>,
    tunnel: Option<tunnel::Tunnel>,
    deadline: Instant,
    heartbeat: Option<Duration>,
    heard: Instant,
    scratch: Vec<u8>,
}

/// Serves to the end; gives the exit code.
pub(crate) fn run(control: Control, way_out: WayOut, ends: Ends, hello: &Hello) -> i32 {
    let Ok(signals) = sys::child_signals() else {
        return EXIT_BROKEN;
    };
    let (forwarder, tunnel) = match way_out {
        WayOut::Sockets(listeners) => (Some(forward::Forwarder::new(listeners)), None),
        WayOut::Tunnel(listeners) => (None, Some(tunnel::Tunnel::new(listeners))),
    };
    let now = Instant::now();
    let mut init = Init {
        control,
        signals,
        prepared: BTreeMap::new(),
        running: BTreeMap::new(),
        drains: VecDeque::new(),
        uploads: BTreeMap::new(),
        downloads: VecDeque::new(),
        forwarder,
        tunnel,
        deadline: now + ends.deadline.min(Duration::from_secs(u64::from(u32::MAX))),
        heartbeat: ends.heartbeat,
        heard: now,
        scratch: vec![0; 64 << 10],
    };
    init.send(&Frame::json(Kind::Hello, 0, hello));
    match init.serve() {
        Ok(code) => code,
        Err(error) => {
            init.goodbye(&error.to_string());
            EXIT_BROKEN
        }
    }
}

impl Init {
    fn serve(&mut self) -> io::Result<i32> {
        loop {
            self.pump_downloads();
            match self.control.flush() {
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
                    Source::Tunnel(part) => {
                        if let Some(tunnel) = &mut self.tunnel {
                            for frame in tunnel.step(part, &mut self.scratch) {
                                self.control.send(&frame);
                            }
                        }
                    }
                }
            }
            let now = Instant::now();
            if now >= self.deadline {
                self.goodbye("its deadline passed");
                return Ok(EXIT_DEADLINE);
            }
            if self.heartbeat.is_some_and(|h| now >= self.heard + h) {
                self.goodbye("it heard nothing from the orchestrator for too long");
                return Ok(EXIT_UNHEARD);
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
        add(Source::Control, self.control.reader(), PollFlags::IN);
        if let Some(writer) = self.control.writer() {
            add(Source::Control, writer, PollFlags::OUT);
        }
        add(Source::Signals, self.signals.as_fd(), PollFlags::IN);
        let mut next = self.deadline;
        if let Some(heartbeat) = self.heartbeat {
            next = next.min(self.heard + heartbeat);
        }
        for (id, running) in &self.running {
            for (part, fd) in running.descriptors() {
                add(Source::Exec(*id, part), fd, PollFlags::IN);
            }
            if let Some(fd) = running.input() {
                add(Source::Exec(*id, exec::Part::Stdin), fd, PollFlags::OUT);
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
        if let Some(tunnel) = &self.tunnel {
            tunnel.descriptors(|part, fd, flags| add(Source::Tunnel(part), fd, flags));
        }
        // A host that reads as fast as we write leaves nothing to wait for: go on at once.
        let go_on = !self.downloads.is_empty() && self.control.waiting_bytes() == 0;
        let now = Instant::now();
        let rest = next.saturating_duration_since(if go_on { next } else { now });
        match poll(&mut fds, Timespec::try_from(rest).ok().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = sources.into_iter().zip(fds.iter().map(PollFd::revents));
        Ok(ready.filter(|(_, flags)| !flags.is_empty()).collect())
    }

    fn send(&mut self, frame: &Frame) {
        self.control.send(frame);
    }

    /// Says why it ends, if that can be said at once.
    fn goodbye(&mut self, reason: &str) {
        let body = reason.as_bytes().to_vec();
        self.send(&Frame::new(Kind::Goodbye, 0, body));
        let _ = self.control.flush();
    }

    /// Reads what the host sent; whether it is still there.
    fn read_control(&mut self) -> io::Result<bool> {
        // A few reads only: others wait too.
        for _ in 0..16 {
            match self.control.read(&mut self.scratch)? {
                Heard::Closed => return Ok(false),
                Heard::Nothing => return Ok(true),
                Heard::Bytes => {
                    self.heard = Instant::now();
                    while let Some(frame) = self.control.next_frame()? {
                        self.on_frame(frame).map_err(io::Error::other)?;
                    }
                }
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
            Kind::Stdin => match self.running.get_mut(&id) {
                None => self.add_stdin(id, &frame.body),
                Some(running) => {
                    if !running.add_input(&frame.body) {
                        return Err(ProtocolError::Body(
                            "more standard input than may be on its way".to_owned(),
                        ));
                    }
                }
            },
            Kind::StdinEnd => {
                if let Some(running) = self.running.get_mut(&id) {
                    running.end_input();
                }
            }
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
            Kind::Credit => {
                let bytes = decode_count(&frame.body)?;
                if let Some(running) = self.running.get_mut(&id) {
                    running.credit(bytes);
                }
            }
            Kind::Ping => {}
            Kind::TunnelData | Kind::TunnelShut | Kind::TunnelClose | Kind::TunnelCredit => {
                if let Some(tunnel) = &mut self.tunnel {
                    tunnel.hear(&frame)?;
                }
            }
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
        if part == exec::Part::Stdin {
            let taken = running.step_input();
            if taken > 0 {
                self.control
                    .send(&Frame::new(Kind::StdinCredit, id, encode_count(taken)));
            }
            return;
        }
        if let Some(frame) = running.step_stream(id, part, &mut self.scratch) {
            self.control.send(&frame);
        }
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
        while self.control.waiting_bytes() < OUTBOX_BYTES_HIGH {
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
