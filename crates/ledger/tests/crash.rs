//! `kill -9` of a process that writes: every acknowledged record is there, intact (I6).
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

mod support;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use ledger::Ledger;
use rand::{Rng, SeedableRng};
use record::{CallId, RolloutId};

fn example() -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.push("examples/write_until_killed");
    assert!(
        path.exists(),
        "{path:?} is missing: run the tests with `cargo nextest run -p ledger`, which builds examples"
    );
    path
}

fn kill_at_random_moments(kills: u32) {
    let seed = std::env::var("SEED").map_or(1, |text| text.parse().unwrap());
    println!("SEED={seed}");
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let dir = tempfile::tempdir().unwrap();
    drop(Ledger::create(dir.path()).unwrap());
    let mut acknowledged = 0_usize;
    for kill in 0..kills {
        let mut child = Command::new(example())
            .arg(dir.path())
            .arg(kill.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The moment is a number of acknowledgements: random, but the same on any machine.
        let lines_max = random.random_range(1..400);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut seen: Vec<String> = lines.by_ref().take(lines_max).map(Result::unwrap).collect();
        child.kill().unwrap();
        child.wait().unwrap();
        // What was still in the pipe was acknowledged too; the last line may be torn.
        let mut rest: Vec<String> = lines.map_while(Result::ok).collect();
        if rest.last().is_some_and(|line| !line.ends_with('.')) {
            rest.pop();
        }
        seen.extend(rest);
        assert!(!seen.is_empty());

        let ledger = Ledger::open(dir.path()).unwrap();
        for line in &seen {
            let mut words = line.trim_end_matches('.').split(' ');
            let (rollout, index, seed) = (
                words.next().unwrap(),
                words.next().unwrap().parse().unwrap(),
                words.next().unwrap().parse().unwrap(),
            );
            let id = CallId {
                rollout: RolloutId::new(rollout).unwrap(),
                index,
            };
            assert_eq!(
                ledger.call(&id).unwrap(),
                Some(support::call(seed, rollout, index)),
                "SEED={seed} kill {kill}: {id} was acknowledged"
            );
        }
        acknowledged += seen.len();
        // Everything else that is there is whole as well.
        for task in 0..8 {
            ledger
                .calls(&RolloutId::new(format!("k{kill}.t{task}")).unwrap())
                .unwrap();
        }
    }
    println!("{kills} kills, {acknowledged} acknowledged calls, all intact");
}

#[test]
fn acknowledged_calls_survive_kill_9() {
    kill_at_random_moments(5);
}

#[test]
#[ignore = "long"]
fn acknowledged_calls_survive_kill_9_many_times() {
    kill_at_random_moments(500);
}
