//! One training step (forward, backward, AdamW) over siblings that share a prefix, computed as a
//! forest and as rows:
//!
//! `cargo run --release -p model --example forest_vs_rows -- [SHAPE] [THREADS] [MODE] [RATIO...]`
//!
//! SHAPE is `tiny5m` (default) or `smollm2`, MODE `both` (default), `forest` or `rows`, each RATIO
//! one of 2, 4, 8, 16 or `SIBLINGSxPREFIX+SUFFIX`. Prints logical tokens (what a learner without
//! sharing computes) per second of wall and of processor time, best of three steps, and the peak
//! memory of the process so far.
#![expect(clippy::print_stdout, reason = "a command")]

mod common;

use std::time::Instant;

use common::{peak_megabytes, processor_seconds, shape};
use model::{
    Weights,
    adamw::{AdamW, AdamWSettings},
    forest::{self, Segment, Settings},
};

/// Siblings, prefix and suffix of a token ratio.
fn batch(text: &str) -> Option<(usize, usize, usize)> {
    match text {
        "2" => return Some((4, 128, 64)),
        "4" => return Some((8, 384, 64)),
        "8" => return Some((16, 448, 32)),
        "16" => return Some((32, 480, 16)),
        _ => {}
    }
    let (siblings, rest) = text.split_once('x')?;
    let (prefix, suffix) = rest.split_once('+')?;
    Some((
        siblings.parse().ok()?,
        prefix.parse().ok()?,
        suffix.parse().ok()?,
    ))
}

struct Trainer {
    weights: Weights,
    optimiser: AdamW,
    settings: Settings,
}

impl Trainer {
    /// Best wall and processor seconds of three steps after one to warm up.
    fn time(&mut self, segments: &[Segment<'_>]) -> Option<(f64, f64)> {
        let count: usize = segments.iter().map(|segment| segment.targets.len()).sum();
        let slope = -1.0 / count.max(1) as f32;
        let loss = |_: usize, _: usize, _: f32| slope;
        let mut best = (f64::INFINITY, f64::INFINITY);
        for step in 0..4 {
            let (wall, processor) = (Instant::now(), processor_seconds());
            let outcome = forest::run(&self.weights, segments, Some(&loss), self.settings).ok()?;
            self.optimiser
                .step(&mut self.weights, &outcome.gradient, 1e-5);
            let (wall, processor) = (
                wall.elapsed().as_secs_f64(),
                processor_seconds() - processor,
            );
            if step > 0 {
                best = (best.0.min(wall), best.1.min(processor));
            }
        }
        Some(best)
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let at = |index: usize, other: &'static str| arguments.get(index).map_or(other, String::as_str);
    let Some(config) = shape(at(0, "tiny5m")) else {
        println!("usage: forest_vs_rows [tiny5m|smollm2] [THREADS] [both|forest|rows] [RATIO...]");
        return;
    };
    let (threads, mode) = (at(1, "1").parse().unwrap_or(1), at(2, "both"));
    let vocabulary = config.vocab_size;
    let weights = Weights::random(config, 1);
    let mut trainer = Trainer {
        optimiser: AdamW::new(AdamWSettings::default(), weights.len()),
        weights,
        settings: Settings {
            threads,
            ..Settings::default()
        },
    };
    let ratios: Vec<&str> = match arguments.get(3..) {
        Some(given) if !given.is_empty() => given.iter().map(String::as_str).collect(),
        _ => vec!["2", "4", "8", "16"],
    };
    for text in ratios {
        let Some((siblings, prefix, suffix)) = batch(text) else {
            println!("{text}: expected 2, 4, 8, 16 or SIBLINGSxPREFIX+SUFFIX");
            return;
        };
        let token = |at: usize| ((at * 2_654_435_761) % vocabulary) as u32;
        let shared: Vec<u32> = (0..prefix).map(token).collect();
        let own: Vec<Vec<u32>> = (0..siblings)
            .map(|s| (0..suffix).map(|i| token(7919 * (s + 1) + i)).collect())
            .collect();
        let rows: Vec<Vec<u32>> = own
            .iter()
            .map(|tail| [shared.clone(), tail.clone()].concat())
            .collect();
        let below: Vec<u32> = (0..suffix as u32).collect();
        let behind: Vec<u32> = (prefix as u32..(prefix + suffix) as u32).collect();
        let mut forest = vec![Segment {
            parent: None,
            tokens: &shared,
            targets: &[],
        }];
        forest.extend(own.iter().map(|tokens| Segment {
            parent: Some(0),
            tokens,
            targets: &below,
        }));
        let separate: Vec<Segment<'_>> = rows
            .iter()
            .map(|tokens| Segment {
                parent: None,
                tokens,
                targets: &behind,
            })
            .collect();
        let logical = siblings * (prefix + suffix);
        let ratio = logical as f64 / (prefix + siblings * suffix) as f64;
        let mut seconds = Vec::new();
        for (name, segments) in [("forest", &forest), ("rows", &separate)] {
            if mode != "both" && mode != name {
                continue;
            }
            let Some((wall, processor)) = trainer.time(segments) else {
                println!("{name}: the forest was refused");
                return;
            };
            println!(
                "{siblings} x ({prefix}+{suffix}), ratio {ratio:.1}, {name:>6}: {:>8.0} logical tokens/s wall, {:>8.0} per processor second, step {:.0} ms, peak {} MB",
                logical as f64 / wall,
                logical as f64 / processor,
                wall * 1e3,
                peak_megabytes()
            );
            seconds.push((wall, processor));
        }
        if let [forest, rows] = seconds[..] {
            println!(
                "  gain {:.2} wall, {:.2} processor; {:.2} and {:.2} of the token ratio",
                rows.0 / forest.0,
                rows.1 / forest.1,
                rows.0 / forest.0 / ratio,
                rows.1 / forest.1 / ratio
            );
        }
    }
}
