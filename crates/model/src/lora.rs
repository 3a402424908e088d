//! Low-rank adapters (LoRA, arXiv 2106.09685): `W + alpha/rank · B·A` for chosen projections, the
//! rest frozen. Saved in the layout that PEFT reads.
//!
//! The forest computes with merged weights and gives the gradient of every parameter; that of the
//! adapter follows by the chain rule, `dA = s·Bᵀ·dW` and `dB = s·dW·Aᵀ`, exactly. What an adapter
//! saves is optimiser state and files, not time.

use std::{collections::HashMap, ops::Range, path::Path};

use rand::Rng;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::{Deserialize, Serialize};

use crate::{
    files::{ModelError, write_atomically},
    kernel::{Mat, Threads, matmul},
    weights::Weights,
};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
const PREFIX: &str = "base_model.model.";

/// The projections that may be adapted.
pub const MODULES: [&str; 7] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
];

/// What is adapted, and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraSettings {
    /// Inner width.
    pub rank: usize,
    /// The product is scaled by `alpha / rank`.
    pub alpha: f32,
    /// Names of projections, see [`MODULES`].
    pub targets: Vec<String>,
}

impl Default for LoraSettings {
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: 32.0,
            targets: MODULES.iter().map(|name| (*name).to_owned()).collect(),
        }
    }
}

/// One adapted matrix.
#[derive(Debug, Clone)]
struct Part {
    /// Name without `.weight`.
    name: String,
    outputs: usize,
    inputs: usize,
    /// Place in the base's flat buffer.
    base: Range<usize>,
    /// `[rank, inputs]` in the adapter's flat buffer.
    a: Range<usize>,
    /// `[outputs, rank]`.
    b: Range<usize>,
}

/// An adapter for weights of one shape.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// Settings.
    pub settings: LoraSettings,
    parts: Vec<Part>,
    /// All A and B.
    pub data: Vec<f32>,
}

fn refused(path: &Path, reason: String) -> ModelError {
    ModelError::Adapter {
        path: path.to_owned(),
        reason,
    }
}

impl Adapter {
    /// A fresh adapter: A uniform in ±1/√inputs, B zero, so that it changes nothing yet.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] when rank is 0 or a target is unknown.
    pub fn new(base: &Weights, settings: LoraSettings, seed: u64) -> Result<Self, ModelError> {
        let mut adapter = Self::empty(base, settings, Path::new("settings"))?;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for part in &adapter.parts {
            let bound = 1.0 / (part.inputs as f32).sqrt();
            for value in &mut adapter.data[part.a.clone()] {
                *value = rng.random_range(-bound..bound);
            }
        }
        Ok(adapter)
    }

    fn empty(base: &Weights, settings: LoraSettings, path: &Path) -> Result<Self, ModelError> {
        if settings.rank == 0 {
            return Err(refused(path, "rank: expected at least 1, found 0".into()));
        }
        let unknown = settings
            .targets
            .iter()
            .find(|name| !MODULES.contains(&name.as_str()));
        if let Some(name) = unknown {
            let reason = format!("targets: expected names of {MODULES:?}, found {name:?}");
            return Err(refused(path, reason));
        }
        if settings.targets.is_empty() {
            return Err(refused(path, "targets: expected at least one name".into()));
        }
        let (mut parts, mut len) = (Vec::new(), 0);
        for tensor in &base.layout.tensors {
            let Some(name) = tensor.name.strip_suffix(".weight") else {
                continue;
            };
            let module = name.rsplit('.').next().unwrap_or_default();
            let (&[outputs, inputs], true) = (
                tensor.shape.as_slice(),
                settings.targets.iter().any(|target| target == module),
            ) else {
                continue;
            };
            let a = len..len + settings.rank * inputs;
            let b = a.end..a.end + outputs * settings.rank;
            len = b.end;
            parts.push(Part {
                name: name.to_owned(),
                outputs,
                inputs,
                base: tensor.range.clone(),
                a,
                b,
            });
        }
        Ok(Self {
            settings,
            parts,
            data: vec![0.0; len],
        })
    }

    fn scale(&self) -> f32 {
        self.settings.alpha / self.settings.rank as f32
    }

    /// The base with the adapter added in; the base must be the one that it was made for.
    #[must_use]
    pub fn merged(&self, base: &Weights) -> Weights {
        let mut merged = base.clone();
        self.merge_into(base, &mut merged);
        merged
    }

    /// The same into weights that hold an earlier merge: only adapted matrices are written.
    pub fn merge_into(&self, base: &Weights, merged: &mut Weights) {
        let rank = self.settings.rank;
        for part in &self.parts {
            let target = &mut merged.data[part.base.clone()];
            target.copy_from_slice(&base.data[part.base.clone()]);
            matmul(
                target,
                part.inputs,
                1.0,
                self.scale(),
                Mat::dense(&self.data[part.b.clone()], part.outputs, rank),
                Mat::dense(&self.data[part.a.clone()], rank, part.inputs),
                Threads::One,
            );
        }
    }

    /// The adapter's gradient from that of all merged weights.
    #[must_use]
    pub fn gradient(&self, of_weights: &[f32]) -> Vec<f32> {
        let (rank, scale) = (self.settings.rank, self.scale());
        let mut gradient = vec![0.0; self.data.len()];
        for part in &self.parts {
            let dw = Mat::dense(&of_weights[part.base.clone()], part.outputs, part.inputs);
            let a = Mat::dense(&self.data[part.a.clone()], rank, part.inputs);
            let b = Mat::dense(&self.data[part.b.clone()], part.outputs, rank);
            let da = &mut gradient[part.a.clone()];
            matmul(da, part.inputs, 0.0, scale, b.t(), dw, Threads::One);
            let db = &mut gradient[part.b.clone()];
            matmul(db, rank, 0.0, scale, dw, a.t(), Threads::One);
        }
        gradient
    }

    /// Names, shapes and places of the tensors as PEFT calls them.
    fn tensors(&self) -> impl Iterator<Item = (String, [usize; 2], Range<usize>)> + '_ {
        let rank = self.settings.rank;
        self.parts.iter().flat_map(move |part| {
            let name = |which: &str| format!("{PREFIX}{}.lora_{which}.weight", part.name);
            [
                (name("A"), [rank, part.inputs], part.a.clone()),
                (name("B"), [part.outputs, rank], part.b.clone()),
            ]
        })
    }

    /// Writes `adapter_config.json` and `adapter_model.safetensors` into a folder, which is
    /// created. `base` is what PEFT will load the base model from.
    ///
    /// # Errors
    /// [`ModelError::File`] and [`ModelError::Adapter`].
    pub fn save(&self, folder: &Path, base: &str) -> Result<(), ModelError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| ModelError::File { path, source }
        };
        std::fs::create_dir_all(folder).map_err(io(folder))?;
        let path = folder.join(TENSORS);
        let bytes: Vec<(String, [usize; 2], Vec<u8>)> = self
            .tensors()
            .map(|(name, shape, range)| {
                let values = self.data[range].iter();
                (name, shape, values.flat_map(|v| v.to_le_bytes()).collect())
            })
            .collect();
        let mut views = Vec::with_capacity(bytes.len());
        for (name, shape, data) in &bytes {
            let view = TensorView::new(Dtype::F32, shape.to_vec(), data)
                .map_err(|error| refused(&path, error.to_string()))?;
            views.push((name.as_str(), view));
        }
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let packed = safetensors::serialize(views, Some(metadata))
            .map_err(|error| refused(&path, error.to_string()))?;
        write_atomically(&path, &packed).map_err(io(&path))?;
        let config = serde_json::json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.settings.rank,
            "lora_alpha": self.settings.alpha,
            "target_modules": self.settings.targets,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "use_rslora": false,
            "use_dora": false,
        });
        let path = folder.join(CONFIG);
        let text = serde_json::to_vec_pretty(&config)
            .map_err(|error| refused(&path, error.to_string()))?;
        write_atomically(&path, &text).map_err(io(&path))
    }

    /// Reads a folder in PEFT's layout, for this base.
    ///
    /// # Errors
    /// [`ModelError::File`]; [`ModelError::Adapter`] for kinds of adapters that mean something
    /// else (rsLoRA, DoRA, biases), for missing tensors and for those of another shape.
    pub fn load(folder: &Path, base: &Weights) -> Result<Self, ModelError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|source| ModelError::File {
                path: path.to_owned(),
                source,
            })
        };
        let path = folder.join(CONFIG);
        let wrong = |reason: String| refused(&path, reason);
        let config: serde_json::Value =
            serde_json::from_slice(&read(&path)?).map_err(|error| wrong(error.to_string()))?;
        for (name, expected) in [
            ("peft_type", serde_json::json!("LORA")),
            ("use_rslora", false.into()),
            ("use_dora", false.into()),
            ("fan_in_fan_out", false.into()),
            ("bias", "none".into()),
            ("lora_bias", false.into()),
            ("rank_pattern", serde_json::json!({})),
            ("alpha_pattern", serde_json::json!({})),
            ("modules_to_save", serde_json::Value::Null),
            ("layers_to_transform", serde_json::Value::Null),
        ] {
            let found = &config[name];
            if !found.is_null() && *found != expected {
                return Err(wrong(format!("{name}: expected {expected}, found {found}")));
            }
        }
        let number = |name: &str| {
            config[name]
                .as_f64()
                .ok_or_else(|| wrong(format!("{name}: expected a number, found {}", config[name])))
        };
        let mut targets: Vec<String> = serde_json::from_value(config["target_modules"].clone())
            .map_err(|error| wrong(format!("target_modules: {error}")))?;
        targets.sort();
        let settings = LoraSettings {
            rank: number("r")? as usize,
            alpha: number("lora_alpha")? as f32,
            targets,
        };
        let mut adapter = Self::empty(base, settings, &path)?;
        let path = folder.join(TENSORS);
        let bytes = read(&path)?;
        let wrong = |reason: String| refused(&path, reason);
        let file = SafeTensors::deserialize(&bytes).map_err(|error| wrong(error.to_string()))?;
        let places: Vec<_> = adapter.tensors().collect();
        for (name, shape, range) in places {
            let view = file
                .tensor(&name)
                .map_err(|_| wrong(format!("tensor {name} is missing")))?;
            if view.shape() != shape {
                let found = view.shape();
                return Err(wrong(format!(
                    "tensor {name}: expected shape {shape:?}, found {found:?}"
                )));
            }
            let values = crate::files::to_f32(&view).ok_or_else(|| {
                let found = view.dtype();
                wrong(format!(
                    "tensor {name}: expected F32, BF16 or F16, found {found:?}"
                ))
            })?;
            adapter.data[range].copy_from_slice(&values);
        }
        Ok(adapter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{Config, Family},
        forest::{self, Segment},
    };

    fn base() -> Weights {
        let config = Config {
            model_type: Family::Qwen2,
            vocab_size: 19,
            hidden_size: 8,
            intermediate_size: 12,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            head_dim: 4,
            max_position_embeddings: 64,
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            rope_scaling: None,
            tie_word_embeddings: true,
        };
        let mut weights = Weights::random(config, 5);
        weights.data.iter_mut().for_each(|value| *value *= 4.0);
        weights
    }

    fn settings() -> LoraSettings {
        LoraSettings {
            rank: 3,
            alpha: 6.0,
            targets: vec!["down_proj".into(), "q_proj".into(), "v_proj".into()],
        }
    }

    fn loss_and_gradient(weights: &Weights) -> (f64, Vec<f32>) {
        let tokens = [1, 5, 7, 2, 9, 3];
        let segments = [Segment {
            parent: None,
            tokens: &tokens,
            targets: &[1, 2, 3, 4, 5],
        }];
        let loss = |_: usize, index: usize, _: f32| 0.3 - 0.2 * index as f32;
        let outcome =
            forest::run(weights, &segments, Some(&loss), forest::Settings::default()).unwrap();
        let weigh = outcome.logprobs[0].iter().enumerate();
        let value = weigh
            .map(|(i, l)| f64::from((0.3 - 0.2 * i as f32) * l))
            .sum();
        (value, outcome.gradient)
    }

    #[test]
    fn starts_as_the_base_and_has_the_gradient_of_differences() {
        let base = base();
        let mut adapter = Adapter::new(&base, settings(), 1).unwrap();
        assert_eq!(adapter.merged(&base).data, base.data);
        for (i, value) in adapter.data.iter_mut().enumerate() {
            *value += 0.05 * ((i % 7) as f32 - 3.0);
        }
        let gradient = adapter.gradient(&loss_and_gradient(&adapter.merged(&base)).1);
        for part in adapter.parts.clone() {
            for range in [part.a, part.b] {
                let at = range
                    .max_by(|x, y| gradient[*x].abs().total_cmp(&gradient[*y].abs()))
                    .unwrap();
                let (kept, step) = (adapter.data[at], 2e-3);
                let mut value = |by: f32| {
                    adapter.data[at] = kept + by;
                    let value = loss_and_gradient(&adapter.merged(&base)).0;
                    adapter.data[at] = kept;
                    value
                };
                let numeric = (value(step) - value(-step)) / (2.0 * f64::from(step));
                let error = (numeric - f64::from(gradient[at])).abs() / numeric.abs().max(5e-2);
                assert!(
                    error < 2e-2,
                    "{}: {} and {numeric}",
                    part.name,
                    gradient[at]
                );
            }
        }
    }

    #[test]
    fn folders_round_trip_and_foreign_kinds_are_refused() {
        let (base, folder) = (base(), tempfile::tempdir().unwrap());
        let mut adapter = Adapter::new(&base, settings(), 1).unwrap();
        adapter
            .data
            .iter_mut()
            .enumerate()
            .for_each(|(i, v)| *v = i as f32 * 0.01);
        adapter.save(folder.path(), "base").unwrap();
        let again = Adapter::load(folder.path(), &base).unwrap();
        assert_eq!(
            (&again.settings, &again.data),
            (&adapter.settings, &adapter.data)
        );
        let path = folder.path().join(CONFIG);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(
            &path,
            text.replace("\"use_dora\": false", "\"use_dora\": true"),
        )
        .unwrap();
        let error = Adapter::load(folder.path(), &base).unwrap_err().to_string();
        assert!(error.contains("use_dora"), "{error}");
        let unknown = LoraSettings {
            targets: vec!["lm_head".into()],
            ..settings()
        };
        let error = Adapter::new(&base, unknown, 1).unwrap_err().to_string();
        assert!(error.contains("lm_head"), "{error}");
    }
}
