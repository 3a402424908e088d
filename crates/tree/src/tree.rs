//! The prefix tree of one rollout.

use std::collections::BTreeSet;

use record::{Call, PolicyVersion};
use serde::{Deserialize, Serialize};

use crate::classify::{CallClass, classify};
use crate::fork::{Fork, explain};
use crate::layout::lay_out;
use crate::{TreeError, radix::Radix};

/// How large a tree may become (I10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TreeLimits {
    /// Nodes of one tree. A call adds at most four.
    pub nodes_max: usize,
}

impl Default for TreeLimits {
    /// 4096 nodes: more than 1000 calls.
    fn default() -> Self {
        Self { nodes_max: 4096 }
    }
}

/// Where the tokens of a node came from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Origin {
    /// Rendered or encoded: the model only read them.
    Context,
    /// The policy drew them.
    Generated {
        /// Who owns them: of all calls that generated these tokens at this place, the earliest
        /// delivered one.
        call: u32,
        /// Place of the node's first token in the owner's output.
        offset: u32,
        /// Log-probabilities under the model's own distribution; empty when none were recorded.
        logprobs_model: Vec<f32>,
        /// Log-probabilities under the distribution that was sampled from; empty as above.
        logprobs_sampled: Vec<f32>,
        /// The weights that drew each token.
        versions: Vec<PolicyVersion>,
        /// All calls that generated exactly these tokens here, the owner included, sorted.
        calls: Vec<u32>,
    },
}

/// A run of tokens that the same calls share in the same role: wholly context or wholly
/// generated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// The node before it; `None` for a root. Always smaller than the node's own index.
    pub parent: Option<usize>,
    /// Tokens on the path before this node.
    pub depth: usize,
    /// The tokens, at least one.
    pub tokens: Vec<u32>,
    /// Where they came from.
    pub origin: Origin,
    /// The earliest call whose path holds this node.
    pub first_call: u32,
    /// Calls whose prompt ends with this node.
    pub prompts_end: Vec<u32>,
    /// Calls whose output ends with this node (a call without output ends with its prompt).
    pub outputs_end: Vec<u32>,
    /// One past the last node of its subtree.
    pub subtree_end: usize,
}

impl Node {
    /// Whether its tokens may be trained: generated, with both log-probabilities (I4).
    #[must_use]
    pub fn trainable(&self) -> bool {
        matches!(&self.origin, Origin::Generated { logprobs_model, logprobs_sampled, .. }
            if logprobs_model.len() == self.tokens.len()
                && logprobs_sampled.len() == self.tokens.len())
    }

    /// How many of its tokens may be trained: all or none, but for the first token of a root,
    /// which nothing precedes and so nothing predicts.
    #[must_use]
    pub fn tokens_trainable(&self) -> usize {
        if self.trainable() {
            self.tokens.len() - usize::from(self.parent.is_none())
        } else {
            0
        }
    }

    /// Whether its tokens were generated.
    #[must_use]
    pub fn generated(&self) -> bool {
        matches!(self.origin, Origin::Generated { .. })
    }
}

/// A call's place in the tree.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// Its arrival number.
    pub call: u32,
    /// Where its prompt ends; `None` when the prompt is empty.
    pub prompt_node: Option<usize>,
    /// Where its output ends: root to here spells prompt and output. `None` when both are empty.
    pub node: Option<usize>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the output.
    pub output_tokens: usize,
    /// Whether the harness got the reply.
    pub delivered: bool,
    /// Whether there is a generation.
    pub generated: bool,
    /// The latest call whose prompt and output this prompt extends token by token.
    pub extends: Option<u32>,
    /// The call whose reply this one carries on, exactly or after an edit: the last one that its
    /// history echoes, at least `extends` when there is one.
    pub previous: Option<u32>,
    /// What kind of call it is.
    pub class: CallClass,
    /// Why it is of that kind.
    pub class_evidence: String,
    /// The conversation it belongs to: calls of one conversation continue each other. 0 is the
    /// main one.
    pub thread: u32,
    /// Stretch between context resets, from 0.
    pub segment: u32,
}

/// Sizes of a [`Tree`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeStats {
    /// Calls.
    pub calls: usize,
    /// Nodes.
    pub nodes: usize,
    /// Nodes without children.
    pub leaves: usize,
    /// Sum of prompt and output tokens over all calls.
    pub tokens_logical: usize,
    /// Tokens stored.
    pub tokens_unique: usize,
    /// Of those, generated.
    pub tokens_generated: usize,
    /// Of those, without log-probabilities: context for training (I4).
    pub tokens_without_logprobs: usize,
}

/// The prefix tree of one rollout. Nodes are in preorder, siblings by their earliest call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tree {
    /// The nodes.
    pub nodes: Vec<Node>,
    /// The calls, sorted by arrival number.
    pub places: Vec<Place>,
    /// Every divergence, by the call that caused it.
    pub forks: Vec<Fork>,
}

impl Tree {
    /// Builds the tree of one rollout with the default limits. The order of `calls` does not
    /// matter.
    ///
    /// # Errors
    /// See [`TreeError`].
    pub fn build(calls: &[Call]) -> Result<Self, TreeError> {
        Self::build_within(calls, TreeLimits::default())
    }

    /// Builds the tree of one rollout within limits of its own.
    ///
    /// # Errors
    /// See [`TreeError`].
    pub fn build_within(calls: &[Call], limits: TreeLimits) -> Result<Self, TreeError> {
        let calls = checked(calls)?;
        let mut radix = Radix::default();
        let mut ends = Vec::with_capacity(calls.len());
        for call in &calls {
            let prompt = radix.insert(None, &call.prompt_ids);
            let output = call
                .generation
                .as_ref()
                .map_or(&[][..], |generation| &generation.token_ids);
            ends.push((prompt, radix.insert(prompt, output)));
            if radix.nodes.len() > limits.nodes_max {
                return Err(TreeError::TooManyNodes {
                    calls: calls.len(),
                    nodes_max: limits.nodes_max,
                });
            }
        }
        let (nodes, mut places) = lay_out(radix, &calls, &ends);
        let mut tree = Self {
            nodes,
            places: Vec::new(),
            forks: Vec::new(),
        };
        classify(&calls, &mut places);
        tree.places = places;
        tree.forks = explain(&calls, &tree);
        Ok(tree)
    }

    /// The place of a call.
    #[must_use]
    pub fn place(&self, call: u32) -> Option<&Place> {
        self.places
            .binary_search_by_key(&call, |place| place.call)
            .ok()
            .map(|at| &self.places[at])
    }

    /// Nodes from a root down to `node`.
    #[must_use]
    pub fn path(&self, node: Option<usize>) -> Vec<usize> {
        let mut path = Vec::new();
        let mut at = node;
        while let Some(node) = at {
            path.push(node);
            at = self.nodes[node].parent;
        }
        path.reverse();
        path
    }

    /// The predicate of I1: for each call, root to leaf spells prompt and output.
    ///
    /// # Errors
    /// [`TreeError::TokenTruth`] for the first call where it does not hold.
    pub fn check(&self, calls: &[Call]) -> Result<(), TreeError> {
        for call in calls {
            let node = self.place(call.id.index).and_then(|place| place.node);
            let found: Vec<u32> = self
                .path(node)
                .into_iter()
                .flat_map(|node| self.nodes[node].tokens.iter().copied())
                .collect();
            let output = call
                .generation
                .as_ref()
                .map_or(&[][..], |generation| &generation.token_ids);
            let expected = || call.prompt_ids.iter().chain(output).copied();
            if !found.iter().copied().eq(expected()) {
                let at = found
                    .iter()
                    .copied()
                    .zip(expected())
                    .take_while(|(a, b)| a == b)
                    .count();
                return Err(TreeError::TokenTruth {
                    call: call.id.index,
                    expected: expected().count(),
                    found: found.len(),
                    at,
                });
            }
        }
        Ok(())
    }

    /// Its sizes.
    #[must_use]
    pub fn stats(&self) -> TreeStats {
        let tokens = |keep: &dyn Fn(&Node) -> bool| -> usize {
            self.nodes
                .iter()
                .filter(|node| keep(node))
                .map(|node| node.tokens.len())
                .sum()
        };
        TreeStats {
            calls: self.places.len(),
            nodes: self.nodes.len(),
            leaves: (0..self.nodes.len())
                .filter(|&node| self.nodes[node].subtree_end == node + 1)
                .count(),
            tokens_logical: self
                .places
                .iter()
                .map(|place| place.prompt_tokens + place.output_tokens)
                .sum(),
            tokens_unique: tokens(&|_| true),
            tokens_generated: tokens(&Node::generated),
            tokens_without_logprobs: tokens(&|node| node.generated() && !node.trainable()),
        }
    }
}

/// The calls by arrival number, after the checks that need no tree.
fn checked(calls: &[Call]) -> Result<Vec<&Call>, TreeError> {
    let mut sorted: Vec<&Call> = calls.iter().collect();
    sorted.sort_by_key(|call| call.id.index);
    let rollouts: BTreeSet<&str> = calls.iter().map(|call| call.id.rollout.as_str()).collect();
    let mut rollouts = rollouts.into_iter();
    if let (Some(first), Some(other)) = (rollouts.next(), rollouts.next()) {
        return Err(TreeError::MixedRollouts {
            first: first.to_owned(),
            other: other.to_owned(),
        });
    }
    for pair in sorted.windows(2) {
        if pair[0].id.index == pair[1].id.index {
            return Err(TreeError::DuplicateCall {
                index: pair[0].id.index,
            });
        }
    }
    for call in &sorted {
        if let Some(generation) = &call.generation {
            generation.check().map_err(|found| TreeError::Generation {
                call: call.id.index,
                found,
            })?;
        }
    }
    Ok(sorted)
}
