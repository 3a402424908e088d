//! Blocks of keys and values, the map that finds them again, and attention over them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::BLOCK;
use crate::{config::Config, kernel};

/// Keys and values of [`BLOCK`] tokens in all layers. Per layer and key head: keys transposed
/// (`head_dim` × `BLOCK`), so that the scores of a block are `head_dim` multiply-adds of whole
/// vectors; then values (`BLOCK` × `head_dim`).
#[derive(Debug)]
pub(super) struct Block {
    data: Box<[f32]>,
}

impl Block {
    pub(super) fn floats(config: &Config) -> usize {
        config.num_hidden_layers * 2 * BLOCK * config.key_width()
    }

    pub(super) fn zeros(floats: usize) -> Self {
        Self {
            data: vec![0.0; floats].into_boxed_slice(),
        }
    }

    fn place(config: &Config, layer: usize, key_head: usize) -> usize {
        (layer * config.num_key_value_heads + key_head) * 2 * BLOCK * config.head_dim
    }

    pub(super) fn write(
        &mut self,
        config: &Config,
        layer: usize,
        slot: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let hd = config.head_dim;
        for (head, (key, value)) in key.chunks_exact(hd).zip(value.chunks_exact(hd)).enumerate() {
            let at = Self::place(config, layer, head);
            let (keys, values) = self.data[at..at + 2 * BLOCK * hd].split_at_mut(BLOCK * hd);
            for (i, number) in key.iter().enumerate() {
                keys[i * BLOCK + slot] = *number;
            }
            values[slot * hd..(slot + 1) * hd].copy_from_slice(value);
        }
    }
}

/// One query head's attention to the first `visible` tokens of some blocks (online softmax, block
/// by block).
pub(super) fn attend(
    out: &mut [f32],
    query: &[f32],
    blocks: &[Arc<Block>],
    (config, layer, key_head): (&Config, usize, usize),
    visible: usize,
) {
    let hd = query.len();
    let scale = 1.0 / (hd as f32).sqrt();
    let at = Block::place(config, layer, key_head);
    let (mut largest, mut sum) = (f32::NEG_INFINITY, 0.0);
    out.fill(0.0);
    for (index, block) in blocks.iter().take(visible.div_ceil(BLOCK)).enumerate() {
        let (keys, values) = block.data[at..at + 2 * BLOCK * hd].split_at(BLOCK * hd);
        let mut scores = [0.0_f32; BLOCK];
        for (q, line) in query.iter().zip(keys.chunks_exact(BLOCK)) {
            for lane in 0..BLOCK {
                scores[lane] = q.mul_add(line[lane], scores[lane]);
            }
        }
        let seen = (visible - index * BLOCK).min(BLOCK);
        let mut top = largest;
        for (lane, score) in scores.iter_mut().enumerate() {
            *score = if lane < seen {
                *score * scale
            } else {
                f32::NEG_INFINITY
            };
            top = if *score > top { *score } else { top };
        }
        let shrink = kernel::exp(largest - top);
        let mut added = 0.0;
        for score in &mut scores {
            *score = kernel::exp(*score - top);
            added += *score;
        }
        sum = sum * shrink + added;
        largest = top;
        if shrink < 1.0 {
            for value in out.iter_mut() {
                *value *= shrink;
            }
        }
        for (weight, line) in scores.iter().zip(values.chunks_exact(hd)).take(seen) {
            kernel::axpy(out, *weight, line);
        }
    }
    let inverse = 1.0 / sum;
    for value in out {
        *value *= inverse;
    }
}

#[derive(Debug)]
struct Entry {
    name: u64,
    block: Arc<Block>,
    used: u64,
}

#[derive(Debug, Default)]
struct State {
    generation: u64,
    /// Name of the previous block and the tokens of this one. Names are never reused, so a name
    /// stands for all tokens up to its block's end: a match is exact, not a hash.
    entries: HashMap<(u64, [u32; BLOCK]), Entry>,
    names: u64,
    clock: u64,
    evicted: u64,
}

/// Full blocks by the tokens up to their end, shared by all batches of one set of weights.
/// Bounded: at the limit the blocks that were not used for longest go.
#[derive(Debug)]
pub struct PrefixCache {
    state: Mutex<State>,
    blocks_max: usize,
}

/// The name of "no block yet".
const ROOT: u64 = 0;

impl PrefixCache {
    /// A cache of at most `bytes_max` bytes of keys and values of this shape (at least 64 blocks).
    #[must_use]
    pub fn new(config: &Config, bytes_max: usize) -> Self {
        let blocks_max = (bytes_max / (Block::floats(config) * 4)).max(64);
        Self {
            state: Mutex::default(),
            blocks_max,
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // The state is valid after every statement, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets everything, because the weights changed. Batches of the old weights neither find
    /// nor put any more.
    pub fn clear(&self) {
        let mut state = self.lock();
        state.generation += 1;
        state.entries.clear();
    }

    /// Counts the calls of [`Self::clear`].
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.lock().generation
    }

    /// Blocks held and blocks evicted so far.
    #[must_use]
    pub fn counts(&self) -> (usize, u64) {
        let state = self.lock();
        (state.entries.len(), state.evicted)
    }

    /// The longest run of full blocks that starts `prompt`, leaving at least its last token to be
    /// computed, and the name of the last one.
    pub(super) fn find(&self, prompt: &[u32], generation: u64) -> (Vec<Arc<Block>>, u64) {
        let mut state = self.lock();
        let (mut blocks, mut name) = (Vec::new(), ROOT);
        if state.generation != generation {
            return (blocks, name);
        }
        state.clock += 1;
        let now = state.clock;
        for tokens in prompt[..prompt.len().saturating_sub(1)]
            .as_chunks::<BLOCK>()
            .0
        {
            let Some(entry) = state.entries.get_mut(&(name, *tokens)) else {
                break;
            };
            entry.used = now;
            name = entry.name;
            blocks.push(Arc::clone(&entry.block));
        }
        (blocks, name)
    }

    /// Offers a full block; returns its name and the block to keep (an equal one that was already
    /// there, so that memory is shared).
    pub(super) fn put(
        &self,
        after: u64,
        tokens: &[u32],
        block: &Arc<Block>,
        generation: u64,
    ) -> (u64, Arc<Block>) {
        let mut state = self.lock();
        state.clock += 1;
        state.names += 1;
        let (now, name) = (state.clock, state.names);
        let Ok(tokens) = <[u32; BLOCK]>::try_from(tokens) else {
            return (name, Arc::clone(block));
        };
        if state.generation != generation {
            return (name, Arc::clone(block));
        }
        if state.entries.len() >= self.blocks_max {
            // An eighth at once, so that the sort is paid seldom.
            let mut uses: Vec<u64> = state.entries.values().map(|entry| entry.used).collect();
            let nth = uses.len() / 8;
            let (_, limit, _) = uses.select_nth_unstable(nth);
            let limit = *limit;
            let before = state.entries.len();
            state.entries.retain(|_, entry| entry.used > limit);
            state.evicted += (before - state.entries.len()) as u64;
        }
        let fresh = || Entry {
            name,
            block: Arc::clone(block),
            used: now,
        };
        let entry = state.entries.entry((after, tokens)).or_insert_with(fresh);
        entry.used = now;
        (entry.name, Arc::clone(&entry.block))
    }
}
