//! The engines behind HTTP against servers that speak as vLLM and SGLang do: a fake model whose
//! reply is a function of the prompt, with every field of the request checked.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "tests"
)]

mod queue;
mod tls;

use std::{
    convert::Infallible,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use engine::{
    Engine, EngineError, Hint, Request,
    remote::{
        Endpoint, Facts,
        sglang::Sglang,
        text::Text,
        vllm::{Api, Vllm},
    },
};
use http_body_util::{BodyExt, Full};
use hyper::{Request as HttpRequest, Response, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use record::{Conversation, FinishReason, Message, PolicySpan, Role, Sampling};
use serde_json::{Value, json};
use tokio::net::TcpListener;

type Seen = Arc<Mutex<Vec<(String, Value)>>>;
type Answer = Arc<dyn Fn(&str, &Value) -> (u16, Value) + Send + Sync>;

/// A server on a free port. Its tasks end with the test's runtime.
async fn serve(answer: Answer) -> (String, Seen) {
    let seen = Seen::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let log = Arc::clone(&seen);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (answer, log) = (Arc::clone(&answer), Arc::clone(&log));
            tokio::spawn(async move {
                let service = service_fn(move |request: HttpRequest<Incoming>| {
                    let (answer, log) = (Arc::clone(&answer), Arc::clone(&log));
                    async move {
                        let path = request.uri().path_and_query().unwrap().to_string();
                        let bytes = request.into_body().collect().await.unwrap().to_bytes();
                        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
                        let (status, reply) = answer(&path, &body);
                        // What is asked beside the requests, whenever that is, is not among them.
                        if !queue::PATHS.contains(&path.as_str()) {
                            log.lock().unwrap().push((path, body));
                        }
                        if status == 0 {
                            std::future::pending::<()>().await;
                        }
                        let text = match reply {
                            Value::String(text) => text,
                            json => json.to_string(),
                        };
                        let mut response = Response::new(Full::new(Bytes::from(text)));
                        *response.status_mut() = status.try_into().unwrap();
                        Ok::<_, Infallible>(response)
                    }
                });
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    (url, seen)
}

/// The fake model: as many tokens as asked for, up to five, then the stop token 2.
fn reply(prompt: &Value, tokens_max: u64) -> (Vec<u64>, &'static str) {
    let first = prompt[0].as_u64().unwrap();
    let whole: Vec<u64> = (0..5).map(|at| first + at).chain([2]).collect();
    let cut = whole.len().min(tokens_max as usize);
    let finish = if cut == whole.len() { "stop" } else { "length" };
    (whole[..cut].to_vec(), finish)
}

fn logprobs(ids: &[u64]) -> Vec<f64> {
    ids.iter().map(|id| -0.125 * (*id as f64)).collect()
}

fn vllm() -> Answer {
    Arc::new(|path, body| match path {
        "/v1/models" => (
            200,
            json!({"object": "list", "data": [{"id": "SmolLM2", "max_model_len": 64}]}),
        ),
        "/v1/completions" => {
            let (ids, finish) = reply(&body["prompt"], body["max_tokens"].as_u64().unwrap());
            (
                200,
                json!({"id": "cmpl-1", "choices": [{"index": 0, "text": "x", "token_ids": ids,
                "logprobs": {"tokens": [], "token_logprobs": logprobs(&ids), "text_offset": []},
                "prompt_token_ids": body["prompt"], "finish_reason": finish, "stop_reason": null}],
                "usage": {"prompt_tokens": 3, "completion_tokens": ids.len(),
                    "prompt_tokens_details": {"cached_tokens": 1}}}),
            )
        }
        "/inference/v1/generate" => {
            let tokens_max = body["sampling_params"]["max_tokens"].as_u64().unwrap();
            let (ids, finish) = reply(&body["token_ids"], tokens_max);
            let content: Vec<Value> = ids
                .iter()
                .zip(logprobs(&ids))
                .map(|(id, logprob)| json!({"token_id": id, "logprob": logprob, "rank": 1, "top_logprobs": []}))
                .collect();
            (
                200,
                json!({"choices": [{"index": 0, "finish_reason": finish, "token_ids": ids,
                "logprobs": {"content": content}, "weight_versions": [
                    {"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 6}]}]}),
            )
        }
        _ => (200, json!({})),
    })
}

fn facts() -> Facts {
    Facts {
        context_tokens_max: 100,
        vocabulary: 50,
        policy_version: 3,
    }
}

fn request(prompt: &[u32], tokens_max: u32) -> Request {
    Request {
        prompt_ids: prompt.to_vec(),
        sampling: Sampling {
            tokens_max,
            stop_ids: vec![2],
            seed: u64::MAX,
            ..Sampling::default()
        },
        hint: None,
    }
}

#[tokio::test]
async fn vllm_gives_ids_and_logprobs() {
    for api in [Api::Completions, Api::Tokens] {
        let (url, seen) = serve(vllm()).await;
        let engine = Vllm::connect(Endpoint::new(&url), facts(), api)
            .await
            .unwrap();
        // The smaller of what the server and we allow.
        assert_eq!(engine.info().context_tokens_max, 64);
        let generation = engine.generate(request(&[10, 11], 20)).await.unwrap();
        assert_eq!(generation.token_ids, [10, 11, 12, 13, 14, 2]);
        assert_eq!(generation.logprobs_model[1], -1.375);
        assert_eq!(generation.logprobs_sampled, generation.logprobs_model);
        assert_eq!(generation.finish, FinishReason::Stop);
        assert!(generation.check().is_ok() && generation.trainable());
        let versions: Vec<_> = generation
            .policy
            .iter()
            .map(|span| (span.start, span.version))
            .collect();
        match api {
            Api::Completions => {
                assert_eq!((versions, generation.cached_tokens), (vec![(0, 3)], 1));
            }
            Api::Tokens => assert_eq!(versions, [(0, 3), (2, 4)]),
        }
        let (_, body) = seen.lock().unwrap().last().unwrap().clone();
        let sampling = body.get("sampling_params").unwrap_or(&body).clone();
        assert_eq!(sampling["stop_token_ids"], json!([2]));
        assert_eq!(sampling["seed"], i64::MAX);
        assert_eq!(
            (&sampling["logprobs"], &sampling["skip_special_tokens"]),
            (&json!(0), &json!(false))
        );
        // Cut by the limit, and by the context.
        let generation = engine.generate(request(&[10], 3)).await.unwrap();
        assert_eq!(generation.finish, FinishReason::Length);
        let generation = engine.generate(request(&[10; 62], 9)).await.unwrap();
        assert_eq!(
            (generation.token_ids.len(), generation.finish),
            (2, FinishReason::Context)
        );
        let error = engine.generate(request(&[10; 64], 9)).await.unwrap_err();
        assert_eq!(
            error,
            EngineError::TooLong {
                prompt_tokens: 64,
                context_tokens_max: 64
            }
        );
        assert!(matches!(
            engine.generate(request(&[50], 9)).await,
            Err(EngineError::Invalid(_))
        ));
    }
}

#[tokio::test]
async fn the_tokens_endpoint_is_found_and_its_absence_has_a_name() {
    for (status, degraded) in [
        (400, None),
        (422, None),
        (403, Some("vllm-completions")),
        (404, Some("vllm-completions")),
    ] {
        let inner = vllm();
        let (url, seen) = serve(Arc::new(move |path, body| match path {
            "/inference/v1/generate" if *body == json!({}) => (status, json!({"error": "no"})),
            _ => inner(path, body),
        }))
        .await;
        let engine = Vllm::detect(Endpoint::new(&url), facts()).await.unwrap();
        assert_eq!(engine.degraded(), degraded, "{status}");
        engine.generate(request(&[10], 9)).await.unwrap();
        let (path, _) = seen.lock().unwrap().last().unwrap().clone();
        let expected = match degraded {
            None => "/inference/v1/generate",
            Some(_) => "/v1/completions",
        };
        assert_eq!(path, expected);
    }
    // A server that is not well is not taken for an old one.
    let (url, _) = serve(Arc::new(|_, _| (500, json!({})))).await;
    let error = Vllm::detect(Endpoint::new(&url), facts())
        .await
        .unwrap_err();
    assert!(error.to_string().contains("status 500"), "{error}");
}

#[tokio::test]
async fn log_probabilities_of_another_distribution_are_not_claimed() {
    let (url, _) = serve(vllm()).await;
    let engine = Vllm::connect(Endpoint::new(&url), facts(), Api::default())
        .await
        .unwrap();
    for change in [
        (|sampling| sampling.temperature = 0.7) as fn(&mut Sampling),
        |sampling| sampling.top_p = 0.9,
        |sampling| sampling.top_k = 5,
    ] {
        let mut request = request(&[10], 9);
        change(&mut request.sampling);
        let generation = engine.generate(request).await.unwrap();
        assert_eq!(generation.logprobs_model.len(), 6);
        assert!(generation.logprobs_sampled.is_empty() && !generation.trainable());
    }
}

#[tokio::test]
async fn vllm_loads_weights_between_pause_and_resume() {
    let (url, seen) = serve(vllm()).await;
    let engine = Vllm::connect(Endpoint::new(&url), facts(), Api::default())
        .await
        .unwrap();
    engine.load_weights(Path::new("/w"), 4).await.unwrap();
    assert_eq!(engine.policy_version(), 4);
    let generation = engine.generate(request(&[10], 9)).await.unwrap();
    assert_eq!(
        generation.policy,
        [PolicySpan {
            start: 0,
            version: 4
        }]
    );
    let paths: Vec<String> = seen
        .lock()
        .unwrap()
        .iter()
        .map(|(path, _)| path.clone())
        .collect();
    assert_eq!(
        paths[1..6],
        [
            "/pause?mode=wait",
            "/collective_rpc",
            "/update_weight_version",
            "/reset_prefix_cache",
            "/resume"
        ]
    );
    assert_eq!(seen.lock().unwrap()[2].1["kwargs"]["weights_path"], "/w");
}

#[tokio::test]
async fn a_failed_load_resumes_under_the_old_version() {
    let inner = vllm();
    let (url, seen) = serve(Arc::new(move |path, body| match path {
        "/collective_rpc" => (500, json!({"error": "no such file"})),
        _ => inner(path, body),
    }))
    .await;
    let engine = Vllm::connect(Endpoint::new(&url), facts(), Api::default())
        .await
        .unwrap();
    let error = engine.load_weights(Path::new("/w"), 4).await.unwrap_err();
    assert!(error.to_string().contains("no such file"), "{error}");
    assert_eq!(engine.policy_version(), 3);
    assert_eq!(seen.lock().unwrap().last().unwrap().0, "/resume");
}

#[tokio::test]
async fn broken_contracts_are_named_and_never_patched() {
    let good = json!({"choices": [{"token_ids": [1, 2], "finish_reason": "stop",
        "logprobs": {"token_logprobs": [-1, -1]}}]});
    let with = |path: &str, value: Value| {
        let mut reply = good.clone();
        *reply.pointer_mut(path).unwrap() = value;
        reply
    };
    for (status, reply, expected) in [
        (
            200,
            with("/choices/0/token_ids", Value::Null),
            "expected choices[0].token_ids",
        ),
        (
            200,
            with("/choices/0/token_ids", json!([1, -2])),
            "expected choices[0].token_ids",
        ),
        (
            200,
            with("/choices/0/logprobs/token_logprobs", json!([-1])),
            "as many",
        ),
        (
            200,
            with("/choices/0/logprobs/token_logprobs", json!([-1, null])),
            "as many",
        ),
        (
            200,
            with("/choices/0/finish_reason", json!("other")),
            "a finish reason",
        ),
        (
            200,
            with("/choices/0/finish_reason", json!("abort")),
            "aborted",
        ),
        (
            500,
            json!({"error": "boom"}),
            "status 500: {\"error\":\"boom\"}",
        ),
        (400, json!({"error": "bad"}), "engine refused the request"),
        (503, json!({}), "queue is full"),
        (429, json!({}), "queue is full"),
    ] {
        let inner = vllm();
        let (url, _) = serve(Arc::new(move |path, body| match path {
            "/v1/completions" => (status, reply.clone()),
            _ => inner(path, body),
        }))
        .await;
        let engine = Vllm::connect(Endpoint::new(&url), facts(), Api::default())
            .await
            .unwrap();
        let error = engine
            .generate(request(&[10], 9))
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn silence_absence_and_https() {
    let inner = vllm();
    let (url, _) = serve(Arc::new(move |path, body| match path {
        "/v1/completions" => (0, Value::Null),
        _ => inner(path, body),
    }))
    .await;
    let endpoint = Endpoint {
        timeout: Duration::from_secs(1),
        ..Endpoint::new(&url)
    };
    let engine = Vllm::connect(endpoint, facts(), Api::default())
        .await
        .unwrap();
    let error = engine.generate(request(&[10], 9)).await.unwrap_err();
    assert!(error.to_string().contains("no reply within 1 s"), "{error}");
    // Nobody listens on port 1.
    let error = Vllm::connect(Endpoint::new("http://127.0.0.1:1"), facts(), Api::default()).await;
    assert!(matches!(error, Err(EngineError::Gone(_))));
    let error = Vllm::connect(Endpoint::new("ftp://x"), facts(), Api::default()).await;
    assert!(error.unwrap_err().to_string().contains("http://HOST:PORT"));
    let named = Endpoint::new("https://me:hunter2@x");
    let error = Vllm::connect(named, facts(), Api::default())
        .await
        .unwrap_err();
    assert!(!error.to_string().contains("hunter2"), "{error}");
}

fn sglang() -> Answer {
    Arc::new(|path, body| match path {
        "/model_info" => (200, json!({"model_path": "m"})),
        "/generate" => {
            let sampling = &body["sampling_params"];
            let (ids, finish) = reply(
                &body["input_ids"],
                sampling["max_new_tokens"].as_u64().unwrap(),
            );
            let entries: Vec<Value> = ids
                .iter()
                .zip(logprobs(&ids))
                .map(|(id, logprob)| json!([logprob, id, null]))
                .collect();
            (
                200,
                json!({"text": "x", "output_ids": ids, "meta_info": {"id": "1",
                "finish_reason": {"type": finish, "matched": 2}, "prompt_tokens": 1, "cached_tokens": 7,
                "weight_version": "5", "output_token_logprobs": entries}}),
            )
        }
        "/update_weights_from_disk" => (200, json!({"success": true, "message": "ok"})),
        _ => (200, Value::Null),
    })
}

#[tokio::test]
async fn sglang_gives_ids_and_logprobs() {
    let (url, seen) = serve(sglang()).await;
    let engine = Sglang::connect(Endpoint::new(&url), facts()).await.unwrap();
    let generation = engine.generate(request(&[10], 20)).await.unwrap();
    assert_eq!(generation.token_ids, [10, 11, 12, 13, 14, 2]);
    assert_eq!(generation.logprobs_model, generation.logprobs_sampled);
    assert_eq!(
        (generation.policy[0].version, generation.cached_tokens),
        (5, 7)
    );
    assert!(generation.trainable());
    let (_, body) = seen.lock().unwrap().last().unwrap().clone();
    assert_eq!(
        (&body["return_logprob"], &body["logprob_start_len"]),
        (&json!(true), &json!(-1))
    );
    assert_eq!(
        (
            &body["sampling_params"]["top_k"],
            &body["sampling_params"]["no_stop_trim"]
        ),
        (&json!(-1), &json!(true))
    );
    // What its numbers are of at another temperature, the server does not say.
    let mut warm = request(&[10], 20);
    warm.sampling.temperature = 0.5;
    let generation = engine.generate(warm).await.unwrap();
    assert!(generation.logprobs_model.is_empty() && generation.logprobs_sampled.is_empty());
    engine.load_weights(Path::new("/w"), 6).await.unwrap();
    assert_eq!(engine.policy_version(), 6);
    let paths: Vec<String> = seen
        .lock()
        .unwrap()
        .iter()
        .map(|(path, _)| path.clone())
        .collect();
    assert_eq!(
        paths[3..],
        [
            "/pause_generation",
            "/update_weights_from_disk",
            "/continue_generation"
        ]
    );
}

#[tokio::test]
async fn a_text_only_server_gives_tokens_that_are_not_trainable() {
    let (url, seen) = serve(Arc::new(|path, body| {
        if path == "/v1/models" {
            return (200, json!({"data": [{"id": "m"}]}));
        }
        let text = body["messages"][0]["content"].as_str().unwrap();
        if text == "long" {
            return (400, json!({"error": {"message": "This model's maximum context length is 99 tokens."}}));
        }
        if text == "new" && body["max_completion_tokens"].is_null() {
            return (400, json!({"error": {"message": "'max_tokens' is not supported, use 'max_completion_tokens'"}}));
        }
        let finish = if body["max_tokens"] == 3 { "length" } else { "tool_calls" };
        (200, json!({"choices": [{"message": {"role": "assistant", "content": "ab", "reasoning_content": "r",
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            "finish_reason": finish}]}))
    }))
    .await;
    let writer = Arc::new(|conversation: &Conversation| {
        let text = conversation.messages[0].text_content();
        json!({"messages": [{"role": "user", "content": text}]})
            .as_object()
            .unwrap()
            .clone()
    });
    // One id per letter and call, 1 at the end.
    let voice = Arc::new(|message: &Message| {
        assert_eq!(message.reasoning.as_deref(), Some("r"));
        assert_eq!(message.tool_calls[0].arguments, json!({"a": 1}));
        let text = message.text_content();
        Ok(text.chars().map(|_| 7).chain([9, 1]).collect())
    });
    let engine = Text::new(
        Endpoint::new(format!("{url}/v1")),
        facts(),
        "m",
        writer,
        voice,
    )
    .unwrap();
    assert!(engine.info().name.starts_with("openai:http"));
    let mut asked = request(&[10], 20);
    assert!(matches!(
        engine.generate(asked.clone()).await,
        Err(EngineError::Invalid(_))
    ));
    asked.hint = Some(Hint {
        rollout: None,
        conversation: Arc::new(Conversation {
            messages: vec![Message::text(Role::User, "go")],
            tools: Vec::new(),
        }),
    });
    let generation = engine.generate(asked.clone()).await.unwrap();
    assert_eq!(
        (generation.token_ids.as_slice(), generation.finish),
        (&[7, 7, 9, 1][..], FinishReason::Stop)
    );
    assert!(!generation.trainable() && generation.check().is_ok());
    asked.sampling.tokens_max = 3;
    let generation = engine.generate(asked.clone()).await.unwrap();
    assert_eq!(
        (generation.token_ids.as_slice(), generation.finish),
        (&[7, 7, 9][..], FinishReason::Length)
    );
    let (path, body) = seen.lock().unwrap()[0].clone();
    assert_eq!(
        (path.as_str(), &body["model"]),
        ("/v1/chat/completions", &json!("m"))
    );
    assert_eq!(body["messages"], json!([{"role": "user", "content": "go"}]));
    // What is the default is not said: some models refuse to hear it.
    assert!(body["temperature"].is_null() && body["top_p"].is_null());
    let say = |text: &str| {
        let mut asked = asked.clone();
        asked.hint.as_mut().unwrap().conversation = Arc::new(Conversation {
            messages: vec![Message::text(Role::User, text)],
            tools: Vec::new(),
        });
        asked
    };
    assert_eq!(
        engine.generate(say("long")).await,
        Err(EngineError::TooLong {
            prompt_tokens: 1,
            context_tokens_max: 99
        })
    );
    for _ in 0..2 {
        engine.generate(say("new")).await.unwrap();
    }
    let bodies: Vec<Value> = seen
        .lock()
        .unwrap()
        .iter()
        .rev()
        .take(3)
        .map(|(_, body)| body.clone())
        .collect();
    // The other name is found out once.
    assert!(
        bodies
            .iter()
            .take(2)
            .all(|body| body["max_tokens"].is_null())
    );
    assert_eq!(bodies[2]["max_completion_tokens"], Value::Null);
    let model = Text::only_model(Endpoint::new(format!("{url}/v1"))).await;
    assert_eq!(model.as_deref(), Ok("m"));
}
