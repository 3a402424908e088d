//! The gates on real sandboxes of this machine: all built-in chores, and real ClawGym tasks.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests are not in a test function"
)]

use std::{path::Path, time::Instant};

use sandbox::{Limits, LocalConfig, LocalProvider, Provider, SandboxError};
use task::{Split, Task, load, load_dir};
use tokio::task::JoinSet;
use verify::{VerifyError, admit, prepare, spec, verify};

/// Sandboxes at a time.
const PARALLEL: usize = 3;

async fn provider() -> Option<LocalProvider> {
    match LocalProvider::start(LocalConfig::default()).await {
        Ok(provider) => Some(provider),
        Err(error @ SandboxError::Unsupported { .. }) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Spreads the tasks over a few workers that share the provider.
fn shares(tasks: Vec<Task>) -> Vec<Vec<Task>> {
    let mut shares = vec![Vec::new(); PARALLEL];
    for (index, task) in tasks.into_iter().enumerate() {
        shares[index % PARALLEL].push(task);
    }
    shares
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_built_in_chore_passes_the_gates() {
    let Some(provider) = provider().await else {
        return;
    };
    let mut tasks = load("chores", Split::Train).unwrap();
    tasks.extend(load("chores", Split::HeldOut).unwrap());
    let count = tasks.len();
    let start = Instant::now();
    let mut workers = JoinSet::new();
    for share in shares(tasks) {
        let provider = provider.clone();
        workers.spawn(async move {
            for task in share {
                let gates = admit(&task, &provider).await;
                let gates = gates.unwrap_or_else(|error| panic!("{}: {error}", task.id));
                assert!(gates.admitted(), "{}: {:?}", task.id, gates.objections());
            }
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.unwrap();
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("{count} chores admitted in {seconds:.1} s, {PARALLEL} at a time");
    provider.close().await;
}

/// Doing nothing on a real task scores 0, or is an error that says what the machine lacks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doing_nothing_on_real_clawgym_tasks_scores_zero() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/tasks/clawgym");
    if !folder.is_dir() {
        println!("skipped: {} is not there", folder.display());
        return;
    }
    let Some(provider) = provider().await else {
        return;
    };
    let mut workers = JoinSet::new();
    for share in shares(load_dir(&folder).unwrap()) {
        let provider = provider.clone();
        workers.spawn(async move {
            let mut results = Vec::new();
            for task in share {
                let spec = spec(&task, format!("no-op-{}", task.id), Limits::default());
                let sandbox = provider.create(spec).await.unwrap();
                prepare(&task, sandbox.as_ref()).await.unwrap();
                results.push((task.id.to_string(), verify(&task, sandbox.as_ref()).await));
                sandbox.destroy().await;
            }
            results
        });
    }
    let mut results = Vec::new();
    while let Some(worker) = workers.join_next().await {
        results.extend(worker.unwrap());
    }
    assert_eq!(results.len(), 16);
    for (task, result) in results {
        match result {
            Ok(verdict) => {
                println!("{task}: {} in {:.2} s", verdict.reward, verdict.seconds);
                assert_eq!(verdict.reward, 0.0, "{task}: {}", verdict.evidence);
                // The score is the verifier's own: a crash would have left words on stderr.
                assert!(
                    !verdict.evidence.contains("stderr:"),
                    "{task}: {}",
                    verdict.evidence
                );
            }
            Err(error @ VerifyError::MissingProgram { .. }) => println!("{task}: {error}"),
            Err(error) => panic!("{task}: {error}"),
        }
    }
    provider.close().await;
}
