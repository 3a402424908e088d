//! The steps of a training run: rollouts, then an update, again and again.
//!
//! A step *produces* a batch (draw, roll out, judge) and *learns* from it (update, new weights into
//! the engine, records). With `train.ahead = 0` one follows the other, and the same seed gives the
//! same bits. With `train.ahead = 1` the rollouts of the next step run while the learner works: the
//! engine gets the new weights in the middle of them, each token keeps the version that drew it,
//! and the importance weights of the update correct for the difference. What is drawn is the same
//! either way: draws depend on the results of earlier rollouts, not on weights.
//!
//! Records are written in the order of steps. On Ctrl-C an update that runs is finished and
//! recorded, and every finished rollout is in the ledger.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use engine::{Engine, embedded};
use learner::grpo::UpdateMetrics;
use record::PolicyVersion;
use serde::{Deserialize, Serialize};
use task::Task;
use tokio_util::sync::CancellationToken;

use crate::{
    curriculum::{self, Curriculum},
    display::{self, Display},
    error::CliError,
    lab::{Lab, Plan},
    recipe::Recipe,
    run_dir::RunDir,
    summary::Sums,
    tensorboard::Events,
    trainer::Trainer,
    training::{self, Harvest, Judged},
};

/// A line of `metrics.jsonl`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StepMetrics {
    pub(crate) step: u64,
    #[serde(flatten)]
    pub(crate) harvest: serde_json::Value,
    update: Option<UpdateMetrics>,
    /// Generated tokens that were left out because of `train.staleness_max`.
    #[serde(default)]
    tokens_stale: u64,
    policy_version: PolicyVersion,
    pub(crate) rollout_s: f64,
    pub(crate) train_s: f64,
}

/// A step's rollouts, judged.
struct Batch {
    step: u64,
    judged: Vec<Judged>,
    harvest: Harvest,
    rollout_s: f64,
}

/// A step's update.
struct Learned {
    step: u64,
    harvest: Harvest,
    /// `None`: there was nothing to learn.
    update: Option<UpdateMetrics>,
    tokens_stale: u64,
    version: PolicyVersion,
    rollout_s: f64,
    train_s: f64,
}

/// Everything that steps need.
pub(crate) struct Steps<'a> {
    pub(crate) recipe: &'a Recipe,
    pub(crate) dir: &'a RunDir,
    pub(crate) lab: &'a Lab,
    pub(crate) tasks: &'a [Arc<Task>],
    pub(crate) engine: &'a embedded::Embedded,
    pub(crate) trainer: Arc<Mutex<Trainer>>,
    pub(crate) display: &'a Display,
    pub(crate) cancel: &'a CancellationToken,
}

/// What grows from step to step.
pub(crate) struct Record<'a> {
    pub(crate) sums: &'a mut Sums,
    pub(crate) events: Events,
    /// Steps of this process and when the first began, for the time that is left.
    pub(crate) made: u64,
    pub(crate) began: Instant,
}

impl Steps<'_> {
    /// Makes the steps `first..steps`; `after` is awaited after each, while nothing else runs.
    /// Returns whether it was cancelled.
    pub(crate) async fn run(
        &self,
        first: u64,
        curriculum: &mut Curriculum,
        record: &mut Record<'_>,
        mut after: impl AsyncFnMut(u64, &mut Sums) -> Result<(), CliError>,
    ) -> Result<bool, CliError> {
        let mut waiting: Option<Batch> = None;
        for step in first..self.recipe.train.steps {
            let produced = match waiting.take() {
                None => self.produce(step, curriculum).await,
                Some(batch) => {
                    let (produced, learned) =
                        tokio::join!(self.produce(step, curriculum), self.learn(batch));
                    let learned = learned?;
                    let done = learned.step + 1;
                    self.record(learned, record)?;
                    after(done, record.sums).await?;
                    produced
                }
            };
            let Some(batch) = produced? else {
                return Ok(true);
            };
            if self.recipe.train.ahead > 0 {
                waiting = Some(batch);
            } else {
                let learned = self.learn(batch).await?;
                self.record(learned, record)?;
                after(step + 1, record.sums).await?;
            }
        }
        if let Some(batch) = waiting {
            let learned = self.learn(batch).await?;
            let done = learned.step + 1;
            self.record(learned, record)?;
            after(done, record.sums).await?;
        }
        Ok(false)
    }

    /// `None` when it was cancelled.
    async fn produce(
        &self,
        step: u64,
        curriculum: &mut Curriculum,
    ) -> Result<Option<Batch>, CliError> {
        let (train, steps) = (&self.recipe.train, self.recipe.train.steps);
        let started = Instant::now();
        let pairs: Vec<_> = curriculum
            .draw(step, train.tasks_per_step)
            .into_iter()
            .map(|pair| (Arc::clone(&self.tasks[pair.task]), pair.harness))
            .collect();
        let plan = Plan {
            split: "train",
            step,
            samples: train.samples,
            temperature: self.recipe.rollout.temperature,
        };
        let jobs = self.lab.jobs_of(&pairs, plan)?;
        let title = format!("step {}/{steps}", step + 1);
        let enough = (train.groups_enough > 0).then_some(train.groups_enough);
        let result = self
            .lab
            .run_until(jobs, enough, &title, self.display, self.cancel)
            .await?;
        if result.cancelled {
            return Ok(None);
        }
        let rollouts: Vec<_> = result.ended().collect();
        let (judged, mut harvest) = training::harvest(&self.lab.ledger, &rollouts, train)?;
        harvest.families = curriculum::tally(&rollouts, self.tasks);
        curriculum.observe(&harvest.families);
        Ok(Some(Batch {
            step,
            judged,
            harvest,
            rollout_s: started.elapsed().as_secs_f64(),
        }))
    }

    async fn learn(&self, batch: Batch) -> Result<Learned, CliError> {
        let started = Instant::now();
        let Batch {
            step,
            judged,
            harvest,
            rollout_s,
        } = batch;
        let trainer = Arc::clone(&self.trainer);
        let recipe = self.recipe.clone();
        // A thread of its own: gateway and sandboxes go on meanwhile.
        let work = tokio::task::spawn_blocking(move || {
            let mut trainer = trainer.lock().unwrap_or_else(PoisonError::into_inner);
            let (judged, stale) = trainer.fresh(judged, recipe.train.staleness_max);
            // Named in the step's line: every group had equal rewards, or nothing was captured.
            let update = if judged.is_empty() {
                Ok(None)
            } else {
                let rate = recipe.train.rate.rate(step, recipe.train.steps);
                trainer.update(judged, &recipe, rate).map(Some)
            };
            (update, stale, trainer.weights(), trainer.version())
        });
        let (update, tokens_stale, weights, version) = work
            .await
            .map_err(|error| CliError::failed("the learner's thread", error))?;
        let update = update
            .map_err(|error| CliError::failed(format!("step {}: the update", step + 1), error))?;
        // The first updates of PPO may move the critic alone.
        if version != self.engine.policy_version() {
            self.engine
                .set_weights(weights, version)
                .map_err(|error| CliError::failed("the engine refused the new weights", error))?;
        }
        Ok(Learned {
            step,
            harvest,
            update,
            tokens_stale,
            version,
            rollout_s,
            train_s: started.elapsed().as_secs_f64(),
        })
    }

    /// Writes down what a step did, its checkpoint included when one is due.
    fn record(&self, learned: Learned, record: &mut Record<'_>) -> Result<(), CliError> {
        let Learned {
            step,
            harvest,
            update,
            rollout_s,
            train_s,
            ..
        } = &learned;
        let (done, steps) = (step + 1, self.recipe.train.steps);
        record.sums.add(harvest, *rollout_s, *train_s);
        self.dir.append_metrics(&StepMetrics {
            step: *step,
            harvest: serde_json::to_value(harvest).unwrap_or_default(),
            update: *update,
            tokens_stale: learned.tokens_stale,
            policy_version: learned.version,
            rollout_s: *rollout_s,
            train_s: *train_s,
        })?;
        let numbers = update.as_ref();
        record
            .events
            .append_step(done, harvest, numbers, *rollout_s, *train_s)?;
        if evaluation_due(self.recipe, done)
            || done % self.recipe.train.checkpoint_every == 0
            || done == steps
        {
            let trainer = self.trainer.lock().unwrap_or_else(PoisonError::into_inner);
            trainer.save(self.dir, done, self.recipe)?;
        }
        record.made += 1;
        let left =
            record.began.elapsed().as_secs_f64() / record.made as f64 * (steps - done) as f64;
        self.display.line(&line(&learned, steps, left));
        Ok(())
    }
}

/// Whether held-out tasks are to be tried after so many steps, between the first and the last.
pub(crate) fn evaluation_due(recipe: &Recipe, done: u64) -> bool {
    let every = recipe.eval.every;
    every > 0 && done > 0 && done.is_multiple_of(every) && done < recipe.train.steps
}

fn line(learned: &Learned, steps: u64, left: f64) -> String {
    let harvest = &learned.harvest;
    let dropped =
        harvest.dispositions.get("discard").copied().unwrap_or(0) + harvest.over_branched as u64;
    let forks: u64 = harvest.forks.values().sum();
    let update = learned.update.as_ref();
    let did = update.map_or_else(
        || "nothing to learn (all groups equal)".to_owned(),
        |update| {
            format!(
                "entropy {:.3}  |grad| {:.2}",
                update.entropy, update.gradient_norm
            )
        },
    );
    let stale = match learned.tokens_stale {
        0 => String::new(),
        tokens => format!("  stale {tokens}"),
    };
    let by_harness = curriculum::by_harness(&harvest.families);
    let by_harness = match by_harness.len() {
        0 | 1 => String::new(),
        _ => by_harness
            .iter()
            .map(|(name, tally)| format!("  {name} {:.1} %", 100.0 * tally.passed / tally.voted))
            .collect(),
    };
    format!(
        "step {:>3}/{steps}  pass {:5.1} %{by_harness}  reward {:.3}  groups {}-{}  tokens {}k/{}k/{}k{stale}  forks {forks}  drops {dropped}  {did}  {:.1}s + {:.1}s  eta {}",
        learned.step + 1,
        100.0 * harvest.pass,
        harvest.reward,
        harvest.groups,
        harvest.groups_zero_variance,
        harvest.tokens_captured / 1000,
        harvest.tokens_unique / 1000,
        harvest.tokens_trained / 1000,
        learned.rollout_s,
        learned.train_s,
        display::seconds(left)
    )
}
