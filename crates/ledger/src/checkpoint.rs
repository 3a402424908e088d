//! Folding the write-ahead log into the database beside the writer.
//!
//! A checkpoint waits for the disk twice, some tens of milliseconds, and SQLite's own runs inside
//! of whichever commit fills the log: everybody who waits for that commit pays. Here a thread of
//! its own does it, over its own connection, while commits go on.
//!
//! Only when the log was folded in to its end does SQLite begin it anew, and a busy writer is
//! always ahead. So beyond [`LOG_BYTES_MAX`] the writer folds in the little that is left itself.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use rusqlite::Connection;

use crate::LedgerError;
use crate::schema::{self, PAGE_BYTES};

/// Bytes of new records after which the log is folded in.
const EVERY_BYTES: u64 = 16 << 20;
/// Size of the log at which the writer helps. It may grow further while a reader holds an old
/// state, or a commit is larger.
const LOG_BYTES_MAX: u64 = 192 << 20;

/// The thread, and what the writer knows of the log.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    file: PathBuf,
    wake: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
    /// Pages of the log when it was last looked at; 0 when it could begin anew.
    pages: Arc<AtomicU64>,
    bytes_since: u64,
}

impl Checkpoints {
    pub(crate) fn start(file: &Path) -> Result<Self, LedgerError> {
        let (wake, woken) = sync_channel::<()>(1);
        let pages = Arc::<AtomicU64>::default();
        let (path, seen) = (file.to_owned(), Arc::clone(&pages));
        let thread = std::thread::Builder::new()
            .name("ledger-checkpoint".to_owned())
            .spawn(move || {
                let connection = match schema::connect(&path) {
                    Ok(connection) => connection,
                    Err(error) => {
                        tracing::warn!(%error, "the writer checkpoints by itself");
                        return;
                    }
                };
                while woken.recv().is_ok() {
                    fold(&path, &connection, &seen);
                }
            })
            .map_err(|source| LedgerError::io(file, "start the checkpoints of", source))?;
        Ok(Self {
            file: file.to_owned(),
            wake: Some(wake),
            thread: Some(thread),
            pages,
            bytes_since: 0,
        })
    }

    /// Told after each commit.
    pub(crate) fn committed(&mut self, connection: &Connection, bytes: usize) {
        self.bytes_since += bytes as u64;
        if self.bytes_since < EVERY_BYTES {
            return;
        }
        self.bytes_since = 0;
        let gone = match &self.wake {
            // A full channel: it is at work and will look once more.
            Some(wake) => matches!(
                wake.try_send(()),
                Err(std::sync::mpsc::TrySendError::Disconnected(()))
            ),
            None => true,
        };
        if gone || self.pages.load(Ordering::Relaxed) > LOG_BYTES_MAX / PAGE_BYTES {
            fold(&self.file, connection, &self.pages);
        }
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(file = %self.file.display(), "the ledger's checkpoints had stopped by a defect");
        }
    }
}

/// Folds in what no reader needs in the log any more. A failure loses nothing: the log stays.
fn fold(file: &Path, connection: &Connection, pages: &AtomicU64) {
    let found = connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| {
        Ok((row.get::<_, i64>(1)?, row.get::<_, i64>(2)?))
    });
    match found {
        Ok((log, folded)) => {
            let left = if log == folded { 0 } else { log };
            pages.store(u64::try_from(left).unwrap_or(0), Ordering::Relaxed);
        }
        Err(error) => {
            tracing::warn!(file = %file.display(), %error, "the log could not be folded in; it is tried again");
        }
    }
}
