//! Packing for the learner, and defects of other systems that must not come back.

use super::{attempt, call};
use crate::{Forest, Selection, Target, TrainTree, Tree, TreeError, TreeLimits, select};

fn packed(calls: &[record::Call], selection: &Selection) -> TrainTree {
    let tree = Tree::build(calls).unwrap();
    tree.check(calls).unwrap();
    select(&tree, selection).train_tree(&tree).unwrap()
}

#[test]
fn the_first_token_of_every_branch_is_supervised() {
    // The folding error: one label per stored token leaves all branches but one without loss on
    // their first token.
    let calls = [
        call(0, &[1, 2], Some(&[10, 11])),
        call(1, &[1, 2], Some(&[20, 21])),
        call(2, &[1, 2], Some(&[30])),
    ];
    let forest = Forest::merge(&[packed(&calls, &Selection::All)]);
    let first_tokens: Vec<(u32, u32)> = forest
        .nodes
        .iter()
        .filter(|node| node.parent.is_some())
        .map(|node| (node.tokens[0], node.terms[0].offset))
        .collect();
    assert_eq!(first_tokens, [(10, 0), (20, 0), (30, 0)]);
    assert_eq!(forest.stats().terms, 5);
}

#[test]
fn a_long_linear_rollout_is_one_branch() {
    // Known elsewhere as a prefix variable that held the last step only: broke at turn three.
    let mut calls = Vec::new();
    let mut prompt = vec![1, 2, 3];
    for turn in 0..12_u32 {
        let output = [100 + turn, 200 + turn];
        calls.push(call(turn, &prompt, Some(&output)));
        prompt.extend(output);
        prompt.extend([50, turn]);
    }
    let tree = Tree::build(&calls).unwrap();
    assert!(tree.forks.is_empty(), "{:?}", tree.forks);
    assert_eq!(tree.stats().leaves, 1);
    let kept = select(&tree, &Selection::default());
    assert_eq!(kept.calls, (0..12).collect::<Vec<u32>>());
    assert_eq!(kept.tokens_trained, 24);
    assert!(kept.dropped.is_empty());
    // Prompt and outputs and what came between, but nothing after the last output.
    assert_eq!(
        kept.train_tree(&tree).unwrap().tokens(),
        3 + 12 * 2 + 11 * 2
    );
}

#[test]
fn a_diverging_prefix_duplicates_no_token() {
    // A linear merger kept the accumulated tail when the new prompt left it early.
    let calls = [
        call(0, &[1, 2, 3, 4, 5], Some(&[10, 11])),
        call(1, &[1, 2, 3, 9, 9], Some(&[12])),
    ];
    let tree = Tree::build(&calls).unwrap();
    tree.check(&calls).unwrap();
    assert_eq!(tree.stats().tokens_unique, 3 + 2 + 2 + 2 + 1);
}

#[test]
fn an_identical_retry_belongs_to_the_earliest_delivered_call() {
    let mut calls = [
        call(0, &[1, 2], Some(&[10, 11, 12])),
        call(1, &[1, 2], Some(&[10, 11, 12])),
        call(2, &[1, 2], Some(&[10, 11, 13])),
    ];
    calls[0].attempts = vec![attempt(false)];
    let packed = packed(&calls, &Selection::All);
    let owners: Vec<Option<u64>> = packed
        .nodes()
        .iter()
        .flat_map(|node| &node.targets)
        .map(|target| match target {
            Some(Target::Sampled { version, .. }) => Some(*version),
            _ => None,
        })
        .collect();
    assert_eq!(owners, [None, None, Some(1), Some(1), Some(1), Some(2)]);
}

#[test]
fn tokens_without_logprobs_are_context_and_counted() {
    let mut calls = [
        call(0, &[1, 2], Some(&[10, 11])),
        call(1, &[1, 2, 10, 11, 3], Some(&[12])),
    ];
    let generation = calls[0].generation.as_mut().unwrap();
    generation.logprobs_model.clear();
    generation.logprobs_sampled.clear();
    let tree = Tree::build(&calls).unwrap();
    let kept = select(&tree, &Selection::default());
    assert_eq!((kept.tokens_trained, kept.tokens_without_logprobs), (1, 2));
    assert_eq!(tree.stats().tokens_without_logprobs, 2);
    assert_eq!(kept.train_tree(&tree).unwrap().terms(), 1);
}

#[test]
fn versions_follow_the_token() {
    let mut calls = [call(0, &[1], Some(&[10, 11, 12, 13]))];
    calls[0].generation.as_mut().unwrap().policy = vec![
        record::PolicySpan {
            start: 0,
            version: 7,
        },
        record::PolicySpan {
            start: 2,
            version: 8,
        },
    ];
    let versions: Vec<u64> = packed(&calls, &Selection::All)
        .nodes()
        .iter()
        .flat_map(|node| node.targets.iter().flatten())
        .map(|target| match target {
            Target::Sampled { version, .. } => *version,
            Target::Supervised => panic!("nothing is supervised here"),
        })
        .collect();
    assert_eq!(versions, [7, 7, 8, 8]);
}

#[test]
fn a_shared_prompt_is_computed_once_for_a_whole_batch() {
    let trees: Vec<TrainTree> = (0..8)
        .map(|rollout| {
            packed(
                &[call(0, &[1, 2, 3, 4], Some(&[10, 20 + rollout % 2]))],
                &Selection::All,
            )
        })
        .collect();
    let forest = Forest::merge(&trees);
    let stats = forest.stats();
    assert_eq!(stats.tokens_logical, 8 * 6);
    assert_eq!(stats.tokens_unique, 4 + 1 + 2);
    assert_eq!(stats.terms, 16);
    assert_eq!(stats.depth_max, 6);
    // One term per rollout on the token that all eight generated.
    assert_eq!(forest.nodes[0].terms.len(), 8);
    assert_eq!(forest.nodes.len(), 3);
}

#[test]
fn teachers_are_imitated() {
    let tree = TrainTree::supervised(&[1, 2, 3], &[true, false, true]).unwrap();
    assert_eq!(
        tree.nodes()[0].targets,
        [None, None, Some(Target::Supervised)]
    );
    let captured = packed(&[call(0, &[1], Some(&[2, 3]))], &Selection::All).into_supervised();
    assert_eq!(
        captured.nodes()[1].targets,
        [Some(Target::Supervised), Some(Target::Supervised)]
    );
}

#[test]
fn malformed_input_is_refused_with_words() {
    let calls = [call(3, &[1], None), call(3, &[2], None)];
    assert_eq!(
        Tree::build(&calls),
        Err(TreeError::DuplicateCall { index: 3 })
    );

    let mut mixed = [call(0, &[1], None), call(1, &[2], None)];
    mixed[1].id.rollout = record::RolloutId::new("q").unwrap();
    assert!(matches!(
        Tree::build(&mixed),
        Err(TreeError::MixedRollouts { .. })
    ));

    let mut short = [call(0, &[1], Some(&[2, 3]))];
    short[0].generation.as_mut().unwrap().logprobs_model.pop();
    assert!(matches!(
        Tree::build(&short),
        Err(TreeError::Generation { call: 0, .. })
    ));

    let many: Vec<record::Call> = (0..20).map(|at| call(at, &[at], Some(&[1]))).collect();
    let limits = TreeLimits { nodes_max: 16 };
    assert!(matches!(
        Tree::build_within(&many, limits),
        Err(TreeError::TooManyNodes { .. })
    ));

    let mut tree = TrainTree::new();
    for (parent, tokens, targets) in [
        (None, vec![], vec![]),
        (None, vec![1, 2], vec![None]),
        (Some(0), vec![1], vec![None]),
        (None, vec![1], vec![Some(Target::Supervised)]),
    ] {
        let refused = tree.push(parent, tokens, targets);
        assert!(
            matches!(refused, Err(TreeError::TrainNode { .. })),
            "{refused:?}"
        );
    }
    assert_eq!(Tree::build(&[]).map(|tree| tree.nodes.len()), Ok(0));
}
