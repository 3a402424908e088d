//! All parameters in one flat buffer. The optimiser, gradient sums and norms are then plain
//! loops, and a copy of the weights is one `memcpy`.

use std::ops::Range;

use rand::Rng;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

use crate::config::Config;

/// A named tensor and its place in the flat buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// The name in Hugging Face files.
    pub name: String,
    /// Rows and columns as in the files (`[out, in]`), or one dimension.
    pub shape: Vec<usize>,
    /// Place in the flat buffer.
    pub range: Range<usize>,
    /// Whether weight decay applies (matrices yes, norms and biases no).
    pub decays: bool,
}

/// Places of one layer's tensors. Empty ranges where the family has none.
#[derive(Debug, Clone, Default)]
pub struct LayerPlaces {
    pub(crate) norm1: Range<usize>,
    pub(crate) query: Range<usize>,
    pub(crate) key: Range<usize>,
    pub(crate) value: Range<usize>,
    pub(crate) query_bias: Range<usize>,
    pub(crate) key_bias: Range<usize>,
    pub(crate) value_bias: Range<usize>,
    pub(crate) query_norm: Range<usize>,
    pub(crate) key_norm: Range<usize>,
    pub(crate) output: Range<usize>,
    pub(crate) norm2: Range<usize>,
    pub(crate) gate: Range<usize>,
    pub(crate) up: Range<usize>,
    pub(crate) down: Range<usize>,
}

/// Names and places of all tensors of a shape.
#[derive(Debug, Clone)]
pub struct Layout {
    /// All tensors in file order.
    pub tensors: Vec<Tensor>,
    /// Length of the flat buffer.
    pub len: usize,
    pub(crate) embedding: Range<usize>,
    pub(crate) layers: Vec<LayerPlaces>,
    pub(crate) norm: Range<usize>,
    /// The embedding itself when tied.
    pub(crate) head: Range<usize>,
}

impl Layout {
    /// The layout of a shape.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let mut tensors: Vec<Tensor> = Vec::new();
        let mut len = 0;
        let mut add = |name: String, shape: Vec<usize>| -> Range<usize> {
            let size: usize = shape.iter().product();
            let range = len..len + size;
            len += size;
            let decays = shape.len() > 1;
            tensors.push(Tensor {
                name,
                shape,
                range: range.clone(),
                decays,
            });
            range
        };
        let (d, f) = (config.hidden_size, config.intermediate_size);
        let (q, k) = (config.query_width(), config.key_width());
        let embedding = add(
            "model.embed_tokens.weight".into(),
            vec![config.vocab_size, d],
        );
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for index in 0..config.num_hidden_layers {
            let at = |rest: &str| format!("model.layers.{index}.{rest}");
            let mut places = LayerPlaces {
                norm1: add(at("input_layernorm.weight"), vec![d]),
                query: add(at("self_attn.q_proj.weight"), vec![q, d]),
                key: add(at("self_attn.k_proj.weight"), vec![k, d]),
                value: add(at("self_attn.v_proj.weight"), vec![k, d]),
                output: add(at("self_attn.o_proj.weight"), vec![d, q]),
                norm2: add(at("post_attention_layernorm.weight"), vec![d]),
                gate: add(at("mlp.gate_proj.weight"), vec![f, d]),
                up: add(at("mlp.up_proj.weight"), vec![f, d]),
                down: add(at("mlp.down_proj.weight"), vec![d, f]),
                ..LayerPlaces::default()
            };
            if config.has_biases() {
                places.query_bias = add(at("self_attn.q_proj.bias"), vec![q]);
                places.key_bias = add(at("self_attn.k_proj.bias"), vec![k]);
                places.value_bias = add(at("self_attn.v_proj.bias"), vec![k]);
            }
            if config.norms_queries() {
                places.query_norm = add(at("self_attn.q_norm.weight"), vec![config.head_dim]);
                places.key_norm = add(at("self_attn.k_norm.weight"), vec![config.head_dim]);
            }
            layers.push(places);
        }
        let norm = add("model.norm.weight".into(), vec![d]);
        let head = if config.tie_word_embeddings {
            embedding.clone()
        } else {
            add("lm_head.weight".into(), vec![config.vocab_size, d])
        };
        Self {
            tensors,
            len,
            embedding,
            layers,
            norm,
            head,
        }
    }
}

/// A shape and its parameters.
#[derive(Debug, Clone)]
pub struct Weights {
    /// The shape.
    pub config: Config,
    /// Names and places.
    pub layout: Layout,
    /// All parameters.
    pub data: Vec<f32>,
}

impl Weights {
    /// Fresh weights: norms 1, biases 0, matrices normal with deviation 0.02, the projections
    /// back into the residual stream scaled down by `sqrt(2 * layers)` (GPT-2's rule).
    #[must_use]
    pub fn random(config: Config, seed: u64) -> Self {
        let layout = Layout::new(&config);
        let mut data = vec![0.0; layout.len];
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let residual = 1.0 / (2.0 * config.num_hidden_layers as f32).sqrt();
        for tensor in &layout.tensors {
            let slice = &mut data[tensor.range.clone()];
            if tensor.shape.len() == 1 {
                if !tensor.name.ends_with(".bias") {
                    slice.fill(1.0);
                }
                continue;
            }
            let into_residual =
                tensor.name.ends_with("o_proj.weight") || tensor.name.ends_with("down_proj.weight");
            let deviation = if into_residual { 0.02 * residual } else { 0.02 };
            for pair in slice.chunks_mut(2) {
                // Box-Muller; two normals from two uniforms.
                let (u, v): (f32, f32) = (rng.random(), rng.random());
                let radius = (-2.0 * (1.0 - u).ln()).sqrt() * deviation;
                let angle = std::f32::consts::TAU * v;
                pair[0] = radius * angle.cos();
                if let Some(second) = pair.get_mut(1) {
                    *second = radius * angle.sin();
                }
            }
        }
        Self {
            config,
            layout,
            data,
        }
    }

    /// Number of parameters.
    #[must_use]
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    pub(crate) fn at(&self, range: &Range<usize>) -> &[f32] {
        &self.data[range.clone()]
    }
}
