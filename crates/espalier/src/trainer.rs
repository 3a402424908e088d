//! The learner as a recipe wants it: GRPO or PPO, all weights or an adapter, with a reference
//! policy where the loss asks for one; checkpoints, of which the last and the best are kept.

use std::{path::Path, sync::Arc};

use codec::Codec;
use learner::{
    LearnError,
    grpo::{Compute, ScoredTree, UpdateMetrics},
    keep,
    ppo::{Critic, RewardedTree},
};
use model::Weights;
use record::PolicyVersion;
use tree::Target;

use crate::{
    error::CliError,
    policy,
    recipe::{CriticPlace, Recipe},
    run_dir::RunDir,
    training::Judged,
};

/// Learner of a run.
pub(crate) struct Trainer {
    learner: learner::Embedded,
}

impl Trainer {
    /// From the recipe's policy, or from a checkpoint of the run. Also returns the steps of the
    /// run that are complete.
    pub(crate) fn open(
        recipe: &Recipe,
        codec: &Codec,
        checkpoint: Option<&Path>,
        compute: Compute,
    ) -> Result<(Self, u64), CliError> {
        let train = &recipe.train;
        let load = |folder: &Path| policy::load_weights(folder, codec).map(Arc::new);
        let failed = |error: LearnError| CliError::failed("the learner", error);
        let (mut learner, steps) = match (checkpoint, &train.lora) {
            (Some(folder), lora) => {
                let resumed = if lora.is_some() {
                    let base = load(&recipe.policy.folder)?;
                    learner::Embedded::resume_adapting(folder, base, compute)
                } else {
                    learner::Embedded::resume(folder, compute)
                };
                resumed.map_err(|error| {
                    CliError::failed(format!("checkpoint {}", folder.display()), error)
                })?
            }
            (None, None) => {
                let weights = policy::load_weights(&recipe.policy.folder, codec)?;
                let optimiser = train.optimiser.clone();
                (learner::Embedded::new(weights, optimiser, compute), 0)
            }
            (None, Some(lora)) => {
                let (base, optimiser) = (load(&recipe.policy.folder)?, train.optimiser.clone());
                let learner = learner::Embedded::adapting(
                    base,
                    lora.clone(),
                    recipe.seed,
                    optimiser,
                    compute,
                );
                (learner.map_err(failed)?, 0)
            }
        };
        if let Some(ppo) = &train.ppo {
            let optimiser = ppo.optimiser.clone();
            learner = learner.with_critic(|policy: &Weights| match ppo.critic {
                CriticPlace::Shared => Critic::shared(policy, optimiser),
                CriticPlace::Separate => Critic::separate(policy, optimiser),
            });
        }
        if train.grpo.kl.weight != 0.0 {
            let folder = train.reference.as_ref().unwrap_or(&recipe.policy.folder);
            learner = learner.with_reference(load(folder)?);
        }
        Ok((Self { learner }, steps))
    }

    /// The present weights.
    pub(crate) fn weights(&self) -> Arc<Weights> {
        self.learner.weights()
    }

    /// Their version; it stays during the warm-up of a critic.
    pub(crate) fn version(&self) -> PolicyVersion {
        self.learner.version()
    }

    /// The batch without tokens that are more than so many versions old, and how many those are.
    pub(crate) fn fresh(
        &self,
        mut batch: Vec<Judged>,
        staleness_max: Option<u64>,
    ) -> (Vec<Judged>, u64) {
        let Some(most) = staleness_max else {
            return (batch, 0);
        };
        let oldest = self.version().saturating_sub(most);
        let mut stale = 0;
        for judged in &mut batch {
            stale += judged.tree.retain(|target| match target {
                Target::Sampled { version, .. } => *version >= oldest,
                Target::Supervised => true,
            }) as u64;
        }
        batch.retain(|judged| judged.tree.terms() > 0);
        (batch, stale)
    }

    /// One update at a learning rate.
    pub(crate) fn update(
        &mut self,
        batch: Vec<Judged>,
        recipe: &Recipe,
        rate: f32,
    ) -> Result<UpdateMetrics, LearnError> {
        let train = &recipe.train;
        let batch = batch.into_iter();
        if let Some(ppo) = &train.ppo {
            let trees: Vec<RewardedTree> = batch
                .map(|Judged { tree, reward, .. }| RewardedTree { tree, reward })
                .collect();
            return self
                .learner
                .update_ppo(&trees, &train.grpo, &ppo.settings, rate);
        }
        let trees: Vec<ScoredTree> = batch
            .map(|judged| ScoredTree {
                tree: judged.tree,
                advantage: judged.advantage,
            })
            .collect();
        self.learner.update(&trees, &train.grpo, rate)
    }

    /// Writes the checkpoint of a step and removes those that are not to be kept.
    pub(crate) fn save(&self, dir: &RunDir, step: u64, recipe: &Recipe) -> Result<(), CliError> {
        let failed = |error| CliError::failed("the checkpoint", error);
        let folder = dir.checkpoint(step);
        self.learner
            .save(&folder, step, &policy::text_files(&recipe.policy.folder))
            .map_err(failed)?;
        if let (true, Some(all)) = (recipe.train.keep_last > 0, folder.parent()) {
            keep::prune(all, recipe.train.keep_last).map_err(failed)?;
        }
        Ok(())
    }

    /// Notes what the checkpoint of a step scored; whether it is the best so far.
    pub(crate) fn note_score(dir: &RunDir, step: u64, score: f64) -> Result<bool, CliError> {
        let folder = dir.checkpoint(step);
        let (Some(all), Some(name)) = (folder.parent(), folder.file_name()) else {
            return Ok(false);
        };
        keep::note_score(all, &name.to_string_lossy(), score)
            .map_err(|error| CliError::failed("the note of the best checkpoint", error))
    }
}
