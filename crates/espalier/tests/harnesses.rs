//! The live matrix: real harnesses in real sandboxes, in every dialect that they offer, through the
//! test kit of the command line (`espalier harness check`). What each scenario proves is said in
//! docs/harnesses.md; what fails is printed by name.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

use std::{
    path::Path,
    process::{Command, Stdio},
};

use serde_json::Value;

/// Checks one harness; the arguments choose dialects and scenarios.
fn check(name: &str, arguments: &[&str]) {
    let policy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policy");
    let output = Command::new(env!("CARGO_BIN_EXE_espalier"))
        .args(["harness", "check", name, "--json", "--policy"])
        .arg(policy)
        .args(arguments)
        .env_remove("ESPALIER_HARNESSES")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    for missing in ["this machine cannot make a sandbox", " needs `"] {
        if errors.contains(missing) {
            println!("skipped: {errors}");
            return;
        }
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let report: Value =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}\n{errors}"));
    let mut wrong = Vec::new();
    let mut turns = 0;
    for harness in report["harnesses"].as_array().unwrap() {
        for outcome in harness["outcomes"].as_array().unwrap() {
            turns += outcome["figures"]["turns"].as_u64().unwrap();
            for check in outcome["checks"].as_array().unwrap() {
                if check["ok"] != true {
                    wrong.push(format!(
                        "{} {}: {}: {}\n{}",
                        harness["harness"],
                        outcome["scenario"],
                        check["name"],
                        check["found"],
                        outcome["tail"].as_str().unwrap()
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(turns > 0, "nothing was played: {text}");
    assert!(output.status.success(), "{errors}");
}

#[test]
fn react() {
    check("react", &[]);
}

#[test]
fn pi() {
    check("pi", &["--only", "turns", "--only", "storm"]);
}

#[test]
fn mini_swe_agent() {
    check("mini-swe-agent", &["--only", "turns"]);
}

macro_rules! long {
    ($($test:ident $name:literal)*) => {$(
        #[test]
        #[ignore = "long: installs the harness, then plays every scenario in every dialect"]
        fn $test() {
            check($name, &["--dialects"]);
        }
    )*};
}

long! {
    all_of_pi "pi"
    all_of_mini_swe_agent "mini-swe-agent"
    all_of_claude_code "claude-code"
    all_of_claude_code_bare "claude-code-bare"
    all_of_codex "codex"
    all_of_opencode "opencode"
    all_of_qwen_code "qwen-code"
    all_of_gemini_cli "gemini-cli"
    all_of_kimi_code "kimi-code"
    all_of_openclaw "openclaw"
}
