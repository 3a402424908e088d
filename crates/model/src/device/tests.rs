//! A device that is none: it keeps copies and multiplies with plain loops in BLAS's terms, so that
//! everything but the card itself is tested.

use std::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use super::*;
use crate::{
    Weights,
    config::{Config, Family},
    decode::{Batch, Finished, PrefixCache, Prepared, Sequence},
    forest::{self, ForestError, Segment},
};

/// Products until one fails; `u64::MAX` for none.
#[derive(Debug)]
struct Loops {
    held: AtomicU64,
    products: AtomicU64,
    from_weights: AtomicU64,
    good: u64,
}

impl Loops {
    /// Lives as long as the test program, as devices do.
    fn leaked(good: u64) -> &'static Self {
        Box::leak(Box::new(Self {
            held: AtomicU64::new(0),
            products: AtomicU64::new(0),
            from_weights: AtomicU64::new(0),
            good,
        }))
    }
}

#[derive(Debug)]
struct Kept {
    weights: Mutex<Vec<f32>>,
    of: &'static Loops,
}

impl Backend for &'static Loops {
    fn hold(&self, weights: &[f32]) -> Result<Arc<dyn Held>, DeviceError> {
        self.held.fetch_add(1, Relaxed);
        Ok(Arc::new(Kept {
            weights: Mutex::new(weights.to_vec()),
            of: self,
        }))
    }
}

impl Held for Kept {
    fn product(&self, c: &mut [f32], product: &Product<'_>) -> Result<(), DeviceError> {
        if self.of.products.fetch_add(1, Relaxed) >= self.of.good {
            return Err(DeviceError::Failed {
                name: "loops".into(),
                what: "a product",
                reason: "as the test wants".into(),
            });
        }
        let held = self.weights.lock().unwrap();
        let data = |operand: &Operand<'_>| match operand.source {
            Source::Weights(from) => {
                self.of.from_weights.fetch_add(1, Relaxed);
                held[from..].to_vec()
            }
            Source::Memory(data) => data.to_vec(),
        };
        let (left, right) = (data(&product.b), data(&product.a));
        let blas = Blas::of(product);
        assert_eq!(c.len(), blas.m * blas.n, "dense results");
        for column in 0..blas.n {
            for row in 0..blas.m {
                let mut sum = 0.0_f64;
                for inner in 0..blas.k {
                    let l = if blas.transpose_left {
                        left[row * blas.left_stride + inner]
                    } else {
                        left[inner * blas.left_stride + row]
                    };
                    let r = if blas.transpose_right {
                        right[inner * blas.right_stride + column]
                    } else {
                        right[column * blas.right_stride + inner]
                    };
                    sum += f64::from(l) * f64::from(r);
                }
                let place = &mut c[column * blas.m + row];
                let old = if product.beta == 0.0 {
                    0.0
                } else {
                    product.beta * *place
                };
                *place = old + product.alpha * sum as f32;
            }
        }
        Ok(())
    }
}

fn weights(tied: bool) -> Weights {
    let config = Config {
        model_type: Family::Qwen3,
        vocab_size: 41,
        hidden_size: 24,
        intermediate_size: 40,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        max_position_embeddings: 300,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        rope_scaling: None,
        tie_word_embeddings: tied,
    };
    let mut weights = Weights::random(config, 3);
    for tensor in weights.layout.tensors.iter().filter(|tensor| tensor.decays) {
        for value in &mut weights.data[tensor.range.clone()] {
            *value *= 6.0;
        }
    }
    weights
}

fn close(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (at, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(
            (a - b).abs() <= 2e-4 * (1.0 + a.abs()),
            "{what} {at}: {a} and {b}"
        );
    }
}

fn trained(
    weights: &Weights,
    device: Device,
    block_tokens_max: usize,
) -> Result<forest::Outcome, ForestError> {
    let root: Vec<u32> = (0..30).map(|i| (i * 7 + 3) % 41).collect();
    let (left, right) = ([5, 6, 7, 8, 9], [9, 8, 1]);
    let segment = |parent, tokens, targets| Segment {
        parent,
        tokens,
        targets,
    };
    let segments = [
        segment(None, root.as_slice(), [3, 4, 29].as_slice()),
        segment(Some(0), &left, &[0, 1, 2, 3, 4]),
        segment(Some(0), &right, &[0, 2]),
    ];
    let settings = forest::Settings {
        threads: 2,
        block_tokens_max,
        device,
        ..forest::Settings::default()
    };
    let loss = |segment: usize, target: usize, _: f32| -0.1 * (1 + segment + target) as f32;
    forest::run(weights, &segments, Some(&loss), settings)
}

#[test]
fn a_forest_on_a_device_is_the_forest() {
    for (tied, block_tokens_max) in [(true, 2048), (false, 8)] {
        let weights = weights(tied);
        let here = trained(&weights, Device::CPU, block_tokens_max).unwrap();
        let loops = Loops::leaked(u64::MAX);
        let there = trained(
            &weights,
            Device::of(Box::leak(Box::new(loops))),
            block_tokens_max,
        );
        let there = there.unwrap();
        for (own, other) in here.logprobs.iter().zip(&there.logprobs) {
            close(own, other, "log-probability");
        }
        close(&here.gradient, &there.gradient, "gradient");
        assert_eq!(
            loops.held.load(Relaxed),
            1,
            "weights are copied once a pass"
        );
        let (products, from_weights) = (
            loops.products.load(Relaxed),
            loops.from_weights.load(Relaxed),
        );
        // Of a projection's three products (forward, by input, by weight) two use held weights.
        assert!(
            from_weights > products / 2,
            "{from_weights} of {products} used the held weights"
        );
    }
}

#[test]
fn a_device_that_fails_fails_the_pass() {
    let weights = weights(true);
    let good = Loops::leaked(u64::MAX);
    let _ = trained(&weights, Device::of(Box::leak(Box::new(good))), 2048).unwrap();
    for at in [0, 3, good.products.load(Relaxed) - 1] {
        let loops: &'static &'static Loops = Box::leak(Box::new(Loops::leaked(at)));
        let found = trained(&weights, Device::of(loops), 2048);
        let Err(ForestError::Device(DeviceError::Failed { reason, .. })) = found else {
            panic!("product {at}: expected the device's error, found {found:?}");
        };
        assert_eq!(reason, "as the test wants");
    }
}

fn batch(weights: &Arc<Weights>, device: Device) -> Batch {
    let prepared = Prepared::new(Arc::clone(weights), device).unwrap();
    let cache = Arc::new(PrefixCache::new(&weights.config, 1 << 20));
    let mut batch = Batch::new(
        Arc::new(prepared),
        Batch::rope(weights),
        cache,
        crate::decode::Settings::default(),
    );
    for id in 0..5 {
        let prompt = (0..70 + id).map(|i| ((i * 7 + 3) % 40) as u32).collect();
        let sampling = record::Sampling {
            temperature: 0.0,
            tokens_max: 6,
            ..record::Sampling::default()
        };
        batch.admit(Sequence {
            id,
            prompt,
            sampling,
            stop_when: None,
        });
    }
    batch
}

fn finished(batch: &mut Batch) -> Result<Vec<Finished>, DeviceError> {
    let mut all = Vec::new();
    while !batch.is_empty() {
        all.extend(batch.step()?);
    }
    all.sort_by_key(|finished| finished.id);
    Ok(all)
}

#[test]
fn decoding_on_a_device_draws_the_same() {
    let weights = Arc::new(weights(true));
    let here = finished(&mut batch(&weights, Device::CPU)).unwrap();
    let loops: &'static &'static Loops = Box::leak(Box::new(Loops::leaked(u64::MAX)));
    let there = finished(&mut batch(&weights, Device::of(loops))).unwrap();
    assert_eq!(here.len(), 5);
    for (own, other) in here.iter().zip(&there) {
        let ids = |finished: &Finished| -> Vec<u32> {
            finished.drawn.iter().map(|drawn| drawn.token).collect()
        };
        assert_eq!(ids(own), ids(other));
        let logs = |finished: &Finished| -> Vec<f32> {
            finished
                .drawn
                .iter()
                .map(|drawn| drawn.logprob_model)
                .collect()
        };
        close(&logs(own), &logs(other), "log-probability");
    }
    assert_eq!(loops.held.load(Relaxed), 1, "weights are copied once");
}

#[test]
fn a_device_that_fails_fails_the_step() {
    let weights = Arc::new(weights(true));
    let loops: &'static &'static Loops = Box::leak(Box::new(Loops::leaked(4)));
    let mut batch = batch(&weights, Device::of(loops));
    let found = finished(&mut batch);
    assert!(
        matches!(found, Err(DeviceError::Failed { .. })),
        "{found:?}"
    );
    assert!(batch.is_empty(), "what ran is given up");
}

#[test]
fn names_that_cannot_be_served_say_why() {
    assert_eq!(Device::open("cpu"), Ok(Device::CPU));
    let error = Device::open("tpu").unwrap_err();
    assert!(error.to_string().contains("\"tpu\""), "{error}");
    // Without the feature always; with it wherever there is no card.
    #[cfg(not(feature = "cuda"))]
    assert!(matches!(
        Device::open("cuda"),
        Err(DeviceError::NotBuilt { .. })
    ));
    #[cfg(feature = "cuda")]
    if let Err(error) = Device::open("cuda") {
        assert!(matches!(error, DeviceError::Missing { .. }), "{error}");
    }
}
