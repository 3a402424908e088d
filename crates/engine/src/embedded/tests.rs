//! Many calls, weights that change, stop strings, limits, a device that breaks.

use super::*;
use model::{
    config::{Config, Family},
    device::{Backend, DeviceError, Held, Product},
};
use record::{FinishReason, Sampling};

fn weights(seed: u64) -> Arc<Weights> {
    let config = Config {
        model_type: Family::Qwen3,
        vocab_size: 300,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 16,
        max_position_embeddings: 256,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        rope_scaling: None,
        tie_word_embeddings: true,
    };
    Arc::new(Weights::random(config, seed))
}

fn request(seed: u64, tokens_max: u32) -> Request {
    let sampling = Sampling {
        seed,
        tokens_max,
        ..Sampling::default()
    };
    Request {
        prompt_ids: vec![1, 2, 3],
        sampling,
        hint: None,
    }
}

fn start(settings: Settings) -> Embedded {
    Embedded::start("test", weights(1), 0, settings).unwrap()
}

#[tokio::test]
async fn many_calls_are_answered_and_counted() {
    let engine = start(Settings::default());
    let replies =
        futures::future::join_all((0..40).map(|seed| engine.generate(request(seed, 10)))).await;
    for reply in replies {
        let reply = reply.unwrap();
        assert_eq!(
            (reply.token_ids.len(), reply.finish),
            (10, FinishReason::Length)
        );
        assert_eq!(reply.check(), Ok(()));
        assert!(reply.trainable());
    }
    assert_eq!(engine.totals().generated_tokens, 400);
}

#[tokio::test]
async fn calls_know_their_weights_and_new_weights_answer_differently() {
    let engine = start(Settings::default());
    let before = engine.generate(request(5, 20)).await.unwrap();
    let again = engine.generate(request(5, 20)).await.unwrap();
    assert_eq!(before.token_ids, again.token_ids);
    engine.set_weights(weights(2), 7).unwrap();
    let after = engine.generate(request(5, 20)).await.unwrap();
    assert_eq!(
        after.policy,
        [PolicySpan {
            start: 0,
            version: 7
        }]
    );
    assert_ne!(after.logprobs_model, before.logprobs_model);
    let mut other = (*weights(1)).clone();
    other.config.rope_theta = 5.0;
    assert!(matches!(
        engine.set_weights(Arc::new(other), 8),
        Err(EngineError::Invalid(_))
    ));
}

#[tokio::test]
async fn bad_requests_are_named() {
    let engine = start(Settings::default());
    let with = |change: &dyn Fn(&mut Request)| {
        let mut request = request(0, 5);
        change(&mut request);
        request
    };
    let long = engine
        .generate(with(&|r| r.prompt_ids = vec![1; 256]))
        .await;
    assert_eq!(
        long,
        Err(EngineError::TooLong {
            prompt_tokens: 256,
            context_tokens_max: 256
        })
    );
    for bad in [
        with(&|r| r.prompt_ids.clear()),
        with(&|r| r.prompt_ids.push(300)),
        with(&|r| r.sampling.temperature = -1.0),
        with(&|r| r.sampling.top_p = 0.0),
        with(&|r| r.sampling.tokens_max = 0),
        with(&|r| r.sampling.stop = vec!["x".into()]),
    ] {
        assert!(matches!(
            engine.generate(bad).await,
            Err(EngineError::Invalid(_))
        ));
    }
}

#[tokio::test]
async fn stop_strings_end_a_reply() {
    let detokenise: Detokenise = Arc::new(|ids| ids.iter().map(|id| format!("<{id}>")).collect());
    let engine = start(Settings {
        detokenise: Some(detokenise),
        ..Settings::default()
    });
    let free = engine.generate(request(3, 30)).await.unwrap();
    let mut stopped = request(3, 30);
    stopped.sampling.stop = vec![format!("<{}>", free.token_ids[12])];
    let reply = engine.generate(stopped).await.unwrap();
    assert_eq!(reply.finish, FinishReason::Stop);
    assert!(reply.token_ids.len() <= 13 && free.token_ids.starts_with(&reply.token_ids));
}

#[tokio::test]
async fn a_dropped_call_makes_room_and_a_full_queue_says_so() {
    let batch = decode::Settings {
        sequences_max: 1,
        rows_max: 64,
    };
    let engine = start(Settings {
        threads: 1,
        batch,
        queue_max: 1,
        ..Settings::default()
    });
    let long = |seed| engine.generate(request(seed, 200));
    let mut calls: Vec<_> = (0..20).map(|seed| Box::pin(long(seed))).collect();
    let mut busy = 0;
    for call in &mut calls {
        if let std::task::Poll::Ready(reply) = futures::poll!(call.as_mut()) {
            busy += usize::from(matches!(reply, Err(EngineError::Busy { waiting: 1 })));
        }
    }
    assert!(busy >= 10, "{busy} of 20 were refused");
    drop(calls);
    // The dropped calls leave the batch; this one is served in a queue of one.
    loop {
        match engine.generate(request(99, 5)).await {
            Ok(reply) => break assert_eq!(reply.token_ids.len(), 5),
            Err(EngineError::Busy { .. }) => tokio::task::yield_now().await,
            Err(other) => panic!("{other}"),
        }
    }
}

/// Takes weights, or not, and multiplies nothing.
#[derive(Debug)]
struct Broken {
    takes_weights: bool,
}

fn broke(what: &'static str) -> DeviceError {
    DeviceError::Failed {
        name: "broken".into(),
        what,
        reason: "as the test wants".into(),
    }
}

impl Backend for Broken {
    fn hold(&self, _: &[f32]) -> Result<Arc<dyn Held>, DeviceError> {
        if self.takes_weights {
            Ok(Arc::new(Broken {
                takes_weights: true,
            }))
        } else {
            Err(broke("copying"))
        }
    }
}

impl Held for Broken {
    fn product(&self, _: &mut [f32], _: &Product<'_>) -> Result<(), DeviceError> {
        Err(broke("a product"))
    }
}

#[tokio::test]
async fn a_broken_device_fails_calls_and_never_falls_back() {
    static REFUSES: Broken = Broken {
        takes_weights: false,
    };
    static BREAKS: Broken = Broken {
        takes_weights: true,
    };
    let on = |broken: &'static Broken| Settings {
        device: Device::of(broken),
        ..Settings::default()
    };
    let refused = Embedded::start("test", weights(1), 0, on(&REFUSES));
    assert!(matches!(refused, Err(EngineError::Gone(_))), "{refused:?}");
    let engine = start(on(&BREAKS));
    // The thread lives on: the second call gets its answer, too.
    for seed in 0..2 {
        let answer = engine.generate(request(seed, 5)).await;
        let Err(EngineError::Gone(reason)) = answer else {
            panic!("expected the device's error, found {answer:?}");
        };
        assert!(reason.contains("as the test wants"), "{reason}");
    }
    assert_eq!(engine.totals().generated_tokens, 0);
}
