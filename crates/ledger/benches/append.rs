//! How fast calls are saved, and in how much space: `cargo bench -p ledger`.
//!
//! 64 rollouts of 40 turns are written, each call carries 2,000 new tokens and their text; every
//! put waits for its commit, as the gateway does. First so many writers at once, each with the next
//! call as soon as the last one is saved; then calls that arrive at a fixed rate, whether the ones
//! before are saved or not, which is what a gateway with many rollouts sees. What the disk itself
//! takes for `fdatasync` stands beside it.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a bench"
)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use ledger::{FILE_NAME, Ledger};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use record::{Call, Message, Role, RolloutId};

const ROLLOUTS: u32 = 64;
const TURNS: u32 = 40;
const NEW_TOKENS: usize = 2_000;
const GENERATED_TOKENS: usize = 200;

/// A rollout whose calls each bring 2,000 tokens.
fn rollout(number: u32) -> Vec<Call> {
    let mut random = ChaCha8Rng::seed_from_u64(u64::from(number));
    let name = format!("r{number}");
    let mut ids = |count: usize| -> Vec<u32> {
        (0..count)
            .map(|_| random.random_range(0..150_000))
            .collect()
    };
    let text = |ids: &[u32]| -> String {
        ids.iter()
            .map(|id| format!("{:04x}", id % 65_536))
            .collect()
    };
    let mut prompt = ids(NEW_TOKENS - GENERATED_TOKENS);
    let mut messages = vec![Message::text(Role::User, text(&prompt))];
    let mut calls = Vec::new();
    for index in 0..TURNS {
        let output = ids(GENERATED_TOKENS);
        let mut call = support::call(u64::from(index), &name, index);
        call.id.rollout = RolloutId::new(name.clone()).unwrap();
        call.conversation.messages.clone_from(&messages);
        call.request = serde_json::json!({ "messages": serde_json::to_value(&messages).unwrap() });
        call.prompt_ids.clone_from(&prompt);
        call.continuation.parent = index.checked_sub(1);
        call.generation = Some(record::Generation {
            logprobs_model: vec![-1.0; output.len()],
            logprobs_sampled: vec![-1.0; output.len()],
            token_ids: output.clone(),
            policy: vec![record::PolicySpan {
                start: 0,
                version: 0,
            }],
            finish: record::FinishReason::Stop,
            cached_tokens: 0,
        });
        call.reply = Some(Message::text(Role::Assistant, text(&output)));
        messages.extend(call.reply.clone());
        let result = ids(NEW_TOKENS - GENERATED_TOKENS);
        messages.push(Message::text(Role::Tool, text(&result)));
        prompt.extend(output);
        prompt.extend(result);
        calls.push(call);
    }
    calls
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let rollouts: Vec<Vec<Call>> = (0..ROLLOUTS).map(rollout).collect();
    let records = ROLLOUTS * TURNS;
    let whole: usize = rollouts
        .iter()
        .flatten()
        .map(|call| serde_json::to_vec(call).unwrap().len())
        .sum();
    disk();
    for at_once in [1, 8, 16, 32, 64] {
        let dir = tempfile::tempdir().unwrap();
        let (seconds, mut waits) = runtime.block_on(run(dir.path(), rollouts.clone(), at_once));
        waits.sort();
        let at = |part: f64| waits[(waits.len() as f64 * part) as usize % waits.len()];
        let bytes = std::fs::metadata(dir.path().join(FILE_NAME)).unwrap().len();
        println!(
            "{at_once:>3} at once: {:>6.0} records/s; a put takes {:.2} ms, 99 % less than {:.2} ms; \
             {} bytes per record, 1/{:.1} of its JSON",
            f64::from(records) / seconds,
            at(0.5).as_secs_f64() * 1000.0,
            at(0.99).as_secs_f64() * 1000.0,
            bytes / u64::from(records),
            whole as f64 / bytes as f64,
        );
        runtime.block_on(read(dir.path()));
    }
    for per_second in [2500, 5000] {
        let dir = tempfile::tempdir().unwrap();
        let (seconds, mut waits) =
            runtime.block_on(arrive(dir.path(), rollouts.clone(), per_second));
        waits.sort();
        let at = |part: f64| waits[(waits.len() as f64 * part) as usize % waits.len()];
        println!(
            "{per_second} arrive per second: {:.0} records/s; saved after {:.2} ms, 99 % after less than {:.2} ms",
            f64::from(records) / seconds,
            at(0.5).as_secs_f64() * 1000.0,
            at(0.99).as_secs_f64() * 1000.0,
        );
    }
}

/// What one commit to the disk costs here.
fn disk() {
    use std::io::Write;
    let mut file = tempfile::tempfile().unwrap();
    let mut waits: Vec<Duration> = (0..100_u8)
        .map(|round| {
            file.write_all(&[round; 64 << 10]).unwrap();
            let start = Instant::now();
            file.sync_data().unwrap();
            start.elapsed()
        })
        .collect();
    waits.sort();
    println!(
        "the disk: fdatasync of 64 KiB takes {:.2} ms, 99 % less than {:.2} ms",
        waits[50].as_secs_f64() * 1000.0,
        waits[98].as_secs_f64() * 1000.0
    );
}

/// Calls come at a fixed rate, the rollouts in turns; seconds in all, and how long each took from
/// the moment at which it was due.
async fn arrive(
    dir: &std::path::Path,
    rollouts: Vec<Vec<Call>>,
    per_second: u32,
) -> (f64, Vec<Duration>) {
    let ledger = Ledger::create(dir).unwrap();
    let mut turns: Vec<Vec<Call>> = (0..TURNS).map(|_| Vec::new()).collect();
    for rollout in rollouts {
        for (turn, call) in rollout.into_iter().enumerate() {
            turns[turn].push(call);
        }
    }
    let start = tokio::time::Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for (number, call) in turns.into_iter().flatten().enumerate() {
        let due = start + Duration::from_secs_f64(number as f64 / f64::from(per_second));
        tokio::time::sleep_until(due).await;
        let ledger = ledger.clone();
        tasks.spawn(async move {
            ledger.put_call(call).await.unwrap();
            due.elapsed()
        });
    }
    let waits = tasks.join_all().await;
    let seconds = start.elapsed().as_secs_f64();
    ledger.close().await.unwrap();
    (seconds, waits)
}

/// Writes all rollouts, so many at once; seconds in all, and the wait of every put.
async fn run(
    dir: &std::path::Path,
    rollouts: Vec<Vec<Call>>,
    at_once: usize,
) -> (f64, Vec<Duration>) {
    let ledger = Ledger::create(dir).unwrap();
    let mut lanes: Vec<Vec<Vec<Call>>> = (0..at_once).map(|_| Vec::new()).collect();
    for (number, rollout) in rollouts.into_iter().enumerate() {
        lanes[number % at_once].push(rollout);
    }
    let start = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for lane in lanes {
        let ledger = ledger.clone();
        tasks.spawn(async move {
            let mut waits = Vec::new();
            for call in lane.into_iter().flatten() {
                let start = Instant::now();
                ledger.put_call(call).await.unwrap();
                waits.push(start.elapsed());
            }
            waits
        });
    }
    let waits: Vec<Duration> = tasks.join_all().await.into_iter().flatten().collect();
    let seconds = start.elapsed().as_secs_f64();
    ledger.close().await.unwrap();
    (seconds, waits)
}

async fn read(dir: &std::path::Path) {
    let ledger = Ledger::open_read_only(dir).unwrap();
    let start = Instant::now();
    for number in 0..ROLLOUTS {
        let calls = ledger
            .calls(&RolloutId::new(format!("r{number}")).unwrap())
            .unwrap();
        assert_eq!(calls.len(), TURNS as usize);
    }
    println!(
        "      reading all back: {:.2} ms per rollout of {TURNS} calls",
        start.elapsed().as_secs_f64() * 1000.0 / f64::from(ROLLOUTS)
    );
}
