//! What every reinforcement-learning update does: parts of the batch as forests, what must be
//! known before the first step, passes with a gradient, stop rules, steps.

use objective::Matrix;
use tree::TrainTree;

use crate::{
    LearnError,
    grpo::{Beside, Compute},
    metrics::{Tally, UpdateMetrics, explained},
    part::Part,
    ppo::Critic,
    settings::{GrpoSettings, Loss, PpoSettings},
};

/// What an update is made with.
pub(crate) struct Plan<'a> {
    pub(crate) settings: &'a GrpoSettings,
    pub(crate) compute: Compute,
    pub(crate) beside: Beside<'a>,
    pub(crate) ppo: Option<&'a PpoSettings>,
}

/// Applies a gradient and returns its norm.
pub(crate) type PolicyStep<'s> =
    dyn FnMut(&mut model::Weights, &[f32]) -> Result<f64, LearnError> + 's;
/// The same for a critic: gradient of the head, and of its own trunk if it has one.
pub(crate) type CriticStep<'s> =
    dyn FnMut(&mut Critic, &[f32], Option<&[f32]>) -> Result<f64, LearnError> + 's;

/// Who applies gradients.
pub(crate) struct Steps<'s> {
    pub(crate) policy: &'s mut PolicyStep<'s>,
    pub(crate) critic: &'s mut CriticStep<'s>,
}

/// See [`crate::grpo::update`] and [`crate::ppo::update`].
pub(crate) fn go(
    weights: &mut model::Weights,
    trees: &[(&TrainTree, f64)],
    plan: &Plan<'_>,
    mut critic: Option<&mut Critic>,
    steps: &mut Steps<'_>,
) -> Result<UpdateMetrics, LearnError> {
    let settings = plan.settings;
    let minibatches = settings.minibatches.clamp(1, trees.len().max(1));
    let passes = settings.passes.max(1);
    let mut parts: Vec<Part> = Vec::new();
    for part in 0..minibatches {
        // Dealt out like cards, so that every part sees every group.
        let own: Vec<usize> = (part..trees.len()).step_by(minibatches).collect();
        parts.push(Part::new(trees, own, settings)?);
    }
    let several_steps = minibatches * passes > 1;
    for part in &mut parts {
        part.look(weights, plan, critic.as_deref(), several_steps)?;
    }
    let value_explained = judge(&mut parts, plan)?;
    let warming = plan
        .ppo
        .zip(critic.as_deref())
        .is_some_and(|(ppo, critic)| critic.updates < ppo.warmup_updates);
    let mut total = Tally::default();
    'passes: for _ in 0..passes {
        for part in &mut parts {
            if settings.loss == Loss::Gspo && total.sums.optimiser_steps > 0 {
                part.measure_sequences(weights, plan)?;
            }
            let found = part.pass(weights, plan, critic.as_deref(), warming)?;
            if rules(&found.tally, settings)? {
                total.sums.steps_skipped =
                    (minibatches * passes) as u64 - total.sums.optimiser_steps;
                break 'passes;
            }
            let norm = if warming {
                0.0
            } else {
                (steps.policy)(weights, &found.gradient)?
            };
            let mut value_norm = 0.0;
            if let Some(critic) = critic.as_deref_mut() {
                let trunk = found.critic_gradient.as_deref();
                value_norm = (steps.critic)(critic, &found.value_gradient, trunk)?;
            }
            total.merge(&found.tally, norm, value_norm);
        }
    }
    let mut metrics = total.finish();
    metrics.value_explained = value_explained;
    Ok(metrics)
}

/// Stop rules; whether the rest of the batch is left out.
fn rules(tally: &Tally, settings: &GrpoSettings) -> Result<bool, LearnError> {
    let (stop, sums) = (&settings.stop, &tally.sums);
    let mean = |sum: f64| sum / sums.terms.max(1) as f64;
    let stopped = |rule, found, limit, advice| {
        Err(LearnError::Stopped {
            rule,
            found,
            limit,
            advice,
        })
    };
    if let Some(limit) = stop.rollout_gap
        && mean(sums.rollout_gap) > limit
    {
        let advice =
            "Engine and learner disagree: check temperature, filters and the engine's weights";
        return stopped("rollout_gap", mean(sums.rollout_gap), limit, advice);
    }
    if let Some(limit) = stop.entropy_min
        && mean(sums.entropy) < limit
    {
        let advice = "The policy has collapsed: go back to a checkpoint, lower the learning rate or set entropy_weight";
        return stopped("entropy_min", mean(sums.entropy), limit, advice);
    }
    if let Some(limit) = stop.reference_kl
        && mean(sums.reference_kl) > limit
    {
        let advice =
            "The policy has left the reference: raise kl.weight or lower the learning rate";
        return stopped("reference_kl", mean(sums.reference_kl), limit, advice);
    }
    Ok(stop.step_kl.is_some_and(|limit| mean(tally.moved) > limit))
}

/// Gives every term its advantage (and return), and whitens over all parts when PPO asks for it.
/// Returns the explained variance of the values.
fn judge(parts: &mut [Part], plan: &Plan<'_>) -> Result<f64, LearnError> {
    let (mut values, mut returns) = (Vec::new(), Vec::new());
    for part in parts.iter_mut() {
        part.judge(plan)?;
        if plan.ppo.is_some() {
            values.extend(part.by_term(part.old_values.as_ref()));
            returns.extend_from_slice(&part.returns);
        }
    }
    if plan.ppo.is_some_and(|ppo| ppo.whiten) {
        let all: Vec<f64> = parts
            .iter()
            .flat_map(|part| part.advantages.iter().copied())
            .collect();
        let (row, mask) = Matrix::padded(&[all]);
        let white = row.masked_whiten(&mask, true);
        let mut rest = white.values().iter();
        for advantage in parts.iter_mut().flat_map(|part| &mut part.advantages) {
            *advantage = rest.next().copied().unwrap_or(0.0);
        }
    }
    Ok(explained(&values, &returns))
}
