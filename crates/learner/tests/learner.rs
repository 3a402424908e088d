//! The learner as a whole: exactness of updates, resumption, refusal of what must not be trained.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod support;

use learner::{
    Embedded, LearnError,
    grpo::{Beside, GrpoSettings, ScoredTree},
    sft,
};
use model::{
    Weights,
    adamw::AdamWSettings,
    device::Device,
    forest::{self, Segment},
};
use objective::{Aggregation, clipped_token, truncated_weight};
use proptest::prelude::*;
use support::weights;
use tree::{Target, TrainTree};

fn sampled(logprob: f32) -> Target {
    Target::Sampled {
        logprob_model: logprob,
        logprob_sampled: logprob,
        version: 0,
    }
}

/// A rollout of two branches below a common prompt: prompt, then two replies, the second of which
/// starts like the first.
fn rollout(tokens: &[u32], logprob: f32) -> TrainTree {
    let mut tree = TrainTree::new();
    let (prompt, rest) = tokens.split_at(4);
    let (first, second) = rest.split_at(rest.len() / 2);
    let root = tree.push(None, prompt.to_vec(), vec![None; 4]).unwrap();
    for reply in [first, second] {
        tree.push(
            Some(root),
            reply.to_vec(),
            vec![Some(sampled(logprob)); reply.len()],
        )
        .unwrap();
    }
    tree
}

fn batches() -> impl Strategy<Value = Vec<(Vec<u32>, f32, f64)>> {
    let tokens = prop::collection::vec(0_u32..31, 8..20).prop_map(|mut tokens| {
        // All rollouts of a batch begin alike, as with a harness's system prompt.
        tokens[..3].copy_from_slice(&[1, 2, 3]);
        tokens
    });
    prop::collection::vec((tokens, -6.0_f32..-0.5, -2.0_f64..2.0), 1..5)
}

const COMPUTE: forest::Settings = forest::Settings {
    threads: 2,
    block_tokens_max: 24,
    temperature: 0.9,
    recompute: false,
    device: Device::CPU,
};

/// The loss of a batch as plainly as it can be said: row by row, token by token.
fn plain_gradient(
    weights: &Weights,
    batch: &[(Vec<u32>, f32, f64)],
    settings: &GrpoSettings,
) -> Vec<f32> {
    let terms = |tokens: &[u32]| tokens.len() - 4;
    let all: usize = batch.iter().map(|(tokens, _, _)| terms(tokens)).sum();
    let mut gradient = vec![0.0; weights.len()];
    for (tokens, rollout, advantage) in batch {
        let (prompt, rest) = tokens.split_at(4);
        let (first, second) = rest.split_at(rest.len() / 2);
        for reply in [first, second] {
            let row = [prompt, reply].concat();
            let targets: Vec<u32> = (4..row.len() as u32).collect();
            let segments = [Segment {
                parent: None,
                tokens: &row,
                targets: &targets,
            }];
            let loss = |_: usize, _: usize, logprob: f32| {
                let weight = match settings.aggregation {
                    Aggregation::TokenMean => 1.0 / all as f64,
                    Aggregation::RolloutMean => 1.0 / (batch.len() * terms(tokens)) as f64,
                    other => panic!("{other:?}"),
                };
                let token = clipped_token(logprob, logprob, *advantage as f32, &settings.clip);
                let correction = truncated_weight(logprob, *rollout, settings.importance_max);
                (weight * f64::from(correction) * f64::from(token.gradient)) as f32
            };
            let one = forest::run(weights, &segments, Some(&loss), COMPUTE).unwrap();
            for (sum, value) in gradient.iter_mut().zip(one.gradient) {
                *sum += value;
            }
        }
    }
    gradient
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    /// The update over the merged forest has the gradient of the plain loss over rows (I3): forks
    /// and shared beginnings change nothing.
    #[test]
    fn the_forest_update_is_the_plain_loss(batch in batches(), by_rollout in any::<bool>()) {
        let weights = weights(3);
        let aggregation = if by_rollout { Aggregation::RolloutMean } else { Aggregation::TokenMean };
        let settings = GrpoSettings { aggregation, ..GrpoSettings::default() };
        let trees: Vec<ScoredTree> = batch
            .iter()
            .map(|(tokens, logprob, advantage)| ScoredTree { tree: rollout(tokens, *logprob), advantage: *advantage })
            .collect();
        let mut found = Vec::new();
        let mut moving = weights.clone();
        let metrics = learner::grpo::update(&mut moving, &trees, &settings, COMPUTE, Beside::default(), |_, gradient| {
            found = gradient.to_vec();
            Ok(0.0)
        }).unwrap();
        let expected = plain_gradient(&weights, &batch, &settings);
        let scale = expected.iter().fold(1e-3_f32, |m, v| m.max(v.abs()));
        for (a, b) in found.iter().zip(&expected) {
            prop_assert!((a - b).abs() <= 2e-5 * scale, "{} and {} (largest {})", a, b, scale);
        }
        let terms: usize = batch.iter().map(|(tokens, _, _)| tokens.len() - 4).sum();
        prop_assert_eq!(metrics.terms, terms as u64);
        prop_assert!(metrics.tokens_unique <= metrics.tokens_logical);
    }
}

fn some_trees() -> Vec<ScoredTree> {
    (0..6_u32)
        .map(|i| {
            let tokens: Vec<u32> = (0..14)
                .map(|t| if t < 4 { t } else { (t * 7 + i * 5) % 31 })
                .collect();
            ScoredTree {
                tree: rollout(&tokens, -3.0),
                advantage: f64::from(i) - 2.5,
            }
        })
        .collect()
}

#[test]
fn a_resumed_run_goes_on_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let settings = GrpoSettings {
        minibatches: 2,
        passes: 2,
        ..GrpoSettings::default()
    };
    let trees = some_trees();
    let mut straight = Embedded::new(weights(1), AdamWSettings::default(), COMPUTE);
    straight.update(&trees, &settings, 1e-3).unwrap();
    straight.save(&folder.path().join("step"), 1, &[]).unwrap();
    // A second save to the same place replaces the first.
    straight.save(&folder.path().join("step"), 1, &[]).unwrap();
    let metrics = straight.update(&trees, &settings, 1e-3).unwrap();
    assert_eq!(metrics.optimiser_steps, 4);
    let (mut resumed, steps) = Embedded::resume(&folder.path().join("step"), COMPUTE).unwrap();
    assert_eq!((steps, resumed.version()), (1, 1));
    resumed.update(&trees, &settings, 1e-3).unwrap();
    assert_eq!(resumed.weights().data, straight.weights().data);
    assert_eq!(resumed.version(), 2);
    let names: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names, ["step"], "nothing half-written stays behind");
}

#[test]
fn damaged_checkpoints_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("step");
    Embedded::new(weights(1), AdamWSettings::default(), COMPUTE)
        .save(&place, 0, &[])
        .unwrap();
    std::fs::write(place.join("state.json"), "{").unwrap();
    let error = Embedded::resume(&place, COMPUTE).unwrap_err().to_string();
    assert!(error.contains("state.json"), "{error}");
    std::fs::remove_file(place.join("optimiser.safetensors")).unwrap();
    Embedded::new(weights(1), AdamWSettings::default(), COMPUTE)
        .save(&place, 0, &[])
        .unwrap();
    std::fs::write(place.join("optimiser.safetensors"), [0; 40]).unwrap();
    let error = Embedded::resume(&place, COMPUTE).unwrap_err().to_string();
    assert!(error.contains("optimiser.safetensors"), "{error}");
}

#[test]
fn tokens_without_log_probabilities_are_refused_by_rl() {
    let mut learner = Embedded::new(weights(1), AdamWSettings::default(), COMPUTE);
    let before = learner.weights();
    let tree = some_trees().remove(0).tree.into_supervised();
    let error = learner
        .update(
            &[ScoredTree {
                tree,
                advantage: 1.0,
            }],
            &GrpoSettings::default(),
            1e-3,
        )
        .unwrap_err();
    assert!(matches!(error, LearnError::Batch(_)), "{error}");
    assert!(learner.update(&[], &GrpoSettings::default(), 1e-3).is_err());
    assert_eq!(learner.weights().data, before.data);
    assert_eq!(learner.version(), 0);
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    let mut learner = Embedded::new(weights(1), AdamWSettings::default(), COMPUTE);
    let before = learner.weights();
    let mut trees = some_trees();
    trees[0].advantage = f64::NAN;
    let error = learner
        .update(&trees, &GrpoSettings::default(), 1e-3)
        .unwrap_err();
    assert!(
        matches!(error, LearnError::Sample { rollout: 0, .. }),
        "{error}"
    );
    assert_eq!(learner.weights().data, before.data);
}

#[test]
fn updates_raise_what_was_rewarded_and_lower_what_was_not() {
    let mut learner = Embedded::new(weights(2), AdamWSettings::default(), COMPUTE);
    let tokens: Vec<Vec<u32>> = vec![
        vec![1, 2, 3, 4, 9, 10, 11, 12],
        vec![1, 2, 3, 4, 20, 21, 22, 23],
    ];
    let logprobs = |learner: &Embedded, tokens: &[u32]| -> f32 {
        let targets = [4, 5];
        let segments = [Segment {
            parent: None,
            tokens: &tokens[..6],
            targets: &targets,
        }];
        forest::run(&learner.weights(), &segments, None, COMPUTE)
            .unwrap()
            .logprobs[0]
            .iter()
            .sum()
    };
    let before: Vec<f32> = tokens.iter().map(|t| logprobs(&learner, t)).collect();
    for _ in 0..5 {
        let trees: Vec<ScoredTree> = tokens
            .iter()
            .zip([1.0, -1.0])
            .map(|(tokens, advantage)| ScoredTree {
                tree: rollout(tokens, -3.0),
                advantage,
            })
            .collect();
        learner
            .update(&trees, &GrpoSettings::default(), 1e-3)
            .unwrap();
    }
    assert!(logprobs(&learner, &tokens[0]) > before[0] + 0.01);
    assert!(logprobs(&learner, &tokens[1]) < before[1] - 0.01);
}

#[test]
fn supervised_steps_learn_and_shared_context_counts_once() {
    let mut learner = Embedded::new(weights(4), AdamWSettings::default(), COMPUTE);
    let trees: Vec<TrainTree> = some_trees()
        .into_iter()
        .map(|scored| scored.tree.into_supervised())
        .collect();
    let first = learner.supervise(&trees, 3e-3, 0.1).unwrap();
    for _ in 0..60 {
        learner.supervise(&trees, 3e-3, 0.1).unwrap();
    }
    let last = learner.supervise(&trees, 3e-3, 0.1).unwrap();
    assert!(
        last.loss < 0.3 * first.loss,
        "{} then {}",
        first.loss,
        last.loss
    );
    assert!(last.context_loss < first.context_loss);
    // Six rollouts of two branches: prompts of 4 tokens are one prompt.
    assert_eq!(
        (first.tokens_logical, first.tokens_unique),
        (6 * 2 * (4 + 5), 4 + 6 * 10)
    );
}

#[test]
fn batches_see_every_rollout_once_an_epoch() {
    let mut seen: Vec<usize> = (0..5)
        .flat_map(|step| sft::batch_indexes(10, 4, 7, step))
        .collect();
    assert_eq!(seen.len(), 20);
    for epoch in seen.chunks_mut(10) {
        epoch.sort_unstable();
        assert_eq!(epoch, (0..10).collect::<Vec<_>>());
    }
    assert_ne!(
        sft::batch_indexes(10, 10, 7, 0),
        sft::batch_indexes(10, 10, 7, 1)
    );
}
