//! The real vLLM (its build for processors) with SmolLM2-135M: ids in and out, log-probabilities,
//! an abort, and new weights under a request in flight. `scripts/setup.sh long` installs both.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a test"
)]

use std::{
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use engine::{
    Engine, Request,
    remote::{
        Endpoint, Facts,
        vllm::{Api, COMPLETIONS, Vllm},
    },
};
use model::forest::{self, Segment};
use record::{FinishReason, Sampling};

/// It imports for minutes on a busy machine.
const START: Duration = Duration::from_secs(900);
const PATIENCE: Duration = Duration::from_secs(120);
/// "What is the capital of France?" in the model's chat template.
const PROMPT: [u32; 14] = [
    1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520,
];
/// The end of a turn.
const END: u32 = 2;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn models() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache"),
        PathBuf::from,
    );
    cache.join("espalier/models")
}

/// The folder with the server, as `scripts/setup.sh long` put it there.
fn site() -> PathBuf {
    let script = repository().join("scripts/python-packages.sh");
    let output = Command::new("sh").arg(script).arg("vllm").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

/// A server; it and what it started end when dropped.
struct Server {
    child: Child,
    url: String,
    log: tempfile::NamedTempFile,
}

impl Drop for Server {
    fn drop(&mut self) {
        let group = format!("-{}", self.child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
        let _ = self.child.wait();
    }
}

impl Server {
    async fn start(flags: &[&str]) -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let log = tempfile::NamedTempFile::new().unwrap();
        let child = Command::new("python3")
            .args(["-m", "vllm.entrypoints.openai.api_server", "--model"])
            .arg(models().join("SmolLM2-135M-Instruct"))
            .args(["--host", "127.0.0.1", "--port", &port.to_string()])
            .args(["--enforce-eager", "--max-model-len", "2048"])
            .args(flags)
            .env("PYTHONPATH", site())
            .env("VLLM_SERVER_DEV_MODE", "1")
            .env("VLLM_CPU_KVCACHE_SPACE", "1")
            .env("VLLM_NO_USAGE_STATS", "1")
            .env("HF_HUB_OFFLINE", "1")
            .stdin(Stdio::null())
            .stdout(log.reopen().unwrap())
            .stderr(log.reopen().unwrap())
            .process_group(0)
            .spawn()
            .unwrap();
        let mut server = Self {
            child,
            url: format!("http://127.0.0.1:{port}"),
            log,
        };
        let until = Instant::now() + START;
        while server.get("/health").await.is_none() {
            let ended = server.child.try_wait().unwrap();
            if ended.is_some() || Instant::now() > until {
                let log = std::fs::read_to_string(server.log.path()).unwrap();
                let end: Vec<&str> = log.lines().rev().take(40).collect();
                panic!("the server did not start: {ended:?}\n{end:#?}");
            }
            // Another program, which tells nobody when it is ready.
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        server
    }

    /// The body of a page; `None` without one.
    async fn get(&self, path: &str) -> Option<String> {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let address = self.url.strip_prefix("http://").unwrap();
        let mut stream = tokio::net::TcpStream::connect(address).await.ok()?;
        let head = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await.ok()?;
        text.starts_with("HTTP/1.1 200").then_some(text)
    }

    /// A number of its metrics, over all labels.
    async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").await.unwrap();
        text.lines()
            .filter(|line| line.starts_with(&format!("{name}{{")))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    async fn until(&self, name: &str, what: impl Fn(f64) -> bool) {
        let until = Instant::now() + PATIENCE;
        loop {
            let found = self.metric(name).await;
            if what(found) {
                return;
            }
            assert!(Instant::now() < until, "{name} stays at {found}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn facts() -> Facts {
    Facts {
        context_tokens_max: 1 << 20,
        vocabulary: 49_152,
        policy_version: 3,
    }
}

fn request(seed: u64, tokens_max: u32, ends: bool) -> Request {
    Request {
        prompt_ids: PROMPT.to_vec(),
        sampling: Sampling {
            tokens_max,
            seed,
            stop_ids: if ends { vec![END] } else { Vec::new() },
            ..Sampling::default()
        },
        hint: None,
    }
}

/// Log-probabilities of the reply, by our own transformer in full precision.
fn ours(folder: &Path, reply: &[u32]) -> Vec<f32> {
    let weights = model::load(folder).unwrap();
    let tokens = [&PROMPT[..], reply].concat();
    let targets: Vec<u32> = (PROMPT.len() as u32..tokens.len() as u32).collect();
    let segments = [Segment {
        parent: None,
        tokens: &tokens,
        targets: &targets,
    }];
    let outcome = forest::run(&weights, &segments, None, forest::Settings::default()).unwrap();
    outcome.logprobs[0].clone()
}

/// The server computes in bfloat16: measured were 0.05 at most and 0.012 on average.
fn close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    let differences: Vec<f32> = found
        .iter()
        .zip(expected)
        .map(|(a, b)| (a - b).abs())
        .collect();
    let worst = differences.iter().copied().fold(0.0, f32::max);
    let mean = differences.iter().sum::<f32>() / differences.len() as f32;
    println!("log-probabilities: {mean:.4} apart on average, {worst:.4} at most");
    assert!(worst < 0.25 && mean < 0.03, "{differences:?}");
}

async fn ids_logprobs_and_aborts(server: &Server, engine: &Vllm, api: Api) {
    let folder = models().join("SmolLM2-135M-Instruct");
    assert_eq!(engine.info().context_tokens_max, 2048);
    assert_eq!(
        engine.degraded(),
        (api == Api::Completions).then_some(COMPLETIONS)
    );
    let first = engine.generate(request(1, 48, true)).await.unwrap();
    first.check().unwrap();
    assert!(first.trainable());
    let again = engine.generate(request(1, 48, true)).await.unwrap();
    assert_eq!(first.token_ids, again.token_ids);
    assert_eq!(first.logprobs_model, again.logprobs_model);
    let other = engine.generate(request(2, 48, true)).await.unwrap();
    assert_ne!(first.token_ids, other.token_ids);
    for generation in [&first, &other] {
        match generation.finish {
            // The token that ends the turn is a part of what was generated.
            FinishReason::Stop => assert_eq!(generation.token_ids.last(), Some(&END)),
            FinishReason::Length => assert_eq!(generation.token_ids.len(), 48),
            finish => panic!("{finish:?}"),
        }
        let expected = ours(&folder, &generation.token_ids);
        close(&generation.logprobs_model, &expected);
    }
    // A client that goes away: the server stops, and says so.
    let made = server.metric("vllm:generation_tokens_total").await;
    let asked = tokio::time::timeout(PATIENCE, engine.generate(request(3, 1900, false)));
    tokio::select! {
        done = asked => panic!("1900 tokens were made before one was counted: {done:?}"),
        () = server.until("vllm:generation_tokens_total", |now| now > made + 8.0) => {}
    }
    server
        .until("vllm:num_requests_running", |running| running == 0.0)
        .await;
    let all = server.metric("vllm:generation_tokens_total").await - made;
    assert!(all < 1900.0, "it went on to the end: {all} tokens");
}

/// The weights change while a request is in flight; whose tokens are whose is told.
async fn weights_change(server: &Server, engine: &Vllm, api: Api) {
    let folder = models().join("SmolLM2-135M-Instruct-halved");
    let before = engine.generate(request(1, 32, true)).await.unwrap();
    let made = server.metric("vllm:generation_tokens_total").await;
    let generating = engine.generate(request(4, 400, false));
    let changing = async {
        server
            .until("vllm:generation_tokens_total", |now| now > made + 8.0)
            .await;
        engine.load_weights(&folder, 7).await
    };
    let (generation, changed) = tokio::join!(generating, changing);
    changed.unwrap();
    assert_eq!(engine.policy_version(), 7);
    let generation = generation.unwrap();
    generation.check().unwrap();
    let spans: Vec<_> = generation
        .policy
        .iter()
        .map(|s| (s.start, s.version))
        .collect();
    println!(
        "{api:?}: {} tokens, weights {spans:?}",
        generation.token_ids.len()
    );
    match api {
        Api::Tokens => {
            assert_eq!(spans.len(), 2, "{spans:?}");
            assert_eq!((spans[0], spans[1].1), ((0, 3), 7));
            assert!(spans[1].0 > 0);
        }
        // It ended before they came.
        Api::Completions => assert_eq!(spans, [(0, 3)]),
    }
    let after = engine.generate(request(1, 32, true)).await.unwrap();
    assert_eq!(after.policy[0].version, 7);
    assert_ne!(before.logprobs_model, after.logprobs_model);
    close(&after.logprobs_model, &ours(&folder, &after.token_ids));
}

async fn all(flags: &[&str], api: Api) {
    let server = Server::start(flags).await;
    let engine = Vllm::detect(Endpoint::new(&server.url), facts())
        .await
        .unwrap();
    engine.health().await.unwrap();
    ids_logprobs_and_aborts(&server, &engine, api).await;
    weights_change(&server, &engine, api).await;
}

#[tokio::test]
#[ignore = "long: starts vLLM, minutes of imports"]
async fn the_tokens_endpoint_of_the_real_server() {
    all(&["--enable-scale-out"], Api::Tokens).await;
}

#[tokio::test]
#[ignore = "long: starts vLLM, minutes of imports"]
async fn completions_of_the_real_server() {
    all(&[], Api::Completions).await;
}
