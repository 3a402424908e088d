//! Everything that rollouts need, put together from a recipe: sandboxes, harnesses, gateway,
//! ledger, runner.

use std::{path::PathBuf, sync::Arc, time::Duration};

use codec::Codec;
use engine::Engine;
use gateway::{Gateway, Listen};
use harness::{Installed, Profile};
use ledger::Ledger;
use record::Sampling;
use rollout::{BatchResult, Budget, Event, GroupPlan, Job, KeepWorlds, Runner, plan_group};
use task::Task;
use tokio_util::sync::CancellationToken;
use verify::judge::Panel;

use crate::{
    display::Display,
    error::CliError,
    metrics::Metrics,
    recipe::{Recipe, VerifySettings},
    run_dir::RunDir,
};

/// How long calls in flight may take to end when a run stops.
const DRAIN: Duration = Duration::from_secs(10);

/// A running set of rooms.
pub(crate) struct Lab {
    pub(crate) ledger: Ledger,
    gateway: Arc<Gateway>,
    runner: Runner,
    metrics: Option<Metrics>,
    harnesses: Vec<Arc<Installed>>,
    concurrency: usize,
    seed: u64,
    sampling: Sampling,
    verify: VerifySettings,
    /// Hosts that tasks may be granted.
    egress: Vec<String>,
}

/// Which rollouts to plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan<'a> {
    /// `train`, `eval-before` …; part of the rollouts' names.
    pub(crate) split: &'a str,
    pub(crate) step: u64,
    /// Rollouts per task and harness.
    pub(crate) samples: u32,
    pub(crate) temperature: f32,
}

impl Lab {
    /// Starts everything. `engine` answers the calls; the recipe names the judges.
    pub(crate) async fn open(
        recipe: &Recipe,
        dir: &RunDir,
        ledger: Ledger,
        codec: Arc<Codec>,
        engine: Arc<dyn Engine>,
    ) -> Result<Self, CliError> {
        let panel = recipe.verify.panel()?;
        Self::open_judged(recipe, dir, ledger, codec, engine, panel).await
    }

    /// As [`Lab::open`], by judges that several labs share.
    pub(crate) async fn open_judged(
        recipe: &Recipe,
        dir: &RunDir,
        ledger: Ledger,
        codec: Arc<Codec>,
        engine: Arc<dyn Engine>,
        panel: Option<Arc<Panel>>,
    ) -> Result<Self, CliError> {
        let harnesses = install(&recipe.harnesses).await?;
        let socket = socket_path(dir)?;
        let config = gateway::Config {
            listen: vec![Listen::Unix(socket.clone())],
            ..gateway::Config::default()
        };
        let gateway = Gateway::start(
            config,
            Arc::clone(&engine),
            Arc::clone(&codec),
            ledger.clone(),
        )
        .await
        .map_err(|error| CliError::failed("the gateway could not start", error))?;
        let gateway = Arc::new(gateway);
        let provider = sandbox::start(&recipe.sandbox).await.map_err(|error| {
            CliError::failed(
                "sandboxes cannot be made here; `espalier doctor` says more",
                error,
            )
        })?;
        let mut settings = rollout::Settings::new(socket);
        settings.stages = recipe.rollout.stages.clone();
        settings.limits = recipe.rollout.limits.clone();
        settings.calls_max = recipe.rollout.calls_max;
        settings.generated_tokens_max = recipe.rollout.generated_tokens_max;
        settings.pools = recipe.rollout.pools;
        settings.warm = recipe.rollout.warm;
        settings.dispositions = recipe.rollout.dispositions.clone();
        settings.context_tokens = engine.info().context_tokens_max;
        settings.reply_tokens_max = recipe.rollout.reply_tokens_max;
        settings.codec_digest = codec.digest().to_owned();
        settings.selection = recipe.train.selection.clone();
        settings.panel = panel;
        let (egress, private_addresses) = recipe.sandbox.egress();
        settings.egress = Some(rollout::Egress {
            folder: dir.egress(),
            private_addresses,
        });
        let egress = egress.to_vec();
        settings.keep_worlds = (recipe.rollout.world_bytes_max > 0).then(|| KeepWorlds {
            folder: dir.worlds(),
            bytes_max: recipe.rollout.world_bytes_max,
        });
        let runner = Runner::new(
            provider,
            Arc::clone(&gateway),
            engine,
            ledger.clone(),
            settings,
        );
        let metrics = match recipe.rollout.metrics_listen {
            Some(listen) => {
                let (gateway, runner) = (Arc::clone(&gateway), runner.clone());
                let page = move || gateway.metrics_text() + &runner.metrics_text();
                Some(Metrics::start(listen, Arc::new(page)).await?)
            }
            None => None,
        };
        let sampling = Sampling {
            tokens_max: recipe.rollout.reply_tokens_max,
            stop_ids: codec.stop_ids().to_vec(),
            ..Sampling::default()
        };
        let (concurrency, seed) = (recipe.rollout.concurrency, recipe.seed);
        Ok(Self {
            ledger,
            gateway,
            runner,
            metrics,
            harnesses,
            concurrency,
            seed,
            sampling,
            verify: recipe.verify.clone(),
            egress,
        })
    }

    /// Names of the harnesses.
    pub(crate) fn harness_names(&self) -> Vec<String> {
        self.harnesses
            .iter()
            .map(|installed| installed.profile.name.clone())
            .collect()
    }

    /// Jobs for every task with every harness, group by group.
    pub(crate) fn jobs(&self, tasks: &[Arc<Task>], plan: Plan<'_>) -> Result<Vec<Job>, CliError> {
        let all: Vec<_> = tasks.iter().map(|task| (Arc::clone(task), None)).collect();
        self.jobs_of(&all, plan)
    }

    /// Jobs for pairs of task and harness, an index into the recipe's; `None` means all of them.
    pub(crate) fn jobs_of(
        &self,
        pairs: &[(Arc<Task>, Option<usize>)],
        plan: Plan<'_>,
    ) -> Result<Vec<Job>, CliError> {
        let mut jobs = Vec::new();
        for (task, harness) in pairs {
            let task = &self.granted(self.verify.mixed(Arc::clone(task)));
            let chosen = match harness {
                Some(at) => self.harnesses.get(*at..=*at).unwrap_or_default(),
                None => &self.harnesses,
            };
            for installed in chosen {
                let specs = plan_group(GroupPlan {
                    run_seed: self.seed,
                    step: u32::try_from(plan.step).unwrap_or(u32::MAX),
                    split: plan.split,
                    task: &task.id,
                    harness: &installed.profile.name,
                    samples: plan.samples,
                })
                .map_err(|error| CliError::failed("a rollout could not be named", error))?;
                jobs.extend(specs.into_iter().map(|spec| Job {
                    sampling: Sampling {
                        temperature: plan.temperature,
                        seed: spec.seed,
                        ..self.sampling.clone()
                    },
                    spec,
                    task: Arc::clone(task),
                    installed: Arc::clone(installed),
                    budget: Budget::default(),
                }));
            }
        }
        Ok(jobs)
    }

    /// The task with the hosts that it may reach. One that asks for more is refused when it is run.
    fn granted(&self, task: Arc<Task>) -> Arc<Task> {
        match task.environment.grant(&self.egress) {
            Ok(hosts) if !hosts.is_empty() => {
                let mut task = Arc::unwrap_or_clone(task);
                task.environment.egress = hosts;
                Arc::new(task)
            }
            _ => task,
        }
    }

    /// Runs jobs with a progress display. Rollouts that the ledger has are taken from it.
    pub(crate) async fn run(
        &self,
        jobs: Vec<Job>,
        title: &str,
        display: &Display,
        cancel: &CancellationToken,
    ) -> Result<BatchResult, CliError> {
        self.run_until(jobs, None, title, display, cancel).await
    }

    /// As [`Lab::run`], until so many groups are complete and have a difference.
    pub(crate) async fn run_until(
        &self,
        jobs: Vec<Job>,
        enough: Option<usize>,
        title: &str,
        display: &Display,
        cancel: &CancellationToken,
    ) -> Result<BatchResult, CliError> {
        let progress = display.rollouts(title, jobs.len());
        let watch = |event: &Event| progress.event(event);
        let result = self
            .runner
            .run_until(jobs, self.concurrency, enough, cancel.clone(), watch)
            .await
            .map_err(|error| CliError::failed(format!("{title}: rollouts"), error))?;
        progress.done();
        Ok(result)
    }

    /// Stops everything but the ledger, in order.
    pub(crate) async fn stop(self) -> Ledger {
        let Self {
            ledger,
            gateway,
            runner,
            metrics,
            ..
        } = self;
        if let Some(metrics) = metrics {
            metrics.end().await;
        }
        runner.close().await;
        gateway.shutdown(DRAIN).await;
        drop(runner);
        drop(gateway);
        ledger
    }

    /// Stops everything in order.
    pub(crate) async fn close(self) -> Result<(), CliError> {
        self.stop()
            .await
            .close()
            .await
            .map_err(|error| CliError::failed("the ledger could not be closed", error))
    }
}

/// Reads harness profiles: the built-in ones, and those of the folder `ESPALIER_HARNESSES`.
pub(crate) fn profiles(names: &[String]) -> Result<Vec<Profile>, CliError> {
    let folder = std::env::var_os("ESPALIER_HARNESSES").map(PathBuf::from);
    names
        .iter()
        .map(|name| {
            Profile::load(folder.as_deref(), name)
                .map_err(|error| CliError::failed(format!("harness {name}"), error))
        })
        .collect()
}

/// Loads and installs harness profiles.
pub(crate) async fn install(names: &[String]) -> Result<Vec<Arc<Installed>>, CliError> {
    let cache =
        harness::cache_folder().map_err(|error| CliError::failed("the harness cache", error))?;
    let mut harnesses = Vec::new();
    for profile in profiles(names)? {
        let installed = profile
            .install(&cache)
            .await
            .map_err(|error| CliError::failed(format!("harness {}", profile.name), error))?;
        harnesses.push(Arc::new(installed));
    }
    Ok(harnesses)
}

/// The gateway's socket lives in the run directory; the kernel limits its path to 107 bytes.
fn socket_path(dir: &RunDir) -> Result<PathBuf, CliError> {
    let folder = std::fs::canonicalize(&dir.path).map_err(|error| {
        CliError::failed(format!("run directory {}", dir.path.display()), error)
    })?;
    let path = folder.join("gateway.sock");
    if path.as_os_str().len() > 107 {
        return Err(CliError::usage(
            format!(
                "{}: too long for a unix socket ({} bytes, at most 107)",
                path.display(),
                path.as_os_str().len()
            ),
            "choose a run directory with a shorter path",
        ));
    }
    Ok(path)
}
