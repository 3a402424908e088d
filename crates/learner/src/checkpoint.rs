//! Weights, optimiser and counters in a folder, whole or not at all: everything is written into a
//! neighbour folder, which is renamed when it is complete.

use std::path::{Path, PathBuf};

use model::adamw::{AdamW, AdamWSettings};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::{Deserialize, Serialize};

use crate::LearnError;

const OPTIMISER: &str = "optimiser.safetensors";
const STATE: &str = "state.json";

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

fn failed(path: &Path) -> impl Fn(&dyn std::fmt::Display) -> LearnError + '_ {
    move |reason| LearnError::Checkpoint {
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

/// Writes a checkpoint. `also` are files to copy beside the weights (tokenizer, template), so that
/// the folder is a complete Hugging Face model.
///
/// # Errors
/// [`LearnError::Checkpoint`] and [`LearnError::Model`]; an older checkpoint at the place stays.
pub fn save(
    folder: &Path,
    weights: &model::Weights,
    optimiser: &AdamW,
    state: &State,
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
    let bytes =
        |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|v| v.to_le_bytes()).collect() };
    let (mean, square) = (bytes(&optimiser.mean), bytes(&optimiser.square));
    let mut views = Vec::new();
    for (name, data) in [("mean", &mean), ("square", &square)] {
        let view = TensorView::new(Dtype::F32, vec![data.len() / 4], data)
            .map_err(|error| fail(&error))?;
        views.push((name, view));
    }
    let packed = safetensors::serialize(views, None).map_err(|error| fail(&error))?;
    let write = |name: &str, bytes: &[u8]| {
        let path = temporary.join(name);
        model::files::write_atomically(&path, bytes).map_err(|error| failed(&path)(&error))
    };
    write(OPTIMISER, &packed)?;
    write(
        STATE,
        &serde_json::to_vec_pretty(state).map_err(|error| fail(&error))?,
    )?;
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

/// Reads a checkpoint.
///
/// # Errors
/// [`LearnError::Checkpoint`] naming the file, and [`LearnError::Model`].
pub fn load(folder: &Path) -> Result<(model::Weights, AdamW, State), LearnError> {
    let weights = model::load(folder)?;
    let path = folder.join(STATE);
    let text = std::fs::read(&path).map_err(|error| failed(&path)(&error))?;
    let state: State = serde_json::from_slice(&text).map_err(|error| failed(&path)(&error))?;
    let path = folder.join(OPTIMISER);
    let fail = failed(&path);
    let bytes = std::fs::read(&path).map_err(|error| fail(&error))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| fail(&error))?;
    let mut optimiser = AdamW::new(state.optimiser.clone(), weights.len());
    optimiser.steps = state.optimiser_steps;
    for (name, target) in [
        ("mean", &mut optimiser.mean),
        ("square", &mut optimiser.square),
    ] {
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
    Ok((weights, optimiser, state))
}
