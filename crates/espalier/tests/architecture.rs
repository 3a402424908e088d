//! The architecture as a test: who may depend on whom, what pure means, which licences, how
//! large a file may be. ARCHITECTURE.md says it for people; when the two differ, one is wrong.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// Each crate with the crates of ours that it may depend on, from the bottom up: a crate names
/// only crates above it in this list. `*` is all of those.
const ROOMS: &[(&str, &str)] = &[
    ("record", ""),
    ("guest", ""),
    ("wire", "record"),
    ("codec", "record"),
    ("tree", "record"),
    ("export", "record tree"),
    ("objective", "record"),
    ("task", "record"),
    ("ledger", "record"),
    ("model", "record"),
    ("engine", "record model"),
    ("gateway", "record wire codec ledger engine"),
    // The guest is the program inside every sandbox; both sides share its protocol.
    ("sandbox", "record guest"),
    ("harness", "record sandbox"),
    ("verify", "record task sandbox engine"),
    (
        "rollout",
        "record wire codec tree objective task ledger engine gateway sandbox harness verify",
    ),
    ("learner", "record tree objective model ledger"),
    ("bench", "record ledger"),
    // Only tests use it. It knows nothing of ours: the Kubernetes API is all that it shares with
    // the provider that is tested against it.
    ("kubefake", ""),
    ("espalier", "*"),
];

/// Crates without clock, socket, runtime or randomness of their own.
const PURE: &[&str] = &["record", "wire", "codec", "tree", "export", "objective"];

/// What a pure crate must not link, whoever brings it.
const IMPURE: &[&str] = &[
    "tokio",
    "axum",
    "hyper",
    "rusqlite",
    "rand",
    "getrandom",
    "reqwest",
];

/// What a library brings into a pure crate all the same, and why that is harmless.
const TOLERATED: &[(&str, &str, &str)] = &[
    (
        "codec",
        "rand",
        "tokenizers draws only for BPE dropout and when it trains a tokenizer",
    ),
    (
        "codec",
        "getrandom",
        "seeds that, and the hash maps of tokenizers",
    ),
    ("export", "getrandom", "seeds the hash maps of arrow"),
];

const FILE_LINES_MAX: usize = 600;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

/// Libraries of this platform only: a build has fetched no others, and nothing is fetched here.
fn resolved() -> Value {
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    metadata(&["--filter-platform", &platform])
}

fn metadata(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--offline"])
        .args(arguments)
        .current_dir(root())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

/// Whether a dependency belongs to the crate itself, not to its tests or build script.
fn is_normal(kind: &Value) -> bool {
    kind.is_null() || kind == "normal"
}

#[test]
fn dependencies_only_point_down() {
    let metadata = metadata(&["--no-deps"]);
    let names: BTreeSet<&str> = list(&metadata, "packages")
        .iter()
        .map(|package| text(package, "name"))
        .collect();
    let listed: BTreeSet<&str> = ROOMS.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, listed, "the table of rooms and the workspace differ");
    let mut wrong = Vec::new();
    for package in list(&metadata, "packages") {
        let name = text(package, "name");
        let at = ROOMS.iter().position(|(room, _)| *room == name).unwrap();
        let above: BTreeSet<&str> = ROOMS[..at].iter().map(|(room, _)| *room).collect();
        let allowed: BTreeSet<&str> = match ROOMS[at].1 {
            "*" => above.clone(),
            words => words.split_whitespace().collect(),
        };
        assert!(
            allowed.is_subset(&above),
            "the table itself points up at {name}"
        );
        for dependency in list(package, "dependencies") {
            let other = text(dependency, "name");
            let ours = listed.contains(other) && is_normal(&dependency["kind"]);
            if ours && !allowed.contains(other) {
                wrong.push(format!("{name} → {other}"));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "not in the table of rooms: {}",
        wrong.join(", ")
    );
}

/// Package ids to ids of their normal dependencies.
fn graph(metadata: &Value) -> BTreeMap<&str, Vec<&str>> {
    list(&metadata["resolve"], "nodes")
        .iter()
        .map(|node| {
            let normal = |dependency: &&Value| {
                list(dependency, "dep_kinds")
                    .iter()
                    .any(|kind| is_normal(&kind["kind"]))
            };
            let dependencies = list(node, "deps").iter().filter(normal);
            (
                text(node, "id"),
                dependencies
                    .map(|dependency| text(dependency, "pkg"))
                    .collect(),
            )
        })
        .collect()
}

/// Everything that is linked with a package, itself included.
fn closure<'a>(graph: &BTreeMap<&'a str, Vec<&'a str>>, start: &'a str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::from([start]);
    let mut open = vec![start];
    while let Some(id) = open.pop() {
        for next in &graph[id] {
            if found.insert(next) {
                open.push(next);
            }
        }
    }
    found
}

fn by_id(metadata: &Value) -> BTreeMap<&str, &Value> {
    list(metadata, "packages")
        .iter()
        .map(|package| (text(package, "id"), package))
        .collect()
}

#[test]
fn pure_crates_link_no_runtime_socket_or_randomness() {
    let metadata = resolved();
    let (packages, graph) = (by_id(&metadata), graph(&metadata));
    let mut wrong = Vec::new();
    for (id, package) in &packages {
        let name = text(package, "name");
        if !package["source"].is_null() || !PURE.contains(&name) {
            continue;
        }
        for linked in closure(&graph, id) {
            let linked = text(packages[linked], "name");
            let tolerated = TOLERATED
                .iter()
                .any(|(room, library, _)| (*room, *library) == (name, linked));
            if IMPURE.contains(&linked) && !tolerated {
                wrong.push(format!("{name} links {linked}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join(", "));
}

/// The licences of `deny.toml`.
fn allowed_licences() -> BTreeSet<String> {
    let text = fs::read_to_string(root().join("deny.toml")).unwrap();
    let table: toml::Table = toml::from_str(&text).unwrap();
    let allow = table["licenses"]["allow"].as_array().unwrap();
    allow
        .iter()
        .map(|licence| licence.as_str().unwrap().to_owned())
        .collect()
}

/// Whether an SPDX expression can be met with the allowed licences.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let expression = expression.trim().replace('/', " OR ");
    // Parentheses occur only around alternatives: "(MIT OR Apache-2.0) AND Unicode-3.0".
    let mut depth = 0;
    let mut split = |separator: &str| -> Option<(String, String)> {
        depth = 0;
        expression.char_indices().find_map(|(at, c)| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            let here = depth == 0 && expression[at..].starts_with(separator);
            here.then(|| {
                (
                    expression[..at].to_owned(),
                    expression[at + separator.len()..].to_owned(),
                )
            })
        })
    };
    if let Some((left, right)) = split(" OR ") {
        return is_allowed(&left, allowed) || is_allowed(&right, allowed);
    }
    if let Some((left, right)) = split(" AND ") {
        return is_allowed(&left, allowed) && is_allowed(&right, allowed);
    }
    match expression
        .strip_prefix('(')
        .and_then(|inner| inner.strip_suffix(')'))
    {
        Some(inner) => is_allowed(inner, allowed),
        None => allowed.contains(&expression),
    }
}

#[test]
fn licence_expressions_are_read_as_written() {
    let allowed: BTreeSet<String> = ["MIT", "Unicode-3.0"].map(String::from).into();
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("MIT/GPL-3.0", true),
        ("GPL-3.0 / Apache-2.0", false),
        ("MIT AND GPL-3.0", false),
        ("(GPL-3.0 OR MIT) AND Unicode-3.0", true),
        ("(GPL-3.0 OR MIT) AND GPL-3.0", false),
        ("MIT WITH something", false),
        ("", false),
    ] {
        assert_eq!(is_allowed(expression, &allowed), expected, "{expression:?}");
    }
}

#[test]
fn licences_of_everything_that_is_linked_are_allowed() {
    let metadata = resolved();
    let allowed = allowed_licences();
    let wrong: Vec<String> = list(&metadata, "packages")
        .iter()
        .filter(|package| !is_allowed(text(package, "license"), &allowed))
        .map(|package| format!("{} {:?}", text(package, "name"), text(package, "license")))
        .collect();
    assert!(
        wrong.is_empty(),
        "not allowed by deny.toml: {}",
        wrong.join(", ")
    );
}

/// All files of the project, without what is built or recorded.
fn files() -> Vec<PathBuf> {
    const SKIPPED: [&str; 5] = [".git", "target", "runs", ".venv", "node_modules"];
    let mut found = Vec::new();
    let mut open = vec![root()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let kind = entry.file_type().unwrap();
            let name = entry.file_name();
            if kind.is_dir() && !SKIPPED.iter().any(|skipped| *skipped == name) {
                open.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    found
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root())
        .unwrap_or(path)
        .display()
        .to_string()
}

#[test]
fn every_crate_says_what_it_is() {
    for (name, _) in ROOMS {
        let folder = root().join("crates").join(name).join("src");
        let file = ["lib.rs", "main.rs"]
            .map(|file| folder.join(file))
            .into_iter()
            .find(|path| path.exists());
        let file = file.unwrap_or_else(|| panic!("{name}: neither lib.rs nor main.rs"));
        let text = fs::read_to_string(&file).unwrap();
        let header = text
            .lines()
            .take_while(|line| line.starts_with("//!"))
            .count();
        assert!(
            header >= 3,
            "{}: {header} lines of design note, expected at least 3",
            shown(&file)
        );
    }
}

#[test]
fn no_source_file_is_too_long_to_read() {
    let long: Vec<String> = files()
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        // Examples may be long lists: objective's writes down reference vectors.
        .filter(|path| !path.iter().any(|folder| folder == "examples"))
        .filter_map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            // Tests at the end of a file do not make it harder to read.
            let code = text
                .lines()
                .take_while(|line| !line.starts_with("#[cfg(test)]"))
                .count();
            (code > FILE_LINES_MAX).then(|| format!("{} has {code} lines", shown(&path)))
        })
        .collect();
    assert!(
        long.is_empty(),
        "more than {FILE_LINES_MAX} lines: {}",
        long.join(", ")
    );
}

#[test]
fn no_file_names_a_machine_or_a_mirror() {
    // Put together here, so that this file does not contain them itself.
    let forbidden = [
        ["/wo", "rk/"],
        ["/ro", "ot/"],
        ["/home/", "user/"],
        ["index.crates", ".io"],
        ["static.crates", ".io"],
        ["registry.npm", "js.org"],
        ["files.python", "hosted.org"],
    ]
    .map(|parts| parts.concat());
    let mut wrong = Vec::new();
    for path in files()
        .into_iter()
        .filter(|path| !path.ends_with("Cargo.lock"))
    {
        let Ok(text) = fs::read_to_string(&path) else {
            continue;
        };
        for (number, line) in text.lines().enumerate() {
            // Hidden folders of the HOME that the field's tasks demand, inside a sandbox.
            let line = line.replace(&["/ro", "ot/."].concat(), "");
            if let Some(word) = forbidden.iter().find(|word| line.contains(*word)) {
                wrong.push(format!("{}:{} has {word}", shown(&path), number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join(", "));
}
