//! Steps of a Harbor task: `[[steps]]` and `steps/NAME/`.

use std::{collections::BTreeMap, path::Path};

use serde_json::Value;

use super::{healthcheck, network, of_the_host, refuse_user, script_steps, seconds};
use crate::{
    Environment, Network, Stage, Strategy, TaskError, TaskFile, Verifier,
    fields::{Fields, wrong},
    tree::{self, stays_inside},
};

/// Reads the steps into the place; the instruction of the task, which is the first step's when
/// there are steps.
pub(super) fn read(
    folder: &Path,
    file: &Path,
    top: &mut Fields,
    verifier: &Verifier,
    place: &mut Environment,
) -> Result<String, TaskError> {
    for step in top.objects("steps")? {
        let stage = stage(folder, step, verifier, place)?;
        place.stages.push(stage);
    }
    place.strategy = match top.text_or("multi_step_reward_strategy", "mean")?.as_str() {
        "mean" => Strategy::Mean,
        "final" => Strategy::Final,
        other => {
            return Err(top.wrong("multi_step_reward_strategy", "mean or final", &other.into()));
        }
    };
    match place.stages.first() {
        Some(first) => Ok(first.instruction.clone()),
        None if folder.join("steps").is_dir() && !folder.join("instruction.md").is_file() => {
            Err(wrong(
                file,
                None,
                "steps",
                "a table [[steps]] for each folder in steps/",
                "none",
            ))
        }
        None => instruction(&folder.join("instruction.md")),
    }
}

fn instruction(path: &Path) -> Result<String, TaskError> {
    let text = tree::read_text(path)?;
    if text.trim().is_empty() {
        return Err(wrong(path, None, "instruction", "a text", "nothing"));
    }
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

fn stage(
    folder: &Path,
    mut step: Fields,
    shared: &Verifier,
    place: &mut Environment,
) -> Result<Stage, TaskError> {
    let name = step.text("name")?;
    if !stays_inside(Path::new(&name)) || name.contains('/') {
        return Err(step.wrong("name", "the name of a folder in steps/", &name.into()));
    }
    let known = place.stages.iter();
    if known
        .map(|stage| stage.name.to_lowercase())
        .any(|known| known == name.to_lowercase())
    {
        return Err(step.wrong("name", "a name of its own", &name.into()));
    }
    let min_reward = min_reward(&mut step)?;
    let home = folder.join("steps").join(&name);
    let mut verifier = shared.clone();
    // The step's own tests lie over the shared ones.
    verifier.files = layered(&shared.files, tree::read(&home.join("tests"))?);
    if !verifier
        .files
        .iter()
        .any(|file| file.path == Path::new("test.sh"))
    {
        return Err(TaskError::MissingVerifier {
            folder: home,
            expected: "tests/test.sh, the step's or the task's".to_owned(),
        });
    }
    if let Some(mut table) = step.object("verifier")? {
        if let Some(limit) = seconds(&mut table, "timeout_sec")? {
            verifier.timeout_s = limit.ceil() as u64;
        }
        let env = table.environment("env")?;
        verifier
            .env
            .extend(of_the_host(env, "verifier variable", place));
        refuse_user(&mut table, "the verifier of a step", place);
        for key in ["environment", "environment_mode", "collect"] {
            if table.has(key) {
                place.refusals.push(format!(
                    "step {name}: verifier.{key} of a single step is not supported"
                ));
            }
        }
        if network(&mut table)?.is_some_and(|found| found != Network::None) {
            place
                .refusals
                .push(format!("the verifier of step {name} wants the network"));
        }
    }
    let mut agent_timeout_s = None;
    if let Some(mut table) = step.object("agent")? {
        agent_timeout_s = seconds(&mut table, "timeout_sec")?;
        refuse_user(&mut table, "the harness in a step", place);
        if network(&mut table)?.is_some_and(|found| found != place.network) {
            place
                .refusals
                .push(format!("step {name} has a network of its own"));
        }
    }
    let check = step.object("healthcheck")?.map(healthcheck).transpose()?;
    if home.join("trajectory.json").is_file() {
        place.refusals.push(format!(
            "step {name} begins within a conversation (trajectory.json)"
        ));
    }
    let artifacts = super::artifacts(&mut step, place)?;
    place.artifacts.extend(artifacts);
    let files = tree::read(&home.join("workdir"))?;
    let setup = files
        .iter()
        .any(|file| file.path == Path::new("setup.sh"))
        .then(|| "bash setup.sh".to_owned());
    Ok(Stage {
        instruction: instruction(&home.join("instruction.md"))?,
        solution: script_steps(
            tree::read(&home.join("solution"))?,
            "solve.sh",
            &BTreeMap::new(),
        ),
        name,
        min_reward,
        files,
        setup,
        verifier: Some(verifier),
        healthcheck: check,
        agent_timeout_s,
    })
}

/// One number for the key `reward`, or a number for each key.
fn min_reward(step: &mut Fields) -> Result<BTreeMap<String, f64>, TaskError> {
    match step.any("min_reward") {
        None => Ok(BTreeMap::new()),
        Some(Value::Object(keys)) => {
            let mut found = BTreeMap::new();
            for (key, value) in keys {
                let Some(number) = value.as_f64() else {
                    return Err(step.wrong(&format!("min_reward.{key}"), "a number", &value));
                };
                found.insert(key, number);
            }
            Ok(found)
        }
        Some(value) => match value.as_f64() {
            Some(number) => Ok(BTreeMap::from([("reward".to_owned(), number)])),
            None => Err(step.wrong("min_reward", "a number or a table of numbers", &value)),
        },
    }
}

/// Files, and over them others of the same names.
fn layered(below: &[TaskFile], above: Vec<TaskFile>) -> Vec<TaskFile> {
    let mut files: BTreeMap<_, _> = below
        .iter()
        .map(|file| (file.path.clone(), file.clone()))
        .collect();
    files.extend(above.into_iter().map(|file| (file.path.clone(), file)));
    files.into_values().collect()
}
