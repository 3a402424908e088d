//! Makes what an attempt runs in: sandbox, files, services, way out.

use std::time::Duration;

use harness::LaunchContext;
use record::{Fault, RolloutId};
use sandbox::{EgressProxy, Exec, Sandbox, Spec};
use task::Task;
use tokio::time::timeout;

use crate::{
    classify::{self, Broken},
    gauges::Up,
    job::Job,
    places::not_started,
    ports::Session,
    runner::Runner,
    shelf::Key,
    warm::{self, Claim},
    way_out,
    words::told,
};

/// What an attempt has, and must give back.
#[derive(Default)]
pub(crate) struct Place {
    pub(crate) sandbox: Option<Box<dyn Sandbox>>,
    /// Counts the sandbox.
    pub(crate) alive: Option<Up>,
    /// Whether it stood ready.
    pub(crate) warm: bool,
    pub(crate) services: Option<verify::Services>,
    pub(crate) proxy: Option<EgressProxy>,
}

impl Runner {
    /// Files and process of the harness for a part of the task.
    fn launch(&self, job: &Job, part: &Task, session: &Session) -> Result<harness::Launch, Broken> {
        let settings = &self.settings;
        let limits = [
            job.budget.harness_s.map(Duration::from_secs),
            part.environment
                .needs
                .agent_timeout_s
                .map(Duration::from_secs_f64),
        ];
        let timeout = limits
            .into_iter()
            .flatten()
            .fold(settings.stages.harness(), Duration::min);
        let launched = job
            .installed
            .launch(&LaunchContext {
                instruction: part.instruction.clone(),
                base_url: format!("http://127.0.0.1:{}{}", settings.gateway_port, session.path),
                api_key: session.key.clone(),
                model: settings.model.clone(),
                workspace: part.workspace.clone(),
                home: part.home.clone(),
                context_tokens: settings.context_tokens,
                reply_tokens_max: settings.reply_tokens_max,
                timeout,
                tool_servers: verify::tool_servers(part).into_iter().map(told).collect(),
            })
            .map_err(|error| {
                let fault = match error {
                    // What a profile cannot say to its harness stays unsaid in another sandbox too.
                    harness::HarnessError::ToolServers { .. } => Fault::SandboxRefused,
                    _ => Fault::HarnessCrashed,
                };
                (fault, error.to_string())
            });
        let mut launch = launched?;
        // A sandbox that stood ready knows nothing of the task's environment.
        for (name, value) in &job.task.environment.env {
            let env = launch.exec.env.entry(name.clone());
            env.or_insert_with(|| value.clone());
        }
        Ok(launch)
    }

    /// What to make for a job, without sockets of its own.
    fn spec(&self, job: &Job, name: String) -> Spec {
        let settings = &self.settings;
        let parts = job.task.environment.stages.len().max(1) as u64;
        let mut limits = settings.limits.clone();
        limits.deadline_s = limits.deadline_s.max(settings.stages.deadline_s() * parts);
        // What a task says that it needs is what it gets.
        let needs = &job.task.environment.needs;
        limits.memory_bytes = needs.memory_mb.map_or(limits.memory_bytes, |mb| mb << 20);
        limits.disk_bytes = needs.storage_mb.map_or(limits.disk_bytes, |mb| mb << 20);
        limits.cpu_cores = needs.cpus.unwrap_or(limits.cpu_cores);
        let mut spec = verify::spec(&job.task, name, limits);
        spec.mounts = job.installed.mounts.clone();
        spec.gateway_socket = Some(settings.gateway_socket.clone());
        spec.gateway_port = settings.gateway_port;
        spec
    }

    /// The key of the sandbox that a job needs, and how to make one; `None` for a job that needs
    /// one of its own.
    pub(crate) fn warm_key(&self, job: &Job) -> Option<(Key, Spec)> {
        let place = &job.task.environment;
        let own_sockets = !place.services.is_empty() || !place.egress.is_empty();
        if own_sockets || verify::refuse(&job.task).is_err() {
            return None;
        }
        let spec = self.spec(job, String::new());
        warm::key(&spec, &job.installed.profile.name)
    }

    /// Makes the sandbox, or takes one that stands ready, with all files in it, and says what to run.
    pub(crate) async fn create(
        &self,
        job: &Job,
        part: &Task,
        id: &RolloutId,
        (session, claim): (&Session, Option<Claim>),
        place: &mut Place,
    ) -> Result<Exec, Broken> {
        let settings = &self.settings;
        let stages = &settings.stages;
        let launch = self.launch(job, part, session)?;
        if let Err(error) = verify::refuse(&job.task) {
            return Err((Fault::SandboxRefused, error.to_string()));
        }
        let mut spec = self.spec(job, id.to_string());
        place.services = verify::Services::start(&job.task).map_err(not_started)?;
        if let Some(services) = &place.services {
            spec.forwards = services.forwards();
        }
        let taken = [settings.gateway_port, way_out::PORT];
        if let Some((port, _)) = spec.forwards.iter().find(|(port, _)| taken.contains(port)) {
            let reason = format!(
                "a service of the task has port {port}, which is the gateway's or the proxy's"
            );
            return Err((Fault::SandboxRefused, reason));
        }
        let (egress, socket) = (settings.egress.as_ref(), &settings.gateway_socket);
        place.proxy =
            way_out::open(egress, socket, &job.task, id, &mut spec).map_err(not_started)?;
        let files = launch.files;
        let make = async {
            let taken = self.warm.take(claim, &spec, &job.installed.profile.name);
            let (made, alive) = match taken.await {
                Some(taken) => {
                    place.warm = true;
                    taken
                }
                None => {
                    let made = self.provider.create(spec).await;
                    let not_made = |error| (classify::not_made(&error), error.to_string());
                    let made = made.map_err(not_made)?;
                    let alive = self.gauges.sandbox(&made.image().kind);
                    (made, alive)
                }
            };
            place.alive = alive;
            let sandbox: &dyn Sandbox = &**place.sandbox.insert(made);
            verify::prepare(part, sandbox).await.map_err(not_started)?;
            if let Some(services) = &place.services {
                services
                    .ready(&job.task, sandbox)
                    .await
                    .map_err(not_started)?;
            }
            let servers = verify::start_tool_servers(&job.task, sandbox);
            servers.await.map_err(not_started)?;
            sandbox.upload(files).await.map_err(not_started)
        };
        let limit_s = stages.create_s;
        match timeout(Duration::from_secs(limit_s), make).await {
            Ok(made) => made.map(|()| launch.exec),
            Err(_) => Err(not_started(format!(
                "not ready after {limit_s} s (stages.create_s)"
            ))),
        }
    }

    /// Prepares a later step in the sandbox of the one before, and says what to run.
    pub(crate) async fn next(
        &self,
        job: &Job,
        part: &Task,
        session: &Session,
        sandbox: &dyn Sandbox,
    ) -> Result<Exec, Broken> {
        let launch = self.launch(job, part, session)?;
        let create_s = self.settings.stages.create_s;
        let make = async {
            verify::prepare(part, sandbox)
                .await
                .map_err(|error| error.to_string())?;
            sandbox
                .upload(launch.files)
                .await
                .map_err(|error| error.to_string())
        };
        match timeout(Duration::from_secs(create_s), make).await {
            Ok(Ok(())) => Ok(launch.exec),
            Ok(Err(reason)) => Err((Fault::SandboxLost, reason)),
            Err(_) => Err((
                Fault::SandboxLost,
                format!("the next step was not ready after {create_s} s (stages.create_s)"),
            )),
        }
    }
}
