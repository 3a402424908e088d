//! Why there is no verdict.

use record::Fault;
use sandbox::SandboxError;

/// Why there is no verdict. Infrastructure or a broken verifier: never a score.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// The sandbox failed.
    #[error("task {task}: {doing} failed: {source}")]
    Sandbox {
        /// The task.
        task: String,
        /// What was being done.
        doing: &'static str,
        /// The sandbox's word.
        source: SandboxError,
    },
    /// The verifier did not end in time. It may be the agent's doing (a program that never
    /// ends), but nobody can tell.
    #[error(
        "task {task}: the verifier was still running after its limit of {timeout_s} s; last output: {evidence}"
    )]
    TimedOut {
        /// The task.
        task: String,
        /// Its limit.
        timeout_s: u64,
        /// What it had printed.
        evidence: String,
    },
    /// The kernel killed something in the sandbox while the verifier ran.
    #[error(
        "task {task}: the verifier ran out of memory; raise the sandbox's memory_bytes; last output: {evidence}"
    )]
    OutOfMemory {
        /// The task.
        task: String,
        /// What it had printed.
        evidence: String,
    },
    /// The verifier, or a program that it calls, is not in the sandbox.
    #[error(
        "task {task}: the verifier lacks a program: {reason}; install it in the sandbox's image or machine"
    )]
    MissingProgram {
        /// The task.
        task: String,
        /// The system's or the shell's words.
        reason: String,
    },
    /// The verifier did not keep its contract.
    #[error("task {task}: broken verifier: expected {expected}, found {found}; output: {evidence}")]
    Contract {
        /// The task.
        task: String,
        /// What the contract says.
        expected: &'static str,
        /// What happened.
        found: String,
        /// What it printed.
        evidence: String,
    },
    /// The world did not become ready: setup failed, or the health check did.
    #[error("task {task} is not ready: {command:?} ended with {reason}")]
    NotReady {
        /// The task.
        task: String,
        /// What was run.
        command: String,
        /// How it ended.
        reason: String,
    },
    /// The task asks for something that is not here.
    #[error("task {task} cannot be run here: {}", reasons.join("; "))]
    Refused {
        /// The task.
        task: String,
        /// Why, each a sentence.
        reasons: Vec<String>,
    },
    /// The task needs a judge, and none was named.
    #[error("task {task} is scored by a rubric: name a judge")]
    NoJudge {
        /// The task.
        task: String,
    },
    /// The judges gave no score.
    #[error("task {task}: {source}")]
    Judge {
        /// The task.
        task: String,
        /// The judge's word.
        source: crate::judge::JudgeError,
    },
    /// A step of the reference solution failed.
    #[error("task {task}: step {step} of the solution failed: {reason}; correct the solution")]
    Solution {
        /// The task.
        task: String,
        /// The step, from 1.
        step: usize,
        /// What happened.
        reason: String,
    },
    /// The task has no reference solution.
    #[error("task {task} has no reference solution")]
    NoSolution {
        /// The task.
        task: String,
    },
}

impl VerifyError {
    /// What to record as the fault of the rollout.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Sandbox {
                source: SandboxError::Unsupported { .. } | SandboxError::Create { .. },
                ..
            } => Fault::SandboxStart,
            Self::NotReady { .. } => Fault::SandboxStart,
            Self::Sandbox { .. } => Fault::SandboxLost,
            Self::Judge { .. } | Self::NoJudge { .. } => Fault::JudgeFailed,
            _ => Fault::VerifierFailed,
        }
    }

    /// Whether the same rollout may end well when it is run again: the sandbox broke, or the
    /// verifier met a limit. A broken verifier stays broken.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Sandbox { source, .. } => !matches!(
                source,
                SandboxError::Unsupported { .. }
                    | SandboxError::NoSuchUser { .. }
                    | SandboxError::CannotSwitchUser { .. }
            ),
            Self::TimedOut { .. } | Self::OutOfMemory { .. } => true,
            Self::Judge { source, .. } => {
                matches!(source, crate::judge::JudgeError::Unavailable { .. })
            }
            _ => false,
        }
    }
}
