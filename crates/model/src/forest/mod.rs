//! Log-probabilities and gradients over a forest of token segments, each token computed once.
//!
//! The forest is given in preorder. It is walked depth first: a segment whose subtree is too
//! large for one block becomes part of the **trunk**: its keys and values stay on a path buffer
//! while everything below it is computed, and the gradients that those branches send to its keys
//! and values are summed there until its own backward pass runs. Subtrees that fit are packed
//! into **blocks** that run forward and backward at once, one block per thread. So peak memory is
//! one trunk path plus one block per thread, and no mask is ever built: a segment attends to the
//! trunk path and to its ancestors inside the block.
//!
//! The target of token `i` of a segment is the transition *into* it. The transition into a
//! segment's first token is predicted by the last token of its parent, once per child, so
//! branches lose no supervision (the folding error of trees with one label per position).
//!
//! Sums are made in a fixed order: the same forest, weights and number of threads give the same
//! bits.

mod ask;
mod attention;
mod backward;
mod block;
mod head;
mod path;

use rayon::prelude::*;

use crate::{
    device::{Device, DeviceError, On, Session},
    kernel::Threads,
    rope::Rope,
    weights::Weights,
};
use block::Block;
use head::HeadGradients;
use path::Path;

pub use ask::{Ask, Objective, Point, Slopes, ValueHead};

/// A run of tokens. Segments come in preorder: a parent before its children, a whole subtree in
/// one stretch.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    /// Index of the parent segment.
    pub parent: Option<usize>,
    /// Token ids; at least one.
    pub tokens: &'a [u32],
    /// Offsets of the tokens whose log-probability is wanted, ascending.
    pub targets: &'a [u32],
}

/// How the work is cut.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Blocks computed at once.
    pub threads: usize,
    /// Tokens of a block. Activations take about 50 KB per token for a 3 M-parameter policy.
    pub block_tokens_max: usize,
    /// Logits are divided by this before the log-softmax; the rollout's sampling temperature.
    pub temperature: f32,
    /// Keep only each layer's input and compute its activations again in the backward pass: about
    /// a third more time for a fraction of the memory. Gives the same bits.
    pub recompute: bool,
    /// Where products with weights are made. The weights are copied there at every pass.
    pub device: Device,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            threads: 2,
            block_tokens_max: 2048,
            temperature: 1.0,
            recompute: false,
            device: Device::CPU,
        }
    }
}

/// Why a forest cannot be computed: a defect of the caller's data, or a device that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForestError {
    /// Parents, tokens or targets are not as [`Segment`] says.
    #[error("forest segment {segment}: {reason}")]
    Malformed {
        /// The segment.
        segment: usize,
        /// Expected and found.
        reason: String,
    },
    /// The value head belongs to another shape.
    #[error(
        "forest: expected a value head of {expected} numbers (hidden size and bias), found {found}; it belongs to another model"
    )]
    ValueHead {
        /// Hidden size + 1.
        expected: usize,
        /// Its length.
        found: usize,
    },
    /// The device that was to compute.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// What was computed.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Per segment and target: log-probability of the token.
    pub logprobs: Vec<Vec<f32>>,
    /// Per segment and target: entropy of the distribution it was drawn from, in nats.
    pub entropies: Vec<Vec<f32>>,
    /// Per segment and target: value of the state before the token; 0 without a value head.
    pub values: Vec<Vec<f32>>,
    /// Gradient of every parameter; empty when no loss was given.
    pub gradient: Vec<f32>,
    /// Gradient of the value head; empty without loss or head.
    pub value_gradient: Vec<f32>,
}

/// Gradient of the loss with respect to one target's log-probability: called with the segment,
/// the index into its targets, and the log-probability.
pub type Loss<'a> = dyn Fn(usize, usize, f32) -> f32 + Sync + 'a;

/// Computes log-probabilities and entropies, and with a loss the gradients.
///
/// # Errors
/// [`ForestError`] when the segments are malformed.
pub fn run(
    weights: &Weights,
    segments: &[Segment<'_>],
    loss: Option<&Loss<'_>>,
    settings: Settings,
) -> Result<Outcome, ForestError> {
    let of_logprob = loss.map(|loss| {
        move |segment: usize, target: usize, point: Point| Slopes {
            logprob: loss(segment, target, point.logprob),
            ..Slopes::default()
        }
    });
    let ask = Ask {
        loss: of_logprob.as_ref().map(|loss| loss as &Objective<'_>),
        values: None,
        policy: true,
    };
    answer(weights, segments, &ask, settings)
}

/// Computes what is asked: log-probabilities and entropies, values, and with a loss the
/// gradients.
///
/// # Errors
/// [`ForestError`] when the segments are malformed or the value head has another width.
pub fn answer(
    weights: &Weights,
    segments: &[Segment<'_>],
    ask: &Ask<'_>,
    settings: Settings,
) -> Result<Outcome, ForestError> {
    let plan = Plan::new(weights, segments)?;
    let width = weights.config.hidden_size + 1;
    if let Some(head) = ask.values.filter(|head| head.data.len() != width) {
        return Err(ForestError::ValueHead {
            expected: width,
            found: head.data.len(),
        });
    }
    let threads = settings.threads.max(1);
    let rope = Rope::of(&weights.config, plan.depth_max.max(1));
    let held = settings.device.hold(&weights.data)?;
    let session = held.map(|held| Session::new(&weights.data, held));
    let with_loss = ask.loss.is_some();
    let own = |len: usize| vec![vec![0.0; if with_loss { len } else { 0 }]; threads];
    let mut walk = Walk {
        weights,
        segments,
        plan: &plan,
        rope: &rope,
        ask,
        settings,
        session: session.as_ref(),
        gradients: own(weights.len()),
        value_gradients: own(ask.values.map_or(0, |head| head.data.len())),
        found: Vec::with_capacity(plan.targets),
    };
    let mut path = Path::new(weights.config.num_hidden_layers);
    walk.descend(&plan.roots, &mut path);
    let Walk {
        gradients,
        value_gradients,
        found,
        ..
    } = walk;
    if let Some(session) = session {
        session.check()?;
    }
    let zeros = || -> Vec<Vec<f32>> {
        let each = segments.iter();
        each.map(|segment| vec![0.0; segment.targets.len()])
            .collect()
    };
    let (mut logprobs, mut entropies, mut values) = (zeros(), zeros(), zeros());
    for target in found {
        logprobs[target.segment][target.index] = target.point.logprob;
        entropies[target.segment][target.index] = target.point.entropy;
        values[target.segment][target.index] = target.point.value;
    }
    Ok(Outcome {
        logprobs,
        entropies,
        values,
        gradient: sum(gradients),
        value_gradient: sum(value_gradients),
    })
}

/// The threads' sums, added up in a fixed order.
fn sum(gradients: Vec<Vec<f32>>) -> Vec<f32> {
    let mut sums = gradients.into_iter();
    let mut gradient = sums.next().unwrap_or_default();
    for other in sums {
        gradient
            .par_chunks_mut(1 << 16)
            .zip(other.par_chunks(1 << 16))
            .for_each(|(a, b)| crate::kernel::add(a, b));
    }
    gradient
}

/// One target's result.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    segment: usize,
    index: usize,
    point: Point,
}

struct Plan {
    children: Vec<Vec<usize>>,
    roots: Vec<usize>,
    /// Tokens of each segment's whole subtree.
    size: Vec<usize>,
    depth_max: usize,
    targets: usize,
}

impl Plan {
    fn new(weights: &Weights, segments: &[Segment<'_>]) -> Result<Self, ForestError> {
        let vocabulary = weights.config.vocab_size;
        let mut children = vec![Vec::new(); segments.len()];
        let (mut roots, mut depth_end, mut targets) = (Vec::new(), vec![0; segments.len()], 0);
        let mut open: Vec<usize> = Vec::new();
        for (index, segment) in segments.iter().enumerate() {
            let wrong = |reason: String| {
                Err(ForestError::Malformed {
                    segment: index,
                    reason,
                })
            };
            if segment.tokens.is_empty() {
                return wrong("expected at least one token, found none".into());
            }
            if let Some(token) = segment
                .tokens
                .iter()
                .find(|token| **token as usize >= vocabulary)
            {
                return wrong(format!(
                    "expected token ids below {vocabulary}, found {token}"
                ));
            }
            match segment.parent {
                None => {
                    open.clear();
                    roots.push(index);
                }
                Some(parent) => {
                    while open.last().is_some_and(|last| *last != parent) {
                        open.pop();
                    }
                    if open.is_empty() {
                        return wrong(format!(
                            "expected preorder, found parent {parent} whose subtree has ended"
                        ));
                    }
                    children[parent].push(index);
                    depth_end[index] = depth_end[parent];
                }
            }
            open.push(index);
            depth_end[index] += segment.tokens.len();
            let ascending = segment.targets.windows(2).all(|pair| pair[0] < pair[1]);
            let inside = segment
                .targets
                .last()
                .is_none_or(|last| (*last as usize) < segment.tokens.len());
            if !ascending || !inside {
                return wrong("expected ascending target offsets inside the segment".into());
            }
            if segment.parent.is_none() && segment.targets.first() == Some(&0) {
                return wrong(
                    "the first token of a sequence has no prediction and cannot be a target".into(),
                );
            }
            targets += segment.targets.len();
        }
        let mut size: Vec<usize> = segments
            .iter()
            .map(|segment| segment.tokens.len())
            .collect();
        for index in (0..segments.len()).rev() {
            if let Some(parent) = segments[index].parent {
                size[parent] += size[index];
            }
        }
        let depth_max = depth_end.into_iter().max().unwrap_or(0);
        Ok(Self {
            children,
            roots,
            size,
            depth_max,
            targets,
        })
    }

    /// The segments of some sibling subtrees, in preorder.
    fn collect(&self, roots: &[usize]) -> Vec<usize> {
        let mut stack: Vec<usize> = roots.iter().rev().copied().collect();
        let mut all = Vec::new();
        while let Some(index) = stack.pop() {
            all.push(index);
            stack.extend(self.children[index].iter().rev());
        }
        all
    }
}

struct Walk<'a> {
    weights: &'a Weights,
    segments: &'a [Segment<'a>],
    plan: &'a Plan,
    rope: &'a Rope,
    ask: &'a Ask<'a>,
    settings: Settings,
    session: Option<&'a Session<'a>>,
    /// One sum per thread.
    gradients: Vec<Vec<f32>>,
    value_gradients: Vec<Vec<f32>>,
    found: Vec<Found>,
}

/// A thread's share of blocks and what it sums up.
struct Share<'g> {
    blocks: Vec<Vec<usize>>,
    gradient: &'g mut [f32],
    value_gradient: &'g mut [f32],
    path_gradient: Path,
    found: Vec<Found>,
}

impl Walk<'_> {
    /// Computes the subtrees below `path`; their gradients for the path's keys and values are
    /// added to `path`'s.
    fn descend(&mut self, roots: &[usize], path: &mut Path) {
        let limit = self.settings.block_tokens_max;
        let small: Vec<usize> = roots
            .iter()
            .copied()
            .filter(|r| self.plan.size[*r] <= limit)
            .collect();
        self.blocks(&small, path);
        for root in roots.iter().copied().filter(|r| self.plan.size[*r] > limit) {
            let mut trunk = Block::new(self.weights, self.segments, &[root], path.len());
            trunk.recompute = self.settings.recompute && self.ask.loss.is_some();
            let session = self.session;
            let on = move |threads| On { threads, session };
            trunk.forward(self.rope, path, on(Threads::All));
            let children = &self.plan.children[root];
            let targets = self.head_targets(&[root]);
            let mut gradients = HeadGradients {
                weights: &mut self.gradients[0],
                values: &mut self.value_gradients[0],
            };
            let dhidden = trunk.head(
                &targets,
                self.ask,
                (self.settings.temperature, on(Threads::One)),
                &mut gradients,
                &mut self.found,
            );
            let before = path.len();
            trunk.push_onto(path);
            self.descend(children, path);
            let own = path.pop_from(before);
            if let Some(dhidden) = dhidden {
                let gradient = &mut self.gradients[0];
                let (keys, gradients) = path.split();
                trunk.backward(
                    self.rope,
                    keys,
                    gradients,
                    dhidden,
                    Some(own),
                    gradient,
                    on(Threads::All),
                );
            }
        }
    }

    fn blocks(&mut self, roots: &[usize], path: &mut Path) {
        if roots.is_empty() {
            return;
        }
        let threads = self.settings.threads.max(1);
        let total: usize = roots.iter().map(|r| self.plan.size[*r]).sum();
        // Enough blocks for every thread, none above the limit.
        let target = self
            .settings
            .block_tokens_max
            .min(total.div_ceil(threads).max(1));
        let mut blocks: Vec<(usize, Vec<usize>)> = Vec::new();
        for root in roots {
            let size = self.plan.size[*root];
            match blocks.last_mut() {
                Some((tokens, block)) if *tokens + size <= target => {
                    *tokens += size;
                    block.push(*root);
                }
                _ => blocks.push((size, vec![*root])),
            }
        }
        // Largest first to the thread with the least work: deterministic and balanced.
        blocks.sort_by_key(|(tokens, _)| std::cmp::Reverse(*tokens));
        let (ask, temperature) = (self.ask, self.settings.temperature);
        let recompute = self.settings.recompute && ask.loss.is_some();
        let mut shares: Vec<(usize, Share<'_>)> = self
            .gradients
            .iter_mut()
            .zip(&mut self.value_gradients)
            .map(|(gradient, value_gradient)| {
                let path_gradient = Path::zeros_like(path, ask.loss.is_some());
                (
                    0,
                    Share {
                        blocks: Vec::new(),
                        gradient,
                        value_gradient,
                        path_gradient,
                        found: Vec::new(),
                    },
                )
            })
            .collect();
        for (tokens, block) in blocks {
            if let Some((load, share)) = shares.iter_mut().min_by_key(|(load, _)| *load) {
                *load += tokens;
                share.blocks.push(block);
            }
        }
        let (weights, segments, plan, rope) = (self.weights, self.segments, self.plan, self.rope);
        let shared_path: &Path = path;
        let one = On {
            threads: Threads::One,
            session: self.session,
        };
        shares
            .par_iter_mut()
            .with_max_len(1)
            .for_each(|(_, share)| {
                for roots in std::mem::take(&mut share.blocks) {
                    let members = plan.collect(&roots);
                    let mut block = Block::new(weights, segments, &members, shared_path.len());
                    block.recompute = recompute;
                    block.forward(rope, shared_path, one);
                    let targets = head_targets(segments, plan, &members);
                    let mut gradients = HeadGradients {
                        weights: share.gradient,
                        values: share.value_gradient,
                    };
                    let dhidden = block.head(
                        &targets,
                        ask,
                        (temperature, one),
                        &mut gradients,
                        &mut share.found,
                    );
                    if let Some(dhidden) = dhidden {
                        let (_, gradients) = share.path_gradient.split();
                        block.backward(
                            rope,
                            shared_path.keys(),
                            gradients,
                            dhidden,
                            None,
                            share.gradient,
                            one,
                        );
                    }
                }
            });
        let done: Vec<(Path, Vec<Found>)> = shares
            .into_iter()
            .map(|(_, share)| (share.path_gradient, share.found))
            .collect();
        for (path_gradient, found) in done {
            self.found.extend(found);
            if ask.loss.is_some() {
                path.add_gradients(&path_gradient);
            }
        }
    }

    fn head_targets(&self, members: &[usize]) -> Vec<HeadTarget> {
        head_targets(self.segments, self.plan, members)
    }
}

/// A row of a block that predicts a token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadTarget {
    /// Row in the block.
    row: usize,
    token: u32,
    segment: usize,
    index: usize,
}

/// All targets predicted by rows of these segments, by row: transitions inside each, and from
/// each one's last token into its children's first.
fn head_targets(segments: &[Segment<'_>], plan: &Plan, members: &[usize]) -> Vec<HeadTarget> {
    let mut targets = Vec::new();
    let mut base = 0;
    for &member in members {
        let segment = &segments[member];
        for (index, &offset) in segment
            .targets
            .iter()
            .enumerate()
            .filter(|(_, offset)| **offset > 0)
        {
            let token = segment.tokens[offset as usize];
            targets.push(HeadTarget {
                row: base + offset as usize - 1,
                token,
                segment: member,
                index,
            });
        }
        base += segment.tokens.len();
        for &child in &plan.children[member] {
            if segments[child].targets.first() == Some(&0) {
                let token = segments[child].tokens[0];
                targets.push(HeadTarget {
                    row: base - 1,
                    token,
                    segment: child,
                    index: 0,
                });
            }
        }
    }
    targets
}

#[cfg(test)]
mod tests;
