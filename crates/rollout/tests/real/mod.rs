//! The whole loop but the model: local sandboxes, the gateway on a unix socket, a ledger, and a
//! scripted engine that speaks in the built-in policy's tokens.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use codec::Codec;
use engine::{
    Engine, EngineError, Hint,
    scripted::{Script, Scripted},
};
use gateway::{Config, Gateway, Listen};
use harness::{Installed, Profile, cache_folder};
use ledger::Ledger;
use record::{Message, Rollout, Sampling};
use rollout::{GroupPlan, Job, Runner, Settings, plan_group};
use sandbox::{LocalConfig, LocalProvider, SandboxError};
use task::{Step, Task, teacher};

/// Tokens that a scripted conversation may have: bytes, nearly, so pi's prompt alone has 6,000.
pub const CONTEXT: u32 = 200_000;

/// Plays fixed steps for each task, whatever the harness's tools are called.
#[derive(Debug, Default)]
pub struct Teacher {
    pub steps: BTreeMap<String, Vec<Step>>,
}

impl Teacher {
    pub fn of(tasks: &[Task]) -> Self {
        Self {
            steps: tasks
                .iter()
                .map(|task| (task.id.to_string(), teacher::reference(task).unwrap()))
                .collect(),
        }
    }
}

impl Script for Teacher {
    fn reply(&self, hint: &Hint) -> Result<Message, EngineError> {
        let spec = hint
            .rollout
            .as_ref()
            .ok_or_else(|| EngineError::NoScript("a request of no rollout".into()))?;
        let steps = self
            .steps
            .get(spec.task.as_str())
            .ok_or_else(|| EngineError::NoScript(format!("no steps for {}", spec.task)))?;
        teacher::next_message(steps, &hint.conversation)
            .map_err(|error| EngineError::NoScript(error.to_string()))
    }
}

pub fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Everything that runs rollouts.
pub struct Loop {
    pub runner: Runner,
    pub ledger: Ledger,
    provider: LocalProvider,
    gateway: Arc<Gateway>,
    engine: Arc<dyn Engine>,
    _folder: tempfile::TempDir,
}

impl Loop {
    /// `None`, with a line that says why, on a machine that cannot make sandboxes.
    pub async fn start(script: impl Script + 'static) -> Option<Self> {
        let provider = match LocalProvider::start(LocalConfig::default()).await {
            Ok(provider) => provider,
            Err(error @ SandboxError::Unsupported { .. }) => {
                println!("skipped: {error}");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let folder = tempfile::tempdir().unwrap();
        let ledger = Ledger::create(&folder.path().join("run")).unwrap();
        let codec = Arc::new(Codec::load(&workspace_root().join("policy")).unwrap());
        let speaker = Arc::clone(&codec);
        let engine: Arc<dyn Engine> = Arc::new(Scripted::new(
            "test",
            Arc::new(script),
            Arc::new(move |message| {
                let text = speaker.speak(message).map_err(|error| error.to_string())?;
                speaker.encode(&text).map_err(|error| error.to_string())
            }),
            CONTEXT,
            codec.vocabulary(),
        ));
        let socket = folder.path().join("gateway.sock");
        let config = Config {
            listen: vec![Listen::Unix(socket.clone())],
            ..Config::default()
        };
        let gateway = Gateway::start(
            config,
            Arc::clone(&engine),
            Arc::clone(&codec),
            ledger.clone(),
        )
        .await
        .unwrap();
        let gateway = Arc::new(gateway);
        let mut settings = Settings::new(socket);
        settings.context_tokens = CONTEXT;
        settings.reply_tokens_max = 8192;
        settings.codec_digest = codec.digest().to_owned();
        let runner = Runner::new(
            Arc::new(provider.clone()),
            Arc::clone(&gateway),
            Arc::clone(&engine),
            ledger.clone(),
            settings,
        );
        Some(Self {
            engine,
            runner,
            ledger,
            provider,
            gateway,
            _folder: folder,
        })
    }

    /// The same with other settings.
    pub fn with(mut self, settings: Settings) -> Self {
        self.runner = Runner::new(
            Arc::new(self.provider.clone()),
            Arc::clone(&self.gateway),
            Arc::clone(&self.engine),
            self.ledger.clone(),
            settings,
        );
        self
    }

    /// Ends everything, and waits until it has.
    pub async fn close(self) {
        let Self {
            runner,
            ledger,
            provider,
            gateway,
            engine,
            _folder,
        } = self;
        drop(engine);
        drop(runner);
        drop(gateway);
        ledger.close().await.unwrap();
        provider.close().await;
    }
}

/// The harness, installed into the user's cache; `None`, with a line that says why, without npm.
/// Profiles of the folder HARNESSES come first.
pub async fn installed(name: &str) -> Option<Arc<Installed>> {
    let folder = std::env::var_os("HARNESSES").map(PathBuf::from);
    let profile = Profile::load(folder.as_deref(), name).unwrap_or_else(|error| panic!("{error}"));
    match profile.install(&cache_folder().unwrap()).await {
        Ok(installed) => Some(Arc::new(installed)),
        Err(error @ harness::HarnessError::Tool { .. }) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// One job per task and sample.
pub fn jobs(tasks: &[Task], installed: &Arc<Installed>, samples: u32) -> Vec<Job> {
    let mut jobs = Vec::new();
    for task in tasks {
        let task = Arc::new(task.clone());
        let specs = plan_group(GroupPlan {
            run_seed: 0,
            step: 0,
            split: "train",
            task: &task.id,
            harness: &installed.profile.name,
            samples,
        })
        .unwrap();
        jobs.extend(specs.into_iter().map(|spec| Job {
            spec,
            task: Arc::clone(&task),
            installed: Arc::clone(installed),
            sampling: Sampling {
                tokens_max: 8192,
                ..Sampling::default()
            },
            budget: rollout::Budget::default(),
        }));
    }
    jobs
}

/// One line for people.
pub fn line(rollout: &Rollout) -> String {
    let seconds = &rollout.seconds;
    format!(
        "{:<44} {:<9} reward {:<6} calls {:>2} exit {:<8} create {:.3} harness {:.3} settle {:.3} verify {:.3} destroy {:.3} {}",
        rollout.spec.id,
        rollout
            .disposition
            .as_ref()
            .map_or("running", record::Disposition::name),
        rollout
            .verdict
            .as_ref()
            .map_or("-".to_owned(), |verdict| format!("{:.3}", verdict.reward)),
        rollout.calls,
        format!("{:?}", rollout.harness_exit),
        seconds.create,
        seconds.harness,
        seconds.settle,
        seconds.verify,
        seconds.destroy,
        match &rollout.disposition {
            Some(record::Disposition::Discard { fault, reason }) => format!("{fault:?}: {reason}"),
            Some(record::Disposition::Truncate { reason }) => reason.clone(),
            _ => String::new(),
        }
    )
}

/// Our `react` in a shell script of a harness, where `REACT` stands in it.
const REACT: &str =
    r#"/run/espalier/guest react --base-url "$BASE/v1" --api-key "$KEY" --model m -- "$TASK""#;

/// A harness that is a shell script, usually around `react`; `more` are further tables of its
/// profile.
pub fn shell(name: &str, script: &str, more: &str) -> Arc<Installed> {
    let script = script.replace("REACT", REACT);
    let text = format!(
        r#"
name = "{name}"
version = "1"
dialect = "chat"
[install]
kind = "none"
[launch]
argv = ["bash", "-c", '''{script}''']
[launch.env]
BASE = "{{{{ base_url }}}}"
KEY = "{{{{ api_key }}}}"
TASK = "{{{{ instruction }}}}"
{more}
"#
    );
    let profile = Profile::parse(name, name, &text).unwrap_or_else(|error| panic!("{error}"));
    Arc::new(Installed {
        profile,
        digest: "0".repeat(64),
        bundle: "/".into(),
        node: String::new(),
        python: String::new(),
        mounts: Vec::new(),
    })
}
