//! A mini-batch and everything that is known about it before its first step.

use model::forest::{self, Ask};
use objective::{
    Branches, Matrix, correction_weights, rejection_mask, token_weights, tree_gae, tree_returns,
};
use tree::{Forest, Target, TrainTree};

use crate::{
    LearnError,
    batch::Batch,
    ppo::Critic,
    settings::{GrpoSettings, KlPlace, Outside},
    terms::Terms,
    update::Plan,
};

/// A mini-batch and what is known about it before its first step. Lists are one entry per term
/// unless said otherwise.
pub(crate) struct Part {
    pub(crate) batch: Batch,
    pub(crate) terms: Terms,
    /// Place of each rollout in the argument of the update.
    pub(crate) rollouts: Vec<usize>,
    /// Advantage or reward of each rollout.
    pub(crate) scores: Vec<f64>,
    /// Of each rollout.
    pub(crate) token_weights: Vec<f64>,
    pub(crate) advantages: Vec<f64>,
    pub(crate) returns: Vec<f64>,
    /// By node and target, as the others below.
    pub(crate) old: Option<Vec<Vec<f32>>>,
    pub(crate) old_values: Option<Vec<Vec<f32>>>,
    pub(crate) reference: Option<Vec<Vec<f32>>>,
    pub(crate) correction: Option<Vec<f32>>,
    /// Mean log-ratio of each rollout, for GSPO after the first step.
    pub(crate) sequence_logs: Option<Vec<f64>>,
}

impl Part {
    pub(crate) fn new(
        trees: &[(&TrainTree, f64)],
        rollouts: Vec<usize>,
        settings: &GrpoSettings,
    ) -> Result<Self, LearnError> {
        let plain: Vec<TrainTree> = rollouts.iter().map(|&at| trees[at].0.clone()).collect();
        let forest = Forest::merge(&plain);
        let scores: Vec<f64> = rollouts.iter().map(|&at| trees[at].1).collect();
        for (score, &rollout) in scores.iter().zip(&rollouts) {
            check_finite(rollout, "its advantage or reward", *score)?;
        }
        for term in forest.nodes.iter().flat_map(|node| &node.terms) {
            let Target::Sampled {
                logprob_sampled, ..
            } = term.target
            else {
                let reason =
                    "a target without a recorded log-probability cannot enter a policy loss (I4)";
                return Err(LearnError::Batch(reason.into()));
            };
            let rollout = rollouts[term.tree as usize];
            let what = "a recorded log-probability";
            check_finite(rollout, what, f64::from(logprob_sampled))?;
        }
        let terms = Terms::new(&forest);
        if terms.places.is_empty() {
            return Err(LearnError::Batch(
                "there is no trainable token in the batch".into(),
            ));
        }
        let token_weights = token_weights(&forest.terms_per_tree(), settings.aggregation);
        Ok(Self {
            batch: Batch::new(forest),
            terms,
            rollouts,
            scores,
            token_weights,
            advantages: Vec::new(),
            returns: Vec::new(),
            old: None,
            old_values: None,
            reference: None,
            correction: None,
            sequence_logs: None,
        })
    }

    /// One entry per term of something that is known by node and target.
    pub(crate) fn by_term(&self, known: Option<&Vec<Vec<f32>>>) -> Vec<f64> {
        let mut list = vec![0.0; self.terms.places.len()];
        let Some(known) = known else {
            return list;
        };
        for (node, targets) in known.iter().enumerate() {
            for (target, value) in targets.iter().enumerate() {
                let first = self.terms.base(node) + self.batch.first_term(node, target);
                for at in 0..self.batch.terms(node, target).len() {
                    list[first + at] = f64::from(*value);
                }
            }
        }
        list
    }

    /// Computes what must be known before the first step.
    pub(crate) fn look(
        &mut self,
        weights: &model::Weights,
        plan: &Plan<'_>,
        critic: Option<&Critic>,
        several_steps: bool,
    ) -> Result<(), LearnError> {
        let settings = plan.settings;
        let with_reference = settings.kl.weight != 0.0;
        let in_reward = with_reference && settings.kl.place == KlPlace::Reward;
        let token_wise = settings.correction.is_token_wise();
        let segments = self.batch.segments();
        let looked = |weights: &model::Weights, ask: Ask<'_>| {
            forest::answer(weights, &segments, &ask, plan.compute)
        };
        let shared = critic.filter(|critic| critic.trunk.is_none());
        let (mut old, mut old_values, mut reference) = (None, None, None);
        if several_steps || !token_wise || in_reward || critic.is_some() {
            let outcome = looked(
                weights,
                Ask {
                    loss: None,
                    values: shared.map(|critic| &critic.head),
                    policy: true,
                },
            )?;
            (old, old_values) = (Some(outcome.logprobs), Some(outcome.values));
        }
        if let Some(critic) = critic
            && let Some((trunk, _)) = &critic.trunk
        {
            let ask = Ask {
                loss: None,
                values: Some(&critic.head),
                policy: false,
            };
            old_values = Some(looked(trunk, ask)?.values);
        }
        if with_reference {
            let Some(weights) = plan.beside.reference else {
                return Err(LearnError::Batch(
                    "kl.weight is not 0 but there is no reference policy; name one or set it to 0"
                        .into(),
                ));
            };
            reference = Some(forest::run(weights, &segments, None, plan.compute)?.logprobs);
        }
        drop(segments);
        (self.old, self.old_values, self.reference) = (old, old_values, reference);
        if !token_wise {
            self.correction = Some(self.correct(settings)?);
        }
        Ok(())
    }

    /// Weights that depend on more than one token.
    fn correct(&self, settings: &GrpoSettings) -> Result<Vec<f32>, LearnError> {
        let correction = &settings.correction;
        let old = self.by_term(self.old.as_ref());
        let gaps = |row: &Vec<usize>| -> Vec<f64> {
            let each = row.iter();
            each.map(|&term| old[term] - f64::from(self.terms.places[term].sampled))
                .collect()
        };
        let rows: Vec<Vec<f64>> = self.terms.rows.iter().map(gaps).collect();
        let (log_ratio, mask) = Matrix::padded(&rows);
        let high = f64::from(settings.importance_max);
        let bounds = match correction.outside {
            Outside::Truncate => objective::Bounds::Truncate(high),
            Outside::Mask => objective::Bounds::Zero {
                low: correction.importance_min,
                high,
            },
        };
        let level = correction.level();
        let weights = correction_weights(&log_ratio, &mask, level, bounds, correction.normalise)
            .map_err(|error| {
                LearnError::Batch(format!(
                    "rollout correction: {error}: nothing is left to train. Do the recorded log-probabilities belong to these weights and this temperature?"
                ))
            })?
            .weights;
        let (kept, _) = rejection_mask(&log_ratio, &mask, &correction.rejections());
        let mut list = vec![0.0; self.terms.places.len()];
        for (tree, (row, logs)) in self.terms.rows.iter().zip(&rows).enumerate() {
            let vetoed = correction
                .veto
                .is_some_and(|veto| logs.iter().any(|log| log.exp() < veto));
            for (column, &term) in row.iter().enumerate() {
                if !vetoed {
                    list[term] = (weights.row(tree)[column] * kept.row(tree)[column]) as f32;
                }
            }
        }
        Ok(list)
    }

    /// Advantages and returns of every term.
    pub(crate) fn judge(&mut self, plan: &Plan<'_>) -> Result<(), LearnError> {
        let kl = &plan.settings.kl;
        let of_tree = |error| LearnError::Batch(format!("advantages: {error}"));
        let prices: Vec<f64> = if kl.weight != 0.0 && kl.place == KlPlace::Reward {
            let old = self.by_term(self.old.as_ref());
            let reference = self.by_term(self.reference.as_ref());
            let pairs = old.iter().zip(&reference);
            pairs
                .map(|(old, reference)| -kl.weight * (old - reference))
                .collect()
        } else {
            Vec::new()
        };
        let values = self.by_term(self.old_values.as_ref());
        let mut advantages = vec![0.0; self.terms.places.len()];
        let mut returns = vec![0.0; advantages.len()];
        for (row, &score) in self.terms.rows.iter().zip(&self.scores) {
            let pick = |list: &[f64]| -> Vec<f64> {
                let each = row.iter().filter_map(|&term| list.get(term));
                each.copied().collect()
            };
            let rewards = pick(&prices);
            if plan.ppo.is_none() && rewards.is_empty() {
                for &term in row {
                    advantages[term] = score;
                }
                continue;
            }
            let before = self.terms.before_in_row(row);
            let branches = Branches {
                before: &before,
                rewards: &rewards,
                terminal: plan.ppo.map_or(0.0, |_| score),
            };
            match plan.ppo {
                Some(ppo) => {
                    let own = pick(&values);
                    let found = tree_gae(&branches, &own, ppo.gamma, ppo.lambda);
                    let (own, back) = found.map_err(of_tree)?;
                    for (at, &term) in row.iter().enumerate() {
                        (advantages[term], returns[term]) = (own[at], back[at]);
                    }
                }
                None => {
                    let to_come = tree_returns(&branches, 1.0).map_err(of_tree)?;
                    for (&term, price) in row.iter().zip(to_come) {
                        advantages[term] = score + price;
                    }
                }
            }
        }
        (self.advantages, self.returns) = (advantages, returns);
        Ok(())
    }

    /// Mean log-ratio of every rollout under the present weights.
    pub(crate) fn measure_sequences(
        &mut self,
        weights: &model::Weights,
        plan: &Plan<'_>,
    ) -> Result<(), LearnError> {
        let segments = self.batch.segments();
        let now = forest::run(weights, &segments, None, plan.compute)?.logprobs;
        let (now, old) = (self.by_term(Some(&now)), self.by_term(self.old.as_ref()));
        let each = self.terms.rows.iter().map(|row| {
            let sum: f64 = row.iter().map(|&term| now[term] - old[term]).sum();
            sum / row.len().max(1) as f64
        });
        self.sequence_logs = Some(each.collect());
        Ok(())
    }
}

fn check_finite(rollout: usize, what: &'static str, value: f64) -> Result<(), LearnError> {
    if value.is_finite() {
        Ok(())
    } else {
        Err(LearnError::Sample {
            rollout,
            what,
            value,
        })
    }
}
