//! A training run whose disk fills up: a clear error, and nothing that was saved is lost.
//!
//! The run directory lies on a file system of 12 MiB in a mount namespace of its own: room for
//! the ledger of one step, not for a checkpoint (30 MB of weights and optimiser).
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{fs, path::Path, process::Command};

#[test]
fn a_checkpoint_that_does_not_fit_is_an_error_and_the_rollouts_stay() {
    let folder = tempfile::tempdir().unwrap();
    let policy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policy");
    fs::write(
        folder.path().join("small.toml"),
        format!(
            "[policy]\nfolder = {:?}\n[rollout]\nconcurrency = 4\nreply_tokens_max = 48\ncalls_max = 2\n\
             [rollout.stages]\nsettle_quiet_ms = 0\n[train]\nsteps = 1\ntasks_per_step = 3\nsamples = 2\n\
             [eval]\ntasks = 2\nsamples = 1\ngreedy = false\n",
            policy.canonicalize().unwrap()
        ),
    )
    .unwrap();
    let disk = folder.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let script = "set -e; mount -t tmpfs -o size=12m none disk; set +e
        \"$0\" train small.toml --out disk/run; echo \"exit $?\"
        \"$0\" inspect --json disk/run
        ls disk/run/checkpoints 2>/dev/null | sed 's/^/checkpoint: /'; echo end";
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
        .arg(env!("CARGO_BIN_EXE_espalier"))
        .current_dir(folder.path())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    let all = format!("{stdout}\n{stderr}");
    assert!(stdout.contains("exit 1\n"), "{all}");
    assert!(stderr.contains("error: the checkpoint"), "{all}");
    assert!(stderr.contains("No space left on device"), "{all}");
    assert!(!stdout.contains("checkpoint: step-"), "{all}");
    // The ledger still opens and has the rollouts of the step.
    assert!(stdout.contains("\"train\""), "{all}");
    assert!(stdout.ends_with("end\n"), "{all}");
}
