//! Every limit of a stage, and the facts that all rollouts of a run share.

use std::{path::PathBuf, sync::Arc, time::Duration};

use sandbox::Limits;
use serde::{Deserialize, Serialize};
use verify::judge::Panel;

use crate::{endings::Choices, places::Pools, shelf, way_out::Egress};

/// Wall-clock limits by stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Stages {
    /// Making the sandbox and writing its files, in seconds.
    pub create_s: u64,
    /// The harness, in seconds. The profile's own limit applies as well.
    pub harness_s: u64,
    /// Waiting for calls to come to rest after the harness ended, in seconds.
    pub settle_s: u64,
    /// Calls are at rest when none is in flight and none was added for this long, in
    /// milliseconds.
    pub settle_quiet_ms: u64,
    /// The verifier, in seconds. The task's own limit applies as well.
    pub verify_s: u64,
    /// Waiting with a sandbox for a place to run, and again for one to be verified, in seconds.
    pub wait_s: u64,
    /// Tearing the sandbox down, in seconds.
    pub destroy_s: u64,
}

impl Default for Stages {
    fn default() -> Self {
        Self {
            create_s: 60,
            harness_s: 600,
            settle_s: 30,
            settle_quiet_ms: 50,
            verify_s: 120,
            wait_s: 600,
            destroy_s: 30,
        }
    }
}

impl Stages {
    /// The sandbox ends itself after this, whatever happens to us: all stages at their limits
    /// and a minute.
    #[must_use]
    pub fn deadline_s(&self) -> u64 {
        let waits = 2 * self.wait_s;
        self.create_s + self.harness_s + self.settle_s + self.verify_s + self.destroy_s + waits + 60
    }

    pub(crate) fn wait(&self) -> Duration {
        Duration::from_secs(self.wait_s)
    }

    pub(crate) fn harness(&self) -> Duration {
        Duration::from_secs(self.harness_s)
    }

    pub(crate) fn settle_quiet(&self) -> Duration {
        Duration::from_millis(self.settle_quiet_ms)
    }
}

/// Whether and where workspaces are kept after the harness ended, for another verifier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeepWorlds {
    /// One file per rollout.
    pub folder: PathBuf,
    /// A larger world is not kept; a file says so in its place.
    pub bytes_max: u64,
}

/// What all rollouts of a run share.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Limits by stage.
    pub stages: Stages,
    /// Limits of each sandbox. `deadline_s` is raised to [`Stages::deadline_s`] when it is less.
    pub limits: Limits,
    /// How often a sandbox that could not be made is tried again, with a new attempt.
    pub sandbox_retries: u32,
    /// Places of stages.
    pub pools: Pools,
    /// Sandboxes that stand ready.
    pub warm: shelf::Settings,
    /// What this run decides differently about spent budgets.
    pub dispositions: Choices,
    /// Calls that one rollout may make.
    pub calls_max: u32,
    /// Tokens that may be generated for one rollout; no limit when `None`.
    pub generated_tokens_max: Option<u64>,
    /// Name of the model that harnesses ask for.
    pub model: String,
    /// Tokens that prompt and reply may have together, as harnesses are told.
    pub context_tokens: u32,
    /// Tokens that one reply may have, as harnesses are told.
    pub reply_tokens_max: u32,
    /// Whether a harness's own sampling wishes are overruled by the job's.
    pub sampling_fixed: bool,
    /// The gateway's unix socket.
    pub gateway_socket: PathBuf,
    /// Where sandboxes see it: `http://127.0.0.1:PORT`.
    pub gateway_port: u16,
    /// Version of Espalier, for the record.
    pub espalier: String,
    /// Digest of tokenizer and template, for the record.
    pub codec_digest: String,
    /// The rule by which the run trains, for the summary of each rollout.
    pub selection: tree::Selection,
    /// Who judges rubrics; tasks that need one end as `judge_failed` without.
    pub panel: Option<Arc<Panel>>,
    /// Where what rollouts asked of the internet is logged; tasks that were granted hosts cannot be
    /// run without.
    pub egress: Option<Egress>,
    /// Workspaces to keep; none when `None`.
    pub keep_worlds: Option<KeepWorlds>,
}

impl Settings {
    /// Settings with the defaults of everything that has one.
    #[must_use]
    pub fn new(gateway_socket: PathBuf) -> Self {
        Self {
            stages: Stages::default(),
            limits: Limits::default(),
            sandbox_retries: 1,
            pools: Pools::default(),
            warm: shelf::Settings::default(),
            dispositions: Choices::default(),
            calls_max: 100,
            generated_tokens_max: None,
            model: "policy".into(),
            context_tokens: 4096,
            reply_tokens_max: 512,
            sampling_fixed: true,
            gateway_socket,
            gateway_port: 8080,
            espalier: env!("CARGO_PKG_VERSION").into(),
            codec_digest: String::new(),
            selection: tree::Selection::default(),
            panel: None,
            egress: None,
            keep_worlds: None,
        }
    }
}
