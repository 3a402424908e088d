//! I1, I3 and the merging laws over random call sets, against brute force over prefixes.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use record::Call;

use super::{attempt, call, logprob};
use crate::{Forest, Kept, Selection, Target, TrainTree, Tree, select};

/// One random step of a rollout, over an alphabet so small that paths meet by chance.
#[derive(Debug, Clone)]
struct Step {
    how: u8,
    which: usize,
    cut: usize,
    fresh: Vec<u32>,
    output: Vec<u32>,
    repeat: bool,
    delivered: bool,
    logprobs: bool,
    failed: bool,
}

fn step() -> impl Strategy<Value = Step> {
    (
        (0_u8..5, any::<usize>(), any::<usize>()),
        prop::collection::vec(0_u32..3, 0..5),
        prop::collection::vec(0_u32..3, 0..6),
        prop::bool::weighted(0.2),
        prop::bool::weighted(0.85),
        prop::bool::weighted(0.9),
        prop::bool::weighted(0.1),
    )
        .prop_map(
            |((how, which, cut), fresh, output, repeat, delivered, logprobs, failed)| Step {
                how,
                which,
                cut,
                fresh,
                output,
                repeat,
                delivered,
                logprobs,
                failed,
            },
        )
}

fn output_of(call: &Call) -> &[u32] {
    call.generation
        .as_ref()
        .map_or(&[], |generation| &generation.token_ids)
}

fn rollout(steps: &[Step]) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let earlier = (!calls.is_empty()).then(|| &calls[step.which % calls.len()]);
        let prompt: Vec<u32> = match (step.how, earlier) {
            // Goes on after a reply.
            (0 | 1, Some(earlier)) => {
                [&earlier.prompt_ids, output_of(earlier), &step.fresh].concat()
            }
            // Asks the same again.
            (2, Some(earlier)) => earlier.prompt_ids.clone(),
            // Leaves somewhere inside the prompt.
            (3, Some(earlier)) => {
                let cut = step.cut % (earlier.prompt_ids.len() + 1);
                [&earlier.prompt_ids[..cut], &step.fresh].concat()
            }
            _ => step.fresh.clone(),
        };
        let output = match earlier {
            Some(earlier) if step.repeat => output_of(earlier).to_vec(),
            _ => step.output.clone(),
        };
        let mut next = call(index as u32, &prompt, (!step.failed).then_some(&output));
        next.attempts = vec![attempt(step.delivered && !step.failed)];
        if let (false, Some(generation)) = (step.logprobs, next.generation.as_mut()) {
            generation.logprobs_model.clear();
            generation.logprobs_sampled.clear();
        }
        calls.push(next);
    }
    calls
}

/// What brute force says about a prefix: who generated its last token, as (call, offset).
fn generators(calls: &[Call]) -> BTreeMap<Vec<u32>, Vec<(u32, usize)>> {
    let mut found: BTreeMap<Vec<u32>, Vec<(u32, usize)>> = BTreeMap::new();
    for call in calls {
        let whole = [&call.prompt_ids, output_of(call)].concat();
        for end in 1..=whole.len() {
            let makers = found.entry(whole[..end].to_vec()).or_default();
            if end > call.prompt_ids.len() {
                makers.push((call.id.index, end - call.prompt_ids.len() - 1));
            }
        }
    }
    found
}

/// Every token of a training tree as (path up to and including it, target).
pub(crate) fn spelled(tree: &TrainTree) -> Vec<(Vec<u32>, Option<Target>)> {
    let mut paths: Vec<Vec<u32>> = Vec::new();
    let mut all = Vec::new();
    for node in tree.nodes() {
        let mut path = node
            .parent
            .map_or(Vec::new(), |parent| paths[parent].clone());
        for (token, target) in node.tokens.iter().zip(&node.targets) {
            path.push(*token);
            all.push((path.clone(), *target));
        }
        paths.push(path);
    }
    all
}

pub(crate) fn sampled(call: u32, offset: usize) -> Target {
    Target::Sampled {
        logprob_model: logprob(call, offset),
        logprob_sampled: logprob(call, offset) - 0.5,
        version: u64::from(call),
    }
}

fn selections() -> Vec<Selection> {
    vec![
        Selection::default(),
        Selection::All,
        Selection::Longest,
        Selection::Temporal,
    ]
}

/// I3: exactly the tokens that a kept call generated, each once, with its owner's numbers.
fn check_kept(calls: &[Call], tree: &Tree, kept: &Kept) -> Result<(), TestCaseError> {
    let kept_calls: BTreeSet<u32> = kept.calls.iter().copied().collect();
    let expected: BTreeMap<Vec<u32>, Target> = generators(calls)
        .into_iter()
        .filter(|(_, makers)| makers.iter().any(|(call, _)| kept_calls.contains(call)))
        .filter_map(|(path, makers)| {
            let (owner, offset) = *makers
                .iter()
                .min_by_key(|(call, _)| (!calls[*call as usize].delivered(), *call))?;
            let trainable = calls[owner as usize].generation.as_ref()?.trainable();
            // Nothing predicts the first token of a sequence.
            (trainable && path.len() > 1).then(|| (path, sampled(owner, offset)))
        })
        .collect();
    let packed = kept.train_tree(tree).unwrap();
    let mut found = BTreeMap::new();
    for (path, target) in spelled(&packed) {
        if let Some(target) = target {
            prop_assert!(
                found.insert(path.clone(), target).is_none(),
                "{path:?} is trained twice"
            );
        }
    }
    prop_assert_eq!(&found, &expected);
    prop_assert_eq!(packed.terms(), expected.len());
    prop_assert_eq!(kept.tokens_trained, expected.len());
    // The price list is complete: kept and lost add up to everything that could be trained.
    let lost: usize = kept.dropped.iter().map(|drop| drop.tokens_trainable).sum();
    let trainable: usize = tree.nodes.iter().map(|node| node.tokens_trainable()).sum();
    prop_assert_eq!(kept.tokens_trained + lost, trainable);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_call_is_spelled_and_every_token_stored_once(
        steps in prop::collection::vec(step(), 0..12)
    ) {
        let calls = rollout(&steps);
        let tree = Tree::build(&calls).unwrap();
        prop_assert_eq!(tree.check(&calls), Ok(()));
        prop_assert_eq!(tree.stats().tokens_unique, generators(&calls).len());
        for (index, node) in tree.nodes.iter().enumerate() {
            prop_assert!(node.parent.is_none_or(|parent| parent < index));
            prop_assert!(!node.tokens.is_empty());
        }
    }

    #[test]
    fn each_generated_token_of_a_kept_branch_is_trained_once(
        steps in prop::collection::vec(step(), 0..12)
    ) {
        let calls = rollout(&steps);
        let tree = Tree::build(&calls).unwrap();
        for selection in selections() {
            check_kept(&calls, &tree, &select(&tree, &selection))?;
        }
    }

    #[test]
    fn the_order_of_the_calls_does_not_matter(
        (steps, shuffled) in prop::collection::vec(step(), 0..10)
            .prop_flat_map(|steps| {
                let order = Just((0..steps.len()).collect::<Vec<_>>()).prop_shuffle();
                (Just(steps), order)
            })
    ) {
        let calls = rollout(&steps);
        let other: Vec<Call> = shuffled.iter().map(|&at| calls[at].clone()).collect();
        prop_assert_eq!(Tree::build(&calls), Tree::build(&other));
    }

    #[test]
    fn merging_loses_and_repeats_nothing(
        rollouts in prop::collection::vec(prop::collection::vec(step(), 0..7), 0..6)
    ) {
        let trees: Vec<TrainTree> = rollouts
            .iter()
            .map(|steps| {
                let tree = Tree::build(&rollout(steps)).unwrap();
                select(&tree, &Selection::All).train_tree(&tree).unwrap()
            })
            .collect();
        let forest = Forest::merge(&trees);
        let stats = forest.stats();

        // Every distinct prefix once, every term once.
        let distinct: BTreeSet<Vec<u32>> = trees
            .iter()
            .flat_map(|tree| spelled(tree).into_iter().map(|(path, _)| path))
            .collect();
        prop_assert_eq!(stats.tokens_unique as usize, distinct.len());
        let terms: Vec<usize> = trees.iter().map(TrainTree::terms).collect();
        prop_assert_eq!(stats.terms as usize, terms.iter().sum::<usize>());
        prop_assert_eq!(forest.terms_per_tree(), terms);

        // Splitting gives each tree back: a packed tree is the set of paths to its targets.
        let mut paths: Vec<Vec<u32>> = Vec::new();
        let mut found = vec![BTreeMap::new(); trees.len()];
        for (index, node) in forest.nodes.iter().enumerate() {
            prop_assert!(node.parent.is_none_or(|parent| (parent as usize) < index));
            let above = node.parent.map_or(Vec::new(), |parent| paths[parent as usize].clone());
            for term in &node.terms {
                let path = [&above[..], &node.tokens[..=term.offset as usize]].concat();
                prop_assert!(found[term.tree as usize].insert(path, term.target).is_none());
            }
            paths.push([above, node.tokens.clone()].concat());
        }
        for (tree, found) in trees.iter().zip(&found) {
            let expected: BTreeMap<Vec<u32>, Target> = spelled(tree)
                .into_iter()
                .filter_map(|(path, target)| Some((path, target?)))
                .collect();
            prop_assert_eq!(found, &expected);
            let to_targets: BTreeSet<&[u32]> = found
                .keys()
                .flat_map(|path| (1..=path.len()).map(|end| &path[..end]))
                .collect();
            let packed: BTreeSet<Vec<u32>> = spelled(tree).into_iter().map(|(path, _)| path).collect();
            prop_assert!(packed.iter().map(Vec::as_slice).eq(to_targets.into_iter()));
        }

        // The order of the trees only renames them.
        let reversed: Vec<TrainTree> = trees.iter().rev().cloned().collect();
        let mut other = Forest::merge(&reversed);
        for node in &mut other.nodes {
            for term in &mut node.terms {
                term.tree = trees.len() as u32 - 1 - term.tree;
            }
            node.terms.sort_by_key(|term| (term.offset, term.tree));
        }
        prop_assert_eq!(&other.nodes, &forest.nodes);
    }
}
