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
    grpo::{self, Beside, Compute, GrpoSettings, ScoredTree, UpdateMetrics},
    ppo::{self, Critic, RewardedTree},
    settings::PpoSettings,
    sft::{self, SftMetrics},
};

/// Policy, optimiser and version; with PPO a critic, with a KL price a reference.
#[derive(Debug)]
pub struct Embedded {
    weights: Arc<Weights>,
    optimiser: AdamW,
    version: PolicyVersion,
    compute: Compute,
    critic: Option<Critic>,
    reference: Option<Arc<Weights>>,
}

/// One optimiser step of the policy; a norm that is not finite is an error.
fn step_policy(
    optimiser: &mut AdamW,
    weights: &mut Weights,
    gradient: &[f32],
    rate: f32,
) -> Result<f64, LearnError> {
    let step = optimiser.steps;
    let norm = optimiser.step(weights, gradient, rate);
    if norm.is_finite() {
        Ok(norm)
    } else {
        Err(LearnError::NotFinite { step, norm })
    }
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
            critic: None,
            reference: None,
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
            critic: checkpoint::load_critic(folder)?,
            reference: None,
        };
        Ok((learner, state.run_steps))
    }

    /// With a critic, for [`Self::update_ppo`]. A critic that a checkpoint brought stays.
    #[must_use]
    pub fn with_critic(mut self, critic: impl FnOnce(&Weights) -> Critic) -> Self {
        if self.critic.is_none() {
            self.critic = Some(critic(&self.weights));
        }
        self
    }

    /// With a reference policy, for `kl.weight`. It is not part of checkpoints: give it again
    /// after a resume.
    #[must_use]
    pub fn with_reference(mut self, reference: Arc<Weights>) -> Self {
        self.reference = Some(reference);
        self
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

    /// The critic, if there is one.
    #[must_use]
    pub fn critic(&self) -> Option<&Critic> {
        self.critic.as_ref()
    }

    /// A copy of the optimiser, when an update may fail after its first step.
    fn backup(&self, settings: &GrpoSettings) -> Option<AdamW> {
        (settings.minibatches.max(1) * settings.passes.max(1) > 1).then(|| self.optimiser.clone())
    }

    /// One reinforcement-learning update with group advantages. On an error weights and optimiser
    /// are as before.
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
        let backup = self.backup(settings);
        let beside = Beside {
            reference: self.reference.as_deref(),
            version: Some(self.version),
        };
        let optimiser = &mut self.optimiser;
        let found = grpo::update(
            &mut weights,
            trees,
            settings,
            self.compute,
            beside,
            |weights, gradient| step_policy(optimiser, weights, gradient, rate),
        );
        match found {
            Ok(metrics) => {
                self.weights = Arc::new(weights);
                self.version += 1;
                Ok(metrics)
            }
            Err(error) => {
                // With a single step the only failure is before it.
                if let Some(backup) = backup {
                    self.optimiser = backup;
                }
                Err(error)
            }
        }
    }

    /// One PPO update. On an error policy, critic and optimisers are as before.
    ///
    /// # Errors
    /// See [`ppo::update`]; [`LearnError::Batch`] without a critic.
    pub fn update_ppo(
        &mut self,
        trees: &[RewardedTree],
        settings: &GrpoSettings,
        ppo: &PpoSettings,
        rate: f32,
    ) -> Result<UpdateMetrics, LearnError> {
        let Some(mut critic) = self.critic.clone() else {
            return Err(LearnError::Batch(
                "PPO needs a critic; start the learner with one".into(),
            ));
        };
        let warming = critic.updates < ppo.warmup_updates;
        let mut weights = (*self.weights).clone();
        let mut optimiser = self.optimiser.clone();
        let beside = Beside {
            reference: self.reference.as_deref(),
            version: Some(self.version),
        };
        let metrics = ppo::update(
            &mut weights,
            &mut critic,
            trees,
            settings,
            ppo,
            self.compute,
            beside,
            rate,
            |weights, gradient| step_policy(&mut optimiser, weights, gradient, rate),
        )?;
        self.critic = Some(critic);
        if !warming {
            self.weights = Arc::new(weights);
            self.optimiser = optimiser;
            self.version += 1;
        }
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
        checkpoint::save(
            folder,
            &self.weights,
            &self.optimiser,
            &state,
            self.critic.as_ref(),
            also,
        )
    }
}
