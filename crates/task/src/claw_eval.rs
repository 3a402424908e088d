//! Claw-Eval folders: `task.yaml`, mock services with an audit log, a `grader.py`.
//!
//! The grader is a class of the bench's own package and asks a judge; here the weighted scoring
//! components become the rubric (checks that need no judge keep their demand as text), and the
//! final formula, safety · (0.8 · completion + 0.2 · robustness), is `verify`'s. Services are
//! read strictly; a service whose program is not in the set, and a simulated user, are reasons
//! why the task cannot be run.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    Contract, Criterion, Environment, Format, Grading, Mix, Payload, Rubric, Scale, Service, Task,
    TaskError, TaskFile, Verifier, digest,
    fields::Fields,
    tree::{self, stays_inside},
};

/// Keys of a check; the bench forbids others.
const CHECK: [&str; 10] = [
    "type",
    "field",
    "tool_name",
    "min_calls",
    "categories",
    "min_length",
    "patterns",
    "keywords",
    "description",
    "rubric",
];

/// Reads one folder with a `task.yaml` that is not Terminal-Bench's.
pub(crate) fn read_dir(folder: &Path) -> Result<Task, TaskError> {
    let mut top = Fields::yaml_file(&folder.join("task.yaml"))?;
    let id = top.id("task_id")?;
    let name = top.text("task_name")?;
    let family = top.text_or("category", "claw-eval")?;
    let Some(mut prompt) = top.object("prompt")? else {
        return Err(top.wrong("prompt", "an object with a text", &Value::Null));
    };
    let instruction = prompt.text("text")?.trim_end().to_owned();
    let mut place = Environment::default();
    let mut files = Vec::new();
    for path in prompt
        .texts("attachments")?
        .into_iter()
        .chain(top.texts("sandbox_files")?)
    {
        files.extend(attachment(folder, &path, &top, &mut place)?);
    }
    for service in top.objects("services")? {
        place.services.push(self::service(service)?);
    }
    for (index, service) in place.services.iter().enumerate() {
        if place.services[..index]
            .iter()
            .any(|other| other.port == service.port)
        {
            let key = format!("services[{index}].port");
            return Err(top.wrong(&key, "a port of its own", &service.port.into()));
        }
        let program = service
            .command
            .split_whitespace()
            .find(|word| word.ends_with(".py"));
        if let Some(program) = program.filter(|program| !folder.join(program).is_file()) {
            place.refusals.push(format!(
                "the service {} needs {program}, which is not in the folder",
                service.name
            ));
        }
    }
    for mut endpoint in top.objects("tool_endpoints")? {
        endpoint.text("tool_name")?;
        endpoint.text("url")?;
    }
    if let Some(mut user) = top.object("user_agent")?
        && user.flag("enabled")? == Some(true)
    {
        place.refusals.push("it needs a simulated user".to_owned());
    }
    if let Some(mut limits) = top.object("environment")? {
        place.needs.agent_timeout_s = Some(limits.number("timeout_seconds")?.unwrap_or(300.0));
        limits.whole("max_turns", 1..=10_000)?;
    }
    for mut action in top.objects("expected_actions")? {
        action.text("service")?;
        action.text("action_key")?;
        action.flag("required")?;
    }
    for mut check in top.objects("safety_checks")? {
        check.text("type")?;
    }
    let rubric = rubric(&mut top)?;
    if folder.join("grader.py").is_file() {
        place
            .refusals
            .push("its grader.py needs the bench's own package".to_owned());
    }
    let mut metadata: BTreeMap<String, Value> = top.rest().into_iter().collect();
    metadata.insert("name".to_owned(), name.into());
    let mut task = Task {
        id,
        family,
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
            payload: Payload::Transcript,
            env: BTreeMap::new(),
        },
        solution: Vec::new(),
        metadata,
        format: Format::ClawEval,
        grading: Grading {
            mix: Mix::Judge,
            rubric: Some(rubric),
            pass_at: 0.75,
        },
        environment: place,
        digest: String::new(),
    };
    task.digest = digest::digest(&task);
    Ok(task)
}

fn attachment(
    folder: &Path,
    path: &str,
    top: &Fields,
    place: &mut Environment,
) -> Result<Option<TaskFile>, TaskError> {
    let inner = Path::new(path);
    if !stays_inside(inner) {
        return Err(top.wrong(
            "sandbox_files",
            "paths inside the task's folder",
            &path.into(),
        ));
    }
    if folder.join(inner).is_file() {
        return tree::read_one(folder, inner).map(Some);
    }
    place
        .refusals
        .push(format!("the file {path} is not in the folder"));
    Ok(None)
}

fn service(mut fields: Fields) -> Result<Service, TaskError> {
    let Some(port) = fields.whole("port", 1..=65_535)? else {
        return Err(fields.wrong("port", "a port", &Value::Null));
    };
    Ok(Service {
        name: fields.text("name")?,
        command: fields.text("command")?,
        port: port as u16,
        health_check: fields.text("health_check")?,
        health_check_method: fields.text_or("health_check_method", "POST")?,
        ready_timeout_s: fields.whole("ready_timeout", 1..=600)?.unwrap_or(10),
        reset_endpoint: fields.maybe_text("reset_endpoint")?,
        env: fields.environment("env")?,
    })
}

fn rubric(top: &mut Fields) -> Result<Rubric, TaskError> {
    let mut criteria = Vec::new();
    let overall = top.text_or("judge_rubric", "")?;
    let expected = top.text_or("reference_solution", "")?;
    for mut item in top.objects("scoring_components")? {
        let name = item.text("name")?;
        let weight = match item.number("weight")? {
            Some(weight) if weight >= 0.0 => weight,
            other => {
                let found = other.map_or(Value::Null, Value::from);
                return Err(item.wrong("weight", "a number, not negative", &found));
            }
        };
        let Some(mut check) = item.object("check")? else {
            return Err(item.wrong("check", "an object with a type", &Value::Null));
        };
        let mut text = format!("type: {}", check.text("type")?);
        for key in &CHECK[1..] {
            if let Some(value) = check.any(key) {
                let value = value
                    .as_str()
                    .map_or_else(|| value.to_string(), str::to_owned);
                text.push_str(&format!("\n{key}: {value}"));
            }
        }
        check.refuse_rest()?;
        criteria.push(Criterion {
            name,
            text,
            weight,
            file: None,
        });
    }
    if criteria.is_empty() && !overall.trim().is_empty() {
        let name = "completion".to_owned();
        criteria.push(Criterion {
            name,
            text: overall.clone(),
            weight: 1.0,
            file: None,
        });
    }
    if criteria
        .iter()
        .map(|criterion| criterion.weight)
        .sum::<f64>()
        <= 0.0
    {
        let expected = "components with a weight above 0, or a judge_rubric";
        return Err(top.wrong("scoring_components", expected, &Value::Null));
    }
    Ok(Rubric {
        criteria,
        scale: Scale::Quarters,
        one_by_one: false,
        expected: format!("{overall}\n{expected}").trim().to_owned(),
    })
}
