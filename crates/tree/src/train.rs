//! What a learner computes for one rollout: the kept part of its tree, one optional target per
//! token.

use record::PolicyVersion;
use serde::{Deserialize, Serialize};

use crate::TreeError;

/// Why the transition into a token takes part in the loss.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Target {
    /// The policy drew this token: a policy-gradient term.
    Sampled {
        /// Log-probability under the model's own distribution (temperature 1, no filter).
        logprob_model: f32,
        /// Log-probability under the distribution that was sampled from.
        logprob_sampled: f32,
        /// The weights that drew it.
        version: PolicyVersion,
    },
    /// Somebody else wrote this token and it is to be imitated: a cross-entropy term.
    Supervised,
}

/// A run of tokens of a [`TrainTree`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainNode {
    /// The node before it; `None` for a root. Always smaller than the node's own index.
    pub parent: Option<usize>,
    /// The tokens, at least one.
    pub tokens: Vec<u32>,
    /// One per token: the loss on the transition *into* that token. So the first token of every
    /// child is supervised by its own edge, however many siblings it has.
    pub targets: Vec<Option<Target>>,
}

/// The tokens that a learner computes for one rollout, each once. Nodes are stored parents first.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainTree {
    nodes: Vec<TrainNode>,
}

impl TrainTree {
    /// A tree without nodes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a node and returns its index.
    ///
    /// # Errors
    /// [`TreeError::TrainNode`] when `tokens` is empty, `targets` has another length, `parent`
    /// does not exist yet, or the first token of a root has a target (nothing precedes it, so
    /// nothing predicts it).
    pub fn push(
        &mut self,
        parent: Option<usize>,
        tokens: Vec<u32>,
        targets: Vec<Option<Target>>,
    ) -> Result<usize, TreeError> {
        let index = self.nodes.len();
        let problem = if tokens.is_empty() {
            Some("expected at least one token, found none".to_owned())
        } else if tokens.len() != targets.len() {
            Some(format!(
                "expected one target per token, found {} tokens and {} targets",
                tokens.len(),
                targets.len()
            ))
        } else if parent.is_some_and(|parent| parent >= index) {
            Some(format!(
                "expected a parent below {index}, found {parent:?}: push parents first"
            ))
        } else if parent.is_none() && targets.first().is_some_and(Option::is_some) {
            Some(
                "the first token of a root has a target, but no token precedes it: make it context"
                    .to_owned(),
            )
        } else {
            None
        };
        if let Some(problem) = problem {
            return Err(TreeError::TrainNode { index, problem });
        }
        self.nodes.push(TrainNode {
            parent,
            tokens,
            targets,
        });
        Ok(index)
    }

    /// One sequence to imitate: tokens where `trained` holds become supervised terms, except
    /// the first, which nothing predicts.
    ///
    /// # Errors
    /// [`TreeError::TrainNode`] when the lengths differ or `tokens` is empty.
    pub fn supervised(tokens: &[u32], trained: &[bool]) -> Result<Self, TreeError> {
        let targets = trained
            .iter()
            .enumerate()
            .map(|(at, &trained)| (trained && at > 0).then_some(Target::Supervised))
            .collect();
        let mut tree = Self::new();
        tree.push(None, tokens.to_vec(), targets)?;
        Ok(tree)
    }

    /// The same tokens with every target replaced by imitation: a captured rollout of a teacher
    /// becomes training data for [`Target::Supervised`].
    #[must_use]
    pub fn into_supervised(mut self) -> Self {
        for node in &mut self.nodes {
            for target in node.targets.iter_mut().flatten() {
                *target = Target::Supervised;
            }
        }
        self
    }

    /// Turns targets that are not wanted into context; returns how many.
    pub fn retain(&mut self, wanted: impl Fn(&Target) -> bool) -> usize {
        let mut dropped = 0;
        for target in self.nodes.iter_mut().flat_map(|node| &mut node.targets) {
            if target.as_ref().is_some_and(|known| !wanted(known)) {
                *target = None;
                dropped += 1;
            }
        }
        dropped
    }

    /// The nodes, parents first.
    #[must_use]
    pub fn nodes(&self) -> &[TrainNode] {
        &self.nodes
    }

    /// Tokens stored, targets or not.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.nodes.iter().map(|node| node.tokens.len()).sum()
    }

    /// Tokens that have a target: the rollout's share in the loss.
    #[must_use]
    pub fn terms(&self) -> usize {
        self.nodes
            .iter()
            .map(|node| node.targets.iter().flatten().count())
            .sum()
    }

    /// Tokens that a learner without tree would compute: the sum of all root-to-leaf lengths.
    #[must_use]
    pub fn tokens_flat(&self) -> usize {
        let mut depth = vec![0; self.nodes.len()];
        let mut leaf = vec![true; self.nodes.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            let above = node.parent.map_or(0, |parent| {
                leaf[parent] = false;
                depth[parent]
            });
            depth[index] = above + node.tokens.len();
        }
        depth
            .iter()
            .zip(&leaf)
            .filter(|(_, leaf)| **leaf)
            .map(|(depth, _)| depth)
            .sum()
    }
}
