//! Calls in, tree out: one at a time, in any order.

use std::borrow::Borrow;
use std::collections::HashSet;

use record::Call;

use crate::TreeError;
use crate::classify::{CallClass, classify};
use crate::fork::explain;
use crate::layout::lay_out;
use crate::media::MediaKeys;
use crate::radix::Radix;
use crate::tree::{Tree, TreeLimits};

/// Where a call ends in the radix tree. Ends are stable: later calls split nodes above them.
#[derive(Debug, Clone, Copy)]
struct Ends {
    prompt: Option<u32>,
    output: Option<u32>,
}

/// Builds the tree of one rollout call by call.
///
/// `C` is how the caller holds its calls: `&Call`, `Arc<Call>` or `Call`. Adding a call compares
/// its tokens with what is there (a comparison of memory) and then works in proportion to the
/// tokens that are new. The order of additions does not matter: the tree is that of the set.
#[derive(Debug)]
pub struct Builder<C> {
    limits: TreeLimits,
    calls: Vec<(C, Option<CallClass>)>,
    ends: Vec<Ends>,
    indexes: HashSet<u32>,
    radix: Radix,
    media: MediaKeys,
    /// Set when the tree became too large: it stays refused.
    too_large: Option<TreeError>,
}

impl<C: Borrow<Call>> Builder<C> {
    /// A builder without calls.
    #[must_use]
    pub fn new(limits: TreeLimits) -> Self {
        Self {
            limits,
            calls: Vec::new(),
            ends: Vec::new(),
            indexes: HashSet::new(),
            radix: Radix::default(),
            media: MediaKeys::default(),
            too_large: None,
        }
    }

    /// Adds a call.
    ///
    /// # Errors
    /// [`TreeError::MixedRollouts`], [`TreeError::DuplicateCall`], [`TreeError::Generation`],
    /// [`TreeError::Media`]: the
    /// call is not added. [`TreeError::TooManyNodes`]: from then on every addition and
    /// [`Builder::finish`] give this error.
    pub fn add(&mut self, call: C) -> Result<(), TreeError> {
        self.add_as(call, None)
    }

    /// Adds a call whose class is known, e.g. from another gateway. `None`: find out.
    ///
    /// # Errors
    /// As [`Builder::add`].
    pub fn add_as(&mut self, call: C, class: Option<CallClass>) -> Result<(), TreeError> {
        if let Some(error) = &self.too_large {
            return Err(error.clone());
        }
        let (prompt, output) = {
            let call = call.borrow();
            self.check(call)?;
            let prompt = self.radix.insert(None, &self.media.keyed(call)?);
            (prompt, self.radix.insert(prompt, output_of(call)))
        };
        self.indexes.insert(call.borrow().id.index);
        self.calls.push((call, class));
        self.ends.push(Ends { prompt, output });
        if self.radix.nodes.len() > self.limits.nodes_max {
            let error = TreeError::TooManyNodes {
                calls: self.calls.len(),
                nodes_max: self.limits.nodes_max,
            };
            self.too_large = Some(error.clone());
            return Err(error);
        }
        Ok(())
    }

    /// What needs no tree.
    fn check(&self, call: &Call) -> Result<(), TreeError> {
        let index = call.id.index;
        if let Some((first, _)) = self.calls.first()
            && first.borrow().id.rollout != call.id.rollout
        {
            let names = [&first.borrow().id.rollout, &call.id.rollout];
            let [first, other] = names.map(|name| name.as_str().to_owned());
            return Err(TreeError::MixedRollouts { first, other });
        }
        if self.indexes.contains(&index) {
            return Err(TreeError::DuplicateCall { index });
        }
        match &call.generation {
            Some(generation) => generation
                .check()
                .map_err(|found| TreeError::Generation { call: index, found }),
            None => Ok(()),
        }
    }

    /// Calls added so far.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.calls.len()
    }

    /// The tree of the calls so far; more may be added afterwards. Costs a copy of the tree's
    /// tokens on top of [`Builder::finish`].
    ///
    /// # Errors
    /// [`TreeError::TooManyNodes`] when an addition was refused for it.
    pub fn snapshot(&self) -> Result<Tree, TreeError> {
        self.lay_out(self.radix.clone())
    }

    /// The tree. Time is linear in the tokens of the tree and the messages of the calls.
    ///
    /// # Errors
    /// As [`Builder::snapshot`].
    pub fn finish(mut self) -> Result<Tree, TreeError> {
        let radix = std::mem::take(&mut self.radix);
        self.lay_out(radix)
    }

    fn lay_out(&self, radix: Radix) -> Result<Tree, TreeError> {
        if let Some(error) = &self.too_large {
            return Err(error.clone());
        }
        let mut order: Vec<usize> = (0..self.calls.len()).collect();
        order.sort_by_key(|&at| self.calls[at].0.borrow().id.index);
        let calls: Vec<&Call> = order.iter().map(|&at| self.calls[at].0.borrow()).collect();
        let given: Vec<Option<CallClass>> = order.iter().map(|&at| self.calls[at].1).collect();
        let ends: Vec<(Option<u32>, Option<u32>)> = order
            .iter()
            .map(|&at| (self.ends[at].prompt, self.ends[at].output))
            .collect();
        let (nodes, places) = lay_out(radix, &self.media, &calls, &ends);
        let mut tree = Tree {
            nodes,
            places,
            forks: Vec::new(),
        };
        let digests = classify(&calls, &given, &mut tree);
        tree.forks = explain(&calls, &digests, &tree);
        Ok(tree)
    }
}

/// The generated ids of a call; none without generation.
pub(crate) fn output_of(call: &Call) -> &[u32] {
    call.generation
        .as_ref()
        .map_or(&[], |generation| &generation.token_ids)
}
