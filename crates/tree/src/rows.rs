//! Rows for trainers that take sequences instead of trees.

use record::MediaSpan;
use serde::{Deserialize, Serialize};

use crate::pack::{sampled_targets, with_ancestors};
use crate::select::Kept;
use crate::tree::{Node, Origin, Tree};
use crate::{Target, TreeError};

/// One sequence. Everything before [`Row::prompt_tokens`] is context.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Prompt and response.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt: all before the first token that this row owns, at least one.
    pub prompt_tokens: usize,
    /// One per token of the response. `Some` where this row owns the token: it is trained here
    /// and in no other row. `None` for context and for what another row owns.
    pub targets: Vec<Option<Target>>,
    /// Where the row stands for something other than text, counted from its first token.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub media: Vec<MediaSpan>,
    /// The calls whose output this row owns (a part of), ascending.
    pub calls: Vec<u32>,
    /// The tree's node that the row ends with.
    pub leaf: usize,
    /// Tokens that a limit cut off at the end.
    pub tokens_cut: usize,
}

impl Row {
    /// Tokens that this row trains.
    #[must_use]
    pub fn terms(&self) -> usize {
        self.targets.iter().flatten().count()
    }
}

/// A trained node that is in no row, because of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CutNode {
    /// The node.
    pub node: usize,
    /// Trainable tokens that are lost with it.
    pub tokens_trainable: usize,
}

/// A kept tree as rows: as few as cover it.
///
/// The terms of all rows are the terms of [`Kept::train_tree`], each once, under the same prefix
/// (without a limit). So a loss that weighs each token by a weight of its rollout
/// (`objective::token_weights` of [`Rows::terms`]) is the same over rows as over the tree. Weights
/// by row are wrong: a rollout with three branches would count three times.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rows {
    /// The rows, in the order of their leaves.
    pub rows: Vec<Row>,
    /// Trained nodes that are lost to the limit.
    pub cut: Vec<CutNode>,
}

impl Rows {
    /// Tokens that the rollout trains: the denominator of per-rollout means.
    #[must_use]
    pub fn terms(&self) -> usize {
        self.rows.iter().map(Row::terms).sum()
    }

    /// Trainable tokens that are lost to the limit.
    #[must_use]
    pub fn tokens_cut(&self) -> usize {
        self.cut.iter().map(|cut| cut.tokens_trainable).sum()
    }
}

/// Turns what was kept into rows of at most `tokens_max` tokens. A longer branch ends with the
/// last turn that fits whole; nothing is ever cut on the left, since that would change the prefix
/// under which the tokens were drawn. A branch without a turn that fits is left out. Everything
/// lost is in [`Rows::cut`].
///
/// # Errors
/// [`TreeError::TrainNode`] for a `Kept` of another tree.
pub fn linearise(tree: &Tree, kept: &Kept, tokens_max: Option<usize>) -> Result<Rows, TreeError> {
    let needed = with_ancestors(tree, &kept.trained)?;
    let mut inner = vec![false; tree.nodes.len()];
    for (index, node) in tree.nodes.iter().enumerate().filter(|(at, _)| needed[*at]) {
        if let Some(parent) = node.parent {
            inner[parent] = needed[index] || inner[parent];
        }
    }
    let mut state: Vec<State> = vec![State::Context; tree.nodes.len()];
    for &node in &kept.trained {
        state[node] = State::Unowned;
    }
    let mut rows = Rows::default();
    for leaf in (0..tree.nodes.len()).filter(|&node| needed[node] && !inner[node]) {
        let whole = tree.path(Some(leaf));
        let fits = fitting(tree, kept, &whole, tokens_max);
        // Without what follows the last token that the row owns.
        let last = whole[..fits]
            .iter()
            .rposition(|&node| state[node] == State::Unowned);
        let Some(last) = last else { continue };
        let row = row_of(tree, &whole[..=last], &state, (&whole, fits));
        for &node in &whole[..=last] {
            if state[node] == State::Unowned {
                state[node] = State::Owned;
            }
        }
        rows.rows.extend(row);
    }
    rows.cut = kept
        .trained
        .iter()
        .filter(|&&node| state[node] == State::Unowned)
        .map(|&node| CutNode {
            node,
            tokens_trainable: tree.nodes[node].tokens_trainable(),
        })
        .collect();
    Ok(rows)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Context,
    /// Trained, in no row yet.
    Unowned,
    /// Trained in an earlier row.
    Owned,
}

/// How many nodes of a path fit: all, or those up to the last end of a turn within the limit.
fn fitting(tree: &Tree, kept: &Kept, path: &[usize], tokens_max: Option<usize>) -> usize {
    let end = |node: &Node| node.depth + node.tokens.len();
    let fits = |&&node: &&usize| tokens_max.is_none_or(|max| end(&tree.nodes[node]) <= max);
    let within = path.iter().take_while(fits).count();
    if within == path.len() {
        return within;
    }
    let ends_turn = |&node: &usize| {
        let node = &tree.nodes[node];
        let mut ends = node.outputs_end.iter();
        node.generated() && ends.any(|call| kept.calls.binary_search(call).is_ok())
    };
    path[..within]
        .iter()
        .rposition(ends_turn)
        .map_or(0, |last| last + 1)
}

fn row_of(
    tree: &Tree,
    path: &[usize],
    state: &[State],
    (whole, fits): (&[usize], usize),
) -> Option<Row> {
    let leaf = *path.last()?;
    let mut tokens = Vec::new();
    let mut targets = Vec::new();
    let mut calls = Vec::new();
    let mut media = Vec::new();
    for &index in path {
        let node = &tree.nodes[index];
        media.extend(node.media.iter().map(|span| MediaSpan {
            start: span.start + node.depth as u32,
            ..span.clone()
        }));
        let before = targets.len();
        if state[index] == State::Unowned {
            targets.extend(sampled_targets(node).into_iter().map(Some));
            if let Origin::Generated { call, .. } = node.origin {
                calls.push(call);
            }
        }
        targets.resize(before + node.tokens.len(), None);
        // Nothing predicts the first token of a sequence.
        if node.parent.is_none()
            && let Some(first) = targets.first_mut()
        {
            *first = None;
        }
        tokens.extend_from_slice(&node.tokens);
    }
    calls.sort_unstable();
    calls.dedup();
    let prompt_tokens = targets.iter().position(Option::is_some)?;
    targets.drain(..prompt_tokens);
    Some(Row {
        tokens,
        prompt_tokens,
        targets,
        media,
        calls,
        leaf,
        tokens_cut: whole[fits..]
            .iter()
            .map(|&node| tree.nodes[node].tokens.len())
            .sum(),
    })
}
