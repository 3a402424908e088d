//! Every gradient against finite differences, away from the kinks.

use proptest::prelude::*;

use crate::{
    Aggregation, Clip, KlEstimator, Matrix, PolicyInputs, PolicyLoss, TrlInputs, TrlLoss,
    TrlSettings, clipped_token, covariance_choices, covariance_loss, entropy, kl_token, logprob,
    policy_loss, token_weights, trl_loss, truncated_weight, value_token, weight_matrix,
};

const STEP: f64 = 1e-6;

/// Central difference of `loss` at `values[at]`, or nothing when a kink lies within the step: then
/// the two one-sided differences disagree.
fn slope(values: &[f64], at: usize, loss: impl Fn(&[f64]) -> f64) -> Option<f64> {
    let shifted = |by: f64| {
        let mut values = values.to_vec();
        values[at] += by;
        loss(&values)
    };
    let here = loss(values);
    let (right, left) = (
        (shifted(STEP) - here) / STEP,
        (here - shifted(-STEP)) / STEP,
    );
    ((right - left).abs() <= 1e-3 * (1.0 + right.abs())).then_some((right + left) / 2.0)
}

fn near(found: f64, expected: f64) -> bool {
    (found - expected).abs() <= 2e-4 * (1.0 + expected.abs())
}

fn kinds() -> Vec<PolicyLoss> {
    let (low, high) = (0.2, 0.28);
    vec![
        PolicyLoss::Clipped {
            low,
            high,
            dual: None,
        },
        PolicyLoss::Clipped {
            low,
            high,
            dual: Some(1.5),
        },
        PolicyLoss::Soft {
            positive: 1.0,
            negative: 1.05,
        },
        PolicyLoss::GeometricMean { low, high },
        PolicyLoss::Ratio,
        PolicyLoss::Plain,
        PolicyLoss::Quadratic { beta: 0.1 },
    ]
}

const ROWS: usize = 3;
const COLUMNS: usize = 4;

fn matrix(values: &[f64]) -> Matrix {
    let rows: Vec<Vec<f64>> = values.chunks(COLUMNS).map(<[f64]>::to_vec).collect();
    Matrix::from_rows(&rows).unwrap()
}

fn numbers(low: f64, high: f64) -> impl Strategy<Value = Vec<f64>> {
    prop::collection::vec(low..high, ROWS * COLUMNS)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn policy_losses(
        new in numbers(-3.0, -0.05),
        old in numbers(-3.0, -0.05),
        advantages in numbers(-2.0, 2.0),
        correction in numbers(0.1, 2.0),
        mask in prop::collection::vec(prop::bool::weighted(0.7), ROWS * COLUMNS),
    ) {
        let mask = matrix(&mask.iter().map(|&on| f64::from(u8::from(on))).collect::<Vec<_>>());
        let (old, advantages, correction) =
            (matrix(&old), matrix(&advantages), matrix(&correction));
        let weights =
            weight_matrix(&mask, &token_weights(&mask.counts(), Aggregation::RolloutMean));
        for kind in kinds() {
            let evaluate = |new: &[f64]| {
                let new = matrix(new);
                policy_loss(&kind, &PolicyInputs {
                    logprob: &new,
                    old: &old,
                    advantages: &advantages,
                    mask: &mask,
                    correction: Some(&correction),
                    weights: &weights,
                })
            };
            let result = evaluate(&new);
            for at in 0..new.len() {
                if let Some(expected) = slope(&new, at, |new| evaluate(new).loss) {
                    let found = result.gradient.values()[at];
                    prop_assert!(near(found, expected), "{kind:?} at {at}: {found} {expected}");
                }
            }
        }
    }

    #[test]
    fn kl_cov_with_its_choice_held(
        new in numbers(-3.0, -0.05),
        old in numbers(-3.0, -0.05),
        advantages in numbers(-2.0, 2.0),
    ) {
        let mask = Matrix::filled(ROWS, COLUMNS, 1.0);
        let (old, advantages) = (matrix(&old), matrix(&advantages));
        let weights = weight_matrix(&mask, &token_weights(&mask.counts(), Aggregation::TokenMean));
        let inputs = |new: &Matrix| -> (Vec<usize>, f64, Matrix) {
            let inputs = PolicyInputs {
                logprob: new,
                old: &old,
                advantages: &advantages,
                mask: &mask,
                correction: None,
                weights: &weights,
            };
            let chosen = covariance_choices(&inputs, 0.25, 1).remove(0);
            let result = covariance_loss(&inputs, &chosen, 1.0);
            (chosen, result.loss, result.gradient)
        };
        let (chosen, _, gradient) = inputs(&matrix(&new));
        prop_assert_eq!(chosen.len(), 3);
        for at in 0..new.len() {
            if let Some(expected) = slope(&new, at, |new| inputs(&matrix(new)).1) {
                prop_assert!(near(gradient.values()[at], expected));
            }
        }
    }

    #[test]
    fn trl_losses(
        new in numbers(-3.0, -0.05),
        old in numbers(-3.0, -0.05),
        reference in numbers(-3.0, -0.05),
        advantages in prop::collection::vec(-2.0..2.0, ROWS),
        by_sequence in any::<bool>(),
        unbiased_kl in any::<bool>(),
    ) {
        let mask = Matrix::filled(ROWS, COLUMNS, 1.0);
        let (old, reference) = (matrix(&old), matrix(&reference));
        for loss in [
            TrlLoss::Grpo,
            TrlLoss::Bnpo,
            TrlLoss::DrGrpo,
            TrlLoss::Luspo,
            TrlLoss::Sapo { positive: 1.0, negative: 1.05 },
        ] {
            let settings = TrlSettings {
                loss,
                by_sequence,
                low: 0.2,
                high: 0.28,
                delta: Some(1.5),
                beta: 0.04,
                unbiased_kl,
                off_policy_max: None,
                tokens_max: 16.0,
                items: 50.0,
            };
            let evaluate = |new: &[f64]| {
                let new = matrix(new);
                trl_loss(&settings, &TrlInputs {
                    logprob: &new,
                    old: &old,
                    reference: &reference,
                    rollout: &old,
                    advantages: &advantages,
                    mask: &mask,
                    correction: None,
                })
            };
            let result = evaluate(&new);
            for at in 0..new.len() {
                if let Some(expected) = slope(&new, at, |new| evaluate(new).loss) {
                    let found = result.gradient.values()[at];
                    prop_assert!(near(found, expected), "{loss:?} at {at}: {found} {expected}");
                }
            }
        }
    }

    #[test]
    fn tokens(
        new in -3.0_f64..-0.05,
        old in -3.0_f64..-0.05,
        advantage in -2.0_f64..2.0,
        dual in prop::option::of(1.1_f32..4.0),
    ) {
        let clip = Clip { dual, ..Clip::default() };
        // Single precision: a larger step, and only where the loss is straight around it.
        let loss = |new: f64| f64::from(clipped_token(new as f32, old as f32, advantage as f32, &clip).loss);
        let step = 1e-2;
        let (right, left) =
            ((loss(new + step) - loss(new)) / step, (loss(new) - loss(new - step)) / step);
        let token = clipped_token(new as f32, old as f32, advantage as f32, &clip);
        if (right - left).abs() < 0.05 * (right.abs() + 0.1) {
            let expected = (right + left) / 2.0;
            prop_assert!(
                (f64::from(token.gradient) - expected).abs() <= 0.02 * (1.0 + expected.abs()),
                "{token:?} {expected}"
            );
        }
        prop_assert_eq!(token.clipped, token.gradient == 0.0 && advantage != 0.0);
        for straight_through in [false, true] {
            for kind in [KlEstimator::K1, KlEstimator::Abs, KlEstimator::K2, KlEstimator::K3] {
                let (value, gradient) = kl_token(new, old, kind, straight_through);
                prop_assert!(value.is_finite());
                let of = if straight_through { KlEstimator::K2 } else { kind };
                if let Some(expected) = slope(&[new], 0, |new| kl_token(new[0], old, of, false).0) {
                    prop_assert!(near(gradient, expected));
                }
            }
        }
        if let Some(expected) = slope(&[new], 0, |new| value_token(new[0], old, advantage, 0.5).0) {
            prop_assert!(near(value_token(new, old, advantage, 0.5).1, expected));
        }
    }

    #[test]
    fn distributions(
        logits in prop::collection::vec(-5.0..5.0, 1..8),
        token in any::<prop::sample::Index>(),
        temperature in 0.5..2.0,
    ) {
        let token = token.index(logits.len());
        let (value, by_logit) = logprob(&logits, token, temperature).unwrap();
        prop_assert!(value <= 0.0);
        let (h, by_logit_h) = entropy(&logits);
        prop_assert!(h >= -1e-12 && h <= (logits.len() as f64).ln() + 1e-12);
        for at in 0..logits.len() {
            let of_logprob = |logits: &[f64]| logprob(logits, token, temperature).unwrap().0;
            if let Some(expected) = slope(&logits, at, of_logprob) {
                prop_assert!(near(by_logit[at], expected));
            }
            if let Some(expected) = slope(&logits, at, |logits| entropy(logits).0) {
                prop_assert!(near(by_logit_h[at], expected));
            }
        }
    }
}

#[test]
fn broken_logprobs_make_no_infinite_weight() {
    for (old, rollout) in [(0.0, -1e30), (0.0, f32::NEG_INFINITY), (-1e30, 0.0)] {
        let weight = truncated_weight(old, rollout, 2.0);
        assert!((0.0..=2.0).contains(&weight), "{weight}");
        let token = clipped_token(old, rollout, 1.0, &Clip::default());
        assert!(token.loss.is_finite() && token.gradient == 0.0);
    }
}
