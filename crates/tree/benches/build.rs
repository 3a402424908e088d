//! How long building takes, and how much memory: `cargo bench -p tree`.
//!
//! A rollout of 1000 calls with contexts of 60,000 tokens of which each shares 95 % with the call
//! before: the history grows by 3,000 tokens per call (300 of them generated), and starts anew from
//! a summary when 60,000 are reached, as a harness does that compacts.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a bench"
)]

use std::time::Instant;

use peak_alloc::PeakAlloc;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use record::{
    Attempt, AttemptOutcome, Call, CallId, Continuation, Conversation, Dialect, FinishReason,
    Generation, Message, PolicySpan, Role, RolloutId, Sampling,
};
use tree::{Builder, SELECTION_NAMES, Selection, Tree, TreeLimits, linearise, select};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const CALLS: u32 = 1000;
const CONTEXT_TOKENS: usize = 60_000;
const NEW_TOKENS: usize = 3_000;
const GENERATED_TOKENS: usize = 300;
const ROUNDS: usize = 9;

fn ids(random: &mut ChaCha8Rng, count: usize) -> Vec<u32> {
    (0..count)
        .map(|_| random.random_range(0..150_000))
        .collect()
}

fn call(index: u32, prompt_ids: Vec<u32>, token_ids: Vec<u32>, conversation: Conversation) -> Call {
    Call {
        id: CallId {
            rollout: RolloutId::new("r").unwrap(),
            index,
        },
        dialect: Dialect::Chat,
        request: serde_json::Value::Null,
        headers: Vec::new(),
        digest: format!("{index:064x}"),
        conversation,
        prompt_ids,
        continuation: Continuation::default(),
        sampling: Sampling::default(),
        generation: Some(Generation {
            logprobs_model: vec![-1.0; token_ids.len()],
            logprobs_sampled: vec![-1.0; token_ids.len()],
            token_ids,
            policy: vec![PolicySpan {
                start: 0,
                version: 0,
            }],
            finish: FinishReason::Stop,
            cached_tokens: 0,
        }),
        raw_text: String::new(),
        reply: None,
        parse_failed: false,
        attempts: vec![Attempt {
            started_ms: 0,
            finished_ms: 0,
            outcome: AttemptOutcome::Delivered,
            stream: false,
        }],
    }
}

fn text(random: &mut ChaCha8Rng, tokens: usize) -> String {
    // Four bytes per token.
    (0..4 * tokens)
        .map(|_| char::from(random.random_range(b'a'..=b'z')))
        .collect()
}

/// The calls; with their messages too if `spoken`.
fn rollout(spoken: bool) -> Vec<Call> {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let system = ids(&mut random, CONTEXT_TOKENS - NEW_TOKENS);
    let opening = |random: &mut ChaCha8Rng, n: u32| {
        vec![
            Message::text(
                Role::System,
                text(
                    random,
                    if n == 0 {
                        CONTEXT_TOKENS - NEW_TOKENS
                    } else {
                        100
                    },
                ),
            ),
            Message::text(Role::User, format!("Task {n}: {}", text(random, 50))),
        ]
    };
    let mut prompt = system.clone();
    let mut messages = opening(&mut random, 0);
    let head = messages[0].clone();
    let mut calls = Vec::new();
    for index in 0..CALLS {
        // The history is kept at its length: the oldest turns give way to a summary now and then.
        if prompt.len() > CONTEXT_TOKENS {
            let keep = CONTEXT_TOKENS - NEW_TOKENS;
            prompt = [&system[..keep - NEW_TOKENS], &ids(&mut random, NEW_TOKENS)].concat();
            messages = opening(&mut random, index);
            messages[0] = head.clone();
        }
        let output = ids(&mut random, GENERATED_TOKENS);
        let mut next = call(
            index,
            prompt.clone(),
            output.clone(),
            if spoken {
                Conversation {
                    messages: messages.clone(),
                    tools: Vec::new(),
                }
            } else {
                Conversation::default()
            },
        );
        prompt.extend(output);
        prompt.extend(ids(&mut random, NEW_TOKENS - GENERATED_TOKENS));
        if spoken {
            let said = Message::text(Role::Assistant, text(&mut random, GENERATED_TOKENS));
            next.reply = Some(said.clone());
            messages.push(said);
            messages.push(Message::text(
                Role::Tool,
                text(&mut random, NEW_TOKENS - GENERATED_TOKENS),
            ));
        }
        calls.push(next);
    }
    calls
}

/// Fastest and median of some rounds, in milliseconds.
fn measure(mut work: impl FnMut()) -> (f64, f64) {
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64() * 1000.0
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[0], times[ROUNDS / 2])
}

fn main() {
    for spoken in [false, true] {
        let calls = rollout(spoken);
        let what = if spoken {
            "tokens and messages"
        } else {
            "tokens only"
        };
        let logical: usize = calls.iter().map(|call| call.prompt_ids.len()).sum();
        let before = ALLOCATOR.current_usage();
        ALLOCATOR.reset_peak_usage();
        let tree = Tree::build(&calls).unwrap();
        let peak = ALLOCATOR.peak_usage() - before;
        let stats = tree.stats();
        let unique = 4 * stats.tokens_unique;
        println!(
            "{what}: {} calls, {} tokens, {} unique, {} nodes, {} forks",
            stats.calls,
            logical,
            stats.tokens_unique,
            stats.nodes,
            tree.forks.len()
        );
        println!(
            "  memory: tree {:.2} times, peak while building {:.2} times its unique tokens",
            tree.heap_bytes() as f64 / unique as f64,
            peak as f64 / unique as f64
        );
        let (fastest, median) = measure(|| drop(Tree::build(&calls).unwrap()));
        println!("  build: fastest {fastest:.1} ms, median {median:.1} ms");
        let mut builder = Builder::new(TreeLimits::default());
        let start = Instant::now();
        for call in &calls {
            builder.add(call).unwrap();
        }
        println!(
            "  of it adding, per call: {:.3} ms",
            start.elapsed().as_secs_f64() * 1000.0 / f64::from(CALLS)
        );
        for name in SELECTION_NAMES {
            let selection = Selection::named(name, 1000).unwrap();
            let kept = select(&tree, &selection);
            let (fastest, _) = measure(|| drop(select(&tree, &selection)));
            let rows = linearise(&tree, &kept, None).unwrap();
            println!(
                "  {name}: {fastest:.1} ms; {} tokens trained, {} rows",
                kept.tokens_trained,
                rows.rows.len()
            );
        }
    }
}
