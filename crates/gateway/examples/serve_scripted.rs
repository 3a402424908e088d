//! A gateway with a scripted engine, for the crash test and for measuring.
//!
//! `serve_scripted DIR` serves one rollout with the key `crash-test-key`, prints its address, and
//! goes on until it is killed. `serve_scripted DIR bench CLIENTS CALLS` makes the calls itself, one
//! rollout per client, and prints how many per second there were. `serve_scripted DIR turns COUNT
//! BYTES` plays one conversation of so many turns, each with a tool result of so many bytes, and
//! prints what a turn costs at its beginning and at its end.

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
        Some(["turns", count, bytes]) => {
            let (count, bytes): (usize, usize) = (count.parse()?, bytes.parse()?);
            let access = gateway.open(support::rollout_of(&format!("{name}.turns"), u32::MAX))?;
            let path = support::path(&access);
            let mut client = Client::tcp(address).await;
            let mut request = support::ask("go");
            request["tools"] = support::tools();
            for turn in 1..=count {
                let started = Instant::now();
                let answer = client.post(&path, &[], &request).await;
                let taken = started.elapsed();
                assert_eq!(answer.status(), 200, "{}", answer.text());
                let history = request.to_string().len();
                if [1, 2, 10, 40, 128].contains(&turn) || turn == count {
                    say(&format!(
                        "turn {turn}: {:.1} ms, history {history} bytes, prompt {} tokens",
                        taken.as_secs_f64() * 1000.0,
                        answer.json()["usage"]["prompt_tokens"],
                    ))?;
                }
                let message = answer.message();
                let id = message["tool_calls"][0]["id"].clone();
                let result = format!("{turn} {}", "line of output\n".repeat(bytes / 15));
                let list = request["messages"].as_array_mut().ok_or("no messages")?;
                list.push(message);
                list.push(
                    serde_json::json!({"role": "tool", "tool_call_id": id, "content": result}),
                );
            }
            for line in gateway.metrics_text().lines() {
                if line.contains("stage_seconds_sum") {
                    say(line)?;
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
