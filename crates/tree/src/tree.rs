//! The prefix tree of one rollout.

use record::{Call, MediaSpan, PolicySpan};
use serde::{Deserialize, Serialize};

use crate::classify::CallClass;
use crate::fork::{Fork, ForkCause};
use crate::{Builder, TreeError};

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
        /// The weights that drew the tokens: sorted by start, counted from the node's first token,
        /// the first span starts at 0.
        policy: Vec<PolicySpan>,
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
    /// Where they stand for something other than text, counted from the node's first token.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub media: Vec<MediaSpan>,
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
    /// Set when this call starts a new segment of its conversation: why the context was reset.
    pub opens: Option<ForkCause>,
    /// For a sub-agent: the call whose reply asked for it.
    pub spawned_by: Option<u32>,
}

/// Sizes of a [`Tree`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeStats {
    /// Calls.
    pub calls: usize,
    /// Nodes.
    pub nodes: usize,
    /// Runs of tokens that the same calls share: nodes, not counting where only the role of the
    /// tokens changes.
    pub runs: usize,
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
        let mut builder = Builder::new(limits);
        for call in calls {
            builder.add(call)?;
        }
        builder.finish()
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

    /// Whether the same calls pass through a node and its parent: it is the only child, and no
    /// call ends between them.
    fn continues_parent(&self, node: usize) -> bool {
        self.nodes[node].parent.is_some_and(|parent| {
            let above = &self.nodes[parent];
            above.outputs_end.is_empty()
                && parent + 1 == node
                && self.nodes[node].subtree_end == above.subtree_end
        })
    }

    /// Bytes on the heap that the tree holds: capacities, not lengths.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        fn of<T>(values: &Vec<T>) -> usize {
            values.capacity() * size_of::<T>()
        }
        let nodes = self.nodes.iter().map(|node| {
            let origin = match &node.origin {
                Origin::Context => 0,
                Origin::Generated {
                    logprobs_model,
                    logprobs_sampled,
                    policy,
                    calls,
                    ..
                } => of(logprobs_model) + of(logprobs_sampled) + of(policy) + of(calls),
            };
            origin + of(&node.tokens) + of(&node.prompts_end) + of(&node.outputs_end)
        });
        let places = self
            .places
            .iter()
            .map(|place| place.class_evidence.capacity());
        let forks = self.forks.iter().map(|fork| fork.evidence.capacity());
        of(&self.nodes)
            + of(&self.places)
            + of(&self.forks)
            + nodes.chain(places).chain(forks).sum::<usize>()
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
            runs: (0..self.nodes.len())
                .filter(|&node| !self.continues_parent(node))
                .count(),
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
