//! A loss over rows is the loss over trees (to 1e-6), by the reference maths of `objective`.

use std::hash::{DefaultHasher, Hash, Hasher};

use objective::{
    Aggregation, Matrix, PolicyInputs, PolicyLoss, Scale, group_advantages, policy_loss,
    token_weights, weight_matrix,
};
use record::Call;

use super::{attempt, call};
use crate::{Row, Rows, Selection, Target, TrainTree, Tree, linearise, select};

/// What a policy says of a token: any function of the whole prefix will do.
fn logprob_now(path: &[u32]) -> f64 {
    let mut hasher = DefaultHasher::new();
    path.hash(&mut hasher);
    -3.0 * (hasher.finish() % 1000) as f64 / 1000.0
}

/// A term: now, old, whose rollout.
type Line = Vec<Option<(f64, f64)>>;

fn loss(lines: &[(usize, Line)], advantages: &[f64], weights: &[f64]) -> f64 {
    let width = lines.iter().map(|(_, line)| line.len()).max().unwrap_or(0);
    let build = |value: &dyn Fn(usize, (f64, f64)) -> f64| {
        let row = |(rollout, line): &(usize, Line)| -> Vec<f64> {
            let term = |column: usize| line.get(column).copied().flatten();
            (0..width)
                .map(|column| term(column).map_or(0.0, |term| value(*rollout, term)))
                .collect()
        };
        Matrix::from_rows(&lines.iter().map(row).collect::<Vec<_>>()).unwrap()
    };
    let mask = build(&|_, _| 1.0);
    let of_rows: Vec<f64> = lines.iter().map(|(rollout, _)| weights[*rollout]).collect();
    let inputs = PolicyInputs {
        logprob: &build(&|_, (now, _)| now),
        old: &build(&|_, (_, old)| old),
        advantages: &build(&|rollout, _| advantages[rollout]),
        mask: &mask,
        correction: None,
        weights: &weight_matrix(&mask, &of_rows),
    };
    let kind = PolicyLoss::Clipped {
        low: 0.2,
        high: 0.28,
        dual: Some(3.0),
    };
    policy_loss(&kind, &inputs).loss
}

fn old(target: &Target) -> f64 {
    match target {
        Target::Sampled {
            logprob_sampled, ..
        } => f64::from(*logprob_sampled) / 10.0,
        Target::Supervised => 0.0,
    }
}

fn line_of_tree(tree: &TrainTree) -> Line {
    super::algebra::spelled(tree)
        .into_iter()
        .filter_map(|(path, target)| Some(Some((logprob_now(&path), old(&target?)))))
        .collect()
}

fn line_of_row(row: &Row) -> Line {
    let term = |(at, target): (usize, &Option<Target>)| {
        let path = &row.tokens[..=row.prompt_tokens + at];
        target.map(|target| (logprob_now(path), old(&target)))
    };
    row.targets.iter().enumerate().map(term).collect()
}

/// Rollouts with one, three and five leaves, a fork inside a response, one node only, and nothing.
fn group() -> Vec<Vec<Call>> {
    let chain = |count: u32| -> Vec<Call> {
        (0..count)
            .map(|turn| {
                // Every turn leaves the one before inside its output: as many leaves as turns.
                let mut prompt = vec![1, 2, 3];
                for earlier in 0..turn {
                    prompt.extend([10 + earlier, 50 + earlier]);
                }
                call(turn, &prompt, Some(&[10 + turn, 30 + turn, 31 + turn]))
            })
            .collect()
    };
    let mut lost = vec![call(0, &[1, 2], Some(&[7, 8]))];
    lost[0].attempts = vec![attempt(false)];
    vec![
        chain(1),
        chain(3),
        chain(5),
        vec![call(0, &[], Some(&[5, 6, 7]))],
        vec![
            call(0, &[1, 2], Some(&[4, 4, 4])),
            call(1, &[1, 2], Some(&[4, 4, 5])),
        ],
        lost,
        Vec::new(),
    ]
}

#[test]
fn the_loss_over_rows_is_the_loss_over_trees() {
    let rewards = [1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 0.0];
    let rollouts = group();
    for selection in [Selection::default(), Selection::All, Selection::Longest] {
        let mut trees = Vec::new();
        let mut rows: Vec<Rows> = Vec::new();
        for calls in &rollouts {
            let tree = Tree::build(calls).unwrap();
            let kept = select(&tree, &selection);
            trees.push(kept.train_tree(&tree).unwrap());
            rows.push(linearise(&tree, &kept, None).unwrap());
        }
        let leaves: Vec<usize> = rows.iter().map(|rows| rows.rows.len()).collect();
        if selection == Selection::All {
            assert_eq!(leaves, [1, 3, 5, 1, 2, 1, 0]);
        }
        // One vote per rollout, whatever its number of rows.
        let advantages = group_advantages(&rewards, Scale::Std).values;
        let terms: Vec<usize> = rows.iter().map(Rows::terms).collect();
        assert_eq!(
            terms,
            trees.iter().map(TrainTree::terms).collect::<Vec<_>>()
        );
        for aggregation in [
            Aggregation::TokenMean,
            Aggregation::RolloutMean,
            Aggregation::RolloutSum,
            Aggregation::Fixed(64.0),
        ] {
            let weights = token_weights(&terms, aggregation);
            let of_trees: Vec<(usize, Line)> = trees.iter().map(line_of_tree).enumerate().collect();
            let of_rows: Vec<(usize, Line)> = rows
                .iter()
                .enumerate()
                .flat_map(|(rollout, rows)| {
                    rows.rows.iter().map(move |row| (rollout, line_of_row(row)))
                })
                .collect();
            let (tree, row) = (
                loss(&of_trees, &advantages, &weights),
                loss(&of_rows, &advantages, &weights),
            );
            assert!(
                (tree - row).abs() < 1e-6,
                "{selection:?} {aggregation:?}: {tree} and {row}"
            );
            assert!(
                tree.abs() > 1e-4,
                "{selection:?} {aggregation:?}: nothing is compared"
            );
        }
    }
}

#[test]
fn an_empty_group_has_no_rows_and_no_loss() {
    let tree = Tree::build(&[]).unwrap();
    let kept = select(&tree, &Selection::default());
    assert_eq!(linearise(&tree, &kept, Some(10)).unwrap(), Rows::default());
}

#[test]
fn long_branches_end_with_a_turn_and_start_where_they_started() {
    let calls = [
        call(0, &[1, 2], Some(&[10, 11])),
        call(1, &[1, 2, 10, 11, 3], Some(&[12, 13])),
        call(2, &[1, 2, 10, 11, 3, 12, 13, 4], Some(&[14, 15])),
    ];
    let tree = Tree::build(&calls).unwrap();
    let kept = select(&tree, &Selection::default());
    let cut = |tokens_max| {
        let rows = linearise(&tree, &kept, Some(tokens_max)).unwrap();
        let tokens: Vec<Vec<u32>> = rows.rows.iter().map(|row| row.tokens.clone()).collect();
        (tokens, rows.terms(), rows.tokens_cut())
    };
    assert_eq!(cut(10).0, [vec![1, 2, 10, 11, 3, 12, 13, 4, 14, 15]]);
    assert_eq!(cut(9), (vec![vec![1, 2, 10, 11, 3, 12, 13]], 4, 2));
    assert_eq!(cut(6), (vec![vec![1, 2, 10, 11]], 2, 4));
    assert_eq!(cut(3), (vec![], 0, 6));
}

#[test]
fn what_does_not_fit_in_one_row_is_owned_by_another() {
    // A fork inside a response: the shared half fits with the short end only.
    let calls = [
        call(0, &[1], Some(&[10, 11, 20, 21, 22, 23])),
        call(1, &[1], Some(&[10, 11, 30])),
    ];
    let tree = Tree::build(&calls).unwrap();
    let kept = select(&tree, &Selection::All);
    let rows = linearise(&tree, &kept, Some(5)).unwrap();
    assert_eq!(rows.rows.len(), 1);
    assert_eq!(rows.rows[0].tokens, [1, 10, 11, 30]);
    assert_eq!((rows.terms(), rows.tokens_cut()), (3, 4));
}
