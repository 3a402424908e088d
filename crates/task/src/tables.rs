//! Task sets that are one table: MCP-Atlas (CSV), OfficeQA (CSV), and instances in the manner of
//! SWE-bench or ClawGym's source (one JSON object per line).

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};

use crate::{
    Contract, Criterion, Environment, Format, Grading, McpServer, Mix, Network, Payload, Rubric,
    Scale, Step, Task, TaskError, TaskFile, Verifier, clawgym, digest,
    fields::{Fields, id_of, wrong},
    servers, tree,
};

const WORKSPACE: &str = "/workspace";
const HOME: &str = "/home/agent";
/// Rows of one table.
const ROWS_MAX: usize = 100_000;
/// Where clean-room verification puts its things.
const GRADER: &str = "/opt/grader";
/// Where SWE-bench's images have the repository.
const TESTBED: &str = "/testbed";

/// Takes the verifier of a SWE-bench-like task apart from its sandbox: the agent's diff against
/// the base commit is applied to a fresh checkout in another folder, then the test patch, which
/// therefore wins over whatever the agent did to the same files.
const CLEAN_ROOM: &str = include_str!("clean_room.py");

/// Reads a table by its name's end and its first row.
pub(crate) fn read_file(file: &Path) -> Result<Vec<Task>, TaskError> {
    match file.extension().and_then(|end| end.to_str()) {
        Some("jsonl" | "ndjson") => lines(file),
        Some("csv") => csv(file),
        _ => Err(TaskError::NotATask {
            folder: file.to_path_buf(),
        }),
    }
}

fn too_many(file: &Path) -> TaskError {
    TaskError::TooLarge {
        path: file.to_path_buf(),
        what: "the number of rows".to_owned(),
        limit: format!("{ROWS_MAX} rows"),
    }
}

fn lines(file: &Path) -> Result<Vec<Task>, TaskError> {
    let open = fs::File::open(file).map_err(|error| tree::refused(file, &error))?;
    let mut tasks = Vec::new();
    for (index, line) in BufReader::new(open).lines().enumerate() {
        let line = line.map_err(|error| tree::refused(file, &error))?;
        if line.trim().is_empty() {
            continue;
        }
        if tasks.len() == ROWS_MAX {
            return Err(too_many(file));
        }
        let row = Fields::json(&line, file, Some(index + 1))?;
        tasks.push(if row.has("instance_id") {
            instance(row)?
        } else if row.has("prompt") || row.has("hook_code") {
            clawgym::read_source(&line, file, index + 1)?
        } else {
            let expected = "instance_id (SWE-bench) or prompt and hook_code (ClawGym source)";
            return Err(row.wrong("the row", expected, &Value::Null));
        });
    }
    if tasks.is_empty() {
        return Err(TaskError::Empty {
            folder: file.to_path_buf(),
        });
    }
    Ok(tasks)
}

fn csv(file: &Path) -> Result<Vec<Task>, TaskError> {
    let broken = |error: csv::Error| {
        let line = error.position().map(|place| place.line() as usize);
        wrong(
            file,
            line,
            "the row",
            "CSV with as many cells as the first line",
            error.to_string(),
        )
    };
    let mut reader = csv::Reader::from_path(file).map_err(broken)?;
    let header = reader.headers().map_err(broken)?.clone();
    let has = |name: &str| header.iter().any(|cell| cell.eq_ignore_ascii_case(name));
    let atlas = has("PROMPT") && has("GTFA_CLAIMS");
    let office = has("uid") && has("question") && has("answer");
    if !atlas && !office {
        let expected = "TASK, PROMPT, ENABLED_TOOLS, GTFA_CLAIMS (MCP-Atlas) or uid, question, answer (OfficeQA)";
        let found = header.iter().collect::<Vec<_>>().join(", ");
        return Err(wrong(file, Some(1), "columns", expected, found));
    }
    let servers = if atlas { servers::beside(file)? } else { None };
    let mut tasks = Vec::new();
    for record in reader.records() {
        let record = record.map_err(broken)?;
        if tasks.len() == ROWS_MAX {
            return Err(too_many(file));
        }
        let line = record.position().map(|place| place.line() as usize);
        let row: Map<String, Value> = header
            .iter()
            .zip(&record)
            .map(|(name, cell)| {
                (
                    if atlas {
                        name.to_uppercase()
                    } else {
                        name.to_lowercase()
                    },
                    cell.into(),
                )
            })
            .collect();
        let row = Fields::of(Value::Object(row), file, line)?;
        tasks.push(if atlas {
            atlas_task(row, servers.as_ref())?
        } else {
            office_task(row)?
        });
    }
    if tasks.is_empty() {
        return Err(TaskError::Empty {
            folder: file.to_path_buf(),
        });
    }
    Ok(tasks)
}

fn verifier(contract: Contract, files: Vec<TaskFile>, payload: Payload) -> Verifier {
    Verifier {
        files,
        folder: PathBuf::from(GRADER),
        argv: Vec::new(),
        cwd: Some(PathBuf::from("/")),
        timeout_s: 60,
        contract,
        payload,
        env: BTreeMap::new(),
    }
}

fn finish(mut task: Task) -> Task {
    task.digest = digest::digest(&task);
    task
}

fn text_file(path: &str, text: &str) -> TaskFile {
    TaskFile {
        path: path.into(),
        content: text.as_bytes().to_vec(),
        executable: false,
    }
}

/// A cell that holds a JSON list of texts.
fn listed(row: &mut Fields, key: &str) -> Result<Vec<String>, TaskError> {
    let texts = |items: Vec<Value>| -> Option<Vec<String>> {
        items
            .into_iter()
            .map(|item| item.as_str().map(str::to_owned))
            .collect()
    };
    let found = row.any(key).unwrap_or_default();
    let items = match &found {
        Value::Array(items) => texts(items.clone()),
        Value::String(text) if text.trim().is_empty() => Some(Vec::new()),
        Value::String(text) => serde_json::from_str(text).ok().and_then(texts),
        Value::Null => Some(Vec::new()),
        _ => None,
    };
    items.ok_or_else(|| row.wrong(key, "a JSON list of texts", &found))
}

/// MCP-Atlas: each claim is judged 1, 0.5 or 0; the score is their mean, passed from 0.75.
fn atlas_task(
    mut row: Fields,
    servers: Option<&BTreeMap<String, McpServer>>,
) -> Result<Task, TaskError> {
    let name = row.text("TASK")?;
    let id = row.as_id("TASK", &id_of(&name))?;
    let instruction = row.text("PROMPT")?;
    let tools = listed(&mut row, "ENABLED_TOOLS")?;
    let claims = listed(&mut row, "GTFA_CLAIMS")?;
    if claims.is_empty() {
        return Err(row.wrong(
            "GTFA_CLAIMS",
            "at least one claim",
            &Value::Array(Vec::new()),
        ));
    }
    let criteria = claims
        .into_iter()
        .enumerate()
        .map(|(index, text)| Criterion {
            name: format!("claim-{:02}", index + 1),
            text,
            weight: 1.0,
            file: None,
        })
        .collect();
    let environment = match servers {
        None => Environment {
            network: Network::Public,
            refusals: vec![format!(
                "its tool servers are not part of the set: say in {} beside the table how they are started",
                servers::FILE
            )],
            ..Environment::default()
        },
        Some(listed) => {
            let (mcp_servers, missing) = servers::needed(&tools, listed);
            let refusals = missing
                .iter()
                .map(|tool| format!("no server of {} has its tool {tool}", servers::FILE));
            Environment {
                mcp_servers,
                refusals: refusals.collect(),
                ..Environment::default()
            }
        }
    };
    let mut metadata: BTreeMap<String, Value> = row.rest().into_iter().collect();
    metadata.insert("enabled_tools".to_owned(), tools.into());
    Ok(finish(Task {
        id,
        family: "mcp-atlas".to_owned(),
        instruction,
        files: Vec::new(),
        workspace: WORKSPACE.into(),
        home: HOME.into(),
        verifier: verifier(Contract::None, Vec::new(), Payload::Answer),
        solution: Vec::new(),
        metadata,
        format: Format::McpAtlas,
        grading: Grading {
            mix: Mix::Judge,
            rubric: Some(Rubric {
                criteria,
                scale: Scale::Halves,
                one_by_one: true,
                expected: String::new(),
            }),
            pass_at: 0.75,
            audit: None,
        },
        environment,
        digest: String::new(),
    }))
}

/// OfficeQA: the model's last words are compared with the truth.
fn office_task(mut row: Fields) -> Result<Task, TaskError> {
    let id = row.id("uid")?;
    let instruction = row.text("question")?;
    let truth = row.text("answer")?;
    let family = row.text_or("difficulty", "officeqa")?;
    let sources = row.text_or("source_files", "")?;
    let mut metadata: BTreeMap<String, Value> = row.rest().into_iter().collect();
    metadata.insert("source_files".to_owned(), sources.clone().into());
    let mut environment = Environment::default();
    if !sources.trim().is_empty() {
        environment
            .refusals
            .push("its source documents are not part of the table".to_owned());
    }
    Ok(finish(Task {
        id,
        family,
        instruction,
        files: Vec::new(),
        workspace: WORKSPACE.into(),
        home: HOME.into(),
        verifier: verifier(
            Contract::OfficeAnswer,
            vec![text_file("truth.txt", &truth)],
            Payload::Answer,
        ),
        solution: vec![Step::Say(truth)],
        metadata,
        format: Format::OfficeQa,
        grading: Grading::default(),
        environment,
        digest: String::new(),
    }))
}

/// An instance in the manner of SWE-bench. The reward is 1 when every test of `FAIL_TO_PASS` and
/// `PASS_TO_PASS` passes in the clean room, else 0.
fn instance(mut row: Fields) -> Result<Task, TaskError> {
    let name = row.text("instance_id")?;
    let id = row.as_id("instance_id", &id_of(&name))?;
    let repo = row.text("repo")?;
    let base = row.text("base_commit")?;
    if base.len() < 7 || !base.chars().all(|c| c.is_ascii_hexdigit()) {
        return Err(row.wrong("base_commit", "a commit in hexadecimal", &base.into()));
    }
    let instruction = row.text("problem_statement")?;
    let patch = row.text_or("patch", "")?;
    let test_patch = row.text("test_patch")?;
    let fail_to_pass = listed(&mut row, "FAIL_TO_PASS")?;
    let pass_to_pass = listed(&mut row, "PASS_TO_PASS")?;
    if fail_to_pass.is_empty() {
        return Err(row.wrong(
            "FAIL_TO_PASS",
            "at least one test",
            &Value::Array(Vec::new()),
        ));
    }
    let command = row.text_or("test_cmd", "python3 -m pytest -rA -p no:cacheprovider")?;
    let image = match row.maybe_text("image_name")? {
        Some(image) => Some(image),
        None => row.maybe_text("docker_image")?,
    };
    let plan = serde_json::json!({
        "base": base, "command": command, "fail_to_pass": fail_to_pass, "pass_to_pass": pass_to_pass,
    });
    let wanted = image
        .clone()
        .unwrap_or_else(|| format!("with {repo} at {base} in {TESTBED}"));
    let mut metadata: BTreeMap<String, Value> = row.rest().into_iter().collect();
    metadata.insert("repo".to_owned(), repo.into());
    metadata.insert("base_commit".to_owned(), base.into());
    let files = vec![
        text_file("clean_room.py", CLEAN_ROOM),
        text_file("plan.json", &plan.to_string()),
        text_file("test.patch", &test_patch),
    ];
    let mut solution = Vec::new();
    if !patch.trim().is_empty() {
        solution.push(Step::Write("/tmp/gold.patch".into(), patch));
        solution.push(Step::Bash("git apply /tmp/gold.patch".to_owned()));
    }
    Ok(finish(Task {
        id,
        family: "swe".to_owned(),
        instruction,
        files: Vec::new(),
        workspace: TESTBED.into(),
        home: "/root".into(),
        verifier: Verifier {
            argv: ["python3", "-I", "/opt/grader/clean_room.py", "{workspace}"]
                .map(str::to_owned)
                .to_vec(),
            timeout_s: 1800,
            ..verifier(Contract::LastLine, files, Payload::None)
        },
        solution,
        metadata,
        format: Format::SweBench,
        grading: Grading::default(),
        environment: Environment {
            image,
            refusals: vec![format!(
                "it needs the image {wanted}, and this kind of sandbox has no images"
            )],
            ..Environment::default()
        },
        digest: String::new(),
    }))
}
