//! Functions without reference values of their own, against those that have them.

use proptest::prelude::*;

use crate::{
    Bounds, Clip, Level, Lone, Matrix, PolicyLoss, Scale, clipped_token, correction_weights,
    group_advantages, grpo, leave_one_out_advantages, policy_token, rloo, truncated_weight,
};

fn column(values: &[f64]) -> (Matrix, Matrix) {
    let rows: Vec<Vec<f64>> = values.iter().map(|value| vec![*value]).collect();
    Matrix::padded(&rows)
}

proptest! {
    /// One vote per rollout gives the advantages of the padded batch.
    #[test]
    fn groups(rewards in prop::collection::vec(prop::sample::select(vec![0.0, 0.25, 0.5, 1.0]), 2..9)) {
        let (matrix, mask) = column(&rewards);
        let one = vec![7; rewards.len()];
        for by in [Scale::Std, Scale::None] {
            let found = group_advantages(&rewards, by);
            let expected = grpo(&matrix, &mask, &one, by, Lone::Zero);
            for (a, b) in found.values.iter().zip(expected.values()) {
                prop_assert!((a - b).abs() < 1e-9, "{:?}", by);
            }
        }
        let found = leave_one_out_advantages(&rewards, Scale::None);
        let expected = rloo(&matrix, &mask, &one, Lone::Zero);
        for (a, b) in found.values.iter().zip(expected.values()) {
            prop_assert!((a - b).abs() < 1e-9);
        }
        // With the scale of the whole group: the same order and signs, the ratio n / (n − 1).
        let scaled = leave_one_out_advantages(&rewards, Scale::Std);
        let plain = group_advantages(&rewards, Scale::Std);
        let count = rewards.len() as f64;
        for (a, b) in scaled.values.iter().zip(&plain.values) {
            prop_assert!((a - b * count / (count - 1.0)).abs() < 1e-9);
        }
    }

    /// The losses of single tokens are those of the batch functions.
    #[test]
    fn tokens(new in -4.0_f64..-0.05, old in -4.0_f64..-0.05, advantage in -2.0_f64..2.0, dual in prop::option::of(1.5_f64..4.0)) {
        let clip = Clip { low: 0.2, high: 0.28, dual: dual.map(|dual| dual as f32) };
        let (low, high) = (f64::from(clip.low), f64::from(clip.high));
        let (new, old, advantage) = (f64::from(new as f32), f64::from(old as f32), f64::from(advantage as f32));
        let kind = PolicyLoss::Clipped { low, high, dual: clip.dual.map(f64::from) };
        let expected = policy_token(&kind, new, old, advantage, 0.0);
        let found = clipped_token(new as f32, old as f32, advantage as f32, &clip);
        prop_assert!((f64::from(found.loss) - expected.loss).abs() <= 1e-6 * (1.0 + expected.loss.abs()));
        prop_assert!((f64::from(found.gradient) - expected.slope).abs() <= 1e-6 * (1.0 + expected.slope.abs()));

        // Plain importance weighting is a clip whose bounds are never reached.
        let wide = PolicyLoss::Clipped { low: 1.0, high: f64::INFINITY, dual: None };
        prop_assert_eq!(policy_token(&PolicyLoss::Ratio, new, old, advantage, 0.0).loss, policy_token(&wide, new, old, advantage, 0.0).loss);

        // A sequence of one token has the token's ratio: GSPO is PPO there.
        let sequence = policy_token(&PolicyLoss::Sequence { low, high }, new, old, advantage, new - old);
        let token = policy_token(&PolicyLoss::Clipped { low, high, dual: None }, new, old, advantage, 0.0);
        prop_assert!((sequence.slope - token.slope).abs() < 1e-12);

        // CISPO: the weight is a constant, so the loss is a line through 0 in the log-probability.
        let weighted = policy_token(&PolicyLoss::Weighted { low, high }, new, old, advantage, 0.0);
        prop_assert!((weighted.slope * new - weighted.loss).abs() < 1e-12);
        prop_assert!(weighted.slope.abs() <= advantage.abs() * (1.0 + high) + 1e-12);
    }

    /// The three levels of importance weights: they agree on sequences of one token, and the
    /// geometric mean does not grow with length.
    #[test]
    fn levels(logs in prop::collection::vec(-0.5_f64..0.5, 1..9)) {
        let (row, mask) = Matrix::padded(std::slice::from_ref(&logs));
        let weights = |level| {
            correction_weights(&row, &mask, level, Bounds::Truncate(1e9), false).unwrap().weights
        };
        let mean = logs.iter().sum::<f64>() / logs.len() as f64;
        for (column, log) in logs.iter().enumerate() {
            prop_assert!((weights(Level::Token).row(0)[column] - log.exp()).abs() < 1e-12);
            prop_assert!((weights(Level::SequenceMean).row(0)[column] - mean.exp()).abs() < 1e-12);
            let product = weights(Level::Sequence).row(0)[column];
            prop_assert!((product - (mean * logs.len() as f64).exp()).abs() < 1e-9);
            let token = truncated_weight(*log as f32, 0.0, 1.2);
            prop_assert!((f64::from(token) - log.exp().min(1.2)).abs() < 1e-6);
        }
    }
}

#[test]
fn padding_keeps_values_and_lengths() {
    let (values, mask) = Matrix::padded(&[vec![1.0, 2.0], Vec::new(), vec![3.0]]);
    assert_eq!(values.values(), [1.0, 2.0, 0.0, 0.0, 3.0, 0.0]);
    assert_eq!(mask.counts(), [2, 0, 1]);
    assert_eq!(Matrix::padded(&[]).0.rows(), 0);
}
