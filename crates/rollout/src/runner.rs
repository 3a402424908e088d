//! One job: attempts, stages, clean-up.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use record::{Disposition, Fault, Rollout, RolloutId, RolloutSpec, StageSeconds, Verdict};
use sandbox::{Exec, Output, Provider, Sandbox};
use task::Task;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::{
    classify::{self, Broken, HarnessEnd},
    endings::{self, Again},
    gauges::Gauges,
    job::{self, ATTEMPTS_MAX, Job},
    lineage,
    making::Place,
    pace,
    places::{Places, no_place},
    ports::{Capture, Captured, Judge, JudgeError, Open, OpenSession, Session, Store},
    settings::Settings,
    steps::{Steps, parts},
    warm::{Claim, Warm},
    words::tail,
};

/// How long a sandbox may stay silent after the limit of a process it runs.
const ANSWER_GRACE: Duration = Duration::from_secs(10);

/// How often calls in flight are looked at between the steps of a task.
const POLL: Duration = Duration::from_millis(20);

/// Runs rollouts. Cheap to clone; all clones share provider, gateway, ledger and verifier.
#[derive(Debug, Clone)]
pub struct Runner {
    /// Makes sandboxes.
    pub provider: Arc<dyn Provider>,
    /// The gateway.
    pub capture: Arc<dyn Capture>,
    /// The ledger.
    pub store: Arc<dyn Store>,
    /// The verifier.
    pub judge: Arc<dyn Judge>,
    /// Limits and shared facts.
    pub settings: Arc<Settings>,
    /// What is going on, in numbers.
    pub gauges: Arc<Gauges>,
    /// Sandboxes that stand ready; [`Runner::close`] ends them.
    pub warm: Warm,
}

/// With what a job starts.
pub(crate) struct Start<'a> {
    /// Seconds in line.
    pub(crate) queue_s: f64,
    pub(crate) places: &'a Places,
    /// Its claim to a warm sandbox; the first attempt's.
    pub(crate) claim: Option<Claim>,
}

/// Told about the start and the end of each attempt: `(attempt number, rollout, superseded)`.
/// The disposition is `None` at the start.
pub(crate) type Watch<'a> = &'a (dyn Fn(u32, &Rollout, bool) + Send + Sync);

/// Where a job stands according to the ledger.
#[derive(Debug)]
pub(crate) enum Standing {
    /// It has a result.
    Finished(Box<Rollout>),
    /// This attempt is next.
    Next(u32),
}

impl Runner {
    /// Runs one job to its result: one attempt, and one more when the sandbox could not be made.
    /// Cancelling the token ends it quickly as `Discard` / `Interrupted`. Never fails: every
    /// fault is in the result's disposition. The ledger is not asked for an earlier result.
    pub async fn run(&self, job: &Job, cancel: &CancellationToken) -> Rollout {
        let start = Start {
            queue_s: 0.0,
            places: &Places::of_one(&self.gauges),
            claim: None,
        };
        self.run_from(job, 0, cancel, start, &|_, _, _| {}).await
    }

    /// Ends what stands ready, and waits until it is gone. Rollouts that run are not touched.
    pub async fn close(&self) {
        self.warm.close().await;
    }

    /// The gauges in Prometheus' text form, as things are now; docs/rollouts.md lists them.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        self.gauges.queue(self.capture.queue());
        self.gauges.text()
    }

    /// Runs a job from an attempt on.
    pub(crate) async fn run_from(
        &self,
        job: &Job,
        first: u32,
        cancel: &CancellationToken,
        mut start: Start<'_>,
        watch: Watch<'_>,
    ) -> Rollout {
        let mut number = first;
        loop {
            let spec = job::attempt(&job.spec, number).unwrap_or_else(|_| job.spec.clone());
            let may_retry = number - first < self.settings.sandbox_retries
                && number + 1 < ATTEMPTS_MAX
                && job::attempt(&job.spec, number + 1).is_ok();
            let mut rollout = self.begin(job, spec);
            rollout.lineage.retries = number;
            rollout.seconds.queue = start.queue_s;
            watch(number, &rollout, false);
            let disposition = self.attempt(job, &mut rollout, cancel, &mut start).await;
            let (disposition, superseded) = match disposition {
                Disposition::Discard { fault, reason }
                    if may_retry && endings::of_fault(fault).again == Again::Retried =>
                {
                    (Disposition::Retry { fault, reason }, true)
                }
                disposition => (disposition, false),
            };
            rollout.finished_ms = Some(now_ms());
            rollout.disposition = Some(disposition);
            rollout.lineage.policy_end = Some(self.capture.policy());
            match self.store.close(rollout.clone()).await {
                Ok(recorded) => rollout = recorded,
                Err(reason) => {
                    tracing::error!(rollout = %rollout.spec.id, %reason, "the end of a rollout could not be recorded");
                    rollout.verdict = None;
                    rollout.disposition = Some(Disposition::Discard {
                        fault: Fault::GatewayFailed,
                        reason: format!("its end could not be recorded: {reason}"),
                    });
                    watch(number, &rollout, false);
                    return rollout;
                }
            }
            watch(number, &rollout, superseded);
            if !superseded {
                return rollout;
            }
            number += 1;
        }
    }

    /// Asks the ledger where a job stands. Attempts that it has as running are of a process that is
    /// gone: they are recorded as interrupted.
    ///
    /// # Errors
    /// What the ledger said.
    pub(crate) async fn standing(&self, job: &Job) -> Result<Standing, String> {
        let mut last = None;
        for number in 0..ATTEMPTS_MAX {
            let Ok(spec) = job::attempt(&job.spec, number) else {
                break;
            };
            let Some(mut rollout) = self.store.get(&spec.id).await? else {
                return Ok(Standing::Next(number));
            };
            match &rollout.disposition {
                None => {
                    rollout.finished_ms = Some(now_ms());
                    rollout.verdict = None;
                    rollout.disposition = Some(Disposition::Discard {
                        fault: Fault::Interrupted,
                        reason: "the process that ran it ended before it did".into(),
                    });
                    self.store.put(rollout.clone()).await?;
                }
                Some(
                    Disposition::Retry { .. }
                    | Disposition::Discard {
                        fault: Fault::Interrupted,
                        ..
                    },
                ) => {}
                Some(_) => return Ok(Standing::Finished(Box::new(rollout))),
            }
            last = Some(rollout);
        }
        match last {
            Some(rollout) => Ok(Standing::Finished(Box::new(rollout))),
            None => Ok(Standing::Next(0)),
        }
    }

    fn begin(&self, job: &Job, spec: RolloutSpec) -> Rollout {
        Rollout {
            spec,
            lineage: lineage::at_start(job, &self.settings, self.capture.policy()),
            started_ms: now_ms(),
            finished_ms: None,
            harness_exit: None,
            harness_tail: String::new(),
            calls: 0,
            seconds: StageSeconds::default(),
            verdict: None,
            disposition: None,
        }
    }

    /// One attempt, from its first record to the end of its sandbox.
    async fn attempt(
        &self,
        job: &Job,
        rollout: &mut Rollout,
        cancel: &CancellationToken,
        start: &mut Start<'_>,
    ) -> Disposition {
        // Kept outside of the stages, so that it is destroyed properly also when they are dropped.
        let mut place = Place::default();
        let id = rollout.spec.id.clone();
        let open = Open {
            capture: self.capture.as_ref(),
            id: &id,
        };
        let outcome = tokio::select! {
            biased;
            () = cancel.cancelled() => Err((
                Fault::Interrupted,
                "the run was stopped".to_owned(),
            )),
            outcome = self.stages(job, rollout, &mut place, start) => outcome,
        };
        if let Some(captured) = self.capture.status(&id) {
            rollout.calls = rollout.calls.max(captured.calls);
        }
        drop(open);
        if let Some(sandbox) = place.sandbox {
            let started = Instant::now();
            let limit = Duration::from_secs(self.settings.stages.destroy_s);
            if timeout(limit, sandbox.destroy()).await.is_err() {
                tracing::warn!(rollout = %id, limit_s = limit.as_secs(), "destroying the sandbox takes too long; it goes on without us");
            }
            rollout.seconds.destroy = started.elapsed().as_secs_f64();
        }
        drop(place.alive);
        if let Some(proxy) = place.proxy {
            proxy.close().await;
        }
        match outcome {
            Ok((verdict, disposition)) => {
                rollout.verdict = Some(verdict);
                disposition
            }
            Err((fault, reason)) => Disposition::Discard { fault, reason },
        }
    }

    /// All stages but the last: once round harness, settle and verify for each step of the task.
    async fn stages(
        &self,
        job: &Job,
        rollout: &mut Rollout,
        place: &mut Place,
        start: &mut Start<'_>,
    ) -> Result<(Verdict, Disposition), Broken> {
        let places = start.places;
        let id = rollout.spec.id.clone();
        self.store
            .put(rollout.clone())
            .await
            .map_err(|reason| (Fault::GatewayFailed, reason))?;

        let mut sampling = job.sampling.clone();
        sampling.seed = rollout.spec.seed;
        let session = self
            .capture
            .open(OpenSession {
                spec: rollout.spec.clone(),
                sampling,
                sampling_fixed: self.settings.sampling_fixed,
                calls_max: job.budget.calls_max.unwrap_or(self.settings.calls_max),
                generated_tokens_max: job
                    .budget
                    .generated_tokens_max
                    .or(self.settings.generated_tokens_max),
            })
            .await
            .map_err(|reason| (Fault::GatewayFailed, reason))?;

        let started = Instant::now();
        let making = places.create().await;
        rollout.seconds.queue += started.elapsed().as_secs_f64();
        let started = Instant::now();
        let parts = parts(&job.task);
        let first = parts.first().unwrap_or(&job.task);
        let claim = start.claim.take();
        let created = self.create(job, first, &id, (&session, claim), place).await;
        rollout.seconds.create = started.elapsed().as_secs_f64();
        places.note_start(rollout.seconds.create);
        drop(making);
        if let Some(sandbox) = &place.sandbox {
            let image = sandbox.image();
            rollout.lineage.sandbox = image.kind;
            rollout.lineage.image_digest = image.digest;
            rollout.lineage.warm = place.warm;
        }
        let mut exec = Some(created?);
        let sandbox = place.sandbox.as_deref().ok_or_else(|| {
            (
                Fault::SandboxStart,
                "the provider made no sandbox".to_owned(),
            )
        })?;
        let mut steps = Steps::new(&job.task);
        for (index, part) in parts.iter().enumerate() {
            let exec = match exec.take() {
                Some(exec) => exec,
                None => self.next(job, part, &session, sandbox).await?,
            };
            let last = index + 1 == parts.len();
            let waits = self.settings.stages.wait();
            let started = Instant::now();
            let running = timeout(waits, places.run()).await;
            rollout.seconds.ready += started.elapsed().as_secs_f64();
            let running = running.map_err(|_| no_place(Fault::SandboxStart, "run", waits))?;
            let budget = self
                .one(job, rollout, &session, sandbox, exec, last)
                .await?;
            drop(running);
            if let Some(proxy) = place.proxy.take_if(|_| last) {
                // Verifiers have no network.
                proxy.close().await;
            }
            places.adapt(self.capture.queue().waiting, pace::memory_free);
            let started = Instant::now();
            let verifying = timeout(waits, places.verify()).await;
            rollout.seconds.verify_wait += started.elapsed().as_secs_f64();
            let _verifying =
                verifying.map_err(|_| no_place(Fault::VerifierFailed, "be verified", waits))?;
            let audit = place.services.as_ref().map(verify::Services::audit);
            let verdict = self.verify(rollout, part, sandbox, audit.as_ref()).await?;
            if !steps.add(verdict, budget) {
                break;
            }
        }
        let nothing = || (Fault::VerifierFailed, "no step has a verdict".to_owned());
        let (verdict, budget) = steps.end().ok_or_else(nothing)?;
        Ok((verdict, self.settings.dispositions.with_verdict(budget)))
    }

    /// Runs the harness once and waits until its calls are at rest. The name of a spent budget.
    async fn one(
        &self,
        job: &Job,
        rollout: &mut Rollout,
        session: &Session,
        sandbox: &dyn Sandbox,
        exec: Exec,
        last: bool,
    ) -> Result<Option<String>, Broken> {
        let id = rollout.spec.id.clone();
        let started = Instant::now();
        let startup = Duration::from_secs(job.installed.profile.startup_s);
        let (end, output) = self.harness(sandbox, exec, startup, &id).await;
        rollout.seconds.harness += started.elapsed().as_secs_f64();
        if let Some(output) = &output {
            rollout.harness_tail = tail(output, &session.key);
            if let sandbox::Exit::Code(code) = output.exit {
                rollout.harness_exit = Some(code);
            }
        }
        let started = Instant::now();
        let captured = self.settle(&id, last).await;
        rollout.seconds.settle += started.elapsed().as_secs_f64();
        if let Ok(captured) = &captured {
            rollout.calls = captured.calls;
        }
        let habits = &job.installed.profile.habits;
        classify::after_harness(&end, &captured, habits, &rollout.harness_tail)
    }

    /// Waits for calls to come to rest. After the last step the session ends with it: the gateway
    /// takes no more calls of a rollout that has settled.
    async fn settle(&self, id: &RolloutId, last: bool) -> Result<Captured, String> {
        let stages = &self.settings.stages;
        let limit = Duration::from_secs(stages.settle_s);
        if !last {
            // The harness and all that it started are gone, so only calls in flight can change.
            let deadline = Instant::now() + limit;
            loop {
                let mut captured = self.capture.status(id).unwrap_or_default();
                captured.settled = captured.in_flight == 0;
                if captured.settled || Instant::now() >= deadline {
                    return Ok(captured);
                }
                tokio::time::sleep(POLL).await;
            }
        }
        let settle = self.capture.settle(id, stages.settle_quiet(), limit);
        // The gateway keeps its own limit; a second one guards against the gateway.
        let captured = match timeout(limit + ANSWER_GRACE, settle).await {
            Ok(captured) => captured,
            Err(_) => Err(format!(
                "the gateway did not settle within {} s",
                (limit + ANSWER_GRACE).as_secs()
            )),
        };
        // From here on the key opens nothing: neither for leftovers of the harness nor for the
        // verifier.
        self.capture.close(id);
        captured
    }

    /// Scores what is there now.
    async fn verify(
        &self,
        rollout: &mut Rollout,
        task: &Task,
        sandbox: &dyn Sandbox,
        audit: Option<&verify::Audit>,
    ) -> Result<Verdict, Broken> {
        let stages = &self.settings.stages;
        let started = Instant::now();
        let limit = Duration::from_secs(stages.verify_s);
        let id = &rollout.spec.id;
        let verify = self.judge.verify_rollout(id, task, sandbox, audit);
        let verdict = match timeout(limit, verify).await {
            Ok(verdict) => verdict,
            Err(_) => Err(JudgeError::Failed(format!(
                "no verdict after {} s (stages.verify_s)",
                stages.verify_s
            ))),
        };
        rollout.seconds.verify += started.elapsed().as_secs_f64();
        let verdict = verdict.map_err(classify::no_verdict)?;
        if !(0.0..=1.0).contains(&verdict.reward) {
            return Err((
                Fault::VerifierFailed,
                format!("reward {} is not between 0 and 1", verdict.reward),
            ));
        }
        Ok(verdict)
    }

    /// Runs the harness to its end.
    async fn harness(
        &self,
        sandbox: &dyn Sandbox,
        exec: Exec,
        startup: Duration,
        id: &RolloutId,
    ) -> (HarnessEnd, Option<Output>) {
        let limit = exec.timeout + ANSWER_GRACE;
        let run = timeout(limit, sandbox.exec(exec));
        tokio::pin!(run);
        let silent = async {
            tokio::time::sleep(startup).await;
            let captured = self.capture.status(id).unwrap_or_default();
            captured.calls == 0 && captured.in_flight == 0 && captured.refused == 0
        };
        let ended = tokio::select! {
            biased;
            ended = &mut run => ended,
            true = silent => {
                return (HarnessEnd::Silent { startup_s: startup.as_secs() }, None);
            }
        };
        match ended {
            Ok(Ok(output)) => (
                HarnessEnd::Exit {
                    exit: output.exit,
                    out_of_memory: output.out_of_memory,
                },
                Some(output),
            ),
            Ok(Err(error)) => (HarnessEnd::Failed(error), None),
            Err(_) => (
                HarnessEnd::Hung {
                    seconds: limit.as_secs(),
                },
                None,
            ),
        }
    }
}

pub(crate) fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|elapsed| u64::try_from(elapsed.as_millis()).ok())
        .unwrap_or_default()
}
