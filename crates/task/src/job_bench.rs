//! JobBench folders: `task_folder/` with `TASK_INSTRUCTIONS.txt`, `RUBRICS.json`,
//! `task_card.md`. A judge is asked about each rubric alone, yes or no; the score is the weight
//! of what passed over all weight.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    Contract, Criterion, Environment, Format, Grading, Mix, Payload, Rubric, Scale, Task,
    TaskError, Verifier, digest,
    fields::{Fields, id_of, wrong},
    tree,
};

/// The file that marks such a folder.
pub(crate) const FILE: &str = "RUBRICS.json";
const INSTRUCTIONS: &str = "TASK_INSTRUCTIONS.txt";

/// Reads one folder. Its id is the name of its folder after that of the folder above, as the set
/// is sorted by profession.
pub(crate) fn read_dir(folder: &Path) -> Result<Task, TaskError> {
    let file = folder.join(FILE);
    let mut top = Fields::json_file(&file)?;
    let whole = folder
        .canonicalize()
        .map_err(|error| tree::refused(folder, &error))?;
    let names: Vec<String> = whole
        .iter()
        .rev()
        .take(2)
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    let profession = names.get(1).cloned().unwrap_or_default();
    let name = format!(
        "{profession}--{}",
        names.first().cloned().unwrap_or_default()
    );
    let id = top.as_id("the folder's name", &id_of(&name))?;
    let mut criteria = Vec::new();
    for (index, mut item) in top.objects("rubrics")?.into_iter().enumerate() {
        let text = item.text("rubric")?;
        let demands = item.texts("criterion")?;
        if demands.is_empty() || demands.iter().any(|demand| demand.trim().is_empty()) {
            return Err(item.wrong("criterion", "a list of texts, not empty", &demands.into()));
        }
        let weight = match item.number("weight")? {
            Some(weight) if weight >= 0.0 => weight,
            other => {
                let found = other.map_or(Value::Null, Value::from);
                return Err(item.wrong("weight", "a finite number, not negative", &found));
            }
        };
        let demands: String = demands
            .iter()
            .map(|demand| format!("\n- {demand}"))
            .collect();
        criteria.push(Criterion {
            name: format!("rubric-{:02}", index + 1),
            text: text + &demands,
            weight,
            file: None,
        });
    }
    if criteria
        .iter()
        .map(|criterion| criterion.weight)
        .sum::<f64>()
        <= 0.0
    {
        return Err(top.wrong("rubrics", "a list with a weight above 0", &Value::Null));
    }
    let files = tree::read(&folder.join("task_folder"))?;
    let said = files
        .iter()
        .find(|file| file.path == Path::new(INSTRUCTIONS))
        .map(|file| String::from_utf8_lossy(&file.content).trim_end().to_owned())
        .filter(|text| !text.trim().is_empty());
    let Some(instruction) = said else {
        let place = folder.join("task_folder").join(INSTRUCTIONS);
        return Err(wrong(&place, None, "the file", "a text", "nothing"));
    };
    let metadata: BTreeMap<String, Value> = top.rest().into_iter().collect();
    let mut environment = Environment::default();
    if !tree::read(&folder.join("files_required_to_search"))?.is_empty() {
        environment
            .refusals
            .push("it expects the harness to search the web".to_owned());
    }
    let mut task = Task {
        id,
        family: if profession.is_empty() {
            "jobbench".to_owned()
        } else {
            profession
        },
        instruction,
        files,
        workspace: PathBuf::from("/workspace"),
        home: PathBuf::from("/home/agent"),
        verifier: Verifier {
            files: Vec::new(),
            folder: PathBuf::from("/opt/grader"),
            argv: Vec::new(),
            cwd: Some(PathBuf::from("/")),
            timeout_s: 60,
            contract: Contract::None,
            payload: Payload::None,
            env: BTreeMap::new(),
        },
        solution: Vec::new(),
        metadata,
        format: Format::JobBench,
        grading: Grading {
            mix: Mix::Judge,
            rubric: Some(Rubric {
                criteria,
                scale: Scale::Binary,
                one_by_one: true,
                expected: String::new(),
            }),
            pass_at: 1.0,
            audit: None,
        },
        environment,
        digest: String::new(),
    };
    task.digest = digest::digest(&task);
    Ok(task)
}
