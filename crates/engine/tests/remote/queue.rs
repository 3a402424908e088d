//! Servers tell how many requests wait, or are known not to.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use engine::{
    Queue,
    pool::{self, Pool},
    remote::queue::UNKNOWN,
};

use super::*;

/// What is asked beside requests.
pub(crate) const PATHS: [&str; 3] = ["/metrics", "/v1/loads?include=core", "/get_load"];

/// For a number to arrive: some rounds.
const PATIENCE: Duration = Duration::from_secs(20);

/// A page of metrics as vLLM 0.32 writes it, for two engines in one server.
fn vllm_metrics(first: u64, second: u64) -> Value {
    Value::String(format!(
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n\
         # TYPE vllm:num_requests_running gauge\n\
         vllm:num_requests_running{{engine=\"0\",model_name=\"SmolLM2\"}} 16.0\n\
         # HELP vllm:num_requests_waiting Number of requests waiting to be processed.\n\
         # TYPE vllm:num_requests_waiting gauge\n\
         vllm:num_requests_waiting{{engine=\"0\",model_name=\"SmolLM2\"}} {first}.0\n\
         vllm:num_requests_waiting{{engine=\"1\",model_name=\"SmolLM2\"}} {second}.0\n\
         # TYPE vllm:num_requests_waiting_by_reason gauge\n\
         vllm:num_requests_waiting_by_reason{{engine=\"0\",model_name=\"SmolLM2\",reason=\"capacity\"}} {first}.0\n"
    ))
}

fn with(inner: Answer, paths: &'static [&'static str], own: Answer) -> Answer {
    Arc::new(move |path, body| match path {
        path if paths.contains(&path) => own(path, body),
        path if PATHS.contains(&path) => (404, json!({"detail": "Not Found"})),
        _ => inner(path, body),
    })
}

async fn until(engine: &dyn Engine, what: impl Fn(&Queue) -> bool) -> Queue {
    let until = tokio::time::Instant::now() + PATIENCE;
    loop {
        let queue = engine.queue();
        if what(&queue) {
            return queue;
        }
        assert!(tokio::time::Instant::now() < until, "it stays at {queue:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn vllm_tells_its_queue_as_it_changes() {
    let waiting = Arc::new(AtomicU64::new(3));
    let now = Arc::clone(&waiting);
    let metrics: Answer = Arc::new(move |_, _| (200, vllm_metrics(now.load(SeqCst), 2)));
    let (url, _) = serve(with(vllm(), &["/metrics"], metrics)).await;
    let engine = Vllm::connect(Endpoint::new(&url), facts(), Api::default())
        .await
        .unwrap();
    let queue = until(&engine, |queue| queue.waiting == Some(5)).await;
    assert_eq!((queue.degraded, queue.failures), (None, 0));
    waiting.store(40, SeqCst);
    until(&engine, |queue| queue.waiting == Some(42)).await;
    // Two servers are one engine with both queues.
    let (other, _) = serve(with(
        vllm(),
        &["/metrics"],
        Arc::new(|_, _| (200, vllm_metrics(1, 0))),
    ))
    .await;
    let other = Vllm::connect(Endpoint::new(&other), facts(), Api::default())
        .await
        .unwrap();
    let engines: Vec<Arc<dyn Engine>> = vec![Arc::new(engine), Arc::new(other)];
    let pool = Pool::start(engines, pool::Settings::default()).unwrap();
    until(&pool, |queue| queue.waiting == Some(43)).await;
}

#[tokio::test]
async fn sglang_tells_its_queue_whatever_its_version_and_flags() {
    let new = json!({"timestamp": "2026-11-30T00:00:00+00:00", "version": "0.5.23", "loads": [
        {"dp_rank": 0, "num_running_reqs": 9, "num_waiting_reqs": 4, "num_total_reqs": 13},
        {"dp_rank": 1, "num_running_reqs": 9, "num_waiting_reqs": 5, "num_total_reqs": 14}]});
    let old = json!([{"dp_rank": 0, "num_reqs": 11, "num_waiting_reqs": 9, "num_tokens": 5000}]);
    let text = "# TYPE sglang:num_queue_reqs gauge\n\
                sglang:num_queue_reqs{engine_type=\"unified\",model_name=\"m\"} 9.0\n";
    let cases: [(&'static [&'static str], Value); 3] = [
        (&["/v1/loads?include=core"], new),
        (&["/get_load"], old),
        (&["/metrics"], Value::String(text.into())),
    ];
    for (paths, reply) in cases {
        let own: Answer = Arc::new(move |_, _| (200, reply.clone()));
        let (url, _) = serve(with(sglang(), paths, own)).await;
        let engine = Sglang::connect(Endpoint::new(&url), facts()).await.unwrap();
        let queue = until(&engine, |queue| queue.waiting == Some(9)).await;
        assert_eq!((queue.degraded, queue.failures), (None, 0), "{paths:?}");
    }
}

#[tokio::test]
async fn a_server_that_does_not_tell_is_degraded_and_serves_all_the_same() {
    let replies: [(u16, Value); 5] = [
        (404, json!({"detail": "Not Found"})),
        (200, json!({})),
        (
            200,
            Value::String("vllm:num_requests_waiting{} many\n".into()),
        ),
        (500, json!({})),
        // Silence: given up after the deadline of a question.
        (0, Value::Null),
    ];
    for (status, reply) in replies {
        let own: Answer = Arc::new(move |_, _| (status, reply.clone()));
        let (url, _) = serve(with(vllm(), &["/metrics"], own)).await;
        let engine = Vllm::connect(Endpoint::new(&url), facts(), Api::default())
            .await
            .unwrap();
        let queue = until(&engine, |queue| queue.degraded.is_some()).await;
        assert_eq!((queue.waiting, queue.degraded), (None, Some(UNKNOWN)));
        assert!(queue.failures >= 1);
        assert!(engine.degraded().is_none(), "its replies lack nothing");
        engine.generate(request(&[10], 9)).await.unwrap();
    }
    // A question has no way to hold the engine up: nobody answers any.
    let (url, _) = serve(with(sglang(), &PATHS, Arc::new(|_, _| (0, Value::Null)))).await;
    let engine = Sglang::connect(Endpoint::new(&url), facts()).await.unwrap();
    engine.generate(request(&[10], 9)).await.unwrap();
    assert_eq!(engine.queue().waiting, None);
}
