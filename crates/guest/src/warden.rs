//! The one process that makes sandboxes: it needs a single thread (clone3, user namespaces and
//! parent-death signals are per thread), it has no data path, and it outlives the orchestrator
//! just long enough to clean up after it.
//!
//! It reads requests on standard input, a `SOCK_SEQPACKET` socket. When that closes, for whatever
//! reason, it kills every sandbox, removes every group, and ends. When it is killed itself, every
//! sandbox dies by its parent-death signal, and the next warden removes the groups.

use std::{
    collections::BTreeMap,
    fs, io,
    io::IoSliceMut,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::{FileTypeExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags},
    process::{Pid, Signal, WaitOptions, WaitStatus, pidfd_send_signal, waitpid},
};

use crate::{
    cgroup::{Group, GroupLimits, Places, own_prefix},
    init,
    protocol::{
        Capabilities, Degraded, Frame, FromWarden, Hello, Kind, ONE_USER, PACKET_BYTES_MAX, Plan,
        ToWarden, VERSION,
    },
    rootfs::Rootfs,
    setup::{self, Prepared, check_plan},
    stage::{Refusal, Stage, all_namespaces, clone_read_only},
    sys,
};

/// How long after a sandbox's own deadline the warden kills it.
const DEADLINE_GRACE: Duration = Duration::from_secs(5);
/// How long the last clean-up may wait for killed processes.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(4);

#[derive(Debug)]
struct Living {
    pid: Pid,
    descriptor: OwnedFd,
    group: Group,
    deadline: Instant,
    killed: Option<&'static str>,
}

#[derive(Debug)]
pub(crate) struct Warden {
    stage: Stage,
    places: Places,
    prefix: String,
    living: BTreeMap<u64, Living>,
}

/// Serves until standard input closes.
#[must_use]
pub fn run() -> ExitCode {
    // Ctrl-C in the terminal is for the orchestrator, which drains; not for us.
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(c"espalier-warden");
    let host = rustix::stdio::stdin();
    let mut warden = match Warden::start() {
        Ok(warden) => warden,
        Err(refusal) => {
            let _ = send(
                host,
                &FromWarden::Unsupported {
                    what: refusal.what,
                    hint: refusal.hint,
                },
            );
            return ExitCode::FAILURE;
        }
    };
    let capabilities = warden.capabilities();
    if send(
        host,
        &FromWarden::Ready {
            version: VERSION,
            capabilities,
        },
    )
    .is_ok()
    {
        let _ = warden.serve(host);
    }
    warden.shutdown();
    ExitCode::SUCCESS
}

fn send(host: BorrowedFd<'_>, message: &FromWarden) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    rustix::net::send(host, &bytes, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// One packet and the descriptor it carried; `None` at the end.
fn receive(
    host: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> io::Result<Option<(ToWarden, Option<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = rustix::net::recvmsg(
        host,
        &mut [IoSliceMut::new(buffer)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    if message.bytes == 0 {
        return Ok(None);
    }
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let request = serde_json::from_slice(buffer.get(..message.bytes).unwrap_or_default())?;
    Ok(Some((request, descriptor)))
}

impl Warden {
    /// Removes what dead wardens left, and leaves the host's namespaces.
    pub(crate) fn start() -> Result<Self, Refusal> {
        let places = Places::find();
        places.sweep();
        let stage = Stage::prepare()?;
        Ok(Self {
            stage,
            places,
            prefix: own_prefix(),
            living: BTreeMap::new(),
        })
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        let ids = &self.stage.ids;
        let mut capabilities = self.places.capabilities(ids.uid);
        capabilities.users = ids.count();
        if let Some(reason) = ids.why_one() {
            capabilities.degraded.push(Degraded {
                name: ONE_USER.to_owned(),
                found: reason.to_owned(),
                costs: "programs run as the sandbox's own user only; as another they are refused"
                    .to_owned(),
            });
        }
        capabilities
    }

    fn serve(&mut self, host: BorrowedFd<'_>) -> io::Result<()> {
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        loop {
            let (host_ready, ended) = self.wait(host)?;
            for id in ended {
                self.reap(host, id)?;
            }
            if host_ready {
                let Some((request, descriptor)) = receive(host, &mut buffer)? else {
                    return Ok(());
                };
                self.answer(host, request, descriptor)?;
            }
            let now = Instant::now();
            for living in self.living.values_mut() {
                if living.killed.is_none() && now >= living.deadline {
                    living.kill("its deadline passed");
                }
            }
        }
    }

    /// Waits for a request, an ended sandbox or a deadline.
    fn wait(&self, host: BorrowedFd<'_>) -> io::Result<(bool, Vec<u64>)> {
        let mut fds = vec![PollFd::from_borrowed_fd(host, PollFlags::IN)];
        let descriptors = self.living.values().map(|l| l.descriptor.as_fd());
        fds.extend(descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let waiting = self
            .living
            .values()
            .filter(|living| living.killed.is_none());
        let timeout = waiting
            .map(|living| living.deadline)
            .min()
            .and_then(|deadline| {
                Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok()
            });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let (first, rest) = fds.split_at(1);
        let ended = self
            .living
            .keys()
            .zip(rest)
            .filter(|(_, fd)| ready(fd))
            .map(|(id, _)| *id)
            .collect();
        Ok((first.iter().any(ready), ended))
    }

    fn answer(
        &mut self,
        host: BorrowedFd<'_>,
        request: ToWarden,
        descriptor: Option<OwnedFd>,
    ) -> io::Result<()> {
        match request {
            ToWarden::Create { id, plan } => {
                let made = match descriptor {
                    None => Err("the request carried no control stream".to_owned()),
                    Some(control) => self.create(id, &plan, control),
                };
                match made {
                    Ok(memory_events) => send(host, &FromWarden::Made { id, memory_events }),
                    Err(reason) => send(host, &FromWarden::CreateFailed { id, reason }),
                }
            }
            ToWarden::Destroy { id } => match self.living.get_mut(&id) {
                Some(living) => {
                    living.kill("it was destroyed");
                    Ok(())
                }
                None => send(
                    host,
                    &FromWarden::Ended {
                        id,
                        reason: "it had ended".to_owned(),
                    },
                ),
            },
        }
    }

    /// Makes a sandbox; gives the file that counts its out-of-memory kills.
    pub(crate) fn create(
        &mut self,
        id: u64,
        plan: &Plan,
        control: OwnedFd,
    ) -> Result<Option<PathBuf>, String> {
        check_plan(plan)?;
        let mounts = plan
            .mounts
            .iter()
            .map(|(source, _)| clone_read_only(source))
            .collect::<io::Result<Vec<_>>>()
            .map_err(|e| e.to_string())?;
        let forwards = plan
            .forwards
            .iter()
            .map(|(_, path)| open_socket(path, self.stage.privileged))
            .collect::<Result<Vec<_>, _>>()?;
        let rootfs = match &plan.rootfs {
            Some(folder) => {
                let writable = [plan.workspace.as_path(), &plan.home];
                Some(Rootfs::open(folder, writable, self.stage.users.as_ref())?)
            }
            None => None,
        };
        let limits = GroupLimits {
            memory_bytes: plan.memory_bytes,
            pids: plan.pids,
            cpu_cores: plan.cpu_cores,
        };
        let mut group = self
            .places
            .make(&format!("{}-{id}", self.prefix), limits)
            .map_err(|e| e.to_string())?;
        let prepared = Prepared {
            stage: &self.stage,
            plan,
            mounts: &mounts,
            forwards: &forwards,
            rootfs: rootfs.as_ref(),
            rlimits: self.places.needs_rlimits(),
        };
        match self.spawn(&prepared, &group, control) {
            Ok((pid, descriptor)) => {
                let time = Duration::from_secs(plan.deadline_s.min(u64::from(u32::MAX)));
                let deadline = Instant::now() + time + DEADLINE_GRACE;
                let memory_events = group.memory_events();
                let living = Living {
                    pid,
                    descriptor,
                    group,
                    deadline,
                    killed: None,
                };
                self.living.insert(id, living);
                Ok(memory_events)
            }
            Err(reason) => {
                group.kill();
                group.remove();
                Err(reason)
            }
        }
    }

    fn spawn(
        &self,
        prepared: &Prepared<'_>,
        group: &Group,
        control: OwnedFd,
    ) -> Result<(Pid, OwnedFd), String> {
        let say = |what: &str| {
            let what = what.to_owned();
            move |error: &dyn std::fmt::Display| format!("{what}: {error}")
        };
        let (go_read, go_write) = rustix::pipe::pipe().map_err(|e| say("pipe")(&e))?;
        let folder = group.open_v2();
        let mut in_v2 = folder.is_some();
        let flags = all_namespaces();
        let cloned = sys::clone3(flags, folder.as_ref().map(AsFd::as_fd)).or_else(|error| {
            // Some kernels and containers refuse to be born elsewhere; moving in may still work.
            in_v2 = false;
            if folder.is_some() {
                sys::clone3(flags, None)
            } else {
                Err(error)
            }
        });
        match cloned.map_err(|e| say("clone3")(&e))? {
            sys::Fork::Child => child(prepared, &go_read, control),
            sys::Fork::Parent((pid, descriptor)) => {
                let admitted = self.admit(pid, group, in_v2).and_then(|()| {
                    rustix::io::write(&go_write, b"g")
                        .map(|_| ())
                        .map_err(io::Error::from)
                });
                if let Err(error) = admitted {
                    let _ = pidfd_send_signal(&descriptor, Signal::KILL);
                    let _ = waitpid(Some(pid), WaitOptions::empty());
                    return Err(format!("admitting the new process: {error}"));
                }
                Ok((pid, descriptor))
            }
        }
    }

    /// Maps the users and puts the process into its groups, before it does anything.
    fn admit(&self, pid: Pid, group: &Group, in_v2: bool) -> io::Result<()> {
        let pid = pid.as_raw_nonzero().get();
        let map = |file: &str, numbers: String| {
            fs::write(format!("/proc/{pid}/{file}"), numbers)
                .map_err(|e| io::Error::new(e.kind(), format!("{file}: {e}")))
        };
        map("uid_map", self.stage.ids.users())?;
        map("gid_map", self.stage.ids.groups())?;
        group.add(pid, in_v2)
    }

    fn reap(&mut self, host: BorrowedFd<'_>, id: u64) -> io::Result<()> {
        let Some(mut living) = self.living.remove(&id) else {
            return Ok(());
        };
        let status = waitpid(Some(living.pid), WaitOptions::empty());
        living.group.kill();
        let reason = living.reason(status.ok().flatten().map(|(_, status)| status));
        let clean = living.group.remove();
        let reason = if clean {
            reason
        } else {
            format!("{reason}; its groups are still busy")
        };
        send(host, &FromWarden::Ended { id, reason })
    }

    pub(crate) fn shutdown(&mut self) {
        for living in self.living.values_mut() {
            living.kill("the orchestrator ended");
        }
        let until = Instant::now() + SHUTDOWN_TIMEOUT;
        while let Some((_, mut living)) = self.living.pop_first() {
            let mut fds = [PollFd::from_borrowed_fd(
                living.descriptor.as_fd(),
                PollFlags::IN,
            )];
            let rest = until.saturating_duration_since(Instant::now());
            let _ = poll(&mut fds, Timespec::try_from(rest).ok().as_ref());
            let _ = waitpid(Some(living.pid), WaitOptions::NOHANG);
            living.group.remove();
        }
    }
}

impl Living {
    fn kill(&mut self, reason: &'static str) {
        self.killed.get_or_insert(reason);
        let _ = pidfd_send_signal(&self.descriptor, Signal::KILL);
        self.group.kill();
    }

    fn reason(&self, status: Option<WaitStatus>) -> String {
        if let Some(reason) = self.killed {
            return reason.to_owned();
        }
        let Some(status) = status else {
            return "it ended in an unknown way".to_owned();
        };
        match (status.exit_status(), status.terminating_signal()) {
            (Some(init::EXIT_DEADLINE), _) => "its deadline passed".to_owned(),
            (Some(init::EXIT_CLOSED), _) => "its control stream closed".to_owned(),
            (Some(code), _) => format!("its PID 1 ended with code {code}"),
            (_, Some(9)) => "its PID 1 was killed (signal 9): by the kernel when the memory limit \
                             left nothing else to kill, or from outside"
                .to_owned(),
            (_, signal) => format!("its PID 1 ended by signal {signal:?}"),
        }
    }
}

/// A socket behind a forwarded port as a detached mount. A privileged warden's sandboxes run as nobody, who
/// needs write permission on the socket to connect.
fn open_socket(path: &Path, privileged: bool) -> Result<OwnedFd, String> {
    let say = |error: io::Error| format!("socket {}: {error}", path.display());
    let metadata = fs::metadata(path).map_err(say)?;
    if !metadata.file_type().is_socket() {
        return Err(format!("{}: not a socket", path.display()));
    }
    let mode = metadata.permissions().mode();
    if privileged && mode & 0o002 == 0 {
        fs::set_permissions(path, fs::Permissions::from_mode(mode | 0o666)).map_err(say)?;
    }
    clone_read_only(path).map_err(say)
}

/// The new process: waits until it is admitted, builds its world, becomes init.
fn child(prepared: &Prepared<'_>, go: &OwnedFd, control: OwnedFd) -> ! {
    let mut keep = setup::descriptors(prepared);
    keep.extend([0, 1, 2, go.as_raw_fd(), control.as_raw_fd()]);
    sys::close_all_but(&keep);
    // Standard input is the warden's socket, which must not reach a sandbox.
    if setup::silence().is_err() {
        sys::exit_now(1);
    }
    let mut byte = [0];
    let admitted = rustix::io::read(go, &mut byte[..]);
    if !matches!(admitted, Ok(1)) {
        sys::exit_now(1);
    }
    let stream = std::os::unix::net::UnixStream::from(control);
    let _ = rustix::thread::set_name(c"espalier-init");
    let made = setup::run(prepared)
        .map_err(|error| error.to_string())
        .and_then(|listeners| {
            let control = init::Control::of_socket(&stream).map_err(|e| e.to_string())?;
            Ok((listeners, control))
        });
    match made {
        Ok((listeners, control)) => {
            // Whatever setup used is not for PID 1.
            let mut keep = vec![0, 1, 2];
            keep.extend(control.descriptors());
            keep.extend(listeners.iter().map(AsRawFd::as_raw_fd));
            sys::close_all_but(&keep);
            let way_out = init::WayOut::Sockets(listeners);
            let ends = init::Ends {
                deadline: Duration::from_secs(prepared.plan.deadline_s),
                heartbeat: None,
            };
            let hello = Hello {
                version: VERSION,
                env: BTreeMap::new(),
            };
            sys::exit_now(init::run(control, way_out, ends, &hello))
        }
        Err(error) => {
            let frame = Frame::new(Kind::SetupFailed, 0, error.into_bytes());
            let bytes = frame.encode().unwrap_or_default();
            let _ = io::Write::write_all(&mut &stream, &bytes);
            sys::exit_now(1)
        }
    }
}
