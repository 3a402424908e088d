//! Hugging Face folders: `config.json` and `model.safetensors`.

use std::{
    collections::HashMap,
    io::Write,
    path::{Path, PathBuf},
};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

use crate::{
    config::Config,
    weights::{Layout, Tensor, Weights},
};

/// Why a folder of weights could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file is not there or cannot be read or written.
    #[error(
        "model: {path}: {source}; expected a folder with config.json and model.safetensors or its shards"
    )]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// `config.json` is not what it should be.
    #[error(
        "model: {path}: {reason}; supported are model_type llama, qwen2 and qwen3 with rope scaling linear, yarn or llama3"
    )]
    Config {
        /// The file.
        path: PathBuf,
        /// Field, expected, found.
        reason: String,
    },
    /// `model.safetensors` is damaged or does not fit the config.
    #[error("model: {path}: {reason}; the checkpoint is damaged or belongs to another config.json")]
    Tensors {
        /// The file.
        path: PathBuf,
        /// Tensor, expected, found.
        reason: String,
    },
    /// An adapter does not fit the weights or is of a kind that is not supported.
    #[error("model: adapter {path}: {reason}")]
    Adapter {
        /// The file, or where the settings came from.
        path: PathBuf,
        /// Field or tensor, expected, found.
        reason: String,
    },
}

fn file_error(path: &Path) -> impl FnOnce(std::io::Error) -> ModelError + '_ {
    move |source| ModelError::File {
        path: path.to_owned(),
        source,
    }
}

/// Reads `config.json` of a folder. What would make other numbers than this crate computes is
/// refused, not ignored.
///
/// # Errors
/// [`ModelError::File`] and [`ModelError::Config`].
pub fn load_config(folder: &Path) -> Result<Config, ModelError> {
    let path = folder.join("config.json");
    let bytes = std::fs::read(&path).map_err(file_error(&path))?;
    let wrong = |reason: String| ModelError::Config {
        path: path.clone(),
        reason,
    };
    let mut file: Value =
        serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    normalise(&mut file).map_err(wrong)?;
    let config: Config = serde_json::from_value(file).map_err(|error| wrong(error.to_string()))?;
    config.validated().map_err(wrong)
}

/// Brings the spellings of several years of `config.json` to the one that [`Config`] reads.
fn normalise(file: &mut Value) -> Result<(), String> {
    let Some(map) = file.as_object_mut() else {
        return Err("expected a JSON object".into());
    };
    let with_biases = map.get("model_type").and_then(Value::as_str) == Some("qwen2");
    for (name, expected) in [
        ("hidden_act", Value::from("silu")),
        ("attention_bias", with_biases.into()),
        ("mlp_bias", false.into()),
        ("use_sliding_window", false.into()),
        ("partial_rotary_factor", 1.0.into()),
    ] {
        if let Some(found) = map.get(name).filter(|found| **found != expected)
            && !found.is_null()
        {
            return Err(format!("{name}: expected {expected}, found {found}"));
        }
    }
    // Newer files keep all of the rotary embedding in one object.
    if let Some(mut parameters) = map.remove("rope_parameters")
        && let Some(rope) = parameters.as_object_mut()
    {
        if let Some(theta) = rope.remove("rope_theta") {
            map.insert("rope_theta".into(), theta);
        }
        map.insert("rope_scaling".into(), parameters);
    }
    let Some(scaling) = map.get_mut("rope_scaling") else {
        return Ok(());
    };
    if let Some(rope) = scaling.as_object_mut() {
        let own = rope.remove("type");
        let kind = rope.remove("rope_type").or(own).unwrap_or("default".into());
        rope.retain(|_, value| !value.is_null());
        if kind == "default" {
            *scaling = Value::Null;
        } else {
            rope.insert("rope_type".into(), kind);
        }
    }
    Ok(())
}

pub(crate) fn to_f32(view: &TensorView<'_>) -> Option<Vec<f32>> {
    let bytes = view.data();
    let halves = || {
        bytes
            .chunks_exact(2)
            .map(|b| u16::from_le_bytes([b[0], b[1]]))
    };
    let values = match view.dtype() {
        Dtype::F32 => bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
        Dtype::BF16 => halves()
            .map(|bits| f32::from_bits(u32::from(bits) << 16))
            .collect(),
        Dtype::F16 => halves().map(crate::gguf::half_to_f32).collect(),
        _ => return None,
    };
    Some(values)
}

/// The files that hold the tensors: one, or the shards of an index, each once.
fn tensor_files(folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let index = folder.join("model.safetensors.index.json");
    let bytes = match std::fs::read(&index) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(vec![folder.join("model.safetensors")]);
        }
        Err(error) => return Err(file_error(&index)(error)),
    };
    let wrong = |reason: String| ModelError::Tensors {
        path: index.clone(),
        reason,
    };
    let file: Value = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    let map = file
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| wrong("expected an object weight_map from tensors to files".into()))?;
    let mut names = std::collections::BTreeSet::new();
    for name in map.values() {
        let name = name.as_str().unwrap_or_default();
        // Only files of this folder: an index from elsewhere must not name others.
        if name.is_empty() || name.contains(['/', '\\']) {
            return Err(wrong(format!(
                "expected the name of a file of this folder, found {name:?}"
            )));
        }
        names.insert(name.to_owned());
    }
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

/// Reads a folder: one `model.safetensors`, or shards with an index. A path to a file `*.gguf` is
/// read as [`crate::gguf`] says. Tensors in F32, BF16 or F16;
/// extra tensors are ignored, missing ones refused.
///
/// # Errors
/// See [`ModelError`].
pub fn load(folder: &Path) -> Result<Weights, ModelError> {
    if folder.extension().is_some_and(|end| end == "gguf") && folder.is_file() {
        return crate::gguf::load(folder);
    }
    let config = load_config(folder)?;
    let layout = Layout::new(&config);
    let mut data = vec![0.0; layout.len];
    let mut found = vec![false; layout.tensors.len()];
    let mut last = folder.join("model.safetensors");
    for path in tensor_files(folder)? {
        let bytes = std::fs::read(&path).map_err(file_error(&path))?;
        let wrong = |reason: String| ModelError::Tensors {
            path: path.clone(),
            reason,
        };
        let file = SafeTensors::deserialize(&bytes).map_err(|error| wrong(error.to_string()))?;
        for (tensor, found) in layout.tensors.iter().zip(&mut found) {
            // The first file that holds it; an error here says only that this one does not.
            if let Ok(view) = file.tensor(&tensor.name)
                && !*found
            {
                let values = read_tensor(tensor, &view).map_err(wrong)?;
                data[tensor.range.clone()].copy_from_slice(&values);
                *found = true;
            }
        }
        last = path;
    }
    let pairs = layout.tensors.iter().zip(&found);
    if let Some((tensor, _)) = pairs.into_iter().find(|(_, found)| !**found) {
        return Err(ModelError::Tensors {
            path: last,
            reason: format!("tensor {} is missing", tensor.name),
        });
    }
    Ok(Weights {
        config,
        layout,
        data,
    })
}

fn read_tensor(tensor: &Tensor, view: &TensorView<'_>) -> Result<Vec<f32>, String> {
    let name = &tensor.name;
    if view.shape() != tensor.shape {
        return Err(format!(
            "tensor {name}: expected shape {:?} from config.json, found {:?}",
            tensor.shape,
            view.shape()
        ));
    }
    let values = to_f32(view).ok_or_else(|| {
        format!(
            "tensor {name}: expected F32, BF16 or F16, found {:?}",
            view.dtype()
        )
    })?;
    if values.iter().any(|value| !value.is_finite()) {
        return Err(format!("tensor {name} holds a value that is not finite"));
    }
    Ok(values)
}

/// Writes a file so that a crash leaves the old one or the new one, never half of it.
///
/// # Errors
/// The system's.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension("tmp");
    let mut file = std::fs::File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)
}

/// How weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// Exact.
    F32,
    /// Half the size, rounded to nearest even.
    Bf16,
}

fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounding = 0x7fff + ((bits >> 16) & 1);
    ((bits + rounding) >> 16) as u16
}

/// Writes `config.json` and `model.safetensors` into a folder, which is created.
///
/// # Errors
/// [`ModelError::File`], with nothing half-written.
pub fn save(weights: &Weights, folder: &Path, precision: Precision) -> Result<(), ModelError> {
    std::fs::create_dir_all(folder).map_err(file_error(folder))?;
    let path = folder.join("model.safetensors");
    let stored: Vec<(String, Vec<u8>, Vec<usize>)> = weights
        .layout
        .tensors
        .iter()
        .map(|tensor| {
            let values = &weights.data[tensor.range.clone()];
            let bytes = match precision {
                Precision::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                Precision::Bf16 => values
                    .iter()
                    .flat_map(|v| to_bf16(*v).to_le_bytes())
                    .collect(),
            };
            (tensor.name.clone(), bytes, tensor.shape.clone())
        })
        .collect();
    let dtype = match precision {
        Precision::F32 => Dtype::F32,
        Precision::Bf16 => Dtype::BF16,
    };
    let wrong = |reason: String| ModelError::Tensors {
        path: path.clone(),
        reason,
    };
    let mut views = Vec::with_capacity(stored.len());
    for (name, bytes, shape) in &stored {
        let view = TensorView::new(dtype, shape.clone(), bytes)
            .map_err(|error| wrong(error.to_string()))?;
        views.push((name.as_str(), view));
    }
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let bytes =
        safetensors::serialize(views, Some(metadata)).map_err(|error| wrong(error.to_string()))?;
    write_atomically(&path, &bytes).map_err(file_error(&path))?;
    let config_path = folder.join("config.json");
    let mut config = serde_json::to_value(&weights.config).map_err(|error| ModelError::Config {
        path: config_path.clone(),
        reason: error.to_string(),
    })?;
    if let Some(map) = config.as_object_mut() {
        let architecture = match weights.config.model_type {
            crate::config::Family::Llama => "LlamaForCausalLM",
            crate::config::Family::Qwen2 => "Qwen2ForCausalLM",
            crate::config::Family::Qwen3 => "Qwen3ForCausalLM",
        };
        let dtype_name = if precision == Precision::F32 {
            "float32"
        } else {
            "bfloat16"
        };
        map.insert("architectures".into(), serde_json::json!([architecture]));
        map.insert("hidden_act".into(), "silu".into());
        if weights.config.model_type != crate::config::Family::Qwen2 {
            map.insert("attention_bias".into(), false.into());
        }
        map.insert("torch_dtype".into(), dtype_name.into());
    }
    let text = serde_json::to_vec_pretty(&config).map_err(|error| ModelError::Config {
        path: config_path.clone(),
        reason: error.to_string(),
    })?;
    write_atomically(&config_path, &text).map_err(file_error(&config_path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Family;

    pub(crate) fn shape(family: Family) -> Config {
        Config {
            model_type: family,
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
            tie_word_embeddings: family != Family::Llama,
        }
    }

    #[test]
    fn folders_round_trip() {
        for family in [Family::Llama, Family::Qwen2, Family::Qwen3] {
            let folder = tempfile::tempdir().unwrap();
            let weights = Weights::random(shape(family), 1);
            save(&weights, folder.path(), Precision::F32).unwrap();
            let again = load(folder.path()).unwrap();
            assert_eq!(again.config, weights.config);
            assert_eq!(again.data, weights.data);
            save(&weights, folder.path(), Precision::Bf16).unwrap();
            let rounded = load(folder.path()).unwrap();
            for (a, b) in weights.data.iter().zip(&rounded.data) {
                assert!((a - b).abs() <= a.abs() / 250.0, "{a} became {b}");
            }
        }
    }

    #[test]
    fn damaged_folders_say_what_is_wrong() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(load(folder.path()), Err(ModelError::File { .. })));
        let weights = Weights::random(shape(Family::Qwen3), 1);
        save(&weights, folder.path(), Precision::F32).unwrap();
        let path = folder.path().join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        assert!(matches!(
            load(folder.path()),
            Err(ModelError::Tensors { .. })
        ));
        std::fs::write(&path, &bytes).unwrap();
        let mut config = shape(Family::Qwen3);
        config.intermediate_size = 13;
        std::fs::write(
            folder.path().join("config.json"),
            serde_json::to_vec(&config).unwrap(),
        )
        .unwrap();
        let error = load(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains("gate_proj") && error.contains("[13, 8]"),
            "{error}"
        );
    }
}
