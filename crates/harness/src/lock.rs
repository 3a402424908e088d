//! An exclusive lock on a file that dies with its owner.

use std::{
    fs::{File, TryLockError},
    path::Path,
    time::{Duration, Instant},
};

use crate::install::open_lock;

/// How often a lock that somebody holds is tried again.
const PAUSE: Duration = Duration::from_millis(50);

/// Waits for the lock until the deadline; `None` when it passed. The lock is free again when the
/// file is dropped, or when the process ends in whatever way.
pub(crate) async fn exclusive(path: &Path, deadline: Instant) -> std::io::Result<Option<File>> {
    let file = open_lock(path)?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return Ok(None),
            Err(TryLockError::WouldBlock) => tokio::time::sleep(PAUSE).await,
        }
    }
}
