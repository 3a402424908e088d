//! ClawGym folders, unchanged: `data_entry.json`, `input_files/`, `reward/`.
//!
//! The verifier is `bash reward/reward.sh` in the workspace, 120 s, last line or zero; the
//! folder `reward/` reaches the sandbox only after the harness ended. Keys that we do not know
//! are kept in the task's metadata: the format belongs to somebody else. A rubric in
//! `metadata.rule` makes the task hybrid, 0.7 code and 0.3 rubric, as ClawGym-Bench has it.
//!
//! [`read_source`] reads the rows from which such folders are unpacked.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::{
    Contract, Criterion, Environment, Format, Grading, Mix, Payload, Rubric, Scale, Task,
    TaskError, TaskFile, Verifier, digest,
    fields::{Fields, id_of},
    tree::{self, stays_inside},
};

/// The file that marks a folder as a ClawGym task.
pub(crate) const FILE: &str = "data_entry.json";
const WORKSPACE: &str = "/root/.openclaw/workspace";
const HOME: &str = "/root";
const TIMEOUT_S: u64 = 120;

/// Reads one ClawGym folder.
pub(crate) fn read_dir(folder: &Path) -> Result<Task, TaskError> {
    let mut entry = Fields::json_file(&folder.join(FILE))?;
    let id = entry.id("task_id")?;
    let instruction = entry.text("user_query")?;
    let mount = mount(&mut entry)?;
    let inputs = folder.join("input_files");
    if mount.is_some() && !inputs.is_dir() {
        return Err(entry.wrong(
            "input_mount_dir",
            "a folder input_files/ beside the file",
            &Value::Null,
        ));
    }
    let mount = mount.unwrap_or_default();
    let files = tree::read(&inputs)?
        .into_iter()
        .map(|file| TaskFile {
            path: mount.join(&file.path),
            ..file
        })
        .collect();
    let Some(mut about) = entry.object("metadata")? else {
        return Err(entry.wrong("metadata", "an object", &Value::Null));
    };
    let rubric = rule(&mut about)?;
    let metadata: Map<String, Value> = about.rest();
    let verifier_files = tree::read(&folder.join("reward"))?;
    if !verifier_files
        .iter()
        .any(|file| file.path == Path::new("reward.sh"))
    {
        return Err(TaskError::MissingVerifier {
            folder: folder.to_path_buf(),
            expected: "reward/reward.sh".to_owned(),
        });
    }
    let metadata = metadata.into_iter().chain(entry.rest());
    Ok(assemble(
        id,
        instruction,
        files,
        verifier_files,
        rubric,
        metadata,
        Format::ClawGym,
    ))
}

fn assemble(
    id: record::TaskId,
    instruction: String,
    files: Vec<TaskFile>,
    verifier_files: Vec<TaskFile>,
    rubric: Option<Rubric>,
    metadata: impl Iterator<Item = (String, Value)>,
    format: Format,
) -> Task {
    let mix = if rubric.is_some() {
        Mix::Weighted {
            code: 0.7,
            judge: 0.3,
        }
    } else {
        Mix::Code
    };
    let mut task = Task {
        id,
        family: "clawgym".to_owned(),
        instruction,
        files,
        workspace: PathBuf::from(WORKSPACE),
        home: PathBuf::from(HOME),
        verifier: Verifier {
            files: verifier_files,
            folder: PathBuf::from("reward"),
            argv: vec!["bash".to_owned(), "reward/reward.sh".to_owned()],
            cwd: None,
            timeout_s: TIMEOUT_S,
            contract: Contract::LastLineOrZero,
            payload: Payload::None,
            env: Default::default(),
        },
        solution: Vec::new(),
        metadata: metadata.collect(),
        format,
        grading: Grading {
            mix,
            rubric,
            pass_at: 1.0,
            audit: None,
        },
        environment: Environment::default(),
        digest: String::new(),
    };
    // Chat-style checks read what the model said; the others never look at the variable, and
    // telling them nothing keeps their digests.
    let reads = |file: &TaskFile| {
        String::from_utf8_lossy(&file.content).contains("OPENCLAW_REWARD_PAYLOAD")
    };
    if task.verifier.files.iter().any(reads) {
        task.verifier.payload = Payload::ClawGym;
    }
    task.digest = digest::digest(&task);
    task
}

/// Takes the place of the input files, relative to the workspace, out.
fn mount(entry: &mut Fields) -> Result<Option<PathBuf>, TaskError> {
    let expected = format!("a path that is or is under {WORKSPACE}");
    match entry.any("input_mount_dir") {
        None => Ok(None),
        Some(Value::String(text)) => match Path::new(&text).strip_prefix(WORKSPACE) {
            Ok(inner) if inner.as_os_str().is_empty() || stays_inside(inner) => {
                Ok(Some(inner.to_path_buf()))
            }
            _ => Err(entry.wrong("input_mount_dir", &expected, &Value::String(text))),
        },
        Some(other) => Err(entry.wrong("input_mount_dir", &expected, &other)),
    }
}

/// Takes the rubric out: `rule` or `rules`, null, or an object with `rules` of name, file and a
/// text per level. `skip_rubric` means none.
fn rule(about: &mut Fields) -> Result<Option<Rubric>, TaskError> {
    let key = if about.has("rules") { "rules" } else { "rule" };
    let Some(mut rule) = about.object(key)? else {
        return Ok(None);
    };
    if rule.flag("skip_rubric")? == Some(true) {
        return Ok(None);
    }
    let mut criteria = Vec::new();
    for mut item in rule.objects("rules")? {
        let name = item.text("name")?;
        let file = item.maybe_text("file_path")?.map(PathBuf::from);
        let mut text = String::new();
        let Some(levels) = item.object("scores")? else {
            return Err(item.wrong("scores", "an object of level and text", &Value::Null));
        };
        for (level, meaning) in levels.rest() {
            let expected = "a text for each of 0, 0.25, 0.5, 0.75, 1";
            let known = level
                .parse()
                .is_ok_and(|level| Scale::Quarters.levels().contains(&level));
            match meaning {
                Value::String(meaning) if known => {
                    text.push_str(&format!("{level}: {meaning}\n"));
                }
                other => return Err(item.wrong(&format!("scores.{level}"), expected, &other)),
            }
        }
        criteria.push(Criterion {
            name,
            text,
            weight: 1.0,
            file,
        });
    }
    if criteria.is_empty() {
        return Err(rule.wrong("rules", "at least one rule", &Value::Array(Vec::new())));
    }
    Ok(Some(Rubric {
        criteria,
        scale: Scale::Quarters,
        one_by_one: false,
        expected: String::new(),
    }))
}

/// The id in a row's `origin_template`: its front matter has a line `id:`.
fn template_id(template: &str) -> Option<&str> {
    let line = template
        .lines()
        .find_map(|line| line.trim().strip_prefix("id:"))?;
    Some(line.trim().trim_matches(['"', '\'']))
}

/// Reads one row of the source: `prompt`, `hook_code`, `hook_lang`, `input_files`, `rule`,
/// `origin_template`. Files under `reward/` are the verifier; `reward/test.py` becomes
/// `check.py`, as the authors unpack it.
pub(crate) fn read_source(text: &str, file: &Path, line: usize) -> Result<Task, TaskError> {
    let mut row = Fields::json(text, file, Some(line))?;
    let instruction = row.text("prompt")?;
    let template = row.text_or("origin_template", "")?;
    let name = template_id(&template).map_or_else(|| format!("row-{line:06}"), id_of);
    let id = row.as_id("origin_template", &name)?;
    let lang = row.text_or("hook_lang", "bash")?;
    if lang != "bash" {
        return Err(row.wrong("hook_lang", "bash", &lang.into()));
    }
    let hook = row.text("hook_code")?;
    let rubric = rule(&mut row)?;
    let (mut files, mut reward) = (Vec::new(), Vec::new());
    for mut item in row.objects("input_files")? {
        let path = item.text("file_path")?;
        let inner = Path::new(&path)
            .strip_prefix(WORKSPACE)
            .unwrap_or(Path::new(&path));
        if !stays_inside(inner) {
            return Err(item.wrong("file_path", "a path inside the workspace", &path.into()));
        }
        let content = item.text_or("content", "")?.into_bytes();
        let (list, path) = match inner.strip_prefix("reward") {
            Ok(inner) if inner == Path::new("test.py") => (&mut reward, PathBuf::from("check.py")),
            Ok(inner) => (&mut reward, inner.to_path_buf()),
            Err(_) => (&mut files, inner.to_path_buf()),
        };
        list.push(TaskFile {
            path,
            content,
            executable: false,
        });
    }
    let hook = hook.replace("reward/test.py", "reward/check.py");
    if !reward
        .iter()
        .any(|file| file.path == Path::new("reward.sh"))
    {
        reward.push(TaskFile {
            path: "reward.sh".into(),
            content: reward_script(&hook).into_bytes(),
            executable: false,
        });
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    reward.sort_by(|a, b| a.path.cmp(&b.path));
    let metadata = row.rest().into_iter();
    Ok(assemble(
        id,
        instruction,
        files,
        reward,
        rubric,
        metadata,
        Format::ClawGymSource,
    ))
}

/// The hook, whose JSON is averaged: an object that is not empty gives the mean of its values, a
/// number itself, anything else 0.
fn reward_script(hook: &str) -> String {
    format!(
        "set -euo pipefail\ncd {WORKSPACE}\nWORKSPACE={WORKSPACE}\nexport WORKSPACE\n\
         found=$( {{\n{hook}\n}} )\n\
         printf '%s' \"$found\" | python3 -I -c '\n\
         import json, sys\n\
         found = json.loads(sys.stdin.read().strip())\n\
         if isinstance(found, dict) and found:\n    print(sum(map(float, found.values())) / len(found))\n\
         elif isinstance(found, (int, float)):\n    print(float(found))\n\
         else:\n    print(0.0)\n'\n"
    )
}
