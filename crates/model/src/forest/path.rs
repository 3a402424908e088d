//! The trunk path: keys and values of the segments above a block, and what is summed for them.

use crate::kernel;

/// Keys and values of one layer: rows of `key_width` floats, one per token.
#[derive(Debug, Clone, Default)]
pub(super) struct KeyValue {
    pub(super) keys: Vec<f32>,
    pub(super) values: Vec<f32>,
}

/// The trunk above a block: keys and values per layer, and the gradients summed for them.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) tokens: usize,
    pub(super) layers: Vec<KeyValue>,
    pub(super) gradients: Vec<KeyValue>,
}

impl Path {
    pub(super) fn new(layers: usize) -> Self {
        Self {
            tokens: 0,
            layers: vec![KeyValue::default(); layers],
            gradients: vec![KeyValue::default(); layers],
        }
    }

    /// A path without keys whose gradients are as long as `other`'s, for one thread's sums.
    pub(super) fn zeros_like(other: &Self, with_gradients: bool) -> Self {
        let zero = |layer: &KeyValue| KeyValue {
            keys: vec![0.0; if with_gradients { layer.keys.len() } else { 0 }],
            values: vec![
                0.0;
                if with_gradients {
                    layer.values.len()
                } else {
                    0
                }
            ],
        };
        Self {
            tokens: other.tokens,
            layers: Vec::new(),
            gradients: other.layers.iter().map(zero).collect(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.tokens
    }

    pub(super) fn keys(&self) -> &[KeyValue] {
        &self.layers
    }

    pub(super) fn split(&mut self) -> (&[KeyValue], &mut [KeyValue]) {
        (&self.layers, &mut self.gradients)
    }

    pub(super) fn add_gradients(&mut self, other: &Self) {
        for (mine, theirs) in self.gradients.iter_mut().zip(&other.gradients) {
            kernel::add(&mut mine.keys, &theirs.keys);
            kernel::add(&mut mine.values, &theirs.values);
        }
    }

    /// Cuts the path back to `tokens` and returns the gradients of what was cut off.
    pub(super) fn pop_from(&mut self, tokens: usize) -> Vec<KeyValue> {
        let mut cut = Vec::with_capacity(self.layers.len());
        for (layer, gradient) in self.layers.iter_mut().zip(&mut self.gradients) {
            let at = layer.keys.len() / self.tokens.max(1) * tokens;
            layer.keys.truncate(at);
            layer.values.truncate(at);
            cut.push(KeyValue {
                keys: gradient.keys.split_off(at),
                values: gradient.values.split_off(at),
            });
        }
        self.tokens = tokens;
        cut
    }
}
