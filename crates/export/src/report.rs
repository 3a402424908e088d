//! What became of a captured rollout.

use std::collections::BTreeMap;

use serde::Serialize;
use tree::{Builder, Kept, Rows, Selection, Tree, TreeError, TreeLimits, linearise, select};

use crate::Captured;

/// Nodes of the tree of an imported rollout: sixteen times the limit of a rollout of our own,
/// because captures of other gateways may be of any length.
pub const NODES_MAX: usize = 1 << 16;

/// One rollout in numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Its name in the file.
    pub rollout: String,
    /// Calls.
    pub calls: usize,
    /// Runs of tokens that the same calls share.
    pub nodes: usize,
    /// Branches of the tree.
    pub leaves: usize,
    /// Distinct prefixes: tokens that are stored.
    pub unique_tokens: usize,
    /// Of those, generated.
    pub generated_tokens: usize,
    /// Of those, trained under the policy.
    pub kept_generated_tokens: usize,
    /// Training rows.
    pub rows: usize,
    /// `train`, `discard` (over-branched), or `mask` (nothing of it can be trained, but its
    /// reward counts).
    pub disposition: &'static str,
    /// Divergences by cause.
    pub forks: BTreeMap<&'static str, usize>,
}

/// A captured rollout, worked out.
#[derive(Debug, Clone, PartialEq)]
pub struct Grown {
    /// In numbers.
    pub report: Report,
    /// The tree.
    pub tree: Tree,
    /// What is trained of it.
    pub kept: Kept,
    /// As rows.
    pub rows: Rows,
}

/// Builds the tree of a captured rollout, selects and linearises.
///
/// # Errors
/// See [`TreeError`].
pub fn report(
    captured: &Captured,
    selection: &Selection,
    tokens_max: Option<usize>,
) -> Result<Grown, TreeError> {
    let mut builder = Builder::new(TreeLimits {
        nodes_max: NODES_MAX,
    });
    for (call, class) in &captured.calls {
        builder.add_as(call, *class)?;
    }
    let tree = builder.finish()?;
    let kept = select(&tree, selection);
    let rows = linearise(&tree, &kept, tokens_max)?;
    let stats = tree.stats();
    let mut forks = BTreeMap::new();
    for fork in &tree.forks {
        *forks.entry(fork.cause.name()).or_default() += 1;
    }
    let disposition = match (&kept.discarded, rows.rows.is_empty()) {
        (Some(_), _) => "discard",
        (None, true) => "mask",
        (None, false) => "train",
    };
    let report = Report {
        rollout: captured.rollout.clone(),
        calls: stats.calls,
        nodes: stats.runs,
        leaves: stats.leaves,
        unique_tokens: stats.tokens_unique,
        generated_tokens: stats.tokens_generated,
        kept_generated_tokens: kept.tokens_trained,
        rows: rows.rows.len(),
        disposition,
        forks,
    };
    Ok(Grown {
        report,
        tree,
        kept,
        rows,
    })
}
