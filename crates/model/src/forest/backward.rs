//! The backward pass of a block.

use crate::{
    device::On,
    forest::{
        attention,
        block::{Block, Saved},
        path::KeyValue,
    },
    kernel::{self, Mat},
    rope::Rope,
    weights::LayerPlaces,
};

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
    on: On<'_>,
) {
    let (rows, outputs, inputs) = shape;
    let dout = Mat::dense(dout, rows, outputs);
    let weight = Mat::dense(weight, outputs, inputs);
    on.matmul(dinput, beta, 1.0, dout, weight);
    let input = Mat::dense(input, rows, inputs);
    on.matmul(dweight, 1.0, 1.0, dout.t(), input);
}

fn add_bias_backward(dbias: &mut [f32], drows: &[f32]) {
    if !dbias.is_empty() {
        let width = dbias.len();
        for row in drows.chunks_exact(width) {
            kernel::add(dbias, row);
        }
    }
}

impl Block<'_> {
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
        on: On<'_>,
    ) {
        for index in (0..self.saved.len()).rev() {
            let mut saved = std::mem::take(&mut self.saved[index]);
            let places = &self.weights.layout.layers[index];
            if self.recompute {
                (saved, _) = self.layer(places, saved.x, rope, &above[index], on);
            }
            let own = own
                .as_mut()
                .map(|layers| std::mem::take(&mut layers[index]));
            self.layer_backward(
                places,
                &saved,
                &mut dx,
                own,
                (rope, &above[index], &mut above_gradients[index]),
                gradient,
                on,
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
        on: On<'_>,
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
            on,
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
            on,
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
            on,
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
            on,
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
            on.threads,
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
                on,
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
