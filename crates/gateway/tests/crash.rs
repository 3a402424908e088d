//! `kill -9` of a gateway under load: every reply that reached its client completely is in the
//! ledger, intact (I6).
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

mod support;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use ledger::Ledger;
use rand::{Rng, SeedableRng};
use serde_json::Value;
use support::client::{Answer, Client};
use support::{ask, id, reassemble, until};

const CLIENTS: usize = 8;
const PATH: &str = "/r/crash-test-key/v1/chat/completions";

fn example() -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.push("examples/serve_scripted");
    assert!(
        path.exists(),
        "{path:?} is missing: run the tests with `cargo nextest run -p gateway`, which builds examples"
    );
    path
}

/// What a client got to the end of.
#[derive(Debug, Clone)]
struct Received {
    question: String,
    message: Value,
}

async fn try_call(client: &mut Client, stream: bool, question: &str) -> std::io::Result<Answer> {
    let mut request = ask(question);
    request["stream"] = stream.into();
    client
        .send("POST", PATH, &[], request.to_string().as_bytes())
        .await?;
    client.answer().await
}

async fn load(address: SocketAddr, number: usize, count: Arc<AtomicU32>) -> Vec<Received> {
    let received = Mutex::new(Vec::new());
    let mut client = Client::tcp(address).await;
    for call in 0.. {
        let stream = call % 2 == 0;
        let question = format!("client {number} call {call} stop");
        let Ok(answer) = try_call(&mut client, stream, &question).await else {
            break;
        };
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let message = match stream {
            true => reassemble(&answer.text()).0,
            false => answer.message(),
        };
        received
            .lock()
            .unwrap()
            .push(Received { question, message });
        count.fetch_add(1, Ordering::SeqCst);
    }
    received.into_inner().unwrap()
}

async fn kill_at_random_moments(kills: u32) {
    let seed = std::env::var("SEED").map_or(1, |text| text.parse().unwrap());
    println!("SEED={seed}");
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let dir = tempfile::tempdir().unwrap();
    let mut total = 0;
    for kill in 0..kills {
        let mut child = Command::new(example())
            .arg(dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let (address, name) = line.trim().split_once(' ').unwrap();
        let address: SocketAddr = address.parse().unwrap();
        let count = Arc::new(AtomicU32::new(0));
        let mut clients = tokio::task::JoinSet::new();
        for number in 0..CLIENTS {
            clients.spawn(load(address, number, Arc::clone(&count)));
        }
        // The moment is a number of replies: random, and reached on any machine.
        let replies = random.random_range(1..600);
        until(|| count.load(Ordering::SeqCst) >= replies).await;
        child.kill().unwrap();
        child.wait().unwrap();
        let received = clients.join_all().await.concat();

        let ledger = Ledger::open(dir.path()).unwrap();
        let calls = ledger.calls(&id(name)).unwrap();
        for reply in &received {
            let call = calls
                .iter()
                .find(|call| call.conversation.messages[0].text_content() == reply.question)
                .unwrap_or_else(|| panic!("SEED={seed} kill {kill}: lost {reply:?}"));
            let recorded = call.reply.as_ref().unwrap();
            assert_eq!(
                reply.message["content"],
                recorded.text_content(),
                "SEED={seed} kill {kill}"
            );
            let generation = call.generation.as_ref().unwrap();
            assert!(!call.prompt_ids.is_empty() && generation.trainable());
        }
        total += received.len();
        ledger.close().await.unwrap();
    }
    println!("{kills} kills, {total} replies received, all in the ledger");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_that_were_seen_are_in_the_ledger() {
    kill_at_random_moments(3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "long"]
async fn replies_that_were_seen_are_in_the_ledger_many_times() {
    kill_at_random_moments(20).await;
}
