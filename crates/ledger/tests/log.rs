//! The write-ahead log stays small however small the records are, and is empty at the end.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::path::Path;

use ledger::{FILE_NAME, Ledger};

const LOG_BYTES_MAX: u64 = 256 << 20;

fn log_bytes(dir: &Path) -> u64 {
    std::fs::metadata(dir.join(format!("{FILE_NAME}-wal"))).map_or(0, |file| file.len())
}

/// A rollout is written when it starts and when it ends, alone in its commit as often as not, and
/// a commit rewrites every page it touches: the log grows some twenty times faster than the data.
#[tokio::test]
async fn small_records_one_by_one_leave_a_small_log() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(dir.path()).unwrap();
    // A program that looks at the run while it is written, as `inspect` may.
    let reader = Ledger::open_read_only(dir.path()).unwrap();
    for seed in 0..12_000_u64 {
        let id = format!("r{}", seed * 7919 % 2003);
        ledger
            .put_rollout(support::rollout(seed, &id))
            .await
            .unwrap();
        if seed % 3000 == 0 {
            assert!(reader.rollouts(&[]).unwrap().len() <= 2003);
        }
    }
    // The file keeps the size that the log once had.
    let bytes = log_bytes(dir.path());
    assert!(bytes <= LOG_BYTES_MAX, "a log of {bytes} bytes");
    ledger.close().await.unwrap();
    assert_eq!(log_bytes(dir.path()), 0, "the log is folded in and empty");
    assert_eq!(reader.rollouts(&[]).unwrap().len(), 2003);
}
