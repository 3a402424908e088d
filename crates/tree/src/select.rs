//! Which part of a tree is trained. Pure functions with names.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::classify::CallClass;
use crate::tree::{Origin, Place, Tree};

/// A rule for what to keep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "snake_case", deny_unknown_fields)]
pub enum Selection {
    /// Per segment of each conversation the longest chain of delivered replies; all else is a
    /// dead leaf. Auxiliary classes are out unless listed. A rollout with more leaves than the
    /// limit is discarded as a whole.
    Clawgym2 {
        /// Leaves that may remain.
        leaves_max: usize,
        /// Classes that are trained.
        classes: Vec<CallClass>,
    },
    /// Every call, retries and auxiliary ones included.
    All,
    /// The one branch with most trainable tokens.
    Longest,
    /// Drops a leaf when a later call went on from the same place; roots stay.
    Temporal,
}

/// The names that [`Selection::named`] knows.
pub const SELECTION_NAMES: [&str; 5] = ["clawgym2", "clawgym2+aux", "all", "longest", "temporal"];

/// Leaves that may remain by default.
pub const LEAVES_MAX: usize = 64;

impl Selection {
    /// The rule of a name. `clawgym2+aux` goes beyond the paper: sub-agents and compactions are
    /// trained with the reward of the rollout. `leaves_max` counts for these two only.
    #[must_use]
    pub fn named(name: &str, leaves_max: usize) -> Option<Self> {
        use CallClass::{Compaction, Main, Subagent};
        let classes = match name {
            "clawgym2" => vec![Main],
            "clawgym2+aux" => vec![Main, Subagent, Compaction],
            "all" => return Some(Self::All),
            "longest" => return Some(Self::Longest),
            "temporal" => return Some(Self::Temporal),
            _ => return None,
        };
        Some(Self::Clawgym2 {
            leaves_max,
            classes,
        })
    }
}

impl Default for Selection {
    /// `clawgym2` with [`LEAVES_MAX`] leaves, main conversation only.
    fn default() -> Self {
        Self::Clawgym2 {
            leaves_max: LEAVES_MAX,
            classes: vec![CallClass::Main],
        }
    }
}

/// Why a node is not trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "reason", content = "class", rename_all = "snake_case")]
pub enum DropReason {
    /// Nothing that counts went on from here: a retry, a rollback, an undelivered reply.
    DeadLeaf,
    /// An auxiliary call.
    Auxiliary(CallClass),
    /// Another branch was longer (`longest`).
    NotLongest,
    /// A later call went on from the same place (`temporal`).
    Superseded,
    /// The whole rollout has too many leaves.
    OverBranched,
}

impl DropReason {
    /// The words used in tables, drawings and metrics.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::DeadLeaf => "dead leaf".to_owned(),
            Self::Auxiliary(class) => format!("auxiliary call ({})", class.name()),
            Self::NotLongest => "another branch is longer".to_owned(),
            Self::Superseded => "a later call went on from here".to_owned(),
            Self::OverBranched => "over-branched".to_owned(),
        }
    }
}

/// A node that is not trained.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dropped {
    /// The node.
    pub node: usize,
    /// Why.
    pub reason: DropReason,
    /// Trainable tokens that are lost with it.
    pub tokens_trainable: usize,
}

/// Why the whole rollout is not trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error(
    "over-branched: {leaves} leaves remain, at most {leaves_max} may; see the fork causes, or raise leaves_max"
)]
pub struct OverBranched {
    /// Leaves that remained.
    pub leaves: usize,
    /// The limit.
    pub leaves_max: usize,
}

/// What is trained of a tree, and what was lost.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Kept calls, sorted.
    pub calls: Vec<u32>,
    /// Nodes on their paths, in preorder.
    pub nodes: Vec<usize>,
    /// Of those, the ones whose tokens are trained.
    pub trained: Vec<usize>,
    /// Kept branches.
    pub leaves: usize,
    /// Nodes that are not kept, or kept as context only though they could be trained.
    pub dropped: Vec<Dropped>,
    /// Set when the whole rollout is out; then nothing is kept.
    pub discarded: Option<OverBranched>,
    /// Tokens that are trained.
    pub tokens_trained: usize,
    /// Generated tokens on kept paths that have no log-probabilities: context (I4).
    pub tokens_without_logprobs: usize,
}

/// Applies a rule to a tree.
#[must_use]
pub fn select(tree: &Tree, selection: &Selection) -> Kept {
    let mut reasons: BTreeMap<u32, DropReason> = BTreeMap::new();
    let calls: BTreeSet<u32> = match selection {
        Selection::Clawgym2 { classes, .. } => longest_chains(tree, classes, &mut reasons),
        Selection::All => tree.places.iter().map(|place| place.call).collect(),
        Selection::Longest => longest_branch(tree, &mut reasons),
        Selection::Temporal => latest_children(tree, &mut reasons),
    };
    let kept = keep(tree, &calls, &reasons);
    if let Selection::Clawgym2 { leaves_max, .. } = *selection
        && kept.leaves > leaves_max
    {
        return discard(tree, kept.leaves, leaves_max);
    }
    kept
}

fn discard(tree: &Tree, leaves: usize, leaves_max: usize) -> Kept {
    Kept {
        dropped: (0..tree.nodes.len())
            .map(|node| Dropped {
                node,
                reason: DropReason::OverBranched,
                tokens_trainable: tree.nodes[node].tokens_trainable(),
            })
            .collect(),
        discarded: Some(OverBranched { leaves, leaves_max }),
        ..Kept::default()
    }
}

/// Marks the paths of the kept calls. A node is trained when a kept call generated it, whoever
/// owns it: a dead retry may own the tokens that it shares with the call that went on.
fn keep(tree: &Tree, calls: &BTreeSet<u32>, reasons: &BTreeMap<u32, DropReason>) -> Kept {
    let mut on_path = vec![false; tree.nodes.len()];
    for place in tree
        .places
        .iter()
        .filter(|place| calls.contains(&place.call))
    {
        let mut at = place.node;
        while let Some(node) = at
            && !on_path[node]
        {
            on_path[node] = true;
            at = tree.nodes[node].parent;
        }
    }
    let mut has_kept_child = vec![false; tree.nodes.len()];
    for (node, _) in on_path.iter().enumerate().filter(|(_, on)| **on) {
        if let Some(parent) = tree.nodes[node].parent {
            has_kept_child[parent] = true;
        }
    }
    let mut kept = Kept {
        calls: calls.iter().copied().collect(),
        ..Kept::default()
    };
    for (index, node) in tree.nodes.iter().enumerate() {
        let claimed = match &node.origin {
            Origin::Generated { calls: own, .. } => own.iter().any(|call| calls.contains(call)),
            Origin::Context => false,
        };
        if on_path[index] {
            kept.nodes.push(index);
            kept.leaves += usize::from(!has_kept_child[index]);
        }
        if on_path[index] && claimed {
            if node.tokens_trainable() > 0 {
                kept.trained.push(index);
                kept.tokens_trained += node.tokens_trainable();
            } else if !node.trainable() {
                kept.tokens_without_logprobs += node.tokens.len();
            }
        } else if !on_path[index] || node.generated() {
            let responsible = match &node.origin {
                Origin::Generated { call, .. } => *call,
                Origin::Context => node.first_call,
            };
            kept.dropped.push(Dropped {
                node: index,
                reason: reasons
                    .get(&responsible)
                    .copied()
                    .unwrap_or(DropReason::DeadLeaf),
                tokens_trainable: node.tokens_trainable(),
            });
        }
    }
    kept
}

/// `clawgym2`: per conversation and segment, the chain of replies that each carry on the one
/// before and end with a delivered one; most calls first, then one that some call went on from, then most tokens, then the
/// latest.
fn longest_chains(
    tree: &Tree,
    classes: &[CallClass],
    reasons: &mut BTreeMap<u32, DropReason>,
) -> BTreeSet<u32> {
    let mut groups: BTreeMap<(u32, u32), Vec<&Place>> = BTreeMap::new();
    for place in &tree.places {
        if classes.contains(&place.class) {
            let group = groups.entry((place.thread, place.segment)).or_default();
            group.push(place);
        } else {
            reasons.insert(place.call, DropReason::Auxiliary(place.class));
        }
    }
    let continued: BTreeSet<u32> = tree
        .places
        .iter()
        .filter_map(|place| place.previous)
        .collect();
    let mut kept = BTreeSet::new();
    for group in groups.values() {
        // Calls and generated tokens of the chain up to each call. Calls come in order of
        // arrival, so the one before is known already.
        let mut chains: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
        for place in group {
            let (calls, tokens) = before(tree, place, &chains)
                .and_then(|previous| chains.get(&previous).copied())
                .unwrap_or_default();
            chains.insert(place.call, (calls + 1, tokens + place.output_tokens));
        }
        let best = group
            .iter()
            .filter(|place| place.delivered && place.output_tokens > 0)
            .max_by_key(|place| {
                let (calls, tokens) = chains.get(&place.call).copied().unwrap_or_default();
                // Whatever went on from it, of any class, shows that the harness took it.
                (calls, continued.contains(&place.call), tokens, place.call)
            });
        let mut at = best.map(|place| place.call);
        while let Some(call) = at {
            kept.insert(call);
            at = tree
                .place(call)
                .and_then(|place| before(tree, place, &chains));
        }
        for place in group.iter().filter(|place| !kept.contains(&place.call)) {
            reasons.insert(place.call, DropReason::DeadLeaf);
        }
    }
    kept
}

/// The nearest call that `place` carries on and that takes part: auxiliary calls in between, such
/// as a summary asked for within the thread, do not break a chain.
fn before(tree: &Tree, place: &Place, chains: &BTreeMap<u32, (usize, usize)>) -> Option<u32> {
    let mut at = place.previous;
    while let Some(call) = at
        && !chains.contains_key(&call)
    {
        at = tree
            .place(call)
            .and_then(|place| place.previous)
            .filter(|previous| *previous < call);
    }
    at
}

/// `longest`: the call whose path holds most trainable tokens, then most tokens, then the
/// earliest; with all calls that end on its path.
fn longest_branch(tree: &Tree, reasons: &mut BTreeMap<u32, DropReason>) -> BTreeSet<u32> {
    let mut above = vec![0; tree.nodes.len()];
    for node in 0..tree.nodes.len() {
        let parent = tree.nodes[node].parent.map_or(0, |parent| above[parent]);
        above[node] = parent + tree.nodes[node].tokens_trainable();
    }
    let best = tree.places.iter().max_by_key(|place| {
        (
            place.node.map_or(0, |node| above[node]),
            place.prompt_tokens + place.output_tokens,
            std::cmp::Reverse(place.call),
        )
    });
    let path: BTreeSet<usize> = best
        .map(|place| tree.path(place.node).into_iter().collect())
        .unwrap_or_default();
    let (kept, dropped): (Vec<&Place>, Vec<&Place>) = tree
        .places
        .iter()
        .partition(|place| place.node.is_some_and(|node| path.contains(&node)));
    reasons.extend(
        dropped
            .iter()
            .map(|place| (place.call, DropReason::NotLongest)),
    );
    kept.iter().map(|place| place.call).collect()
}

/// `temporal`: a call that nothing extends is dropped when a later call extends the same call.
fn latest_children(tree: &Tree, reasons: &mut BTreeMap<u32, DropReason>) -> BTreeSet<u32> {
    let mut latest_child: BTreeMap<u32, u32> = BTreeMap::new();
    for place in &tree.places {
        if let Some(parent) = place.extends {
            latest_child.insert(parent, place.call);
        }
    }
    let mut kept = BTreeSet::new();
    for place in &tree.places {
        let leaf = !latest_child.contains_key(&place.call);
        let latest = place.extends.and_then(|parent| latest_child.get(&parent));
        if leaf && latest.is_some_and(|latest| *latest > place.call) {
            reasons.insert(place.call, DropReason::Superseded);
        } else {
            kept.insert(place.call);
        }
    }
    kept
}
