//! Runs a verifier.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use record::Verdict;
use sandbox::{Exec, Exit, File, Sandbox, SandboxError};
use task::{Task, TaskFile};

use crate::{
    VerifyError,
    contract::{cut, evidence, reward, scores},
};

/// Bytes kept of each of the verifier's stdout and stderr.
pub const OUTPUT_BYTES_MAX: usize = 64 << 10;
/// Limit for removing what is in the way of the verifier's files.
const CLEAR_TIMEOUT_S: u64 = 30;

/// Files of a task as files of a sandbox.
pub(crate) fn files_at(folder: &Path, files: &[TaskFile]) -> Vec<File> {
    files
        .iter()
        .map(|file| File {
            path: folder.join(&file.path),
            content: file.content.clone(),
            mode: if file.executable { 0o755 } else { 0o644 },
        })
        .collect()
}

/// Names what was being done when the sandbox failed.
pub(crate) fn doing(task: &Task, doing: &'static str) -> impl FnOnce(SandboxError) -> VerifyError {
    let task = task.id.to_string();
    move |source| VerifyError::Sandbox {
        task,
        doing,
        source,
    }
}

fn exec(argv: Vec<String>, cwd: Option<PathBuf>, timeout_s: u64) -> Exec {
    Exec {
        argv,
        cwd,
        env: BTreeMap::new(),
        stdin: Vec::new(),
        timeout: Duration::from_secs(timeout_s),
        output_bytes_max: OUTPUT_BYTES_MAX,
        end_background: false,
    }
}

/// Scores the state of the sandbox. To be called once the harness has ended: the verifier's
/// files are uploaded now, in place of anything that is there.
///
/// # Errors
/// [`VerifyError`] for everything that is not the verifier's own word about the world.
pub async fn verify(task: &Task, sandbox: &dyn Sandbox) -> Result<Verdict, VerifyError> {
    let verifier = &task.verifier;
    let folder = task.workspace.join(&verifier.folder);
    clear(task, &folder, sandbox).await?;
    sandbox
        .upload(files_at(&folder, &verifier.files))
        .await
        .map_err(doing(task, "uploading the verifier"))?;
    let workspace = task.workspace.to_string_lossy();
    let argv = verifier
        .argv
        .iter()
        .map(|argument| argument.replace("{workspace}", &workspace))
        .collect();
    let cwd = verifier
        .cwd
        .clone()
        .or_else(|| Some(task.workspace.clone()));
    let output = match sandbox.exec(exec(argv, cwd, verifier.timeout_s)).await {
        Ok(output) => output,
        Err(SandboxError::NotRunnable {
            program, reason, ..
        }) => {
            return Err(VerifyError::MissingProgram {
                task: task.id.to_string(),
                reason: format!("{program}: {reason}"),
            });
        }
        Err(source) => return Err(doing(task, "running the verifier")(source)),
    };
    let reward = reward(
        task.id.as_str(),
        verifier.timeout_s,
        verifier.contract,
        &output,
    )?;
    tracing::debug!(task = %task.id, reward, seconds = output.seconds, "verified");
    Ok(Verdict {
        reward,
        scores: scores(&String::from_utf8_lossy(&output.stdout)),
        evidence: evidence(&output),
        seconds: output.seconds,
    })
}

/// Removes what the agent may have put where the verifier's files go. A link is removed, not
/// followed.
async fn clear(task: &Task, folder: &Path, sandbox: &dyn Sandbox) -> Result<(), VerifyError> {
    let argv = vec![
        "rm".to_owned(),
        "-rf".to_owned(),
        "--".to_owned(),
        folder.to_string_lossy().into_owned(),
    ];
    // Not in the workspace: an agent may have removed that too.
    let output = sandbox
        .exec(exec(argv, Some(PathBuf::from("/")), CLEAR_TIMEOUT_S))
        .await
        .map_err(doing(task, "making room for the verifier"))?;
    if output.exit == Exit::Code(0) {
        return Ok(());
    }
    Err(VerifyError::Contract {
        task: task.id.to_string(),
        expected: "an empty place for the verifier's files",
        found: format!("{:?} when removing {}", output.exit, folder.display()),
        evidence: cut(&evidence(&output), 400),
    })
}
