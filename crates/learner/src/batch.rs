//! A batch of trees as one forest, with tables that find the terms of each target.

use model::forest::Segment;
use tree::{Forest, Term};

/// A forest ready for `model::forest`: which offsets are wanted, and which terms each has.
#[derive(Debug)]
pub struct Batch {
    /// The merged trees.
    pub forest: Forest,
    /// Per node: offsets that have terms, ascending.
    offsets: Vec<Vec<u32>>,
    /// Per node and wanted offset: the place of its first term; one more at the end.
    starts: Vec<Vec<usize>>,
}

impl Batch {
    /// Indexes a forest whose terms are sorted by offset, as [`Forest::merge`] leaves them.
    #[must_use]
    pub fn new(forest: Forest) -> Self {
        let (mut offsets, mut starts) = (Vec::new(), Vec::new());
        for node in &forest.nodes {
            let (mut own, mut first): (Vec<u32>, Vec<usize>) = (Vec::new(), Vec::new());
            for (place, term) in node.terms.iter().enumerate() {
                if own.last() != Some(&term.offset) {
                    own.push(term.offset);
                    first.push(place);
                }
            }
            first.push(node.terms.len());
            offsets.push(own);
            starts.push(first);
        }
        Self {
            forest,
            offsets,
            starts,
        }
    }

    /// The segments, with the offsets that have terms as targets.
    #[must_use]
    pub fn segments(&self) -> Vec<Segment<'_>> {
        let nodes = self.forest.nodes.iter().zip(&self.offsets);
        nodes
            .map(|(node, targets)| Segment {
                parent: node.parent.map(|parent| parent as usize),
                tokens: &node.tokens,
                targets,
            })
            .collect()
    }

    /// The terms of a target: one per rollout that generated this token here.
    #[must_use]
    pub fn terms(&self, node: usize, target: usize) -> &[Term] {
        let starts = &self.starts[node];
        &self.forest.nodes[node].terms[starts[target]..starts[target + 1]]
    }

    /// Index of a target's first term within its node.
    #[must_use]
    pub fn first_term(&self, node: usize, target: usize) -> usize {
        self.starts[node][target]
    }

    /// Wanted offsets of a node.
    #[must_use]
    pub fn offsets(&self, node: usize) -> &[u32] {
        &self.offsets[node]
    }
}
