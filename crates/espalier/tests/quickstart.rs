//! What the recipes promise, trained to the end: minutes to an hour, so `make test-long` only.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{path::Path, process::Command};

/// Trains to the end; `summary.json` of it.
fn trained(recipe: &str, seed: u64) -> serde_json::Value {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let output = Command::new(env!("CARGO_BIN_EXE_espalier"))
        .args(["train", recipe, "--seed", &seed.to_string(), "--out"])
        .arg(&run)
        .current_dir(root)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "seed {seed}: {stderr}");
    let text = std::fs::read(run.join("summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(summary["eval"]["after"]["lost"], 0, "seed {seed}");
    summary
}

fn pass_at_1(evaluation: &serde_json::Value) -> f64 {
    evaluation["pass_at_1"].as_f64().unwrap()
}

fn gain(recipe: &str, seed: u64) -> (f64, f64) {
    let eval = &trained(recipe, seed)["eval"];
    (pass_at_1(&eval["before"]), pass_at_1(&eval["after"]))
}

/// 300 steps leave the policy within 5 points of the best it has been, and above its start. The
/// curve, for the log.
fn stays_what_it_has_become(recipe: &str, seed: u64) -> String {
    let eval = &trained(recipe, seed)["eval"];
    let before = pass_at_1(&eval["before"]);
    let after = pass_at_1(&eval["after"]);
    let during = eval["during"].as_array().unwrap();
    assert!(!during.is_empty(), "{recipe} evaluates on the way");
    let curve: Vec<f64> = during.iter().map(pass_at_1).collect();
    let best = curve.iter().copied().fold(after.max(before), f64::max);
    let told = format!("{recipe} seed {seed}: {before:.3} -> {curve:.3?} -> {after:.3}");
    assert!(best - after <= 0.05, "{told}");
    assert!(after > before, "{told}");
    told
}

#[test]
#[ignore = "three training runs of some minutes"]
fn the_quickstart_gains_25_points_on_each_of_three_seeds() {
    for seed in 0..3 {
        let (before, after) = gain("recipes/quickstart.toml", seed);
        println!("seed {seed}: {before:.3} -> {after:.3}");
        assert!(after - before >= 0.25, "seed {seed}: {before} -> {after}");
    }
}

#[test]
#[ignore = "half an hour of Node.js processes"]
fn the_quickstart_through_pi_gains_25_points() {
    let (before, after) = gain("recipes/quickstart-pi.toml", 0);
    println!("{before:.3} -> {after:.3}");
    assert!(after - before >= 0.25, "{before} -> {after}");
}

#[test]
#[ignore = "three training runs of 300 steps"]
fn grpo_is_stable_for_300_steps() {
    for seed in 0..3 {
        println!(
            "{}",
            stays_what_it_has_become("recipes/stability.toml", seed)
        );
    }
}

#[test]
#[ignore = "three training runs of 300 steps"]
fn ppo_is_stable_for_300_steps() {
    for seed in 0..3 {
        println!(
            "{}",
            stays_what_it_has_become("recipes/stability-ppo.toml", seed)
        );
    }
}
