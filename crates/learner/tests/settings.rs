//! What settings do: correction modes, stop rules, guards, warm-up, adapters, checkpoints that
//! stay.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod support;

use std::sync::Arc;

use learner::{
    Embedded, LearnError,
    grpo::{Beside, GrpoSettings, ScoredTree, UpdateMetrics},
    keep,
    ppo::{Critic, RewardedTree},
    settings::{
        CorrectionSettings, KlSettings, Outside, PpoSettings, RatioOver, Reject, RejectBy,
        RejectOver, StopRules,
    },
};
use model::{
    Weights,
    adamw::AdamWSettings,
    config::{Config, Family},
    device::Device,
    forest::{self, Segment},
    lora::LoraSettings,
};
use tree::{Target, TrainTree};

const COMPUTE: forest::Settings = forest::Settings {
    threads: 1,
    block_tokens_max: 64,
    temperature: 1.0,
    recompute: false,
    device: Device::CPU,
};

fn weights(seed: u64) -> Weights {
    let config = Config {
        model_type: Family::Llama,
        num_hidden_layers: 1,
        ..support::tiny()
    };
    Weights::random(config, seed)
}

/// Log-probabilities of the tokens after the first two.
fn logprobs(weights: &Weights, tokens: &[u32]) -> Vec<f32> {
    let targets: Vec<u32> = (2..tokens.len() as u32).collect();
    let segments = [Segment {
        parent: None,
        tokens,
        targets: &targets,
    }];
    forest::run(weights, &segments, None, COMPUTE)
        .unwrap()
        .logprobs
        .remove(0)
}

const ROWS: [[u32; 6]; 3] = [
    [1, 2, 3, 4, 5, 6],
    [1, 2, 7, 8, 9, 10],
    [1, 2, 11, 12, 13, 14],
];

/// Three rollouts of four tokens; `gaps[i][t]` is log(learner / engine) of token t of rollout i.
fn trees(weights: &Weights, gaps: [[f32; 4]; 3]) -> Vec<ScoredTree> {
    let advantages = [1.0, -0.5, 0.25];
    ROWS.iter()
        .zip(gaps)
        .zip(advantages)
        .map(|((tokens, gaps), advantage)| {
            let own = logprobs(weights, tokens);
            let mut targets = vec![None; 2];
            targets.extend(own.iter().zip(gaps).map(|(logprob, gap)| {
                Some(Target::Sampled {
                    logprob_model: logprob - gap,
                    logprob_sampled: logprob - gap,
                    version: 2,
                })
            }));
            let mut tree = TrainTree::new();
            tree.push(None, tokens.to_vec(), targets).unwrap();
            ScoredTree { tree, advantage }
        })
        .collect()
}

fn update(
    settings: &GrpoSettings,
    gaps: [[f32; 4]; 3],
) -> Result<(UpdateMetrics, Vec<f32>), LearnError> {
    let weights = weights(1);
    let mut found = Vec::new();
    let metrics = learner::grpo::update(
        &mut weights.clone(),
        &trees(&weights, gaps),
        settings,
        COMPUTE,
        Beside {
            reference: None,
            version: Some(5),
        },
        |_, gradient| {
            found = gradient.to_vec();
            Ok(1.0)
        },
    )?;
    Ok((metrics, found))
}

fn corrected(correction: CorrectionSettings) -> GrpoSettings {
    GrpoSettings {
        correction,
        ..GrpoSettings::default()
    }
}

const GAPS: [[f32; 4]; 3] = [[0.0, 0.1, -0.2, 0.0], [1.5, 0.0, 0.0, -1.2], [0.0; 4]];

fn mean(weights: &[f64]) -> f64 {
    weights.iter().sum::<f64>() / weights.len() as f64
}

#[test]
fn corrections_weigh_what_they_say() {
    let ratios: Vec<f64> = GAPS
        .concat()
        .iter()
        .map(|gap| f64::from(*gap).exp())
        .collect();
    let check = |settings: CorrectionSettings, expected: Vec<f64>| {
        let (found, _) = update(&corrected(settings.clone()), GAPS).unwrap();
        let wanted = mean(&expected);
        assert!(
            (found.importance_mean - wanted).abs() < 1e-4,
            "{settings:?}: {} and {wanted}",
            found.importance_mean
        );
        let zeros = expected.iter().filter(|weight| **weight == 0.0).count() as f64 / 12.0;
        assert!((found.rejected - zeros).abs() < 1e-9, "{settings:?}");
        let squares = mean(&expected.iter().map(|w| w * w).collect::<Vec<_>>());
        assert!((found.importance_ess - wanted * wanted / squares).abs() < 1e-4);
    };
    let default = CorrectionSettings::default();
    let truncated: Vec<f64> = ratios.iter().map(|ratio| ratio.min(2.0)).collect();
    check(default.clone(), truncated.clone());
    check(
        CorrectionSettings {
            apply: false,
            ..default.clone()
        },
        vec![1.0; 12],
    );
    let inside = |ratio: f64| {
        if (0.5..=2.0).contains(&ratio) {
            ratio
        } else {
            0.0
        }
    };
    let masked = ratios.iter().map(|ratio| inside(*ratio)).collect();
    check(
        CorrectionSettings {
            outside: Outside::Mask,
            ..default.clone()
        },
        masked,
    );
    let over_rollout = |scale: f64| -> Vec<f64> {
        GAPS.iter()
            .flat_map(|row| vec![(f64::from(row.iter().sum::<f32>()) * scale).exp(); 4])
            .collect()
    };
    check(
        CorrectionSettings {
            over: RatioOver::Rollout,
            ..default.clone()
        },
        over_rollout(1.0),
    );
    check(
        CorrectionSettings {
            over: RatioOver::RolloutMean,
            ..default.clone()
        },
        over_rollout(0.25),
    );
    let centre = mean(&truncated);
    let normal = truncated.iter().map(|weight| weight / centre).collect();
    check(
        CorrectionSettings {
            normalise: true,
            ..default.clone()
        },
        normal,
    );
    // exp(−1.2) is below the veto: the second rollout is out as a whole.
    let vetoed: Vec<f64> = truncated
        .iter()
        .enumerate()
        .map(|(i, w)| if i / 4 == 1 { 0.0 } else { *w })
        .collect();
    check(
        CorrectionSettings {
            veto: Some(0.31),
            ..default.clone()
        },
        vetoed.clone(),
    );
    check(
        CorrectionSettings {
            veto: Some(0.29),
            ..default.clone()
        },
        truncated.clone(),
    );
    let reject = |over, by, high| CorrectionSettings {
        reject: vec![Reject {
            over,
            by,
            low: None,
            high,
        }],
        ..default.clone()
    };
    check(reject(RejectOver::RolloutMax, RejectBy::K2, 0.5), vetoed);
    let tokens = truncated
        .iter()
        .enumerate()
        .map(|(i, w)| if [4, 7].contains(&i) { 0.0 } else { *w })
        .collect();
    check(reject(RejectOver::Token, RejectBy::Ratio, 2.0), tokens);
    check(
        reject(RejectOver::RolloutMean, RejectBy::Ratio, 1.5),
        truncated,
    );
}

#[test]
fn a_rejected_rollout_has_no_gradient() {
    let veto = CorrectionSettings {
        veto: Some(0.31),
        ..CorrectionSettings::default()
    };
    let fixed = GrpoSettings {
        aggregation: objective::Aggregation::Fixed(12.0),
        ..corrected(veto)
    };
    let (_, with) = update(&fixed, GAPS).unwrap();
    let mut other = GAPS;
    other[1] = [3.0, -9.0, 2.0, 1.0];
    let (_, again) = update(&fixed, other).unwrap();
    assert!(with == again, "what was rejected shows in the gradient");
    let (_, without) = update(
        &GrpoSettings {
            correction: CorrectionSettings::default(),
            ..fixed
        },
        GAPS,
    )
    .unwrap();
    assert!(with != without);
    // Nothing left to train is an error, not a step of zeros.
    let mask = CorrectionSettings {
        outside: Outside::Mask,
        ..CorrectionSettings::default()
    };
    let error = update(&corrected(mask), [[4.0; 4]; 3]).unwrap_err();
    assert!(error.to_string().contains("nothing is left"), "{error}");
}

#[test]
fn metrics_are_always_on() {
    let (found, _) = update(&GrpoSettings::default(), GAPS).unwrap();
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-4, "{a} and {b}");
    close(found.rollout_gap, 3.0 / 12.0);
    close(found.rollout_gap_max, 1.5);
    close(found.rollout_kl, -0.2 / 12.0);
    close(found.rollout_gap_opening, 0.5);
    close(found.rollout_gap_closing, 0.4);
    close(found.rollout_gap_middle, 0.3 / 6.0);
    close(found.advantage_mean, 0.25);
    close(found.advantage_max, 1.0);
    close(found.truncated, 1.0 / 12.0);
    assert_eq!((found.staleness, found.staleness_max), (3.0, 3.0));
    assert_eq!((found.terms, found.advantage_zero), (12, 0.0));
    assert!(found.entropy > 3.0);
}

#[test]
fn stop_rules_stop_before_the_step() {
    let run = |stop: StopRules| {
        let start = weights(1);
        let mut learner = Embedded::new(start.clone(), AdamWSettings::default(), COMPUTE)
            .with_reference(Arc::new(weights(9)));
        let settings = GrpoSettings {
            stop,
            kl: KlSettings {
                weight: 0.01,
                ..KlSettings::default()
            },
            passes: 4,
            ..GrpoSettings::default()
        };
        let found = learner.update(&trees(&start, GAPS), &settings, 1e-2);
        if found.is_err() {
            assert_eq!(learner.weights().data, start.data);
            assert_eq!(learner.version(), 0);
        }
        found
    };
    let none = StopRules::default();
    assert_eq!(run(none).unwrap().optimiser_steps, 4);
    for (stop, name) in [
        (
            StopRules {
                rollout_gap: Some(0.2),
                ..none
            },
            "rollout_gap",
        ),
        (
            StopRules {
                entropy_min: Some(5.0),
                ..none
            },
            "entropy_min",
        ),
        (
            StopRules {
                reference_kl: Some(1e-6),
                ..none
            },
            "reference_kl",
        ),
    ] {
        let error = run(stop).unwrap_err();
        assert!(
            matches!(error, LearnError::Stopped { rule, .. } if rule == name),
            "{error}"
        );
    }
    let found = run(StopRules {
        step_kl: Some(1e-9),
        ..none
    })
    .unwrap();
    assert!(found.steps_skipped > 0 && found.optimiser_steps >= 1);
    assert_eq!(found.steps_skipped + found.optimiser_steps, 4);
}

#[test]
fn what_is_not_finite_is_named_and_changes_nothing() {
    let mut gaps = GAPS;
    gaps[2][1] = f32::NEG_INFINITY;
    let error = update(&GrpoSettings::default(), gaps).unwrap_err();
    assert!(
        matches!(error, LearnError::Sample { rollout: 2, .. }),
        "{error}"
    );
    // Broken weights: the first rollout that shows it is named.
    let mut broken = weights(1);
    let batch = trees(&broken, GAPS);
    let last = broken.data.len() - 1;
    broken.data[last] = f32::NAN;
    let mut learner = Embedded::new(broken, AdamWSettings::default(), COMPUTE);
    let error = learner
        .update(&batch, &GrpoSettings::default(), 1e-3)
        .unwrap_err();
    assert!(
        error.to_string().contains("a log-probability is NaN"),
        "{error}"
    );
    assert_eq!(learner.version(), 0);
    // A price for leaving a reference that is not there.
    let kl = KlSettings {
        weight: 0.1,
        ..KlSettings::default()
    };
    let error = update(
        &GrpoSettings {
            kl,
            ..GrpoSettings::default()
        },
        GAPS,
    )
    .unwrap_err();
    assert!(error.to_string().contains("no reference"), "{error}");
}

/// A failure after the first of several steps puts the optimiser back, too.
#[test]
fn a_late_failure_leaves_weights_and_optimiser() {
    let start = weights(1);
    let batch = trees(&start, GAPS);
    let several = GrpoSettings {
        passes: 3,
        ..GrpoSettings::default()
    };
    let mut learner = Embedded::new(start.clone(), AdamWSettings::default(), COMPUTE);
    // The rate is so large that the second pass sees weights that are not finite any more.
    let error = learner.update(&batch, &several, f32::MAX).unwrap_err();
    assert!(matches!(error, LearnError::Sample { .. }), "{error}");
    assert_eq!(learner.weights().data, start.data);
    let mut fresh = Embedded::new(start, AdamWSettings::default(), COMPUTE);
    learner.update(&batch, &several, 1e-3).unwrap();
    fresh.update(&batch, &several, 1e-3).unwrap();
    assert_eq!(learner.weights().data, fresh.weights().data);
}

fn rewarded(weights: &Weights) -> Vec<RewardedTree> {
    let scored = trees(weights, [[0.0; 4]; 3]).into_iter();
    scored
        .map(|scored| RewardedTree {
            tree: scored.tree,
            reward: f64::from(u8::from(scored.advantage > 0.0)),
        })
        .collect()
}

#[test]
fn the_critic_learns_warms_up_and_resumes_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let start = weights(1);
    let batch = rewarded(&start);
    for separate in [false, true] {
        let make = |policy: &Weights| {
            let settings = AdamWSettings::default();
            if separate {
                Critic::separate(policy, settings)
            } else {
                Critic::shared(policy, settings)
            }
        };
        let ppo = PpoSettings {
            warmup_updates: 2,
            ..PpoSettings::default()
        };
        let settings = GrpoSettings::default();
        let mut learner =
            Embedded::new(start.clone(), AdamWSettings::default(), COMPUTE).with_critic(make);
        let first = learner.update_ppo(&batch, &settings, &ppo, 1e-3).unwrap();
        let _ = learner.update_ppo(&batch, &settings, &ppo, 1e-3).unwrap();
        assert_eq!(
            learner.weights().data,
            start.data,
            "the warm-up moved the policy"
        );
        assert_eq!((learner.version(), first.gradient_norm), (0, 0.0));
        for _ in 0..40 {
            learner.update_ppo(&batch, &settings, &ppo, 1e-3).unwrap();
        }
        assert!(learner.weights().data != start.data);
        let last = learner.update_ppo(&batch, &settings, &ppo, 1e-3).unwrap();
        assert!(
            last.value_loss < 0.5 * first.value_loss,
            "{} then {}",
            first.value_loss,
            last.value_loss
        );
        assert!(last.value_explained > first.value_explained);
        let place = folder.path().join(format!("step-{separate}"));
        learner.save(&place, 7, &[]).unwrap();
        let (resumed, steps) = Embedded::resume(&place, COMPUTE).unwrap();
        let mut resumed = resumed.with_critic(|_| panic!("the checkpoint has a critic"));
        assert_eq!(steps, 7);
        learner.update_ppo(&batch, &settings, &ppo, 1e-3).unwrap();
        resumed.update_ppo(&batch, &settings, &ppo, 1e-3).unwrap();
        assert_eq!(learner.weights().data, resumed.weights().data);
        assert_eq!(
            learner.critic().unwrap().head,
            resumed.critic().unwrap().head
        );
    }
    let mut without = Embedded::new(start, AdamWSettings::default(), COMPUTE);
    assert!(
        without
            .update_ppo(
                &batch,
                &GrpoSettings::default(),
                &PpoSettings::default(),
                1e-3
            )
            .is_err()
    );
}

#[test]
fn an_adapter_learns_leaves_the_base_and_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let base = Arc::new(weights(1));
    let batch = trees(&base, [[0.0; 4]; 3]);
    let lora = LoraSettings {
        rank: 2,
        alpha: 4.0,
        ..LoraSettings::default()
    };
    let mut learner = Embedded::adapting(
        Arc::clone(&base),
        lora,
        3,
        AdamWSettings::default(),
        COMPUTE,
    )
    .unwrap();
    let before = logprobs(&base, &ROWS[0]).iter().sum::<f32>();
    for _ in 0..5 {
        learner
            .update(&batch, &GrpoSettings::default(), 1e-2)
            .unwrap();
    }
    assert!(logprobs(&learner.weights(), &ROWS[0]).iter().sum::<f32>() > before + 0.01);
    let changed: Vec<&str> = base
        .layout
        .tensors
        .iter()
        .filter(|tensor| {
            base.data[tensor.range.clone()] != learner.weights().data[tensor.range.clone()]
        })
        .map(|tensor| tensor.name.as_str())
        .collect();
    assert_eq!(changed.len(), 7, "{changed:?}");
    assert!(
        changed.iter().all(|name| name.ends_with("_proj.weight")),
        "{changed:?}"
    );

    let place = folder.path().join("step");
    learner.save(&place, 5, &[]).unwrap();
    let error = Embedded::resume(&place, COMPUTE).unwrap_err().to_string();
    assert!(error.contains("adapter"), "{error}");
    let (mut resumed, _) = Embedded::resume_adapting(&place, base, COMPUTE).unwrap();
    learner
        .update(&batch, &GrpoSettings::default(), 1e-2)
        .unwrap();
    resumed
        .update(&batch, &GrpoSettings::default(), 1e-2)
        .unwrap();
    assert_eq!(learner.weights().data, resumed.weights().data);
    let supervised: Vec<TrainTree> = batch
        .into_iter()
        .map(|scored| scored.tree.into_supervised())
        .collect();
    learner.supervise(&supervised, 1e-2, 0.0).unwrap();
}

#[test]
fn the_last_and_the_best_stay() {
    let folder = tempfile::tempdir().unwrap();
    let learner = Embedded::new(weights(1), AdamWSettings::default(), COMPUTE);
    for step in 1..=5 {
        learner
            .save(&folder.path().join(format!("step-{step}")), step, &[])
            .unwrap();
    }
    std::fs::create_dir(folder.path().join("notes")).unwrap();
    for (name, score, is_best) in [
        ("step-1", 0.2, true),
        ("step-2", 0.6, true),
        ("step-3", 0.6, false),
        ("step-4", f64::NAN, false),
    ] {
        assert_eq!(
            keep::note_score(folder.path(), name, score).unwrap(),
            is_best,
            "{name}"
        );
    }
    assert_eq!(keep::best(folder.path()).unwrap().unwrap().name, "step-2");
    let removed = keep::prune(folder.path(), 2).unwrap();
    assert_eq!(removed.len(), 2);
    let mut names: Vec<String> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["best.json", "notes", "step-2", "step-4", "step-5"]);
    assert!(keep::prune(folder.path(), 2).unwrap().is_empty());
}
