//! `guest init PLAN`: PID 1 of a container that an engine or a cluster made. What the warden does
//! for a local sandbox, the engine did here; what is left is to give the folders to the sandbox's
//! user, to become that user, and to serve.
//!
//! Started as root it needs CAP_CHOWN, CAP_SETUID and CAP_SETGID; `privileges` says what it keeps
//! for programs of other users. Started as the sandbox's user it finds the folders made, and
//! programs run as nobody else.
//!
//! `guest relay SOCKET` connects standard input and output with that PID 1, for orchestrators that
//! can start a process in the container but not reach its first one.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read, Write},
    net::Shutdown,
    os::{
        fd::AsFd,
        unix::{
            fs::PermissionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::Path,
    process::ExitCode,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::DumpableBehavior,
    thread::{Gid, Uid},
};

use crate::{
    init::{self, Control, Ends, WayOut},
    privileges,
    protocol::{ContainerPlan, Hello, UID, VERSION},
    setup, user,
};

/// Folders that everybody may write to in most images, and that no limit covers.
const OPEN_FOLDERS: [&str; 2] = ["/run/lock", "/var/lock"];

/// Serves to the end.
pub fn run(mut arguments: impl Iterator<Item = String>) -> ExitCode {
    let plan = arguments
        .next()
        .ok_or_else(|| "no plan given".to_owned())
        .and_then(|text| {
            serde_json::from_str::<ContainerPlan>(&text).map_err(|e| format!("bad plan: {e}"))
        });
    match plan.and_then(|plan| serve(&plan)) {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(reason) => {
            let _ = writeln!(io::stderr(), "guest init: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn serve(plan: &ContainerPlan) -> Result<i32, String> {
    let say = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    let control = match &plan.control_socket {
        Some(path) => Some(UnixListener::bind(path).map_err(say("control socket"))?),
        None => None,
    };
    let listeners = plan
        .ports
        .iter()
        .map(|port| Ok((*port, setup::listen(*port)?)))
        .collect::<io::Result<Vec<_>>>()
        .map_err(say("listening on a forwarded port"))?;
    // Here and not by the engine: podman takes limits of a request for all there are, and then
    // asks for more open files than every machine allows.
    setup::no_core_files().map_err(|e| e.to_string())?;
    if rustix::process::geteuid().is_root() {
        give_folders(plan)?;
        name_user(plan).map_err(say("/etc/passwd"))?;
        privileges::become_plain_user().map_err(|e| e.to_string())?;
    } else {
        privileges::drop_privileges().map_err(|e| e.to_string())?;
    }
    let control = match control {
        Some(listener) => accept(&listener, Duration::from_secs(plan.heartbeat_s))?,
        None => standard_streams().map_err(say("standard streams"))?,
    };
    if let Some(path) = &plan.control_socket {
        // Nobody else may ever connect.
        let _ = fs::remove_file(path);
    }
    let way_out = WayOut::Tunnel(listeners);
    let ends = Ends {
        deadline: Duration::from_secs(plan.deadline_s),
        heartbeat: Some(Duration::from_secs(plan.heartbeat_s)),
    };
    let hello = Hello {
        version: VERSION,
        env: image_env(),
    };
    Ok(init::run(control, way_out, ends, &hello))
}

/// The environment that we were started with, but for what is about the container and not about
/// the image.
fn image_env() -> BTreeMap<String, String> {
    const OTHERS: [&str; 6] = ["HOME", "HOSTNAME", "TERM", "PWD", "SHLVL", "container"];
    std::env::vars_os()
        .filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(key, _)| !OTHERS.contains(&key.as_str()) && !key.contains("KUBERNETES"))
        .collect()
}

/// Waits for the one who speaks with us.
fn accept(listener: &UnixListener, patience: Duration) -> Result<Control, String> {
    let mut fds = [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
    match poll(&mut fds, Timespec::try_from(patience).ok().as_ref()) {
        Ok(0) => Err(format!("nobody connected within {patience:?}")),
        Ok(_) => {
            let (stream, _) = listener.accept().map_err(|e| e.to_string())?;
            Control::of_socket(&stream).map_err(|e| e.to_string())
        }
        Err(error) => Err(error.to_string()),
    }
}

/// Takes standard input and output as the control stream, and puts /dev/null in their places.
fn standard_streams() -> io::Result<Control> {
    let reader = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    let writer = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?;
    setup::silence()?;
    Control::new(reader, writer)
}

fn give_folders(plan: &ContainerPlan) -> Result<(), String> {
    let (uid, gid) = (Uid::from_raw(UID), Gid::from_raw(UID));
    for folder in plan.folders.iter().chain([&plan.home, &plan.workspace]) {
        let say = |error: io::Error| format!("{}: {error}", folder.display());
        fs::create_dir_all(folder).map_err(say)?;
        rustix::fs::chown(folder, Some(uid), Some(gid)).map_err(|e| say(e.into()))?;
        // Only the owner may change it from here on.
        let mode = fs::Permissions::from_mode(0o755);
        if folder.as_path() != Path::new("/tmp") {
            // The capability to do this to somebody else's file is not ours: as long as it was.
            let _ = fs::set_permissions(folder, mode);
        }
    }
    for folder in OPEN_FOLDERS.map(Path::new) {
        if folder.is_dir() {
            let _ = fs::set_permissions(folder, fs::Permissions::from_mode(0o755));
        }
    }
    Ok(())
}

/// Gives the user a name and a HOME, if the image knows none with its number.
fn name_user(plan: &ContainerPlan) -> io::Result<()> {
    let add = |file: &str, line: String| {
        let text = user::read_list(Path::new(file), user::LIST_BYTES_MAX)?.unwrap_or_default();
        let new = user::with_number(&text, UID, &line);
        if new == text {
            return Ok(());
        }
        fs::write(file, new)
    };
    fs::create_dir_all("/etc")?;
    let home = plan.home.display();
    add(user::PASSWD, format!("agent:x:{UID}:{UID}::{home}:/bin/sh"))?;
    add(user::GROUP, format!("agent:x:{UID}:"))
}

/// Connects standard input and output with PID 1; ends with either.
pub fn relay(mut arguments: impl Iterator<Item = String>) -> ExitCode {
    let path = arguments.next().unwrap_or_default();
    // The control stream runs through here: processes of the same user may not look into it.
    let closed = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let joined = closed
        .map_err(io::Error::from)
        .and_then(|()| connect(Path::new(&path)))
        .and_then(copy);
    match joined {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "guest relay {path}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// PID 1 may need a moment to listen.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let mut tries = 0;
    loop {
        match UnixStream::connect(path) {
            Err(error) if tries < 200 && error.kind() == io::ErrorKind::NotFound => {
                tries += 1;
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other,
        }
    }
}

/// Both directions, each on its own: whoever is at the other end of our standard streams may write
/// without reading meanwhile, and would wait for us for ever if we did the same.
fn copy(stream: UnixStream) -> io::Result<()> {
    let inwards = stream.try_clone()?;
    // Ends with the process at the latest.
    std::thread::spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut &inwards);
        let _ = inwards.shutdown(Shutdown::Write);
    });
    let (mut reader, mut out) = (&stream, io::stdout().lock());
    let mut buffer = vec![0; 64 << 10];
    loop {
        match reader.read(&mut buffer)? {
            0 => return Ok(()),
            count => {
                out.write_all(buffer.get(..count).unwrap_or_default())?;
                out.flush()?;
            }
        }
    }
}
