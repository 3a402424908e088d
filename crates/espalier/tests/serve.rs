//! `espalier serve` over somebody's text-only API: every dialect in, everything captured, nothing
//! trainable; two engines of which one dies; spans that reach a collector.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const WAIT: Duration = Duration::from_secs(60);
const KEY: &str = "sk-of-the-upstream";

/// A request that a fake server got: its head and its body.
type Seen = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

/// Reads one request of a connection.
fn request(stream: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let mut head = String::new();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line.trim().is_empty() {
            break;
        }
        head.push_str(&line);
    }
    let length = head
        .lines()
        .find_map(|line| {
            line.to_lowercase()
                .strip_prefix("content-length:")?
                .trim()
                .parse()
                .ok()
        })
        .unwrap_or(0);
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    Some((head, body))
}

/// A server that answers every request with what `answer` makes of it, until it is told to die.
fn server(answer: fn(&str, &Value) -> Value) -> (String, Seen, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (seen, dead) = (Seen::default(), Arc::new(AtomicBool::new(false)));
    let (log, gone) = (Arc::clone(&seen), Arc::clone(&dead));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (log, gone) = (Arc::clone(&log), Arc::clone(&gone));
            std::thread::spawn(move || {
                let mut stream = BufReader::new(stream.unwrap());
                while let Some((head, body)) = request(&mut stream) {
                    if gone.load(SeqCst) {
                        return;
                    }
                    let json = serde_json::from_slice(&body).unwrap_or(Value::Null);
                    let reply = answer(&head, &json).to_string();
                    log.lock().unwrap().push((head, body));
                    let _ = write!(
                        stream.get_mut(),
                        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{reply}",
                        reply.len()
                    );
                }
            });
        }
    });
    (url, seen, dead)
}

/// A chat model that says what the last message was, and calls the first tool while there is one
/// and no result yet.
fn model(head: &str, body: &Value) -> Value {
    if head.starts_with("GET") {
        return json!({"object": "list", "data": [{"id": "only-model"}]});
    }
    let messages = body["messages"].as_array().unwrap();
    let last = messages.last().unwrap();
    let tool = &body["tools"][0]["function"]["name"];
    let mut message = json!({"role": "assistant",
        "content": format!("heard: {}", last["content"].as_str().unwrap_or("nothing"))});
    let mut finish = "stop";
    if tool.is_string() && last["role"] != "tool" {
        message["tool_calls"] = json!([{"id": "upstream_1", "type": "function",
            "function": {"name": tool, "arguments": "{\"command\": \"ls\"}"}}]);
        finish = "tool_calls";
    }
    json!({"choices": [{"index": 0, "message": message, "finish_reason": finish}]})
}

struct Served {
    child: Child,
    base: String,
    key: String,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn serve(folder: &Path, arguments: &[&str]) -> Served {
    let mut child = Command::new(env!("CARGO_BIN_EXE_espalier"))
        .args(["serve", "--json", "--open", "try", "--run", "served"])
        .args(["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
        .args(["--engine-key-env", "UPSTREAM_KEY"])
        .args(arguments)
        .current_dir(folder)
        .env("UPSTREAM_KEY", KEY)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut hello = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    let (gateway, rollout) = (hello(), hello());
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    Served {
        child,
        base: text(&gateway["base_url"]),
        key: text(&rollout["key"]),
    }
}

impl Served {
    fn post(&self, path: &str, body: &Value) -> (u16, String) {
        let host = self.base.strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(host).unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        let body = body.to_string();
        write!(
            stream,
            "POST /r/{}{path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            self.key,
            body.len()
        )
        .unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        let (head, body) = reply.split_once("\r\n\r\n").unwrap();
        (
            head.split(' ').nth(1).unwrap().parse().unwrap(),
            body.to_owned(),
        )
    }

    fn end(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(130));
    }
}

#[test]
fn every_dialect_reaches_a_text_only_upstream() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, asked, _) = server(model);
    let (collector, spans, _) = server(|_, _| json!({}));
    let engine = format!("openai:{upstream}/v1");
    let served = serve(folder.path(), &["--engine", &engine, "--otlp", &collector]);
    let schema = json!({"type": "object", "properties": {"command": {"type": "string"}}});
    let function = json!({"name": "bash", "description": "runs", "parameters": schema});
    let mut flat = function.clone();
    flat["type"] = json!("function");
    // Path, request, and where the reply names the tool and shows its argument.
    let cases = [
        (
            "/v1/chat/completions",
            json!({"model": "m", "messages": [{"role": "user", "content": "go chat"}],
                "tools": [{"type": "function", "function": function}]}),
        ),
        (
            "/v1/responses",
            json!({"model": "m", "input": "go responses", "tools": [flat]}),
        ),
        (
            "/v1/messages",
            json!({"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "go messages"}],
                "tools": [{"name": "bash", "description": "runs", "input_schema": schema}]}),
        ),
        (
            "/v1beta/models/m:generateContent",
            json!({"contents": [{"role": "user", "parts": [{"text": "go gemini"}]}],
                "tools": [{"functionDeclarations": [function]}]}),
        ),
    ];
    for (path, request) in &cases {
        let (status, reply) = served.post(path, request);
        assert_eq!(status, 200, "{path}: {reply}");
        for part in ["heard: go ", "bash", "ls"] {
            assert!(reply.contains(part), "{path}: {part} is not in {reply}");
        }
        let mut streamed = request.clone();
        streamed["stream"] = json!(true);
        let path = path.replace(":generateContent", ":streamGenerateContent?alt=sse");
        let (status, events) = served.post(&path, &streamed);
        assert_eq!(status, 200, "{path}: {events}");
        assert!(
            events.contains("data: ") && events.contains("heard: go "),
            "{events}"
        );
    }
    let url = format!("/r/{}/v1", served.key);
    served.end();
    {
        let asked = asked.lock().unwrap();
        // A stream that repeats its body is answered from the record.
        assert_eq!(asked.len(), 1 + cases.len());
        assert!(
            asked
                .iter()
                .all(|(head, _)| head.to_lowercase().contains(&format!("bearer {KEY}")))
        );
        let body: Value = serde_json::from_slice(&asked[1].1).unwrap();
        assert_eq!(body["model"], "only-model");
        assert_eq!(body["messages"][0]["content"], "go chat");
    }
    {
        let spans = spans.lock().unwrap();
        assert!(!spans.is_empty(), "no span reached the collector");
        let (head, body) = &spans[0];
        assert!(head.starts_with("POST /v1/traces"), "{head}");
        let body = String::from_utf8_lossy(body);
        assert!(
            body.contains("gen_ai.operation.name") && !body.contains("go chat"),
            "{body}"
        );
    }
    let inspect = Command::new(env!("CARGO_BIN_EXE_espalier"))
        .args(["inspect", "served", "--json"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let overview: Value = serde_json::from_slice(&inspect.stdout).unwrap();
    assert_eq!(overview["calls"], cases.len(), "{overview}");
    // Without log-probabilities nothing is trainable (I4), and no key is in the record.
    let ledger = std::fs::read(folder.path().join("served").join(ledger::FILE_NAME)).unwrap();
    let ledger = String::from_utf8_lossy(&ledger);
    assert!(!ledger.contains(KEY) && !ledger.contains(&url));
}

#[test]
fn a_dead_engine_of_two_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let (first, first_asked, dead) = server(model);
    let (second, second_asked, other_dead) = server(model);
    let engines = [format!("openai:{first}/v1"), format!("openai:{second}/v1")];
    let served = serve(
        folder.path(),
        &[
            "--engine",
            &engines[0],
            "--engine",
            &engines[1],
            "--model",
            "m",
        ],
    );
    let ask = |text: &str| json!({"messages": [{"role": "user", "content": text}]});
    let path = "/v1/chat/completions";
    assert_eq!(served.post(path, &ask("one")).0, 200);
    assert_eq!(served.post(path, &ask("two")).0, 200);
    // Health checks are no calls.
    let calls = |seen: &Seen| {
        let seen = seen.lock().unwrap();
        seen.iter()
            .filter(|(head, _)| head.starts_with("POST"))
            .count()
    };
    let (one, two) = (calls(&first_asked), calls(&second_asked));
    assert!(one == 0 || two == 0, "a rollout sticks to its engine");
    let (dies, lives) = match one {
        0 => (other_dead, first_asked),
        _ => (dead, second_asked),
    };
    dies.store(true, SeqCst);
    // As a harness: again until it works. A failed call is no new one.
    let answered = (0..20).find(|_| served.post(path, &ask("three")).0 == 200);
    assert!(answered.is_some_and(|tries| tries > 0), "{answered:?}");
    assert_eq!(calls(&lives), 1);
    served.end();
}
