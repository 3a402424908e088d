//! I3 over files: whatever the forks, each generated token is trained in exactly one row.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};

use export::{Facts, read, report, row_lines, write_lines};
use proptest::prelude::*;
use serde_json::{Value, json};
use tree::Selection;

/// A call of a made-up rollout: which earlier one its prompt goes on from and how much of it is taken
/// over, what is added, what comes out.
#[derive(Debug, Clone)]
struct Step {
    after: prop::sample::Index,
    share: f64,
    added: Vec<u32>,
    output: Vec<u32>,
    logprobs: bool,
    delivered: bool,
}

fn step() -> impl Strategy<Value = Step> {
    // Few different tokens, so that outputs share their beginnings.
    let tokens = |least| prop::collection::vec(0u32..3, least..5);
    (
        any::<prop::sample::Index>(),
        prop_oneof![4 => Just(1.0), 1 => 0.0..1.0],
        tokens(0),
        tokens(0),
        prop::bool::weighted(0.9),
        prop::bool::weighted(0.9),
    )
        .prop_map(|(after, share, added, output, logprobs, delivered)| Step {
            after,
            share,
            added,
            output,
            logprobs,
            delivered,
        })
}

/// Captures of the steps, as lines.
fn lines(steps: &[Step]) -> Vec<Value> {
    let mut histories: Vec<Vec<u32>> = vec![vec![9, 8]];
    let mut lines = Vec::new();
    for (call, step) in steps.iter().enumerate() {
        let before = &histories[step.after.index(histories.len())];
        let taken = (before.len() as f64 * step.share) as usize;
        let mut prompt = before[..taken].to_vec();
        prompt.extend(&step.added);
        let logprobs: Vec<f64> = (0..step.output.len())
            .map(|at| -(call as f64) - at as f64 / 8.0)
            .collect();
        histories.push([prompt.clone(), step.output.clone()].concat());
        lines.push(json!({
            "rollout": "r", "call": call, "prompt_ids": prompt, "output_ids": step.output,
            "logprobs": if step.logprobs { json!(logprobs) } else { Value::Null },
            "finish": "stop", "at": call, "delivered": step.delivered,
        }));
    }
    lines
}

fn ids(value: &Value) -> Vec<u32> {
    let values = value.as_array().unwrap().iter();
    values.map(|id| id.as_u64().unwrap() as u32).collect()
}

/// What can be trained of the calls: each prefix that ends with a generated token, unless the
/// call that owns it (delivered before lost, then the earliest) has no log-probabilities.
fn trainable(lines: &[Value]) -> BTreeSet<Vec<u32>> {
    let mut owners: BTreeMap<Vec<u32>, (bool, usize, bool)> = BTreeMap::new();
    for (call, line) in lines.iter().enumerate() {
        let mut prefix = ids(&line["prompt_ids"]);
        for id in ids(&line["output_ids"]) {
            prefix.push(id);
            let claim = (line["delivered"] == false, call, line["logprobs"].is_null());
            let owner = owners.entry(prefix.clone()).or_insert(claim);
            *owner = (*owner).min(claim);
        }
    }
    owners
        .into_iter()
        .filter(|(prefix, (_, _, unknown))| !unknown && prefix.len() > 1)
        .map(|(prefix, _)| prefix)
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn each_generated_token_is_trained_in_one_row(steps in prop::collection::vec(step(), 1..9)) {
        let lines = lines(&steps);
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let captured = read(text.as_bytes()).unwrap();
        let grown = report(&captured[0], &Selection::All, None).unwrap();
        let mut out = Vec::new();
        write_lines(&mut out, &row_lines(&grown.rows, Facts::default())).unwrap();
        let mut trained = BTreeSet::new();
        for row in String::from_utf8(out).unwrap().lines() {
            let row: Value = serde_json::from_str(row).unwrap();
            let (tokens, mask) = (ids(&row["tokens"]), ids(&row["loss_mask"]));
            let prompt = row["prompt_tokens"].as_u64().unwrap() as usize;
            prop_assert_eq!(tokens.len(), prompt + mask.len());
            for (at, _) in mask.iter().enumerate().filter(|(_, mask)| **mask == 1) {
                let prefix = tokens[..=prompt + at].to_vec();
                prop_assert!(trained.insert(prefix.clone()), "{prefix:?} is trained twice");
            }
        }
        prop_assert_eq!(trained, trainable(&lines));
    }
}
