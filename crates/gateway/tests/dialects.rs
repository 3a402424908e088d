//! Every dialect over real sockets: a tool loop that continues exactly, streams, counts, lists,
//! probes, refusals.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "tests"
)]

mod support;

use engine::EngineError;
use record::{Call, Dialect};
use serde_json::{Value, json};
use support::{CONTEXT, World, client::Client, config};

fn schema() -> Value {
    json!({"type": "object", "properties": {"command": {"type": "string"}}})
}

/// How a harness speaks a dialect: what it sends first, and what it sends next.
struct Speaker {
    dialect: Dialect,
    path: &'static str,
    stream_path: &'static str,
}

const SPEAKERS: [Speaker; 4] = [
    Speaker {
        dialect: Dialect::Chat,
        path: "/v1/chat/completions",
        stream_path: "/v1/chat/completions",
    },
    Speaker {
        dialect: Dialect::Responses,
        path: "/v1/responses",
        stream_path: "/v1/responses",
    },
    Speaker {
        dialect: Dialect::Messages,
        path: "/v1/messages?beta=true",
        stream_path: "/v1/messages?beta=true",
    },
    Speaker {
        dialect: Dialect::Gemini,
        path: "/v1beta/models/m:generateContent",
        stream_path: "/v1beta/models/m:streamGenerateContent?alt=sse",
    },
];

impl Speaker {
    fn first(&self, text: &str) -> Value {
        match self.dialect {
            Dialect::Chat => json!({"model": "m", "messages": [{"role": "user", "content": text}],
                "tools": support::tools()}),
            Dialect::Responses => json!({"model": "m", "store": false,
                "input": [{"role": "user", "content": [{"type": "input_text", "text": text}]}],
                "tools": [{"type": "function", "name": "bash", "description": "runs", "parameters": schema()}]}),
            Dialect::Messages => json!({"model": "m", "max_tokens": 99,
                "messages": [{"role": "user", "content": [{"type": "text", "text": text,
                    "cache_control": {"type": "ephemeral"}}]}],
                "tools": [{"name": "bash", "description": "runs", "input_schema": schema()}]}),
            Dialect::Gemini => json!({"contents": [{"role": "user", "parts": [{"text": text}]}],
                "tools": [{"functionDeclarations": [{"name": "bash", "description": "runs",
                    "parametersJsonSchema": schema()}]}]}),
        }
    }

    fn streamed(&self, mut request: Value) -> Value {
        if self.dialect != Dialect::Gemini {
            request["stream"] = json!(true);
        }
        request
    }

    /// The history with the reply, echoed as harnesses of this dialect do it, and a result.
    fn next(&self, mut request: Value, reply: &Value) -> Value {
        match self.dialect {
            Dialect::Chat => {
                let message = reply["choices"][0]["message"].clone();
                let id = message["tool_calls"][0]["id"].clone();
                let list = request["messages"].as_array_mut().unwrap();
                list.push(message);
                list.push(json!({"role": "tool", "tool_call_id": id, "content": "done"}));
            }
            Dialect::Responses => {
                let items = reply["output"].as_array().unwrap().clone();
                let id = items.last().unwrap()["call_id"].clone();
                let list = request["input"].as_array_mut().unwrap();
                list.extend(items);
                list.push(json!({"type": "function_call_output", "call_id": id, "output": "done"}));
            }
            Dialect::Messages => {
                // Keys in the order of the schema, the cache mark moved.
                let mut blocks = reply["content"].clone();
                let call = blocks.as_array_mut().unwrap().last_mut().unwrap();
                let input = call["input"].as_object().unwrap().clone();
                call["input"] = Value::Object(input.into_iter().rev().collect());
                let id = call["id"].clone();
                let list = request["messages"].as_array_mut().unwrap();
                if let Some(text) = list[0].pointer("/content/0/text").cloned() {
                    list[0]["content"] = text;
                }
                list.push(json!({"role": "assistant", "content": blocks}));
                list.push(json!({"role": "user", "content": [{"type": "tool_result",
                    "tool_use_id": id, "content": "done", "cache_control": {"type": "ephemeral"}}]}));
            }
            Dialect::Gemini => {
                // Its own id, a sentinel signature.
                let mut parts = reply["candidates"][0]["content"]["parts"].clone();
                let call = parts.as_array_mut().unwrap().last_mut().unwrap();
                call["functionCall"]["id"] = json!("bash-1700000000-1");
                call["thoughtSignature"] = json!("skip_thought_signature_validator");
                let list = request["contents"].as_array_mut().unwrap();
                list.push(json!({"role": "model", "parts": parts}));
                list.push(json!({"role": "user", "parts": [{"functionResponse": {
                    "id": "bash-1700000000-1", "name": "bash", "response": {"output": "done"}}}]}));
            }
        }
        request
    }
}

fn exact(calls: &[Call], at: usize, parent: usize) {
    let (call, before) = (&calls[at], &calls[parent]);
    let generation = before.generation.as_ref().unwrap();
    let whole = [before.prompt_ids.as_slice(), &generation.token_ids].concat();
    assert_eq!(call.continuation.parent, Some(parent as u32));
    assert_eq!(call.continuation.echoes_foreign, 0);
    assert_eq!(call.continuation.exact as usize, whole.len());
    assert!(call.prompt_ids.starts_with(&whole));
}

#[tokio::test]
async fn a_tool_loop_continues_exactly_in_every_dialect() {
    for speaker in &SPEAKERS {
        let world = World::new().await;
        let access = world.open("a");
        let mut client = Client::tcp(world.address()).await;
        let path = format!("{}{}", access.path, speaker.path);
        let first = speaker.first("go");
        let answer = client.post(&path, &[], &first).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let second = speaker.next(first, &answer.json());
        let answer = client.post(&path, &[], &second).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let third = speaker.next(second, &answer.json());
        let answer = client.post(&path, &[], &third).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let calls = world.quiet("a").await;
        assert_eq!(calls.len(), 3, "{:?}", speaker.dialect);
        exact(&calls, 1, 0);
        exact(&calls, 2, 1);
        assert!(calls.iter().all(|call| call.dialect == speaker.dialect));
        assert_eq!(calls[0].request, speaker.first("go"));
    }
}

#[tokio::test]
async fn a_stream_is_the_same_call_as_its_body() {
    for speaker in &SPEAKERS {
        let world = World::new().await;
        let access = world.open("a");
        let mut client = Client::tcp(world.address()).await;
        let request = speaker.first("go");
        let path = format!("{}{}", access.path, speaker.stream_path);
        let stream = client
            .post(&path, &[], &speaker.streamed(request.clone()))
            .await;
        assert_eq!(stream.status(), 200);
        assert_eq!(
            stream.head.header("content-type"),
            Some("text/event-stream")
        );
        // A client that could not read the stream asks for the body: an attempt, not a call.
        let path = format!("{}{}", access.path, speaker.path);
        let body = client.post(&path, &[], &request).await;
        let calls = world.quiet("a").await;
        assert_eq!(calls.len(), 1, "{:?}", speaker.dialect);
        assert_eq!(calls[0].attempts.len(), 2);
        assert_eq!(world.engine.asked(), 1);
        let id = match speaker.dialect {
            Dialect::Gemini => body.json()["responseId"].clone(),
            _ => body.json()["id"].clone(),
        };
        assert!(stream.text().contains(id.as_str().unwrap()));
    }
}

#[tokio::test]
async fn signs_of_life_are_the_dialects_own() {
    for speaker in &SPEAKERS {
        let mut config = config();
        config.headers_after_ms = 0;
        config.keep_alive_s = 1;
        let world = World::with(config, ledger::Options::default()).await;
        let access = world.open("a");
        world.engine.hold();
        let mut client = Client::tcp(world.address()).await;
        let path = format!("{}{}", access.path, speaker.stream_path);
        let request = speaker.streamed(speaker.first("go"));
        client
            .send("POST", &path, &[], request.to_string().as_bytes())
            .await
            .unwrap();
        let head = client.head().await.unwrap();
        assert_eq!(head.status, 200);
        let sign = wire::dialect::keep_alive(speaker.dialect);
        if let Some(sign) = sign {
            let chunk = client.chunk().await.unwrap().unwrap();
            assert_eq!(String::from_utf8(chunk).unwrap(), sign);
        }
        // A failure can only be told inside the stream now.
        world.engine.fail_next(EngineError::Gone("gone".to_owned()));
        world.engine.release();
        let mut rest = Vec::new();
        while let Some(chunk) = client.chunk().await.unwrap() {
            rest.extend(chunk);
        }
        let rest = String::from_utf8(rest).unwrap();
        assert!(rest.contains("engine is gone"), "{rest}");
        if sign.is_none() {
            assert!(rest.starts_with("data: {\"error\""), "{rest}");
        }
    }
}

#[tokio::test]
async fn refusals_are_in_the_dialects_own_shape() {
    let world = World::new().await;
    let access = world.open("a");
    let mut client = Client::tcp(world.address()).await;
    for speaker in &SPEAKERS {
        let mut client_of = async |path: String, body: &Value| client.post(&path, &[], body).await;
        let path = format!("{}{}", access.path, speaker.path);
        let refused = |answer: &Value| match speaker.dialect {
            Dialect::Messages => answer["error"]["type"].clone(),
            Dialect::Gemini => answer["error"]["status"].clone(),
            _ => answer["error"]["code"].clone(),
        };
        // A prompt that does not fit, in the words that clients look for.
        let long = "word ".repeat(CONTEXT as usize * 2);
        let answer = client_of(path.clone(), &speaker.first(&long)).await;
        assert_eq!(answer.status(), 400);
        let (code, words) = match speaker.dialect {
            Dialect::Chat => ("context_length_exceeded", "maximum context length"),
            Dialect::Responses => ("context_length_exceeded", "exceeds the context window"),
            Dialect::Messages => ("invalid_request_error", "prompt is too long: "),
            Dialect::Gemini => ("INVALID_ARGUMENT", "exceeds the maximum number of tokens"),
        };
        assert_eq!(refused(&answer.json()), code);
        assert!(answer.text().contains(words), "{}", answer.text());
        // An engine that broke: worth a retry.
        world.engine.fail_next(EngineError::Gone("x".to_owned()));
        let answer = client_of(path.clone(), &speaker.first("gone")).await;
        let (status, code) = match speaker.dialect {
            Dialect::Messages => (529, "overloaded_error"),
            Dialect::Gemini => (503, "UNAVAILABLE"),
            _ => (503, "overloaded"),
        };
        assert_eq!(
            (answer.status(), refused(&answer.json())),
            (status, json!(code))
        );
        // A full queue: later, and say when.
        world.engine.fail_next(EngineError::Busy { waiting: 9 });
        let answer = client_of(path, &speaker.first("busy")).await;
        assert_eq!(answer.status(), 429);
        assert_eq!(answer.head.header("retry-after"), Some("1"));
        // Somebody else's key.
        let answer = client_of(format!("/r/wrongkey{}", speaker.path), &speaker.first("x")).await;
        let code = match speaker.dialect {
            Dialect::Messages => "authentication_error",
            Dialect::Gemini => "UNAUTHENTICATED",
            _ => "invalid_api_key",
        };
        assert_eq!(
            (answer.status(), refused(&answer.json())),
            (401, json!(code))
        );
    }
}

#[tokio::test]
async fn counts_are_those_of_the_real_prompt_and_no_calls() {
    let world = World::new().await;
    let access = world.open("a");
    let mut client = Client::tcp(world.address()).await;
    for (index, (speaker, path, field)) in [
        (&SPEAKERS[1], "/v1/responses/input_tokens", "input_tokens"),
        (
            &SPEAKERS[2],
            "/v1/messages/count_tokens?beta=true",
            "input_tokens",
        ),
        (&SPEAKERS[3], "/v1beta/models/m:countTokens", "totalTokens"),
    ]
    .into_iter()
    .enumerate()
    {
        let request = speaker.first("count me");
        let count = client
            .post(&format!("{}{path}", access.path), &[], &request)
            .await;
        assert_eq!(count.status(), 200, "{}", count.text());
        assert_eq!(world.status("a").calls as usize, index);
        let path = format!("{}{}", access.path, speaker.path);
        client.post(&path, &[], &request).await;
        let calls = world.quiet("a").await;
        let prompt = calls.last().unwrap().prompt_ids.len();
        assert_eq!(count.json()[field], prompt);
    }
    let answer = client
        .post(
            &format!("{}/v1/messages/count_tokens", access.path),
            &[],
            &json!({}),
        )
        .await;
    assert_eq!(answer.status(), 400);
}

#[tokio::test]
async fn models_probes_and_sockets() {
    let world = World::new().await;
    let access = world.open("a");
    let mut client = Client::tcp(world.address()).await;
    let at = |path: &str| format!("{}{path}", access.path);
    let models = client.get(&at("/v1/models"), &[]).await.json();
    assert_eq!(
        (&models["object"], &models["data"][0]["id"]),
        (&json!("list"), &json!("tiny"))
    );
    let version = ("anthropic-version", "2023-06-01");
    let models = client
        .get(&at("/v1/models?limit=9"), &[version])
        .await
        .json();
    assert_eq!(
        (&models["data"][0]["type"], &models["has_more"]),
        (&json!("model"), &json!(false))
    );
    let models = client.get(&at("/v1beta/models"), &[]).await.json();
    assert_eq!(models["models"][0]["name"], "models/tiny");
    let model = client.get(&at("/v1/models/tiny"), &[version]).await.json();
    assert_eq!(model["display_name"], "tiny");
    assert_eq!(client.get(&at("/v1/models/other"), &[]).await.status(), 404);
    assert_eq!(client.get(&at("/api/hello"), &[]).await.status(), 200);
    client
        .send("HEAD", &at("/api/hello"), &[], b"")
        .await
        .unwrap();
    assert_eq!(client.head().await.unwrap().status, 200);
    // Codex falls back to HTTP on this status at once.
    let upgrade = [("connection", "upgrade"), ("upgrade", "websocket")];
    let answer = client.get(&at("/v1/responses"), &upgrade).await;
    assert_eq!(answer.status(), 426);
    let mut client = Client::tcp(world.address()).await;
    let answer = client
        .post(&at("/v1/responses/dream"), &[], &json!({}))
        .await;
    assert_eq!(
        (answer.status(), answer.code()),
        (404, "not_found".to_owned())
    );
}

/// As Codex does it: the summary of the model takes the place of the history.
#[tokio::test]
async fn a_conversation_is_compacted_by_an_ordinary_captured_call() {
    let world = World::new().await;
    let access = world.open("a");
    let mut client = Client::tcp(world.address()).await;
    let path = format!("{}/v1/responses", access.path);
    let mut request = SPEAKERS[1].first("go");
    request["store"] = json!(false);
    let answer = client.post(&path, &[], &request).await.json();
    let mut history = request["input"].as_array().unwrap().clone();
    history.extend(answer["output"].as_array().unwrap().clone());
    let compact =
        json!({"model": "m", "input": history, "instructions": "", "tools": request["tools"]});
    let answer = client.post(&format!("{path}/compact"), &[], &compact).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let compacted = answer.json();
    assert_eq!(compacted["object"], "response.compaction");
    let items = compacted["output"].as_array().unwrap().clone();
    assert_eq!(items.last().unwrap()["type"], "compaction");

    request["input"] = json!(items);
    let answer = client.post(&path, &[], &request).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let calls = world.quiet("a").await;
    assert_eq!(calls.len(), 3);
    // It extends the thread that it summarises, and the record says what it was.
    exact(&calls, 1, 0);
    assert!(
        calls[1]
            .headers
            .contains(&(":path".to_owned(), "/responses/compact".to_owned()))
    );
    let summary = calls[1].reply.as_ref().unwrap().text_content();
    let shown = calls[2]
        .conversation
        .messages
        .last()
        .unwrap()
        .text_content();
    assert!(!summary.is_empty() && shown.ends_with(&summary), "{shown}");
    assert!(
        world
            .gateway
            .metrics_text()
            .contains("calls_by_shape_total{shape=\"continued\"} 1")
    );
}

#[tokio::test]
async fn a_response_may_be_continued_by_its_id() {
    let world = World::new().await;
    let access = world.open("a");
    let mut client = Client::tcp(world.address()).await;
    let path = format!("{}/v1/responses", access.path);
    let mut first = SPEAKERS[1].first("go");
    first["store"] = json!(true);
    first["instructions"] = json!("Be brief.");
    let answer = client.post(&path, &[], &first).await.json();
    let call = answer["output"].as_array().unwrap().last().unwrap()["call_id"].clone();
    let second = json!({"model": "m", "previous_response_id": answer["id"],
        "instructions": "Be brief.", "tools": first["tools"],
        "input": [{"type": "function_call_output", "call_id": call, "output": "done"}]});
    let answer = client.post(&path, &[], &second).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let calls = world.quiet("a").await;
    exact(&calls, 1, 0);
    // Not kept, or not known: the client is told to send everything.
    let mut third = second;
    third["previous_response_id"] = json!("resp_other");
    let answer = client.post(&path, &[], &third).await;
    assert_eq!(answer.status(), 400);
    assert!(answer.text().contains("not found"));
}

#[tokio::test]
async fn a_gemini_stream_without_server_sent_events_is_a_list() {
    let world = World::new().await;
    let access = world.open("a");
    let mut client = Client::tcp(world.address()).await;
    let path = format!("{}/v1beta/models/m:streamGenerateContent", access.path);
    let answer = client.post(&path, &[], &SPEAKERS[3].first("go")).await;
    assert_eq!(answer.head.header("content-type"), Some("application/json"));
    assert_eq!(answer.json().as_array().unwrap().len(), 2);
}
