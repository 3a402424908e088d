//! Many jobs: bounded, results in order, resumable, cancellable.

use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
    time::Instant,
};

use futures::{StreamExt, stream};
use record::Rollout;
use tokio_util::sync::CancellationToken;

use crate::{
    event::{Counts, Event},
    job::Job,
    runner::{Runner, Standing},
};

/// Why a batch could not go on. Rollouts that ended are in the ledger.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// Two jobs have one name. Nothing was started.
    #[error("two jobs are named {id}: rollouts need names that are unique in their run")]
    DuplicateId {
        /// The name.
        id: String,
    },
    /// The ledger could not tell where a job stands. Running rollouts were interrupted.
    #[error("the ledger cannot tell about rollout {id}: {reason}")]
    Ledger {
        /// The rollout.
        id: String,
        /// What the ledger said.
        reason: String,
    },
}

/// What became of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchResult {
    /// Results in the order of the jobs. `None`: it was not started before the batch was
    /// cancelled.
    pub rollouts: Vec<Option<Rollout>>,
    /// Attempts of this batch that another attempt superseded.
    pub superseded: Vec<Rollout>,
    /// Counters over all attempts of this batch.
    pub counts: Counts,
    /// Whether the batch was cancelled.
    pub cancelled: bool,
    /// Wall-clock seconds.
    pub seconds: f64,
}

impl BatchResult {
    /// The results that exist, in order.
    pub fn ended(&self) -> impl Iterator<Item = &Rollout> {
        self.rollouts.iter().flatten()
    }
}

impl Runner {
    /// Runs all jobs, at most `concurrency` (at least 1) at a time, in order. Jobs that the ledger
    /// has a result for are taken from it. Cancelling the token stops running rollouts quickly
    /// (`Discard` / `Interrupted`, their sandboxes destroyed) and starts no more. Dropping the
    /// future destroys all its sandboxes; the ledger then has those rollouts as running, and the
    /// next batch with these jobs records them as interrupted and runs them again.
    ///
    /// `progress` is called from this future; it must not block.
    ///
    /// # Errors
    /// [`BatchError`].
    pub async fn run_batch(
        &self,
        jobs: Vec<Job>,
        concurrency: usize,
        cancel: CancellationToken,
        progress: impl Fn(&Event) + Send + Sync,
    ) -> Result<BatchResult, BatchError> {
        let started = Instant::now();
        let mut names = HashSet::new();
        for job in &jobs {
            if !names.insert(&job.spec.id) {
                return Err(BatchError::DuplicateId {
                    id: job.spec.id.to_string(),
                });
            }
        }
        let tally = Mutex::new((Counts::default(), Vec::new()));
        // Stops the others when one cannot go on.
        let stop = cancel.child_token();
        let report = |job: usize, number: u32, rollout: &Rollout, superseded: bool| {
            let event = {
                let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
                match &rollout.disposition {
                    None => {
                        tally.0.started();
                        Some(Event::Started {
                            job,
                            id: rollout.spec.id.clone(),
                            group: rollout.spec.group.clone(),
                            attempt: number,
                        })
                    }
                    Some(disposition) => {
                        tally.0.ended(disposition);
                        if superseded {
                            tally.1.push(rollout.clone());
                        }
                        Event::finished(job, rollout, superseded, false)
                    }
                }
            };
            if let Some(event) = event {
                progress(&event);
            }
        };
        let one = |(index, job): (usize, &Job)| {
            let (stop, report, progress, tally) = (&stop, &report, &progress, &tally);
            let job = job.clone();
            async move {
                if stop.is_cancelled() {
                    return Ok((index, None));
                }
                let standing = self.standing(&job).await.map_err(|reason| {
                    stop.cancel();
                    BatchError::Ledger {
                        id: job.spec.id.to_string(),
                        reason,
                    }
                })?;
                let first = match standing {
                    Standing::Finished(rollout) => {
                        let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
                        tally.0.reused += 1;
                        drop(tally);
                        if let Some(event) = Event::finished(index, &rollout, false, true) {
                            progress(&event);
                        }
                        return Ok((index, Some(*rollout)));
                    }
                    Standing::Next(first) => first,
                };
                let queue_s = started.elapsed().as_secs_f64();
                let watch = |number: u32, rollout: &Rollout, superseded: bool| {
                    report(index, number, rollout, superseded);
                };
                let rollout = self.run_from(&job, first, stop, queue_s, &watch).await;
                Ok((index, Some(rollout)))
            }
        };
        let mut rollouts = vec![None; jobs.len()];
        let mut failure = None;
        let mut running = stream::iter(jobs.iter().enumerate())
            .map(one)
            .buffer_unordered(concurrency.max(1));
        // On a failure the others still drain, so that their ends are recorded.
        while let Some(outcome) = running.next().await {
            match outcome {
                Ok((index, rollout)) => {
                    if let Some(place) = rollouts.get_mut(index) {
                        *place = rollout;
                    }
                }
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        drop(running);
        if let Some(error) = failure {
            return Err(error);
        }
        let (counts, superseded) = tally.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(BatchResult {
            rollouts,
            superseded,
            counts,
            cancelled: cancel.is_cancelled(),
            seconds: started.elapsed().as_secs_f64(),
        })
    }
}
