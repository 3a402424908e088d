//! What each policy keeps.

use super::{Talk, assistant, attempt, call, calls_tool, system, tool_result, user, with_tools};
use crate::{CallClass, DropReason, OverBranched, Selection, Tree, select};

fn clawgym2(leaves_max: usize) -> Selection {
    Selection::Clawgym2 {
        leaves_max,
        classes: vec![CallClass::Main],
    }
}

/// A retry (1) of the first call (0) goes on (2); the last reply (3) never arrived.
fn with_dead_leaves() -> Vec<record::Call> {
    let mut calls = vec![
        call(0, &[1, 2], Some(&[10, 11, 12, 13])),
        call(1, &[1, 2], Some(&[20, 21])),
        call(2, &[1, 2, 20, 21, 3], Some(&[30])),
        call(3, &[1, 2, 20, 21, 3, 30, 4], Some(&[40, 41])),
    ];
    calls[3].attempts = vec![attempt(false)];
    calls
}

#[test]
fn dead_leaves_are_dropped_with_their_price() {
    let tree = Tree::build(&with_dead_leaves()).unwrap();
    let kept = select(&tree, &Selection::default());
    assert_eq!(kept.calls, [1, 2]);
    assert_eq!((kept.tokens_trained, kept.leaves), (3, 1));
    let lost: Vec<(DropReason, usize)> = kept
        .dropped
        .iter()
        .map(|dropped| (dropped.reason, dropped.tokens_trainable))
        .collect();
    assert_eq!(
        lost,
        [
            (DropReason::DeadLeaf, 4),
            (DropReason::DeadLeaf, 0),
            (DropReason::DeadLeaf, 2)
        ]
    );
}

#[test]
fn the_other_policies_differ_as_they_say() {
    let tree = Tree::build(&with_dead_leaves()).unwrap();
    assert_eq!(select(&tree, &Selection::All).calls, [0, 1, 2, 3]);
    assert_eq!(select(&tree, &Selection::Longest).calls, [1, 2, 3]);
    // Roots stay under the temporal rule, so the first try does too.
    assert_eq!(select(&tree, &Selection::Temporal).calls, [0, 1, 2, 3]);
    let calls = [
        call(0, &[1], Some(&[2])),
        call(1, &[1, 2, 3], Some(&[4])),
        call(2, &[1, 2, 3], Some(&[5])),
    ];
    let tree = Tree::build(&calls).unwrap();
    let kept = select(&tree, &Selection::Temporal);
    assert_eq!(kept.calls, [0, 2]);
    assert_eq!(kept.dropped[0].reason, DropReason::Superseded);
}

#[test]
fn over_branched_rollouts_are_discarded_whole() {
    // Every turn forks by drift, so every turn is a leaf of its own.
    let mut talk = Talk::new();
    let mut history = vec![system("Work."), user("Tidy up the folder.")];
    for turn in 0..6 {
        let mut reply = calls_tool("bash", &format!("step {turn}"));
        let echo = reply.clone();
        reply.reasoning = Some(format!("thought {turn}"));
        talk.send(with_tools(&["bash"], history.clone()), reply);
        history.extend([echo, tool_result("ok")]);
    }
    let tree = Tree::build(&talk.calls).unwrap();
    let kept = select(&tree, &clawgym2(6));
    assert_eq!((kept.leaves, kept.calls.len()), (6, 6));
    let trainable = kept.tokens_trained;
    let kept = select(&tree, &clawgym2(5));
    assert_eq!(
        kept.discarded,
        Some(OverBranched {
            leaves: 6,
            leaves_max: 5
        })
    );
    let lost: usize = kept
        .dropped
        .iter()
        .map(|dropped| dropped.tokens_trainable)
        .sum();
    assert_eq!((kept.tokens_trained, lost), (0, trainable));
    assert_eq!(kept.train_tree(&tree).unwrap().nodes(), []);
}

#[test]
fn a_small_drift_erases_no_trained_token() {
    // Elsewhere a 61-token turn whose history had drifted erased 28,404 trained tokens.
    let mut long = assistant(&"word ".repeat(5000));
    let echo = long.clone();
    long.reasoning = Some("short".to_owned());
    let mut talk = Talk::new();
    let opening = vec![system("Work."), user("Tell me all.")];
    talk.send(with_tools(&["bash"], opening.clone()), long);
    let output = talk.calls[0].generation.as_ref().unwrap().token_ids.len();
    talk.send(
        with_tools(&["bash"], [opening, vec![echo, user("Thanks.")]].concat()),
        assistant("Bye."),
    );
    let tree = Tree::build(&talk.calls).unwrap();
    assert_eq!(tree.forks.len(), 1);
    let kept = select(&tree, &Selection::default());
    assert_eq!(kept.tokens_trained, output + "Bye.".len() + 1);
    assert!(kept.dropped.is_empty(), "{:?}", kept.dropped);
}

#[test]
fn of_two_last_replies_the_longer_chain_stays() {
    let mut calls = vec![
        call(0, &[1], Some(&[10])),
        call(1, &[1, 10, 2], Some(&[11, 12])),
        call(2, &[1, 10, 2], Some(&[13])),
    ];
    let tree = Tree::build(&calls).unwrap();
    assert_eq!(select(&tree, &Selection::default()).calls, [0, 1]);
    // Length counts only what reached the harness.
    calls[1].attempts = vec![attempt(false)];
    let tree = Tree::build(&calls).unwrap();
    assert_eq!(select(&tree, &Selection::default()).calls, [0, 2]);
}

#[test]
fn a_rollout_without_tokens_keeps_nothing() {
    let tree = Tree::build(&[call(0, &[1, 2], None)]).unwrap();
    for selection in [Selection::default(), Selection::All, Selection::Longest] {
        let kept = select(&tree, &selection);
        assert_eq!(kept.tokens_trained, 0);
        assert_eq!(kept.train_tree(&tree).unwrap().terms(), 0);
    }
}
