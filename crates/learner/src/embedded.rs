//! The learner in this process.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use model::{
    ModelError, Weights,
    adamw::{AdamW, AdamWSettings},
    lora::{Adapter, LoraSettings},
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
    adapted: Option<Adapted>,
}

/// An adapter and the frozen weights below it.
#[derive(Debug, Clone)]
struct Adapted {
    base: Arc<Weights>,
    adapter: Adapter,
}

/// One optimiser step of the policy, or of its adapter; a norm that is not finite is an error.
fn step_policy(
    optimiser: &mut AdamW,
    adapted: Option<&mut Adapted>,
    weights: &mut Weights,
    gradient: &[f32],
    rate: f32,
) -> Result<f64, LearnError> {
    let step = optimiser.steps;
    let norm = match adapted {
        None => optimiser.step(weights, gradient, rate),
        Some(Adapted { base, adapter }) => {
            let own = adapter.gradient(gradient);
            let norm = optimiser.step_plain(&mut adapter.data, &own, rate);
            adapter.merge_into(base, weights);
            norm
        }
    };
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
            adapted: None,
        }
    }

    /// Trains a low-rank adapter on these weights, which stay as they are; the policy is both
    /// merged.
    ///
    /// # Errors
    /// [`LearnError::Model`] when the settings do not fit the weights.
    pub fn adapting(
        base: Arc<Weights>,
        lora: LoraSettings,
        seed: u64,
        optimiser: AdamWSettings,
        compute: Compute,
    ) -> Result<Self, LearnError> {
        let adapter = Adapter::new(&base, lora, seed)?;
        let optimiser = AdamW::new(optimiser, adapter.data.len());
        Ok(Self {
            weights: Arc::clone(&base),
            optimiser,
            version: 0,
            compute,
            critic: None,
            reference: None,
            adapted: Some(Adapted { base, adapter }),
        })
    }

    /// Starts from a checkpoint; also returns the steps of the run that were complete.
    ///
    /// # Errors
    /// See [`checkpoint::load`]; a checkpoint of an adapter needs [`Self::resume_adapting`].
    pub fn resume(folder: &Path, compute: Compute) -> Result<(Self, u64), LearnError> {
        if folder.join(checkpoint::ADAPTER).exists() {
            return Err(LearnError::Checkpoint {
                path: folder.to_owned(),
                reason: "it holds an adapter; resume it with the base that was adapted".into(),
            });
        }
        let (weights, optimiser, state) = checkpoint::load(folder)?;
        Self::from_checkpoint(folder, weights, optimiser, &state, compute)
    }

    /// Starts from a checkpoint of an adapter on `base`.
    ///
    /// # Errors
    /// See [`checkpoint::load`] and [`Adapter::load`].
    pub fn resume_adapting(
        folder: &Path,
        base: Arc<Weights>,
        compute: Compute,
    ) -> Result<(Self, u64), LearnError> {
        let adapter = Adapter::load(&folder.join(checkpoint::ADAPTER), &base)?;
        let (optimiser, state) = checkpoint::load_state_of(folder, adapter.data.len())?;
        let weights = adapter.merged(&base);
        let (mut learner, steps) =
            Self::from_checkpoint(folder, weights, optimiser, &state, compute)?;
        learner.adapted = Some(Adapted { base, adapter });
        Ok((learner, steps))
    }

    fn from_checkpoint(
        folder: &Path,
        weights: Weights,
        optimiser: AdamW,
        state: &State,
        compute: Compute,
    ) -> Result<(Self, u64), LearnError> {
        let learner = Self {
            weights: Arc::new(weights),
            optimiser,
            version: state.policy_version,
            compute,
            critic: checkpoint::load_critic(folder)?,
            reference: None,
            adapted: None,
        };
        Ok((learner, state.run_steps))
    }

    /// Writes the adapter alone, in PEFT's layout; `base` is what PEFT loads the base from.
    ///
    /// # Errors
    /// [`LearnError::Batch`] when there is no adapter; [`LearnError::Model`].
    pub fn save_adapter(&self, folder: &Path, base: &str) -> Result<(), LearnError> {
        let Some(adapted) = &self.adapted else {
            return Err(LearnError::Batch(
                "all weights are trained, there is no adapter to save".into(),
            ));
        };
        adapted.adapter.save(folder, base).map_err(ModelError::into)
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
        let mut adapted = self.adapted.clone();
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
            |weights, gradient| step_policy(optimiser, adapted.as_mut(), weights, gradient, rate),
        );
        match found {
            Ok(metrics) => {
                self.adapted = adapted;
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
        let mut adapted = self.adapted.clone();
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
            |weights, gradient| {
                step_policy(&mut optimiser, adapted.as_mut(), weights, gradient, rate)
            },
        )?;
        self.critic = Some(critic);
        if !warming {
            self.adapted = adapted;
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
        let step = self.optimiser.steps;
        let (optimiser, adapted) = (&mut self.optimiser, self.adapted.as_mut());
        let mut metrics = sft::step_with(
            weights,
            trees,
            context_weight,
            self.compute,
            |weights, gradient| step_policy(optimiser, adapted, weights, gradient, rate),
        )?;
        (metrics.step, metrics.rate) = (step, f64::from(rate));
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
            self.adapted.as_ref().map(|adapted| &adapted.adapter),
            also,
        )
    }
}
