//! A prefix tree over tokens: the shape that [`crate::Tree`] and [`crate::Forest`] share.

/// A run of tokens. Its *end* is a stable place: a split moves the head into a new node and
/// leaves the tail under the old number.
#[derive(Debug, Clone)]
pub(crate) struct RadixNode {
    pub(crate) parent: Option<u32>,
    pub(crate) tokens: Vec<u32>,
    /// Sorted by first token; no two children start with the same one.
    pub(crate) children: Vec<u32>,
}

/// How many tokens two runs begin with in common. Block by block, since almost always all of them
/// are equal: that is a comparison of memory.
pub(crate) fn shared_len(left: &[u32], right: &[u32]) -> usize {
    const BLOCK: usize = 64;
    let length = left.len().min(right.len());
    let (left, right) = (&left[..length], &right[..length]);
    let blocks = left
        .chunks_exact(BLOCK)
        .zip(right.chunks_exact(BLOCK))
        .take_while(|(a, b)| a == b)
        .count();
    let done = blocks * BLOCK;
    done + left[done..]
        .iter()
        .zip(&right[done..])
        .take_while(|(a, b)| a == b)
        .count()
}

#[derive(Debug, Default, Clone)]
pub(crate) struct Radix {
    pub(crate) nodes: Vec<RadixNode>,
    pub(crate) roots: Vec<u32>,
}

impl Radix {
    pub(crate) fn children(&self, parent: Option<u32>) -> &[u32] {
        match parent {
            Some(parent) => &self.nodes[parent as usize].children,
            None => &self.roots,
        }
    }

    fn children_mut(&mut self, parent: Option<u32>) -> &mut Vec<u32> {
        match parent {
            Some(parent) => &mut self.nodes[parent as usize].children,
            None => &mut self.roots,
        }
    }

    /// Index among the children of the one that starts with `token`, or where it would go.
    fn place(&self, parent: Option<u32>, token: u32) -> Result<usize, usize> {
        self.children(parent)
            .binary_search_by_key(&token, |&child| self.nodes[child as usize].tokens[0])
    }

    /// Splits the child at `place` of `parent` before its token `at` (inside it); returns the
    /// head.
    fn split(&mut self, parent: Option<u32>, place: usize, at: usize) -> u32 {
        let tail = self.children(parent)[place];
        let head = self.nodes.len() as u32;
        let node = &mut self.nodes[tail as usize];
        let tail_tokens = node.tokens.split_off(at);
        let mut head_tokens = std::mem::replace(&mut node.tokens, tail_tokens);
        head_tokens.shrink_to_fit();
        node.parent = Some(head);
        self.nodes.push(RadixNode {
            parent,
            tokens: head_tokens,
            children: vec![tail],
        });
        self.children_mut(parent)[place] = head;
        head
    }

    /// Adds `tokens` below the end of `below` and makes a node end where they end. Returns that
    /// node, `below` itself when `tokens` is empty.
    pub(crate) fn insert(&mut self, below: Option<u32>, tokens: &[u32]) -> Option<u32> {
        let mut parent = below;
        let mut done = 0;
        while done < tokens.len() {
            let rest = &tokens[done..];
            let node = match self.place(parent, rest[0]) {
                Ok(place) => {
                    let node = self.children(parent)[place];
                    let stored = &self.nodes[node as usize].tokens;
                    let shared = shared_len(stored, rest);
                    if shared < stored.len() {
                        self.split(parent, place, shared)
                    } else {
                        node
                    }
                }
                Err(place) => {
                    let node = self.nodes.len() as u32;
                    self.nodes.push(RadixNode {
                        parent,
                        tokens: rest.to_vec(),
                        children: Vec::new(),
                    });
                    self.children_mut(parent).insert(place, node);
                    node
                }
            };
            done += self.nodes[node as usize].tokens.len();
            parent = Some(node);
        }
        parent
    }

    /// The nodes from `end` upwards that hold the last `tokens` tokens of its path; `tokens`
    /// must be a sum of whole nodes, which holds for everything that was inserted.
    pub(crate) fn upwards(&self, end: Option<u32>, tokens: usize) -> Vec<u32> {
        let mut nodes = Vec::new();
        let mut left = tokens;
        let mut at = end;
        while left > 0
            && let Some(node) = at
        {
            left = left.saturating_sub(self.nodes[node as usize].tokens.len());
            nodes.push(node);
            at = self.nodes[node as usize].parent;
        }
        nodes
    }
}
