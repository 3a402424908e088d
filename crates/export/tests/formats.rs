//! What is written of a rollout in each format.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::{fs, path::Path, process::Command};

use common::{rollout, story, story_without_image};
use export::{
    Facts, Rule, Source, atif,
    atif::AtifOptions,
    capture_lines,
    chat::{ChatLine, branches, chat_lines},
    parquet::{Columns, ParquetFile},
    read, report, row_lines,
    verl::verl_lines,
    write_lines,
};
use record::{Call, Rollout};
use serde::Serialize;
use serde_json::Value;
use tree::{CallClass, SELECTION_NAMES, Selection};

fn rule(name: &str) -> Rule {
    Rule::new(Selection::named(name, 64).unwrap(), None)
}

fn source<'a>(rollout: &'a Rollout, calls: &'a [Call], rule: &'a Rule) -> Source<'a> {
    Source::new(rollout, calls, rule, Some(0.5)).unwrap()
}

fn json_lines<T: Serialize>(lines: &[T]) -> Vec<Value> {
    let mut out = Vec::new();
    write_lines(&mut out, lines).unwrap();
    let text = String::from_utf8(out).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn parquet<T: Serialize>(columns: Columns, lines: &[T]) -> Vec<u8> {
    let mut file = ParquetFile::new(Vec::new(), columns, r#"{"format":"test"}"#).unwrap();
    // Two groups of lines: as two rollouts would be.
    let (first, second) = lines.split_at(lines.len() / 2);
    file.write(first).unwrap();
    file.write(second).unwrap();
    file.finish().unwrap()
}

/// The lines of a Parquet file, as JSON without nulls.
fn parquet_lines(bytes: Vec<u8>) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.parquet");
    fs::write(&path, bytes).unwrap();
    let file = fs::File::open(path).unwrap();
    let reader = parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(file)
        .unwrap()
        .build()
        .unwrap();
    let mut writer = arrow_json::LineDelimitedWriter::new(Vec::new());
    for batch in reader {
        writer.write(&batch.unwrap()).unwrap();
    }
    writer.finish().unwrap();
    let text = String::from_utf8(writer.into_inner()).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Nulls and empty lists of optional columns are the same as nothing; `1.0` is `1`.
fn plain(value: &Value) -> Value {
    match value {
        Value::Object(fields) => fields
            .iter()
            .filter(|(_, value)| !value.is_null() && **value != Value::Array(Vec::new()))
            .map(|(name, value)| (name.clone(), plain(value)))
            .collect::<serde_json::Map<_, _>>()
            .into(),
        Value::Array(values) => values.iter().map(plain).collect(),
        Value::Number(number) => number.as_f64().map_or(Value::Null, Value::from),
        other => other.clone(),
    }
}

fn assert_same(json: &[Value], parquet: &[Value]) {
    assert_eq!(json.len(), parquet.len());
    for (json, parquet) in json.iter().zip(parquet) {
        let sorted = |value: &Value| {
            let mut text: Vec<String> = plain(value)
                .as_object()
                .unwrap()
                .iter()
                .map(|(name, value)| format!("{name}: {value}"))
                .collect();
            text.sort();
            text
        };
        assert_eq!(sorted(json), sorted(parquet));
    }
}

#[test]
fn the_story_has_every_class() {
    let (rollout, calls, rule) = (rollout(Some(1.0)), story(), rule("clawgym2"));
    let source = source(&rollout, &calls, &rule);
    let classes: Vec<CallClass> = source.tree.places.iter().map(|place| place.class).collect();
    use CallClass::{Compaction, Main, Side, Subagent};
    assert_eq!(
        classes,
        [
            Main, Main, Main, Subagent, Subagent, Main, Compaction, Main, Main, Side
        ]
    );
    assert_eq!(source.kept.calls, [1, 2, 5, 7, 8]);
}

#[test]
fn every_kept_turn_is_trained_in_one_chat() {
    let (rollout, calls) = (rollout(Some(1.0)), story());
    for name in SELECTION_NAMES {
        let rule = rule(name);
        let source = source(&rollout, &calls, &rule);
        let found = branches(&source);
        let mut trained: Vec<u32> = found.iter().flat_map(|branch| branch.calls()).collect();
        trained.sort_unstable();
        assert_eq!(trained, source.kept.calls, "{name}");
        for turn in found.iter().flat_map(|branch| &branch.turns) {
            let reply = turn
                .trained
                .map(|call| calls[call as usize].reply.as_ref().unwrap());
            assert!(reply.is_none_or(|reply| reply == turn.message), "{name}");
        }
    }
}

#[test]
fn chats_say_who_generated_what() {
    let (rollout, calls, rule) = (rollout(Some(1.0)), story(), rule("clawgym2"));
    let source = source(&rollout, &calls, &rule);
    let lines = json_lines(&chat_lines(&source, true));
    let outline: Vec<String> = lines
        .iter()
        .map(|line| {
            let turns: Vec<String> = line["messages"]
                .as_array()
                .unwrap()
                .iter()
                .map(|message| {
                    format!(
                        "{}:{}",
                        message["role"].as_str().unwrap(),
                        message["weight"]
                    )
                })
                .collect();
            format!("{} {} {}", line["class"], line["calls"], turns.join(" "))
        })
        .collect();
    insta::assert_snapshot!(outline.join("\n"), @r#"
    "main" [1,2,5] system:0 user:0 assistant:1 tool:0 assistant:1 tool:0 user:0 assistant:1
    "main" [7,8] system:0 user:0 assistant:1 tool:0 assistant:1
    "#);
    insta::assert_snapshot!(serde_json::to_string_pretty(&lines[1]).unwrap());
}

#[test]
fn atif_tells_the_story() {
    let (rollout, calls, rule) = (rollout(Some(1.0)), story(), rule("clawgym2"));
    let source = source(&rollout, &calls, &rule);
    let files = atif::trajectory(&source, AtifOptions::default()).unwrap();
    assert_eq!(files.images.len(), 1);
    let mut value = serde_json::to_value(&files.trajectory).unwrap();
    shorten(&mut value);
    insta::assert_snapshot!(serde_json::to_string_pretty(&value).unwrap());
}

/// Lists of numbers as their lengths: ids are those of a toy codec.
fn shorten(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("tool_definitions");
            for (name, value) in fields {
                if matches!(name.as_str(), "completion_token_ids" | "logprobs") {
                    *value = format!("{} numbers", value.as_array().unwrap().len()).into();
                }
                shorten(value);
            }
        }
        Value::Array(values) => values.iter_mut().for_each(shorten),
        _ => {}
    }
}

#[test]
fn atif_without_a_reply_is_nothing() {
    let (rollout, rule) = (rollout(None), rule("clawgym2"));
    let mut calls = story();
    calls.truncate(1);
    let source = source(&rollout, &calls, &rule);
    assert_eq!(atif::trajectory(&source, AtifOptions::default()), None);
}

#[test]
fn parquet_holds_what_json_lines_hold() {
    let (rollout, calls) = (rollout(Some(0.5)), story_without_image());
    let rule = rule("clawgym2+aux");
    let source = source(&rollout, &calls, &rule);
    let rows = row_lines(&source.rows, Facts::of(&source));
    assert!(rows.len() >= 2, "{} rows", rows.len());
    let written = parquet_lines(parquet(Columns::rows(), &rows));
    assert_same(&json_lines(&rows), &written);
    let rows = verl_lines(&source, 0, 0);
    let written = parquet_lines(parquet(Columns::verl(), &rows));
    assert_same(&json_lines(&rows), &written);
    for weights in [true, false] {
        let lines = chat_lines(&source, weights).into_iter();
        let lines: Vec<ChatLine<'_>> = lines.map(ChatLine::for_parquet).collect();
        let written = parquet_lines(parquet(Columns::chat(weights), &lines));
        assert_same(&json_lines(&lines), &written);
    }
}

/// A run's calls out as captures and in again: the same tree, the same tokens trained.
#[test]
fn captures_come_back_as_the_same_tree() {
    let (rollout, calls) = (rollout(Some(1.0)), story());
    for name in SELECTION_NAMES {
        let rule = rule(name);
        let source = source(&rollout, &calls, &rule);
        let mut out = Vec::new();
        write_lines(&mut out, &capture_lines(&source)).unwrap();
        let captured = read(out.as_slice()).unwrap();
        let grown = report(&captured[0], &rule.selection, None).unwrap();
        assert_eq!(grown.report.rollout, rollout.spec.id.as_str());
        assert_eq!(grown.tree.nodes.len(), source.tree.nodes.len(), "{name}");
        for (again, node) in grown.tree.nodes.iter().zip(&source.tree.nodes) {
            assert_eq!(
                (&again.tokens, again.depth),
                (&node.tokens, node.depth),
                "{name}"
            );
        }
        assert_eq!(grown.kept.trained, source.kept.trained, "{name}");
        let tokens = |rows: &tree::Rows| -> Vec<Vec<u32>> {
            rows.rows.iter().map(|row| row.tokens.clone()).collect()
        };
        assert_eq!(tokens(&grown.rows), tokens(&source.rows), "{name}");
    }
}

/// The exports are judged by the programs that they are for: Harbor's validator, pyarrow.
#[test]
fn other_programs_accept_the_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let packages = Command::new("sh")
        .args(["scripts/python-packages.sh", "formats"])
        .current_dir(&root)
        .output()
        .unwrap();
    assert!(
        packages.status.success(),
        "run `make setup-test` first: {}",
        String::from_utf8_lossy(&packages.stderr)
    );
    let folder = tempfile::tempdir().unwrap();
    let (rollout, calls) = (rollout(Some(0.25)), story());
    for (name, prompt_ids) in [("clawgym2", false), ("all", true)] {
        let rule = rule(name);
        let source = source(&rollout, &calls, &rule);
        let files = atif::trajectory(&source, AtifOptions { prompt_ids }).unwrap();
        for image in files.images {
            let path = folder.path().join(image.path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, image.bytes).unwrap();
        }
        let text = serde_json::to_vec(&files.trajectory).unwrap();
        fs::write(folder.path().join(format!("{name}.json")), text).unwrap();
    }
    let calls = story_without_image();
    let rule = rule("clawgym2+aux");
    let source = source(&rollout, &calls, &rule);
    let write = |format: &str, columns: Columns, lines: &[Value]| {
        let note = serde_json::json!({"format": format, "selection": rule.name});
        let mut file = ParquetFile::new(Vec::new(), columns, &note.to_string()).unwrap();
        file.write(lines).unwrap();
        let bytes = file.finish().unwrap();
        fs::write(folder.path().join(format!("{format}.parquet")), bytes).unwrap();
    };
    let rows = json_lines(&row_lines(&source.rows, Facts::of(&source)));
    write("rows", Columns::rows(), &rows);
    write(
        "verl",
        Columns::verl(),
        &json_lines(&verl_lines(&source, 0, 0)),
    );
    let chats = |weights| {
        let lines = chat_lines(&source, weights).into_iter();
        json_lines(&lines.map(ChatLine::for_parquet).collect::<Vec<_>>())
    };
    write("sft", Columns::chat(true), &chats(true));
    write("messages", Columns::chat(false), &chats(false));
    let judged = Command::new("python3")
        .arg("scripts/check-exports.py")
        .arg(folder.path())
        .env(
            "PYTHONPATH",
            String::from_utf8(packages.stdout).unwrap().trim(),
        )
        .current_dir(&root)
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&judged.stdout);
    let wrong = String::from_utf8_lossy(&judged.stderr);
    assert!(judged.status.success(), "{told}\n{wrong}");
    let trained = source.kept.tokens_trained;
    let rows = source.rows.rows.len();
    for line in [
        "ok all.json: ".to_owned(),
        "ok clawgym2.json: ".to_owned(),
        format!("ok rows.parquet: rows: {rows} rows, {trained} trained"),
        format!("ok verl.parquet: verl: {rows} rows, {trained} trained"),
        format!(
            "ok sft.parquet: sft: {} rows, {} trained",
            chats(true).len(),
            source.kept.calls.len()
        ),
        format!(
            "ok messages.parquet: messages: {} rows, 0 trained",
            chats(false).len()
        ),
    ] {
        assert!(told.contains(&line), "{line} is missing in\n{told}");
    }
}
