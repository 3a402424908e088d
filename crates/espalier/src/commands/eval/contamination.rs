//! How much of the evaluated tasks is among those that models were trained on.

use std::{collections::BTreeMap, sync::Arc};

use bench::{Compared, Contamination, FILE_BYTES_MIN};
use sha2::{Digest, Sha256};
use task::{Split, Task};

use crate::{error::CliError, models::Model, recipe::Recipe};

/// What is compared of a task.
pub(crate) fn compared(task: &Task) -> Compared {
    Compared {
        id: task.id.to_string(),
        digest: task.digest.clone(),
        instruction: task.instruction.clone(),
        files: task
            .files
            .iter()
            .filter(|file| file.content.len() >= FILE_BYTES_MIN)
            .map(|file| hex::encode(Sha256::digest(&file.content)))
            .collect(),
    }
}

/// For every model that is a checkpoint of a run: the evaluated tasks against those that the run
/// trained on. A run whose recipe is not there, or whose tasks are not, is a warning and no
/// finding.
pub(super) fn by_model(
    models: &[Model],
    tasks: &[Arc<Task>],
) -> Result<BTreeMap<String, Contamination>, CliError> {
    let measured: Vec<Compared> = tasks.iter().map(|task| compared(task)).collect();
    let mut found = BTreeMap::new();
    for model in models {
        let Some((run, _)) = model.checkpoint() else {
            continue;
        };
        let name = &model.source.name;
        let trained = Recipe::load(&run.join("run.toml")).and_then(|recipe| {
            let source = recipe.tasks.train;
            let tasks = task::load(&source, Split::Train)
                .map_err(|error| CliError::failed(format!("tasks {source}"), error))?;
            Ok((source, tasks))
        });
        match trained {
            Ok((source, trained)) => {
                let trained: Vec<Compared> = trained.iter().map(compared).collect();
                let one = Contamination::of(&measured, &trained, &source);
                found.insert(name.clone(), one);
            }
            Err(error) => {
                tracing::warn!(model = %name, %error, "what it was trained on cannot be read, so nothing is said of contamination");
            }
        }
    }
    Ok(found)
}
