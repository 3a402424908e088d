//! The trees of a whole batch, merged where their token prefixes are equal.

use serde::{Deserialize, Serialize};

use crate::radix::Radix;
use crate::{Target, TrainTree};

/// One loss term on the transition into a token of a [`ForestNode`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Term {
    /// The token within the node, from 0.
    pub offset: u32,
    /// The rollout: index of its tree in the argument of [`Forest::merge`].
    pub tree: u32,
    /// What is known about the token.
    pub target: Target,
}

/// A run of tokens that the same rollouts share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForestNode {
    /// The node before it; `None` for a root.
    pub parent: Option<u32>,
    /// The tokens, at least one.
    pub tokens: Vec<u32>,
    /// Loss terms, sorted by offset and tree. A token that several rollouts generated has one
    /// term per rollout: their rewards differ.
    pub terms: Vec<Term>,
}

/// What a learner computes in one step: every distinct prefix once.
///
/// Nodes are in preorder: a parent comes before its children and every subtree is one contiguous
/// run, so a depth-first learner can push and pop keys and values as it goes. Roots and siblings
/// are sorted by their first token, which no two of them share; so the shape does not depend on
/// the order of the trees.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Forest {
    /// The nodes in preorder.
    pub nodes: Vec<ForestNode>,
    /// Trees merged.
    pub trees: u32,
    /// Sum of all root-to-leaf lengths before merging: what a learner without trees computes.
    pub tokens_logical: u64,
}

/// Sizes of a [`Forest`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForestStats {
    /// Tokens that a learner without trees would compute.
    pub tokens_logical: u64,
    /// Tokens stored: what is computed.
    pub tokens_unique: u64,
    /// Loss terms.
    pub terms: u64,
    /// Tokens of the longest root-to-leaf path.
    pub depth_max: u64,
}

/// Loss terms of a radix node while the forest is built.
type Terms = Vec<Vec<Term>>;

/// Lays the radix tree out in preorder, joining chains that nobody else shares.
fn lay_out(mut radix: Radix, mut terms: Terms) -> Vec<ForestNode> {
    let mut nodes: Vec<ForestNode> = Vec::with_capacity(radix.nodes.len());
    let mut stack: Vec<(u32, Option<u32>)> =
        radix.roots.iter().rev().map(|&root| (root, None)).collect();
    while let Some((mut at, parent)) = stack.pop() {
        let index = nodes.len() as u32;
        let mut tokens = std::mem::take(&mut radix.nodes[at as usize].tokens);
        let mut own = std::mem::take(&mut terms[at as usize]);
        while let [only] = radix.nodes[at as usize].children[..] {
            at = only;
            let shift = tokens.len() as u32;
            tokens.append(&mut radix.nodes[at as usize].tokens);
            own.extend(terms[at as usize].drain(..).map(|term| Term {
                offset: term.offset + shift,
                ..term
            }));
        }
        own.sort_by_key(|term| (term.offset, term.tree));
        nodes.push(ForestNode {
            parent,
            tokens,
            terms: own,
        });
        let children = &radix.nodes[at as usize].children;
        stack.extend(children.iter().rev().map(|&child| (child, Some(index))));
    }
    nodes
}

impl Forest {
    /// Merges trees where their token prefixes are equal. Time and memory are linear in the
    /// tokens of the trees.
    #[must_use]
    pub fn merge(trees: &[TrainTree]) -> Self {
        let mut radix = Radix::default();
        let mut ends: Vec<Vec<Option<u32>>> = Vec::with_capacity(trees.len());
        for tree in trees {
            let mut own: Vec<Option<u32>> = Vec::with_capacity(tree.nodes().len());
            for node in tree.nodes() {
                let below = node.parent.and_then(|parent| own[parent]);
                own.push(radix.insert(below, &node.tokens));
            }
            ends.push(own);
        }
        // Only now is the shape final: spread each tree's targets over the nodes that hold them.
        let mut terms: Terms = radix.nodes.iter().map(|_| Vec::new()).collect();
        for (tree_id, (tree, own)) in trees.iter().zip(&ends).enumerate() {
            for (node, &end) in tree.nodes().iter().zip(own) {
                let mut from = node.targets.len();
                for holder in radix.upwards(end, node.targets.len()) {
                    from -= radix.nodes[holder as usize].tokens.len();
                    let held =
                        &node.targets[from..from + radix.nodes[holder as usize].tokens.len()];
                    terms[holder as usize].extend(held.iter().enumerate().filter_map(
                        |(offset, target)| {
                            target.map(|target| Term {
                                offset: offset as u32,
                                tree: tree_id as u32,
                                target,
                            })
                        },
                    ));
                }
            }
        }
        Self {
            nodes: lay_out(radix, terms),
            trees: trees.len() as u32,
            tokens_logical: trees.iter().map(|tree| tree.tokens_flat() as u64).sum(),
        }
    }

    /// Its sizes.
    #[must_use]
    pub fn stats(&self) -> ForestStats {
        let mut depth = vec![0_u64; self.nodes.len()];
        let mut stats = ForestStats {
            tokens_logical: self.tokens_logical,
            ..ForestStats::default()
        };
        for (index, node) in self.nodes.iter().enumerate() {
            let above = node.parent.map_or(0, |parent| depth[parent as usize]);
            depth[index] = above + node.tokens.len() as u64;
            stats.tokens_unique += node.tokens.len() as u64;
            stats.terms += node.terms.len() as u64;
            stats.depth_max = stats.depth_max.max(depth[index]);
        }
        stats
    }

    /// Loss terms of each tree: the denominators of per-rollout aggregation.
    #[must_use]
    pub fn terms_per_tree(&self) -> Vec<usize> {
        let mut counts = vec![0; self.trees as usize];
        for term in self.nodes.iter().flat_map(|node| &node.terms) {
            counts[term.tree as usize] += 1;
        }
        counts
    }
}
