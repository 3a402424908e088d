//! Load for a gateway, and the engine behind it: what `scripts/bench/gateway.py` measures with.
//!
//! `load stub TOKENS` is an engine that answers at once, with a reply of so many tokens, as vLLM
//! does: in chat completions, streamed or not, in completions, and at its endpoint for token ids. It prints its
//! address and goes on until it is killed. `load run FILE CLIENTS BYTES plain|stream SECONDS CALLS`
//! is so many clients that each call, wait and call again, until the time or the number of calls is
//! used up; FILE names where, one `URL [KEY]` per line, shared out among the clients. It prints one
//! line of JSON.
//!
//! Both run on one thread each, so that they share two cores with what is measured in every run in
//! the same way.

#[path = "../tests/support/client.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "the tests' own"
)]
mod client;

use std::convert::Infallible;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use client::Client;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::task::JoinSet;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// A reply that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(60);
/// vLLM's endpoint for token ids.
const GENERATE: &str = "/inference/v1/generate";
/// Of the text that histories are made of.
const LINE: &str = "The parser reads a file, edits one function of it and runs all tests again; ";

fn say(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), AnyError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["stub", tokens] => stub(tokens.parse()?).await,
        ["run", file, clients, bytes, mode, seconds, calls] => {
            let plan = Plan {
                targets: targets(&std::fs::read_to_string(file)?)?,
                bytes: bytes.parse()?,
                stream: mode == "stream",
                time: Duration::from_secs_f64(seconds.parse()?),
                calls: calls.parse()?,
            };
            say(&run(plan, clients.parse()?).await?.to_string())?;
            Ok(())
        }
        _ => Err(
            "usage: load stub TOKENS | run FILE CLIENTS BYTES plain|stream SECONDS CALLS".into(),
        ),
    }
}

/// The replies of the stub, made once.
struct Replies {
    chat: Bytes,
    /// One by one: each is a chunk of its own.
    events: Vec<Bytes>,
    ids: Bytes,
    tokens: Bytes,
    models: Bytes,
}

impl Replies {
    fn new(tokens: u32) -> Self {
        let ids: Vec<u32> = (0..tokens).map(|number| 1000 + number % 1000).collect();
        let words: Vec<String> = ids.iter().map(|id| format!(" w{id}")).collect();
        let logprobs: Vec<f64> = ids.iter().map(|id| -f64::from(*id) / 4096.0).collect();
        let entry = |at: usize| json!({"token": words[at], "logprob": logprobs[at], "bytes": null, "top_logprobs": []});
        let usage = json!({"prompt_tokens": 512, "completion_tokens": tokens, "total_tokens": 512 + tokens});
        let head =
            |kind: &str| json!({"id": "stub-1", "object": kind, "created": 1, "model": "stub"});
        let with = |mut head: Value, choice: Value| {
            head["choices"] = json!([choice]);
            head
        };
        let mut chat = with(
            head("chat.completion"),
            json!({"index": 0, "finish_reason": "stop", "token_ids": ids,
                "message": {"role": "assistant", "content": words.concat()},
                "logprobs": {"content": (0..ids.len()).map(entry).collect::<Vec<_>>()}}),
        );
        chat["usage"] = usage.clone();
        chat["prompt_token_ids"] = json!((0..512).collect::<Vec<u32>>());
        let mut completion = with(
            head("text_completion"),
            json!({"index": 0, "finish_reason": "stop", "stop_reason": null, "token_ids": ids, "text": words.concat(),
                "logprobs": {"tokens": words, "token_logprobs": logprobs, "text_offset": []}}),
        );
        completion["usage"] = usage.clone();
        let content: Vec<Value> = (0..ids.len())
            .map(|at| json!({"token_id": ids[at], "logprob": logprobs[at], "rank": 1, "top_logprobs": []}))
            .collect();
        let generated = json!({"request_id": "stub-1", "usage": usage.clone(), "choices": [{"index": 0,
            "finish_reason": "stop", "token_ids": ids, "logprobs": {"content": content}}]});
        let mut events = Vec::new();
        let mut event = |choice: Value| {
            let text = with(head("chat.completion.chunk"), choice).to_string();
            events.push(Bytes::from(format!("data: {text}\n\n")));
        };
        event(
            json!({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}),
        );
        for at in 0..ids.len() {
            let last = at + 1 == ids.len();
            event(
                json!({"index": 0, "delta": {"content": words[at]}, "token_ids": [ids[at]],
                "logprobs": {"content": [entry(at)]}, "finish_reason": last.then_some("stop")}),
            );
        }
        events.push(Bytes::from_static(b"data: [DONE]\n\n"));
        let models = json!({"object": "list", "data": [{"id": "stub", "object": "model", "created": 1,
            "owned_by": "stub", "root": "stub", "max_model_len": 131_072}],
            // What routers ask a worker before they use it.
            "status": "ok", "version": "0.32.0", "model_path": "stub", "served_model_name": "stub", "is_generation": true});
        let bytes = |value: Value| Bytes::from(value.to_string());
        Self {
            chat: bytes(chat),
            events,
            ids: bytes(completion),
            tokens: bytes(generated),
            models: bytes(models),
        }
    }

    fn answer(&self, path: &str, body: &[u8]) -> Response<Body> {
        let reply = |bytes: &Bytes| respond(Full::new(bytes.clone()).boxed(), "application/json");
        if path.ends_with("/chat/completions") {
            // Where clients put it: at the beginning or the end. Nothing of the rest is read.
            let ends = [
                &body[..body.len().min(2048)],
                &body[body.len().saturating_sub(2048)..],
            ];
            let streams = ends.iter().any(|end| {
                let text = String::from_utf8_lossy(end);
                text.contains("\"stream\":true") || text.contains("\"stream\": true")
            });
            return match streams {
                true => {
                    let events = self
                        .events
                        .clone()
                        .into_iter()
                        .map(|event| Ok::<_, Infallible>(Frame::data(event)));
                    let events = StreamBody::new(futures::stream::iter(events));
                    respond(BodyExt::boxed(events), "text/event-stream")
                }
                false => reply(&self.chat),
            };
        }
        match path {
            // An empty request is how a client asks whether there is such an endpoint.
            GENERATE if body.len() < 3 => {
                let mut refusal = reply(&Bytes::from_static(b"{}"));
                *refusal.status_mut() = StatusCode::BAD_REQUEST;
                refusal
            }
            GENERATE => reply(&self.tokens),
            _ if path.ends_with("/completions") => reply(&self.ids),
            _ => reply(&self.models),
        }
    }
}

type Body = BoxBody<Bytes, Infallible>;

fn respond(body: Body, kind: &'static str) -> Response<Body> {
    let mut response = Response::new(body);
    let kind = header::HeaderValue::from_static(kind);
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

async fn stub(tokens: u32) -> Result<(), AnyError> {
    let replies = Arc::new(Replies::new(tokens));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    say(&format!("http://{}", listener.local_addr()?))?;
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let replies = Arc::clone(&replies);
        while connections.try_join_next().is_some() {}
        connections.spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let replies = Arc::clone(&replies);
                async move {
                    let path = request.uri().path().to_owned();
                    let body = request.into_body().collect().await?.to_bytes();
                    Ok::<_, hyper::Error>(replies.answer(&path, &body))
                }
            });
            // A client that goes away is none of its concerns.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

/// Where to call: address, path, key.
type Target = (SocketAddr, String, Option<String>);

fn targets(text: &str) -> Result<Vec<Target>, AnyError> {
    let mut targets = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let mut words = line.split_whitespace();
        let url = words.next().and_then(|url| url.strip_prefix("http://"));
        let (address, path) = url
            .and_then(|url| url.split_once('/'))
            .ok_or_else(|| format!("{line}: expected http://HOST:PORT/PATH and perhaps a key"))?;
        targets.push((
            address.parse()?,
            format!("/{path}"),
            words.next().map(str::to_owned),
        ));
    }
    if targets.is_empty() {
        return Err("no targets".into());
    }
    Ok(targets)
}

struct Plan {
    targets: Vec<Target>,
    bytes: usize,
    stream: bool,
    time: Duration,
    calls: u64,
}

/// A history of turns of 2 KB, as an agent's grows, in a body of about this many bytes; and where
/// in it the number of the call stands.
fn body(bytes: usize, stream: bool) -> Result<(Vec<u8>, usize), AnyError> {
    const NUMBER: &str = "call 0000000000000000";
    let mut messages = vec![json!({"role": "system", "content": "You work on a program."})];
    let mut left = bytes.saturating_sub(300);
    while left > 0 {
        let take = left.min(2000);
        let role = if messages.len() % 2 == 1 {
            "user"
        } else {
            "assistant"
        };
        let text: String = LINE.chars().cycle().take(take).collect();
        messages.push(json!({"role": role, "content": text}));
        left -= take;
    }
    messages.push(json!({"role": "user", "content": NUMBER}));
    let body = json!({"model": "stub", "messages": messages, "max_tokens": 64, "temperature": 1.0,
        "logprobs": true, "stream": stream})
    .to_string();
    let at = body.find(NUMBER).ok_or("no number in the body")? + "call ".len();
    Ok((body.into_bytes(), at))
}

async fn run(plan: Plan, clients: usize) -> Result<Value, AnyError> {
    let (template, at) = body(plan.bytes, plan.stream)?;
    let plan = Arc::new(plan);
    let next = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    // Each gives back the milliseconds of its calls, and how many failed.
    let mut tasks: JoinSet<(Vec<f64>, u64)> = JoinSet::new();
    for number in 0..clients {
        let (plan, next, mut body) = (Arc::clone(&plan), Arc::clone(&next), template.clone());
        tasks.spawn(async move {
            let (address, path, key) = &plan.targets[number % plan.targets.len()];
            let bearer = key.as_ref().map(|key| format!("Bearer {key}"));
            let mut headers = vec![("content-type", "application/json")];
            headers.extend(bearer.as_deref().map(|bearer| ("authorization", bearer)));
            let (mut took, mut failed) = (Vec::new(), 0);
            let mut client = None;
            while started.elapsed() < plan.time {
                let call = next.fetch_add(1, Ordering::Relaxed);
                if call >= plan.calls {
                    break;
                }
                body[at..at + 16].copy_from_slice(format!("{call:016}").as_bytes());
                let began = Instant::now();
                let exchange = async {
                    let mut open = match client.take() {
                        Some(open) => open,
                        None => Client::tcp(*address).await,
                    };
                    open.send("POST", path, &headers, &body).await.ok()?;
                    let answer = open.answer().await.ok()?;
                    let keep = !answer
                        .head
                        .header("connection")
                        .is_some_and(|said| said.eq_ignore_ascii_case("close"));
                    Some((answer, keep.then_some(open)))
                };
                let answered = tokio::time::timeout(PATIENCE, exchange)
                    .await
                    .ok()
                    .flatten();
                let whole = |body: &[u8]| {
                    let end = String::from_utf8_lossy(&body[body.len().saturating_sub(4096)..]);
                    !plan.stream || end.contains("[DONE]") || end.contains("finish_reason")
                };
                match answered {
                    Some((answer, open)) if answer.status() == 200 && whole(&answer.body) => {
                        took.push(began.elapsed().as_secs_f64() * 1000.0);
                        client = open;
                    }
                    _ => failed += 1,
                }
            }
            (took, failed)
        });
    }
    let (mut took, mut failed) = (Vec::new(), 0);
    while let Some(had) = tasks.join_next().await {
        let (mut own, lost) = had?;
        took.append(&mut own);
        failed += lost;
    }
    let seconds = started.elapsed().as_secs_f64();
    took.sort_unstable_by(f64::total_cmp);
    let quantile = |part: f64| {
        let last = took.len().checked_sub(1)?;
        took.get((last as f64 * part).round() as usize).copied()
    };
    Ok(
        json!({"calls": took.len(), "failed": failed, "seconds": seconds,
        "per_s": took.len() as f64 / seconds, "p50_ms": quantile(0.5), "p99_ms": quantile(0.99)}),
    )
}
