//! One supervised step over a batch that was captured through a harness, computed as one forest,
//! as one tree per rollout, and as rows:
//!
//! `cargo run --release -p learner --example captured_batch -- RUN POLICY [ROLLOUTS] [THREADS] [ROWS.json] [MODE]`
//!
//! RUN is a run directory, POLICY a Hugging Face folder (its shape and vocabulary are used). Prints
//! tokens and seconds of a forward and backward pass, best of three, and writes the rows' token ids
//! for `scripts/bench/rows-torch.py`, which measures PyTorch on the same batch. MODE `forest`,
//! `trees` or `rows` computes that alone, so that the peak of memory is its own.
#![expect(clippy::print_stdout, reason = "a command")]

use std::{collections::BTreeMap, error::Error, path::Path, time::Instant};

use ledger::Ledger;
use model::forest::{self, Segment, Settings};
use tree::{Forest, Selection, TrainTree, Tree, linearise, select};

/// Processor seconds of this process (user and system), in ticks of 10 ms.
fn processor_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = text.rsplit(')').next().unwrap_or_default();
    let fields: Vec<&str> = after.split_whitespace().collect();
    let ticks = |at: usize| -> f64 { fields.get(at).and_then(|f| f.parse().ok()).unwrap_or(0.0) };
    (ticks(11) + ticks(12)) / 100.0
}

/// Peak memory of this process so far.
fn peak_megabytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("VmHWM:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) / 1024
}

/// Tokens computed, and the best of three passes in wall and processor seconds.
fn measure(
    weights: &model::Weights,
    trees: &[TrainTree],
    settings: Settings,
) -> Result<(u64, f64, f64), Box<dyn Error>> {
    let merged = Forest::merge(trees);
    let targets: Vec<Vec<u32>> = merged
        .nodes
        .iter()
        .map(|node| {
            let mut offsets: Vec<u32> = node.terms.iter().map(|term| term.offset).collect();
            offsets.sort_unstable();
            offsets.dedup();
            offsets
        })
        .collect();
    let segments: Vec<Segment<'_>> = merged
        .nodes
        .iter()
        .zip(&targets)
        .map(|(node, targets)| Segment {
            parent: node.parent.map(|parent| parent as usize),
            tokens: &node.tokens,
            targets,
        })
        .collect();
    let loss = |_: usize, _: usize, _: f32| -1e-4;
    let mut best = (f64::INFINITY, f64::INFINITY);
    for _ in 0..3 {
        let (wall, processor) = (Instant::now(), processor_seconds());
        forest::run(weights, &segments, Some(&loss), settings)?;
        best.0 = best.0.min(wall.elapsed().as_secs_f64());
        best.1 = best.1.min(processor_seconds() - processor);
    }
    Ok((merged.stats().tokens_unique, best.0, best.1))
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [run, policy, ..] = arguments.as_slice() else {
        println!("usage: captured_batch RUN POLICY [ROLLOUTS] [THREADS] [ROWS.json] [MODE]");
        return Ok(());
    };
    let number = |at: usize, other| arguments.get(at).map_or(Ok(other), |text| text.parse());
    let (count, threads): (usize, usize) = (number(2, 32)?, number(3, 1)?);
    let ledger = Ledger::open_read_only(Path::new(run))?;
    let weights = model::load(Path::new(policy))?;
    let settings = Settings {
        threads,
        ..Settings::default()
    };
    let mut whole: Vec<TrainTree> = Vec::new();
    let mut rows: Vec<Vec<u32>> = Vec::new();
    let mut as_rows: Vec<TrainTree> = Vec::new();
    let mut harnesses: BTreeMap<String, usize> = BTreeMap::new();
    for rollout in ledger.rollouts(&[])? {
        if whole.len() == count {
            break;
        }
        let tree = Tree::build(&ledger.calls(&rollout.spec.id)?)?;
        let kept = select(&tree, &Selection::default());
        let train = kept.train_tree(&tree)?;
        if train.terms() == 0 {
            continue;
        }
        *harnesses.entry(rollout.spec.harness.clone()).or_default() += 1;
        whole.push(train.into_supervised());
        for row in linearise(&tree, &kept, None)?.rows {
            let mask: Vec<bool> = std::iter::repeat_n(false, row.prompt_tokens)
                .chain(row.targets.iter().map(Option::is_some))
                .collect();
            as_rows.push(TrainTree::supervised(&row.tokens, &mask)?);
            rows.push(row.tokens);
        }
    }
    println!(
        "{} rollouts through {harnesses:?}, {} rows",
        whole.len(),
        rows.len()
    );
    if let Some(path) = arguments.get(4) {
        std::fs::write(path, serde_json::to_vec(&rows)?)?;
    }
    let mode = arguments.get(5).map(String::as_str);
    // Each tree, and each row, by itself: nothing is merged across them.
    let alone = |trees: &[TrainTree]| -> Result<(u64, f64, f64), Box<dyn Error>> {
        let mut sum = (0, 0.0, 0.0);
        for tree in trees {
            let found = measure(&weights, std::slice::from_ref(tree), settings)?;
            sum = (sum.0 + found.0, sum.1 + found.1, sum.2 + found.2);
        }
        Ok(sum)
    };
    println!("before: peak {} MB", peak_megabytes());
    let mut all = Vec::new();
    for name in ["forest", "trees", "rows"] {
        if mode.is_some_and(|mode| mode != name) {
            continue;
        }
        let found = match name {
            "forest" => measure(&weights, &whole, settings)?,
            "trees" => alone(&whole)?,
            _ => alone(&as_rows)?,
        };
        let (tokens, wall, processor) = found;
        println!(
            "{name:>6}: {tokens:>8} tokens, {wall:>7.2} s wall, {processor:>7.2} s of processor, peak {} MB so far",
            peak_megabytes()
        );
        all.push((name, found));
    }
    if let [rest @ .., (_, rows)] = all.as_slice() {
        for (name, (tokens, wall, processor)) in rest {
            println!(
                "rows against {name}: tokens {:.2}, wall {:.2}, processor {:.2}",
                rows.0 as f64 / *tokens as f64,
                rows.1 / wall,
                rows.2 / processor
            );
        }
    }
    Ok(())
}
