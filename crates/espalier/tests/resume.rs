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

/// A small recipe; `more` are further tables below `[train]`.
fn recipe(folder: &Path, more: &str) -> std::path::PathBuf {
    let policy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policy");
    let path = folder.join("small.toml");
    let text = format!(
        "seed = 5\n[policy]\nfolder = {:?}\n[rollout]\nconcurrency = 8\nreply_tokens_max = 64\ncalls_max = 5\n\
         [rollout.stages]\nsettle_quiet_ms = 0\n[train]\nsteps = 4\ntasks_per_step = 6\nsamples = 4\n\
         checkpoint_every = 2\nkeep_last = 1\n[train.curriculum]\n{more}[train.rate]\npeak = 1e-4\n[eval]\ntasks = 4\nsamples = 1\ngreedy = false\nevery = 2\n",
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
    killed_and_straight("", &[]);
}

#[test]
fn so_does_one_with_a_critic_and_a_reference_policy() {
    let more = "[train.ppo]\nwarmup_updates = 1\n[train.grpo.kl]\nweight = 0.01\n";
    killed_and_straight(more, &["critic/head.safetensors"]);
}

#[test]
fn so_does_one_that_trains_an_adapter() {
    let more = "[train.lora]\nrank = 4\ntargets = [\"q_proj\", \"v_proj\"]\n";
    killed_and_straight(more, &["adapter/adapter_model.safetensors"]);
}

/// Trains twice, once without a stop and once killed on the way; `also` are files of the last
/// checkpoint that must be the same beside the weights.
fn killed_and_straight(more: &str, also: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), more);
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
    for file in ["model.safetensors"].iter().chain(also) {
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
    for key in ["steps", "reward", "tokens", "forks", "seed"] {
        assert_eq!(one[key], other[key], "{key}");
    }
    assert_eq!(
        one["eval"]["after"]["pass_at_1"],
        other["eval"]["after"]["pass_at_1"]
    );
    assert_eq!(one["eval"]["during"][0]["step"], 2);
    assert_eq!(
        one["eval"]["during"][0]["pass_at_1"],
        other["eval"]["during"][0]["pass_at_1"]
    );
}
