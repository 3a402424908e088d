//! The terms of a batch in one list, each with its place in its rollout's tree: what advantages on
//! trees, ratios over rollouts and the metrics by token class need.

use std::collections::{BTreeMap, BTreeSet};

use record::PolicyVersion;
use tree::{Forest, Target};

use crate::metrics::Class;

/// One term.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// Index of the rollout in the batch.
    pub(crate) tree: usize,
    /// The engine's log-probability under the distribution that was sampled from.
    pub(crate) sampled: f32,
    /// The weights that drew it.
    pub(crate) version: PolicyVersion,
    /// The term of the same rollout before it on its path.
    pub(crate) before: Option<usize>,
    pub(crate) class: Class,
}

/// All terms, node by node in preorder.
#[derive(Debug)]
pub(crate) struct Terms {
    pub(crate) places: Vec<Place>,
    /// First term of each node.
    bases: Vec<usize>,
    /// Terms of each rollout, parents first.
    pub(crate) rows: Vec<Vec<usize>>,
}

impl Terms {
    /// Of a forest whose terms are all sampled; others are counted as no term of any rollout.
    pub(crate) fn new(forest: &Forest) -> Self {
        let nodes = &forest.nodes;
        // Rollouts with terms in each node's subtree: only those are carried down.
        let mut below: Vec<BTreeSet<u32>> = nodes
            .iter()
            .map(|node| node.terms.iter().map(|term| term.tree).collect())
            .collect();
        for index in (0..nodes.len()).rev() {
            if let Some(parent) = nodes[index].parent {
                let own = below[index].clone();
                below[parent as usize].extend(own);
            }
        }
        let mut places: Vec<Place> = Vec::new();
        let mut positions: Vec<usize> = Vec::new();
        let mut bases = Vec::with_capacity(nodes.len());
        let mut rows = vec![Vec::new(); forest.trees as usize];
        let mut depths = vec![0_usize; nodes.len()];
        // The last term of each rollout at each node's end.
        let mut tails: Vec<BTreeMap<u32, usize>> = Vec::with_capacity(nodes.len());
        for (index, node) in nodes.iter().enumerate() {
            bases.push(places.len());
            let (mut tail, start) = match node.parent {
                None => (BTreeMap::new(), 0),
                Some(parent) => {
                    let parent = parent as usize;
                    let wanted = tails[parent].iter();
                    let wanted = wanted.filter(|(tree, _)| below[index].contains(tree));
                    (
                        wanted.map(|(tree, term)| (*tree, *term)).collect(),
                        depths[parent],
                    )
                }
            };
            depths[index] = start + node.tokens.len();
            for term in &node.terms {
                let position = start + term.offset as usize;
                let before = tail.insert(term.tree, places.len());
                let follows = before.filter(|before| positions[*before] + 1 == position);
                if let Some(before) = follows
                    && places[before].class == Class::Closing
                {
                    places[before].class = Class::Middle;
                }
                let (sampled, version) = match term.target {
                    Target::Sampled {
                        logprob_sampled,
                        version,
                        ..
                    } => (logprob_sampled, version),
                    Target::Supervised => (0.0, 0),
                };
                rows[term.tree as usize].push(places.len());
                places.push(Place {
                    tree: term.tree as usize,
                    sampled,
                    version,
                    before,
                    // Until a token follows it.
                    class: if follows.is_some() {
                        Class::Closing
                    } else {
                        Class::Opening
                    },
                });
                positions.push(position);
            }
            tails.push(tail);
        }
        Self {
            places,
            bases,
            rows,
        }
    }

    /// Index of a node's first term.
    pub(crate) fn base(&self, node: usize) -> usize {
        self.bases[node]
    }

    /// Of one rollout, for each of its terms the index *in its row* of the term before it.
    pub(crate) fn before_in_row(&self, row: &[usize]) -> Vec<Option<usize>> {
        row.iter()
            .map(|term| {
                let before = self.places[*term].before?;
                // Rows are ascending: places are made in preorder.
                row.binary_search(&before).ok()
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tree::TrainTree;

    fn sampled(logprob: f32) -> Option<Target> {
        Some(Target::Sampled {
            logprob_model: logprob,
            logprob_sampled: logprob,
            version: 3,
        })
    }

    #[test]
    fn places_follow_each_rollout_through_forks_and_context() {
        let mut first = TrainTree::new();
        let root = first
            .push(None, vec![1, 2, 5], vec![None, None, sampled(-1.0)])
            .unwrap();
        // A reply of two tokens, a tool's answer, a reply of one.
        let _ = first
            .push(
                Some(root),
                vec![6, 9, 7],
                vec![sampled(-2.0), None, sampled(-3.0)],
            )
            .unwrap();
        let _ = first
            .push(Some(root), vec![8], vec![sampled(-4.0)])
            .unwrap();
        let mut second = TrainTree::new();
        let root = second.push(None, vec![1, 2], vec![None, None]).unwrap();
        let _ = second
            .push(Some(root), vec![5, 6], vec![sampled(-5.0), sampled(-6.0)])
            .unwrap();
        let forest = Forest::merge(&[first, second]);
        let terms = Terms::new(&forest);
        let of = |tree: usize| -> Vec<(f32, Option<f32>, Class)> {
            let row = terms.rows[tree].iter();
            row.map(|term| {
                let place = terms.places[*term];
                let before = place.before.map(|before| terms.places[before].sampled);
                (place.sampled, before, place.class)
            })
            .collect()
        };
        assert_eq!(
            of(0),
            [
                (-1.0, None, Class::Opening),
                (-2.0, Some(-1.0), Class::Closing),
                (-3.0, Some(-2.0), Class::Opening),
                (-4.0, Some(-1.0), Class::Closing),
            ]
        );
        assert_eq!(
            of(1),
            [
                (-5.0, None, Class::Opening),
                (-6.0, Some(-5.0), Class::Closing)
            ]
        );
        assert_eq!(
            terms.before_in_row(&terms.rows[0]),
            [None, Some(0), Some(1), Some(0)]
        );
        assert!(terms.places.iter().all(|place| place.version == 3));
        let bases: usize = terms.base(0);
        assert_eq!(bases, 0);
    }
}
