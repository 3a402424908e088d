//! Decoding against the forest, against itself in other company, and under a tiny cache.

use proptest::prelude::*;

use super::*;
use crate::{
    config::Family,
    device::Device,
    forest::{self, Segment},
};

fn weights(family: Family) -> Arc<Weights> {
    let config = Config {
        model_type: family,
        vocab_size: 41,
        hidden_size: 32,
        intermediate_size: 40,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        max_position_embeddings: 400,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        rope_scaling: None,
        tie_word_embeddings: true,
    };
    let mut weights = Weights::random(config, 9);
    for tensor in weights.layout.tensors.iter().filter(|tensor| tensor.decays) {
        for value in &mut weights.data[tensor.range.clone()] {
            *value *= 6.0;
        }
    }
    Arc::new(weights)
}

fn batch(weights: &Arc<Weights>, cache: &Arc<PrefixCache>, settings: Settings) -> Batch {
    let prepared = Prepared::new(Arc::clone(weights), Device::CPU).unwrap();
    Batch::new(
        Arc::new(prepared),
        Batch::rope(weights),
        Arc::clone(cache),
        settings,
    )
}

fn run_all(batch: &mut Batch) -> Vec<Finished> {
    let mut all = Vec::new();
    while !batch.is_empty() {
        all.extend(batch.step().unwrap());
    }
    all.sort_by_key(|finished| finished.id);
    all
}

fn sequence(id: u64, prompt: &[u32], seed: u64, tokens_max: u32) -> Sequence {
    let sampling = Sampling {
        temperature: 0.9,
        seed,
        tokens_max,
        stop_ids: vec![40],
        ..Sampling::default()
    };
    Sequence {
        id,
        prompt: prompt.to_vec(),
        sampling,
        stop_when: None,
    }
}

#[test]
fn log_probabilities_equal_the_forests() {
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3] {
        let weights = weights(family);
        let cache = Arc::new(PrefixCache::new(&weights.config, 1 << 20));
        let mut batch = batch(&weights, &cache, Settings::default());
        let prompt: Vec<u32> = (0..90).map(|i| (i * 7 + 3) % 40).collect();
        for id in 0..5 {
            batch.admit(sequence(id, &prompt[..80 + id as usize], id, 50));
        }
        for finished in run_all(&mut batch) {
            let prompt = &prompt[..80 + finished.id as usize];
            let drawn: Vec<u32> = finished.drawn.iter().map(|d| d.token).collect();
            let tokens = [prompt, &drawn].concat();
            let targets: Vec<u32> = (prompt.len() as u32..tokens.len() as u32).collect();
            for temperature in [1.0, 0.9] {
                let segments = [Segment {
                    parent: None,
                    tokens: &tokens,
                    targets: &targets,
                }];
                let settings = forest::Settings {
                    temperature,
                    ..forest::Settings::default()
                };
                let outcome = forest::run(&weights, &segments, None, settings).unwrap();
                for (expected, d) in outcome.logprobs[0].iter().zip(&finished.drawn) {
                    let found = if temperature == 1.0 {
                        d.logprob_model
                    } else {
                        d.logprob_sampled
                    };
                    assert!(
                        (expected - found).abs() < 1e-4,
                        "{family:?}: {expected} and {found}"
                    );
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Company, arrival order, prompt chunking and cache size change no bit of a reply.
    #[test]
    fn replies_do_not_depend_on_company(
        lengths in prop::collection::vec((1_usize..150, 0_usize..3, 1_u32..60), 1..9),
        rows_max in 1_usize..70,
        sequences_max in 1_usize..6,
        steps_between in 0_usize..5,
        small_cache in any::<bool>(),
    ) {
        let weights = weights(Family::Qwen3);
        let prompt = |kind: usize, len: usize| -> Vec<u32> {
            // Common beginnings of several blocks, then different ends.
            (0..len).map(|i| if i < 70 { (i * 5 % 39) as u32 } else { ((i * 3 + kind * 11) % 39) as u32 }).collect()
        };
        let bytes = if small_cache { 1 } else { 64 << 20 };
        let cache = Arc::new(PrefixCache::new(&weights.config, bytes));
        let mut together = batch(&weights, &cache, Settings { sequences_max, rows_max });
        let mut found = Vec::new();
        for (id, (len, kind, tokens)) in lengths.iter().enumerate() {
            together.admit(sequence(id as u64, &prompt(*kind, *len), id as u64, *tokens));
            for _ in 0..steps_between {
                found.extend(together.step().unwrap());
            }
        }
        found.extend(run_all(&mut together));
        found.sort_by_key(|finished| finished.id);
        prop_assert_eq!(found.len(), lengths.len());
        for (id, (len, kind, tokens)) in lengths.iter().enumerate() {
            let fresh = Arc::new(PrefixCache::new(&weights.config, 1 << 20));
            let mut alone = batch(&weights, &fresh, Settings::default());
            alone.admit(sequence(id as u64, &prompt(*kind, *len), id as u64, *tokens));
            let expected = run_all(&mut alone).remove(0);
            prop_assert_eq!(&expected.drawn, &found[id].drawn);
            prop_assert_eq!(expected.finish, found[id].finish);
        }
    }
}

#[test]
fn prefixes_are_found_again_until_the_weights_change() {
    let weights = weights(Family::Qwen3);
    let cache = Arc::new(PrefixCache::new(&weights.config, 64 << 20));
    let mut first = batch(&weights, &cache, Settings::default());
    let prompt: Vec<u32> = (0..100).map(|i| i % 40).collect();
    first.admit(sequence(0, &prompt, 1, 40));
    let reply = run_all(&mut first).remove(0);
    assert_eq!(reply.cached_tokens, 0);
    let mut next = prompt.clone();
    next.extend(reply.drawn.iter().map(|d| d.token));
    next.extend([1, 2, 3]);
    first.admit(sequence(1, &next, 2, 4));
    let again = run_all(&mut first).remove(0);
    // Everything but the last drawn token had been computed; whole blocks are found.
    assert_eq!(again.cached_tokens, (next.len() - 4) / BLOCK * BLOCK);
    cache.clear();
    let mut second = batch(&weights, &cache, Settings::default());
    second.admit(sequence(2, &next, 2, 4));
    first.admit(sequence(3, &next, 2, 4));
    let (fresh, stale) = (
        run_all(&mut second).remove(0),
        run_all(&mut first).remove(0),
    );
    assert_eq!((fresh.cached_tokens, stale.cached_tokens), (0, 0));
    assert_eq!(fresh.drawn, again.drawn);
}

#[test]
fn limits_end_replies_by_name() {
    let weights = weights(Family::Llama);
    let cache = Arc::new(PrefixCache::new(&weights.config, 1 << 20));
    let mut batch = batch(&weights, &cache, Settings::default());
    let never_stop = |id, tokens_max| {
        let mut sequence = sequence(id, &[1, 2, 3], id, tokens_max);
        sequence.sampling.stop_ids.clear();
        sequence
    };
    batch.admit(never_stop(0, 7));
    batch.admit(never_stop(1, 100_000));
    let mut stopping = never_stop(2, 100);
    stopping.stop_when = Some(Arc::new(|ids| ids.len() == 5));
    batch.admit(stopping);
    batch.admit(never_stop(3, 100));
    batch.retain(|id| id != 3);
    let all = run_all(&mut batch);
    let ends: Vec<_> = all
        .iter()
        .map(|f| (f.id, f.drawn.len(), f.finish))
        .collect();
    let expected = [
        (0, 7, FinishReason::Length),
        (1, 397, FinishReason::Context),
        (2, 5, FinishReason::Stop),
    ];
    assert_eq!(ends, expected);
}
