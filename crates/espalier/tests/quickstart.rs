//! What the quickstart promises, trained to the end: minutes, so `make test-long` only.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{path::Path, process::Command};

fn gain(recipe: &str, seed: u64) -> (f64, f64) {
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
    let pass = |when: &str| summary["eval"][when]["pass_at_1"].as_f64().unwrap();
    assert_eq!(summary["eval"]["after"]["lost"], 0, "seed {seed}");
    (pass("before"), pass("after"))
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
