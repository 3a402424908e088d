//! Terminal-Bench 1 folders, converted: `task.yaml`, `Dockerfile` or `docker-compose.yaml`,
//! `run-tests.sh`, `tests/`, `solution.sh` or `solution.yaml`.
//!
//! Its verifier runs pytest and the harness of the bench parses the summary; here `run-tests.sh`
//! becomes the test of a [`Contract::RewardFile`] task: a wrapper runs it, and the reward is 1
//! when pytest's summary counts passed tests and neither failed ones nor errors, else 0. A
//! script that never got to a summary leaves no reward, which is a fault.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    Contract, Environment, Format, Grading, Network, Payload, Step, Task, TaskError, TaskFile,
    Verifier, digest, dockerfile,
    fields::{Fields, id_of},
    harbor, tree,
};

/// The file that marks such a folder (and Claw-Eval's, which has other keys).
pub(crate) const FILE: &str = "task.yaml";
const WORKSPACE: &str = "/app";

const WRAPPER: &str = r#"cd "$1" || exit 1
mkdir -p /logs/verifier
bash /tests/run-tests.sh > /logs/verifier/test-stdout.txt 2>&1
cat /logs/verifier/test-stdout.txt
# The last summary line of pytest, e.g. "=== 2 passed, 1 failed in 0.3s ===" or, quiet, without marks.
line=$(grep -E '(^|[ =])[0-9]+ (passed|failed|error|errors)[ ,]' /logs/verifier/test-stdout.txt | grep -E ' in [0-9.]+s' | tail -n 1)
[ -n "$line" ] || exit 0
case "$line" in
  *failed*|*error*) echo 0 > /logs/verifier/reward.txt ;;
  *passed*) echo 1 > /logs/verifier/reward.txt ;;
  *) echo 0 > /logs/verifier/reward.txt ;;
esac
"#;

/// Reads one folder.
pub(crate) fn read_dir(folder: &Path) -> Result<Task, TaskError> {
    let file = folder.join(FILE);
    let mut top = Fields::yaml_file(&file)?;
    let instruction = top.text("instruction")?.trim_end().to_owned();
    let name = folder
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let id = top.as_id("the folder's name", &id_of(&name))?;
    let parser = top.text_or("parser_name", "pytest")?;
    if parser != "pytest" {
        return Err(top.wrong("parser_name", "pytest", &parser.into()));
    }
    let mut limit = |key: &str, default: f64| -> Result<f64, TaskError> {
        match top.number(key)? {
            None => Ok(default),
            Some(number) if number > 0.0 && number <= 86_400.0 => Ok(number),
            Some(number) => Err(top.wrong(key, "seconds, above 0", &number.into())),
        }
    };
    let agent_timeout_s = limit("max_agent_timeout_sec", 360.0)?;
    let timeout_s = limit("max_test_timeout_sec", 60.0)?;
    let mut place = Environment {
        network: Network::Public,
        ..Environment::default()
    };
    place.needs.agent_timeout_s = Some(agent_timeout_s);
    let mut image = if folder.join("Dockerfile").is_file() {
        dockerfile::read(folder)?
    } else {
        place.refusals.push("there is no Dockerfile".to_owned());
        dockerfile::Image::default()
    };
    place.image = image.base.take();
    place.user = image.user.take();
    place.env = std::mem::take(&mut image.env);
    place.requires = std::mem::take(&mut image.requires);
    place.refusals.append(&mut image.refusals);
    if let Some(count) = services(&folder.join("docker-compose.yaml"))?.filter(|count| *count > 1) {
        place
            .refusals
            .push(format!("docker-compose.yaml asks for {count} containers"));
    }
    let mut files = tree::read(&folder.join("tests"))?;
    if !folder.join("run-tests.sh").is_file() {
        return Err(TaskError::MissingVerifier {
            folder: folder.to_path_buf(),
            expected: "run-tests.sh".to_owned(),
        });
    }
    files.push(tree::read_one(folder, Path::new("run-tests.sh"))?);
    files.push(TaskFile {
        path: "wrapper.sh".into(),
        content: WRAPPER.into(),
        executable: false,
    });
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let solution = solution(folder)?;
    let family = top.text_or("category", "terminal-bench")?;
    let metadata: BTreeMap<String, Value> = top.rest().into_iter().collect();
    let mut task = Task {
        id,
        family,
        instruction,
        files: image.files,
        workspace: image.workdir.unwrap_or_else(|| PathBuf::from(WORKSPACE)),
        home: PathBuf::from("/root"),
        verifier: Verifier {
            files,
            folder: PathBuf::from(harbor::TESTS),
            argv: ["bash", "/tests/wrapper.sh", "{workspace}"]
                .map(str::to_owned)
                .to_vec(),
            cwd: None,
            timeout_s: timeout_s.ceil() as u64,
            contract: Contract::RewardFile,
            payload: Payload::None,
            env: BTreeMap::from([("TEST_DIR".to_owned(), harbor::TESTS.to_owned())]),
        },
        solution,
        metadata,
        format: Format::TerminalBench1,
        grading: Grading::default(),
        environment: place,
        digest: String::new(),
    };
    task.digest = digest::digest(&task);
    Ok(task)
}

/// How many services a compose file has; `None` without one.
fn services(file: &Path) -> Result<Option<usize>, TaskError> {
    if !file.is_file() {
        return Ok(None);
    }
    let mut top = Fields::yaml_file(file)?;
    match top.any("services") {
        Some(Value::Object(services)) => Ok(Some(services.len())),
        other => Err(top.wrong("services", "an object", &other.unwrap_or_default())),
    }
}

/// `solution.sh`, or the commands of `solution.yaml`.
fn solution(folder: &Path) -> Result<Vec<Step>, TaskError> {
    if folder.join("solution.sh").is_file() {
        let files = vec![tree::read_one(folder, Path::new("solution.sh"))?];
        return Ok(harbor::script_steps(files, "solution.sh", &BTreeMap::new()));
    }
    let file = folder.join("solution.yaml");
    if !file.is_file() {
        return Ok(Vec::new());
    }
    let text = tree::read_text(&file)?;
    let mut list = Fields::yaml(&format!("steps:\n{}", indent(&text)), &file, 0)?;
    let mut steps = Vec::new();
    for mut item in list.objects("steps")? {
        steps.push(Step::Bash(item.text("command")?));
    }
    Ok(steps)
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!(" {line}\n")).collect()
}
