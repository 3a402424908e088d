//! Training through real harnesses, as small as it gets: the recipes with few tasks and one step, and
//! one step through each harness whose prompt the built-in policy's window does not hold. Whether
//! anything is learned is not asked here (docs/results); whether every stage works is.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests"
)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;
use toml::Table;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn espalier(arguments: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_espalier"))
        .args(arguments)
        .env_remove("ESPALIER_HARNESSES")
        .current_dir(root())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
}

/// A recipe of the repository with these values in place of its own: dotted key and TOML value.
fn changed(name: &str, values: &[(&str, &str)]) -> Table {
    let text = fs::read_to_string(root().join("recipes").join(name)).unwrap();
    let mut recipe: Table = text.parse().unwrap();
    for (key, value) in values {
        let parsed: Table = format!("value = {value}").parse().unwrap();
        let mut place = &mut recipe;
        let (folder, last) = key.rsplit_once('.').unwrap_or(("", key));
        for part in folder.split('.').filter(|part| !part.is_empty()) {
            let entry = place.entry(part).or_insert_with(|| Table::new().into());
            place = entry.as_table_mut().unwrap();
        }
        place.insert(last.to_owned(), parsed["value"].clone());
    }
    recipe
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn write(&self, name: &str, recipe: &Table) -> String {
        let path = self.path(name);
        fs::write(&path, recipe.to_string()).unwrap();
        path
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap()
    }

    /// The lines of `metrics.jsonl` of a run.
    fn metrics(&self, run: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(&format!("{run}/metrics.jsonl"))).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// What holds for every run whatever the policy can do: nothing lost, every continuation exact
    /// (without forks a tree has no token twice), every generated token with the engine's word for it.
    fn sound(&self, run: &str) {
        for step in self.metrics(run) {
            assert_eq!(step["forks"], serde_json::json!({}), "{step}");
            assert_eq!(step["tokens_without_logprobs"], 0, "{step}");
            let dispositions = step["dispositions"].as_object().unwrap();
            let kept = |name: &String| ["train", "truncate"].contains(&name.as_str());
            assert!(dispositions.keys().all(kept), "{step}");
        }
        let summary = self.json(&format!("{run}/summary.json"));
        for when in ["before", "after"] {
            assert_eq!(summary["eval"][when]["lost"], 0, "{summary}");
        }
    }
}

#[test]
#[ignore = "minutes: starts some 40 processes of Claude Code and pi, and installs both"]
fn the_cold_start_and_the_recipes_through_real_harnesses() {
    let folder = Folder::new();
    let policy = format!("{:?}", folder.path("policy"));
    let cold = changed(
        "cold-start-mixed.toml",
        &[
            ("sft.out", &policy),
            ("sft.steps", "2"),
            ("sft.checkpoint_every", "0"),
            (
                "sft.tasks_max",
                "{ react = 3, pi = 3, claude-code-bare = 3 }",
            ),
        ],
    );
    let cold = folder.write("cold.toml", &cold);
    espalier(&["sft", &cold, "--out", &folder.path("cold")]);
    let metrics = folder.metrics("cold");
    assert_eq!(metrics.len(), 2, "{metrics:?}");

    for name in ["claude-code", "pi", "mixed", "mixed-200"] {
        let small = changed(
            &format!("{name}.toml"),
            &[
                ("policy.folder", &policy),
                ("train.steps", "1"),
                ("train.tasks_per_step", "4"),
                ("train.samples", "2"),
                ("eval.tasks", "1"),
                ("eval.samples", "1"),
            ],
        );
        let recipe = folder.write("recipe.toml", &small);
        espalier(&["train", &recipe, "--out", &folder.path(name)]);
        folder.sound(name);
        let summary = folder.json(&format!("{name}/summary.json"));
        for harness in ["react", "pi", "claude-code-bare"] {
            let measured = &summary["eval"]["after"]["harnesses"][harness]["n"];
            assert_eq!(*measured, 1, "{name}: {harness}");
        }
        let step = &folder.metrics(name)[0];
        let families = step["families"].as_object().unwrap();
        let trained = |harness: &str| families.keys().any(|key| key.starts_with(harness));
        let mix = small["train"]["mix"].as_table().unwrap();
        for (harness, weight) in mix {
            let wanted = weight.as_integer().unwrap() > 0;
            assert_eq!(trained(harness), wanted, "{name}: {harness} in {step}");
        }
    }
}

/// The built-in policy with a window of 64 k tokens (`YaRN`).
fn wide_policy(folder: &Folder) -> String {
    let wide = folder.path("wide");
    fs::create_dir(&wide).unwrap();
    for entry in fs::read_dir(root().join("policy")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), Path::new(&wide).join(entry.file_name())).unwrap();
    }
    let path = Path::new(&wide).join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = 65_536.into();
    config["rope_scaling"] = serde_json::json!({
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096,
    });
    fs::write(&path, config.to_string()).unwrap();
    wide
}

/// One step of PPO, which learns from any reward: this policy has no success in these prompts.
fn one_step_through(harness: &str) {
    let folder = Folder::new();
    let policy = wide_policy(&folder);
    let small = changed(
        "pi.toml",
        &[
            ("harnesses", &format!("[{harness:?}]")),
            ("policy.folder", &format!("{policy:?}")),
            ("rollout.concurrency", "1"),
            ("rollout.calls_max", "2"),
            ("rollout.stages.harness_s", "600"),
            ("train.mix", &format!("{{ {harness} = 1 }}")),
            ("train.steps", "1"),
            ("train.tasks_per_step", "1"),
            ("train.samples", "2"),
            ("train.negative_weight", "1.0"),
            ("train.ppo", "{}"),
            ("eval.tasks", "1"),
            ("eval.samples", "1"),
        ],
    );
    let recipe = folder.write("recipe.toml", &small);
    espalier(&["train", &recipe, "--out", &folder.path("run")]);
    let metrics = folder.metrics("run");
    let [step] = metrics.as_slice() else {
        panic!("{metrics:?}");
    };
    println!("{harness}: {step}");
    assert_eq!(step["update"]["optimiser_steps"], 1, "{step}");
    assert!(step["tokens_trained"].as_u64().unwrap() > 0, "{step}");
    let gap = step["update"]["rollout_gap_max"].as_f64().unwrap();
    assert!(
        gap < 1e-2,
        "engine and learner disagree at this length: {step}"
    );
}

macro_rules! through {
    ($($test:ident $name:literal)*) => {$(
        #[test]
        #[ignore = "minutes: installs the harness, prompts of up to 60,000 tokens"]
        fn $test() {
            one_step_through($name);
        }
    )*};
}

through! {
    one_step_through_mini_swe_agent "mini-swe-agent"
    one_step_through_codex "codex"
    one_step_through_opencode "opencode"
    one_step_through_openclaw "openclaw"
}
