//! One scenario: a task, a script, faults, one rollout in a sandbox, and what came of it.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use codec::Codec;
use engine::{Engine, EngineError, scripted::Scripted};
use gateway::{Config, Gateway, Listen};
use harness::Installed;
use ledger::Ledger;
use record::{Rollout, Sampling, TaskId};
use rollout::{GroupPlan, Job, Runner, Settings, plan_group};
use sandbox::LocalProvider;
use serde::Serialize;
use task::{Contract, Environment, Format, Grading, Payload, Task, TaskFile, Verifier};
use tokio_util::sync::CancellationToken;
use tree::ForkCause;

use super::{
    judge::{Check, Expected, Figures, checks},
    line::{Fault, Line},
    play::{self, Play},
    watch::{Seen, Watched},
};
use crate::{error::CliError, teacher::voice};

/// Room for any prompt.
const CONTEXT_TOKENS_MAX: u32 = 1 << 18;
/// One reply.
const REPLY_TOKENS_MAX: u32 = 4096;
/// For calls in flight when a scenario ends.
const DRAIN: Duration = Duration::from_secs(5);
/// What a turn of the long task prints, in tokens; less when that is more than some harnesses
/// show of a command's output.
const LONG_TURN_TOKENS: usize = 4000;
const LONG_TURN_BYTES_MAX: usize = 8000;
/// The window of the long task, beside room for the first prompt two and a half times: harnesses
/// keep up to 50,000 tokens free, or up to a half of the window, and would be summarising all the
/// time in a small one.
const LONG_ROOM_TOKENS: usize = 60_000;

/// Forks that a sub-agent or a compaction may cost.
const FORKS_MAX: usize = 4;

/// What can be played.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Scenario {
    /// Eight turns with up to three tool calls at once
    Turns,
    /// The same while the engine and the line fail six times
    Storm,
    /// A sub-agent makes a file meanwhile
    Subagent,
    /// The window is too small for the task
    Compaction,
}

impl Scenario {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Turns => "turns",
            Self::Storm => "storm",
            Self::Subagent => "subagent",
            Self::Compaction => "compaction",
        }
    }

    /// Whether the harness has what it plays.
    pub(crate) fn fits(self, installed: &Installed) -> bool {
        let habits = &installed.profile.habits;
        match self {
            Self::Turns | Self::Storm => true,
            Self::Subagent => habits.spawn.is_some(),
            Self::Compaction => habits.compaction,
        }
    }
}

/// What came of one scenario.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Outcome {
    pub(crate) scenario: Scenario,
    pub(crate) ok: bool,
    pub(crate) checks: Vec<Check>,
    pub(crate) figures: Figures,
    pub(crate) exit: Option<i32>,
    /// CPU seconds of the harness, what it ran included; and until its first call.
    pub(crate) cpu_s: f64,
    pub(crate) startup_cpu_s: Option<f64>,
    /// Wall-clock seconds; and until its first call.
    pub(crate) wall_s: f64,
    pub(crate) startup_s: Option<f64>,
    /// Of the whole sandbox.
    pub(crate) memory_peak_bytes: Option<u64>,
    /// The end of what the harness printed; empty when all is well.
    pub(crate) tail: String,
}

impl Outcome {
    fn new(
        scenario: Scenario,
        checks: Vec<Check>,
        figures: Figures,
        rollout: &Rollout,
        seen: &Seen,
        startup_s: Option<f64>,
    ) -> Self {
        let ok = checks.iter().all(|check| check.ok);
        Self {
            scenario,
            ok,
            checks,
            figures,
            exit: rollout.harness_exit,
            cpu_s: seen.cpu_s(),
            startup_cpu_s: seen.startup_cpu_s(),
            wall_s: seen.wall_s,
            startup_s,
            memory_peak_bytes: seen.memory_peak_bytes,
            tail: if ok {
                String::new()
            } else {
                rollout.harness_tail.clone()
            },
        }
    }
}

/// What all scenarios of a harness share.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) codec: Arc<Codec>,
    pub(crate) provider: LocalProvider,
    pub(crate) installed: Arc<Installed>,
    /// A ledger for each scenario goes in here.
    pub(crate) folder: PathBuf,
}

/// What is played, and what must come of it.
struct Plot {
    play: Play,
    proof: String,
    line_faults: BTreeMap<usize, Fault>,
    context_tokens: u32,
    expected: Expected,
}

impl Bench {
    /// Plays a scenario. `base` is what the turns cost: needed to find a window for compaction.
    ///
    /// # Errors
    /// When something of ours fails; whatever the harness does wrong is in the outcome.
    pub(crate) async fn run(
        &self,
        scenario: Scenario,
        base: Option<&Figures>,
        cancel: &CancellationToken,
    ) -> Result<Outcome, CliError> {
        let plot = self.plot(scenario, base);
        let play = Arc::new(plot.play);
        let folder = self.folder.join(scenario.name());
        std::fs::create_dir_all(&folder).map_err(|error| failed(&folder, error))?;
        let ledger = Ledger::create(&folder).map_err(|error| failed(&folder, error))?;
        let engine: Arc<dyn Engine> = Arc::new(Scripted::new(
            "check",
            Arc::<Play>::clone(&play),
            voice(&self.codec),
            plot.context_tokens,
            self.codec.vocabulary(),
        ));
        let socket = folder.join("g.sock");
        let config = Config {
            listen: vec![Listen::Unix(socket.clone())],
            ..Config::default()
        };
        let codec = Arc::clone(&self.codec);
        let gateway = Gateway::start(config, Arc::clone(&engine), codec, ledger.clone())
            .await
            .map_err(|error| CliError::failed("the gateway could not start", error))?;
        let gateway = Arc::new(gateway);
        let line_socket = folder.join("l.sock");
        let dialect = self.installed.profile.dialect;
        let (line, first) = Line::start(&line_socket, socket, dialect, plot.line_faults)
            .map_err(|error| failed(&line_socket, error))?;
        let watched = Watched::new(self.provider.clone());
        let mut settings = Settings::new(line_socket);
        settings.context_tokens = plot.context_tokens;
        settings.reply_tokens_max = REPLY_TOKENS_MAX.min(plot.context_tokens / 8);
        settings.codec_digest = self.codec.digest().to_owned();
        let runner = Runner::new(
            Arc::new(watched.clone()),
            Arc::clone(&gateway),
            engine,
            ledger.clone(),
            settings,
        );
        let job = self.job(scenario, &plot.proof)?;
        let id = job.spec.id.clone();
        // The look at the first call goes on beside the rollout and ends with it.
        let mut came = first.came;
        let looking = async {
            if came.wait_for(|came| *came).await.is_ok() {
                watched.look_at_first_call().await;
            }
            first.go_on.send_replace(true);
            std::future::pending::<()>().await;
        };
        let rollout = tokio::select! {
            rollout = runner.run(&job, cancel) => rollout,
            () = looking => return Err(CliError::plain("the look ended", "this is a defect")),
        };
        gateway.shutdown(DRAIN).await;
        let (read, rollout_id) = (ledger.clone(), id);
        let calls = tokio::task::spawn_blocking(move || read.calls(&rollout_id))
            .await
            .map_err(|error| failed(&folder, error))?
            .map_err(|error| failed(&folder, error))?;
        drop(runner);
        drop(gateway);
        ledger
            .close()
            .await
            .map_err(|error| failed(&folder, error))?;
        let figures = Figures::of(&calls)
            .map_err(|reason| CliError::plain("no tree can be built of the calls", reason))?;
        let seen = watched.seen();
        let habits = &self.installed.profile.habits;
        let network = seen.network_attempts();
        let faults = line.played() + play.faults_played();
        let checks = checks(&rollout, &figures, habits, &network, faults, &plot.expected);
        let startup_s = seen
            .started
            .zip(line.first_post())
            .map(|(start, first)| first.saturating_duration_since(start).as_secs_f64());
        Ok(Outcome::new(
            scenario, checks, figures, &rollout, &seen, startup_s,
        ))
    }

    fn job(&self, scenario: Scenario, proof: &str) -> Result<Job, CliError> {
        let named = |error: record::IdError| CliError::failed("a name of the check", error);
        let task = task(scenario, proof).map_err(named)?;
        let specs = plan_group(GroupPlan {
            run_seed: 0,
            step: 0,
            split: "check",
            task: &task.id,
            harness: &self.installed.profile.name,
            samples: 1,
        })
        .map_err(named)?;
        let spec = specs
            .into_iter()
            .next()
            .ok_or_else(|| CliError::plain("no rollout was planned", "this is a defect"))?;
        Ok(Job {
            spec,
            task: Arc::new(task),
            installed: Arc::clone(&self.installed),
            sampling: Sampling {
                tokens_max: REPLY_TOKENS_MAX,
                ..Sampling::default()
            },
            budget: rollout::Budget::default(),
        })
    }

    fn plot(&self, scenario: Scenario, base: Option<&Figures>) -> Plot {
        let habits = &self.installed.profile.habits;
        let mut plot = Plot {
            play: Play {
                turns: play::turns(),
                ends_with: habits.ends_with.clone(),
                ..Play::default()
            },
            proof: play::PROOF.to_owned(),
            line_faults: BTreeMap::new(),
            context_tokens: CONTEXT_TOKENS_MAX,
            expected: Expected {
                calls_min: play::TURNS + 1,
                ..Expected::default()
            },
        };
        match scenario {
            Scenario::Turns => {}
            Scenario::Storm => {
                let survives = |fault: &str| !habits.gives_up_on.iter().any(|one| one == fault);
                if survives("429") {
                    plot.play.faults.insert(2, EngineError::Busy { waiting: 1 });
                }
                if survives("503") {
                    let gone = EngineError::Gone("a fault on purpose".to_owned());
                    plot.play.faults.insert(3, gone);
                }
                for (turn, name, fault) in [
                    (4, "500", Fault::Status500),
                    (5, "reset", Fault::Reset),
                    (6, "cut", Fault::Cut),
                    (7, "cut", Fault::CutBehindText),
                ] {
                    if survives(name) {
                        plot.line_faults.insert(turn, fault);
                    }
                }
                // A changed history costs its own turn and the one that changes it back.
                let edits = [("500", 4), ("reset", 5), ("cut", 6), ("cut", 7)]
                    .iter()
                    .filter(|(name, turn)| {
                        plot.line_faults.contains_key(turn)
                            && habits.edits_history_on.iter().any(|one| one == name)
                    })
                    .count();
                if edits > 0 {
                    plot.expected.forks = vec![(ForkCause::HistoryEdited, 2 * edits)];
                    plot.expected.inexact_max = 2 * edits;
                }
                let faults = plot.play.faults.len() + plot.line_faults.len();
                plot.expected.faults = u32::try_from(faults).unwrap_or(u32::MAX);
            }
            Scenario::Subagent => {
                plot.play.turns.truncate(3);
                // Some sub-agents work beside the main conversation, and are lost when it ends.
                let wait = "i=0; while [ ! -s sub.txt ] && [ $i -lt 150 ]; do sleep 0.2; i=$((i+1)); done; cat sub.txt # mark-02";
                plot.play.turns[1].push(task::Step::Bash(wait.to_owned()));
                plot.play.spawn = habits.spawn.clone().map(|spawn| (1, spawn));
                plot.proof = "test \"$(cat sub.txt)\" = sub && test \"$(cat mark-03-a.txt)\" -gt 1 && echo 1 || echo 0\n".to_owned();
                plot.expected.calls_min = 6;
                plot.expected.subagent = true;
                plot.expected.forks = vec![(ForkCause::Subagent, FORKS_MAX)];
            }
            Scenario::Compaction => {
                let sample = play::LONG_LINE.repeat(64);
                let tokens = self
                    .codec
                    .encode(&sample)
                    .map_or(sample.len(), |ids| ids.len());
                let bytes = LONG_TURN_TOKENS * sample.len() / tokens.max(1);
                plot.play.long = Some(play::Long::new(bytes.min(LONG_TURN_BYTES_MAX)));
                plot.proof = play::LONG_PROOF.to_owned();
                plot.expected.compaction = true;
                // A summary that does not fit is asked for again, without the newest turns.
                plot.expected.forks = vec![
                    (ForkCause::Compaction, FORKS_MAX),
                    (ForkCause::HistoryEdited, FORKS_MAX),
                ];
                let prompt = base.map_or(0, |figures| figures.prompt_tokens);
                let window = prompt * 5 / 2 + LONG_ROOM_TOKENS;
                plot.context_tokens = u32::try_from(window).unwrap_or(u32::MAX);
            }
        }
        plot
    }
}

fn failed(path: &Path, error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> CliError {
    CliError::failed(path.display().to_string(), error)
}

fn task(scenario: Scenario, proof: &str) -> Result<Task, record::IdError> {
    let mut task = Task {
        id: TaskId::new(format!("check-{}", scenario.name()))?,
        family: "check".to_owned(),
        instruction: format!(
            "This is {}. Make the files that the task needs in the current folder, step by step.",
            play::MAIN
        ),
        files: Vec::new(),
        workspace: PathBuf::from(play::WORKSPACE),
        home: PathBuf::from("/home/agent"),
        verifier: Verifier {
            files: vec![TaskFile {
                path: PathBuf::from("check.sh"),
                content: proof.as_bytes().to_vec(),
                executable: false,
            }],
            folder: PathBuf::from(".verify"),
            argv: vec!["sh".to_owned(), ".verify/check.sh".to_owned()],
            cwd: None,
            timeout_s: 30,
            contract: Contract::LastLine,
            payload: Payload::default(),
            env: BTreeMap::new(),
        },
        solution: Vec::new(),
        metadata: BTreeMap::new(),
        format: Format::default(),
        grading: Grading::default(),
        environment: Environment::default(),
        digest: String::new(),
    };
    task.digest = task::digest(&task);
    Ok(task)
}
