//! Forward and backward of a block of segments below a trunk path.

use crate::{
    config::Config,
    device::On,
    forest::{
        Segment, attention,
        path::{KeyValue, Path},
    },
    kernel::{self, Mat},
    rope::Rope,
    weights::{LayerPlaces, Weights},
};

/// A segment's place in a block.
#[derive(Debug)]
pub(super) struct Piece {
    /// First row.
    pub(super) base: usize,
    /// Rows.
    pub(super) len: usize,
    /// Ancestors inside the block, root first, as (base, len).
    pub(super) above: Vec<(usize, usize)>,
    /// Tokens of those ancestors.
    pub(super) above_tokens: usize,
}

/// What a layer's backward pass needs.
#[derive(Debug, Default)]
pub(super) struct Saved {
    pub(super) x: Vec<f32>,
    pub(super) inverse1: Vec<f32>,
    /// Before norm and rotation; only kept where queries are normed.
    pub(super) query_raw: Vec<f32>,
    pub(super) key_raw: Vec<f32>,
    pub(super) query_inverse: Vec<f32>,
    pub(super) key_inverse: Vec<f32>,
    pub(super) query: Vec<f32>,
    pub(super) key: Vec<f32>,
    pub(super) value: Vec<f32>,
    pub(super) mixed: Vec<f32>,
    pub(super) log_sums: Vec<f32>,
    pub(super) middle: Vec<f32>,
    pub(super) inverse2: Vec<f32>,
    pub(super) gate: Vec<f32>,
    pub(super) up: Vec<f32>,
}

/// A set of segments computed together.
#[derive(Debug)]
pub(super) struct Block<'a> {
    pub(super) weights: &'a Weights,
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<usize>,
    pub(super) pieces: Vec<Piece>,
    pub(super) saved: Vec<Saved>,
    /// Keep only the input of each layer, see [`super::Settings::recompute`].
    pub(super) recompute: bool,
    /// The residual stream after the last layer.
    pub(super) last: Vec<f32>,
}

fn project(
    out: &mut [f32],
    rows: usize,
    input: &[f32],
    weight: &[f32],
    wide: (usize, usize),
    on: On<'_>,
) {
    let (outputs, inputs) = wide;
    on.matmul(
        out,
        0.0,
        1.0,
        Mat::dense(input, rows, inputs),
        Mat::dense(weight, outputs, inputs).t(),
    );
}

fn add_bias(rows: &mut [f32], bias: &[f32]) {
    if !bias.is_empty() {
        for row in rows.chunks_exact_mut(bias.len()) {
            kernel::add(row, bias);
        }
    }
}

impl<'a> Block<'a> {
    /// Lays the segments (in preorder) out below a path of `above` tokens.
    pub(super) fn new(
        weights: &'a Weights,
        segments: &[Segment<'_>],
        members: &[usize],
        above: usize,
    ) -> Self {
        let mut tokens = Vec::new();
        let mut positions = Vec::new();
        let mut pieces: Vec<Piece> = Vec::with_capacity(members.len());
        let mut places: std::collections::HashMap<usize, usize> = std::collections::HashMap::new();
        for &member in members {
            let segment = &segments[member];
            let parent = segment
                .parent
                .and_then(|parent| places.get(&parent).copied());
            let (mut chain, mut above_tokens) = (Vec::new(), 0);
            if let Some(parent) = parent {
                let parent = &pieces[parent];
                chain.clone_from(&parent.above);
                chain.push((parent.base, parent.len));
                above_tokens = parent.above_tokens + parent.len;
            }
            places.insert(member, pieces.len());
            pieces.push(Piece {
                base: tokens.len(),
                len: segment.tokens.len(),
                above: chain,
                above_tokens,
            });
            positions.extend((0..segment.tokens.len()).map(|i| above + above_tokens + i));
            tokens.extend_from_slice(segment.tokens);
        }
        Self {
            weights,
            tokens,
            positions,
            pieces,
            saved: Vec::new(),
            recompute: false,
            last: Vec::new(),
        }
    }

    pub(super) fn config(&self) -> &'a Config {
        &self.weights.config
    }

    /// Runs all layers below the path's keys and values.
    pub(super) fn forward(&mut self, rope: &Rope, path: &Path, on: On<'_>) {
        let (config, rows) = (self.config(), self.tokens.len());
        let width = config.hidden_size;
        let embedding = self.weights.at(&self.weights.layout.embedding);
        let mut x = Vec::with_capacity(rows * width);
        for token in &self.tokens {
            let at = *token as usize * width;
            x.extend_from_slice(&embedding[at..at + width]);
        }
        for (index, above) in path.keys().iter().enumerate() {
            let (mut saved, out) =
                self.layer(&self.weights.layout.layers[index], x, rope, above, on);
            if self.recompute {
                // Keys and values stay: the branches below attend to them.
                saved = Saved {
                    x: saved.x,
                    key: saved.key,
                    value: saved.value,
                    ..Saved::default()
                };
            }
            self.saved.push(saved);
            x = out;
        }
        self.last = x;
    }

    pub(super) fn layer(
        &self,
        places: &LayerPlaces,
        x: Vec<f32>,
        rope: &Rope,
        above: &KeyValue,
        on: On<'_>,
    ) -> (Saved, Vec<f32>) {
        let (config, rows) = (self.config(), self.tokens.len());
        let (d, f, q, k) = (
            config.hidden_size,
            config.intermediate_size,
            config.query_width(),
            config.key_width(),
        );
        let w = |range| self.weights.at(range);
        let mut saved = Saved {
            inverse1: vec![0.0; rows],
            inverse2: vec![0.0; rows],
            ..Saved::default()
        };
        let mut normed = vec![0.0; rows * d];
        kernel::rms_norm(
            &mut normed,
            &mut saved.inverse1,
            &x,
            w(&places.norm1),
            config.rms_norm_eps,
        );
        saved.query = vec![0.0; rows * q];
        saved.key = vec![0.0; rows * k];
        saved.value = vec![0.0; rows * k];
        project(
            &mut saved.query,
            rows,
            &normed,
            w(&places.query),
            (q, d),
            on,
        );
        project(&mut saved.key, rows, &normed, w(&places.key), (k, d), on);
        project(
            &mut saved.value,
            rows,
            &normed,
            w(&places.value),
            (k, d),
            on,
        );
        add_bias(&mut saved.query, w(&places.query_bias));
        add_bias(&mut saved.key, w(&places.key_bias));
        add_bias(&mut saved.value, w(&places.value_bias));
        if config.norms_queries() {
            saved.query_inverse = vec![0.0; rows * config.num_attention_heads];
            saved.key_inverse = vec![0.0; rows * config.num_key_value_heads];
            saved.query_raw = std::mem::replace(&mut saved.query, vec![0.0; rows * q]);
            saved.key_raw = std::mem::replace(&mut saved.key, vec![0.0; rows * k]);
            let epsilon = config.rms_norm_eps;
            kernel::rms_norm(
                &mut saved.query,
                &mut saved.query_inverse,
                &saved.query_raw,
                w(&places.query_norm),
                epsilon,
            );
            kernel::rms_norm(
                &mut saved.key,
                &mut saved.key_inverse,
                &saved.key_raw,
                w(&places.key_norm),
                epsilon,
            );
        }
        for (row, &position) in self.positions.iter().enumerate() {
            rope.turn(&mut saved.query[row * q..(row + 1) * q], position, false);
            rope.turn(&mut saved.key[row * k..(row + 1) * k], position, false);
        }
        saved.mixed = vec![0.0; rows * q];
        saved.log_sums = vec![0.0; rows * config.num_attention_heads];
        let rows_in = attention::Rows {
            query: &saved.query,
            key: &saved.key,
            value: &saved.value,
        };
        attention::forward(
            config,
            &self.pieces,
            rows_in,
            above,
            &mut saved.mixed,
            &mut saved.log_sums,
            on.threads,
        );
        saved.middle = x.clone();
        let out_weight = Mat::dense(w(&places.output), d, q).t();
        on.matmul(
            &mut saved.middle,
            1.0,
            1.0,
            Mat::dense(&saved.mixed, rows, q),
            out_weight,
        );
        kernel::rms_norm(
            &mut normed,
            &mut saved.inverse2,
            &saved.middle,
            w(&places.norm2),
            config.rms_norm_eps,
        );
        saved.gate = vec![0.0; rows * f];
        saved.up = vec![0.0; rows * f];
        project(&mut saved.gate, rows, &normed, w(&places.gate), (f, d), on);
        project(&mut saved.up, rows, &normed, w(&places.up), (f, d), on);
        let mut hidden = vec![0.0; rows * f];
        kernel::swiglu(&mut hidden, &saved.gate, &saved.up);
        let mut out = saved.middle.clone();
        let down = Mat::dense(w(&places.down), d, f).t();
        on.matmul(&mut out, 1.0, 1.0, Mat::dense(&hidden, rows, f), down);
        saved.x = x;
        (saved, out)
    }

    /// Appends this block's keys and values to the path (for a block of one segment).
    pub(super) fn push_onto(&self, path: &mut Path) {
        path.tokens += self.tokens.len();
        for ((layer, gradient), saved) in path
            .layers
            .iter_mut()
            .zip(&mut path.gradients)
            .zip(&self.saved)
        {
            layer.keys.extend_from_slice(&saved.key);
            layer.values.extend_from_slice(&saved.value);
            gradient.keys.resize(layer.keys.len(), 0.0);
            gradient.values.resize(layer.values.len(), 0.0);
        }
    }
}
