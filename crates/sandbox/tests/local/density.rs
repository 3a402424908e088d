//! Many at a time, with real work in each.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use futures::{StreamExt, future::join_all, stream::iter};
use sandbox::{Exit, Provider, SandboxError};

use crate::support::{provider, run, script, spec};

/// For as long as this a Node.js program starts again and again in each sandbox.
const WORK: Duration = Duration::from_secs(60);
/// Started at the same time.
const STARTS: usize = 16;

/// How one sandbox fared.
#[derive(Debug, PartialEq)]
enum Fate {
    Fine,
    Memory,
    Failed(String),
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "long: 500 sandboxes with npm in each for a minute"]
async fn five_hundred_sandboxes_run_a_node_program_for_a_minute() {
    let count = std::env::var("ESPALIER_SANDBOXES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(500);
    let provider = provider().await;
    let begun = Instant::now();
    let sandboxes: Vec<_> = iter(0..count)
        .map(|i| {
            let mut spec = spec(&format!("dense-{i}"));
            spec.limits.deadline_s = 3600;
            spec.limits.memory_bytes = 1 << 30;
            spec.limits.pids = 256;
            provider.create(spec)
        })
        .buffer_unordered(STARTS)
        .collect()
        .await;
    let made = begun.elapsed();
    let programs = AtomicUsize::new(0);
    let until = Instant::now() + WORK;
    let work = sandboxes.iter().map(|sandbox| async {
        let sandbox = match sandbox {
            Ok(sandbox) => sandbox,
            Err(error) => return Fate::Failed(error.to_string()),
        };
        while Instant::now() < until {
            let mut exec = script("npm --version");
            exec.timeout = Duration::from_secs(1800);
            match sandbox.exec(exec).await {
                Ok(output) if output.exit == Exit::Code(0) => {
                    programs.fetch_add(1, Ordering::Relaxed);
                }
                Ok(output) if output.out_of_memory => return Fate::Memory,
                Ok(output) => return Fate::Failed(format!("{output:?}")),
                Err(SandboxError::Gone { reason, .. }) if reason.contains("memory") => {
                    return Fate::Memory;
                }
                Err(error) => return Fate::Failed(error.to_string()),
            }
        }
        Fate::Fine
    });
    let fates = join_all(work).await;
    let worked = begun.elapsed() - made;
    // All of them are still there, and answer.
    let alive = join_all(sandboxes.iter().flatten().map(|s| run(&**s, "exit 7"))).await;
    let alive = alive.iter().filter(|o| o.exit == Exit::Code(7)).count();
    let begun = Instant::now();
    join_all(sandboxes.into_iter().flatten().map(|s| s.destroy())).await;
    let destroyed = begun.elapsed();
    let of = |wanted: fn(&Fate) -> bool| fates.iter().filter(|f| wanted(f)).count();
    let (fine, memory) = (of(|f| *f == Fate::Fine), of(|f| *f == Fate::Memory));
    println!(
        "{count} sandboxes: made in {:.1} s, {} runs of npm in {:.1} s, {fine} fine, {memory} out of memory, \
         {alive} answer afterwards, destroyed in {:.1} s",
        made.as_secs_f64(),
        programs.into_inner(),
        worked.as_secs_f64(),
        destroyed.as_secs_f64(),
    );
    let failed: Vec<_> = fates
        .iter()
        .filter(|f| matches!(f, Fate::Failed(_)))
        .take(5)
        .collect();
    assert!(failed.is_empty(), "{failed:#?}");
    assert_eq!(alive, fine + memory);
}
