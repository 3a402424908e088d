//! Many jobs: bounded, results in order, resumable, cancellable.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use futures::{StreamExt, stream::FuturesUnordered};
use record::{Disposition, Fault, Rollout};
use tokio_util::sync::CancellationToken;

use crate::{
    event::{Counts, Event},
    job::Job,
    line::Line,
    places::Places,
    runner::{Runner, Standing, Start},
    warm::Warm,
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
    /// Whether it ended early because it had enough. Results of groups that are not complete are
    /// then left out of `rollouts`.
    pub enough: bool,
    /// The least and the most places to run that there were.
    pub places: (usize, usize),
    /// Wall-clock seconds.
    pub seconds: f64,
}

impl BatchResult {
    /// The results that exist, in order.
    pub fn ended(&self) -> impl Iterator<Item = &Rollout> {
        self.rollouts.iter().flatten()
    }
}

fn ledger_failed(job: &Job, reason: String) -> BatchError {
    BatchError::Ledger {
        id: job.spec.id.to_string(),
        reason,
    }
}

/// Tells the warm sandboxes that a batch is over.
struct Rest<'a> {
    warm: &'a Warm,
    stopped: bool,
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        self.warm.rest(self.stopped);
    }
}

fn interrupted(rollout: &Rollout) -> bool {
    let fault = Fault::Interrupted;
    matches!(&rollout.disposition, Some(Disposition::Discard { fault: own, .. }) if *own == fault)
}

impl Runner {
    /// Runs all jobs, at most `concurrency` (at least 1) at a time, whole groups first. Jobs that
    /// the ledger has a result for are taken from it. Cancelling the token stops running rollouts quickly
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
        self.run_until(jobs, concurrency, None, cancel, progress)
            .await
    }

    /// As [`Runner::run_batch`], until there are `enough` complete groups whose rewards differ. What
    /// still runs is then interrupted, what has not begun is not run, and results of incomplete
    /// groups are left out: what is short would be favoured by them. What is slow still has less
    /// of a chance to be among the first; that is the price of not waiting.
    ///
    /// # Errors
    /// [`BatchError`].
    pub async fn run_until(
        &self,
        jobs: Vec<Job>,
        concurrency: usize,
        enough: Option<usize>,
        cancel: CancellationToken,
        progress: impl Fn(&Event) + Send + Sync,
    ) -> Result<BatchResult, BatchError> {
        let concurrency = concurrency.max(1);
        let pools = &self.settings.pools;
        let create_s = self.settings.stages.create_s;
        let places = Arc::new(Places::new(pools, concurrency, create_s, &self.gauges));
        let mut line = Line::new(&jobs, pools.share(concurrency));
        let has_enough = |line: &Line| enough.is_some_and(|groups| line.usable() >= groups);
        let started = Instant::now();
        let mut names = HashSet::new();
        for job in &jobs {
            if !names.insert(&job.spec.id) {
                return Err(BatchError::DuplicateId {
                    id: job.spec.id.to_string(),
                });
            }
        }
        let keys: Vec<_> = match self.settings.warm.on() {
            true => jobs.iter().map(|job| self.warm_key(job)).collect(),
            false => Vec::new(),
        };
        self.warm.begin(&places, keys.clone());
        // However this future ends.
        let mut rest = Rest {
            warm: &self.warm,
            stopped: true,
        };
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
        let one = |index: usize, job: &Job| {
            let (stop, report, progress, tally) = (&stop, &report, &progress, &tally);
            let (job, places) = (job.clone(), &places);
            let key = keys.get(index).and_then(Option::as_ref);
            let claim = key.and_then(|(key, _)| self.warm.claim(key));
            async move {
                if stop.is_cancelled() {
                    return Ok((index, None));
                }
                let failed = |reason| {
                    stop.cancel();
                    ledger_failed(&job, reason)
                };
                let first = match self.standing(&job).await.map_err(failed)? {
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
                let start = Start {
                    queue_s,
                    places,
                    claim,
                };
                let rollout = self.run_from(&job, first, stop, start, &watch).await;
                Ok((index, Some(rollout)))
            }
        };
        let mut rollouts = vec![None; jobs.len()];
        if enough.is_some() {
            // A resumed batch may have had enough before.
            for (index, job) in jobs.iter().enumerate() {
                let standing = self.standing(job).await;
                let standing = standing.map_err(|reason| ledger_failed(job, reason))?;
                if let Standing::Finished(rollout) = standing {
                    line.known(index, &rollout);
                    let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
                    tally.0.reused += 1;
                    drop(tally);
                    if let Some(event) = Event::finished(index, &rollout, false, true) {
                        progress(&event);
                    }
                    rollouts[index] = Some(*rollout);
                }
            }
        }
        let mut failure = None;
        let mut running = FuturesUnordered::new();
        loop {
            if has_enough(&line) {
                stop.cancel();
            }
            // Those beyond the places to run stand ready.
            while running.len() < concurrency.saturating_add(pools.ready) && !stop.is_cancelled() {
                let Some(index) = line.next() else { break };
                let Some(job) = jobs.get(index) else { break };
                running.push(one(index, job));
            }
            self.warm.look(&self.provider);
            // On a failure the others still drain, so that their ends are recorded.
            match running.next().await {
                None => break,
                Some(Ok((index, rollout))) => {
                    let result = rollout.as_ref().filter(|rollout| !interrupted(rollout));
                    line.ended(index, result);
                    if let Some(place) = rollouts.get_mut(index) {
                        *place = rollout;
                    }
                }
                Some(Err(error)) => failure = failure.or(Some(error)),
            }
        }
        drop(running);
        if let Some(error) = failure {
            return Err(error);
        }
        rest.stopped = cancel.is_cancelled();
        let enough = has_enough(&line) && !cancel.is_cancelled();
        if enough {
            for (index, rollout) in rollouts.iter_mut().enumerate() {
                if !line.complete(index) {
                    *rollout = None;
                }
            }
        }
        let (counts, superseded) = tally.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(BatchResult {
            rollouts,
            superseded,
            counts,
            cancelled: cancel.is_cancelled(),
            enough,
            places: places.range(),
            seconds: started.elapsed().as_secs_f64(),
        })
    }
}
