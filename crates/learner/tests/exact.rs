//! Training on the forest is training on rows: over five optimiser steps the loss, every gradient
//! and every weight agree, whatever the loss, the correction and the critic.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use learner::{
    grpo::{Beside, GrpoSettings, ScoredTree, UpdateMetrics},
    ppo::{self, Critic, RewardedTree},
    settings::{KlPlace, KlSettings, Loss, PpoSettings},
};
use model::{
    Weights,
    adamw::{AdamW, AdamWSettings},
    config::{Config, Family},
    forest::{self, Ask, Point, Segment, Slopes, ValueHead},
};
use objective::{
    Aggregation, KlEstimator, Matrix, PolicyLoss, gae, kl_token, policy_token, truncated_weight,
    value_token,
};
use tree::{Target, TrainTree};

const COMPUTE: forest::Settings = forest::Settings {
    threads: 2,
    block_tokens_max: 24,
    temperature: 0.9,
    recompute: false,
};

fn weights(seed: u64) -> Weights {
    let config = Config {
        model_type: Family::Qwen3,
        vocab_size: 31,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        max_position_embeddings: 128,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        rope_scaling: None,
        tie_word_embeddings: true,
    };
    let mut weights = Weights::random(config, seed);
    for tensor in weights.layout.tensors.iter().filter(|tensor| tensor.decays) {
        for value in &mut weights.data[tensor.range.clone()] {
            *value *= 6.0;
        }
    }
    weights
}

/// A rollout as plain data: nodes of (parent, tokens, which of them were generated).
type Nodes = Vec<(Option<usize>, Vec<u32>, Vec<bool>)>;

struct Rollout {
    nodes: Nodes,
    score: f64,
    logprob: f32,
}

/// Forks inside a response and below another fork, a beginning that all share, a token that two
/// rollouts generated alike, a single node, tool output between replies, an advantage of zero.
fn rollouts() -> Vec<Rollout> {
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

fn train_tree(rollout: &Rollout) -> TrainTree {
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
fn recorded(rollout: &Rollout, node: usize, at: usize) -> f32 {
    rollout.logprob + 0.3 * ((node * 5 + at * 3) % 7) as f32 - 0.9
}

/// A branch: for each token its node and offset.
fn branches(rollout: &Rollout) -> Vec<Vec<(usize, usize)>> {
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
struct Token {
    old: f32,
    old_value: f32,
    reference: f32,
    advantage: f64,
    back: f64,
}

/// Known tokens of a rollout by node and offset.
type Known = std::collections::BTreeMap<(usize, usize), Token>;

/// One row: a branch as a sequence of its own.
fn ask_row(
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
fn known(
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
fn on_rows(
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

fn assert_close(a: &[f32], b: &[f32], tolerance: f32, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let scale = b.iter().fold(1e-3_f32, |m, v| m.max(v.abs()));
    for (at, (x, y)) in a.iter().zip(b).enumerate() {
        assert!(
            (x - y).abs() <= tolerance * scale,
            "{what} at {at}: {x} and {y} (largest {scale})"
        );
    }
}

const PASSES: usize = 5;

/// Five optimiser steps on one batch, both ways. A comparison of weights after steps of Adam has
/// no meaning for a parameter whose gradient is rounding only, hence a floor under its root.
fn compare(settings: GrpoSettings, ppo: Option<PpoSettings>) -> UpdateMetrics {
    let optimiser = AdamWSettings {
        epsilon: 1e-3,
        ..AdamWSettings::default()
    };
    let rate = 5e-3;
    let settings = GrpoSettings {
        passes: PASSES,
        ..settings
    };
    let all = rollouts();
    let reference = weights(8);
    let start = weights(3);
    let head = ppo.map(|_| {
        let mut head = ValueHead::zeros(16);
        for (i, value) in head.data.iter_mut().enumerate() {
            *value = 0.05 * ((i % 5) as f32 - 2.0);
        }
        head
    });

    // Rows.
    let facts = known(
        &start,
        head.as_ref(),
        &reference,
        &all,
        &settings,
        ppo.as_ref(),
    );
    let (mut row_weights, mut row_head) = (start.clone(), head.clone());
    let mut row_adam = AdamW::new(optimiser.clone(), start.len());
    let mut head_adam = AdamW::new(optimiser.clone(), 17);
    let mut expected = Vec::new();
    for _ in 0..PASSES {
        let (loss, gradient, value_gradient) = on_rows(
            &row_weights,
            row_head.as_ref(),
            &all,
            &facts,
            &settings,
            ppo.as_ref(),
        );
        row_adam.step(&mut row_weights, &gradient, rate);
        if let (Some(head), Some(ppo)) = (&mut row_head, &ppo) {
            head_adam.step_plain(&mut head.data, &value_gradient, rate * ppo.rate_factor);
        }
        expected.push((loss, gradient));
    }

    // Forest.
    let mut adam = AdamW::new(optimiser.clone(), start.len());
    let mut tree_weights = start.clone();
    let beside = Beside {
        reference: Some(&reference),
        version: Some(4),
    };
    let mut gradients = Vec::new();
    let step = |weights: &mut Weights, gradient: &[f32]| {
        gradients.push(gradient.to_vec());
        Ok(adam.step(weights, gradient, rate))
    };
    let metrics = match (&ppo, head) {
        (Some(ppo), Some(head)) => {
            let trees: Vec<RewardedTree> = all
                .iter()
                .map(|rollout| RewardedTree {
                    tree: train_tree(rollout),
                    reward: rollout.score,
                })
                .collect();
            let mut critic = Critic {
                head,
                ..Critic::shared(&start, optimiser)
            };
            let metrics = ppo::update(
                &mut tree_weights,
                &mut critic,
                &trees,
                &settings,
                ppo,
                COMPUTE,
                beside,
                rate,
                step,
            )
            .unwrap();
            assert_close(
                &critic.head.data,
                &row_head.unwrap().data,
                1e-5,
                "value head",
            );
            assert_eq!(critic.updates, 1);
            metrics
        }
        _ => {
            let trees: Vec<ScoredTree> = all
                .iter()
                .map(|rollout| ScoredTree {
                    tree: train_tree(rollout),
                    advantage: rollout.score,
                })
                .collect();
            learner::grpo::update(&mut tree_weights, &trees, &settings, COMPUTE, beside, step)
                .unwrap()
        }
    };
    assert_eq!(gradients.len(), PASSES);
    for (step, (found, (_, wanted))) in gradients.iter().zip(&expected).enumerate() {
        assert_close(
            found,
            wanted,
            1e-5,
            &format!("{settings:?}: gradient of step {step}"),
        );
    }
    let loss = expected.iter().map(|(loss, _)| loss).sum::<f64>() / PASSES as f64;
    assert!(
        (metrics.loss - loss).abs() <= 1e-5 * (0.1 + loss.abs()),
        "{} and {loss}",
        metrics.loss
    );
    assert_close(&tree_weights.data, &row_weights.data, 1e-5, "weights");
    assert!(metrics.tokens_unique < metrics.tokens_logical);
    assert_eq!(metrics.staleness, 4.0);
    metrics
}

#[test]
fn every_loss_over_five_steps() {
    for loss in [
        Loss::Clipped,
        Loss::Gspo,
        Loss::Cispo,
        Loss::ImportanceWeighted,
        Loss::Reinforce,
    ] {
        for aggregation in [Aggregation::TokenMean, Aggregation::RolloutMean] {
            compare(
                GrpoSettings {
                    loss,
                    aggregation,
                    ..GrpoSettings::default()
                },
                None,
            );
        }
    }
    let clip = objective::Clip {
        dual: Some(1.05),
        ..objective::Clip::default()
    };
    compare(
        GrpoSettings {
            clip,
            aggregation: Aggregation::Fixed(40.0),
            ..GrpoSettings::default()
        },
        None,
    );
}

#[test]
fn kl_and_entropy_over_five_steps() {
    for (estimator, straight_through) in [
        (KlEstimator::K1, false),
        (KlEstimator::K2, false),
        (KlEstimator::K3, false),
        (KlEstimator::K3, true),
    ] {
        let kl = KlSettings {
            weight: 0.1,
            estimator,
            straight_through,
            place: KlPlace::Loss,
        };
        let metrics = compare(
            GrpoSettings {
                kl,
                entropy_weight: 0.05,
                ..GrpoSettings::default()
            },
            None,
        );
        assert!(metrics.reference_kl != 0.0);
    }
    let kl = KlSettings {
        weight: 0.1,
        place: KlPlace::Reward,
        ..KlSettings::default()
    };
    compare(
        GrpoSettings {
            kl,
            aggregation: Aggregation::RolloutSum,
            ..GrpoSettings::default()
        },
        None,
    );
}

#[test]
fn ppo_over_five_steps() {
    for (gamma, lambda, whiten) in [(1.0, 1.0, true), (0.95, 0.9, false), (1.0, 0.0, false)] {
        let ppo = PpoSettings {
            gamma,
            lambda,
            whiten,
            rate_factor: 2.0,
            ..PpoSettings::default()
        };
        let metrics = compare(GrpoSettings::default(), Some(ppo));
        assert!(metrics.value_loss > 0.0 && metrics.value_gradient_norm > 0.0);
        let kl = KlSettings {
            weight: 0.05,
            place: KlPlace::Reward,
            ..KlSettings::default()
        };
        compare(
            GrpoSettings {
                kl,
                ..GrpoSettings::default()
            },
            Some(ppo),
        );
    }
}

/// A branch whose rollout has advantage 0 contributes nothing: the gradient is the same to the
/// bit as with any other advantage scaled by 0, and its own tokens get none.
#[test]
fn advantage_zero_contributes_nothing() {
    let all = rollouts();
    let gradient = |trees: Vec<ScoredTree>| {
        let mut found = Vec::new();
        let settings = GrpoSettings {
            aggregation: Aggregation::Fixed(10.0),
            ..GrpoSettings::default()
        };
        learner::grpo::update(
            &mut weights(3),
            &trees,
            &settings,
            COMPUTE,
            Beside::default(),
            |_, gradient| {
                found = gradient.to_vec();
                Ok(0.0)
            },
        )
        .unwrap();
        found
    };
    let scored = |rollout: &Rollout| ScoredTree {
        tree: train_tree(rollout),
        advantage: rollout.score,
    };
    let with = gradient(all.iter().map(scored).collect());
    let without = gradient(
        all.iter()
            .filter(|rollout| rollout.score != 0.0)
            .map(scored)
            .collect(),
    );
    assert_close(&with, &without, 1e-6, "gradient");
    let alone = gradient(
        all.iter()
            .filter(|rollout| rollout.score == 0.0)
            .map(scored)
            .collect(),
    );
    assert!(alone.iter().all(|value| *value == 0.0));
}
