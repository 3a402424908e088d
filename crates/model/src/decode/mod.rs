//! Batched generation with a prefix cache shared by all sequences and all batches.
//!
//! A [`Batch`] is one thread's set of running sequences; [`Batch::step`] advances every one by a
//! token and feeds at most [`Settings::rows_max`] rows of waiting prompts through the layers
//! beside them. Keys and values live in blocks of [`BLOCK`] tokens. A full block never changes;
//! it is found again by the tokens up to its end ([`PrefixCache`]), so a harness's system prompt
//! is computed once per weights, and a rollout's next call starts where its last one ended.
//!
//! A row's arithmetic never depends on the other rows: projections are those of
//! [`crate::row_products`], attention is computed row by row, block by block, and the draw hashes
//! seed and position. So the same prompt, seed and weights give the same tokens and
//! log-probabilities in any company.

mod cache;
mod draw;
mod prepared;

use std::sync::Arc;

use record::{FinishReason, Sampling};

pub use cache::PrefixCache;
pub use draw::Drawn;
pub use prepared::Prepared;

use crate::{config::Config, device::DeviceError, kernel, rope::Rope, weights::Weights};
use cache::Block;
use prepared::Matrix;

/// Tokens of a block of keys and values.
pub const BLOCK: usize = 32;

/// Limits of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Sequences that run at once; more wait.
    pub sequences_max: usize,
    /// Rows of waiting prompts per step.
    pub rows_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            sequences_max: 64,
            rows_max: 256,
        }
    }
}

/// A predicate over the generated ids so far, for stop strings.
pub type StopWhen = Arc<dyn Fn(&[u32]) -> bool + Send + Sync>;

/// A prompt to continue.
pub struct Sequence {
    /// The caller's name for it.
    pub id: u64,
    /// Prompt ids; at least one, all below the vocabulary.
    pub prompt: Vec<u32>,
    /// How to draw.
    pub sampling: Sampling,
    /// Ends the reply when it says so.
    pub stop_when: Option<StopWhen>,
}

impl std::fmt::Debug for Sequence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sequence")
            .field("id", &self.id)
            .field("prompt_tokens", &self.prompt.len())
            .finish()
    }
}

/// A continued prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// The caller's name for it.
    pub id: u64,
    /// Generated ids with their log-probabilities.
    pub drawn: Vec<Drawn>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Prompt tokens found in the cache.
    pub cached_tokens: usize,
}

struct Running {
    sequence: Sequence,
    /// Prompt and generated ids.
    tokens: Vec<u32>,
    /// Tokens whose keys and values are in `blocks`.
    computed: usize,
    blocks: Vec<Arc<Block>>,
    /// Cache name of the last full block; the root's at first.
    last_full: u64,
    cached_tokens: usize,
    drawn: Vec<Drawn>,
}

/// One thread's running sequences.
pub struct Batch {
    prepared: Arc<Prepared>,
    rope: Arc<Rope>,
    cache: Arc<PrefixCache>,
    generation: u64,
    settings: Settings,
    waiting: std::collections::VecDeque<Sequence>,
    running: Vec<Running>,
    rows: Buffers,
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("Batch");
        out.field("running", &self.running.len())
            .field("waiting", &self.waiting.len())
            .finish_non_exhaustive()
    }
}

/// Scratch of a step, kept between steps.
#[derive(Default)]
struct Buffers {
    x: Vec<f32>,
    normed: Vec<f32>,
    inverse: Vec<f32>,
    projected: Vec<f32>,
    mixed: Vec<f32>,
    wide: Vec<f32>,
    hidden: Vec<f32>,
    logits: Vec<f32>,
}

/// A row of a step: which sequence, which position.
#[derive(Debug, Clone, Copy)]
struct Row {
    sequence: usize,
    position: usize,
}

impl Batch {
    /// An empty batch over these weights. All batches that share a cache must have been made for
    /// the cache's present generation, see [`PrefixCache::clear`].
    #[must_use]
    pub fn new(
        prepared: Arc<Prepared>,
        rope: Arc<Rope>,
        cache: Arc<PrefixCache>,
        settings: Settings,
    ) -> Self {
        let generation = cache.generation();
        Self {
            prepared,
            rope,
            cache,
            generation,
            settings,
            waiting: std::collections::VecDeque::new(),
            running: Vec::new(),
            rows: Buffers::default(),
        }
    }

    /// The rotary tables that a batch of these weights needs.
    #[must_use]
    pub fn rope(weights: &Weights) -> Arc<Rope> {
        let config = &weights.config;
        Arc::new(Rope::of(config, config.max_position_embeddings))
    }

    /// Adds a sequence. It must have a prompt of valid ids, shorter than the context.
    pub fn admit(&mut self, sequence: Sequence) {
        self.waiting.push_back(sequence);
    }

    /// Sequences that run or wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.running.len() + self.waiting.len()
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops the sequences that nobody wants any more.
    pub fn retain(&mut self, wanted: impl Fn(u64) -> bool) {
        self.waiting.retain(|sequence| wanted(sequence.id));
        self.running.retain(|running| wanted(running.sequence.id));
    }

    /// Moves waiting sequences in while there is room, and lists this step's rows.
    fn gather(&mut self) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        let mut budget = self.settings.rows_max;
        let mut fresh: Vec<usize> = Vec::new();
        for (index, running) in self.running.iter().enumerate() {
            let pending = running.tokens.len() - running.computed;
            // A prompt that is still being read takes from the budget, a running reply does not.
            let count = if pending > 1 { pending.min(budget) } else { 1 };
            if pending > 1 {
                budget -= count;
                fresh.push(index);
            }
            rows.extend((0..count).map(|i| Row {
                sequence: index,
                position: running.computed + i,
            }));
        }
        while budget > 0 && self.running.len() < self.settings.sequences_max {
            let Some(next) = self.waiting.front() else {
                break;
            };
            let (blocks, last_full) = self.cache.find(&next.prompt, self.generation);
            let cached = blocks.len() * BLOCK;
            // Another sequence of this step computes a longer common prefix right now: wait for it
            // instead of computing it twice.
            let soon = fresh.iter().any(|index| {
                let other = &self.running[*index].tokens;
                let common = other
                    .iter()
                    .zip(&next.prompt)
                    .take_while(|(a, b)| a == b)
                    .count();
                common.min(next.prompt.len() - 1) / BLOCK * BLOCK > cached
            });
            if soon {
                break;
            }
            let Some(sequence) = self.waiting.pop_front() else {
                break;
            };
            let index = self.running.len();
            let tokens = sequence.prompt.clone();
            let count = (tokens.len() - cached).min(budget);
            budget -= count;
            rows.extend((0..count).map(|i| Row {
                sequence: index,
                position: cached + i,
            }));
            fresh.push(index);
            self.running.push(Running {
                sequence,
                tokens,
                computed: cached,
                blocks,
                last_full,
                cached_tokens: cached,
                drawn: Vec::new(),
            });
        }
        rows
    }

    /// Advances every running sequence by one token; returns those that ended.
    ///
    /// # Errors
    /// [`DeviceError`] when the device failed: then all sequences are given up.
    pub fn step(&mut self) -> Result<Vec<Finished>, DeviceError> {
        let stepped = self.advance();
        if stepped.is_err() {
            self.waiting.clear();
            self.running.clear();
        }
        stepped
    }

    fn advance(&mut self) -> Result<Vec<Finished>, DeviceError> {
        let rows = self.gather();
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        self.layers(&rows)?;
        self.account(&rows);
        // Rows whose sequence has no token left to read: the next one is drawn from them.
        let ready: Vec<usize> = (0..rows.len())
            .filter(|i| rows[*i].position + 1 == self.running[rows[*i].sequence].tokens.len())
            .collect();
        let mut ended: Vec<(usize, FinishReason)> = Vec::new();
        for part in ready.chunks(64) {
            self.logits(part)?;
            let Config {
                vocab_size: vocabulary,
                max_position_embeddings: context,
                ..
            } = self.prepared.weights().config;
            for (i, row) in part.iter().enumerate() {
                let index = rows[*row].sequence;
                let logits = &mut self.rows.logits[i * vocabulary..(i + 1) * vocabulary];
                if let Some(finish) = self.running[index].extend(logits, context) {
                    ended.push((index, finish));
                }
            }
        }
        ended.sort_by_key(|(index, _)| std::cmp::Reverse(*index));
        let mut finished: Vec<Finished> = ended
            .into_iter()
            .map(|(index, finish)| {
                let running = self.running.remove(index);
                let id = running.sequence.id;
                Finished {
                    id,
                    drawn: running.drawn,
                    finish,
                    cached_tokens: running.cached_tokens,
                }
            })
            .collect();
        finished.reverse();
        Ok(finished)
    }

    /// Marks rows as computed and offers full blocks to the cache.
    fn account(&mut self, rows: &[Row]) {
        for row in rows {
            let running = &mut self.running[row.sequence];
            running.computed = row.position + 1;
            if running.computed.is_multiple_of(BLOCK) {
                let index = row.position / BLOCK;
                let tokens = &running.tokens[index * BLOCK..running.computed];
                let (name, block) = self.cache.put(
                    running.last_full,
                    tokens,
                    &running.blocks[index],
                    self.generation,
                );
                running.last_full = name;
                running.blocks[index] = block;
            }
        }
    }

    /// Runs all layers over the rows; `self.rows.x` ends as the last residual stream.
    fn layers(&mut self, rows: &[Row]) -> Result<(), DeviceError> {
        let prepared = Arc::clone(&self.prepared);
        let weights = prepared.weights();
        let (config, layout) = (&weights.config, &weights.layout);
        let (d, f, q, k) = (
            config.hidden_size,
            config.intermediate_size,
            config.query_width(),
            config.key_width(),
        );
        let all = q + 2 * k;
        let hd = config.head_dim;
        let mut b = std::mem::take(&mut self.rows);
        let embedding = weights.at(&layout.embedding);
        b.x.clear();
        for row in rows {
            let at = self.running[row.sequence].tokens[row.position] as usize * d;
            b.x.extend_from_slice(&embedding[at..at + d]);
        }
        for (buffer, width) in [
            (&mut b.x, d),
            (&mut b.normed, d),
            (&mut b.inverse, 1),
            (&mut b.projected, all),
            (&mut b.mixed, q),
            (&mut b.wide, 2 * f),
            (&mut b.hidden, f),
        ] {
            buffer.resize(rows.len() * width, 0.0);
        }
        let size = Block::floats(config);
        for row in rows {
            let running = &mut self.running[row.sequence];
            if row.position / BLOCK == running.blocks.len() {
                running.blocks.push(Arc::new(Block::zeros(size)));
            }
        }
        for (index, places) in layout.layers.iter().enumerate() {
            let epsilon = config.rms_norm_eps;
            kernel::rms_norm(
                &mut b.normed,
                &mut b.inverse,
                &b.x,
                weights.at(&places.norm1),
                epsilon,
            );
            prepared.products(Matrix::Input(index), &mut b.projected, &b.normed)?;
            for (row, line) in rows.iter().zip(b.projected.chunks_exact_mut(all)) {
                if config.has_biases() {
                    kernel::add(&mut line[..q], weights.at(&places.query_bias));
                    kernel::add(&mut line[q..q + k], weights.at(&places.key_bias));
                    kernel::add(&mut line[q + k..], weights.at(&places.value_bias));
                }
                if config.norms_queries() {
                    norm_heads(&mut line[..q], weights.at(&places.query_norm), epsilon);
                    norm_heads(&mut line[q..q + k], weights.at(&places.key_norm), epsilon);
                }
                self.rope.turn(&mut line[..q], row.position, false);
                self.rope.turn(&mut line[q..q + k], row.position, false);
                let block = &mut self.running[row.sequence].blocks[row.position / BLOCK];
                // A block that is not full is held by its sequence alone.
                if let Some(block) = Arc::get_mut(block) {
                    block.write(
                        config,
                        index,
                        row.position % BLOCK,
                        &line[q..q + k],
                        &line[q + k..],
                    );
                }
            }
            for ((row, line), mixed) in rows
                .iter()
                .zip(b.projected.chunks_exact(all))
                .zip(b.mixed.chunks_exact_mut(q))
            {
                let blocks = &self.running[row.sequence].blocks;
                let group = config.num_attention_heads / config.num_key_value_heads;
                for head in 0..config.num_attention_heads {
                    let at = head * hd;
                    let out = &mut mixed[at..at + hd];
                    cache::attend(
                        out,
                        &line[at..at + hd],
                        blocks,
                        (config, index, head / group),
                        row.position + 1,
                    );
                }
            }
            prepared.products(Matrix::Output(index), &mut b.normed, &b.mixed)?;
            kernel::add(&mut b.x, &b.normed);
            kernel::rms_norm(
                &mut b.normed,
                &mut b.inverse,
                &b.x,
                weights.at(&places.norm2),
                epsilon,
            );
            prepared.products(Matrix::Wide(index), &mut b.wide, &b.normed)?;
            for (line, hidden) in b.wide.chunks_exact(2 * f).zip(b.hidden.chunks_exact_mut(f)) {
                kernel::swiglu(hidden, &line[..f], &line[f..]);
            }
            prepared.products(Matrix::Down(index), &mut b.normed, &b.hidden)?;
            kernel::add(&mut b.x, &b.normed);
        }
        self.rows = b;
        Ok(())
    }

    /// Logits of some rows of the last residual stream.
    fn logits(&mut self, rows: &[usize]) -> Result<(), DeviceError> {
        let weights = self.prepared.weights();
        let (config, layout) = (&weights.config, &weights.layout);
        let (d, vocabulary) = (config.hidden_size, config.vocab_size);
        let b = &mut self.rows;
        let mut chosen = Vec::with_capacity(rows.len() * d);
        for row in rows {
            chosen.extend_from_slice(&b.x[row * d..(row + 1) * d]);
        }
        let norm = weights.at(&layout.norm);
        kernel::rms_norm(
            &mut b.normed[..rows.len() * d],
            &mut b.inverse[..rows.len()],
            &chosen,
            norm,
            config.rms_norm_eps,
        );
        b.logits.resize(rows.len() * vocabulary, 0.0);
        let normed = &b.normed[..rows.len() * d];
        self.prepared.products(Matrix::Head, &mut b.logits, normed)
    }
}

fn norm_heads(row: &mut [f32], weight: &[f32], epsilon: f32) {
    for head in row.chunks_exact_mut(weight.len()) {
        let scale = 1.0 / (kernel::dot(head, head) / weight.len() as f32 + epsilon).sqrt();
        for (value, w) in head.iter_mut().zip(weight) {
            *value = *value * scale * w;
        }
    }
}

impl Running {
    /// Draws the next token; says so when that ends the reply.
    fn extend(&mut self, logits: &mut [f32], context_tokens_max: usize) -> Option<FinishReason> {
        let sampling = &self.sequence.sampling;
        let drawn = draw::draw(logits, sampling, self.drawn.len() as u64);
        self.drawn.push(drawn);
        self.tokens.push(drawn.token);
        if sampling.stop_ids.contains(&drawn.token) {
            return Some(FinishReason::Stop);
        }
        if let Some(stop_when) = &self.sequence.stop_when
            && stop_when(&self.tokens[self.sequence.prompt.len()..])
        {
            return Some(FinishReason::Stop);
        }
        if self.drawn.len() >= sampling.tokens_max as usize {
            return Some(FinishReason::Length);
        }
        (self.tokens.len() >= context_tokens_max).then_some(FinishReason::Context)
    }
}

#[cfg(test)]
mod tests;
