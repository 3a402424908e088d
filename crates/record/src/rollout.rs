//! One harness run on one task under one policy: the unit of reward.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{GroupId, Lineage, RolloutId, TaskId};

/// What a rollout is to be, decided before it starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutSpec {
    /// Its name, unique in the run.
    pub id: RolloutId,
    /// The task.
    pub task: TaskId,
    /// Whose rewards it is compared with.
    pub group: GroupId,
    /// The harness profile.
    pub harness: String,
    /// Free labels: `step`, `split`, `sample` …
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Seed from which every random choice of the rollout derives.
    pub seed: u64,
}

/// An infrastructure fault: which boundary broke. Never a reward (I7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// The sandbox could not be made.
    SandboxStart,
    /// The sandbox can never be made like this: no use trying again.
    SandboxRefused,
    /// The sandbox ended or broke while in use.
    SandboxLost,
    /// The kernel killed the harness at the sandbox's memory limit.
    OutOfMemory,
    /// The harness did not start, crashed, or was killed by somebody else.
    HarnessCrashed,
    /// The harness ended without a single captured call.
    NoCalls,
    /// The engine failed.
    EngineFailed,
    /// The gateway or the ledger failed.
    GatewayFailed,
    /// Calls were still in flight at the settling limit.
    NotSettled,
    /// The verifier broke its contract, crashed or timed out.
    VerifierFailed,
    /// A judge could not be asked, or did not answer in form.
    JudgeFailed,
    /// The run was stopped while this was going on.
    Interrupted,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::SandboxStart,
        Self::SandboxRefused,
        Self::SandboxLost,
        Self::OutOfMemory,
        Self::HarnessCrashed,
        Self::NoCalls,
        Self::EngineFailed,
        Self::GatewayFailed,
        Self::NotSettled,
        Self::VerifierFailed,
        Self::JudgeFailed,
        Self::Interrupted,
    ];

    /// The word used in tables, metrics and records.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::SandboxStart => "sandbox_start",
            Self::SandboxRefused => "sandbox_refused",
            Self::SandboxLost => "sandbox_lost",
            Self::OutOfMemory => "out_of_memory",
            Self::HarnessCrashed => "harness_crashed",
            Self::NoCalls => "no_calls",
            Self::EngineFailed => "engine_failed",
            Self::GatewayFailed => "gateway_failed",
            Self::NotSettled => "not_settled",
            Self::VerifierFailed => "verifier_failed",
            Self::JudgeFailed => "judge_failed",
            Self::Interrupted => "interrupted",
        }
    }
}

/// What training does with a rollout, and why. Every started rollout ends in exactly one (I9).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Disposition {
    /// Reward and tokens count.
    Train,
    /// The budget (time, calls, context) ended the harness; the state it left was verified and
    /// counts.
    Truncate {
        /// Which budget, e.g. `harness_timeout`.
        reason: String,
    },
    /// Reward counts in the statistics of its group, but no token is trained.
    Mask {
        /// Why.
        reason: String,
    },
    /// Was run again under another id; this one does not count.
    Retry {
        /// What broke.
        fault: Fault,
        /// In words.
        reason: String,
    },
    /// Does not count at all.
    Discard {
        /// What broke.
        fault: Fault,
        /// In words.
        reason: String,
    },
}

impl Disposition {
    /// The word used in tables and metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Truncate { .. } => "truncate",
            Self::Mask { .. } => "mask",
            Self::Retry { .. } => "retry",
            Self::Discard { .. } => "discard",
        }
    }

    /// Whether the reward takes part in group statistics.
    #[must_use]
    pub fn has_vote(&self) -> bool {
        matches!(
            self,
            Self::Train | Self::Truncate { .. } | Self::Mask { .. }
        )
    }

    /// Whether its tokens are trained.
    #[must_use]
    pub fn trains(&self) -> bool {
        matches!(self, Self::Train | Self::Truncate { .. })
    }
}

/// What a verifier found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Final reward in [0, 1].
    pub reward: f64,
    /// Scores by criterion, when the verifier tells.
    #[serde(default)]
    pub scores: BTreeMap<String, f64>,
    /// What the verifier printed, cut to a limit.
    #[serde(default)]
    pub evidence: String,
    /// Seconds it took.
    pub seconds: f64,
}

/// Wall-clock seconds by stage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StageSeconds {
    /// Waiting for a place.
    pub queue: f64,
    /// Making the sandbox and its files.
    pub create: f64,
    /// Ready, and waiting for a place to run.
    #[serde(default)]
    pub ready: f64,
    /// The harness.
    pub harness: f64,
    /// Settling.
    pub settle: f64,
    /// Waiting for a place to be verified.
    #[serde(default)]
    pub verify_wait: f64,
    /// Verifying.
    pub verify: f64,
    /// Tearing down.
    pub destroy: f64,
}

/// One rollout as the ledger keeps it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    /// What it was to be.
    pub spec: RolloutSpec,
    /// Where its inputs came from.
    pub lineage: Lineage,
    /// Milliseconds since the Unix epoch at the start.
    pub started_ms: u64,
    /// Milliseconds since the Unix epoch at the end, when it has ended.
    pub finished_ms: Option<u64>,
    /// Exit code of the harness, when it ended by itself.
    pub harness_exit: Option<i32>,
    /// The end of what the harness printed, for people.
    #[serde(default)]
    pub harness_tail: String,
    /// Calls captured.
    pub calls: u32,
    /// Seconds by stage.
    pub seconds: StageSeconds,
    /// What the verifier found.
    pub verdict: Option<Verdict>,
    /// `None` only while the rollout runs (I9).
    pub disposition: Option<Disposition>,
}
