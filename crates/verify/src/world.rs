//! The world of a task, before the harness and without it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use sandbox::{Exec, Exit, File, Limits, Output, Sandbox, SandboxError, Spec};
use task::{HealthCheck, Step, Task};

use crate::{
    VerifyError,
    contract::{cut, evidence},
    run::{doing, files_at},
    services,
};

/// Where Harbor's tasks leave what is to be kept, declared or not.
const ARTIFACTS: &str = "/logs/artifacts";

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

/// Puts the initial files into the sandbox, after a look at whether the task can be run here; then
/// its setup, then its health check. For a step of a task: what comes before that step.
///
/// # Errors
/// [`VerifyError::Refused`], [`VerifyError::NotReady`], [`VerifyError::Sandbox`].
pub async fn prepare(task: &Task, sandbox: &dyn Sandbox) -> Result<(), VerifyError> {
    refuse(task)?;
    if !task.files.is_empty() {
        sandbox
            .upload(files_at(&task.workspace, &task.files))
            .await
            .map_err(doing(task, "uploading the task's files"))?;
    }
    let place = &task.environment;
    if let Some(command) = &place.setup {
        let exec = shell(task, command, Duration::from_secs(STEP_TIMEOUT_S));
        let output = sandbox
            .exec(exec)
            .await
            .map_err(doing(task, "setting up"))?;
        if output.exit != Exit::Code(0) {
            return Err(not_ready(task, command, &output));
        }
    }
    match &place.healthcheck {
        Some(check) => healthy(task, check, sandbox).await,
        None => Ok(()),
    }
}

fn shell(task: &Task, command: &str, timeout: Duration) -> Exec {
    Exec {
        argv: ["bash", "-c", command].map(str::to_owned).to_vec(),
        cwd: Some(task.workspace.clone()),
        env: task.environment.env.clone(),
        stdin: Vec::new(),
        timeout,
        output_bytes_max: 4096,
        end_background: false,
        user: None,
    }
}

fn not_ready(task: &Task, command: &str, output: &Output) -> VerifyError {
    VerifyError::NotReady {
        task: task.id.to_string(),
        command: cut(command, 200),
        reason: format!("{:?}: {}", output.exit, cut(&evidence(output), 400)),
    }
}

/// Waits until the health check succeeds. Failures within the start period do not count; after
/// it, `retries` failures in a row are one too many.
async fn healthy(
    task: &Task,
    check: &HealthCheck,
    sandbox: &dyn Sandbox,
) -> Result<(), VerifyError> {
    let started = Instant::now();
    let mut failures = 0;
    loop {
        let exec = shell(
            task,
            &check.command,
            Duration::from_secs_f64(check.timeout_s),
        );
        let output = sandbox
            .exec(exec)
            .await
            .map_err(doing(task, "checking its health"))?;
        if output.exit == Exit::Code(0) {
            return Ok(());
        }
        if started.elapsed().as_secs_f64() >= check.start_period_s {
            failures += 1;
        }
        if failures >= check.retries {
            return Err(not_ready(task, &check.command, &output));
        }
        tokio::time::sleep(Duration::from_secs_f64(check.interval_s)).await;
    }
}

/// Runs the task's collect hooks: after the harness ended, before anything is kept or scored. A
/// hook that fails is a warning, as in Harbor: the verifier sees what is missing.
///
/// # Errors
/// [`VerifyError::Sandbox`].
pub async fn collect(task: &Task, sandbox: &dyn Sandbox) -> Result<(), VerifyError> {
    for hook in &task.environment.collect {
        let mut exec = shell(task, &hook.command, Duration::from_secs_f64(hook.timeout_s));
        exec.end_background = true;
        let output = sandbox
            .exec(exec)
            .await
            .map_err(doing(task, "running a collect hook"))?;
        if output.exit != Exit::Code(0) {
            tracing::warn!(task = %task.id, command = %hook.command, exit = ?output.exit, "a collect hook failed");
        }
    }
    Ok(())
}

/// The task's artifacts as they are now: what it declares (paths; relative ones are in the
/// workspace) and `/logs/artifacts`. What is not there is not there.
///
/// # Errors
/// [`VerifyError::Sandbox`], also when there are more than `bytes_max` in one of them.
pub async fn artifacts(
    task: &Task,
    sandbox: &dyn Sandbox,
    bytes_max: u64,
) -> Result<Vec<File>, VerifyError> {
    let declared = task.environment.artifacts.iter();
    let paths: BTreeSet<PathBuf> = declared
        .map(|path| task.workspace.join(path))
        .chain([PathBuf::from(ARTIFACTS)])
        .collect();
    let mut files: BTreeMap<PathBuf, File> = BTreeMap::new();
    for path in paths {
        // Asked first, so that "not there" is told from "too large".
        let argv = ["test", "-e"].map(str::to_owned).into_iter();
        let argv = argv.chain([path.to_string_lossy().into_owned()]).collect();
        let mut ask = shell(task, "", Duration::from_secs(STEP_TIMEOUT_S));
        ask.argv = argv;
        ask.cwd = Some("/".into());
        let there = sandbox
            .exec(ask)
            .await
            .map_err(doing(task, "looking for an artifact"))?;
        if there.exit != Exit::Code(0) {
            continue;
        }
        let found = sandbox
            .download(path, bytes_max)
            .await
            .map_err(doing(task, "reading an artifact"))?;
        files.extend(found.into_iter().map(|file| (file.path.clone(), file)));
    }
    Ok(files.into_values().collect())
}

/// Whether a task can be run here at all, as far as the task itself tells.
///
/// # Errors
/// [`VerifyError::Refused`].
pub fn refuse(task: &Task) -> Result<(), VerifyError> {
    let place = &task.environment;
    let mut reasons = place.refusals.clone();
    if let Some(user) = place.user.as_ref().filter(|user| *user != "root") {
        reasons.push(format!(
            "it is to run as {user}, and a task's folders belong to the sandbox's own user here"
        ));
    }
    if let (Some(wanted), true) = (place.asks_for(), place.egress.is_empty()) {
        reasons.push(format!(
            "it asks for {wanted}; sandboxes reach the model and what the recipe's sandbox.egress names, \
             which is not all of that"
        ));
    }
    reasons.extend(services::refusals(task));
    if reasons.is_empty() {
        return Ok(());
    }
    Err(VerifyError::Refused {
        task: task.id.to_string(),
        reasons,
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
                user: None,
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
                        user: None,
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
