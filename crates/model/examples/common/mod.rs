//! What the examples share: shapes and clocks.

use model::config::{Config, Family};

/// The shapes that are measured: those of the peers' bench.
pub(crate) fn shape(name: &str) -> Option<Config> {
    let (vocabulary, hidden, wide, layers, heads, key_heads) = match name {
        "tiny5m" => (4096, 192, 512, 8, 6, 2),
        "smollm2" => (49152, 576, 1536, 30, 9, 3),
        _ => return None,
    };
    let config = Config {
        model_type: Family::Llama,
        vocab_size: vocabulary,
        hidden_size: hidden,
        intermediate_size: wide,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        num_key_value_heads: key_heads,
        head_dim: hidden / heads,
        max_position_embeddings: 8192,
        rms_norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: None,
        tie_word_embeddings: true,
    };
    Some(config)
}

/// Processor seconds of this process (user and system), in ticks of 10 ms.
pub(crate) fn processor_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = text.rsplit(')').next().unwrap_or_default();
    let fields: Vec<&str> = after.split_whitespace().collect();
    let ticks = |at: usize| -> f64 { fields.get(at).and_then(|f| f.parse().ok()).unwrap_or(0.0) };
    (ticks(11) + ticks(12)) / 100.0
}

/// Peak memory of this process so far.
pub(crate) fn peak_megabytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("VmHWM:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) / 1024
}
