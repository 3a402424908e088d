//! Writes made-up calls as fast as it can and prints `rollout index seed.` for every one that the
//! ledger acknowledged. The crash test kills it.
//!
//! Usage: `write_until_killed DIR NUMBER`

#[path = "../tests/support/mod.rs"]
mod support;

use std::io::Write;
use std::path::Path;

use ledger::Ledger;

const CALLS_MAX: u32 = 100_000;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(dir), Some(number)) = (arguments.next(), arguments.next()) else {
        return Err("usage: write_until_killed DIR NUMBER".into());
    };
    let number: u64 = number.parse()?;
    let ledger = Ledger::open(Path::new(&dir))?;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8_u64 {
        let ledger = ledger.clone();
        tasks.spawn(async move {
            let rollout = format!("k{number}.t{task}");
            for index in 0..CALLS_MAX {
                let seed = (number << 40) + (task << 32) + u64::from(index);
                let call = support::call(seed, &rollout, index);
                ledger.put_call(call).await.map_err(std::io::Error::other)?;
                let line = format!("{rollout} {index} {seed}.\n");
                std::io::stdout().lock().write_all(line.as_bytes())?;
            }
            Ok::<_, std::io::Error>(())
        });
    }
    while let Some(task) = tasks.join_next().await {
        task??;
    }
    Ok(())
}
