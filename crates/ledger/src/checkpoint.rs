//! Folding the write-ahead log into the database beside the writer.
//!
//! A checkpoint waits for the disk twice, some tens of milliseconds, and SQLite's own runs inside
//! of whichever commit fills the log: everybody who waits for that commit pays. Here a thread of
//! its own does it, over its own connection, while commits go on.
//!
//! Only when the log was folded in to its end does SQLite begin it anew, and a busy writer is
//! always ahead. So beyond [`LOG_BYTES_MAX`] the writer folds in the little that is left itself.
//!
//! What counts is the log, not the records: a small record alone in its commit rewrites every page
//! it touches (indexes, counters), some twenty times its own size. SQLite tells the size of the log
//! after each commit, on the thread of the writer.

use std::cell::Cell;
use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rusqlite::Connection;

use crate::LedgerError;
use crate::schema::{self, PAGE_BYTES};

/// Growth of the log after which it is folded in.
const EVERY_BYTES: u64 = 64 << 20;
/// Size of the log at which the writer helps. It may grow further while a reader holds an old
/// state, or a commit is larger.
const LOG_BYTES_MAX: u64 = 192 << 20;

thread_local! {
    /// Pages of the log after the last commit of this thread.
    static LOG_PAGES: Cell<u64> = const { Cell::new(0) };
}

/// The thread, and what the writer knows of the log.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    file: PathBuf,
    wake: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
    /// Pages of the log when it was last asked to be folded in.
    pages_asked: u64,
}

impl Checkpoints {
    pub(crate) fn start(file: &Path) -> Result<Self, LedgerError> {
        let (wake, woken) = sync_channel::<()>(1);
        let path = file.to_owned();
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
                    fold(&path, &connection);
                }
            })
            .map_err(|source| LedgerError::io(file, "start the checkpoints of", source))?;
        Ok(Self {
            file: file.to_owned(),
            wake: Some(wake),
            thread: Some(thread),
            pages_asked: 0,
        })
    }

    /// Has the log watched that `connection` writes. Its commits and [`Self::committed`] must be
    /// of one thread.
    pub(crate) fn watch(connection: &Connection) {
        connection.wal_hook(Some(|_, pages: c_int| {
            LOG_PAGES.set(u64::try_from(pages).unwrap_or(0));
            Ok(())
        }));
    }

    /// Told after each commit.
    pub(crate) fn committed(&mut self, connection: &Connection) {
        let pages = LOG_PAGES.get();
        // Fewer than before: SQLite began the log anew.
        if pages < self.pages_asked {
            self.pages_asked = 0;
        }
        if pages - self.pages_asked < EVERY_BYTES / PAGE_BYTES {
            return;
        }
        self.pages_asked = pages;
        let gone = match &self.wake {
            // A full channel: it is at work and will look once more.
            Some(wake) => matches!(
                wake.try_send(()),
                Err(std::sync::mpsc::TrySendError::Disconnected(()))
            ),
            None => true,
        };
        if gone || pages > LOG_BYTES_MAX / PAGE_BYTES {
            fold(&self.file, connection);
        }
    }

    /// Folds in everything and empties the log, after the last commit. A reader that holds an old
    /// state leaves it as it is: whoever closes the ledger next does it.
    pub(crate) fn end(self, connection: &Connection) {
        let file = self.file.clone();
        drop(self);
        let emptied = connection.busy_timeout(Duration::ZERO).and_then(|()| {
            let empty = "PRAGMA wal_checkpoint(TRUNCATE)";
            connection.query_row(empty, [], |row| row.get::<_, bool>(0))
        });
        match emptied {
            Ok(false) => {}
            Ok(true) => {
                tracing::info!(file = %file.display(), "a reader holds the log; it is folded in when the ledger is closed next");
            }
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "the log is folded in when the ledger is closed next");
            }
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
fn fold(file: &Path, connection: &Connection) {
    if let Err(error) = connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())) {
        tracing::warn!(file = %file.display(), %error, "the log could not be folded in; it is tried again");
    }
}
