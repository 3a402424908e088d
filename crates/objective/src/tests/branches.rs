//! GAE on trees against GAE on rows.

use proptest::prelude::*;

use crate::{BranchError, Branches, Matrix, gae, tree_gae, tree_returns};

/// A random tree of tokens: each names an earlier one, or none.
fn trees() -> impl Strategy<Value = (Vec<Option<usize>>, Vec<f64>, Vec<f64>)> {
    prop::collection::vec(
        (
            any::<prop::sample::Index>(),
            0_u8..4,
            -2.0_f64..2.0,
            -1.0_f64..1.0,
        ),
        1..30,
    )
    .prop_map(|raw| {
        let mut before: Vec<Option<usize>> = Vec::new();
        for (token, (index, kind, _, _)) in raw.iter().enumerate() {
            before.push(match (token, kind) {
                (0, _) => None,
                // Mostly chains, sometimes a fork, rarely a second root.
                (_, 0) => Some(index.index(token)),
                (_, 1) if index.index(5) == 0 => None,
                _ => Some(token - 1),
            });
        }
        let values = raw.iter().map(|r| r.2).collect();
        let rewards = raw.iter().map(|r| r.3).collect();
        (before, values, rewards)
    })
}

fn one_row(before: &[Option<usize>], end: usize) -> Vec<usize> {
    let mut row = vec![end];
    while let Some(up) = before[row[row.len() - 1]] {
        row.push(up);
    }
    row.reverse();
    row
}

fn ends(before: &[Option<usize>]) -> Vec<usize> {
    (0..before.len())
        .filter(|token| !before.contains(&Some(*token)))
        .collect()
}

/// GAE of one branch by the function that agrees with the reference values.
fn on_a_row(
    row: &[usize],
    values: &[f64],
    rewards: &[f64],
    terminal: f64,
    gamma: f64,
    lambda: f64,
) -> Vec<f64> {
    let pick = |list: &[f64]| row.iter().map(|token| list[*token]).collect::<Vec<f64>>();
    let mut own = pick(rewards);
    *own.last_mut().unwrap() += terminal;
    let matrix = |row: Vec<f64>| Matrix::from_rows(&[row]).unwrap();
    let mask = matrix(vec![1.0; row.len()]);
    gae(&matrix(own), &matrix(pick(values)), &mask, gamma, lambda)
        .0
        .row(0)
        .to_vec()
}

proptest! {
    /// The advantage of a token is the mean over its branches of GAE on each branch alone; on a
    /// tree without forks that is GAE itself.
    #[test]
    fn a_tree_is_the_mean_of_its_branches(
        (before, values, rewards) in trees(),
        terminal in -1.0_f64..1.0,
        gamma in 0.5_f64..=1.0,
        lambda in 0.0_f64..=1.0,
    ) {
        let branches = Branches { before: &before, rewards: &rewards, terminal };
        let (found, returns) = tree_gae(&branches, &values, gamma, lambda).unwrap();
        let mut sums = vec![(0.0, 0.0); before.len()];
        for end in ends(&before) {
            let row = one_row(&before, end);
            for (token, advantage) in row.iter().zip(on_a_row(&row, &values, &rewards, terminal, gamma, lambda)) {
                sums[*token].0 += advantage;
                sums[*token].1 += 1.0;
            }
        }
        for (token, (sum, count)) in sums.into_iter().enumerate() {
            prop_assert!((found[token] - sum / count).abs() < 1e-9, "token {}: {} and {}", token, found[token], sum / count);
            prop_assert!((returns[token] - found[token] - values[token]).abs() < 1e-12);
        }
    }

    /// Without forks: every digit of per-row GAE.
    #[test]
    fn a_chain_is_a_row(values in prop::collection::vec(-2.0_f64..2.0, 1..40), terminal in -1.0_f64..1.0, gamma in 0.5_f64..=1.0, lambda in 0.0_f64..=1.0) {
        let before: Vec<Option<usize>> = (0..values.len()).map(|token| token.checked_sub(1)).collect();
        let rewards = vec![0.0; values.len()];
        let row: Vec<usize> = (0..values.len()).collect();
        let expected = on_a_row(&row, &values, &rewards, terminal, gamma, lambda);
        let branches = Branches { before: &before, rewards: &[], terminal };
        let (found, _) = tree_gae(&branches, &values, gamma, lambda).unwrap();
        for (a, b) in found.iter().zip(&expected) {
            prop_assert!((a - b).abs() <= 1e-12 * (1.0 + b.abs()), "{} and {}", a, b);
        }
    }

    /// γ = λ = 1: R − V, whatever the forks.
    #[test]
    fn undiscounted_forks_do_not_matter((before, values, _) in trees(), terminal in -1.0_f64..1.0) {
        let branches = Branches { before: &before, rewards: &[], terminal };
        let (found, _) = tree_gae(&branches, &values, 1.0, 1.0).unwrap();
        for (advantage, value) in found.iter().zip(&values) {
            prop_assert!((advantage - (terminal - value)).abs() < 1e-9);
        }
        for value in tree_returns(&branches, 1.0).unwrap() {
            prop_assert!((value - terminal).abs() < 1e-9);
        }
    }
}

#[test]
fn a_known_fork() {
    // 0 ─ 1 ─┬─ 2
    //        └─ 3 ─ 4
    let before = [None, Some(0), Some(1), Some(1), Some(3)];
    let branches = Branches {
        before: &before,
        rewards: &[],
        terminal: 1.0,
    };
    let (found, _) = tree_gae(&branches, &[0.1, 0.2, 0.3, 0.4, 0.5], 1.0, 0.5).unwrap();
    // Below the fork as in rows: token 4: 1 − 0.5; 3: (0.5 − 0.4) + 0.5 · 0.5; 2: 1 − 0.3.
    // At the fork: ½(0.3 + ½·0.7) + ½(0.4 + ½·0.35) − 0.2.
    for (value, expected) in found.iter().zip([0.30625, 0.4125, 0.7, 0.35, 0.5]) {
        assert!((value - expected).abs() < 1e-12, "{found:?}");
    }
}

#[test]
fn lists_that_do_not_fit_are_refused() {
    let branches = Branches {
        before: &[None, Some(1)],
        rewards: &[],
        terminal: 0.0,
    };
    assert_eq!(
        tree_gae(&branches, &[0.0; 2], 1.0, 1.0),
        Err(BranchError::Order {
            token: 1,
            before: 1
        })
    );
    let branches = Branches {
        before: &[None],
        rewards: &[0.0; 3],
        terminal: 0.0,
    };
    assert!(matches!(
        tree_gae(&branches, &[0.0], 1.0, 1.0),
        Err(BranchError::Length {
            what: "rewards",
            ..
        })
    ));
    assert!(
        tree_gae(
            &Branches {
                rewards: &[],
                ..branches
            },
            &[],
            1.0,
            1.0
        )
        .is_err()
    );
}
