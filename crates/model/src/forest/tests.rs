//! The forest against finite differences, against a reference made with another library, and
//! against itself computed row by row.

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::config::{Config, Family};

fn shape(family: Family) -> Config {
    Config {
        model_type: family,
        vocab_size: 23,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 4,
        max_position_embeddings: 256,
        rms_norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: None,
        tie_word_embeddings: family != Family::Llama,
    }
}

fn weights(family: Family, seed: u64) -> Weights {
    let mut weights = Weights::random(shape(family), seed);
    // Larger than an initialisation, so that attention is far from uniform.
    for tensor in weights.layout.tensors.iter().filter(|tensor| tensor.decays) {
        for value in &mut weights.data[tensor.range.clone()] {
            *value *= 8.0;
        }
    }
    weights
}

/// A random forest as owned data.
#[derive(Debug, Clone)]
struct Owned {
    parent: Option<usize>,
    tokens: Vec<u32>,
    targets: Vec<u32>,
}

fn borrow(forest: &[Owned]) -> Vec<Segment<'_>> {
    forest
        .iter()
        .map(|s| Segment {
            parent: s.parent,
            tokens: &s.tokens,
            targets: &s.targets,
        })
        .collect()
}

fn forests() -> impl Strategy<Value = Vec<Owned>> {
    let segment = (
        prop::collection::vec(0_u32..23, 1..9),
        any::<u16>(),
        0_usize..4,
    );
    prop::collection::vec(segment, 1..10).prop_map(|raw| {
        let mut forest: Vec<Owned> = Vec::new();
        let mut open: Vec<usize> = Vec::new();
        for (index, (tokens, bits, up)) in raw.into_iter().enumerate() {
            open.truncate(open.len().saturating_sub(up.min(open.len())));
            let parent = open.last().copied();
            let targets = (0..tokens.len() as u32)
                .filter(|offset| bits >> offset & 1 == 1 && (parent.is_some() || *offset > 0))
                .collect();
            forest.push(Owned {
                parent,
                tokens,
                targets,
            });
            open.push(index);
        }
        forest
    })
}

fn quadratic(segment: usize, index: usize, logprob: f32) -> f32 {
    let scale = ((segment * 7 + index * 3) % 5) as f32 - 1.5;
    scale * (1.0 + 0.1 * logprob)
}

/// The same forest without any sharing: one sequence per target-owning root-to-segment path.
fn rows(forest: &[Owned]) -> (Vec<Owned>, Vec<usize>) {
    let (mut sequences, mut owners) = (Vec::new(), Vec::new());
    for (index, segment) in forest
        .iter()
        .enumerate()
        .filter(|(_, s)| !s.targets.is_empty())
    {
        let mut chain = vec![index];
        while let Some(parent) = forest[chain[chain.len() - 1]].parent {
            chain.push(parent);
        }
        let above: Vec<u32> = chain
            .iter()
            .skip(1)
            .rev()
            .flat_map(|i| forest[*i].tokens.clone())
            .collect();
        let targets = segment
            .targets
            .iter()
            .map(|offset| above.len() as u32 + offset)
            .collect();
        let tokens = [above, segment.tokens.clone()].concat();
        sequences.push(Owned {
            parent: None,
            tokens,
            targets,
        });
        owners.push(index);
    }
    (sequences, owners)
}

fn close(a: &[f32], b: &[f32], tolerance: f32) -> Result<(), String> {
    let scale = a.iter().chain(b).fold(0.1_f32, |m, v| m.max(v.abs()));
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        if (x - y).abs() > tolerance * scale {
            return Err(format!("at {i}: {x} and {y} (largest {scale})"));
        }
    }
    if a.len() == b.len() {
        Ok(())
    } else {
        Err(format!("{} and {} values", a.len(), b.len()))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Sharing changes nothing: losses and gradients equal those of separate rows, however the
    /// forest is cut into trunk and blocks.
    #[test]
    fn forest_equals_rows(forest in forests(), family in 0_usize..3, limit in 1_usize..40, threads in 1_usize..3) {
        let weights = weights([Family::Llama, Family::Qwen2, Family::Qwen3][family], 3);
        let settings = Settings { threads, block_tokens_max: limit, temperature: 0.8, recompute: threads == 1, device: Device::CPU };
        let shared = run(&weights, &borrow(&forest), Some(&quadratic), settings).unwrap();
        let (sequences, owners) = rows(&forest);
        let loss = |segment: usize, index: usize, logprob: f32| quadratic(owners[segment], index, logprob);
        let plain = Settings { threads: 1, block_tokens_max: 10_000, temperature: 0.8, recompute: false, device: Device::CPU };
        let separate = run(&weights, &borrow(&sequences), Some(&loss), plain).unwrap();
        for (row, owner) in owners.iter().enumerate() {
            prop_assert_eq!(close(&shared.logprobs[*owner], &separate.logprobs[row], 1e-5), Ok(()));
            prop_assert_eq!(close(&shared.entropies[*owner], &separate.entropies[row], 1e-5), Ok(()));
        }
        prop_assert_eq!(close(&shared.gradient, &separate.gradient, 2e-5), Ok(()));
        let again = run(&weights, &borrow(&forest), Some(&quadratic), settings).unwrap();
        prop_assert!(shared.gradient == again.gradient, "the same forest gave other bits");
    }
}

#[test]
fn gradients_equal_finite_differences() {
    let forest = [
        Owned {
            parent: None,
            tokens: vec![1, 5, 7, 2],
            targets: vec![2],
        },
        Owned {
            parent: Some(0),
            tokens: vec![3, 9, 11],
            targets: vec![0, 2],
        },
        Owned {
            parent: Some(1),
            tokens: vec![4, 4],
            targets: vec![0, 1],
        },
        Owned {
            parent: Some(0),
            tokens: vec![8, 20, 3],
            targets: vec![0, 1],
        },
    ];
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3] {
        let mut weights = weights(family, 5);
        let settings = Settings {
            threads: 1,
            block_tokens_max: 6,
            temperature: 1.0,
            recompute: false,
            device: Device::CPU,
        };
        let weigh = |segment: usize, index: usize| 0.3 + 0.2 * segment as f32 - 0.25 * index as f32;
        let loss = |segment: usize, index: usize, _: f32| weigh(segment, index);
        let gradient = run(&weights, &borrow(&forest), Some(&loss), settings)
            .unwrap()
            .gradient;
        let value = |weights: &Weights| -> f64 {
            let outcome = run(weights, &borrow(&forest), None, settings).unwrap();
            let each = outcome.logprobs.iter().enumerate();
            each.flat_map(|(s, row)| {
                row.iter()
                    .enumerate()
                    .map(move |(i, l)| f64::from(weigh(s, i) * l))
            })
            .sum()
        };
        for tensor in weights.layout.tensors.clone() {
            // The largest entry of each tensor's gradient: the difference must not drown in rounding.
            let at = tensor
                .range
                .clone()
                .max_by(|a, b| gradient[*a].abs().total_cmp(&gradient[*b].abs()))
                .unwrap();
            let (kept, step) = (weights.data[at], 5e-4);
            weights.data[at] = kept + step;
            let above = value(&weights);
            weights.data[at] = kept - step;
            let below = value(&weights);
            weights.data[at] = kept;
            let numeric = (above - below) / (2.0 * f64::from(step));
            let error = (numeric - f64::from(gradient[at])).abs() / numeric.abs().max(5e-2);
            assert!(
                error < 2e-2,
                "{family:?} {}: {} and {numeric}",
                tensor.name,
                gradient[at]
            );
        }
    }
}

/// Values and entropies: gradients of a loss over all three by differences, with and without
/// recomputation.
#[test]
fn values_and_entropies_have_the_gradients_of_differences() {
    let tokens: [&[u32]; 4] = [&[1, 5, 7, 2], &[3, 9, 11], &[4, 4], &[8, 20, 3]];
    let targets: [&[u32]; 4] = [&[2], &[0, 2], &[0, 1], &[0, 1]];
    let parents = [None, Some(0), Some(1), Some(0)];
    let segments: Vec<Segment<'_>> = (0..4)
        .map(|i| Segment {
            parent: parents[i],
            tokens: tokens[i],
            targets: targets[i],
        })
        .collect();
    let mut weights = weights(Family::Qwen2, 5);
    let mut head = ValueHead::zeros(16);
    for (i, value) in head.data.iter_mut().enumerate() {
        *value = 0.2 * ((i % 5) as f32 - 2.0);
    }
    let weigh = |segment: usize, index: usize| 0.3 + 0.2 * segment as f32 - 0.25 * index as f32;
    let loss = |segment: usize, index: usize, point: Point| Slopes {
        logprob: weigh(segment, index),
        entropy: 0.7 * weigh(index, segment),
        value: point.value - 0.5,
    };
    let total = |weights: &Weights, head: &ValueHead| -> f64 {
        let ask = Ask {
            loss: None,
            values: Some(head),
            policy: true,
        };
        let outcome = answer(weights, &segments, &ask, Settings::default()).unwrap();
        let mut sum = 0.0;
        for (s, own) in targets.iter().enumerate() {
            for i in 0..own.len() {
                let value = f64::from(outcome.values[s][i]) - 0.5;
                sum += f64::from(weigh(s, i) * outcome.logprobs[s][i]);
                sum += f64::from(0.7 * weigh(i, s) * outcome.entropies[s][i]);
                sum += 0.5 * value * value;
            }
        }
        sum
    };
    let ask = Ask {
        loss: Some(&loss),
        values: Some(&head),
        policy: true,
    };
    let mut settings = Settings {
        threads: 1,
        block_tokens_max: 6,
        ..Settings::default()
    };
    let outcome = answer(&weights, &segments, &ask, settings).unwrap();
    settings.recompute = true;
    let again = answer(&weights, &segments, &ask, settings).unwrap();
    assert!(again.gradient == outcome.gradient && again.values == outcome.values);
    // Siblings see the value of the state before the fork.
    assert_eq!(outcome.values[1][0], outcome.values[3][0]);
    let check = |name: &str, found: f32, numeric: f64| {
        let error = (numeric - f64::from(found)).abs() / numeric.abs().max(5e-2);
        assert!(error < 2e-2, "{name}: {found} and {numeric}");
    };
    let step = 5e-4;
    for tensor in weights.layout.tensors.clone() {
        let at = tensor
            .range
            .clone()
            .max_by(|a, b| {
                outcome.gradient[*a]
                    .abs()
                    .total_cmp(&outcome.gradient[*b].abs())
            })
            .unwrap();
        let kept = weights.data[at];
        weights.data[at] = kept + step;
        let above = total(&weights, &head);
        weights.data[at] = kept - step;
        let below = total(&weights, &head);
        weights.data[at] = kept;
        check(
            &tensor.name,
            outcome.gradient[at],
            (above - below) / (2.0 * f64::from(step)),
        );
    }
    for at in [0, 7, 16] {
        let mut moved = head.clone();
        moved.data[at] += 1e-2;
        let above = total(&weights, &moved);
        moved.data[at] -= 2e-2;
        let below = total(&weights, &moved);
        check(
            "value head",
            outcome.value_gradient[at],
            (above - below) / 2e-2,
        );
    }
    // A critic alone projects nothing onto the vocabulary and has the gradient of the values.
    let ask = Ask {
        policy: false,
        ..ask
    };
    let alone = answer(&weights, &segments, &ask, settings).unwrap();
    assert_eq!(alone.values, outcome.values);
    assert_eq!(alone.value_gradient, outcome.value_gradient);
    let short = ValueHead::zeros(3);
    let ask = Ask {
        values: Some(&short),
        ..ask
    };
    let error = answer(&weights, &segments, &ask, settings).unwrap_err();
    assert_eq!(
        error,
        ForestError::ValueHead {
            expected: 17,
            found: 4
        }
    );
}

fn floats(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(items) => items.iter().flat_map(floats).collect(),
        other => vec![other.as_f64().unwrap() as f32],
    }
}

/// `../shared/vectors/tiny_llama.json`: forward and gradients made by the field's standard library.
#[test]
fn equals_the_reference() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/vectors/tiny_llama.json");
    let Ok(text) = std::fs::read_to_string(&path) else {
        println!("skipped: {} is not there", path.display());
        return;
    };
    let file: Value = serde_json::from_str(&text).unwrap();
    let mut config = file["config"].clone();
    config["model_type"] = "llama".into();
    let config: Config = serde_json::from_value::<Config>(config)
        .unwrap()
        .validated()
        .unwrap();
    let mut weights = Weights::random(config, 0);
    for tensor in weights.layout.tensors.clone() {
        weights.data[tensor.range].copy_from_slice(&floats(&file["weights"][&tensor.name]));
    }
    let cases = file["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        match case["fn"].as_str().unwrap() {
            "forward_backward" => forward_backward(&weights, case),
            "adamw_3_steps" => adamw_steps(weights.clone(), &cases[0], case),
            other => panic!("no check for {other}"),
        }
    }
}

/// The clipped loss of the reference cases, token mean, over three rows as three trees.
fn clipped(weights: &Weights, params: &Value) -> (f64, Outcome) {
    let rows: Vec<Vec<u32>> = serde_json::from_value(params["input_ids"].clone()).unwrap();
    let mask: Vec<Vec<f32>> = serde_json::from_value(params["response_mask"].clone()).unwrap();
    let old: Vec<Vec<f32>> = serde_json::from_value(params["old_log_prob"].clone()).unwrap();
    let advantages = floats(&params["advantages"]);
    let (low, high) = (
        params["clip_low"].as_f64().unwrap() as f32,
        params["clip_high"].as_f64().unwrap() as f32,
    );
    let targets: Vec<u32> = (1..rows[0].len() as u32).collect();
    let segments: Vec<Segment<'_>> = rows
        .iter()
        .map(|tokens| Segment {
            parent: None,
            tokens,
            targets: &targets,
        })
        .collect();
    let count: f32 = mask.iter().flatten().sum();
    let token = |row: usize, i: usize, logprob: f32| -> (f32, f32) {
        let (a, ratio) = (advantages[row], (logprob - old[row][i]).exp());
        let (free, bound) = (-a * ratio, -a * ratio.clamp(1.0 - low, 1.0 + high));
        if free >= bound {
            (free, free)
        } else {
            (bound, 0.0)
        }
    };
    let loss = |row: usize, i: usize, logprob: f32| token(row, i, logprob).1 * mask[row][i] / count;
    let outcome = run(weights, &segments, Some(&loss), Settings::default()).unwrap();
    let mut total = 0.0;
    for (row, logprobs) in outcome.logprobs.iter().enumerate() {
        for (i, logprob) in logprobs.iter().enumerate() {
            total += f64::from(token(row, i, *logprob).0 * mask[row][i] / count);
        }
    }
    (total, outcome)
}

fn forward_backward(weights: &Weights, case: &Value) {
    let (params, expect) = (&case["params"], &case["expect"]);
    let (loss, outcome) = clipped(weights, params);
    assert_eq!(
        close(
            &outcome.logprobs.concat(),
            &floats(&expect["logprob"]),
            1e-5
        ),
        Ok(())
    );
    assert!(
        (loss - expect["loss"].as_f64().unwrap()).abs() < 1e-5,
        "loss {loss}"
    );
    let norm = crate::adamw::norm(&outcome.gradient);
    assert!(
        (norm / expect["grad_norm"].as_f64().unwrap() - 1.0).abs() < 1e-5,
        "gradient norm {norm}"
    );
    for tensor in &weights.layout.tensors {
        let wanted = floats(&expect["grads"][&tensor.name]);
        assert_eq!(
            close(&outcome.gradient[tensor.range.clone()], &wanted, 1e-5),
            Ok(()),
            "{}",
            tensor.name
        );
    }
}

fn adamw_steps(mut weights: Weights, data: &Value, case: &Value) {
    let (params, expect) = (&case["params"], &case["expect"]);
    let number = |name: &str| params[name].as_f64().unwrap() as f32;
    let betas = floats(&params["betas"]);
    assert_eq!(params["decay_all_parameters"], true);
    for tensor in &mut weights.layout.tensors {
        tensor.decays = true;
    }
    let settings = crate::adamw::AdamWSettings {
        beta1: betas[0],
        beta2: betas[1],
        epsilon: number("eps"),
        weight_decay: number("weight_decay"),
        gradient_norm_max: number("clip_grad_norm"),
    };
    let mut optimiser = crate::adamw::AdamW::new(settings, weights.len());
    for step in expect["steps"].as_array().unwrap() {
        let (loss, outcome) = clipped(&weights, &data["params"]);
        assert!(
            (loss - step["loss"].as_f64().unwrap()).abs() < 2e-5,
            "loss {loss}, {step}"
        );
        let norm = optimiser.step(&mut weights, &outcome.gradient, number("lr"));
        assert!(
            (norm / step["grad_norm_before_clip"].as_f64().unwrap() - 1.0).abs() < 1e-4,
            "norm {norm}, {step}"
        );
    }
    let at = |name: &str| {
        let tensor = weights
            .layout
            .tensors
            .iter()
            .find(|tensor| tensor.name == name)
            .unwrap();
        &weights.data[tensor.range.clone()]
    };
    assert_eq!(
        close(
            at("model.norm.weight"),
            &floats(&expect["final_norm_weight"]),
            1e-5
        ),
        Ok(())
    );
    assert_eq!(
        close(
            &at("model.embed_tokens.weight")[..16],
            &floats(&expect["embed_row_0"]),
            1e-4
        ),
        Ok(())
    );
    let query = at("model.layers.0.self_attn.q_proj.weight");
    assert_eq!(close(query, &floats(&expect["q_proj_0"]), 1e-4), Ok(()));
}
