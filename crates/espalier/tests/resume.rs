//! A training run that is killed goes on where it was: no rollout is lost or repeated (I9), and
//! the weights at the end have the bits of a run that was never killed.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
};

use ledger::Ledger;
use record::Rollout;

/// A small recipe; `keys` are further keys of `[train]`, `more` further tables below it.
fn recipe(folder: &Path, keys: &str, more: &str) -> std::path::PathBuf {
    let policy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policy");
    let path = folder.join("small.toml");
    let text = format!(
        "seed = 5\n[policy]\nfolder = {:?}\n[rollout]\nconcurrency = 8\nreply_tokens_max = 64\ncalls_max = 5\n\
         [rollout.stages]\nsettle_quiet_ms = 0\n[train]\nsteps = 4\ntasks_per_step = 6\nsamples = 4\n\
         checkpoint_every = 2\nkeep_last = 1\n{keys}[train.curriculum]\n{more}[train.rate]\npeak = 1e-4\n[eval]\ntasks = 4\nsamples = 1\ngreedy = false\nevery = 2\n",
        policy.canonicalize().unwrap()
    );
    fs::write(&path, text).unwrap();
    path
}

fn espalier(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_espalier"));
    command.arg("train").args(arguments).stdin(Stdio::null());
    command
}

fn finish(arguments: &[&str]) {
    let output = espalier(arguments).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {stderr}");
}

/// Ids of rollouts that count, and how many records there are of each.
fn counted(run: &Path) -> Vec<Rollout> {
    let ledger = Ledger::open_read_only(run).unwrap();
    let rollouts = ledger.rollouts(&[]).unwrap();
    assert!(
        rollouts.iter().all(|rollout| rollout.disposition.is_some()),
        "a rollout of a finished run still counts as running"
    );
    rollouts
        .into_iter()
        .filter(|rollout| rollout.verdict.is_some())
        .collect()
}

#[test]
fn a_killed_run_ends_with_the_bits_of_one_that_was_not() {
    killed_and_straight("", "", Some(&[]));
}

#[test]
fn so_does_one_with_a_critic_and_a_reference_policy() {
    let more = "[train.ppo]\nwarmup_updates = 1\n[train.grpo.kl]\nweight = 0.01\n";
    killed_and_straight("", more, Some(&["critic/head.safetensors"]));
}

#[test]
fn so_does_one_that_trains_an_adapter() {
    let more = "[train.lora]\nrank = 4\ntargets = [\"q_proj\", \"v_proj\"]\n";
    killed_and_straight("", more, Some(&["adapter/adapter_model.safetensors"]));
}

/// Weights change in the middle of rollouts, so bits differ; what is drawn, counted and kept does not.
#[test]
fn one_whose_rollouts_run_ahead_loses_and_repeats_nothing() {
    killed_and_straight("ahead = 1\nstaleness_max = 1\n", "", None);
}

/// Trains twice, once without a stop and once killed on the way. With `same`, weights, rewards and
/// tokens must be equal, and these files of the last checkpoint too.
fn killed_and_straight(keys: &str, more: &str, same: Option<&[&str]>) {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), keys, more);
    let (straight, killed) = (folder.path().join("straight"), folder.path().join("killed"));
    let (recipe, straight_name) = (recipe.to_str().unwrap(), straight.to_str().unwrap());
    let killed_name = killed.to_str().unwrap();
    finish(&[recipe, "--out", straight_name]);
    // Killed after step 1 (no checkpoint yet), then after step 3 (one step past the checkpoint).
    for (arguments, after) in [
        (vec![recipe, "--out", killed_name], "step   1/"),
        (vec!["--resume", killed_name], "step   3/"),
    ] {
        let mut child = espalier(&arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let reached = lines
            .map_while(Result::ok)
            .any(|line| line.starts_with(after));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(reached, "the run ended before {after}");
    }
    finish(&["--resume", killed_name]);
    let exact = same.is_some();
    let files = same.map(|also| ["model.safetensors"].iter().chain(also));
    for file in files.into_iter().flatten() {
        let at = |run: &Path| fs::read(run.join("checkpoints/step-00004").join(file)).unwrap();
        assert!(
            at(&straight) == at(&killed),
            "the resumed run ended with another {file}"
        );
    }
    // The last checkpoint stays, and the best; the other one is gone.
    let best = learner::keep::best(&straight.join("checkpoints"))
        .unwrap()
        .unwrap();
    let early = straight.join("checkpoints/step-00002").exists();
    assert_eq!(early, best.name == "step-00002", "{best:?}");
    let (one, other) = (counted(&straight), counted(&killed));
    let ids = |rollouts: &[Rollout]| -> BTreeSet<String> {
        let named = |rollout: &Rollout| {
            let id = rollout.spec.id.as_str();
            id.split(".r").next().unwrap_or(id).to_owned()
        };
        rollouts.iter().map(named).collect()
    };
    assert_eq!(ids(&one), ids(&other));
    assert_eq!(one.len(), other.len(), "a rollout was scored twice");
    let summary = |run: &Path| -> serde_json::Value {
        serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap()
    };
    let (one, other) = (summary(&straight), summary(&killed));
    let keys: &[&str] = match exact {
        true => &["steps", "reward", "tokens", "forks", "seed"],
        false => &["steps", "seed", "dispositions"],
    };
    for key in keys {
        assert_eq!(one[key], other[key], "{key}");
    }
    assert_eq!(one["eval"]["during"][0]["step"], 2);
    // Steps are written down once each, in order, and versions grow with them.
    for run in [&straight, &killed] {
        let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        let lines: Vec<serde_json::Value> = lines.collect();
        let steps: Vec<u64> = lines
            .iter()
            .map(|line| line["step"].as_u64().unwrap())
            .collect();
        assert_eq!(steps, [0, 1, 2, 3]);
        let stale =
            |line: &serde_json::Value| line["update"]["staleness_max"].as_f64().unwrap_or(0.0);
        assert!(
            lines
                .iter()
                .all(|line| stale(line) <= if exact { 0.0 } else { 1.0 })
        );
    }
    if !exact {
        return;
    }
    assert_eq!(
        one["eval"]["after"]["pass_at_1"],
        other["eval"]["after"]["pass_at_1"]
    );
    assert_eq!(
        one["eval"]["during"][0]["pass_at_1"],
        other["eval"]["during"][0]["pass_at_1"]
    );
}
