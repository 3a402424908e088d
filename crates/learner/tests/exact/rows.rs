//! The same training computed from rows alone: the rollouts, and what each of their tokens is trained
//! with.

use learner::{
    grpo::GrpoSettings,
    settings::{KlPlace, Loss, PpoSettings},
};
use model::{
    Weights,
    forest::{self, Ask, Point, Segment, Slopes, ValueHead},
};
use objective::{
    Aggregation, Matrix, PolicyLoss, gae, kl_token, policy_token, truncated_weight, value_token,
};
use tree::{Target, TrainTree};

use super::COMPUTE;

/// A rollout as plain data: nodes of (parent, tokens, which of them were generated).
pub(crate) type Nodes = Vec<(Option<usize>, Vec<u32>, Vec<bool>)>;

pub(crate) struct Rollout {
    pub(crate) nodes: Nodes,
    pub(crate) score: f64,
    pub(crate) logprob: f32,
}

/// Forks inside a response and below another fork, a beginning that all share, a token that two
/// rollouts generated alike, a single node, tool output between replies, an advantage of zero.
pub(crate) fn rollouts() -> Vec<Rollout> {
    let yes = |count: usize| vec![true; count];
    let no = |count: usize| vec![false; count];
    vec![
        Rollout {
            nodes: vec![
                (None, vec![1, 2, 3, 4], no(4)),
                (Some(0), vec![5, 6], yes(2)),
                (Some(1), vec![7, 20, 21, 9], vec![true, false, false, true]),
                (Some(1), vec![8, 10, 11], yes(3)),
                (Some(3), vec![12], yes(1)),
                (Some(3), vec![13, 14], yes(2)),
            ],
            score: 1.0,
            logprob: -2.5,
        },
        Rollout {
            nodes: vec![(
                None,
                vec![1, 2, 3, 4, 5, 6, 15],
                vec![false, false, false, false, true, true, true],
            )],
            score: -0.5,
            logprob: -3.5,
        },
        Rollout {
            nodes: vec![
                (None, vec![1, 2, 16], no(3)),
                (Some(0), vec![17, 18], yes(2)),
                (Some(0), vec![19, 22], yes(2)),
            ],
            score: 0.25,
            logprob: -1.5,
        },
        Rollout {
            nodes: vec![(None, vec![1, 2, 23, 24], vec![false, false, true, true])],
            score: 0.0,
            logprob: -3.0,
        },
    ]
}

pub(crate) fn train_tree(rollout: &Rollout) -> TrainTree {
    let mut tree = TrainTree::new();
    for (node, (parent, tokens, generated)) in rollout.nodes.iter().enumerate() {
        let targets = generated.iter().enumerate().map(|(at, on)| {
            on.then(|| Target::Sampled {
                logprob_model: rollout.logprob,
                logprob_sampled: recorded(rollout, node, at),
                version: 0,
            })
        });
        tree.push(*parent, tokens.clone(), targets.collect())
            .unwrap();
    }
    tree
}

/// A different one for every token, so that corrections differ.
pub(crate) fn recorded(rollout: &Rollout, node: usize, at: usize) -> f32 {
    rollout.logprob + 0.3 * ((node * 5 + at * 3) % 7) as f32 - 0.9
}

/// A branch: for each token its node and offset.
pub(crate) fn branches(rollout: &Rollout) -> Vec<Vec<(usize, usize)>> {
    let leaf = |node: &usize| {
        !rollout
            .nodes
            .iter()
            .any(|(parent, _, _)| *parent == Some(*node))
    };
    let leaves = (0..rollout.nodes.len()).filter(leaf);
    leaves
        .map(|leaf| {
            let mut chain = vec![leaf];
            while let Some(up) = rollout.nodes[chain[chain.len() - 1]].0 {
                chain.push(up);
            }
            let nodes = chain.into_iter().rev();
            nodes
                .flat_map(|node| (0..rollout.nodes[node].1.len()).map(move |at| (node, at)))
                .collect()
        })
        .collect()
}

/// What every generated token is trained with, computed from rows alone.
pub(crate) struct Token {
    pub(crate) old: f32,
    pub(crate) old_value: f32,
    pub(crate) reference: f32,
    pub(crate) advantage: f64,
    pub(crate) back: f64,
}

/// Known tokens of a rollout by node and offset.
pub(crate) type Known = std::collections::BTreeMap<(usize, usize), Token>;

/// One row: a branch as a sequence of its own.
pub(crate) fn ask_row(
    weights: &Weights,
    head: Option<&ValueHead>,
    rollout: &Rollout,
    branch: &[(usize, usize)],
    loss: Option<&forest::Objective<'_>>,
) -> (Vec<u32>, forest::Outcome) {
    let row: Vec<u32> = branch
        .iter()
        .map(|(node, at)| rollout.nodes[*node].1[*at])
        .collect();
    let targets: Vec<u32> = (0..branch.len() as u32)
        .filter(|at| {
            let (node, offset) = branch[*at as usize];
            rollout.nodes[node].2[offset]
        })
        .collect();
    let segments = [Segment {
        parent: None,
        tokens: &row,
        targets: &targets,
    }];
    let ask = Ask {
        loss,
        values: head,
        policy: true,
    };
    let outcome = forest::answer(weights, &segments, &ask, COMPUTE).unwrap();
    (targets, outcome)
}

/// Old log-probabilities, values and advantages of all rollouts, row by row.
pub(crate) fn known(
    weights: &Weights,
    head: Option<&ValueHead>,
    reference: &Weights,
    all: &[Rollout],
    settings: &GrpoSettings,
    ppo: Option<&PpoSettings>,
) -> Vec<Known> {
    let mut list: Vec<Known> = Vec::new();
    for rollout in all {
        let mut tokens = Known::new();
        let mut counts: std::collections::BTreeMap<(usize, usize), f64> = Default::default();
        for branch in branches(rollout) {
            let (targets, outcome) = ask_row(weights, head, rollout, &branch, None);
            let (_, of_reference) = ask_row(reference, None, rollout, &branch, None);
            let to = |values: Vec<f64>| Matrix::from_rows(&[values]).unwrap();
            let count = targets.len();
            let in_reward = settings.kl.weight != 0.0 && settings.kl.place == KlPlace::Reward;
            let mut rewards: Vec<f64> = (0..count)
                .map(|i| {
                    let price =
                        f64::from(outcome.logprobs[0][i]) - f64::from(of_reference.logprobs[0][i]);
                    if in_reward {
                        -settings.kl.weight * price
                    } else {
                        0.0
                    }
                })
                .collect();
            if ppo.is_some() {
                *rewards.last_mut().unwrap() += rollout.score;
            }
            let values: Vec<f64> = match ppo {
                Some(_) => outcome.values[0]
                    .iter()
                    .map(|value| f64::from(*value))
                    .collect(),
                None => vec![0.0; count],
            };
            let (gamma, lambda) = ppo.map_or((1.0, 1.0), |ppo| (ppo.gamma, ppo.lambda));
            let mask = to(vec![1.0; count]);
            let (advantages, _) = gae(&to(rewards), &to(values), &mask, gamma, lambda);
            for (i, target) in targets.iter().enumerate() {
                let key = branch[*target as usize];
                let own = advantages.row(0)[i] + if ppo.is_some() { 0.0 } else { rollout.score };
                *counts.entry(key).or_default() += 1.0;
                tokens
                    .entry(key)
                    .or_insert(Token {
                        old: outcome.logprobs[0][i],
                        old_value: outcome.values[0][i],
                        reference: of_reference.logprobs[0][i],
                        advantage: 0.0,
                        back: 0.0,
                    })
                    .advantage += own;
            }
        }
        for (key, token) in &mut tokens {
            token.advantage /= counts[key];
            token.back = token.advantage + f64::from(token.old_value);
        }
        list.push(tokens);
    }
    if ppo.is_some_and(|ppo| ppo.whiten) {
        let all: Vec<f64> = list
            .iter()
            .flat_map(|tokens| tokens.values().map(|t| t.advantage))
            .collect();
        let count = all.len() as f64;
        let mean = all.iter().sum::<f64>() / count;
        let variance = all.iter().map(|a| (a - mean).powi(2)).sum::<f64>() / (count - 1.0);
        for token in list.iter_mut().flat_map(|tokens| tokens.values_mut()) {
            token.advantage = (token.advantage - mean) / (variance + 1e-8).sqrt();
        }
    }
    list
}

/// Loss and gradients, row by row: each token is trained on the first branch that holds it.
pub(crate) fn on_rows(
    weights: &Weights,
    head: Option<&ValueHead>,
    all: &[Rollout],
    known: &[Known],
    settings: &GrpoSettings,
    ppo: Option<&PpoSettings>,
) -> (f64, Vec<f32>, Vec<f32>) {
    let tokens: usize = known.iter().map(Known::len).sum();
    let mut gradient = vec![0.0; weights.len()];
    let mut value_gradient = vec![0.0; head.map_or(0, |head| head.data.len())];
    let total = std::sync::Mutex::new(0.0);
    let (low, high) = (f64::from(settings.clip.low), f64::from(settings.clip.high));
    let kind = match settings.loss {
        Loss::Clipped => PolicyLoss::Clipped {
            low,
            high,
            dual: settings.clip.dual.map(f64::from),
        },
        Loss::Gspo => PolicyLoss::Sequence { low, high },
        Loss::Cispo => PolicyLoss::Weighted { low, high },
        Loss::ImportanceWeighted => PolicyLoss::Ratio,
        Loss::Reinforce => PolicyLoss::Plain,
    };
    for (rollout, known) in all.iter().zip(known) {
        let weight = match settings.aggregation {
            Aggregation::TokenMean => 1.0 / tokens as f64,
            Aggregation::RolloutMean => 1.0 / (all.len() * known.len()) as f64,
            Aggregation::RolloutSum => 1.0 / all.len() as f64,
            Aggregation::Fixed(divisor) => 1.0 / divisor,
        };
        // GSPO's ratio needs the rollout's other tokens first.
        let mut seen = std::collections::BTreeSet::new();
        let mut sum = 0.0;
        for branch in branches(rollout) {
            let (targets, outcome) = ask_row(weights, head, rollout, &branch, None);
            for (i, target) in targets.iter().enumerate() {
                let key = branch[*target as usize];
                if seen.insert(key) {
                    sum += f64::from(outcome.logprobs[0][i]) - f64::from(known[&key].old);
                }
            }
        }
        let sequence_log = sum / known.len() as f64;
        let mut seen = std::collections::BTreeSet::new();
        for branch in branches(rollout) {
            let fresh: Vec<bool> = branch
                .iter()
                .map(|key| known.contains_key(key) && seen.insert(*key))
                .collect();
            let targets: Vec<usize> = (0..branch.len())
                .filter(|at| known.contains_key(&branch[*at]))
                .collect();
            let loss = |_: usize, index: usize, point: Point| {
                let at = targets[index];
                if !fresh[at] {
                    return Slopes::default();
                }
                let (node, offset) = branch[at];
                let token = &known[&branch[at]];
                let own = policy_token(
                    &kind,
                    f64::from(point.logprob),
                    f64::from(token.old),
                    token.advantage,
                    sequence_log,
                );
                let correction = f64::from(truncated_weight(
                    token.old,
                    recorded(rollout, node, offset),
                    settings.importance_max,
                ));
                let (mut loss, mut slope) = (
                    weight * correction * own.loss,
                    weight * correction * own.slope,
                );
                if settings.kl.weight != 0.0 && settings.kl.place == KlPlace::Loss {
                    let (value, by) = kl_token(
                        f64::from(point.logprob),
                        f64::from(token.reference),
                        settings.kl.estimator,
                        settings.kl.straight_through,
                    );
                    loss += weight * settings.kl.weight * value;
                    slope += weight * settings.kl.weight * by;
                }
                loss -= weight * settings.entropy_weight * f64::from(point.entropy);
                let mut value = 0.0;
                if let Some(ppo) = ppo {
                    let (l, s, _) = value_token(
                        f64::from(point.value),
                        f64::from(token.old_value),
                        token.back,
                        ppo.value_clip,
                    );
                    loss += weight * ppo.value_weight * l;
                    value = weight * ppo.value_weight * s;
                }
                *total.lock().unwrap() += loss;
                Slopes {
                    logprob: slope as f32,
                    entropy: (-weight * settings.entropy_weight) as f32,
                    value: value as f32,
                }
            };
            let (_, outcome) = ask_row(weights, head, rollout, &branch, Some(&loss));
            model::kernel::add(&mut gradient, &outcome.gradient);
            model::kernel::add(&mut value_gradient, &outcome.value_gradient);
        }
    }
    (total.into_inner().unwrap(), gradient, value_gradient)
}
