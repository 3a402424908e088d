//! The graders of the field, as they are, in Python, against what we make of them: the same
//! score on synthetic workspaces. Skipped without the real tasks or without Python.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests are not in a test function"
)]

mod fake;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use fake::FakeSandbox;
use sandbox::{Limits, Sandbox as _};
use serde_json::{Value, json};
use task::{Task, load_dir};
use verify::{Transcript, VerifyError, prepare, spec, verify_with};

/// Workspaces per task.
const VARIANTS: usize = 8;

/// What the benches do: run the block, call `grade`, average what is a number.
const REFERENCE: &str = r#"
import json, sys
for line in sys.stdin:
    job = json.loads(line)
    space = {}
    try:
        exec(job["code"], space)
        scores = space["grade"](job["transcript"], job["workspace"])
        scores = scores if isinstance(scores, dict) else {}
        values = [float(v) for v in scores.values() if isinstance(v, (int, float))]
        print(json.dumps({"score": sum(values) / len(values) if values else 0.0}))
    except Exception as error:
        print(json.dumps({"error": type(error).__name__}))
"#;

fn real_tasks() -> Vec<Task> {
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/tasks");
    ["pinchbench", "qwenclawbench"]
        .iter()
        .map(|name| base.join(name))
        .filter(|folder| folder.is_dir())
        .flat_map(|folder| load_dir(&folder).unwrap())
        .collect()
}

/// Names in quotes with a known end, as the grader has them.
fn names(code: &str) -> Vec<String> {
    let ends = [
        ".md", ".txt", ".json", ".py", ".csv", ".yaml", ".ics", ".sh", ".log", ".jsonl",
    ];
    let mut found: Vec<String> = code
        .split(['"', '\''])
        .filter(|word| ends.iter().any(|end| word.ends_with(end)))
        .filter(|word| {
            word.chars()
                .all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c))
        })
        .filter(|word| !word.starts_with(['/', '.']) && !word.contains(".."))
        .map(str::to_owned)
        .collect();
    found.sort();
    found.dedup();
    found
}

/// What is written into a file of a synthetic workspace.
fn content(task: &Task, name: &str, variant: usize) -> String {
    let words = task
        .grading
        .rubric
        .as_ref()
        .map_or("", |rubric| &rubric.expected);
    match (
        variant % 5,
        Path::new(name).extension().and_then(|end| end.to_str()),
    ) {
        (0, _) => String::new(),
        (1, _) => "# Title\n\n- one\n- two 12.5%\n\n```json\n{}\n```\n".to_owned(),
        (2, Some("json")) => json!({"a": 1, "items": [1, 2, {"b": "c"}]}).to_string(),
        (3, Some("py")) => {
            "import json\nimport requests\nprint(json.load(open('config.json')))\n".to_owned()
        }
        (4, _) => format!("{}\n{words}", task.instruction),
        (_, _) => words.to_owned(),
    }
}

#[tokio::test]
async fn scores_are_those_of_the_benches_own_graders() {
    let tasks = real_tasks();
    if tasks.is_empty() || Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: the real tasks or python3 are not there");
        return;
    }
    let mut jobs = String::new();
    let mut worlds: Vec<(String, FakeSandbox, Result<f64, VerifyError>)> = Vec::new();
    for task in &tasks {
        let Some(code) = task
            .verifier
            .files
            .iter()
            .find(|file| file.path == Path::new("grade.py"))
        else {
            continue;
        };
        let code = String::from_utf8(code.content.clone()).unwrap();
        let names = names(&code);
        let mut plain = task.clone();
        plain.environment.refusals.clear();
        plain.grading.mix = task::Mix::Code;
        for variant in 0..VARIANTS {
            let sandbox = FakeSandbox::new(&spec(&plain, "t".into(), Limits::default()));
            prepare(&plain, &sandbox).await.unwrap();
            for (at, name) in names.iter().enumerate() {
                // Some files are there, some are not, from variant to variant.
                if variant > 0 && (at + variant) % 3 != 0 {
                    let place: PathBuf = sandbox.real(&plain.workspace).join(name);
                    if fs::create_dir_all(place.parent().unwrap()).is_ok() && !place.is_dir() {
                        fs::write(place, content(&plain, name, variant)).unwrap();
                    }
                }
            }
            let said = format!("Hello, I'm ready! {}", content(&plain, "a.md", variant));
            let transcript = Transcript {
                events: vec![
                    json!({"type": "message", "message": {"role": "user", "content": [{"type": "text", "text": plain.instruction}]}}),
                    json!({"type": "message", "message": {"role": "assistant", "content": [
                        {"type": "text", "text": said},
                        {"type": "toolCall", "id": "1", "name": "read_file", "arguments": {"path": "config.json"}, "params": {"files": ["config.json"]}}]}}),
                ],
                last_words: said,
            };
            let job = json!({"code": code, "transcript": transcript.events, "workspace": sandbox.real(&plain.workspace)});
            jobs.push_str(&format!("{job}\n"));
            let told = verify::Told {
                transcript: Some(&transcript),
                panel: None,
                audit: None,
            };
            let ours = verify_with(&plain, &sandbox, told)
                .await
                .map(|verdict| verdict.reward);
            worlds.push((format!("{} variant {variant}", task.id), sandbox, ours));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("jobs");
    fs::write(&input, jobs).unwrap();
    let output = Command::new("python3")
        .args(["-c", REFERENCE])
        .stdin(fs::File::open(&input).unwrap())
        .output()
        .unwrap();
    let lines: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), worlds.len());
    let (mut scored, mut broken, mut nonzero) = (0, 0, 0);
    for ((name, sandbox, ours), reference) in worlds.into_iter().zip(&lines) {
        match (&ours, reference["score"].as_f64()) {
            (Ok(ours), Some(theirs)) => {
                assert!(
                    (ours - theirs).abs() < 1e-12,
                    "{name}: {ours} is not {theirs}"
                );
                scored += 1;
                nonzero += usize::from(theirs > 0.0);
            }
            // An exception, or a mean outside of [0, 1]: never a score with us.
            (Err(VerifyError::Contract { .. }), theirs) => {
                assert!(
                    theirs.is_none_or(|score| !(0.0..=1.0).contains(&score)),
                    "{name}: {ours:?} {reference}"
                );
                broken += 1;
            }
            other => panic!("{name}: {other:?}"),
        }
        Box::new(sandbox).destroy().await;
    }
    println!(
        "{scored} workspaces scored alike ({nonzero} above 0), {broken} on which the grader itself broke"
    );
    assert!(scored >= 200 && nonzero >= 50, "{scored} {nonzero}");
}
