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
//! | `source`, `piece` | a call against an earlier one: what is new, without writing out what is not |
//! | `encode` | which earlier call, and the row that follows |
//! | `body` | a call as bytes: what is new against its parent, compressed |
//! | `recent` | the calls written last, which new ones are stored against |
//! | `migrate` | older formats |
//! | `redact` | what is removed before anything is written |
//! | `retain` | what stays of old rollouts |
//! | `writer` | the one thread that writes, and its group commit |
//! | `checkpoint` | folding the log into the database, beside the writer |
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

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use record::{Attempt, Call, CallId, Rollout, RolloutId};
use serde_json::Value;

mod body;
mod checkpoint;
mod encode;
pub mod error;
mod lock;
mod migrate;
mod piece;
mod reader;
mod recent;
mod redact;
mod retain;
mod row;
mod schema;
mod source;
mod writer;

pub use error::LedgerError;
pub use redact::{REDACTED, Redaction, RedactionSettings, TENANT, TenantSettings};
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
    /// Tenants of the rollouts that run, where there are rules by tenant.
    tenants: Mutex<HashMap<RolloutId, Option<String>>>,
    encoders: tokio::sync::Semaphore,
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
                tenants: Mutex::default(),
                encoders: encoders(),
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
                tenants: Mutex::default(),
                encoders: encoders(),
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
    pub async fn put_call(&self, call: Call) -> Result<(), LedgerError> {
        let (id, inner) = (call.id.clone(), Arc::clone(&self.inner));
        let first = self.encoded(move || inner.encode(call)).await?;
        let row = writer::Change::Call(first.row);
        let recent = match self.try_put(row).await {
            Ok(()) => first.recent,
            Err(writer::PutError::Ledger(error)) => return Err(error),
            // Its parent was forgotten meanwhile: once more, whole.
            Err(writer::PutError::NoParent) => {
                let (inner, again) = (Arc::clone(&self.inner), id.clone());
                let (attempts, source) = (first.attempts, first.recent.source);
                let whole = move || inner.encode_against(&[], None, &again, attempts, source);
                let second = self.encoded(whole).await?;
                self.put(writer::Change::Call(second.row)).await?;
                second.recent
            }
        };
        self.inner.recents.add(&id.rollout, recent);
        Ok(())
    }

    /// Encodes off the async workers: comparing a history of some hundred kB takes a part of a
    /// millisecond. As many at once as there are processors, in order of arrival, so that nobody's
    /// call waits for all others.
    async fn encoded(
        &self,
        work: impl FnOnce() -> Result<Encoded, LedgerError> + Send + 'static,
    ) -> Result<Encoded, LedgerError> {
        let closed = || LedgerError::closed(&self.inner.file);
        let _place = self.inner.encoders.acquire().await.map_err(|_| closed())?;
        tokio::task::spawn_blocking(work)
            .await
            .map_err(|_| closed())?
    }

    /// Replaces only the attempts of a call that is already saved: cheap, for the outcome of a
    /// delivery. Does nothing when there is no such call.
    ///
    /// # Errors
    /// As [`Ledger::put_call`].
    pub async fn put_attempts(&self, id: &CallId, attempts: &[Attempt]) -> Result<(), LedgerError> {
        let mut attempts = attempts.to_vec();
        if let Some(redaction) = &self.inner.redaction {
            let tenant = self.inner.tenant(&id.rollout)?;
            redaction.attempts(&mut attempts, tenant.as_deref());
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
            self.inner.note_tenant(&rollout);
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

    /// Saves what was derived from the calls of a rollout, so that nobody needs to read these for
    /// it again. It is dropped as soon as one of the calls changes.
    ///
    /// # Errors
    /// As [`Ledger::put_call`].
    pub async fn put_summary(
        &self,
        id: &RolloutId,
        summary: &impl serde::Serialize,
    ) -> Result<(), LedgerError> {
        let row = row::encode_summary(id, summary)?;
        self.put(writer::Change::Summary(row)).await
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

    /// The summaries that there are, by rollout. Those that are not a `T`, because an earlier
    /// version wrote them, and damaged ones are left out: they are made anew from the calls.
    ///
    /// # Errors
    /// [`LedgerError::Sqlite`].
    pub fn summaries<T: serde::de::DeserializeOwned>(
        &self,
    ) -> Result<HashMap<String, T>, LedgerError> {
        self.inner.readers.summaries()
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

fn encoders() -> tokio::sync::Semaphore {
    tokio::sync::Semaphore::new(std::thread::available_parallelism().map_or(2, usize::from))
}

/// A call that is ready to be written.
struct Encoded {
    row: row::CallRow,
    recent: recent::Recent,
    attempts: Vec<Attempt>,
}

impl Inner {
    /// Whose call it is. Known from the rollout's record, which is written before its calls.
    fn tenant(&self, id: &RolloutId) -> Result<Option<String>, LedgerError> {
        if !self
            .redaction
            .as_ref()
            .is_some_and(Redaction::knows_tenants)
        {
            return Ok(None);
        }
        let known = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tenant) = known.get(id) {
            return Ok(tenant.clone());
        }
        drop(known);
        let rollout = self.readers.rollout(id)?;
        Ok(rollout.and_then(|rollout| rollout.spec.labels.get(TENANT).cloned()))
    }

    /// Remembers the tenants of rollouts that run.
    fn note_tenant(&self, rollout: &Rollout) {
        let mut known = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if rollout.disposition.is_some() {
            known.remove(&rollout.spec.id);
        } else {
            let tenant = rollout.spec.labels.get(TENANT).cloned();
            known.insert(rollout.spec.id.clone(), tenant);
        }
    }

    fn encode(&self, mut call: Call) -> Result<Encoded, LedgerError> {
        if let Some(redaction) = &self.redaction {
            let tenant = self.tenant(&call.id.rollout)?;
            if redaction.call(&mut call, tenant.as_deref()) {
                tracing::debug!(call = %call.id, "something was redacted");
            }
        }
        let (id, said) = (call.id.clone(), call.continuation.parent);
        let attempts = std::mem::take(&mut call.attempts);
        let known = self.recents.of(&id.rollout);
        self.encode_against(&known, said, &id, attempts, source::Source::of(call)?)
    }

    fn encode_against(
        &self,
        known: &[Arc<recent::Recent>],
        said: Option<u32>,
        id: &CallId,
        attempts: Vec<Attempt>,
        source: source::Source,
    ) -> Result<Encoded, LedgerError> {
        let place = row::Place {
            id,
            number: self.last_body.fetch_add(1, Ordering::Relaxed) + 1,
            attempts: &attempts,
        };
        let (row, recent) = encode::encode(known, said, &place, source)?;
        Ok(Encoded {
            row,
            recent,
            attempts,
        })
    }
}
