//! PPO on trees. The critic is a linear head on the policy's own trunk, or on a trunk of its own;
//! it is asked at every trained token for the reward still to come before that token is drawn.
//!
//! The reward of a rollout is paid at the last generated token of each of its branches, and
//! advantages come from [`objective::tree_gae`]: with γ = λ = 1, the default, R − V at every token.
//! They are whitened over the whole batch, one vote per term.
//!
//! Values and log-probabilities of a token are those of the row that predicts it, so siblings
//! below one fork share the value of the state in which the fork happens, and its gradient is the
//! sum over them.

use model::{
    Weights,
    adamw::{AdamW, AdamWSettings},
    forest::ValueHead,
};
use tree::TrainTree;

use crate::{
    LearnError,
    grpo::{Beside, Compute, GrpoSettings},
    metrics::UpdateMetrics,
    settings::PpoSettings,
    update::{Plan, Steps, go},
};

/// A rollout's kept tree and its reward.
#[derive(Debug, Clone)]
pub struct RewardedTree {
    /// What to train on.
    pub tree: TrainTree,
    /// Its final reward.
    pub reward: f64,
}

/// What predicts rewards.
#[derive(Debug, Clone)]
pub struct Critic {
    /// The head.
    pub head: ValueHead,
    /// Its optimiser.
    pub optimiser: AdamW,
    /// A trunk of its own with its optimiser; without one it sits on the policy's.
    pub trunk: Option<(Weights, AdamW)>,
    /// Updates made, for the warm-up.
    pub updates: u64,
}

impl Critic {
    /// A head on the policy's trunk: the value loss trains the trunk too.
    #[must_use]
    pub fn shared(policy: &Weights, optimiser: AdamWSettings) -> Self {
        let head = ValueHead::zeros(policy.config.hidden_size);
        Self {
            optimiser: AdamW::new(optimiser, head.data.len()),
            head,
            trunk: None,
            updates: 0,
        }
    }

    /// A head on a trunk of its own, which starts as a copy of the policy.
    #[must_use]
    pub fn separate(policy: &Weights, optimiser: AdamWSettings) -> Self {
        let trunk = AdamW::new(optimiser.clone(), policy.len());
        Self {
            trunk: Some((policy.clone(), trunk)),
            ..Self::shared(policy, optimiser)
        }
    }
}

/// One PPO update; `step` applies a gradient to the policy and returns its norm, the critic is
/// stepped here at `rate`. During the warm-up `step` is not called. On an error the critic may
/// have moved: [`crate::Embedded::update_ppo`] puts both back.
///
/// # Errors
/// See [`crate::grpo::update`].
#[expect(
    clippy::too_many_arguments,
    reason = "policy, critic and data, each of another owner"
)]
pub fn update(
    weights: &mut Weights,
    critic: &mut Critic,
    trees: &[RewardedTree],
    settings: &GrpoSettings,
    ppo: &PpoSettings,
    compute: Compute,
    beside: Beside<'_>,
    rate: f32,
    mut step: impl FnMut(&mut Weights, &[f32]) -> Result<f64, LearnError>,
) -> Result<UpdateMetrics, LearnError> {
    let scored: Vec<(&TrainTree, f64)> = trees
        .iter()
        .map(|rewarded| (&rewarded.tree, rewarded.reward))
        .collect();
    let plan = Plan {
        settings,
        compute,
        beside,
        ppo: Some(ppo),
    };
    let own_rate = rate * ppo.rate_factor;
    let mut step_critic = |critic: &mut Critic, head: &[f32], trunk: Option<&[f32]>| {
        let mut square = 0.0;
        if let (Some((weights, optimiser)), Some(gradient)) = (&mut critic.trunk, trunk) {
            let norm = optimiser.step(weights, gradient, own_rate);
            finite(norm, optimiser.steps)?;
            square += norm * norm;
        }
        let norm = critic
            .optimiser
            .step_plain(&mut critic.head.data, head, own_rate);
        finite(norm, critic.optimiser.steps)?;
        Ok((square + norm * norm).sqrt())
    };
    let metrics = go(
        weights,
        &scored,
        &plan,
        Some(critic),
        &mut Steps {
            policy: &mut step,
            critic: &mut step_critic,
        },
    )?;
    critic.updates += 1;
    Ok(metrics)
}

fn finite(norm: f64, step: u64) -> Result<(), LearnError> {
    if norm.is_finite() {
        Ok(())
    } else {
        Err(LearnError::NotFinite { step, norm })
    }
}
