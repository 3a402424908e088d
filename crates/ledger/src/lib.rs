//! The durable store of rollouts, calls, verdicts and small notes of one run.
//!
//! One directory per run, one SQLite file `ledger.sqlite` in it (write-ahead log, so readers
//! never wait for the writer), and `ledger.lock`, which names the one process that may write.
//!
//! | module | owns |
//! |---|---|
//! | [`error`] | what can go wrong, in words that say what to do |
//! | `schema` | tables, pragmas, the version of the format |
//! | `row` | records as rows, checksummed |
//! | `body` | a call as bytes: what is new against its parent, compressed |
//! | `recent` | the calls written last, which new ones are stored against |
//! | `migrate` | older formats |
//! | `redact` | what is removed before anything is written |
//! | `retain` | what stays of old rollouts |
//! | `writer` | the one thread that writes, and its group commit |
//! | `reader` | read-only connections and the queries |
//!
//! Invariants
//! - **I6 durable before visible.** A `put_*` returns only after its transaction is committed.
//!   `synchronous=NORMAL` in WAL mode means: the bytes have left this process, so `kill -9`
//!   cannot take them back. A power cut may lose the last moments, never tear the file.
//! - **One writer.** A second [`Ledger::open`] of the same directory, from any process, is
//!   [`LedgerError::Locked`] and says who holds it. Readers ([`Ledger::open_read_only`]) are free.
//! - **Each text once.** A call is stored as what is new in it against an earlier call of its
//!   rollout, so a rollout takes space in proportion to its unique tokens. A call is read from at
//!   most 64 others; then one is stored whole.
//! - **Damage stays local.** Every record carries 16 bytes of SHA-256. A record that does not
//!   match is [`LedgerError::Damaged`], naming file and record; so is a call that is stored against
//!   it, and nothing else. [`Ledger::verify`] lists all that is lost, [`Ledger::calls_intact`]
//!   reads the rest.
//! - **Older formats** are brought up to date when they are opened, in one transaction.
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
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use record::{Attempt, Call, CallId, Rollout, RolloutId};
use serde_json::Value;

mod body;
pub mod error;
mod lock;
mod migrate;
mod reader;
mod recent;
mod redact;
mod retain;
mod row;
mod schema;
mod writer;

pub use error::LedgerError;
pub use redact::{REDACTED, Redaction};
pub use retain::Keep;

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
    /// What is removed from calls and rollouts before they are written.
    pub redaction: Option<Redaction>,
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
    recents: recent::Recents,
    redaction: Option<Redaction>,
    /// Number of the last body.
    last_body: AtomicI64,
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
        if let Err(error) = readers.check() {
            // An older format that nobody else has open is brought up to date, if that may be.
            let LedgerError::Version {
                found, expected, ..
            } = error
            else {
                return Err(error);
            };
            if found < 1 || found > expected {
                return Err(error);
            }
            let upgraded = lock::take(dir).and_then(|_lock| schema::open(&file));
            if upgraded.is_err() {
                return Err(error);
            }
            readers.check()?;
        }
        Ok(Self {
            inner: Arc::new(Inner {
                file,
                readers,
                writer: None,
                full: Arc::default(),
                recents: recent::Recents::default(),
                redaction: None,
                last_body: AtomicI64::new(0),
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
        let last_body = schema::last_body(&file, &connection)?;
        let writer = writer::Handle::start(file.clone(), connection, lock, Arc::clone(&full))?;
        Ok(Self {
            inner: Arc::new(Inner {
                readers: reader::Readers::new(file.clone()),
                file,
                writer: Some(writer),
                full,
                recents: recent::Recents::default(),
                redaction: options.redaction,
                last_body: AtomicI64::new(last_body),
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
        match self.try_put(change).await {
            Ok(()) => Ok(()),
            Err(writer::PutError::Ledger(error)) => Err(error),
            // Only calls have parents, and they are put elsewhere.
            Err(writer::PutError::NoParent) => Err(LedgerError::closed(&self.inner.file)),
        }
    }

    async fn try_put(&self, change: writer::Change) -> Result<(), writer::PutError> {
        let Some(writer) = &self.inner.writer else {
            let path = self.inner.file.clone();
            return Err(LedgerError::ReadOnly { path }.into());
        };
        writer.put(change).await
    }

    /// Saves a call, replacing the one with the same rollout and index. Returns once it survives
    /// `kill -9` of this process (I6). What an earlier call of the rollout holds already is not
    /// stored again.
    ///
    /// # Errors
    /// [`LedgerError::DiskFull`], [`LedgerError::Closed`], [`LedgerError::ReadOnly`],
    /// [`LedgerError::Stalled`], [`LedgerError::Encode`].
    pub async fn put_call(&self, mut call: Call) -> Result<(), LedgerError> {
        if let Some(redaction) = &self.inner.redaction
            && redaction.call(&mut call)
        {
            tracing::debug!(call = %call.id, "something was redacted");
        }
        let call = Arc::new(call);
        for alone in [false, true] {
            // Serialising and comparing a request of 100 kB takes a good part of a millisecond:
            // not on an async worker.
            let (inner, shared) = (Arc::clone(&self.inner), Arc::clone(&call));
            let (row, recent) = tokio::task::spawn_blocking(move || inner.encode(&shared, alone))
                .await
                .map_err(|_| LedgerError::closed(&self.inner.file))??;
            match self.try_put(writer::Change::Call(row)).await {
                Ok(()) => {
                    self.inner.recents.add(&call.id.rollout, recent);
                    return Ok(());
                }
                Err(writer::PutError::Ledger(error)) => return Err(error),
                // Its parent was forgotten meanwhile: once more, whole.
                Err(writer::PutError::NoParent) => {}
            }
        }
        Err(LedgerError::closed(&self.inner.file))
    }

    /// Replaces only the attempts of a call that is already saved: cheap, for the outcome of a
    /// delivery. Does nothing when there is no such call.
    ///
    /// # Errors
    /// As [`Ledger::put_call`].
    pub async fn put_attempts(&self, id: &CallId, attempts: &[Attempt]) -> Result<(), LedgerError> {
        let mut attempts = attempts.to_vec();
        if let Some(redaction) = &self.inner.redaction {
            redaction.attempts(&mut attempts);
        }
        let row = row::encode_attempts(id, &attempts)?;
        self.put(writer::Change::Attempts(row)).await
    }

    /// Saves a rollout, replacing the one with the same id.
    ///
    /// # Errors
    /// As [`Ledger::put_call`].
    pub async fn put_rollout(&self, mut rollout: Rollout) -> Result<(), LedgerError> {
        if let Some(redaction) = &self.inner.redaction {
            redaction.rollout(&mut rollout);
        }
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
        self.inner.recents.forget(id);
        self.put(writer::Change::Forget(id.clone())).await
    }

    /// Removes the calls of a rollout: before an unfinished rollout is run again under the same id.
    ///
    /// # Errors
    /// As [`Ledger::put_call`].
    pub async fn forget_calls(&self, id: &RolloutId) -> Result<(), LedgerError> {
        self.inner.recents.forget(id);
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

    /// The calls of a rollout that can be read, by index, and what is wrong with the others.
    ///
    /// # Errors
    /// [`LedgerError::Sqlite`].
    pub fn calls_intact(
        &self,
        id: &RolloutId,
    ) -> Result<(Vec<Call>, Vec<LedgerError>), LedgerError> {
        self.inner.readers.calls_intact(id)
    }

    /// Reads everything and says what is damaged, and so lost. Takes as long as reading the file.
    ///
    /// # Errors
    /// [`LedgerError::Sqlite`], and [`LedgerError::Damaged`] when not even the tables can be
    /// listed.
    pub fn verify(&self) -> Result<Vec<LedgerError>, LedgerError> {
        let readers = &self.inner.readers;
        let mut damaged: Vec<LedgerError> = readers
            .pages()?
            .into_iter()
            .map(|found| readers.damaged("the file itself".to_owned(), found))
            .collect();
        for name in readers.ids()? {
            let Ok(id) = RolloutId::new(name.clone()) else {
                damaged.push(readers.damaged(format!("rollout {name}"), "its id is not valid"));
                continue;
            };
            damaged.extend(readers.rollout(&id).err());
            damaged.extend(readers.calls_intact(&id)?.1);
        }
        for key in readers.note_keys()? {
            damaged.extend(readers.note(&key).err());
        }
        Ok(damaged)
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

impl Inner {
    /// A call as a row, against a call of the same rollout that is in the database already; `alone`
    /// stores it whole.
    fn encode(
        &self,
        call: &Call,
        alone: bool,
    ) -> Result<(row::CallRow, recent::Recent), LedgerError> {
        let parts = row::parts_of(call)?;
        let id = &call.id;
        let number = self.last_body.fetch_add(1, Ordering::Relaxed) + 1;
        let encode = |parent: Option<&recent::Recent>| {
            let against = parent.map(|parent| (parent.number, &parent.parts));
            row::encode_call(id, number, &parts, against, &call.attempts)
        };
        let mut parent = None;
        if !alone {
            parent = self
                .recents
                .parent(&id.rollout, call.continuation.parent, &parts);
        }
        let mut row = encode(parent.as_deref())?;
        // A client that changes something early in every request shares no beginning with any
        // call, yet most of what follows.
        if !alone
            && parent.is_none()
            && row.body.len() > UNLIKE_BYTES_MIN
            && let Some(latest) = self.recents.latest(&id.rollout)
        {
            let against = encode(Some(&latest))?;
            if against.body.len() < row.body.len() / 2 {
                (row, parent) = (against, Some(latest));
            }
        }
        let recent = recent::Recent {
            number,
            call: id.index,
            chain: parent.map_or(0, |parent| parent.chain + 1),
            parts,
        };
        Ok((row, recent))
    }
}

/// A body larger than this that shares no beginning with another is tried against the latest.
const UNLIKE_BYTES_MIN: usize = 4 << 10;
