//! Weights small enough for tests of the learner.

use model::{
    Weights,
    config::{Config, Family},
};

/// The smallest shape in which heads, layers and widths all differ.
pub(crate) fn tiny() -> Config {
    Config {
        model_type: Family::Qwen3,
        vocab_size: 31,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        max_position_embeddings: 128,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        rope_scaling: None,
        tie_word_embeddings: true,
    }
}

/// Random weights large enough that the distributions are far from even.
#[allow(dead_code, reason = "not every test needs them")]
pub(crate) fn weights(seed: u64) -> Weights {
    let mut weights = Weights::random(tiny(), seed);
    for tensor in weights.layout.tensors.iter().filter(|tensor| tensor.decays) {
        for value in &mut weights.data[tensor.range.clone()] {
            *value *= 6.0;
        }
    }
    weights
}
