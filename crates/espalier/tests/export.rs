//! `espalier export` and the drawings as a person meets them: what is written, what is left out, what
//! a full disk leaves.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "../../export/tests/common/mod.rs"]
mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use ledger::Ledger;
use record::{Disposition, Fault, GroupId, RolloutId};
use serde_json::{Value, json};

/// A run with rollouts of every fate.
fn run(folder: &Path) -> PathBuf {
    run_with(folder, true)
}

/// `silent`: with a rollout that has a reward but no call. It has a vote in its group, and no row.
fn run_with(folder: &Path, silent: bool) -> PathBuf {
    let dir = folder.join("run");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let ledger = Ledger::create(&dir).unwrap();
        let discard = Disposition::Discard {
            fault: Fault::EngineFailed,
            reason: "gone".to_owned(),
        };
        for (id, split, reward, calls, disposition) in [
            ("a-k00", "train", Some(1.0), 10, Some(Disposition::Train)),
            ("a-k01", "train", Some(0.0), 3, Some(Disposition::Train)),
            ("a-k02", "train", None, 2, Some(discard)),
            ("a-k03", "train", None, 1, None),
            ("a-k04", "train", Some(0.5), 0, Some(Disposition::Train)),
            (
                "eval-a-k00",
                "eval-after",
                Some(1.0),
                10,
                Some(Disposition::Train),
            ),
        ] {
            if calls == 0 && !silent {
                continue;
            }
            let id = RolloutId::new(id).unwrap();
            let mut rollout = common::rollout(reward);
            rollout.spec.id = id.clone();
            rollout.spec.group = GroupId::new(split).unwrap();
            rollout
                .spec
                .labels
                .insert("split".to_owned(), split.to_owned());
            rollout.disposition = disposition;
            ledger.put_rollout(rollout).await.unwrap();
            for mut call in common::story_without_image().into_iter().take(calls) {
                call.id.rollout = id.clone();
                ledger.put_call(call).await.unwrap();
            }
        }
        ledger.close().await.unwrap();
    });
    dir
}

fn espalier(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_espalier"))
        .args(arguments)
        .current_dir(folder)
        .env_remove("ESPALIER_LOG")
        .output()
        .unwrap()
}

/// What a command prints when it works.
fn printed(folder: &Path, arguments: &[&str]) -> String {
    let output = espalier(folder, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

fn export(folder: &Path, format: &str, out: &str, more: &[&str]) -> String {
    let fixed = ["export", "run", "--format", format, "--out", out];
    printed(folder, &[&fixed, more].concat())
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn what_is_written_and_what_is_not_is_told() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    run(folder);
    let told: String = [
        export(folder, "rows", "rows.jsonl", &[]),
        export(
            folder,
            "rows",
            "few.jsonl",
            &[
                "--reward-min",
                "0.5",
                "--selection",
                "all",
                "--tokens-max",
                "60",
            ],
        ),
        export(folder, "captures", "captures.jsonl", &[]),
        export(folder, "atif", "atif", &[]),
        export(folder, "sft", "eval.jsonl", &["--split", "eval-after"]),
    ]
    .concat();
    insta::assert_snapshot!(told);
    let rows = lines(&folder.join("rows.jsonl"));
    assert_eq!(rows.len(), 3);
    for row in &rows {
        assert_eq!(
            (&row["selection"], &row["harness"]),
            (&json!("clawgym2"), &json!("react"))
        );
    }
    // One vote per rollout: rewards 1, 0 and 0.5 (which has no calls) are the group.
    assert!(
        (rows[0]["advantage"].as_f64().unwrap() - 1.0).abs() < 1e-5,
        "{}",
        rows[0]["advantage"]
    );
    assert_eq!(rows[0]["advantage"], rows[1]["advantage"]);
    let names: Vec<String> = fs::read_dir(folder.join("atif"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    // Records hold the discarded one too.
    assert_eq!(names.len(), 3, "{names:?}");
    let summary = export(folder, "rows", "rows.jsonl", &["--json"]);
    let summary: Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(
        (&summary["written"], &summary["lines"]),
        (&json!(2), &json!(3))
    );
}

#[test]
fn captures_of_a_run_are_read_by_tree() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    run(folder);
    export(folder, "captures", "captures.jsonl", &[]);
    printed(
        folder,
        &[
            "tree",
            "captures.jsonl",
            "--rows",
            "again.jsonl",
            "--svg",
            "trees",
        ],
    );
    export(folder, "rows", "rows.jsonl", &[]);
    let (rows, again) = (
        lines(&folder.join("rows.jsonl")),
        lines(&folder.join("again.jsonl")),
    );
    // Those of the discarded rollout come too: captures are a record.
    let again: Vec<&Value> = again
        .iter()
        .filter(|row| rows.iter().any(|other| other["rollout"] == row["rollout"]))
        .collect();
    assert_eq!(rows.len(), again.len());
    for (row, again) in rows.iter().zip(again) {
        for field in [
            "rollout",
            "row",
            "rows",
            "rollout_terms",
            "tokens",
            "prompt_tokens",
            "loss_mask",
            "logprobs",
            "calls",
        ] {
            assert_eq!(row[field], again[field], "{field}");
        }
    }
    let drawn = fs::read_to_string(folder.join("trees/0000-a-k00.svg")).unwrap();
    assert!(
        drawn.starts_with("<svg") && drawn.contains("dead leaf"),
        "{drawn}"
    );
    printed(folder, &["inspect", "run", "a-k00", "--svg", "tree.svg"]);
    let drawn = fs::read_to_string(folder.join("tree.svg")).unwrap();
    assert!(
        drawn.contains("subagent of 2") && drawn.contains("reward 1"),
        "{drawn}"
    );
}

#[test]
fn the_same_run_gives_the_same_bytes() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    run(folder);
    for (format, more) in [
        ("rows", &[][..]),
        ("rows", &["--parquet"]),
        ("verl", &[]),
        ("sft", &["--parquet"]),
        ("messages", &["--parquet"]),
        ("messages", &[]),
        ("captures", &[]),
    ] {
        export(folder, format, "first", more);
        export(folder, format, "second", more);
        let [first, second] = ["first", "second"].map(|name| fs::read(folder.join(name)).unwrap());
        assert!(!first.is_empty() && first == second, "{format} {more:?}");
    }
}

#[test]
fn what_cannot_be_read_or_asked_for_leaves_the_old_file() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    run(folder);
    fs::write(folder.join("old.jsonl"), "old").unwrap();
    let refused = |arguments: &[&str], code: i32, words: &str| {
        let output = espalier(folder, arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(error.contains(words), "{error}");
        assert_eq!(fs::read_to_string(folder.join("old.jsonl")).unwrap(), "old");
    };
    let to = ["--format", "rows", "--out", "old.jsonl"];
    refused(
        &[&["export", "nosuch"], &to[..]].concat(),
        1,
        "nosuch/ledger.sqlite",
    );
    refused(
        &[
            "export",
            "run",
            "--format",
            "atif",
            "--out",
            "old.jsonl",
            "--parquet",
        ],
        2,
        "--parquet does not go with --format atif",
    );
    refused(
        &["export", "run", "--format", "rows", "--out", "run"],
        2,
        "run is a folder",
    );
    let ledger = folder.join("run/ledger.sqlite");
    let mut bytes = fs::read(&ledger).unwrap();
    bytes.truncate(5000);
    bytes[..16].fill(b'x');
    fs::write(&ledger, bytes).unwrap();
    refused(&[&["export", "run"], &to[..]].concat(), 1, "error: run run");
    let parts = fs::read_dir(folder).unwrap().filter(|entry| {
        let name = entry.as_ref().unwrap().file_name();
        name.to_string_lossy().ends_with(".part")
    });
    assert_eq!(parts.count(), 0, "something half-written is left");
}

#[test]
fn a_full_disk_leaves_the_old_file() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    run(folder);
    fs::create_dir(folder.join("disk")).unwrap();
    for (format, more) in [("captures", ""), ("verl", ""), ("rows", "--parquet")] {
        let script = format!(
            "set -e; mount -t tmpfs -o size=8k none disk; echo old > disk/file; set +e
            \"$0\" export run --format {format} {more} --out disk/file; echo \"exit $?\"
            cat disk/file; ls -A disk"
        );
        let output = Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", &script])
            .arg(env!("CARGO_BIN_EXE_espalier"))
            .current_dir(folder)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "exit 1\nold\nfile\n",
            "{format}: {error}"
        );
        assert!(error.contains("disk/file could not be written"), "{error}");
        assert!(error.contains("No space left on device"), "{error}");
    }
}

/// veRL's own classes read the export: data set, agent loop output, advantages, SFT data set.
#[test]
#[ignore = "long: installs veRL and torch, 6 GB"]
fn verl_reads_its_rows() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    // veRL forms groups of what it is given, so the group is whole here.
    run_with(folder, false);
    export(folder, "verl", "verl.parquet", &[]);
    export(folder, "sft", "sft.parquet", &["--parquet"]);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let packages = Command::new("sh")
        .args(["scripts/python-packages.sh", "verl"])
        .current_dir(&root)
        .output()
        .unwrap();
    assert!(
        packages.status.success(),
        "{}",
        String::from_utf8_lossy(&packages.stderr)
    );
    let output = Command::new("python3")
        .arg("scripts/check-verl.py")
        .args([folder.as_os_str(), root.join("policy").as_os_str()])
        .env(
            "PYTHONPATH",
            String::from_utf8(packages.stdout).unwrap().trim(),
        )
        .current_dir(&root)
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{told}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(told.contains("verl: 3 rows of 2 rollouts"), "{told}");
}
