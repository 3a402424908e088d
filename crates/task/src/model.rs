//! The types of a task. See the crate's header for how they travel.

use std::{collections::BTreeMap, path::PathBuf};

use record::TaskId;
use serde::{Deserialize, Serialize};

use crate::{Environment, Grading};

/// A file of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskFile {
    /// Path relative to the workspace (or to the verifier's folder).
    pub path: PathBuf,
    /// Content.
    pub content: Vec<u8>,
    /// Whether it is executable.
    pub executable: bool,
}

/// How a verifier tells its score.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contract {
    /// The last non-empty line of stdout parses as a float in [0, 1]; a non-zero exit, no output
    /// or no number is a score of 0 (ClawGym).
    LastLineOrZero,
    /// As above, but anything else than exit 0 with such a line is a fault of the verifier, not a
    /// score.
    LastLine,
    /// `/logs/verifier/reward.json` (a flat object of finite numbers, or one number), else
    /// `/logs/verifier/reward.txt` (one finite number); the exit code says nothing, and neither
    /// file is a fault (Harbor). The reward is the key `reward`, or the only key.
    RewardFile,
    /// The model's last words are compared with `truth.txt` by the rules of OfficeQA; nothing is
    /// run.
    OfficeAnswer,
    /// What the services of the task were asked is compared with the rules of its grading
    /// (Claw-Eval); nothing is run.
    Audit,
    /// There is no code: a judge says everything. Running such a verifier is a fault.
    None,
}

/// What the verifier is told of the conversation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Payload {
    /// Nothing.
    #[default]
    None,
    /// `transcript.json` beside the verifier's files: a list of messages in the shape of an
    /// OpenClaw session (PinchBench, QwenClawBench).
    Transcript,
    /// A file named by the variable `OPENCLAW_REWARD_PAYLOAD`: final message, metadata and
    /// transcript (ClawGym).
    ClawGym,
    /// `answer.txt` beside the verifier's files: the last thing that the model said.
    Answer,
}

/// The format that a task was read from.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Ours.
    #[default]
    Own,
    /// Harbor folders (Terminal-Bench 2).
    Harbor,
    /// Terminal-Bench 1 folders.
    TerminalBench1,
    /// ClawGym folders.
    ClawGym,
    /// ClawGym's source, one JSON object per line.
    ClawGymSource,
    /// PinchBench: one Markdown file per task.
    PinchBench,
    /// QwenClawBench: the same with subcategories and a gate.
    QwenClawBench,
    /// Claw-Eval folders.
    ClawEval,
    /// MCP-Atlas: a table of prompts and claims.
    McpAtlas,
    /// OfficeQA: a table of questions and answers.
    OfficeQa,
    /// JobBench folders.
    JobBench,
    /// Instances in the manner of SWE-bench.
    SweBench,
}

impl Format {
    /// The word used in tables and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Harbor => "harbor",
            Self::TerminalBench1 => "terminal-bench-1",
            Self::ClawGym => "clawgym",
            Self::ClawGymSource => "clawgym-source",
            Self::PinchBench => "pinchbench",
            Self::QwenClawBench => "qwenclawbench",
            Self::ClawEval => "claw-eval",
            Self::McpAtlas => "mcp-atlas",
            Self::OfficeQa => "officeqa",
            Self::JobBench => "jobbench",
            Self::SweBench => "swe-bench",
        }
    }
}

/// Code that scores the workspace, run in the sandbox after the harness ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verifier {
    /// Put into the sandbox only after the harness ended.
    pub files: Vec<TaskFile>,
    /// Folder of these files, relative to the workspace when not absolute.
    pub folder: PathBuf,
    /// Program and arguments. `{workspace}` in an argument is replaced.
    pub argv: Vec<String>,
    /// Working folder; the workspace when `None`.
    pub cwd: Option<PathBuf>,
    /// Wall-clock limit.
    pub timeout_s: u64,
    /// How it tells its score.
    pub contract: Contract,
    /// What it is told of the conversation.
    pub payload: Payload,
    /// Environment variables, on top of the environment's own.
    pub env: BTreeMap<String, String>,
}

/// One step of a reference solution, free of any harness's tool names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Run a shell command in the workspace.
    Bash(String),
    /// Read a file.
    Read(PathBuf),
    /// Write a whole file.
    Write(PathBuf, String),
    /// Replace the first occurrence of a text in a file.
    Edit(PathBuf, String, String),
    /// Say something to the person and end.
    Say(String),
}

/// instruction + initial environment + verifier.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// Its name.
    pub id: TaskId,
    /// Kind of chore, category …
    pub family: String,
    /// What the harness is told.
    pub instruction: String,
    /// Initial files, relative to the workspace.
    pub files: Vec<TaskFile>,
    /// The workspace in the sandbox, absolute.
    pub workspace: PathBuf,
    /// HOME in the sandbox, absolute.
    pub home: PathBuf,
    /// What scores it.
    pub verifier: Verifier,
    /// A reference solution, when there is one.
    pub solution: Vec<Step>,
    /// Whatever else the format carries.
    pub metadata: BTreeMap<String, serde_json::Value>,
    /// The format that it was read from. Not part of the digest.
    pub format: Format,
    /// How its final reward is made.
    pub grading: Grading,
    /// What it needs of its place.
    pub environment: Environment,
    /// SHA-256 over all of the above. Hexadecimal.
    pub digest: String,
}

impl Task {
    /// The task that a step is, for whoever runs one step at a time; `None` beyond the last one.
    /// The first one brings the task's own files with it, and its health check.
    #[must_use]
    pub fn stage(&self, index: usize) -> Option<Self> {
        let stage = self.environment.stages.get(index)?;
        let mut part = self.clone();
        part.instruction.clone_from(&stage.instruction);
        if index > 0 {
            part.files.clear();
            part.environment.healthcheck = None;
        }
        part.files.extend(stage.files.iter().cloned());
        part.environment.stages.clear();
        part.environment.setup.clone_from(&stage.setup);
        if stage.healthcheck.is_some() {
            part.environment.healthcheck.clone_from(&stage.healthcheck);
        }
        if stage.agent_timeout_s.is_some() {
            part.environment.needs.agent_timeout_s = stage.agent_timeout_s;
        }
        if let Some(verifier) = &stage.verifier {
            part.verifier.clone_from(verifier);
        }
        part.solution.clone_from(&stage.solution);
        Some(part)
    }
}

/// Which half of a task set. The two share no invented name.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    /// What the policy is trained on.
    Train,
    /// What it is measured on.
    HeldOut,
}

impl Split {
    /// The word used in ids, folders and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::HeldOut => "held-out",
        }
    }
}
