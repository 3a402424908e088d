//! One vote per rollout, group by group.

use proptest::prelude::*;

use crate::{Scale, group_advantages, leave_one_out_advantages};

#[test]
fn a_known_group() {
    let advantages = group_advantages(&[1.0, 0.0, 0.0, 0.0], Scale::Std);
    assert_eq!((advantages.mean, advantages.std), (0.25, 0.5));
    assert!((advantages.values[0] - 0.75 / 0.500_001).abs() < 1e-12);
    assert!((advantages.values[1] + 0.25 / 0.500_001).abs() < 1e-12);
    let centred = group_advantages(&[1.0, 0.0, 0.0, 0.0], Scale::None);
    assert_eq!(centred.values, [0.75, -0.25, -0.25, -0.25]);
    let left_out = leave_one_out_advantages(&[1.0, 0.0, 0.5], Scale::None);
    assert_eq!(left_out.values, [0.75, -0.75, 0.0]);
}

#[test]
fn groups_of_uneven_size_do_not_touch_each_other() {
    // Elsewhere a normalisation over the whole batch gave three rewards of 5.0 the value -1.09.
    let sizes: [&[f64]; 3] = [&[5.0, 5.0, 5.0], &[0.0, 1.0], &[7.0]];
    let all: Vec<_> = sizes
        .iter()
        .map(|rewards| group_advantages(rewards, Scale::Std))
        .collect();
    assert_eq!(all[0].values, [0.0; 3]);
    assert!(all[0].zero_variance && !all[1].zero_variance && all[2].zero_variance);
    assert_eq!(all[2].values, [0.0]);
    assert!(group_advantages(&[], Scale::Std).values.is_empty());
}

#[test]
fn rounding_makes_no_advantage_out_of_equal_rewards() {
    let advantages = group_advantages(&[0.1; 7], Scale::Std);
    assert_eq!(advantages.values, [0.0; 7]);
}

proptest! {
    #[test]
    fn votes_cancel_and_shifts_do_not_matter(
        rewards in prop::collection::vec(0.0..1.0, 2..12),
        shift in -1.0..1.0,
    ) {
        for by in [Scale::Std, Scale::None] {
            let advantages = group_advantages(&rewards, by);
            prop_assert!(advantages.values.iter().sum::<f64>().abs() < 1e-6);
            let moved: Vec<f64> = rewards.iter().map(|reward| reward + shift).collect();
            for (a, b) in advantages.values.iter().zip(group_advantages(&moved, by).values) {
                prop_assert!((a - b).abs() < 1e-6);
            }
            // Leaving one out only scales: it is the same direction of learning.
            let factor = rewards.len() as f64 / (rewards.len() as f64 - 1.0);
            for (a, b) in advantages.values.iter().zip(leave_one_out_advantages(&rewards, by).values) {
                prop_assert!((a * factor - b).abs() < 1e-9);
            }
        }
    }
}
