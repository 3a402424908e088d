//! Forward and backward of a block of segments below a trunk path.

use crate::{
    config::Config,
    forest::{
        Segment, attention,
        path::{KeyValue, Path},
    },
    kernel::{self, Mat, Rope, Threads, matmul},
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
struct Saved {
    x: Vec<f32>,
    inverse1: Vec<f32>,
    /// Before norm and rotation; only kept where queries are normed.
    query_raw: Vec<f32>,
    key_raw: Vec<f32>,
    query_inverse: Vec<f32>,
    key_inverse: Vec<f32>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    mixed: Vec<f32>,
    log_sums: Vec<f32>,
    middle: Vec<f32>,
    inverse2: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
}

/// A set of segments computed together.
#[derive(Debug)]
pub(super) struct Block<'a> {
    pub(super) weights: &'a Weights,
    tokens: Vec<u32>,
    positions: Vec<usize>,
    pieces: Vec<Piece>,
    saved: Vec<Saved>,
    /// The residual stream after the last layer.
    pub(super) last: Vec<f32>,
}

fn project(
    out: &mut [f32],
    rows: usize,
    input: &[f32],
    weight: &[f32],
    wide: (usize, usize),
    threads: Threads,
) {
    let (outputs, inputs) = wide;
    matmul(
        out,
        outputs,
        0.0,
        1.0,
        Mat::dense(input, rows, inputs),
        Mat::dense(weight, outputs, inputs).t(),
        threads,
    );
}

/// `dinput = beta * dinput + dout · weight`, `dweight += doutᵀ · input`.
#[expect(
    clippy::too_many_arguments,
    reason = "a matrix product with its two gradients"
)]
fn project_backward(
    dinput: &mut [f32],
    beta: f32,
    dweight: &mut [f32],
    dout: &[f32],
    input: &[f32],
    weight: &[f32],
    shape: (usize, usize, usize),
    threads: Threads,
) {
    let (rows, outputs, inputs) = shape;
    let dout = Mat::dense(dout, rows, outputs);
    matmul(
        dinput,
        inputs,
        beta,
        1.0,
        dout,
        Mat::dense(weight, outputs, inputs),
        threads,
    );
    matmul(
        dweight,
        inputs,
        1.0,
        1.0,
        dout.t(),
        Mat::dense(input, rows, inputs),
        threads,
    );
}

fn add_bias(rows: &mut [f32], bias: &[f32]) {
    if !bias.is_empty() {
        for row in rows.chunks_exact_mut(bias.len()) {
            kernel::add(row, bias);
        }
    }
}

fn add_bias_backward(dbias: &mut [f32], drows: &[f32]) {
    if !dbias.is_empty() {
        let width = dbias.len();
        for row in drows.chunks_exact(width) {
            kernel::add(dbias, row);
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
            last: Vec::new(),
        }
    }

    fn config(&self) -> &'a Config {
        &self.weights.config
    }

    /// Runs all layers below the path's keys and values.
    pub(super) fn forward(&mut self, rope: &Rope, path: &Path, threads: Threads) {
        let (config, rows) = (self.config(), self.tokens.len());
        let width = config.hidden_size;
        let embedding = self.weights.at(&self.weights.layout.embedding);
        let mut x = Vec::with_capacity(rows * width);
        for token in &self.tokens {
            let at = *token as usize * width;
            x.extend_from_slice(&embedding[at..at + width]);
        }
        for (index, above) in path.keys().iter().enumerate() {
            let (saved, out) =
                self.layer(&self.weights.layout.layers[index], x, rope, above, threads);
            self.saved.push(saved);
            x = out;
        }
        self.last = x;
    }

    fn layer(
        &self,
        places: &LayerPlaces,
        x: Vec<f32>,
        rope: &Rope,
        above: &KeyValue,
        threads: Threads,
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
            threads,
        );
        project(
            &mut saved.key,
            rows,
            &normed,
            w(&places.key),
            (k, d),
            threads,
        );
        project(
            &mut saved.value,
            rows,
            &normed,
            w(&places.value),
            (k, d),
            threads,
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
            threads,
        );
        saved.middle = x.clone();
        let out_weight = Mat::dense(w(&places.output), d, q).t();
        matmul(
            &mut saved.middle,
            d,
            1.0,
            1.0,
            Mat::dense(&saved.mixed, rows, q),
            out_weight,
            threads,
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
        project(
            &mut saved.gate,
            rows,
            &normed,
            w(&places.gate),
            (f, d),
            threads,
        );
        project(&mut saved.up, rows, &normed, w(&places.up), (f, d), threads);
        let mut hidden = vec![0.0; rows * f];
        kernel::swiglu(&mut hidden, &saved.gate, &saved.up);
        let mut out = saved.middle.clone();
        let down = Mat::dense(w(&places.down), d, f).t();
        matmul(
            &mut out,
            d,
            1.0,
            1.0,
            Mat::dense(&hidden, rows, f),
            down,
            threads,
        );
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

    /// Backward through all layers. `dx` is the gradient of [`Self::last`]; `own` what the
    /// branches below sent to this block's own keys and values; gradients for the trunk's keys
    /// and values are added to `above_gradients`.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call, each argument a different owner"
    )]
    pub(super) fn backward(
        &mut self,
        rope: &Rope,
        above: &[KeyValue],
        above_gradients: &mut [KeyValue],
        mut dx: Vec<f32>,
        mut own: Option<Vec<KeyValue>>,
        gradient: &mut [f32],
        threads: Threads,
    ) {
        for index in (0..self.saved.len()).rev() {
            let saved = std::mem::take(&mut self.saved[index]);
            let own = own
                .as_mut()
                .map(|layers| std::mem::take(&mut layers[index]));
            let places = &self.weights.layout.layers[index];
            self.layer_backward(
                places,
                &saved,
                &mut dx,
                own,
                (rope, &above[index], &mut above_gradients[index]),
                gradient,
                threads,
            );
        }
        let width = self.config().hidden_size;
        let place = self.weights.layout.embedding.clone();
        let dembedding = &mut gradient[place];
        for (row, token) in dx.chunks_exact(width).zip(&self.tokens) {
            let at = *token as usize * width;
            kernel::add(&mut dembedding[at..at + width], row);
        }
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one call, each argument a different owner"
    )]
    fn layer_backward(
        &self,
        places: &LayerPlaces,
        saved: &Saved,
        dx: &mut [f32],
        own: Option<KeyValue>,
        (rope, above, above_gradient): (&Rope, &KeyValue, &mut KeyValue),
        gradient: &mut [f32],
        threads: Threads,
    ) {
        let (config, rows) = (self.config(), self.tokens.len());
        let (d, f, q, k) = (
            config.hidden_size,
            config.intermediate_size,
            config.query_width(),
            config.key_width(),
        );
        let w = |range| self.weights.at(range);
        // Feed-forward.
        let mut normed = vec![0.0; rows * d];
        let mut unused = vec![0.0; rows];
        kernel::rms_norm(
            &mut normed,
            &mut unused,
            &saved.middle,
            w(&places.norm2),
            config.rms_norm_eps,
        );
        let mut hidden = vec![0.0; rows * f];
        kernel::swiglu(&mut hidden, &saved.gate, &saved.up);
        let mut dgate = vec![0.0; rows * f];
        let down_gradient = &mut gradient[places.down.clone()];
        project_backward(
            &mut dgate,
            0.0,
            down_gradient,
            dx,
            &hidden,
            w(&places.down),
            (rows, d, f),
            threads,
        );
        let mut dup = hidden;
        kernel::swiglu_backward(&mut dgate, &mut dup, &saved.gate, &saved.up);
        let mut dnormed = vec![0.0; rows * d];
        let gate_gradient = &mut gradient[places.gate.clone()];
        project_backward(
            &mut dnormed,
            0.0,
            gate_gradient,
            &dgate,
            &normed,
            w(&places.gate),
            (rows, f, d),
            threads,
        );
        let up_gradient = &mut gradient[places.up.clone()];
        project_backward(
            &mut dnormed,
            1.0,
            up_gradient,
            &dup,
            &normed,
            w(&places.up),
            (rows, f, d),
            threads,
        );
        let norm_gradient = &mut gradient[places.norm2.clone()];
        kernel::rms_norm_backward(
            dx,
            false,
            norm_gradient,
            &dnormed,
            &saved.middle,
            w(&places.norm2),
            &saved.inverse2,
        );
        // Attention.
        let mut dmixed = vec![0.0; rows * q];
        let output_gradient = &mut gradient[places.output.clone()];
        project_backward(
            &mut dmixed,
            0.0,
            output_gradient,
            dx,
            &saved.mixed,
            w(&places.output),
            (rows, d, q),
            threads,
        );
        let mut dquery = vec![0.0; rows * q];
        let own = own.unwrap_or_else(|| KeyValue {
            keys: vec![0.0; rows * k],
            values: vec![0.0; rows * k],
        });
        let KeyValue {
            keys: mut dkey,
            values: mut dvalue,
        } = own;
        attention::backward(
            config,
            &self.pieces,
            attention::Rows {
                query: &saved.query,
                key: &saved.key,
                value: &saved.value,
            },
            above,
            attention::Seen {
                mixed: &saved.mixed,
                log_sums: &saved.log_sums,
                dmixed: &dmixed,
            },
            attention::Gradients {
                query: &mut dquery,
                key: &mut dkey,
                value: &mut dvalue,
                above: above_gradient,
            },
            threads,
        );
        for (row, &position) in self.positions.iter().enumerate() {
            rope.turn(&mut dquery[row * q..(row + 1) * q], position, true);
            rope.turn(&mut dkey[row * k..(row + 1) * k], position, true);
        }
        if config.norms_queries() {
            let turned = std::mem::replace(&mut dquery, vec![0.0; rows * q]);
            let (weight, inverse) = (w(&places.query_norm), &saved.query_inverse);
            let place = &mut gradient[places.query_norm.clone()];
            kernel::rms_norm_backward(
                &mut dquery,
                true,
                place,
                &turned,
                &saved.query_raw,
                weight,
                inverse,
            );
            let turned = std::mem::replace(&mut dkey, vec![0.0; rows * k]);
            let (weight, inverse) = (w(&places.key_norm), &saved.key_inverse);
            let place = &mut gradient[places.key_norm.clone()];
            kernel::rms_norm_backward(
                &mut dkey,
                true,
                place,
                &turned,
                &saved.key_raw,
                weight,
                inverse,
            );
        }
        add_bias_backward(&mut gradient[places.query_bias.clone()], &dquery);
        add_bias_backward(&mut gradient[places.key_bias.clone()], &dkey);
        add_bias_backward(&mut gradient[places.value_bias.clone()], &dvalue);
        kernel::rms_norm(
            &mut normed,
            &mut unused,
            &saved.x,
            w(&places.norm1),
            config.rms_norm_eps,
        );
        for (beta, place, dout, outputs) in [
            (0.0, &places.query, &dquery, q),
            (1.0, &places.key, &dkey, k),
            (1.0, &places.value, &dvalue, k),
        ] {
            let dweight = &mut gradient[place.clone()];
            project_backward(
                &mut dnormed,
                beta,
                dweight,
                dout,
                &normed,
                w(place),
                (rows, outputs, d),
                threads,
            );
        }
        let norm_gradient = &mut gradient[places.norm1.clone()];
        kernel::rms_norm_backward(
            dx,
            false,
            norm_gradient,
            &dnormed,
            &saved.x,
            w(&places.norm1),
            &saved.inverse1,
        );
    }
}
