//! The learner in this process.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use model::{
    Weights,
    adamw::{AdamW, AdamWSettings},
};
use record::PolicyVersion;
use tree::TrainTree;

use crate::{
    LearnError,
    checkpoint::{self, State},
    grpo::{self, Compute, GrpoSettings, ScoredTree, UpdateMetrics},
    sft::{self, SftMetrics},
};

/// Policy, optimiser and version.
#[derive(Debug)]
pub struct Embedded {
    weights: Arc<Weights>,
    optimiser: AdamW,
    version: PolicyVersion,
    compute: Compute,
}

impl Embedded {
    /// Starts from weights with a fresh optimiser.
    #[must_use]
    pub fn new(weights: Weights, optimiser: AdamWSettings, compute: Compute) -> Self {
        let optimiser = AdamW::new(optimiser, weights.len());
        Self {
            weights: Arc::new(weights),
            optimiser,
            version: 0,
            compute,
        }
    }

    /// Starts from a checkpoint; also returns the steps of the run that were complete.
    ///
    /// # Errors
    /// See [`checkpoint::load`].
    pub fn resume(folder: &Path, compute: Compute) -> Result<(Self, u64), LearnError> {
        let (weights, optimiser, state) = checkpoint::load(folder)?;
        let learner = Self {
            weights: Arc::new(weights),
            optimiser,
            version: state.policy_version,
            compute,
        };
        Ok((learner, state.run_steps))
    }

    /// The present weights; the copy is made at the next update, while others still hold it.
    #[must_use]
    pub fn weights(&self) -> Arc<Weights> {
        Arc::clone(&self.weights)
    }

    /// Version of the present weights.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// One reinforcement-learning update. On an error the weights are as before.
    ///
    /// # Errors
    /// See [`grpo::update`] and [`LearnError::NotFinite`].
    pub fn update(
        &mut self,
        trees: &[ScoredTree],
        settings: &GrpoSettings,
        rate: f32,
    ) -> Result<UpdateMetrics, LearnError> {
        let mut weights = (*self.weights).clone();
        let optimiser = &mut self.optimiser;
        let metrics = grpo::update(
            &mut weights,
            trees,
            settings,
            self.compute,
            |weights, gradient| {
                let step = optimiser.steps;
                let norm = optimiser.step(weights, gradient, rate);
                if norm.is_finite() {
                    Ok(norm)
                } else {
                    Err(LearnError::NotFinite { step, norm })
                }
            },
        )?;
        self.weights = Arc::new(weights);
        self.version += 1;
        Ok(metrics)
    }

    /// One supervised step.
    ///
    /// # Errors
    /// See [`sft::step`].
    pub fn supervise(
        &mut self,
        trees: &[TrainTree],
        rate: f32,
        context_weight: f32,
    ) -> Result<SftMetrics, LearnError> {
        let weights = Arc::make_mut(&mut self.weights);
        let metrics = sft::step(
            weights,
            &mut self.optimiser,
            trees,
            rate,
            context_weight,
            self.compute,
        )?;
        self.version += 1;
        Ok(metrics)
    }

    /// Writes a checkpoint after `run_steps` complete steps of the run.
    ///
    /// # Errors
    /// See [`checkpoint::save`].
    pub fn save(&self, folder: &Path, run_steps: u64, also: &[PathBuf]) -> Result<(), LearnError> {
        let state = State {
            run_steps,
            policy_version: self.version,
            optimiser_steps: self.optimiser.steps,
            optimiser: self.optimiser.settings.clone(),
        };
        checkpoint::save(folder, &self.weights, &self.optimiser, &state, also)
    }
}
