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
    device::Device,
    forest::{self, ValueHead},
};
use objective::{Aggregation, KlEstimator};

mod rows;
#[path = "../support/mod.rs"]
mod support;

use rows::*;
use support::weights;

const COMPUTE: forest::Settings = forest::Settings {
    threads: 2,
    block_tokens_max: 24,
    temperature: 0.9,
    recompute: false,
    device: Device::CPU,
};

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
