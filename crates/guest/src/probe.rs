//! Tries what sandboxes need and prints the results as JSON, for `doctor`. A process of its own,
//! because the tries leave it in other namespaces.

use std::{
    io::{Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::ExitCode,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    protocol::{Capabilities, Decoder, Kind, Plan},
    stage::{NAMESPACES, try_clone},
    warden,
};

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Each kind of namespace (together with a user namespace), and why it is refused.
    pub namespaces: Vec<(String, Option<String>)>,
    /// How limits would be enforced; `None` when no warden can start.
    pub capabilities: Option<Capabilities>,
    /// Why no sandbox could be made, if none could.
    pub sandbox: Option<String>,
}

/// Prints a [`Report`].
#[must_use]
pub fn run() -> ExitCode {
    let namespaces = NAMESPACES
        .iter()
        .map(|(name, flag)| {
            let refused = try_clone(libc::CLONE_NEWUSER | flag)
                .err()
                .map(|e| e.to_string());
            ((*name).to_owned(), refused)
        })
        .collect();
    let (capabilities, sandbox) = match try_sandbox() {
        Ok((capabilities, outcome)) => (Some(capabilities), outcome.err()),
        Err(reason) => (None, Some(reason)),
    };
    let report = Report {
        namespaces,
        capabilities,
        sandbox,
    };
    let text = serde_json::to_string(&report).unwrap_or_default();
    match writeln!(std::io::stdout(), "{text}") {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn try_sandbox() -> Result<(Capabilities, Result<(), String>), String> {
    let mut warden = warden::Warden::start().map_err(|r| format!("{}; {}", r.what, r.hint))?;
    let capabilities = warden.capabilities();
    let plan = Plan {
        memory_bytes: 64 << 20,
        pids: 16,
        cpu_cores: 1.0,
        disk_bytes: 4 << 20,
        deadline_s: 30,
        mounts: Vec::new(),
        rootfs: None,
        workspace: "/workspace".into(),
        home: "/home/agent".into(),
        forwards: Vec::new(),
    };
    let outcome = (|| {
        let (mut ours, theirs) = UnixStream::pair().map_err(|e| e.to_string())?;
        warden.create(0, &plan, OwnedFd::from(theirs))?;
        let _ = ours.set_read_timeout(Some(Duration::from_secs(20)));
        first_words(&mut ours)
    })();
    warden.shutdown();
    Ok((capabilities, outcome))
}

fn first_words(stream: &mut UnixStream) -> Result<(), String> {
    let mut decoder = Decoder::default();
    let mut buffer = [0; 4096];
    loop {
        if let Some(frame) = decoder.next_frame().map_err(|e| e.to_string())? {
            return match frame.kind {
                Kind::Hello => Ok(()),
                _ => Err(String::from_utf8_lossy(&frame.body).into_owned()),
            };
        }
        match stream.read(&mut buffer) {
            Ok(0) => return Err("its first process ended without a word".to_owned()),
            Ok(count) => decoder.push(buffer.get(..count).unwrap_or_default()),
            Err(error) => return Err(format!("no word from its first process: {error}")),
        }
    }
}
