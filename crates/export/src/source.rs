//! What every format is written from: one rollout of a run, its calls, its tree and what a rule
//! kept of it.

use record::{Call, Part, Rollout};
use tree::{Kept, Rows, Selection, Tree, TreeError, linearise, select};

/// A rule with the name under which it is written into what is exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The name, e.g. `clawgym2`; the rule itself as JSON when it has none.
    pub name: String,
    /// The rule.
    pub selection: Selection,
    /// Longest row in tokens; longer branches end after a turn.
    pub tokens_max: Option<usize>,
}

impl Rule {
    /// A rule, named.
    #[must_use]
    pub fn new(selection: Selection, tokens_max: Option<usize>) -> Self {
        let leaves_max = match selection {
            Selection::Clawgym2 { leaves_max, .. } => leaves_max,
            _ => tree::LEAVES_MAX,
        };
        let named = tree::SELECTION_NAMES
            .into_iter()
            .find(|name| Selection::named(name, leaves_max).as_ref() == Some(&selection));
        let name = match named {
            Some(name) => name.to_owned(),
            None => serde_json::to_string(&selection).unwrap_or_default(),
        };
        Self {
            name,
            selection,
            tokens_max,
        }
    }
}

/// One rollout of a run, worked out.
#[derive(Debug, Clone, PartialEq)]
pub struct Source<'a> {
    /// The rollout as the ledger has it.
    pub rollout: &'a Rollout,
    /// Its calls, by number.
    pub calls: &'a [Call],
    /// Their tree.
    pub tree: Tree,
    /// What the rule keeps of it.
    pub kept: Kept,
    /// The same as rows.
    pub rows: Rows,
    /// Its advantage in its group, when it has one.
    pub advantage: Option<f64>,
    /// The name of the rule.
    pub selection: &'a str,
}

impl<'a> Source<'a> {
    /// Builds the tree, selects and linearises.
    ///
    /// # Errors
    /// See [`TreeError`].
    pub fn new(
        rollout: &'a Rollout,
        calls: &'a [Call],
        rule: &'a Rule,
        advantage: Option<f64>,
    ) -> Result<Self, TreeError> {
        let tree = Tree::build(calls)?;
        let kept = select(&tree, &rule.selection);
        let rows = linearise(&tree, &kept, rule.tokens_max)?;
        Ok(Self {
            rollout,
            calls,
            tree,
            kept,
            rows,
            advantage,
            selection: &rule.name,
        })
    }

    /// The reward, when the rollout was scored.
    #[must_use]
    pub fn reward(&self) -> Option<f64> {
        self.rollout.verdict.as_ref().map(|verdict| verdict.reward)
    }

    /// A call by its number.
    #[must_use]
    pub fn call(&self, index: u32) -> Option<&'a Call> {
        self.calls
            .binary_search_by_key(&index, |call| call.id.index)
            .ok()
            .map(|at| &self.calls[at])
    }

    /// Whether a message of it holds an image.
    #[must_use]
    pub fn has_images(&self) -> bool {
        let mut parts = self
            .calls
            .iter()
            .flat_map(|call| &call.conversation.messages)
            .flat_map(|message| &message.content);
        parts.any(|part| matches!(part, Part::Image { .. }))
    }
}
