//! The world of a task, before the harness and without it.

use std::{collections::BTreeMap, path::Path, time::Duration};

use sandbox::{Exec, Exit, File, Limits, Sandbox, SandboxError, Spec};
use task::{Step, Task};

use crate::{
    VerifyError,
    contract::cut,
    run::{doing, files_at},
};

/// Wall-clock limit of one step of a reference solution.
pub const STEP_TIMEOUT_S: u64 = 120;
/// Bytes read from a file that a step edits.
const EDIT_BYTES_MAX: u64 = 16 << 20;

/// A sandbox for a task: its workspace and HOME, no network, no extra mounts.
#[must_use]
pub fn spec(task: &Task, name: String, limits: Limits) -> Spec {
    Spec {
        name,
        limits,
        workspace: task.workspace.clone(),
        home: task.home.clone(),
        env: task.environment.env.clone(),
        ..Spec::default()
    }
}

/// Puts the initial files into the sandbox, after a look at whether the task can be run here.
///
/// # Errors
/// [`VerifyError::Refused`], [`VerifyError::Sandbox`].
pub async fn prepare(task: &Task, sandbox: &dyn Sandbox) -> Result<(), VerifyError> {
    refuse(task)?;
    if task.files.is_empty() {
        return Ok(());
    }
    sandbox
        .upload(files_at(&task.workspace, &task.files))
        .await
        .map_err(doing(task, "uploading the task's files"))
}

/// Whether a task can be run here at all, as far as the task itself tells.
///
/// # Errors
/// [`VerifyError::Refused`].
pub fn refuse(task: &Task) -> Result<(), VerifyError> {
    if task.environment.refusals.is_empty() {
        return Ok(());
    }
    Err(VerifyError::Refused {
        task: task.id.to_string(),
        reasons: task.environment.refusals.clone(),
    })
}

/// Which packages that the task needs are not in the sandbox. Names of Python distributions are
/// asked for without their version demands.
///
/// # Errors
/// [`VerifyError::Sandbox`].
pub async fn missing(
    task: &Task,
    sandbox: &dyn Sandbox,
) -> Result<Vec<task::Requirement>, VerifyError> {
    let mut missing = Vec::new();
    for requirement in &task.environment.requires {
        let (script, name) = match requirement {
            task::Requirement::Apt(name) => ("dpkg -s \"$1\"", name.as_str()),
            task::Requirement::Pip(name) => (
                "python3 -c 'import importlib.metadata as m, sys; m.version(sys.argv[1])' \"$1\"",
                name.split(['=', '<', '>', '!', '~', '[', ';', ' '])
                    .next()
                    .unwrap_or_default(),
            ),
            task::Requirement::Npm(name) => (
                "test -d \"$(npm root -g)/$1\"",
                name.rsplit_once('@').map_or(name.as_str(), |(head, _)| {
                    if head.is_empty() { name } else { head }
                }),
            ),
        };
        let output = sandbox
            .exec(Exec {
                argv: ["sh", "-c", script, "sh", name].map(str::to_owned).to_vec(),
                cwd: Some("/".into()),
                env: BTreeMap::new(),
                stdin: Vec::new(),
                timeout: Duration::from_secs(STEP_TIMEOUT_S),
                output_bytes_max: 4096,
                end_background: false,
            })
            .await
            .map_err(doing(task, "looking for packages"))?;
        if output.exit != Exit::Code(0) {
            missing.push(requirement.clone());
        }
    }
    Ok(missing)
}

/// Plays the reference solution in the sandbox, without a harness. Every command must end with
/// exit 0.
///
/// # Errors
/// [`VerifyError::NoSolution`], [`VerifyError::Solution`], [`VerifyError::Sandbox`].
pub async fn apply_solution(task: &Task, sandbox: &dyn Sandbox) -> Result<(), VerifyError> {
    if task.solution.is_empty() {
        return Err(VerifyError::NoSolution {
            task: task.id.to_string(),
        });
    }
    for (index, step) in task.solution.iter().enumerate() {
        let failed = |reason: String| VerifyError::Solution {
            task: task.id.to_string(),
            step: index + 1,
            reason,
        };
        match step {
            Step::Bash(command) => {
                let output = sandbox
                    .exec(Exec {
                        argv: vec!["bash".to_owned(), "-c".to_owned(), command.clone()],
                        cwd: Some(task.workspace.clone()),
                        env: task.environment.env.clone(),
                        stdin: Vec::new(),
                        timeout: Duration::from_secs(STEP_TIMEOUT_S),
                        output_bytes_max: 4096,
                        end_background: false,
                    })
                    .await
                    .map_err(doing(task, "running the solution"))?;
                if output.exit != Exit::Code(0) {
                    let stderr = String::from_utf8_lossy(&output.stderr);
                    let stderr = cut(stderr.trim(), 400);
                    return Err(failed(format!("{command:?}: {:?}: {stderr}", output.exit)));
                }
            }
            Step::Read(path) => {
                read(task, index, path, sandbox).await?;
            }
            Step::Write(path, text) => write(task, path, text, 0o644, sandbox).await?,
            Step::Edit(path, old, new) => {
                let file = read(task, index, path, sandbox).await?;
                let text = String::from_utf8_lossy(&file.content);
                if !text.contains(old.as_str()) {
                    return Err(failed(format!("{} has no {old:?}", path.display())));
                }
                let text = text.replacen(old.as_str(), new, 1);
                write(task, path, &text, file.mode, sandbox).await?;
            }
            Step::Say(_) => {}
        }
    }
    Ok(())
}

async fn read(
    task: &Task,
    index: usize,
    path: &Path,
    sandbox: &dyn Sandbox,
) -> Result<File, VerifyError> {
    let place = task.workspace.join(path);
    let failed = |reason: String| VerifyError::Solution {
        task: task.id.to_string(),
        step: index + 1,
        reason,
    };
    match sandbox.download(place.clone(), EDIT_BYTES_MAX).await {
        Ok(files) => files
            .into_iter()
            .find(|file| file.path == place)
            .ok_or_else(|| failed(format!("{} is not a file", path.display()))),
        Err(error @ SandboxError::File { .. }) => Err(failed(error.to_string())),
        Err(error) => Err(doing(task, "reading a file for the solution")(error)),
    }
}

async fn write(
    task: &Task,
    path: &Path,
    text: &str,
    mode: u32,
    sandbox: &dyn Sandbox,
) -> Result<(), VerifyError> {
    let file = File {
        path: task.workspace.join(path),
        content: text.as_bytes().to_vec(),
        mode,
    };
    sandbox
        .upload(vec![file])
        .await
        .map_err(doing(task, "writing a file for the solution"))
}
