//! One Markdown file per task, as PinchBench and QwenClawBench have it: YAML front matter, then
//! sections. A file with a `subcategory`, or beside QwenClawBench's other keys, is scored by that
//! bench's gate; all others as PinchBench scores them.
//!
//! Sections: *Prompt*, *Expected Behavior*, *Grading Criteria*, *Automated Checks* (a block of
//! Python that defines `grade(transcript, workspace_path)`), *LLM Judge Rubric* (headings with
//! `(Weight: N%)`). Rules of scoring: the code's score is the mean of the numbers that `grade`
//! returns; hybrid tasks mix both scores, see [`crate::Mix`].
//!
//! The verifier is our own small program around the block; it runs isolated (`python3 -I`) in a
//! folder outside of the workspace, because these graders list the workspace.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    Contract, Criterion, Environment, Format, Grading, Mix, Payload, Rubric, Scale, Task,
    TaskError, TaskFile, Verifier, digest,
    fields::{Fields, wrong},
    tree::{self, stays_inside},
};

const WORKSPACE: &str = "/root/.openclaw/workspace";
const HOME: &str = "/root";
/// Where the grader goes: outside of the workspace, which it lists.
const GRADER: &str = "/root/.grader";
/// Longest run of a grader. The benches set none; theirs run in seconds.
const TIMEOUT_S: u64 = 120;
/// The gate of QwenClawBench.
const QWEN_CODE_MIN: f64 = 0.75;

/// Runs the block and prints the criteria, then their mean. What `grade` returns that is no
/// object counts as an empty one, as in the benches; an exception ends with a traceback and a
/// non-zero exit, which is a fault and not a score.
const RUNNER: &str = r#"import json, sys
from pathlib import Path

here = Path(__file__).resolve().parent
code = (here / "grade.py").read_text(encoding="utf-8")
transcript = json.loads((here / "transcript.json").read_text(encoding="utf-8"))
space = {}
exec(compile(code, "grade.py", "exec"), space)
stdout, sys.stdout = sys.stdout, sys.stderr
found = space["grade"](transcript, sys.argv[1])
sys.stdout = stdout
found = found if isinstance(found, dict) else {}
numbers = {str(key): float(value) for key, value in found.items() if isinstance(value, (int, float))}
print(json.dumps(numbers))
print(sum(numbers.values()) / len(numbers) if numbers else 0.0)
"#;

/// Whether a file looks like such a task: front matter with an `id` and a section *Prompt*.
pub(crate) fn is_task(file: &Path) -> bool {
    file.extension().is_some_and(|end| end == "md")
        && tree::read_text(file)
            .is_ok_and(|text| text.starts_with("---\n") && text.contains("\ngrading_type:"))
}

/// A section of the file: its heading's text, its first line (from 1) and its body.
struct Section<'a> {
    title: &'a str,
    body: &'a str,
}

/// Splits at headings of level two outside of code blocks.
fn sections(text: &str) -> Vec<Section<'_>> {
    let mut starts: Vec<(usize, usize, &str)> = Vec::new();
    let (mut at, mut fenced) = (0, false);
    for line in text.split_inclusive('\n') {
        let bare = line.trim_end();
        if bare.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced && let Some(title) = bare.strip_prefix("## ") {
            starts.push((at, at + line.len(), title.trim()));
        }
        at += line.len();
    }
    let ends = starts
        .iter()
        .skip(1)
        .map(|(start, ..)| *start)
        .chain([text.len()])
        .collect::<Vec<_>>();
    starts
        .iter()
        .zip(ends)
        .map(|((_, body, title), end)| Section {
            title,
            body: text[*body..end].trim_matches('\n'),
        })
        .collect()
}

fn python_block(body: &str) -> Option<&str> {
    let start = body.find("```python")? + "```python".len();
    let end = body[start..].find("\n```")?;
    Some(body[start..start + end].trim())
}

/// Reads one file. Its assets are looked for beside it and beside its folder.
pub(crate) fn read_file(file: &Path) -> Result<Task, TaskError> {
    let text = tree::read_text(file)?;
    let missing = |what: &str| {
        wrong(
            file,
            Some(1),
            what,
            "front matter between two lines ---",
            "nothing",
        )
    };
    let inner = text
        .strip_prefix("---\n")
        .ok_or_else(|| missing("front matter"))?;
    let end = inner
        .find("\n---\n")
        .ok_or_else(|| missing("front matter"))?;
    let mut front = Fields::yaml(&inner[..=end], file, 2)?;
    let body = &inner[end + 5..];

    let id = front.id("id")?;
    let name = front.text_or("name", "")?;
    let category = front.text("category")?;
    let kind = front.text("grading_type")?;
    let timeout = front.number("timeout_seconds")?;
    let qwen = front.has("subcategory") || front.has("input_modality");
    let mut weights = front.object("grading_weights")?;
    let (code, judge) = match &mut weights {
        Some(weights) => (
            weights.number("automated")?.unwrap_or(0.5),
            weights.number("llm_judge")?.unwrap_or(0.5),
        ),
        None => (0.5, 0.5),
    };
    if code < 0.0 || judge < 0.0 {
        let found = Value::from(vec![code, judge]);
        return Err(front.wrong("grading_weights", "weights that are not negative", &found));
    }
    let mut refusals = Vec::new();
    let files = workspace_files(file, &mut front, &mut refusals)?;

    let parts = sections(body);
    let section = |name: &str| {
        parts
            .iter()
            .find(|part| part.title.eq_ignore_ascii_case(name))
            .map(|part| part.body)
    };
    let need = |name: &str| {
        section(name)
            .filter(|body| !body.trim().is_empty())
            .ok_or_else(|| {
                wrong(
                    file,
                    None,
                    &format!("## {name}"),
                    "a section with text",
                    "nothing",
                )
            })
    };
    let prompt = need("Prompt")?;
    // Some files end a section with a rule; it is not part of what the person says.
    let prompt = prompt
        .trim_end()
        .strip_suffix("---")
        .unwrap_or(prompt)
        .trim();
    let expected = section("Expected Behavior")
        .unwrap_or_default()
        .trim()
        .to_owned();
    let source = || {
        python_block(need("Automated Checks")?)
            .filter(|code| code.contains("def grade("))
            .ok_or_else(|| {
                let expected = "a block ```python that defines grade(transcript, workspace_path)";
                wrong(file, None, "## Automated Checks", expected, "none")
            })
    };
    let rubric = || -> Result<Rubric, TaskError> {
        let (title, text) = match section("LLM Judge Rubric") {
            Some(text) if !text.trim().is_empty() => ("## LLM Judge Rubric", text),
            _ => ("## Grading Criteria", need("Grading Criteria")?),
        };
        rubric_of(text, &expected).map_err(|(want, found)| wrong(file, None, title, want, found))
    };
    let mix = if qwen {
        Mix::Gated {
            code,
            judge,
            code_min: QWEN_CODE_MIN,
        }
    } else {
        Mix::Weighted { code, judge }
    };
    let (source, mix, rubric) = match kind.as_str() {
        "automated" => (Some(source()?), Mix::Code, None),
        "llm_judge" => (None, Mix::Judge, Some(rubric()?)),
        "hybrid" => (Some(source()?), mix, Some(rubric()?)),
        other => {
            let expected = "automated, llm_judge or hybrid";
            return Err(front.wrong("grading_type", expected, &other.into()));
        }
    };
    let mut metadata: BTreeMap<String, Value> = front.rest().into_iter().collect();
    metadata.insert("name".to_owned(), name.into());
    let mut task = Task {
        id,
        family: category,
        instruction: prompt.to_owned(),
        files,
        workspace: PathBuf::from(WORKSPACE),
        home: PathBuf::from(HOME),
        verifier: verifier(source),
        solution: Vec::new(),
        metadata,
        format: if qwen {
            Format::QwenClawBench
        } else {
            Format::PinchBench
        },
        grading: Grading {
            mix,
            rubric,
            pass_at: 1.0,
            audit: None,
        },
        environment: Environment {
            refusals,
            ..Environment::default()
        },
        digest: String::new(),
    };
    task.environment.needs.agent_timeout_s = timeout;
    task.digest = digest::digest(&task);
    Ok(task)
}

fn verifier(source: Option<&str>) -> Verifier {
    let file = |path: &str, text: &str| TaskFile {
        path: path.into(),
        content: text.as_bytes().to_vec(),
        executable: false,
    };
    let files = source.map_or_else(Vec::new, |source| {
        vec![file("grade.py", source), file("run.py", RUNNER)]
    });
    let words = ["python3", "-I", "/root/.grader/run.py", "{workspace}"];
    Verifier {
        argv: if files.is_empty() {
            Vec::new()
        } else {
            words.map(str::to_owned).to_vec()
        },
        contract: if files.is_empty() {
            Contract::None
        } else {
            Contract::LastLine
        },
        files,
        folder: PathBuf::from(GRADER),
        cwd: Some(PathBuf::from("/")),
        timeout_s: TIMEOUT_S,
        payload: Payload::Transcript,
        env: BTreeMap::new(),
    }
}

/// Initial files: written in the front matter, or copied from the bench's assets.
fn workspace_files(
    file: &Path,
    front: &mut Fields,
    refusals: &mut Vec<String>,
) -> Result<Vec<TaskFile>, TaskError> {
    let mut files = Vec::new();
    for mut item in front.objects("workspace_files")? {
        let (key, path, content) = if item.has("content") {
            let path = item.text("path").or_else(|_| item.text("dest"))?;
            let content = item.text_or("content", "")?.into_bytes();
            ("path", path, Some(content))
        } else {
            let source = item.text("source")?;
            let dest = item.text("dest")?;
            if !stays_inside(Path::new(&source)) {
                return Err(item.wrong("source", "a path inside the assets", &source.into()));
            }
            let content = asset(file, &source)?;
            if content.is_none() {
                refusals.push(format!(
                    "the asset {source} of {} is not in an assets folder beside it; fetch the whole set",
                    file.display()
                ));
            }
            ("dest", dest, content)
        };
        if !stays_inside(Path::new(&path)) {
            return Err(item.wrong(key, "a path inside the workspace", &path.into()));
        }
        if let Some(content) = content {
            files.push(TaskFile {
                path: path.into(),
                content,
                executable: false,
            });
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

/// An asset: `assets/TASK/SOURCE` (QwenClawBench) or `assets/SOURCE` (PinchBench), beside the
/// task's file or beside its folder.
fn asset(file: &Path, source: &str) -> Result<Option<Vec<u8>>, TaskError> {
    let stem = file.file_stem().unwrap_or_default();
    let folder = file.parent().unwrap_or(Path::new("."));
    for base in [folder.join("../assets"), folder.join("assets")] {
        for place in [base.join(stem).join(source), base.join(source)] {
            if place.is_file() {
                let size =
                    std::fs::metadata(&place).map_err(|error| tree::refused(&place, &error))?;
                tree::within(&place, size.len())?;
                return std::fs::read(&place)
                    .map(Some)
                    .map_err(|error| tree::refused(&place, &error));
            }
        }
    }
    Ok(None)
}

/// Criteria from headings with a weight; a checklist, all of equal weight, where there are none.
fn rubric_of(text: &str, expected: &str) -> Result<Rubric, (&'static str, String)> {
    let mut criteria: Vec<Criterion> = Vec::new();
    let mut open = false;
    for line in text.lines() {
        let heading = line.trim_start().strip_prefix("###");
        if let Some(title) = heading {
            let title = title.trim_start_matches('#').trim();
            open = false;
            if let Some((name, weight)) = weight_of(title)? {
                open = true;
                criteria.push(Criterion {
                    name,
                    text: String::new(),
                    weight,
                    file: None,
                });
            }
        } else if open && let Some(last) = criteria.last_mut() {
            last.text.push_str(line);
            last.text.push('\n');
        }
    }
    if criteria.is_empty() {
        for line in text.lines() {
            let line = line.trim_start();
            let item = ["- [ ] ", "- [x] ", "- "]
                .iter()
                .find_map(|mark| line.strip_prefix(mark));
            if let Some(item) = item {
                let name: String = item.chars().take(80).collect();
                criteria.push(Criterion {
                    name,
                    text: item.to_owned(),
                    weight: 1.0,
                    file: None,
                });
            }
        }
    }
    for criterion in &mut criteria {
        criterion.text = criterion.text.trim().to_owned();
    }
    if criteria.is_empty() {
        return Err((
            "headings ### with (Weight: N%), or a list",
            "neither".to_owned(),
        ));
    }
    if criteria
        .iter()
        .map(|criterion| criterion.weight)
        .sum::<f64>()
        <= 0.0
    {
        return Err(("a weight above 0", "only 0".to_owned()));
    }
    Ok(Rubric {
        criteria,
        scale: Scale::Quarters,
        one_by_one: false,
        expected: expected.to_owned(),
    })
}

/// Name and weight of a heading such as `Criterion 1: Clarity (Weight: 30%)`.
fn weight_of(title: &str) -> Result<Option<(String, f64)>, (&'static str, String)> {
    let Some((name, rest)) = title.rsplit_once("(Weight:") else {
        return Ok(None);
    };
    let number = rest
        .trim_end()
        .trim_end_matches(')')
        .trim()
        .trim_end_matches('%')
        .trim();
    match number.parse::<f64>() {
        Ok(weight) if weight.is_finite() && weight >= 0.0 => {
            Ok(Some((name.trim().to_owned(), weight / 100.0)))
        }
        _ => Err(("a weight such as (Weight: 30%)", format!("{title:?}"))),
    }
}
