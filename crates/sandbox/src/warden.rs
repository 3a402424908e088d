//! Our side of the warden: one process that makes sandboxes on request.

use std::{
    collections::HashMap,
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    process::Stdio,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use guest::protocol::{
    Capabilities, FromWarden, ONE_USER, PACKET_BYTES_MAX, Plan, ToWarden, VERSION,
};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, socketpair,
};
use tokio::{
    io::Interest,
    net::UnixDatagram,
    sync::{oneshot, watch},
    time::timeout,
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use crate::{SandboxError, guest_binary::GuestBinary};

/// For the warden to come up, to make a process, to end.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

type MadeAnswer = Result<Option<PathBuf>, String>;

/// What we wait to hear of a sandbox.
#[derive(Debug)]
struct Fate {
    made: Option<oneshot::Sender<MadeAnswer>>,
    ended: watch::Sender<Option<String>>,
}

#[derive(Debug, Default)]
struct Fates {
    living: HashMap<u64, Fate>,
    /// Why no more can be made.
    lost: Option<String>,
}

#[derive(Debug)]
struct Shared {
    /// A `SOCK_SEQPACKET` socket; Tokio's datagram type has all that it needs.
    socket: UnixDatagram,
    fates: Mutex<Fates>,
}

/// The warden process. Dropping the last handle ends it, and with it every sandbox.
#[derive(Debug)]
pub(crate) struct Warden {
    shared: Arc<Shared>,
    next_id: AtomicU64,
    capabilities: Capabilities,
    pub(crate) tasks: TaskTracker,
    process: Mutex<Option<tokio::process::Child>>,
    _stop: DropGuard,
}

/// A sandbox as the warden knows it. Dropping it destroys the sandbox.
#[derive(Debug)]
pub(crate) struct Made {
    warden: Arc<Warden>,
    pub(crate) id: u64,
    pub(crate) memory_events: Option<PathBuf>,
    pub(crate) ended: watch::Receiver<Option<String>>,
    /// Why it has its own user alone, if it has.
    pub(crate) one_user: Option<String>,
}

fn unsupported(what: impl Into<String>, hint: &str) -> SandboxError {
    SandboxError::Unsupported {
        what: what.into(),
        hint: hint.to_owned(),
    }
}

impl Warden {
    pub(crate) async fn start() -> Result<Arc<Self>, SandboxError> {
        let hint = "a working /proc and memfd_create are needed";
        let broken = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| unsupported(format!("{what}: {error}"), hint)
        };
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|e| broken("socketpair")(e.into()))?;
        rustix::io::ioctl_fionbio(&ours, true).map_err(|e| broken("socketpair")(e.into()))?;
        let binary = GuestBinary::new().map_err(broken("keeping the guest in memory"))?;
        let process = tokio::process::Command::new(binary.path())
            .arg0("espalier-warden")
            .arg("warden")
            // Our environment may hold secrets; a sandbox must not find them anywhere.
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(broken("starting the warden"))?;
        let socket = UnixDatagram::from_std(ours.into()).map_err(broken("watching the warden"))?;
        let shared = Arc::new(Shared {
            socket,
            fates: Mutex::default(),
        });
        let first = timeout(ANSWER_TIMEOUT, shared.receive())
            .await
            .map_err(|_| {
                unsupported(
                    format!("the warden said nothing for {ANSWER_TIMEOUT:?}"),
                    hint,
                )
            })?
            .map_err(broken("the warden's first word"))?;
        let capabilities = match first {
            FromWarden::Ready {
                version: VERSION,
                capabilities,
            } => capabilities,
            FromWarden::Unsupported { what, hint } => {
                return Err(SandboxError::Unsupported { what, hint });
            }
            other => {
                return Err(unsupported(
                    format!("unexpected first word {other:?}"),
                    hint,
                ));
            }
        };
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        tasks.spawn(listen(Arc::clone(&shared), stop.clone()));
        Ok(Arc::new(Self {
            shared,
            next_id: AtomicU64::new(1),
            capabilities,
            tasks,
            process: Mutex::new(Some(process)),
            _stop: stop.drop_guard(),
        }))
    }

    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn one_user(&self) -> Option<String> {
        let degraded = &self.capabilities.degraded;
        let one = degraded.iter().find(|d| d.name == ONE_USER);
        one.map(|degraded| degraded.found.clone())
    }

    /// The warden's process id, while it has not been waited for.
    pub(crate) fn process_id(&self) -> Option<u32> {
        let process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        process.as_ref().and_then(tokio::process::Child::id)
    }

    /// Why it can make no more sandboxes, if so.
    pub(crate) fn lost(&self) -> Option<String> {
        self.shared.fates().lost.clone()
    }

    pub(crate) fn living(&self) -> usize {
        self.shared.fates().living.len()
    }

    /// Asks for a sandbox whose PID 1 speaks on `control`. Dropping the future destroys it.
    pub(crate) async fn make(
        self: &Arc<Self>,
        name: &str,
        plan: Plan,
        control: OwnedFd,
    ) -> Result<Made, SandboxError> {
        let failed = |reason: String| SandboxError::Create {
            name: name.to_owned(),
            reason,
        };
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (made_sender, made) = oneshot::channel();
        let (ended_sender, ended) = watch::channel(None);
        {
            let mut fates = self.shared.fates();
            if let Some(reason) = &fates.lost {
                return Err(failed(reason.clone()));
            }
            fates.living.insert(
                id,
                Fate {
                    made: Some(made_sender),
                    ended: ended_sender,
                },
            );
        }
        // From here on a drop of this future sends `Destroy`, also when nothing was made.
        let mut sandbox = Made {
            warden: Arc::clone(self),
            id,
            memory_events: None,
            ended,
            one_user: self.one_user(),
        };
        let request = serde_json::to_vec(&ToWarden::Create {
            id,
            plan: Box::new(plan),
        })
        .map_err(|e| failed(format!("a path that is not UTF-8: {e}")))?;
        if request.len() > PACKET_BYTES_MAX {
            return Err(failed(format!(
                "its description is over {PACKET_BYTES_MAX} bytes"
            )));
        }
        self.shared
            .send(&request, Some(&control))
            .await
            .map_err(|e| failed(format!("asking the warden: {e}")))?;
        drop(control);
        match timeout(ANSWER_TIMEOUT, made).await {
            Ok(Ok(Ok(memory_events))) => {
                sandbox.memory_events = memory_events;
                Ok(sandbox)
            }
            Ok(Ok(Err(reason))) => Err(failed(reason)),
            Ok(Err(_)) => Err(failed("the warden ended".to_owned())),
            Err(_) => Err(failed(format!(
                "the warden did not answer for {ANSWER_TIMEOUT:?}"
            ))),
        }
    }

    /// Ends the process and waits until it has cleaned up.
    pub(crate) async fn close(self: Arc<Self>) {
        let process = self
            .process
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        self.tasks.close();
        let tasks = self.tasks.clone();
        // Sandboxes that still hold us keep the warden; the caller has dropped them.
        drop(self);
        if let Some(mut process) = process
            && timeout(ANSWER_TIMEOUT, async {
                (tasks.wait().await, process.wait().await)
            })
            .await
            .is_err()
        {
            tracing::warn!("the warden did not end within {ANSWER_TIMEOUT:?}");
        }
    }
}

impl Made {
    /// Ends the sandbox and waits until nothing is left of it.
    pub(crate) async fn destroy(mut self) {
        self.request_end();
        let gone = timeout(ANSWER_TIMEOUT, self.ended.wait_for(Option::is_some)).await;
        if gone.is_err() {
            tracing::warn!(
                id = self.id,
                "a sandbox did not end within {ANSWER_TIMEOUT:?}"
            );
        }
    }

    fn request_end(&self) {
        if self.ended.borrow().is_some() {
            return;
        }
        // Should the queue be full, the control stream's end does the same more slowly.
        let message = serde_json::to_vec(&ToWarden::Destroy { id: self.id }).unwrap_or_default();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::send(&self.warden.shared.socket, &message, flags);
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        self.request_end();
    }
}

impl Shared {
    fn fates(&self) -> std::sync::MutexGuard<'_, Fates> {
        self.fates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn send(&self, message: &[u8], descriptor: Option<&OwnedFd>) -> io::Result<()> {
        self.socket
            .async_io(Interest::WRITABLE, || {
                let descriptors: Vec<_> = descriptor.iter().map(|fd| fd.as_fd()).collect();
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                if !descriptors.is_empty() {
                    control.push(SendAncillaryMessage::ScmRights(&descriptors));
                }
                let message = [IoSlice::new(message)];
                rustix::net::sendmsg(&self.socket, &message, &mut control, SendFlags::NOSIGNAL)?;
                Ok(())
            })
            .await
    }

    async fn receive(&self) -> io::Result<FromWarden> {
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        let count = self
            .socket
            .async_io(Interest::READABLE, || {
                let (count, _) =
                    rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
                Ok(count)
            })
            .await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(
            buffer.get(..count).unwrap_or_default(),
        )?)
    }

    fn hear(&self, message: FromWarden) {
        let mut fates = self.fates();
        match message {
            FromWarden::Made { id, memory_events } => {
                if let Some(sender) = fates.living.get_mut(&id).and_then(|fate| fate.made.take()) {
                    let _ = sender.send(Ok(memory_events));
                }
            }
            FromWarden::CreateFailed { id, reason } => {
                if let Some(fate) = fates.living.remove(&id) {
                    fate.ended.send_replace(Some(reason.clone()));
                    if let Some(sender) = fate.made {
                        let _ = sender.send(Err(reason));
                    }
                }
            }
            FromWarden::Ended { id, reason } => {
                if let Some(fate) = fates.living.remove(&id) {
                    fate.ended.send_replace(Some(reason));
                }
            }
            FromWarden::Ready { .. } | FromWarden::Unsupported { .. } => {}
        }
    }

    fn lose(&self, reason: &str) {
        let mut fates = self.fates();
        fates.lost = Some(reason.to_owned());
        for (_, fate) in fates.living.drain() {
            fate.ended.send_replace(Some(reason.to_owned()));
        }
    }
}

/// Hears the warden until it ends or we stop.
async fn listen(shared: Arc<Shared>, stop: CancellationToken) {
    loop {
        let message = tokio::select! {
            message = shared.receive() => message,
            () = stop.cancelled() => return shared.lose("the provider was closed"),
        };
        match message {
            Ok(message) => shared.hear(message),
            Err(error) => {
                tracing::error!("the warden is gone ({error}): every sandbox with it");
                return shared.lose(&format!("the warden ended: {error}"));
            }
        }
    }
}
