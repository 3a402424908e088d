//! Decoding: tokens per second at some batch sizes, the prompt read first.
//!
//! `cargo run --release -p model --example decode -- [SHAPE] [THREADS] [PROMPT] [NEW] [BATCH...]`
//!
//! SHAPE is `tiny5m` (default), `smollm2`, or a Hugging Face folder; PROMPT (128) and NEW (64) are
//! tokens, each BATCH (1, 8, 32) a number of sequences with prompts of their own. Prints the rate
//! of reading prompts, that of reading them again from the prefix cache, and that of drawing, best
//! of three. `scripts/bench/decode-torch.py` measures PyTorch with the same arguments.
#![expect(clippy::print_stdout, reason = "a command")]

mod common;

use std::{path::Path, sync::Arc, time::Instant};

use common::{peak_megabytes, processor_seconds, shape};
use model::{
    Weights,
    decode::{Batch, PrefixCache, Prepared, Sequence, Settings},
    device::Device,
};
use record::Sampling;

/// Seconds by the clock and of the processor.
#[derive(Clone, Copy)]
struct Seconds(f64, f64);

fn timed(work: impl FnOnce()) -> Seconds {
    let (wall, processor) = (Instant::now(), processor_seconds());
    work();
    Seconds(
        wall.elapsed().as_secs_f64(),
        processor_seconds() - processor,
    )
}

/// Prompts read, read again, and replies drawn, over all threads.
struct Bench {
    prepared: Arc<Prepared>,
    threads: usize,
}

impl Bench {
    /// Runs `prompts` for `new` tokens each, dealt out to the threads.
    fn run(&self, cache: &Arc<PrefixCache>, prompts: &[Vec<u32>], new: u32) {
        std::thread::scope(|scope| {
            for thread in 0..self.threads.min(prompts.len()) {
                let own: Vec<&Vec<u32>> =
                    prompts.iter().skip(thread).step_by(self.threads).collect();
                let cache = Arc::clone(cache);
                scope.spawn(move || {
                    let rope = Batch::rope(self.prepared.weights());
                    let settings = Settings::default();
                    let mut batch = Batch::new(Arc::clone(&self.prepared), rope, cache, settings);
                    for (id, prompt) in (0..).zip(own) {
                        batch.admit(Sequence {
                            id,
                            prompt: prompt.clone(),
                            sampling: Sampling {
                                tokens_max: new,
                                stop_ids: Vec::new(),
                                ..Sampling::default()
                            },
                            stop_when: None,
                        });
                    }
                    while !batch.is_empty() {
                        if let Err(error) = batch.step() {
                            println!("{error}");
                        }
                    }
                });
            }
        });
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let at = |index: usize, other: &'static str| arguments.get(index).map_or(other, String::as_str);
    let number = |index: usize, other: &'static str| at(index, other).parse::<usize>().unwrap_or(1);
    let name = at(0, "tiny5m");
    let weights = match shape(name) {
        Some(config) => Weights::random(config, 1),
        None => match model::load(Path::new(name)) {
            Ok(weights) => weights,
            Err(error) => {
                println!("{name}: neither tiny5m nor smollm2 nor a model: {error}");
                return;
            }
        },
    };
    let (threads, prompt, new) = (number(1, "1"), number(2, "128"), number(3, "64"));
    let batches: Vec<usize> = match arguments.get(4..) {
        Some(given) if !given.is_empty() => given.iter().filter_map(|n| n.parse().ok()).collect(),
        _ => vec![1, 8, 32],
    };
    let vocabulary = weights.config.vocab_size;
    let config = weights.config.clone();
    let began = processor_seconds();
    let prepared = match Prepared::new(Arc::new(weights), Device::CPU) {
        Ok(prepared) => Arc::new(prepared),
        Err(error) => return println!("{error}"),
    };
    println!(
        "weights packed in {:.2} processor seconds",
        processor_seconds() - began
    );
    let bench = Bench {
        prepared,
        threads: threads.max(1),
    };
    for sequences in batches {
        let prompts: Vec<Vec<u32>> = (0..sequences)
            .map(|s| {
                let token = |i: usize| (((i + 1) * 2_654_435_761 + s * 40_503) % vocabulary) as u32;
                (0..prompt).map(token).collect()
            })
            .collect();
        let mut best = [Seconds(f64::INFINITY, f64::INFINITY); 3];
        for _ in 0..3 {
            let cache = Arc::new(PrefixCache::new(&config, 1 << 30));
            // One token each: what is left is reading the prompt.
            let read = timed(|| bench.run(&cache, &prompts, 1));
            let again = timed(|| bench.run(&cache, &prompts, 1));
            let drawn = timed(|| bench.run(&cache, &prompts, new as u32 + 1));
            let drawn = Seconds(drawn.0 - again.0, drawn.1 - again.1);
            for (best, found) in best.iter_mut().zip([read, again, drawn]) {
                *best = Seconds(best.0.min(found.0), best.1.min(found.1));
            }
        }
        let [read, again, drawn] = best;
        let (read_tokens, drawn_tokens) = ((sequences * prompt) as f64, (sequences * new) as f64);
        println!(
            "batch {sequences:>2}: prompt {:>7.0} tokens/s wall {:>7.0} per processor second, cached {:>8.0}, drawn {:>6.0} wall {:>6.0} per processor second, peak {} MB",
            read_tokens / read.0,
            read_tokens / read.1,
            read_tokens / again.0,
            drawn_tokens / drawn.0,
            drawn_tokens / drawn.1,
            peak_megabytes(),
        );
    }
}
