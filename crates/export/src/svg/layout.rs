//! Where everything goes: lanes from left to right, as few rows as nothing crosses in.

use std::collections::BTreeMap;

use tree::{Kept, Tree};

/// Pixels between rows.
pub(super) const ROW: f64 = 38.0;
/// Room that a curve takes from a lane to the next one below.
pub(super) const BEND: f64 = 10.0;
/// Pixels that the tree may be wide before bars are drawn shorter.
const WIDTH_MAX: f64 = 940.0;
/// Pixels of a bar per doubling of its tokens.
const DOUBLING_MAX: f64 = 6.0;
const DOUBLING_MIN: f64 = 0.75;
/// A bar is never shorter.
const BAR_MIN: f64 = 1.5;
/// Pixels kept free around what is drawn in a row.
const GAP: f64 = 12.0;
/// Mean width of a character of a label.
const CHARACTER: f64 = 5.6;

/// How long a bar is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    pub(super) doubling: f64,
}

impl Scale {
    /// Pixels of a bar of so many tokens.
    pub(super) fn bar(self, tokens: usize) -> f64 {
        (self.doubling * (1.0 + tokens as f64).log2()).max(BAR_MIN)
    }
}

/// A chain of nodes drawn in one row.
#[derive(Debug, Clone)]
pub(super) struct Lane {
    /// The nodes, each the parent of the next.
    pub(super) nodes: Vec<usize>,
    /// Where it comes from: the point that a line is drawn from.
    pub(super) from: Option<Stem>,
    /// Stem 0 at the top.
    pub(super) row: usize,
    /// Left end of the first bar.
    pub(super) left: f64,
    /// Right end of the last one.
    pub(super) right: f64,
    /// What is written above its start.
    pub(super) head: String,
    /// What is written behind its end.
    pub(super) tail: String,
}

/// Where a lane comes from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stem {
    /// The node at whose end it leaves.
    pub(super) node: usize,
    /// Whether tokens are shared up to there; else it only follows from it.
    pub(super) shared: bool,
}

/// Everything placed.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) lanes: Vec<Lane>,
    /// Lane and left end of each node.
    pub(super) nodes: Vec<(usize, f64)>,
    pub(super) scale: Scale,
    pub(super) rows: usize,
    pub(super) width: f64,
}

/// The node at whose end a new root belongs: that of the call that asked for it, that it carries
/// on, or that it is compared with.
fn anchor(tree: &Tree, root: usize) -> Option<usize> {
    let call = tree.nodes[root].first_call;
    let place = tree.place(call)?;
    let against = tree.forks.iter().find(|fork| fork.call == call);
    let before = place
        .spawned_by
        .or(place.previous)
        .or(against.map(|fork| fork.against))?;
    // Only what was drawn before: roots are in the order of their first calls.
    tree.place(before)?.node.filter(|&node| node < root)
}

impl Layout {
    pub(super) fn new(
        tree: &Tree,
        kept: &Kept,
        labels: impl Fn(&[usize], bool) -> (String, String),
    ) -> Self {
        let chains = chains(tree, kept);
        let mut layout = Self {
            lanes: Vec::new(),
            nodes: vec![(0, 0.0); tree.nodes.len()],
            scale: Scale {
                doubling: DOUBLING_MAX,
            },
            rows: 0,
            width: 0.0,
        };
        layout.lanes = chains
            .into_iter()
            .enumerate()
            .map(|(number, (nodes, from))| {
                let (head, tail) = labels(&nodes, number == 0);
                Lane {
                    nodes,
                    from,
                    row: 0,
                    left: 0.0,
                    right: 0.0,
                    head,
                    tail,
                }
            })
            .collect();
        layout.across(tree);
        let wide = layout
            .lanes
            .iter()
            .map(|lane| lane.right)
            .fold(0.0, f64::max);
        if wide > WIDTH_MAX {
            layout.scale.doubling = (DOUBLING_MAX * WIDTH_MAX / wide).max(DOUBLING_MIN);
            layout.across(tree);
        }
        layout.down();
        layout
    }

    /// Left and right ends. A lane comes after the one that it leaves.
    fn across(&mut self, tree: &Tree) {
        for number in 0..self.lanes.len() {
            let lane = &self.lanes[number];
            let mut x = lane
                .from
                .map_or(0.0, |from| self.end(tree, from.node) + BEND);
            self.lanes[number].left = x;
            for at in 0..self.lanes[number].nodes.len() {
                let node = self.lanes[number].nodes[at];
                self.nodes[node] = (number, x);
                x += self.scale.bar(tree.nodes[node].tokens.len());
            }
            self.lanes[number].right = x;
        }
    }

    /// Right end of a node.
    pub(super) fn end(&self, tree: &Tree, node: usize) -> f64 {
        self.nodes[node].1 + self.scale.bar(tree.nodes[node].tokens.len())
    }

    /// Rows: each lane as high as it fits below the one that it leaves, those that leave last first, so
    /// that no line crosses a lane.
    fn down(&mut self) {
        let mut leaving: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let mut roots = Vec::new();
        for (number, lane) in self.lanes.iter().enumerate() {
            match lane.from {
                Some(from) => leaving
                    .entry(self.nodes[from.node].0)
                    .or_default()
                    .push(number),
                None => roots.push(number),
            }
        }
        for others in leaving.values_mut() {
            others.sort_by(|&a, &b| self.lanes[b].left.total_cmp(&self.lanes[a].left));
        }
        let mut taken: Vec<Vec<(f64, f64)>> = Vec::new();
        // A stack: what leaves a lane is placed before the lane's next sibling.
        let mut open: Vec<usize> = roots.into_iter().rev().collect();
        while let Some(number) = open.pop() {
            let lane = &self.lanes[number];
            let label = |text: &str| text.chars().count() as f64 * CHARACTER;
            let span = (
                lane.left - GAP,
                (lane.right + label(&lane.tail)).max(lane.left + label(&lane.head)) + GAP,
            );
            let above = lane
                .from
                .map(|from| self.lanes[self.nodes[from.node].0].row);
            let first = above.map_or(taken.len(), |above| above + 1);
            let bend = (lane.left - BEND - 2.0, lane.left);
            let free = |row: usize, (left, right): (f64, f64)| {
                taken.get(row).is_none_or(|spans: &Vec<(f64, f64)>| {
                    spans.iter().all(|&(from, to)| right <= from || to <= left)
                })
            };
            let bends = |row: usize| (first..row).all(|row| free(row, bend));
            let row = (first..taken.len().max(first))
                .find(|&row| free(row, span) && bends(row))
                .unwrap_or(taken.len().max(first));
            taken.resize(taken.len().max(row + 1), Vec::new());
            for between in taken.iter_mut().take(row).skip(first) {
                between.push(bend);
            }
            taken[row].push(span);
            self.width = self.width.max(span.1);
            self.lanes[number].row = row;
            open.extend(leaving.remove(&number).into_iter().flatten().rev());
        }
        self.rows = taken.len();
    }
}

/// The tree as chains: at each node the child that most is made of goes on in the same lane.
fn chains(tree: &Tree, kept: &Kept) -> Vec<(Vec<usize>, Option<Stem>)> {
    let count = tree.nodes.len();
    let mut children: Vec<Vec<usize>> = vec![Vec::new(); count];
    // Whether something of the subtree is kept, and its last call.
    let mut worth = vec![(false, 0); count];
    for &node in &kept.nodes {
        worth[node].0 = true;
    }
    for place in &tree.places {
        if let Some(node) = place.node {
            worth[node].1 = worth[node].1.max(place.call);
        }
    }
    for node in (0..count).rev() {
        if let Some(parent) = tree.nodes[node].parent {
            children[parent].push(node);
            worth[parent].1 = worth[parent].1.max(worth[node].1);
        }
    }
    let mut chains = Vec::new();
    let roots = (0..count).filter(|&node| tree.nodes[node].parent.is_none());
    let mut open: Vec<(usize, Option<Stem>)> = roots
        .map(|root| {
            let from = anchor(tree, root).map(|node| Stem {
                node,
                shared: false,
            });
            (root, from)
        })
        .collect();
    open.reverse();
    while let Some((start, from)) = open.pop() {
        let mut chain = vec![start];
        let mut at = start;
        let mut leaving = Vec::new();
        while let Some(&next) = children[at].iter().max_by_key(|&&child| worth[child]) {
            leaving.extend(
                children[at]
                    .iter()
                    .filter(|&&child| child != next)
                    .map(|&child| {
                        let from = Stem {
                            node: at,
                            shared: true,
                        };
                        (child, Some(from))
                    }),
            );
            chain.push(next);
            at = next;
        }
        chains.push((chain, from));
        open.extend(leaving.into_iter().rev());
    }
    chains
}
