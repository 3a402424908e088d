//! The trees of a whole batch, merged where their token prefixes are equal.

use serde::{Deserialize, Serialize};

use crate::{Target, TrainTree};

/// One loss term on the transition into a token of a [`ForestNode`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Term {
    /// The token within the node, from 0.
    pub offset: u32,
    /// The rollout: index of its tree in the argument of [`Forest::merge`].
    pub tree: u32,
    /// What is known about the token.
    pub target: Target,
}

/// A run of tokens that the same rollouts share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForestNode {
    /// The node before it; `None` for a root.
    pub parent: Option<u32>,
    /// The tokens, at least one.
    pub tokens: Vec<u32>,
    /// Loss terms, sorted by offset and tree. A token that several rollouts generated has one
    /// term per rollout: their rewards differ.
    pub terms: Vec<Term>,
}

/// What a learner computes in one step: every distinct prefix once.
///
/// Nodes are in preorder: a parent comes before its children and every subtree is one contiguous
/// run, so a depth-first learner can push and pop keys and values as it goes. Roots and siblings
/// are sorted by their first token, which no two of them share; so the shape does not depend on
/// the order of the trees.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Forest {
    /// The nodes in preorder.
    pub nodes: Vec<ForestNode>,
    /// Trees merged.
    pub trees: u32,
    /// Sum of all root-to-leaf lengths before merging: what a learner without trees computes.
    pub tokens_logical: u64,
}

/// Sizes of a [`Forest`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForestStats {
    /// Tokens that a learner without trees would compute.
    pub tokens_logical: u64,
    /// Tokens stored: what is computed.
    pub tokens_unique: u64,
    /// Loss terms.
    pub terms: u64,
    /// Tokens of the longest root-to-leaf path.
    pub depth_max: u64,
}

/// A node under construction. Its end is a stable place: a split moves the head away.
struct Draft {
    parent: Option<u32>,
    tokens: Vec<u32>,
    terms: Vec<Term>,
    /// Sorted by first token.
    children: Vec<u32>,
}

#[derive(Default)]
struct Builder {
    drafts: Vec<Draft>,
    roots: Vec<u32>,
}

impl Builder {
    fn children(&mut self, parent: Option<u32>) -> &mut Vec<u32> {
        match parent {
            Some(parent) => &mut self.drafts[parent as usize].children,
            None => &mut self.roots,
        }
    }

    /// Place of the child that starts with `token`, or where it would be inserted.
    fn find(&self, parent: Option<u32>, token: u32) -> Result<u32, usize> {
        let children = match parent {
            Some(parent) => &self.drafts[parent as usize].children,
            None => &self.roots,
        };
        children
            .binary_search_by_key(&token, |&child| self.drafts[child as usize].tokens[0])
            .map(|at| children[at])
    }

    /// Splits `node` before its token `at`; the head becomes a new node, `node` stays the tail.
    fn split(&mut self, node: u32, at: usize) -> u32 {
        let head_id = self.drafts.len() as u32;
        let draft = &mut self.drafts[node as usize];
        let tail = draft.tokens.split_off(at);
        let head_tokens = std::mem::replace(&mut draft.tokens, tail);
        let (head_terms, mut tail_terms): (Vec<Term>, Vec<Term>) = std::mem::take(&mut draft.terms)
            .into_iter()
            .partition(|term| (term.offset as usize) < at);
        for term in &mut tail_terms {
            term.offset -= at as u32;
        }
        draft.terms = tail_terms;
        let parent = draft.parent.replace(head_id);
        let first = head_tokens[0];
        self.drafts.push(Draft {
            parent,
            tokens: head_tokens,
            terms: head_terms,
            children: vec![node],
        });
        // The head starts with the same token, so it takes the same place among its siblings.
        let drafts = &self.drafts;
        let siblings = match parent {
            Some(parent) => &drafts[parent as usize].children,
            None => &self.roots,
        };
        let place = siblings.iter().position(|&child| child == node);
        debug_assert!(place.is_some(), "node starting with {first} was not linked");
        if let Some(place) = place {
            self.children(parent)[place] = head_id;
        }
        head_id
    }

    /// Inserts tokens below the end of `parent`; returns the node at whose end they end.
    fn insert(
        &mut self,
        mut parent: Option<u32>,
        tokens: &[u32],
        targets: &[Option<Target>],
        tree: u32,
    ) -> Option<u32> {
        let mut done = 0;
        while done < tokens.len() {
            let rest = &tokens[done..];
            let node = match self.find(parent, rest[0]) {
                Ok(node) => {
                    let stored = &self.drafts[node as usize].tokens;
                    let shared = stored.iter().zip(rest).take_while(|(a, b)| a == b).count();
                    if shared < stored.len() {
                        self.split(node, shared)
                    } else {
                        node
                    }
                }
                Err(place) => {
                    let node = self.drafts.len() as u32;
                    self.drafts.push(Draft {
                        parent,
                        tokens: rest.to_vec(),
                        terms: Vec::new(),
                        children: Vec::new(),
                    });
                    self.children(parent).insert(place, node);
                    node
                }
            };
            let draft = &mut self.drafts[node as usize];
            let length = draft.tokens.len();
            draft
                .terms
                .extend(targets[done..done + length].iter().enumerate().filter_map(
                    |(offset, target)| {
                        target.map(|target| Term {
                            offset: offset as u32,
                            tree,
                            target,
                        })
                    },
                ));
            done += length;
            parent = Some(node);
        }
        parent
    }

    /// Lays the drafts out in preorder, joining chains that nobody else shares.
    fn finish(mut self) -> Vec<ForestNode> {
        let mut nodes: Vec<ForestNode> = Vec::with_capacity(self.drafts.len());
        let mut stack: Vec<(u32, Option<u32>)> =
            self.roots.iter().rev().map(|&root| (root, None)).collect();
        while let Some((mut draft_id, parent)) = stack.pop() {
            let index = nodes.len() as u32;
            let mut tokens = std::mem::take(&mut self.drafts[draft_id as usize].tokens);
            let mut terms = std::mem::take(&mut self.drafts[draft_id as usize].terms);
            while let [only] = self.drafts[draft_id as usize].children[..] {
                draft_id = only;
                let shift = tokens.len() as u32;
                let draft = &mut self.drafts[draft_id as usize];
                tokens.append(&mut draft.tokens);
                terms.extend(draft.terms.drain(..).map(|term| Term {
                    offset: term.offset + shift,
                    ..term
                }));
            }
            terms.sort_by_key(|term| (term.offset, term.tree));
            nodes.push(ForestNode {
                parent,
                tokens,
                terms,
            });
            let children = &self.drafts[draft_id as usize].children;
            stack.extend(children.iter().rev().map(|&child| (child, Some(index))));
        }
        nodes
    }
}

impl Forest {
    /// Merges trees where their token prefixes are equal. Time and memory are linear in the
    /// tokens of the trees.
    #[must_use]
    pub fn merge(trees: &[TrainTree]) -> Self {
        let mut builder = Builder::default();
        let mut ends: Vec<Option<u32>> = Vec::new();
        for (tree_id, tree) in trees.iter().enumerate() {
            ends.clear();
            for node in tree.nodes() {
                let parent = node.parent.and_then(|parent| ends[parent]);
                let end = builder.insert(parent, &node.tokens, &node.targets, tree_id as u32);
                ends.push(end);
            }
        }
        Self {
            nodes: builder.finish(),
            trees: trees.len() as u32,
            tokens_logical: trees.iter().map(|tree| tree.tokens_flat() as u64).sum(),
        }
    }

    /// Its sizes.
    #[must_use]
    pub fn stats(&self) -> ForestStats {
        let mut depth = vec![0_u64; self.nodes.len()];
        let mut stats = ForestStats {
            tokens_logical: self.tokens_logical,
            ..ForestStats::default()
        };
        for (index, node) in self.nodes.iter().enumerate() {
            let above = node.parent.map_or(0, |parent| depth[parent as usize]);
            depth[index] = above + node.tokens.len() as u64;
            stats.tokens_unique += node.tokens.len() as u64;
            stats.terms += node.terms.len() as u64;
            stats.depth_max = stats.depth_max.max(depth[index]);
        }
        stats
    }

    /// Loss terms of each tree: the denominators of per-rollout aggregation.
    #[must_use]
    pub fn terms_per_tree(&self) -> Vec<usize> {
        let mut counts = vec![0; self.trees as usize];
        for term in self.nodes.iter().flat_map(|node| &node.terms) {
            counts[term.tree as usize] += 1;
        }
        counts
    }
}
