//! A gateway with a scripted engine, for the crash test and for measuring.
//!
//! `serve_scripted DIR` serves one rollout with the key `crash-test-key`, prints its address, and
//! goes on until it is killed. `serve_scripted DIR bench CLIENTS CALLS` makes the calls itself, one
//! rollout per client, and prints how many per second there were. `serve_scripted DIR turns COUNT
//! BYTES TALKS` plays conversations of so many turns, one after the other, each turn with a tool
//! result of so many bytes, and prints what a turn costs early and late: medians over the
//! conversations, beside the time that reading and hashing the request takes by itself, and the
//! tokens that had to be encoded.

#[path = "../tests/support/mod.rs"]
mod support;

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use gateway::{Gateway, LocalAddr, Open};
use ledger::Ledger;
use support::client::Client;

const KEY: &str = "crash-test-key";

type AnyError = Box<dyn std::error::Error>;

fn say(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), AnyError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let dir = Path::new(words.first().ok_or("usage: serve_scripted DIR")?);
    let ledger = if dir.join(ledger::FILE_NAME).exists() {
        Ledger::open(dir)?
    } else {
        Ledger::create(dir)?
    };
    let codec = support::codec();
    let engine = support::Puppet::with_context(&codec, 1 << 20);
    let gateway = Gateway::start(support::config(), engine, codec, ledger.clone()).await?;
    // A killed run leaves calls behind; this one has a name of its own.
    let name = format!("run{}", ledger.counts()?.notes);
    ledger.put_note(&name, true.into()).await?;
    gateway.open(Open {
        calls_max: u32::MAX,
        key: Some(KEY.into()),
        ..support::rollout(&name)
    })?;
    let Some(LocalAddr::Tcp(address)) = gateway.local_addrs().first().cloned() else {
        return Err("no address".into());
    };
    match words.get(1..) {
        Some(["bench", clients, calls]) => {
            let (clients, calls): (u32, u32) = (clients.parse()?, calls.parse()?);
            let started = Instant::now();
            let mut tasks = tokio::task::JoinSet::new();
            for number in 0..clients {
                let access =
                    gateway.open(support::rollout_of(&format!("{name}.{number}"), calls))?;
                let path = support::path(&access);
                tasks.spawn(async move {
                    let mut client = Client::tcp(address).await;
                    for call in 0..calls {
                        let request = support::ask(&format!("call {number} {call}"));
                        let answer = client.post(&path, &[], &request).await;
                        assert_eq!(answer.status(), 200);
                    }
                });
            }
            while let Some(task) = tasks.join_next().await {
                task?;
            }
            let seconds = started.elapsed().as_secs_f64();
            let rate = f64::from(clients * calls) / seconds;
            say(&format!(
                "{clients} clients, {calls} calls each: {rate:.0} calls/s"
            ))?;
            for line in gateway.metrics_text().lines() {
                if line.contains("stage_seconds_sum") {
                    say(line)?;
                }
            }
            gateway.shutdown(Duration::from_secs(10)).await;
            ledger.close().await?;
            Ok(())
        }
        Some(["turns", count, bytes, talks]) => {
            let (count, bytes): (usize, usize) = (count.parse()?, bytes.parse()?);
            let talks: usize = talks.parse()?;
            let mut turns = vec![Vec::new(); count];
            for talk in 0..talks {
                let open = support::rollout_of(&format!("{name}.{talk}"), u32::MAX);
                let path = support::path(&gateway.open(open)?);
                play(&gateway, address, &path, bytes, talk, &mut turns).await?;
            }
            for (at, turns) in turns.iter_mut().enumerate() {
                let turn = at + 1;
                if [1, 10, 40, 128].contains(&turn) || turn == count {
                    say(&report(turn, turns)?)?;
                }
            }
            gateway.shutdown(Duration::from_secs(10)).await;
            ledger.close().await?;
            Ok(())
        }
        _ => {
            say(&format!("{address} {name}"))?;
            std::future::pending().await
        }
    }
}

/// What one turn was.
#[derive(Debug, Clone)]
struct Turn {
    took: Duration,
    /// Processor time of this process, client included.
    cpu: Duration,
    /// Parsing and hashing the same body, by itself.
    hashing: Duration,
    history_bytes: usize,
    prompt_tokens: u64,
    encoded_tokens: u64,
}

/// Plays one conversation; no two are the same, so that none is known from another.
async fn play(
    gateway: &Gateway,
    address: std::net::SocketAddr,
    path: &str,
    bytes: usize,
    talk: usize,
    turns: &mut [Vec<Turn>],
) -> Result<(), AnyError> {
    let encoded = || {
        let metrics = gateway.metrics_text();
        let line = metrics
            .lines()
            .find(|line| line.contains("tokens_total{kind=\"prompt_encoded\"}"));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .ok_or("no counter of encoded tokens")
    };
    let mut client = Client::tcp(address).await;
    let mut request = support::ask(&format!("go {talk}"));
    request["tools"] = support::tools();
    for (turn, had) in turns.iter_mut().enumerate() {
        let body = request.to_string();
        let started = Instant::now();
        let parsed: serde_json::Value = serde_json::from_str(&body)?;
        std::hint::black_box(wire::digest(record::Dialect::Chat, &parsed));
        let hashing = started.elapsed();
        let before = encoded()?;
        let cpu = cpu_time()?;
        let started = Instant::now();
        client.send("POST", path, &[], body.as_bytes()).await?;
        let answer = client.answer().await?;
        let took = started.elapsed();
        let cpu = cpu_time()?.saturating_sub(cpu);
        assert_eq!(answer.status(), 200, "{}", answer.text());
        had.push(Turn {
            took,
            cpu,
            hashing,
            history_bytes: body.len(),
            prompt_tokens: answer.json()["usage"]["prompt_tokens"]
                .as_u64()
                .unwrap_or(0),
            encoded_tokens: encoded()? - before,
        });
        let message = answer.message();
        let id = message["tool_calls"][0]["id"].clone();
        let line = format!("{talk} {turn} line of output\n");
        let result = line.repeat(bytes / line.len());
        let list = request["messages"].as_array_mut().ok_or("no messages")?;
        list.push(message);
        list.push(serde_json::json!({"role": "tool", "tool_call_id": id, "content": result}));
    }
    Ok(())
}

/// Of all threads, to the nanosecond.
fn cpu_time() -> Result<Duration, AnyError> {
    let mut total = 0;
    for task in std::fs::read_dir("/proc/self/task")? {
        // A thread may have ended meanwhile.
        if let Ok(text) = std::fs::read_to_string(task?.path().join("schedstat")) {
            let on_cpu = text.split(' ').next().unwrap_or_default();
            total += on_cpu.parse::<u64>()?;
        }
    }
    Ok(Duration::from_nanos(total))
}

fn report(turn: usize, had: &mut [Turn]) -> Result<String, AnyError> {
    let middle = had.len() / 2;
    let mut median = |of: fn(&Turn) -> Duration| {
        had.sort_unstable_by_key(of);
        of(&had[middle]).as_secs_f64() * 1000.0
    };
    let (took, hashing) = (median(|turn| turn.took), median(|turn| turn.hashing));
    let cpu = median(|turn| turn.cpu);
    let last = had.last().ok_or("no conversations")?;
    Ok(format!(
        "turn {turn}: {took:.2} ms, {cpu:.2} ms of processor time, reading and hashing alone {hashing:.2} ms; history {} bytes, prompt {} tokens, {} of them encoded",
        last.history_bytes, last.prompt_tokens, last.encoded_tokens
    ))
}
