//! One pass over a mini-batch: the loss of every term, gradients, metrics.

use model::forest::{self, Ask, Objective, Outcome, Point, Slopes};
use objective::{PolicyLoss, clipped_token, kl_token, policy_token, truncated_weight, value_token};

use crate::{
    LearnError,
    metrics::{Seen, Tally},
    part::Part,
    ppo::Critic,
    settings::{KlPlace, Loss},
    update::Plan,
};

/// What a pass found.
pub(crate) struct Passed {
    pub(crate) gradient: Vec<f32>,
    pub(crate) value_gradient: Vec<f32>,
    pub(crate) critic_gradient: Option<Vec<f32>>,
    pub(crate) tally: Tally,
}

/// One term's loss: what is measured, and the derivatives.
struct TermLoss {
    seen: Seen,
    logprob: f64,
    value: f64,
}

/// Constants of a pass.
struct Lens<'a> {
    plan: &'a Plan<'a>,
    policy: PolicyLoss,
    /// The critic alone is trained.
    warming: bool,
}

impl Part {
    /// Visits the terms of one target.
    fn visit(
        &self,
        lens: &Lens<'_>,
        node: usize,
        target: usize,
        point: Point,
        to: &mut dyn FnMut(TermLoss),
    ) {
        let settings = lens.plan.settings;
        let logprob = point.logprob;
        let at = |known: &Option<Vec<Vec<f32>>>| known.as_ref().map(|k| k[node][target]);
        let old = at(&self.old).unwrap_or(logprob);
        let old_value = f64::from(at(&self.old_values).unwrap_or(point.value));
        let reference = at(&self.reference);
        let first = self.terms.base(node) + self.batch.first_term(node, target);
        for index in first..first + self.batch.terms(node, target).len() {
            let place = &self.terms.places[index];
            let advantage = self.advantages[index];
            let (loss, slope, clipped) = match settings.loss {
                Loss::Clipped => {
                    let t = clipped_token(logprob, old, advantage as f32, &settings.clip);
                    (f64::from(t.loss), f64::from(t.gradient), t.clipped)
                }
                _ => {
                    let log = self.sequence_logs.as_ref().map_or(0.0, |l| l[place.tree]);
                    let (new, old) = (f64::from(logprob), f64::from(old));
                    let t = policy_token(&lens.policy, new, old, advantage, log);
                    (t.loss, t.slope, t.clipped)
                }
            };
            let correction = match &self.correction {
                Some(weights) => weights[index],
                None if settings.correction.apply => {
                    truncated_weight(old, place.sampled, settings.importance_max)
                }
                None => 1.0,
            };
            let weight = self.token_weights[place.tree];
            let scale = weight * f64::from(correction);
            let mut term = TermLoss {
                seen: Seen {
                    loss: scale * loss,
                    clipped,
                    truncated: correction >= settings.importance_max,
                    gap: f64::from(place.sampled - old),
                    moved: f64::from(old - logprob),
                    correction: f64::from(correction),
                    reference_kl: 0.0,
                    advantage,
                    staleness: lens
                        .plan
                        .beside
                        .version
                        .map_or(0.0, |now| now.saturating_sub(place.version) as f64),
                    value_loss: 0.0,
                    value_clipped: false,
                    class: place.class,
                },
                logprob: scale * slope,
                value: 0.0,
            };
            if let Some(reference) = reference {
                let kl = &settings.kl;
                let (new, reference) = (f64::from(logprob), f64::from(reference));
                let (value, slope) = kl_token(new, reference, kl.estimator, kl.straight_through);
                term.seen.reference_kl = value;
                if kl.place == KlPlace::Loss {
                    term.seen.loss += weight * kl.weight * value;
                    term.logprob += weight * kl.weight * slope;
                }
            }
            if settings.entropy_weight != 0.0 {
                term.seen.loss -= weight * settings.entropy_weight * f64::from(point.entropy);
            }
            if let Some(ppo) = lens.plan.ppo {
                let value = f64::from(point.value);
                let (loss, slope, held) =
                    value_token(value, old_value, self.returns[index], ppo.value_clip);
                (term.seen.value_loss, term.seen.value_clipped) = (loss, held);
                term.seen.loss += weight * ppo.value_weight * loss;
                term.value = weight * ppo.value_weight * slope;
            }
            if lens.warming {
                term.logprob = 0.0;
            }
            to(term);
        }
    }

    /// Gradients and metrics under the present weights.
    pub(crate) fn pass(
        &self,
        weights: &model::Weights,
        plan: &Plan<'_>,
        critic: Option<&Critic>,
        warming: bool,
    ) -> Result<Passed, LearnError> {
        let lens = Lens {
            plan,
            policy: plan.settings.policy_loss(),
            warming,
        };
        let entropy_weight = if warming {
            0.0
        } else {
            plan.settings.entropy_weight
        };
        let slopes = |node: usize, target: usize, point: Point| {
            let (mut logprob, mut entropy, mut value) = (0.0, 0.0, 0.0);
            self.visit(&lens, node, target, point, &mut |term| {
                logprob += term.logprob;
                value += term.value;
            });
            if entropy_weight != 0.0 {
                for term in self.batch.terms(node, target) {
                    entropy -= entropy_weight * self.token_weights[term.tree as usize];
                }
            }
            Slopes {
                logprob: logprob as f32,
                entropy: entropy as f32,
                value: value as f32,
            }
        };
        let segments = self.batch.segments();
        let own = critic.and_then(|critic| critic.trunk.as_ref().map(|(trunk, _)| (critic, trunk)));
        let policy_loss: &Objective<'_> = &slopes;
        // The policy's own forest, unless only a critic elsewhere is trained.
        let shared = critic.filter(|critic| critic.trunk.is_none());
        let mut outcome = forest::answer(
            weights,
            &segments,
            &Ask {
                loss: (!warming || shared.is_some()).then_some(policy_loss),
                values: shared.map(|critic| &critic.head),
                policy: true,
            },
            plan.compute,
        )?;
        let mut critic_gradient = None;
        if let Some((critic, trunk)) = own {
            let ask = Ask {
                loss: Some(policy_loss),
                values: Some(&critic.head),
                policy: false,
            };
            let values = forest::answer(trunk, &segments, &ask, plan.compute)?;
            outcome.values = values.values;
            outcome.value_gradient = values.value_gradient;
            critic_gradient = Some(values.gradient);
        }
        let tally = self.tally(&lens, &outcome)?;
        Ok(Passed {
            gradient: outcome.gradient,
            value_gradient: outcome.value_gradient,
            critic_gradient,
            tally,
        })
    }

    fn tally(&self, lens: &Lens<'_>, outcome: &Outcome) -> Result<Tally, LearnError> {
        let mut tally = Tally::default();
        for (node, logprobs) in outcome.logprobs.iter().enumerate() {
            for (target, &logprob) in logprobs.iter().enumerate() {
                let point = Point {
                    logprob,
                    entropy: outcome.entropies[node][target],
                    value: outcome.values[node][target],
                };
                let mut broken = None;
                let mut tree = self.batch.terms(node, target).iter().map(|term| term.tree);
                self.visit(lens, node, target, point, &mut |term| {
                    let tree = tree.next().unwrap_or(0);
                    for (what, value) in [
                        ("a log-probability", f64::from(point.logprob)),
                        ("a value", f64::from(point.value)),
                        ("a token's loss", term.seen.loss),
                    ] {
                        if !value.is_finite() && broken.is_none() {
                            broken = Some((self.rollouts[tree as usize], what, value));
                        }
                    }
                    tally.add(&term.seen, f64::from(point.entropy));
                });
                if let Some((rollout, what, value)) = broken {
                    return Err(LearnError::Sample {
                        rollout,
                        what,
                        value,
                    });
                }
            }
        }
        let stats = self.batch.forest.stats();
        tally.sums.tokens_logical = stats.tokens_logical;
        tally.sums.tokens_unique = stats.tokens_unique;
        Ok(tally)
    }
}
