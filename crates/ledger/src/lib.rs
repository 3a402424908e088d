//! The durable store of rollouts, calls, verdicts and small notes of one run.
//!
//! One directory per run, one SQLite file `ledger.sqlite` in it (write-ahead log, so readers
//! never wait for the writer), and `ledger.lock`, which names the one process that may write.
//!
//! | module | owns |
//! |---|---|
//! | [`error`] | what can go wrong, in words that say what to do |
//! | `schema` | tables, pragmas, the version of the format |
//! | `row` | a call as bytes: compressed JSON plus raw token ids and log-probabilities, checksummed |
//! | `writer` | the one thread that writes, and its group commit |
//! | `reader` | read-only connections and the queries |
//!
//! Invariants
//! - **I6 durable before visible.** A `put_*` returns only after its transaction is committed.
//!   `synchronous=NORMAL` in WAL mode means: the bytes have left this process, so `kill -9`
//!   cannot take them back. A power cut may lose the last moments, never tear the file.
//! - **One writer.** A second [`Ledger::open`] of the same directory, from any process, is
//!   [`LedgerError::Locked`] and says who holds it. Readers ([`Ledger::open_read_only`]) are free.
//! - **Damage stays local.** Every record carries 16 bytes of SHA-256. A record that does not
//!   match is [`LedgerError::Damaged`], naming file and record; all others stay readable.
//! - **Bounded (I10).** At most [`QUEUE_RECORDS_MAX`] records and [`QUEUE_BYTES_MAX`] bytes wait
//!   for the writer; whoever comes then waits too (back-pressure), at most [`PUT_TIMEOUT_S`]
//!   seconds, then [`LedgerError::Stalled`]. A commit takes at most [`COMMIT_RECORDS_MAX`] records.
//! - **Full disk.** [`LedgerError::DiskFull`], and nothing saved before is lost. The next put
//!   tries again, so freeing space is enough. [`Ledger::is_full`] tells without trying.
//!
//! A put whose future is dropped may still be written; every put is an upsert, so doing it again
//! is harmless.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use record::{Attempt, Call, CallId, Rollout, RolloutId};
use serde_json::Value;

pub mod error;
mod lock;
mod reader;
mod row;
mod schema;
mod writer;

pub use error::LedgerError;

/// Name of the database inside a run directory.
pub const FILE_NAME: &str = "ledger.sqlite";
/// Records that may wait for the writer.
pub const QUEUE_RECORDS_MAX: usize = 1024;
/// Bytes of encoded records that may wait for the writer. A larger record waits alone.
pub const QUEUE_BYTES_MAX: usize = 256 << 20;
/// Records in one transaction.
pub const COMMIT_RECORDS_MAX: usize = 256;
/// Longest wait of one put, in seconds.
pub const PUT_TIMEOUT_S: u64 = 60;

/// Limits of a ledger that a caller may set.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The database file may not grow beyond this many bytes; then [`LedgerError::DiskFull`].
    /// `None`: until the disk is full.
    pub file_bytes_max: Option<u64>,
}

/// How much a ledger holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rollouts, running ones included.
    pub rollouts: u64,
    /// Rollouts without a disposition.
    pub running: u64,
    /// Ended rollouts by [`record::Disposition::name`].
    pub dispositions: BTreeMap<String, u64>,
    /// Calls.
    pub calls: u64,
    /// Notes.
    pub notes: u64,
}

/// A handle on the ledger of one run. Cheap to clone; the writer stops when the last clone goes
/// or [`Ledger::close`] is called.
#[derive(Clone, Debug)]
pub struct Ledger {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: PathBuf,
    readers: reader::Readers,
    writer: Option<writer::Handle>,
    full: Arc<AtomicBool>,
}

impl Ledger {
    /// Makes the ledger of a new run in `dir`, which is made when missing.
    ///
    /// # Errors
    /// [`LedgerError::Exists`] when the directory already has one; [`LedgerError::Locked`];
    /// [`LedgerError::DiskFull`]; [`LedgerError::Io`].
    pub fn create(dir: &Path) -> Result<Self, LedgerError> {
        Self::create_with(dir, Options::default())
    }

    /// [`Ledger::create`] with limits.
    ///
    /// # Errors
    /// As [`Ledger::create`].
    pub fn create_with(dir: &Path, options: Options) -> Result<Self, LedgerError> {
        std::fs::create_dir_all(dir).map_err(|source| LedgerError::io(dir, "make", source))?;
        let file = dir.join(FILE_NAME);
        if file.exists() {
            return Err(LedgerError::Exists { path: file });
        }
        let lock = lock::take(dir)?;
        if file.exists() {
            return Err(LedgerError::Exists { path: file });
        }
        let connection = schema::create(&file)?;
        Self::start(file, connection, lock, options)
    }

    /// Opens the ledger of an earlier run for writing.
    ///
    /// # Errors
    /// [`LedgerError::Missing`], [`LedgerError::Locked`], [`LedgerError::Version`],
    /// [`LedgerError::Damaged`].
    pub fn open(dir: &Path) -> Result<Self, LedgerError> {
        Self::open_with(dir, Options::default())
    }

    /// [`Ledger::open`] with limits.
    ///
    /// # Errors
    /// As [`Ledger::open`].
    pub fn open_with(dir: &Path, options: Options) -> Result<Self, LedgerError> {
        let file = dir.join(FILE_NAME);
        if !file.exists() {
            return Err(LedgerError::Missing { path: file });
        }
        let lock = lock::take(dir)?;
        let connection = schema::open(&file)?;
        Self::start(file, connection, lock, options)
    }

    /// Opens a ledger for reading, also while another process writes it. Every put is
    /// [`LedgerError::ReadOnly`].
    ///
    /// # Errors
    /// [`LedgerError::Missing`], [`LedgerError::Version`], [`LedgerError::Damaged`].
    pub fn open_read_only(dir: &Path) -> Result<Self, LedgerError> {
        let file = dir.join(FILE_NAME);
        if !file.exists() {
            return Err(LedgerError::Missing { path: file });
        }
        let readers = reader::Readers::new(file.clone());
        readers.check()?;
        Ok(Self {
            inner: Arc::new(Inner {
                file,
                readers,
                writer: None,
                full: Arc::default(),
            }),
        })
    }

    fn start(
        file: PathBuf,
        connection: rusqlite::Connection,
        lock: std::fs::File,
        options: Options,
    ) -> Result<Self, LedgerError> {
        let full = Arc::<AtomicBool>::default();
        schema::limit(&file, &connection, options.file_bytes_max)?;
        let writer = writer::Handle::start(file.clone(), connection, lock, Arc::clone(&full))?;
        Ok(Self {
            inner: Arc::new(Inner {
                readers: reader::Readers::new(file.clone()),
                file,
                writer: Some(writer),
                full,
            }),
        })
    }

    /// The database file.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.inner.file
    }

    /// Whether the last commit failed for want of space. Cleared by the next one that succeeds.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.inner.full.load(Ordering::Relaxed)
    }

    async fn put(&self, change: writer::Change) -> Result<(), LedgerError> {
        let Some(writer) = &self.inner.writer else {
            return Err(LedgerError::ReadOnly {
                path: self.inner.file.clone(),
            });
        };
        writer.put(change).await
    }

    /// Saves a call, replacing the one with the same rollout and index. Returns once it survives
    /// `kill -9` of this process (I6).
    ///
    /// # Errors
    /// [`LedgerError::DiskFull`], [`LedgerError::Closed`], [`LedgerError::ReadOnly`],
    /// [`LedgerError::Stalled`], [`LedgerError::Encode`].
    pub async fn put_call(&self, call: Call) -> Result<(), LedgerError> {
        // Serialising and compressing a request of 100 kB takes about a millisecond: not on an
        // async worker.
        let row = tokio::task::spawn_blocking(move || row::encode_call(&call))
            .await
            .map_err(|_| LedgerError::closed(&self.inner.file))??;
        self.put(writer::Change::Call(row)).await
    }

    /// Replaces only the attempts of a call that is already saved: cheap, for the outcome of a
    /// delivery. Does nothing when there is no such call.
    ///
    /// # Errors
    /// As [`Ledger::put_call`].
    pub async fn put_attempts(&self, id: &CallId, attempts: &[Attempt]) -> Result<(), LedgerError> {
        let row = row::encode_attempts(id, attempts)?;
        self.put(writer::Change::Attempts(row)).await
    }

    /// Saves a rollout, replacing the one with the same id.
    ///
    /// # Errors
    /// As [`Ledger::put_call`].
    pub async fn put_rollout(&self, rollout: Rollout) -> Result<(), LedgerError> {
        let row = row::encode_rollout(&rollout)?;
        self.put(writer::Change::Rollout(row)).await
    }

    /// Saves a small piece of run state under a key, replacing what was there.
    ///
    /// # Errors
    /// As [`Ledger::put_call`].
    pub async fn put_note(&self, key: &str, value: Value) -> Result<(), LedgerError> {
        let row = row::encode_note(key, &value)?;
        self.put(writer::Change::Note(row)).await
    }

    /// Removes a rollout with its labels and calls.
    ///
    /// # Errors
    /// As [`Ledger::put_call`].
    pub async fn forget(&self, id: &RolloutId) -> Result<(), LedgerError> {
        self.put(writer::Change::Forget(id.clone())).await
    }

    /// Removes the calls of a rollout: before an unfinished rollout is run again under the same id.
    ///
    /// # Errors
    /// As [`Ledger::put_call`].
    pub async fn forget_calls(&self, id: &RolloutId) -> Result<(), LedgerError> {
        self.put(writer::Change::ForgetCalls(id.clone())).await
    }

    /// The note under a key.
    ///
    /// # Errors
    /// [`LedgerError::Damaged`], [`LedgerError::Sqlite`].
    pub fn note(&self, key: &str) -> Result<Option<Value>, LedgerError> {
        self.inner.readers.note(key)
    }

    /// One rollout.
    ///
    /// # Errors
    /// [`LedgerError::Damaged`], [`LedgerError::Sqlite`].
    pub fn rollout(&self, id: &RolloutId) -> Result<Option<Rollout>, LedgerError> {
        self.inner.readers.rollout(id)
    }

    /// The rollouts that carry all the given labels, ordered by start, then id.
    ///
    /// # Errors
    /// [`LedgerError::Damaged`] at the first damaged one, [`LedgerError::Sqlite`].
    pub fn rollouts(&self, labels: &[(&str, &str)]) -> Result<Vec<Rollout>, LedgerError> {
        self.inner.readers.rollouts(labels)
    }

    /// The calls of a rollout, by index.
    ///
    /// # Errors
    /// [`LedgerError::Damaged`] at the first damaged one ([`Ledger::call`] reads the others),
    /// [`LedgerError::Sqlite`].
    pub fn calls(&self, id: &RolloutId) -> Result<Vec<Call>, LedgerError> {
        self.inner.readers.calls(id)
    }

    /// One call.
    ///
    /// # Errors
    /// [`LedgerError::Damaged`], [`LedgerError::Sqlite`].
    pub fn call(&self, id: &CallId) -> Result<Option<Call>, LedgerError> {
        self.inner.readers.call(id)
    }

    /// How much there is.
    ///
    /// # Errors
    /// [`LedgerError::Sqlite`].
    pub fn counts(&self) -> Result<Counts, LedgerError> {
        self.inner.readers.counts()
    }

    /// Writes what is queued, stops the writer and releases the lock. Puts through other clones
    /// are [`LedgerError::Closed`] from then on; reads still work.
    ///
    /// # Errors
    /// [`LedgerError::Closed`] when the writer had stopped by itself.
    pub async fn close(self) -> Result<(), LedgerError> {
        match &self.inner.writer {
            Some(writer) => writer.close().await,
            None => Ok(()),
        }
    }
}
