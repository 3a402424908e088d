//! Runs an installer: with a deadline, its whole process group, and the tail of its output.

use std::{
    ffi::OsString,
    fs::File,
    io::{Read, Seek, SeekFrom},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::Command;

use crate::HarnessError;

/// Bytes of output shown when an installer fails.
const TAIL_BYTES: u64 = 4096;

/// Name of the file in the bundle that gets the installer's output.
const LOG: &str = "install.log";

/// Kills a process group when dropped.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(pid) = self.0 {
            // Nothing to do when it is gone already.
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

/// Runs the program in a folder until it ends well. `programs` is a folder of programs that come
/// before those of PATH.
///
/// # Errors
/// [`HarnessError::Install`] with the tail of the output and the advice.
pub(crate) async fn installer(
    name: &str,
    program: &Path,
    arguments: &[OsString],
    folder: &Path,
    programs: Option<&Path>,
    timeout: Duration,
    advice: &str,
) -> Result<(), HarnessError> {
    let log = folder.join(LOG);
    let failed = |outcome: String| HarnessError::Install {
        name: name.to_owned(),
        command: std::iter::once(program.as_os_str())
            .chain(arguments.iter().map(OsString::as_os_str))
            .map(|part| part.to_string_lossy())
            .collect::<Vec<_>>()
            .join(" "),
        outcome,
        tail: tail(&log).unwrap_or_default(),
        advice: advice.to_owned(),
    };
    let output = File::create(&log).map_err(|error| failed(error.to_string()))?;
    let errors = output
        .try_clone()
        .map_err(|error| failed(error.to_string()))?;
    let mut command = Command::new(program);
    if let Some(programs) = programs {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::iter::once(programs.to_owned()).chain(std::env::split_paths(&path));
        let joined = std::env::join_paths(folders).map_err(|error| failed(error.to_string()))?;
        command.env("PATH", joined);
    }
    let mut child = command
        .args(arguments)
        .current_dir(folder)
        .env("CI", "1")
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(errors)
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| failed(format!("cannot be started: {error}")))?;
    let group = child
        .id()
        .and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    let mut group = Group(group);
    let outcome = tokio::time::timeout(timeout, child.wait()).await;
    match outcome {
        Ok(Ok(status)) if status.success() => {
            group.0 = None;
            Ok(())
        }
        Ok(Ok(status)) => Err(failed(match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("killed by signal {signal}"),
            (None, None) => "ended".to_owned(),
        })),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(_) => Err(failed(format!(
            "not done after {} s, ended by us",
            timeout.as_secs()
        ))),
    }
}

fn tail(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// Looks a program up in PATH.
pub(crate) fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
}

/// What a program prints, when it does so within ten seconds and ends well.
pub(crate) async fn answer(program: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(10), output)
        .await
        .ok()?
        .ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The real path of a program, when sandboxes see it too: they have `/usr` of the machine.
pub(crate) fn visible(program: &Path) -> Option<PathBuf> {
    program
        .canonicalize()
        .ok()
        .filter(|path| path.starts_with("/usr"))
}
