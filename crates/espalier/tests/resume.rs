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

fn recipe(folder: &Path) -> std::path::PathBuf {
    let policy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policy");
    let path = folder.join("small.toml");
    let text = format!(
        "seed = 5\n[policy]\nfolder = {:?}\n[rollout]\nconcurrency = 8\nreply_tokens_max = 64\ncalls_max = 5\n\
         [rollout.stages]\nsettle_quiet_ms = 0\n[train]\nsteps = 4\ntasks_per_step = 6\nsamples = 4\n\
         checkpoint_every = 2\n[train.curriculum]\n[train.rate]\npeak = 1e-4\n[eval]\ntasks = 4\nsamples = 1\ngreedy = false\n",
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
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path());
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
    let weights = "checkpoints/step-00004/model.safetensors";
    assert!(
        fs::read(straight.join(weights)).unwrap() == fs::read(killed.join(weights)).unwrap(),
        "the resumed run ended with other weights"
    );
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
}
