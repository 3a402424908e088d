//! Reading profiles: what is accepted, and how everything else is refused.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

use std::{fs, path::Path};

use harness::{HarnessError, Install, Profile, names};

const MINIMAL: &str = r#"
name = "mine"
version = "1.0"
dialect = "chat"
[install]
kind = "none"
[launch]
argv = ["mine", "{{ instruction }}"]
"#;

fn refusal(text: &str) -> String {
    Profile::parse("harnesses/mine.toml", "mine", text)
        .unwrap_err()
        .to_string()
}

#[test]
fn the_smallest_profile_is_accepted() {
    let profile = Profile::parse("mine.toml", "mine", MINIMAL).unwrap();
    assert_eq!(profile.install, Install::None);
    assert_eq!(profile.workdir, "{{ workspace }}");
    assert_eq!(profile.run_s, 600);
}

#[test]
fn every_profile_of_the_repository_loads_and_can_be_named() {
    let known = names(None);
    assert!(known.contains(&"react".to_owned()) && known.contains(&"pi".to_owned()));
    for name in known {
        let profile = Profile::load(None, &name).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(profile.name, name);
        assert!(!profile.summary.is_empty(), "{name} has no summary");
    }
}

#[test]
fn refusals_name_file_line_key_and_expectation() {
    let replaced = |from: &str, to: &str| {
        assert!(MINIMAL.contains(from), "{from}");
        refusal(&MINIMAL.replace(from, to))
    };
    let all = [
        replaced("kind = \"none\"", "kind = \"none\"\nknd = 1"),
        replaced("dialect = \"chat\"", "dialect = \"smoke\""),
        replaced("dialect = \"chat\"", ""),
        replaced("dialect = \"chat\"", "dialects = []"),
        replaced("dialect = \"chat\"", "dialects = [\"chat\", \"chat\"]"),
        replaced(
            "dialect = \"chat\"",
            "dialect = \"chat\"\ndialects = [\"chat\"]",
        ),
        replaced("version = \"1.0\"", "version = 1.0"),
        replaced("version = \"1.0\"", "version = \"../1\""),
        replaced("name = \"mine\"", "name = \"other\""),
        replaced("kind = \"none\"", "kind = \"npm\""),
        replaced("kind = \"none\"", "kind = \"none\"\npackage = \"x\""),
        replaced("kind = \"none\"", "kind = \"npm\"\npackage = \"--global\""),
        replaced(
            "kind = \"none\"",
            "kind = \"npm\"\npackage = \"x\"\nnode_min = \"new\"",
        ),
        replaced("kind = \"none\"", "kind = \"pip\"\npackages = []"),
        replaced("{{ instruction }}", "{{ instructoin }}"),
        replaced("{{ instruction }}", "{{ instruction"),
        replaced("{{ instruction }}", "go"),
        replaced("[\"mine\", \"{{ instruction }}\"]", "[]"),
        refusal(&format!("{MINIMAL}[launch.files]\n\"../x\" = \"\"\n")),
        refusal(&format!(
            "{MINIMAL}[habits.exit_truncates]\n300 = \"turns\"\n"
        )),
        refusal(&format!("{MINIMAL}[limits]\nrun_s = -1\n")),
        refusal("name = \n"),
    ];
    insta::assert_snapshot!(all.join("\n"), @r##"
harnesses/mine.toml:7: `knd`: unknown field `knd`, expected one of `kind`, `package`, `node_min`, `scripts`, `packages`, `python_min`, `provides`, `warm`
harnesses/mine.toml:4: `"smoke"`: unknown variant `smoke`, expected one of `chat`, `responses`, `messages`, `gemini`
harnesses/mine.toml:2: `"mine"`: expected a key `dialect` (or `dialects`, the usual one first): chat, responses, messages, gemini
harnesses/mine.toml:4: `[]`: expected at least one dialect
harnesses/mine.toml:4: `["chat", "chat"]`: expected each dialect once
harnesses/mine.toml:4: `"chat"`: expected `dialect` or `dialects`, not both
harnesses/mine.toml:3: `1.0`: invalid type: floating point `1.0`, expected a string
harnesses/mine.toml:3: `"../1"`: expected an exact version, e.g. `1.2.3` (letters, digits, `-`, `_`, `.`)
harnesses/mine.toml:2: `"other"`: expected the file's name, `mine`: letters, digits, `-`, `_`, `.`
harnesses/mine.toml:6: `"npm"`: kind "npm" needs the key `package`, e.g. package = "@scope/name"
harnesses/mine.toml:7: `"x"`: `package` belongs to kind = "npm"
harnesses/mine.toml:7: `"--global"`: expected the bare name of a package; its version is the profile's `version`
harnesses/mine.toml:8: `"new"`: expected a version of up to three numbers, e.g. `20.6.0`
harnesses/mine.toml:7: `[]`: expected requirements, the first a bare package name (its version is the profile's `version`)
harnesses/mine.toml:8: `"{{ instructoin }}"`: unknown template variable `instructoin`; expected one of instruction, base_url, api_key, model, workspace, home, bundle, node, python, guest, version, dialect, context_tokens, reply_tokens_max, tool_servers
harnesses/mine.toml:8: `"{{ instruction"`: unexpected end of input, expected end of variable block (line 1 of the template)
harnesses/mine.toml:8: `["mine", "go"]`: expected `{{ instruction }}` in argv, stdin, env or files: the harness would never learn its task
harnesses/mine.toml:8: `[]`: expected at least the program
harnesses/mine.toml:10: `""`: `../x`: expected a path relative to HOME, without `..`
harnesses/mine.toml:9: `habits`: exit_truncates: `300` is not an exit code; expected 0 to 255
harnesses/mine.toml:10: `-1`: invalid value: integer `-1`, expected u64
harnesses/mine.toml:1: ``: string values must be quoted, expected literal string
"##);
}

#[test]
fn a_dialect_is_chosen_by_name_and_bundles_are_shared() {
    let first = Profile::load(None, "pi").unwrap();
    let other = Profile::load(None, "pi:messages").unwrap();
    assert_eq!((first.name.as_str(), first.file()), ("pi", "pi"));
    assert_eq!((other.name.as_str(), other.file()), ("pi:messages", "pi"));
    assert_eq!(harness::word(other.dialect), "messages");
    // The first one needs no name, whoever names it.
    assert_eq!(Profile::load(None, "pi:chat").unwrap(), first);
    assert_eq!(
        Profile::load(None, "codex:chat").unwrap_err().to_string(),
        "harness codex does not speak `chat`: its profile offers responses; leave `:chat` out or add it to `dialects`"
    );
}

#[test]
fn a_folder_of_the_user_comes_first_and_adds_names() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("mine.toml"), MINIMAL).unwrap();
    let react = fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../harnesses/react.toml"),
    )
    .unwrap();
    let version = Profile::load(None, "react").unwrap().version;
    let changed = react.replace(&format!("version = \"{version}\""), "version = \"99\"");
    fs::write(folder.path().join("react.toml"), changed).unwrap();
    assert_eq!(
        Profile::load(Some(folder.path()), "react").unwrap().version,
        "99"
    );
    assert_eq!(
        Profile::load(Some(folder.path()), "mine").unwrap().name,
        "mine"
    );
    assert!(names(Some(folder.path())).contains(&"mine".to_owned()));
}

#[test]
fn an_unknown_name_lists_the_known_ones() {
    let error = Profile::load(None, "no-such").unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, HarnessError::Unknown { .. }));
    assert!(
        text.contains("pi, qwen-code, react") && text.contains("no-such.toml"),
        "{text}"
    );
    assert!(matches!(
        Profile::load(Some(Path::new("/")), "../etc/passwd"),
        Err(HarnessError::Unknown { .. })
    ));
}

#[test]
fn a_huge_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("mine.toml"), "#".repeat(300_000)).unwrap();
    let text = Profile::load(Some(folder.path()), "mine")
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("300000 bytes; a profile has at most 262144"),
        "{text}"
    );
}

proptest::proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(cut in 0..MINIMAL.len(), noise in "[ -~\n]{0,12}") {
        let mut text = MINIMAL.to_owned();
        text.insert_str(cut, &noise);
        let _ = Profile::parse("mine.toml", "mine", &text);
    }
}
