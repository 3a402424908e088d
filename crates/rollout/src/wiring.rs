//! The ports over the real gateway, ledger and verifier.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use engine::Engine;
use gateway::{Gateway, Open, Status};
use ledger::Ledger;
use record::{AttemptOutcome, CallId, Fault, Lineage, PolicyVersion, Rollout, RolloutId, Verdict};
use sandbox::{Provider, Sandbox};
use task::{Contract, Mix, Payload, Task};
use tree::Selection;
use verify::{Told, VerifyError, World, judge::Panel};

use crate::{
    gauges::Gauges,
    lineage,
    ports::{Capture, Captured, Judge, JudgeError, OpenSession, Session, Store},
    runner::Runner,
    settings::{KeepWorlds, Settings},
    summary::Summary,
    warm::Warm,
};

impl Runner {
    /// A runner over the real neighbours. The engine is only asked for its policy version and its
    /// queue.
    #[must_use]
    pub fn new(
        provider: Arc<dyn Provider>,
        gateway: Arc<Gateway>,
        engine: Arc<dyn Engine>,
        ledger: Ledger,
        settings: Settings,
    ) -> Self {
        let gauges = Arc::new(Gauges::default());
        Self {
            warm: Warm::of(&settings, &gauges),
            gauges,
            capture: Arc::new(RealCapture {
                gateway,
                engine,
                ledger: ledger.clone(),
            }),
            judge: Arc::new(RealJudge {
                ledger: ledger.clone(),
                provider: Arc::clone(&provider),
                panel: settings.panel.clone(),
                keep: settings.keep_worlds.clone(),
            }),
            provider,
            store: Arc::new(RealStore {
                ledger,
                selection: settings.selection.clone(),
            }),
            settings: Arc::new(settings),
        }
    }
}

/// [`Capture`] over the gateway.
#[derive(Debug)]
struct RealCapture {
    gateway: Arc<Gateway>,
    engine: Arc<dyn Engine>,
    ledger: Ledger,
}

impl RealCapture {
    fn captured(status: &Status) -> Captured {
        Captured {
            calls: status.calls,
            in_flight: status.in_flight,
            refused: u32::from(status.calls_max_hit),
            tokens_spent: status.tokens_max_hit,
            seconds_spent: status.seconds_max_hit,
            too_long: false,
            fault: status.last_fault.map(|fault| {
                let reason = format!(
                    "a call got no answer: {} engine failures over {} attempts of {} calls",
                    status.engine_failures, status.attempts, status.calls
                );
                (fault, reason)
            }),
            settled: status.settled,
        }
    }

    /// Looks at the harness's last call: what the engine said when it failed, and whether it did
    /// not fit (an earlier one that did not may have been cured by compaction).
    async fn look_at_last(&self, id: &RolloutId, captured: &mut Captured) {
        let Some(index) = captured.calls.checked_sub(1) else {
            return;
        };
        let ledger = self.ledger.clone();
        let call = CallId {
            rollout: id.clone(),
            index,
        };
        let read = tokio::task::spawn_blocking(move || ledger.call(&call)).await;
        let call = match read {
            Ok(Ok(Some(call))) => call,
            Ok(Ok(None)) => return,
            Ok(Err(error)) => {
                captured.fault = Some((Fault::GatewayFailed, error.to_string()));
                return;
            }
            Err(_) => return,
        };
        match call.attempts.last().map(|attempt| &attempt.outcome) {
            Some(AttemptOutcome::TooLong { .. }) => captured.too_long = true,
            Some(AttemptOutcome::EngineFailed { reason }) => {
                if let Some((_, told)) = &mut captured.fault {
                    *told = format!("{reason} ({told})");
                }
            }
            _ => {}
        }
    }
}

#[async_trait]
impl Capture for RealCapture {
    async fn open(&self, open: OpenSession) -> Result<Session, String> {
        let access = self
            .gateway
            .open(Open {
                spec: open.spec,
                sampling: open.sampling,
                sampling_fixed: open.sampling_fixed,
                calls_max: open.calls_max,
                generated_tokens_max: open.generated_tokens_max,
                seconds_max: None,
                key: None,
            })
            .map_err(|error| error.to_string())?;
        Ok(Session {
            key: access.key,
            path: access.path,
        })
    }

    fn status(&self, id: &RolloutId) -> Option<Captured> {
        self.gateway
            .status(id)
            .map(|status| Self::captured(&status))
    }

    async fn settle(
        &self,
        id: &RolloutId,
        quiet: Duration,
        limit: Duration,
    ) -> Result<Captured, String> {
        let status = self
            .gateway
            .settle(id, quiet, limit)
            .await
            .map_err(|error| error.to_string())?;
        let mut captured = Self::captured(&status);
        if status.too_long > 0 || status.last_fault.is_some() {
            self.look_at_last(id, &mut captured).await;
        }
        Ok(captured)
    }

    fn close(&self, id: &RolloutId) {
        self.gateway.close(id);
    }

    fn policy(&self) -> PolicyVersion {
        self.engine.policy_version()
    }

    fn queue(&self) -> engine::Queue {
        self.engine.queue()
    }
}

/// [`Store`] over the ledger.
#[derive(Debug)]
struct RealStore {
    ledger: Ledger,
    selection: Selection,
}

#[async_trait]
impl Store for RealStore {
    async fn put(&self, rollout: Rollout) -> Result<(), String> {
        self.ledger
            .put_rollout(rollout)
            .await
            .map_err(|error| error.to_string())
    }

    async fn close(&self, mut rollout: Rollout) -> Result<Rollout, String> {
        let (ledger, id) = (self.ledger.clone(), rollout.spec.id.clone());
        let selection = self.selection.clone();
        let found = tokio::task::spawn_blocking(move || {
            let calls = ledger.calls(&id)?;
            let summary = Summary::of(&calls, &selection);
            let mut lineage = Lineage::default();
            lineage::at_end(&mut lineage, &calls);
            Ok::<_, ledger::LedgerError>((lineage, summary))
        })
        .await
        .map_err(|error| error.to_string())?;
        // Somebody else has ended it: a resumed run that took this one for dead. The first end
        // stays, so that nobody who has seen it is wrong.
        if let Some(known) = self.get(&rollout.spec.id).await?
            && known.disposition.is_some()
        {
            tracing::warn!(rollout = %rollout.spec.id, "a second end of it came late and is ignored");
            return Ok(known);
        }
        match found {
            Ok((seen, summary)) => {
                rollout.lineage.tools_digests = seen.tools_digests;
                rollout.lineage.policies = seen.policies;
                self.put(rollout.clone()).await?;
                self.ledger
                    .put_summary(&rollout.spec.id, &summary)
                    .await
                    .map_err(|error| error.to_string())?;
            }
            // What became of the rollout counts more than what its calls come to.
            Err(error) => {
                tracing::warn!(rollout = %rollout.spec.id, %error, "its calls cannot be summed up");
                self.put(rollout.clone()).await?;
            }
        }
        Ok(rollout)
    }

    async fn get(&self, id: &RolloutId) -> Result<Option<Rollout>, String> {
        let (ledger, id) = (self.ledger.clone(), id.clone());
        tokio::task::spawn_blocking(move || ledger.rollout(&id))
            .await
            .map_err(|error| error.to_string())?
            .map_err(|error| error.to_string())
    }
}

/// [`Judge`] over the verifier.
#[derive(Debug)]
struct RealJudge {
    ledger: Ledger,
    provider: Arc<dyn Provider>,
    panel: Option<Arc<Panel>>,
    keep: Option<KeepWorlds>,
}

fn judge_error(error: VerifyError) -> JudgeError {
    match error.fault() {
        Fault::SandboxLost | Fault::SandboxStart | Fault::SandboxRefused => {
            JudgeError::SandboxLost(error.to_string())
        }
        Fault::JudgeFailed => JudgeError::NoAnswer(error.to_string()),
        _ => JudgeError::Failed(error.to_string()),
    }
}

impl RealJudge {
    /// Keeps the world of a rollout, or the reason why it is not kept. Neither is a fault: the
    /// rollout has its verdict all the same.
    async fn keep(
        &self,
        id: &RolloutId,
        task: &Task,
        sandbox: &dyn Sandbox,
        audit: Option<&verify::Audit>,
    ) {
        let Some(keep) = &self.keep else { return };
        let world = World::read(task, sandbox, keep.bytes_max).await;
        let world = world.map(|world| World {
            audit: audit.cloned(),
            ..world
        });
        let (folder, id) = (keep.folder.clone(), id.clone());
        let write = move || -> Result<(), String> {
            std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
            let world = world.map_err(|error| error.to_string());
            let saved = world.and_then(|world| {
                world
                    .save(&folder.join(world_file(&id)))
                    .map_err(|error| error.to_string())
            });
            saved.or_else(|reason| {
                tracing::warn!(rollout = %id, %reason, "its world is not kept");
                std::fs::write(folder.join(not_kept_file(&id)), reason)
                    .map_err(|error| error.to_string())
            })
        };
        if let Ok(Err(reason)) = tokio::task::spawn_blocking(write).await {
            tracing::warn!(%reason, "nothing can be kept in the folder of worlds");
        }
    }
}

/// Name of the file that holds a kept world, in the folder of worlds.
#[must_use]
pub fn world_file(id: &RolloutId) -> String {
    format!("{id}.tar.zst")
}

/// Name of the file that says why a world is not kept.
#[must_use]
pub fn not_kept_file(id: &RolloutId) -> String {
    format!("{id}.not-kept")
}

#[async_trait]
impl Judge for RealJudge {
    async fn verify(&self, task: &Task, sandbox: &dyn Sandbox) -> Result<Verdict, JudgeError> {
        verify::verify(task, sandbox).await.map_err(judge_error)
    }

    /// Collect hooks, then what is to be kept, then the verifier. Calls are read only for
    /// verifiers that are told of them.
    async fn verify_rollout(
        &self,
        id: &RolloutId,
        task: &Task,
        sandbox: &dyn Sandbox,
        audit: Option<&verify::Audit>,
    ) -> Result<Verdict, JudgeError> {
        verify::collect(task, sandbox).await.map_err(judge_error)?;
        self.keep(id, task, sandbox, audit).await;
        let listens = task.verifier.payload != Payload::None
            || task.verifier.contract == Contract::OfficeAnswer
            || task.grading.mix != Mix::Code;
        let transcript = if listens {
            let (ledger, id) = (self.ledger.clone(), id.clone());
            let calls = tokio::task::spawn_blocking(move || ledger.calls(&id))
                .await
                .map_err(|error| JudgeError::Failed(error.to_string()))?
                .map_err(|error| JudgeError::Failed(error.to_string()))?;
            Some(verify::Transcript::of(&calls))
        } else {
            None
        };
        let told = Told {
            transcript: transcript.as_ref(),
            panel: self.panel.as_deref(),
            audit,
        };
        let verdict = if task.environment.verifier_apart {
            verify::apart(task, sandbox, self.provider.as_ref(), told).await
        } else {
            verify::verify_with(task, sandbox, told).await
        };
        verdict.map_err(judge_error)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use record::{Disposition, GroupId, RolloutSpec, StageSeconds, TaskId};

    use super::*;

    fn rollout(disposition: Option<Disposition>) -> Rollout {
        Rollout {
            spec: RolloutSpec {
                id: RolloutId::new("r").unwrap(),
                task: TaskId::new("t").unwrap(),
                group: GroupId::new("g").unwrap(),
                harness: "react".into(),
                labels: BTreeMap::new(),
                seed: 0,
            },
            lineage: Lineage::default(),
            started_ms: 1,
            finished_ms: disposition.is_some().then_some(2),
            harness_exit: None,
            harness_tail: String::new(),
            calls: 0,
            seconds: StageSeconds::default(),
            verdict: None,
            disposition,
        }
    }

    /// Somebody took this orchestrator for dead, ended its rollout as interrupted and ran it again;
    /// then it comes with a result after all.
    #[tokio::test]
    async fn the_first_end_of_an_attempt_stays() {
        let folder = tempfile::tempdir().unwrap();
        let ledger = Ledger::create(folder.path()).unwrap();
        let store = RealStore {
            ledger: ledger.clone(),
            selection: Selection::default(),
        };
        store.put(rollout(None)).await.unwrap();
        let interrupted = rollout(Some(Disposition::Discard {
            fault: Fault::Interrupted,
            reason: "its process was gone".into(),
        }));
        store.put(interrupted.clone()).await.unwrap();
        let late = rollout(Some(Disposition::Train));
        assert_eq!(store.close(late.clone()).await.unwrap(), interrupted);
        assert_eq!(store.get(&late.spec.id).await.unwrap(), Some(interrupted));
        drop(store);
        ledger.close().await.unwrap();
    }
}
