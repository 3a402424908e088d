//! From what was kept of a tree to what a learner computes.

use record::{PolicySpan, PolicyVersion};

use crate::select::Kept;
use crate::tree::{Node, Origin, Tree};
use crate::{Target, TrainTree, TreeError};

impl Kept {
    /// Packs the kept part for a learner: every token once, with its target. Context that no
    /// trained token follows is left out, since nothing depends on it. A generated token
    /// without predecessor (an empty prompt) is context.
    ///
    /// # Errors
    /// [`TreeError::MediaTrained`] when a kept branch holds anything but text;
    /// [`TreeError::TrainNode`] for a `Kept` of another tree.
    pub fn train_tree(&self, tree: &Tree) -> Result<TrainTree, TreeError> {
        pack(tree, &self.trained, sampled_targets)
    }

    /// Packs the kept part for supervised training: every generated token of the kept branches is
    /// a target, whether or not the engine told its log-probability (a scripted teacher has none).
    ///
    /// # Errors
    /// As [`Kept::train_tree`].
    pub fn supervised_tree(&self, tree: &Tree) -> Result<TrainTree, TreeError> {
        let generated: Vec<usize> = self
            .nodes
            .iter()
            .copied()
            .filter(|&node| tree.nodes.get(node).is_none_or(Node::generated))
            .collect();
        pack(tree, &generated, |node| {
            vec![Target::Supervised; node.tokens.len()]
        })
    }
}

/// The targets of a generated node, one per token; none without log-probabilities (I4).
pub(crate) fn sampled_targets(node: &Node) -> Vec<Target> {
    let Origin::Generated {
        logprobs_model,
        logprobs_sampled,
        policy,
        ..
    } = &node.origin
    else {
        return Vec::new();
    };
    logprobs_model
        .iter()
        .zip(logprobs_sampled)
        .enumerate()
        .map(|(at, (&model, &sampled))| Target::Sampled {
            logprob_model: model,
            logprob_sampled: sampled,
            version: version_at(policy, at),
        })
        .collect()
}

/// The weights that drew the token at `at` of a node.
fn version_at(policy: &[PolicySpan], at: usize) -> PolicyVersion {
    let after = policy.partition_point(|span| span.start as usize <= at);
    after.checked_sub(1).map_or(0, |span| policy[span].version)
}

/// Which nodes are in `of` or above one of them.
///
/// # Errors
/// [`TreeError::TrainNode`] for a node that the tree does not have.
pub(crate) fn with_ancestors(tree: &Tree, of: &[usize]) -> Result<Vec<bool>, TreeError> {
    let mut needed = vec![false; tree.nodes.len()];
    for &node in of {
        if node >= tree.nodes.len() {
            return Err(TreeError::TrainNode {
                index: node,
                problem: format!("expected a node below {}", tree.nodes.len()),
            });
        }
        let mut at = Some(node);
        while let Some(node) = at
            && !needed[node]
        {
            needed[node] = true;
            at = tree.nodes[node].parent;
        }
    }
    Ok(needed)
}

/// The nodes in `trained` and their ancestors, with the targets of the trained ones.
fn pack(
    tree: &Tree,
    trained: &[usize],
    targets_of: impl Fn(&Node) -> Vec<Target>,
) -> Result<TrainTree, TreeError> {
    let needed = with_ancestors(tree, trained)?;
    let mut is_trained = vec![false; tree.nodes.len()];
    for &node in trained {
        is_trained[node] = true;
    }
    let mut packed = TrainTree::new();
    let mut index_of = vec![None; tree.nodes.len()];
    for (index, node) in tree.nodes.iter().enumerate() {
        if !needed[index] {
            continue;
        }
        if !node.media.is_empty() {
            let spans = node.media.len();
            return Err(TreeError::MediaTrained { index, spans });
        }
        let mut targets = vec![None; node.tokens.len()];
        if is_trained[index] {
            for (target, known) in targets.iter_mut().zip(targets_of(node)) {
                *target = Some(known);
            }
        }
        let parent = node.parent.and_then(|parent| index_of[parent]);
        if parent.is_none()
            && let Some(first) = targets.first_mut()
        {
            *first = None;
        }
        index_of[index] = Some(packed.push(parent, node.tokens.clone(), targets)?);
    }
    Ok(packed)
}
