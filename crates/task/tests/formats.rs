//! Formats in and out: what is written comes back; what is wrong is named.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests are not in a test function"
)]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use proptest::prelude::*;
use record::TaskId;
use task::{
    Contract, Environment, Format, Grading, Payload, Split, Step, Task, TaskError, TaskFile,
    Verifier, chores, digest, load, load_dir, write_dir,
};
use tempfile::tempdir;

fn shared() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/tasks/clawgym");
    if folder.is_dir() {
        return Some(folder);
    }
    println!("skipped: {} is not there", folder.display());
    None
}

/// The error's text without the temporary folder.
fn complaint(folder: &Path, error: &TaskError) -> String {
    let root = folder.to_string_lossy().into_owned();
    error.to_string().replace(&root, "")
}

#[test]
fn chores_survive_writing_and_reading() {
    let folder = tempdir().unwrap();
    let tasks = chores::generate(Split::HeldOut, 2, 52);
    for task in &tasks {
        write_dir(task, &folder.path().join(task.id.as_str())).unwrap();
    }
    for (task, back) in tasks.iter().zip(load_dir(folder.path()).unwrap()) {
        let mut expected = task.clone();
        expected.files.sort_by(|a, b| a.path.cmp(&b.path));
        expected.digest = digest(&expected);
        assert_eq!(expected, back);
    }
}

fn file() -> impl Strategy<Value = TaskFile> {
    (
        "[a-z]{1,6}(/[a-z ]{1,6}x){0,2}\\.[a-z]",
        any::<Vec<u8>>(),
        any::<bool>(),
    )
        .prop_map(|(path, content, executable)| TaskFile {
            path: path.into(),
            content,
            executable,
        })
}

fn files(least: usize) -> impl Strategy<Value = Vec<TaskFile>> {
    prop::collection::vec(file(), least..4).prop_map(|files| {
        let map: BTreeMap<_, _> = files
            .into_iter()
            .map(|file| (file.path.clone(), file))
            .collect();
        map.into_values().collect()
    })
}

fn text() -> impl Strategy<Value = String> {
    any::<String>()
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        text().prop_map(Step::Bash),
        "[a-z]{1,9}".prop_map(|path| Step::Read(path.into())),
        ("[a-z]{1,9}", text()).prop_map(|(path, text)| Step::Write(path.into(), text)),
        ("[a-z]{1,9}", text(), text()).prop_map(|(path, old, new)| Step::Edit(
            path.into(),
            old,
            new
        )),
        text().prop_map(Step::Say),
    ]
}

fn json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        (-1e9..1e9).prop_map(|number: f64| number.into()),
        text().prop_map(Into::into),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Into::into),
            prop::collection::btree_map(text(), inner, 0..3)
                .prop_map(|map| map.into_iter().collect::<serde_json::Map<_, _>>().into()),
        ]
    })
}

prop_compose! {
    fn task()(
        instruction in text().prop_filter("has words", |text| !text.trim().is_empty()),
        family in text(),
        files in files(0),
        verify in files(1),
        cwd in prop::option::of("/[a-z]{1,9}"),
        argv in prop::collection::vec(text(), 1..4),
        timeout_s in 1_u64..3600,
        zero in any::<bool>(),
        solution in prop::collection::vec(step(), 0..4),
        metadata in prop::collection::btree_map(text(), json(), 0..3),
    ) -> Task {
        let contract = if zero { Contract::LastLineOrZero } else { Contract::LastLine };
        let mut task = Task {
            id: TaskId::new("any").unwrap(),
            family,
            instruction,
            files,
            workspace: "/work".into(),
            home: "/home/x".into(),
            verifier: Verifier {
                files: verify,
                folder: "check".into(),
                argv,
                cwd: cwd.map(Into::into),
                timeout_s,
                contract,
                payload: Payload::default(),
                env: BTreeMap::new(),
            },
            solution,
            metadata,
            format: Format::default(),
            grading: Grading::default(),
            environment: Environment::default(),
            digest: String::new(),
        };
        task.digest = digest(&task);
        task
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_task_survives_writing_and_reading(task in task()) {
        let folder = tempdir().unwrap();
        // A file may not also be a folder: such trees cannot be written at all.
        if write_dir(&task, folder.path()).is_ok() {
            prop_assert_eq!(load_dir(folder.path()).unwrap(), vec![task]);
        }
    }

    #[test]
    fn the_digest_tells_tasks_apart(one in task(), other in task()) {
        let same = Task { digest: String::new(), ..one.clone() } == Task { digest: String::new(), ..other.clone() };
        prop_assert_eq!(one.digest == other.digest, same);
    }
}

#[test]
fn what_toml_cannot_say_is_refused_when_writing() {
    let folder = tempdir().unwrap();
    let mut task = chores::generate(Split::Train, 1, 1).remove(0);
    task.metadata.insert("gone".into(), serde_json::Value::Null);
    let error = write_dir(&task, &folder.path().join("a")).unwrap_err();
    insta::assert_snapshot!(error, @r#"task chores-train-0000-folder cannot be written: metadata.gone: TOML has no null; leave the key out"#);
    task.metadata.clear();
    task.files.push(TaskFile {
        path: "../x".into(),
        content: Vec::new(),
        executable: false,
    });
    let error = write_dir(&task, &folder.path().join("b")).unwrap_err();
    insta::assert_snapshot!(error, @r#"task chores-train-0000-folder cannot be written: "../x" is not inside its folder"#);
}

const GOOD: &str =
    "format = 1\nid = \"a\"\nfamily = \"f\"\n\n[verifier]\nargv = [\"sh\", \".verify/check.sh\"]\n";

/// Complaint about a set with one good task and one whose `task.toml` was changed.
fn spoiled(old: &str, new: &str) -> String {
    let folder = tempdir().unwrap();
    for (name, text) in [("good", GOOD.to_owned()), ("other", GOOD.replace(old, new))] {
        let place = folder.path().join(name);
        fs::create_dir_all(place.join("verify")).unwrap();
        fs::write(place.join("verify/check.sh"), "echo 0\n").unwrap();
        fs::write(place.join("instruction.md"), "do\n").unwrap();
        fs::write(place.join("task.toml"), text).unwrap();
    }
    complaint(folder.path(), &load_dir(folder.path()).unwrap_err())
}

#[test]
fn every_complaint_names_file_line_key_expected_and_found() {
    insta::assert_snapshot!(spoiled("family", "famly"), @r#"/other/task.toml:3: famly: expected one of `format`, `id`, `family`, `workspace`, `home`, `network`, `verifier`, `metadata`, `services`, `mcp_servers`, found an unknown key; correct the file"#);
    insta::assert_snapshot!(spoiled("argv", "timeout = 3\nargv"), @r#"/other/task.toml:6: timeout: expected one of `folder`, `argv`, `cwd`, `timeout_s`, `contract`, found an unknown key; correct the file"#);
    insta::assert_snapshot!(spoiled("\"f\"", "7"), @r#"/other/task.toml:3: family: expected a string, found invalid type: integer `7`; correct the file"#);
    insta::assert_snapshot!(spoiled("id = \"a\"", "id = \"a b\""), @r#"/other/task.toml:2: id: expected 1 to 128 of letters, digits, `.`, `_`, `-`, `:`, starting with a letter or digit, found "a b"; correct the file"#);
    insta::assert_snapshot!(spoiled("id = \"a\"\n", ""), @r#"/other/task.toml:1: id: expected a value, found nothing; correct the file"#);
    insta::assert_snapshot!(spoiled("format = 1", "format = 2"), @r#"/other/task.toml:1: format: expected 1, found 2; correct the file"#);
    insta::assert_snapshot!(spoiled("[verifier]", "[verifier]\ntimeout_s = 0"), @r#"/other/task.toml:6: verifier.timeout_s: expected 1 to 3600 seconds, found 0; correct the file"#);
    insta::assert_snapshot!(spoiled("[verifier]", "[verifier]\nfolder = \".\""), @r#"/other/task.toml:6: verifier.folder: expected a folder below the workspace, or an absolute path of at least two parts, found "."; correct the file"#);
    insta::assert_snapshot!(spoiled("[verifier]", "[verifier]\nfolder = \"/workspace\""), @r#"/other/task.toml:6: verifier.folder: expected a folder below the workspace, or an absolute path of at least two parts, found "/workspace"; correct the file"#);
    insta::assert_snapshot!(spoiled("[verifier]", "[verifier]\nfolder = \"../x\""), @r#"/other/task.toml:6: verifier.folder: expected a folder below the workspace, or an absolute path of at least two parts, found "../x"; correct the file"#);
    insta::assert_snapshot!(spoiled("[verifier]", "[verifier]\ncontract = \"exit-code\""), @r#"/other/task.toml:6: contract: expected `last-line` or `last-line-or-zero`, found unknown variant `exit-code`; correct the file"#);
    insta::assert_snapshot!(spoiled("family = ", "family "), @r#"/other/task.toml:3: value: expected `=`, found key with no value; correct the file"#);
    insta::assert_snapshot!(spoiled("\n[verifier]\nargv = [\"sh\", \".verify/check.sh\"]\n", ""), @r#"/other: the task has no verifier: expected a table [verifier] in task.toml and its files in verify/; add it, or take the task out of the set"#);
    insta::assert_snapshot!(spoiled("nothing", "the same id twice"), @r#"task a is in /good and in /other; rename one of them"#);
}

#[test]
fn folders_that_are_no_tasks_are_named() {
    let folder = tempdir().unwrap();
    let error = load_dir(folder.path()).unwrap_err();
    assert!(matches!(error, TaskError::Empty { .. }), "{error}");
    fs::create_dir_all(folder.path().join(".hidden")).unwrap();
    fs::write(folder.path().join("README.md"), "").unwrap();
    assert!(matches!(
        load_dir(folder.path()),
        Err(TaskError::Empty { .. })
    ));
    fs::create_dir_all(folder.path().join("stray")).unwrap();
    let error = load_dir(folder.path()).unwrap_err();
    insta::assert_snapshot!(complaint(folder.path(), &error), @r#"/stray: not a task: expected task.toml (ours, Harbor), data_entry.json (ClawGym), task.yaml (Terminal-Bench 1, Claw-Eval), RUBRICS.json (JobBench), *.md (PinchBench, QwenClawBench), *.jsonl or *.csv; remove it or point at a set of tasks"#);
    let error = load_dir(&folder.path().join("missing")).unwrap_err();
    insta::assert_snapshot!(complaint(folder.path(), &error), @r#"/missing: No such file or directory (os error 2); check that the path is right and readable"#);
}

#[test]
fn links_are_refused() {
    let folder = tempdir().unwrap();
    let task = chores::generate(Split::Train, 1, 1).remove(0);
    write_dir(&task, folder.path()).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", folder.path().join("files/x")).unwrap();
    let error = load_dir(folder.path()).unwrap_err();
    insta::assert_snapshot!(complaint(folder.path(), &error), @r#"/files/x: kind of file: expected a regular file or a folder, found a symbolic link or a special file; put the content itself there"#);
}

#[test]
fn a_step_has_one_verb() {
    let folder = tempdir().unwrap();
    let task = chores::generate(Split::Train, 1, 1).remove(0);
    write_dir(&task, folder.path()).unwrap();
    let complain = |text: &str| {
        fs::write(folder.path().join("solution.toml"), text).unwrap();
        complaint(folder.path(), &load_dir(folder.path()).unwrap_err())
    };
    insta::assert_snapshot!(complain("[[step]]\nbash = \"ls\"\n[[step]]\nbash = \"a\"\nsay = \"b\"\n"), @r#"/solution.toml: step 2: expected one of bash, read, write + text, edit + old + new, say, found bash + say; correct the step"#);
    insta::assert_snapshot!(complain("[[step]]\n"), @r#"/solution.toml: step 1: expected one of bash, read, write + text, edit + old + new, say, found nothing; correct the step"#);
    insta::assert_snapshot!(complain("[[step]]\nedit = \"a\"\nold = \"b\"\n"), @r#"/solution.toml: step 1: expected one of bash, read, write + text, edit + old + new, say, found edit + old; correct the step"#);
    insta::assert_snapshot!(complain("[[step]]\ngrep = \"a\"\n"), @r#"/solution.toml:2: grep: expected one of `bash`, `read`, `write`, `text`, `edit`, `old`, `new`, `say`, found an unknown key; correct the file"#);
}

#[test]
fn sources_are_chores_or_folders_by_split() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("few.toml");
    let load_with = |text: &str| {
        fs::write(&file, text).unwrap();
        load(&format!("chores:{}", file.display()), Split::Train)
    };
    let tasks =
        load_with("seed = 4\ntrain = 3\nheld_out = 0\nfamilies = [\"copy\", \"note\"]\n").unwrap();
    let families: Vec<_> = tasks.iter().map(|task| task.family.as_str()).collect();
    assert_eq!(families, ["copy", "note", "copy"]);
    let complain = |text: &str| complaint(folder.path(), &load_with(text).unwrap_err());
    insta::assert_snapshot!(complain("seed = 4\ntrain = 3\n"), @r#"/few.toml:1: held_out: expected a value, found nothing; correct the file"#);
    insta::assert_snapshot!(complain("seed = 4\ntrain = 3\nheld_out = 1000000\n"), @r#"/few.toml:3: held_out: expected at most 100000, found 1000000; ask for fewer tasks"#);
    insta::assert_snapshot!(complain("seed = 4\ntrain = 3\nheld_out = 1\nfamilies = [\"chess\"]\n"), @r#"/few.toml:4: families: expected any of folder, create, move, rename, copy, delete, executable, count, sort, filter, merge, ends, append, json, ini, cell, row, replace, extract, answer, note, trail, highest, locate, fix-shell, fix-python, found "chess"; correct the name or leave `families` out to use all"#);

    for (split, count) in [(Split::Train, 3), (Split::HeldOut, 2)] {
        for task in chores::generate(split, 1, count) {
            write_dir(
                &task,
                &folder
                    .path()
                    .join("set")
                    .join(split.name())
                    .join(task.id.as_str()),
            )
            .unwrap();
        }
    }
    let set = folder.path().join("set");
    let count = |folder: &Path, split| load(folder.to_str().unwrap(), split).unwrap().len();
    assert_eq!(count(&set, Split::Train), 3);
    assert_eq!(count(&set, Split::HeldOut), 2);
    assert_eq!(count(&set.join("train"), Split::HeldOut), 3);
}

#[test]
fn real_clawgym_folders_load_unchanged() {
    let Some(folder) = shared() else { return };
    let tasks = load_dir(&folder).unwrap();
    assert_eq!(tasks.len(), 16);
    for task in &tasks {
        assert_eq!(task.workspace, Path::new("/root/.openclaw/workspace"));
        assert_eq!(task.home, Path::new("/root"));
        assert_eq!(task.verifier.contract, Contract::LastLineOrZero);
        assert_eq!(task.verifier.timeout_s, 120);
        assert_eq!(task.metadata["grading_type"], "automated");
        assert_eq!(task.digest, digest(task));
    }
    let first = &tasks[0];
    let paths: Vec<_> = first
        .files
        .iter()
        .map(|file| file.path.to_str().unwrap())
        .collect();
    assert_eq!(paths, ["input/contacts.csv", "input/incidents.csv"]);
    // Stable over machines and releases: runs refer to tasks by this.
    insta::assert_snapshot!(first.digest, @r#"825e08ddf9ad33982ab2717bad8c61811ebee78a4c6dd8c06b006fe521729962"#);
}

#[test]
fn a_part_of_the_real_archive_loads() {
    let Some(folder) = shared() else { return };
    let archive = folder.join("clawgym-train-1699.tar.zst");
    let place = tempdir().unwrap();
    let unpacked = Command::new("tar")
        .args(["--zstd", "--wildcards", "-xf"])
        .arg(&archive)
        .arg("-C")
        .arg(place.path())
        .arg("task_1[0-2]*")
        .status();
    if !unpacked.is_ok_and(|status| status.success()) {
        println!("skipped: tar and zstd cannot unpack {}", archive.display());
        return;
    }
    let tasks = load_dir(place.path()).unwrap();
    let digests: std::collections::BTreeSet<_> = tasks.iter().map(|task| &task.digest).collect();
    assert_eq!(digests.len(), tasks.len());
    assert!(tasks.len() > 200, "{}", tasks.len());
}

#[test]
fn a_broken_clawgym_folder_is_named() {
    let folder = tempdir().unwrap();
    let place = folder.path().join("t");
    fs::create_dir_all(place.join("reward")).unwrap();
    fs::write(place.join("reward/check.py"), "").unwrap();
    let complain = |text: &str| {
        fs::write(place.join("data_entry.json"), text).unwrap();
        complaint(folder.path(), &load_dir(folder.path()).unwrap_err())
    };
    let good = r#"{"task_id": "t", "user_query": "q", "metadata": {}}"#;
    insta::assert_snapshot!(complain(good), @r#"/t: the task has no verifier: expected reward/reward.sh; add it, or take the task out of the set"#);
    fs::write(place.join("reward/reward.sh"), "").unwrap();
    insta::assert_snapshot!(complain(&good.replace("\"q\"", "3")), @r#"/t/data_entry.json: user_query: expected a text, found 3; correct the file"#);
    insta::assert_snapshot!(complain(&good.replace("{}", "[]")), @r#"/t/data_entry.json: metadata: expected an object, found []; correct the file"#);
    insta::assert_snapshot!(complain(&good.replace("user_query", "query")), @r#"/t/data_entry.json: user_query: expected a text, found nothing; correct the file"#);
    insta::assert_snapshot!(complain(&good.replace("{}", "{}, \"input_mount_dir\": \"/etc\"")), @r#"/t/data_entry.json: input_mount_dir: expected a path that is or is under /root/.openclaw/workspace, found "/etc"; correct the file"#);
    insta::assert_snapshot!(complain(&good.replace("{}", "{}, \"input_mount_dir\": \"/root/.openclaw/workspace\"")), @r#"/t/data_entry.json: input_mount_dir: expected a folder input_files/ beside the file, found nothing; correct the file"#);
    insta::assert_snapshot!(complain("{\n oops"), @r#"/t/data_entry.json:2: the file: expected JSON, found key must be a string at line 2 column 2; correct the file"#);
}
