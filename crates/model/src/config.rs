//! The shape of the transformer, as `config.json` of a Hugging Face folder tells it.

use serde::{Deserialize, Serialize};

use crate::rope::RopeScaling;

/// Which family's details apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// No biases, no norms on queries and keys.
    Llama,
    /// Biases on the query, key and value projections.
    Qwen2,
    /// RMS norms on every head's query and key.
    Qwen3,
}

fn default_rope_theta() -> f32 {
    10_000.0
}

fn default_epsilon() -> f32 {
    1e-6
}

/// Shape and constants. Field names are those of `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Family.
    pub model_type: Family,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of a head; `hidden_size / num_attention_heads` when the file does not say.
    #[serde(default)]
    pub head_dim: usize,
    /// Prompt and reply together must not exceed this.
    pub max_position_embeddings: usize,
    /// Added under the root of RMS norms.
    #[serde(default = "default_epsilon")]
    pub rms_norm_eps: f32,
    /// Base of the rotary embedding.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f32,
    /// How a longer context than the model was trained on is squeezed into the rotary embedding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Whether the output projection is the embedding.
    #[serde(default)]
    pub tie_word_embeddings: bool,
}

impl Config {
    /// Fills in defaults and checks that the numbers fit together.
    ///
    /// # Errors
    /// A sentence naming the field, what was expected and what was found.
    pub fn validated(mut self) -> Result<Self, String> {
        for (name, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            if value == 0 {
                return Err(format!("{name}: expected a positive number, found 0"));
            }
        }
        if self.head_dim == 0 {
            self.head_dim = self.hidden_size / self.num_attention_heads;
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return Err(format!(
                "head_dim: expected an even number (rotary embedding), found {}",
                self.head_dim
            ));
        }
        if !self
            .num_attention_heads
            .is_multiple_of(self.num_key_value_heads)
        {
            return Err(format!(
                "num_key_value_heads: expected a divisor of num_attention_heads ({}), found {}",
                self.num_attention_heads, self.num_key_value_heads
            ));
        }
        if let Some(scaling) = &self.rope_scaling {
            scaling.check()?;
        }
        Ok(self)
    }

    /// Width of all query heads together.
    #[must_use]
    pub fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    #[must_use]
    pub fn key_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Whether queries and keys are normed.
    #[must_use]
    pub fn norms_queries(&self) -> bool {
        self.model_type == Family::Qwen3
    }

    /// Whether query, key and value projections have biases.
    #[must_use]
    pub fn has_biases(&self) -> bool {
        self.model_type == Family::Qwen2
    }
}
