//! Weights, optimiser and counters in a folder, whole or not at all: everything is written into a
//! neighbour folder, which is renamed when it is complete.

use std::path::{Path, PathBuf};

use model::{
    adamw::{AdamW, AdamWSettings},
    forest::ValueHead,
    lora::Adapter,
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::{Deserialize, Serialize};

use crate::{LearnError, ppo::Critic};

const OPTIMISER: &str = "optimiser.safetensors";
const STATE: &str = "state.json";
const CRITIC: &str = "critic";
const HEAD: &str = "head.safetensors";
const TRUNK: &str = "trunk";
/// Folder of the adapter, when only an adapter is trained.
pub const ADAPTER: &str = "adapter";

/// Counters of a training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Steps of the run that are complete.
    pub run_steps: u64,
    /// Version of the weights.
    pub policy_version: u64,
    /// Optimiser steps.
    pub optimiser_steps: u64,
    /// Settings of the optimiser.
    pub optimiser: AdamWSettings,
}

/// The critic of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CriticState {
    updates: u64,
    head_steps: u64,
    head: AdamWSettings,
    /// Steps and settings of the optimiser of its own trunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    trunk: Option<(u64, AdamWSettings)>,
}

fn failed(path: &Path) -> impl Fn(&dyn std::fmt::Display) -> LearnError + '_ {
    move |reason| LearnError::Checkpoint {
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

/// Writes a checkpoint. With an adapter the weights are the merged ones. `also` are files to copy beside the weights (tokenizer, template), so that
/// the folder is a complete Hugging Face model.
///
/// # Errors
/// [`LearnError::Checkpoint`] and [`LearnError::Model`]; an older checkpoint at the place stays.
pub fn save(
    folder: &Path,
    weights: &model::Weights,
    optimiser: &AdamW,
    state: &State,
    critic: Option<&Critic>,
    adapter: Option<&Adapter>,
    also: &[PathBuf],
) -> Result<(), LearnError> {
    let name = folder
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let temporary = folder.with_file_name(format!(".{name}.partial"));
    let fail = failed(&temporary);
    match std::fs::remove_dir_all(&temporary) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(fail(&error)),
        _ => {}
    }
    model::save(weights, &temporary, model::files::Precision::F32)?;
    write_floats(
        &temporary.join(OPTIMISER),
        &[("mean", &optimiser.mean), ("square", &optimiser.square)],
    )?;
    write_json(&temporary.join(STATE), state)?;
    if let Some(critic) = critic {
        save_critic(&temporary.join(CRITIC), critic)?;
    }
    if let Some(adapter) = adapter {
        adapter.save(&temporary.join(ADAPTER), "..")?;
    }
    for source in also {
        if let Some(name) = source.file_name() {
            std::fs::copy(source, temporary.join(name)).map_err(|error| failed(source)(&error))?;
        }
    }
    // A checkpoint of the same name is replaced: moved aside first, because a rename onto a full
    // folder is refused.
    let old = folder.with_file_name(format!(".{name}.old"));
    let moved = match std::fs::rename(folder, &old) {
        Ok(()) => true,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
        Err(error) => return Err(failed(folder)(&error)),
    };
    std::fs::rename(&temporary, folder).map_err(|error| failed(folder)(&error))?;
    if moved {
        std::fs::remove_dir_all(&old).map_err(|error| failed(&old)(&error))?;
    }
    Ok(())
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), LearnError> {
    let fail = failed(path);
    let text = serde_json::to_vec_pretty(value).map_err(|error| fail(&error))?;
    model::files::write_atomically(path, &text).map_err(|error| fail(&error))
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, LearnError> {
    let fail = failed(path);
    let text = std::fs::read(path).map_err(|error| fail(&error))?;
    serde_json::from_slice(&text).map_err(|error| fail(&error))
}

/// Named lists of f32 in one file.
fn write_floats(path: &Path, lists: &[(&str, &[f32])]) -> Result<(), LearnError> {
    let fail = failed(path);
    let bytes = lists.iter().map(|(name, values)| -> (&str, Vec<u8>) {
        (name, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    });
    let bytes: Vec<(&str, Vec<u8>)> = bytes.collect();
    let mut views = Vec::new();
    for (name, data) in &bytes {
        let view = TensorView::new(Dtype::F32, vec![data.len() / 4], data)
            .map_err(|error| fail(&error))?;
        views.push((*name, view));
    }
    let packed = safetensors::serialize(views, None).map_err(|error| fail(&error))?;
    model::files::write_atomically(path, &packed).map_err(|error| fail(&error))
}

/// Reads lists of known lengths.
fn read_floats(path: &Path, lists: &mut [(&str, &mut [f32])]) -> Result<(), LearnError> {
    let fail = failed(path);
    let bytes = std::fs::read(path).map_err(|error| fail(&error))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| fail(&error))?;
    for (name, target) in lists {
        let view = file.tensor(name).map_err(|error| fail(&error))?;
        if view.dtype() != Dtype::F32 || view.data().len() != target.len() * 4 {
            return Err(fail(&format!(
                "{name}: expected {} F32 values, found {:?}",
                target.len(),
                view.shape()
            )));
        }
        for (value, bytes) in target.iter_mut().zip(view.data().chunks_exact(4)) {
            *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
    }
    Ok(())
}

fn load_optimiser(
    path: &Path,
    settings: AdamWSettings,
    steps: u64,
    len: usize,
) -> Result<AdamW, LearnError> {
    let mut optimiser = AdamW::new(settings, len);
    optimiser.steps = steps;
    let (mean, square) = (&mut optimiser.mean[..], &mut optimiser.square[..]);
    read_floats(path, &mut [("mean", mean), ("square", square)])?;
    Ok(optimiser)
}

fn save_critic(folder: &Path, critic: &Critic) -> Result<(), LearnError> {
    std::fs::create_dir_all(folder).map_err(|error| failed(folder)(&error))?;
    let head = &critic.optimiser;
    write_floats(
        &folder.join(HEAD),
        &[
            ("data", &critic.head.data),
            ("mean", &head.mean),
            ("square", &head.square),
        ],
    )?;
    if let Some((weights, optimiser)) = &critic.trunk {
        let trunk = folder.join(TRUNK);
        model::save(weights, &trunk, model::files::Precision::F32)?;
        write_floats(
            &trunk.join(OPTIMISER),
            &[("mean", &optimiser.mean), ("square", &optimiser.square)],
        )?;
    }
    let state = CriticState {
        updates: critic.updates,
        head_steps: head.steps,
        head: head.settings.clone(),
        trunk: critic
            .trunk
            .as_ref()
            .map(|(_, optimiser)| (optimiser.steps, optimiser.settings.clone())),
    };
    write_json(&folder.join(STATE), &state)
}

/// The critic of a checkpoint, if it was written with one.
///
/// # Errors
/// [`LearnError::Checkpoint`] naming the file, and [`LearnError::Model`].
pub fn load_critic(folder: &Path) -> Result<Option<Critic>, LearnError> {
    let own = folder.join(CRITIC);
    if !own.exists() {
        return Ok(None);
    }
    let state: CriticState = read_json(&own.join(STATE))?;
    let width = model::files::load_config(folder)?.hidden_size;
    let mut head = ValueHead::zeros(width);
    let path = own.join(HEAD);
    read_floats(&path, &mut [("data", &mut head.data)])?;
    let optimiser = load_optimiser(&path, state.head, state.head_steps, head.data.len())?;
    let trunk = match state.trunk {
        None => None,
        Some((steps, settings)) => {
            let weights = model::load(&own.join(TRUNK))?;
            let path = own.join(TRUNK).join(OPTIMISER);
            let optimiser = load_optimiser(&path, settings, steps, weights.len())?;
            Some((weights, optimiser))
        }
    };
    Ok(Some(Critic {
        head,
        optimiser,
        trunk,
        updates: state.updates,
    }))
}

/// The counters of a checkpoint; `None` when the folder is none.
pub(crate) fn load_state(folder: &Path) -> Result<Option<State>, LearnError> {
    let path = folder.join(STATE);
    if path.exists() {
        read_json(&path).map(Some)
    } else {
        Ok(None)
    }
}

/// Reads a checkpoint.
///
/// # Errors
/// [`LearnError::Checkpoint`] naming the file, and [`LearnError::Model`].
pub fn load(folder: &Path) -> Result<(model::Weights, AdamW, State), LearnError> {
    let weights = model::load(folder)?;
    let (optimiser, state) = load_state_of(folder, weights.len())?;
    Ok((weights, optimiser, state))
}

/// Optimiser and counters of a checkpoint that trains `len` parameters.
pub(crate) fn load_state_of(folder: &Path, len: usize) -> Result<(AdamW, State), LearnError> {
    let state: State = read_json(&folder.join(STATE))?;
    let settings = state.optimiser.clone();
    let path = folder.join(OPTIMISER);
    let optimiser = load_optimiser(&path, settings, state.optimiser_steps, len)?;
    Ok((optimiser, state))
}
