//! A decoder-only transformer on the CPU, in f32, with every backward pass written by hand. Its
//! products with weights can be made on a CUDA card instead.
//!
//! | module | owns |
//! |---|---|
//! | [`config`] | the shape: `config.json` of Llama, Qwen2 and Qwen3 folders |
//! | [`weights`] | one flat buffer of parameters and the names and places of the tensors in it |
//! | [`files`] | Hugging Face folders in and out (`config.json`, `model.safetensors` or shards) |
//! | [`gguf`] | GGUF files in, dequantised |
//! | [`lora`] | low-rank adapters in PEFT's layout |
//! | [`kernel`] | matrix products and vector maths |
//! | [`row_products`] | products for decoding, whose rows do not depend on their company |
//! | [`device`] | where products with weights are made; CUDA behind feature `cuda` |
//! | [`rope`] | rotary tables; YaRN, linear and Llama 3 scaling for longer contexts |
//! | [`forest`] | log-probabilities and gradients over trees of tokens, each token computed once |
//! | [`decode`] | batched generation with a prefix cache shared by all sequences |
//! | [`adamw`] | the optimiser, in place |
//!
//! Numbers:
//! - Training and decoding agree: the log-probability that [`decode`] reports for a token equals
//!   what [`forest`] computes for it to 1e-4 (tested), so importance weights start at 1.
//! - [`decode`] gives the same tokens for the same prompt, seed and weights whatever else is in
//!   the batch.
//! - A device that fails fails the pass or the decoding step; nothing falls back to the CPU.
//! - `unsafe` is in [`kernel`], [`row_products`] and `device/cuda.rs` alone.
//! - [`forest`] keeps the activations of one trunk path and of one chunk per thread, never of
//!   the whole batch, and never builds an attention mask.
//!
//! Why not a tensor library: see `docs/decisions/0003-hand-written-model.md`.

pub mod adamw;
pub mod config;
pub mod decode;
pub mod device;
pub mod files;
pub mod forest;
pub mod gguf;
pub mod kernel;
pub mod lora;
pub mod rope;
pub mod row_products;
pub mod weights;

pub use config::Config;
pub use files::{ModelError, load, save};
pub use weights::Weights;
