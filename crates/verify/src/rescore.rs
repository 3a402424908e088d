//! Scoring a kept end state again.
//!
//! A [`World`] is what a harness left in its workspace. It is put into a fresh sandbox and scored
//! there by any task's verifier: nothing of the rollout runs again. What lay outside of the
//! workspace is not kept; a verifier that looks there scores the state of a fresh system.

use record::Verdict;
use sandbox::{File, Limits, Provider, Sandbox};
use task::Task;

use crate::{
    Told, VerifyError,
    run::{WORKSPACE_BYTES_MAX, doing},
    spec, verify_with,
};

/// The files of a workspace after the harness ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// Absolute paths in the sandbox, sorted.
    pub files: Vec<File>,
}

impl World {
    /// Reads the workspace.
    ///
    /// # Errors
    /// [`VerifyError::Sandbox`], also when it holds more than [`WORKSPACE_BYTES_MAX`].
    pub async fn read(task: &Task, sandbox: &dyn Sandbox) -> Result<Self, VerifyError> {
        let files = sandbox
            .download(task.workspace.clone(), WORKSPACE_BYTES_MAX)
            .await
            .map_err(doing(task, "keeping the workspace"))?;
        Ok(Self { files })
    }
}

/// Scores a kept world by the verifier of a task.
///
/// # Errors
/// [`VerifyError`].
pub async fn rescore(
    task: &Task,
    world: &World,
    provider: &dyn Provider,
    told: Told<'_>,
) -> Result<Verdict, VerifyError> {
    let limits = Limits {
        deadline_s: 120 + task.verifier.timeout_s,
        ..Limits::default()
    };
    let sandbox = provider
        .create(spec(task, format!("rescore-{}", task.id), limits))
        .await
        .map_err(doing(task, "making a sandbox"))?;
    let result = async {
        if !world.files.is_empty() {
            sandbox
                .upload(world.files.clone())
                .await
                .map_err(doing(task, "putting the kept world back"))?;
        }
        verify_with(task, sandbox.as_ref(), told).await
    }
    .await;
    sandbox.destroy().await;
    result
}
