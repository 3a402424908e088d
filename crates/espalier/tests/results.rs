//! `scripts/results.sh`: what it writes of runs, with a program in place of Espalier that takes no time.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Leaves behind what a run does. The first run of seed 1 is interrupted.
const PROGRAM: &str = r#"#!/bin/sh
echo "$@" >> "$CALLS"
while [ $# -gt 0 ]; do
  case $1 in
    --out | --resume) out=$2 ;;
  esac
  shift
done
mkdir -p "$out"
case $out in
  *seed1) [ -f "$out/begun" ] || { touch "$out/begun"; exit 130; } ;;
esac
pass() { echo "{\"pass_at_1\":$1,\"ci95\":[$2,$3],\"tasks\":72,\"n\":144,\"lost\":0,\"reward\":$1}"; }
cat > "$out/summary.json" <<JSON
{"steps":12,"wall_s":600.0,"reward":[0.5],"harnesses":["react","pi","claude-code-bare"],
 "eval":{"before":{"harnesses":{"react":$(pass 0.4 0.3 0.5),"pi":$(pass 0.3 0.2 0.4),"claude-code-bare":$(pass 0.2 0.1 0.3)}},
         "after":{"harnesses":{"react":$(pass 0.5 0.4 0.6),"pi":$(pass 0.5 0.4 0.6),"claude-code-bare":$(pass 0.6 0.5 0.7)}}},
 "seconds":{"rollout":360.0,"train":60.0,"eval":180.0},"forks":{"reencoded":2},
 "dispositions":{"train":1100,"truncate":40,"discard":12},"tokens":{"captured":9000,"unique":5000,"trained":3000}}
JSON
"#;

struct World {
    folder: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let world = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for name in ["scripts", "recipes"] {
            fs::create_dir(world.path(name)).unwrap();
        }
        for name in [
            "scripts/results.sh",
            "scripts/results.py",
            "recipes/claude-code.toml",
            "recipes/cold-start-mixed.toml",
        ] {
            fs::copy(root.join(name), world.path(name)).unwrap();
        }
        fs::write(world.path("program"), PROGRAM).unwrap();
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(world.path("program"), mode).unwrap();
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Command::new("sh")
            .arg(self.path("scripts/results.sh"))
            .args(arguments)
            .args(["--program", "./program"])
            .env("PYTHON", "/usr/bin/python3")
            .env("CALLS", self.path("calls"))
            .output()
            .unwrap()
    }

    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

#[test]
fn runs_are_made_resumed_and_tabulated() {
    let world = World::new();
    let policy = world.path("runs/cold-start-mixed-policy");
    fs::create_dir_all(&policy).unwrap();
    fs::write(policy.join("model.safetensors"), "").unwrap();

    let first = world.run(&["claude-code", "--seeds", "0,1"]);
    let said = String::from_utf8_lossy(&first.stderr).into_owned();
    assert!(
        !first.status.success(),
        "an interrupted run is no result: {said}"
    );
    assert!(
        said.contains("claude-code, seed 1 ended with 130"),
        "{said}"
    );

    let second = world.run(&["claude-code", "--seeds", "0,1"]);
    assert!(second.status.success(), "{second:?}");
    let calls = world.calls();
    let begins = |at: usize, words: &str| {
        assert!(calls[at].starts_with(words), "{calls:?}");
    };
    begins(0, "train recipes/claude-code.toml --seed 0 --out");
    begins(1, "train recipes/claude-code.toml --seed 1 --out");
    begins(2, "train --resume runs/results/claude-code/seed1");
    assert_eq!(
        calls.len(),
        3,
        "a complete run is not made again: {calls:?}"
    );

    let text = fs::read(world.path("docs/results/claude-code/seed1/summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(summary["steps"], 12);
    assert_eq!(
        summary["cost"]["trained_through"],
        serde_json::json!(["claude-code-bare"])
    );
    assert!(summary["cost"]["cpu_s"].as_f64().unwrap() >= 0.0);

    let table = fs::read_to_string(world.path("docs/results/README.md")).unwrap();
    // Half-widths of 10 points on both sides: 14.1 for the change of one seed, 10 for two.
    for row in [
        "| 0 | claude-code-bare | 20.0 [10, 30] | 60.0 [50, 70] | +40.0 [+25.9, +54.1] | 144 |",
        "| 1 | pi (not trained) | 30.0 [20, 40] | 50.0 [40, 60] | +20.0 [+5.9, +34.1] | 144 |",
        "| all | claude-code-bare | | | **+40.0 [+30.0, +50.0]** | |",
    ] {
        assert!(table.contains(row), "{row} is not in\n{table}");
    }
    // (10 + 20) / 2 points through the others for 40.
    assert!(
        table.contains("| 6.0, 1.0, 3.0 | 0.38 | 9k, 5k, 3k | 2 reencoded | 12 of 1152 |"),
        "{table}"
    );
}

#[test]
fn the_cold_start_comes_first_when_its_policy_is_missing() {
    let world = World::new();
    let done = world.run(&["claude-code"]);
    assert!(done.status.success(), "{done:?}");
    let calls = world.calls();
    assert!(
        calls[0].starts_with("sft recipes/cold-start-mixed.toml --out"),
        "{calls:?}"
    );
    assert!(calls[1].starts_with("train "), "{calls:?}");
}

#[test]
fn a_recipe_that_does_not_exist_is_refused() {
    let refused = World::new().run(&["nosuch"]);
    assert_eq!(refused.status.code(), Some(2));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("there is no recipes/nosuch.toml"), "{said}");
}
