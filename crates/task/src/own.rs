//! Our own folder: `task.toml`, `instruction.md`, `files/`, `verify/`, optional `solution.toml`.
//!
//! ```toml
//! # task.toml
//! format = 1
//! id = "tidy-up"
//! family = "files"
//! workspace = "/workspace"        # optional, as shown
//! home = "/home/agent"            # optional, as shown
//!
//! [verifier]
//! folder = ".verify"              # optional, as shown: where verify/ goes, after the harness ended
//! argv = ["sh", ".verify/check.sh"]
//! timeout_s = 60                  # optional, as shown
//! contract = "last-line"          # or "last-line-or-zero"; optional, as shown
//!
//! [metadata]                      # anything, optional
//!
//! [[services]]                    # optional: see `service`
//!
//! [[mcp_servers]]                 # optional: tool servers that the harness is told of
//! name = "tools"
//! transport = "stdio"             # or "streamable-http" with url, and start: a command, optional
//! command = "/run/espalier/guest"
//! args = ["mcp"]
//! ```
//! A verifier finds what the services were asked in `services.json` beside its own files. Unknown keys are refused. `instruction.md` loses one newline at its end. Files are executable
//! when they are so on disk. `solution.toml` is a list of `[[step]]`, each with one of `bash`,
//! `read`, `write` + `text`, `edit` + `old` + `new`, `say`.

mod form;
mod services;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use form::{SolutionForm, TaskForm};
use record::TaskId;
use services::ServiceForm;

use crate::{
    Environment, Format, Grading, Payload, Step, Task, TaskError, Verifier, digest, toml_file,
    tree::{self, stays_inside},
};

/// The file that marks a folder as one of our tasks.
pub(crate) const FILE: &str = "task.toml";
const INSTRUCTION: &str = "instruction.md";
const SOLUTION: &str = "solution.toml";
const FILES: &str = "files";
const VERIFY: &str = "verify";
/// The largest verifier timeout accepted, in seconds.
const TIMEOUT_S_MAX: u64 = 3600;

/// Reads one folder of ours.
pub(crate) fn read_dir(folder: &Path) -> Result<Task, TaskError> {
    let file = folder.join(FILE);
    let text = tree::read_text(&file)?;
    let form: TaskForm = toml_file::parse(&text, &file)?;
    let wrong = |field: &str, expected: &str, found: String| {
        let key = field.rsplit('.').next().unwrap_or(field);
        TaskError::Field {
            file: file.clone(),
            line: toml_file::line_of_key(&text, key),
            field: field.into(),
            expected: expected.to_owned(),
            found,
            hint: "correct the file",
        }
    };
    if form.format != 1 {
        return Err(wrong("format", "1", form.format.to_string()));
    }
    let id = TaskId::new(form.id.clone())
        .map_err(|_| wrong("id", tree::ID_EXPECTED, format!("{:?}", form.id)))?;
    for (field, path) in [("workspace", &form.workspace), ("home", &form.home)] {
        if !path.is_absolute() {
            return Err(wrong(field, "an absolute path", format!("{path:?}")));
        }
    }
    let verifier_files = tree::read(&folder.join(VERIFY))?;
    let Some(verifier) = form.verifier.filter(|_| !verifier_files.is_empty()) else {
        return Err(TaskError::MissingVerifier {
            folder: folder.to_path_buf(),
            expected: format!("a table [verifier] in {FILE} and its files in {VERIFY}/"),
        });
    };
    if verifier.argv.is_empty() {
        return Err(wrong(
            "verifier.argv",
            "a program and its arguments",
            "[]".to_owned(),
        ));
    }
    if verifier.timeout_s == 0 || verifier.timeout_s > TIMEOUT_S_MAX {
        let expected = format!("1 to {TIMEOUT_S_MAX} seconds");
        return Err(wrong(
            "verifier.timeout_s",
            &expected,
            verifier.timeout_s.to_string(),
        ));
    }
    // The folder is removed before the verifier's files go there: it must not be the workspace.
    let inside = verifier
        .folder
        .strip_prefix(&form.workspace)
        .unwrap_or(&verifier.folder);
    let depth = verifier.folder.components().count();
    if !(stays_inside(inside) || verifier.folder.is_absolute() && depth > 2) {
        let expected = "a folder below the workspace, or an absolute path of at least two parts";
        return Err(wrong(
            "verifier.folder",
            expected,
            format!("{:?}", verifier.folder),
        ));
    }
    let complain = |(field, expected, found): services::Wrong| wrong(&field, &expected, found);
    let services = services::read(form.services, folder, &complain)?;
    let environment = Environment {
        tools: services::tools(&services),
        services,
        mcp_servers: services::servers(form.mcp_servers, &complain)?,
        ..form::place(form.network)
    };
    let instruction = tree::read_text(&folder.join(INSTRUCTION))?;
    let instruction = instruction
        .strip_suffix('\n')
        .unwrap_or(&instruction)
        .to_owned();
    if instruction.trim().is_empty() {
        return Err(TaskError::Field {
            file: folder.join(INSTRUCTION),
            line: None,
            field: "instruction".into(),
            expected: "a text".to_owned(),
            found: "nothing".to_owned(),
            hint: "write what the harness is to do",
        });
    }
    let mut task = Task {
        id,
        family: form.family,
        instruction,
        files: tree::read(&folder.join(FILES))?,
        workspace: form.workspace,
        home: form.home,
        verifier: Verifier {
            files: verifier_files,
            folder: verifier.folder,
            argv: verifier.argv,
            cwd: verifier.cwd,
            timeout_s: verifier.timeout_s,
            contract: verifier.contract.into(),
            payload: Payload::default(),
            env: BTreeMap::new(),
        },
        solution: read_solution(&folder.join(SOLUTION))?,
        metadata: form::json_of(form.metadata),
        format: Format::default(),
        grading: Grading::default(),
        environment,
        digest: String::new(),
    };
    task.digest = digest::digest(&task);
    Ok(task)
}

fn read_solution(file: &Path) -> Result<Vec<Step>, TaskError> {
    if !file.exists() {
        return Ok(Vec::new());
    }
    let form: SolutionForm = toml_file::parse(&tree::read_text(file)?, file)?;
    form.step
        .into_iter()
        .enumerate()
        .map(|(index, step)| {
            step.into_step().map_err(|found| TaskError::Field {
                file: file.to_path_buf(),
                line: None,
                field: format!("step {}", index + 1).into(),
                expected: "one of bash, read, write + text, edit + old + new, say".to_owned(),
                found,
                hint: "correct the step",
            })
        })
        .collect()
}

/// Writes a task into a new or empty folder, so that [`crate::load_dir`] gives an equal task,
/// except for the order of files (they are read sorted by path) and the digest that follows.
///
/// # Errors
/// [`TaskError::File`] when the folder is not empty or the system refuses;
/// [`TaskError::NotWritable`] when a text or the metadata cannot be said in TOML.
pub fn write_dir(task: &Task, folder: &Path) -> Result<(), TaskError> {
    fs::create_dir_all(folder).map_err(|error| tree::refused(folder, &error))?;
    let mut entries = fs::read_dir(folder).map_err(|error| tree::refused(folder, &error))?;
    if entries.next().is_some() {
        return Err(TaskError::File {
            path: folder.to_path_buf(),
            reason: "the folder is not empty".to_owned(),
        });
    }
    let not_writable = |what: String| TaskError::NotWritable {
        id: task.id.to_string(),
        what,
    };
    for file in task.files.iter().chain(&task.verifier.files) {
        if !stays_inside(&file.path) {
            return Err(not_writable(format!(
                "{:?} is not inside its folder",
                file.path
            )));
        }
    }
    let form = TaskForm::of(task).map_err(not_writable)?;
    let put = |name: &str, text: String| {
        let path: PathBuf = folder.join(name);
        fs::write(&path, text).map_err(|error| tree::refused(&path, &error))
    };
    let text = toml::to_string(&form).map_err(|error| not_writable(error.to_string()))?;
    put(FILE, text)?;
    put(INSTRUCTION, format!("{}\n", task.instruction))?;
    if !task.solution.is_empty() {
        let form = SolutionForm::of(&task.solution).map_err(not_writable)?;
        let text = toml::to_string(&form).map_err(|error| not_writable(error.to_string()))?;
        put(SOLUTION, text)?;
    }
    let data = task
        .environment
        .services
        .iter()
        .filter_map(ServiceForm::data);
    for (name, text) in data {
        let path = folder.join(&name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|error| tree::refused(parent, &error))?;
        }
        put(&name, text)?;
    }
    tree::write(&folder.join(FILES), &task.files)?;
    tree::write(&folder.join(VERIFY), &task.verifier.files)
}
