//! How much each token weighs.

use proptest::prelude::*;

use crate::{Aggregation, Whole, token_weights, token_weights_within};

#[test]
fn known_weights() {
    let counts = [2, 0, 6];
    let weights = |aggregation| token_weights(&counts, aggregation);
    assert_eq!(weights(Aggregation::TokenMean), [0.125, 0.0, 0.125]);
    assert_eq!(weights(Aggregation::RolloutMean), [0.25, 0.0, 1.0 / 12.0]);
    assert_eq!(weights(Aggregation::RolloutSum), [0.5, 0.0, 0.5]);
    assert_eq!(weights(Aggregation::Fixed(4.0)), [0.25, 0.0, 0.25]);
    assert!(token_weights(&[], Aggregation::TokenMean).is_empty());
}

proptest! {
    #[test]
    fn a_rollout_weighs_one_share_however_its_tokens_are_cut(
        counts in prop::collection::vec(0_usize..50, 1..8)
    ) {
        // A rollout split over branches, chains or rows still has one count, so one share. The
        // known defect elsewhere: three chains weighed three times.
        let rollouts = counts.iter().filter(|count| **count > 0).count();
        let weights = token_weights(&counts, Aggregation::RolloutMean);
        for (weight, &count) in weights.iter().zip(&counts) {
            let share = if count == 0 { 0.0 } else { 1.0 / rollouts as f64 };
            prop_assert!((weight * count as f64 - share).abs() < 1e-12);
        }
        let total: f64 = token_weights(&counts, Aggregation::TokenMean)
            .iter()
            .zip(&counts)
            .map(|(weight, &count)| weight * count as f64)
            .sum();
        prop_assert!(rollouts == 0 || (total - 1.0).abs() < 1e-12);
    }

    #[test]
    fn parts_of_a_batch_weigh_what_they_weigh_in_the_whole(
        counts in prop::collection::vec(0_usize..50, 2..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let cut = cut.index(counts.len());
        let whole = Whole {
            tokens: Some(counts.iter().sum::<usize>() as f64),
            rollouts: Some(counts.iter().filter(|count| **count > 0).count() as f64),
        };
        for aggregation in [
            Aggregation::TokenMean,
            Aggregation::RolloutMean,
            Aggregation::RolloutSum,
            Aggregation::Fixed(7.0),
        ] {
            let parts = [&counts[..cut], &counts[cut..]]
                .map(|part| token_weights_within(part, aggregation, &whole))
                .concat();
            prop_assert_eq!(parts, token_weights(&counts, aggregation));
        }
    }
}
