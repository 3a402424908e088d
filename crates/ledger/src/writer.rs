//! The one thread that writes. It takes whatever waits (up to a limit) into one transaction, so
//! that a hundred concurrent calls cost one commit and not a hundred.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, params};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::checkpoint::Checkpoints;
use crate::row::{AttemptsRow, CallRow, NoteRow, RolloutRow, SummaryRow};
use crate::{COMMIT_RECORDS_MAX, LedgerError, PUT_TIMEOUT_S, QUEUE_BYTES_MAX, QUEUE_RECORDS_MAX};

/// One change to the database.
#[derive(Debug)]
pub(crate) enum Change {
    Call(CallRow),
    Attempts(AttemptsRow),
    Rollout(RolloutRow),
    Note(NoteRow),
    Summary(SummaryRow),
    Forget(record::RolloutId),
    ForgetCalls(record::RolloutId),
    /// All calls of a rollout anew.
    Rewrite(record::RolloutId, Vec<CallRow>),
    /// The file without its free pages. Not within a transaction, so always alone.
    Vacuum,
}

impl Change {
    fn bytes(&self) -> usize {
        match self {
            Self::Call(row) => row.body.len() + row.attempts.attempts.len(),
            Self::Attempts(row) => row.attempts.len(),
            Self::Rollout(row) => row.body.len(),
            Self::Note(row) => row.body.len(),
            Self::Summary(row) => row.body.len(),
            Self::Rewrite(_, rows) => rows
                .iter()
                .map(|row| row.body.len() + row.attempts.attempts.len())
                .sum(),
            Self::Forget(_) | Self::ForgetCalls(_) | Self::Vacuum => 0,
        }
    }
}

/// Why a change was not written.
#[derive(Debug)]
pub(crate) enum PutError {
    Ledger(LedgerError),
    /// The body that the call is stored against is gone: store it whole.
    NoParent,
}

impl From<LedgerError> for PutError {
    fn from(error: LedgerError) -> Self {
        Self::Ledger(error)
    }
}

/// The same while the file's name is not at hand.
enum Refused {
    Sqlite(rusqlite::Error),
    NoParent,
    /// It cannot be together with others.
    NotAlone,
}

impl From<rusqlite::Error> for Refused {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

#[derive(Debug)]
struct Put {
    change: Change,
    // Held until the change is written: bounds the bytes in the queue.
    _room: OwnedSemaphorePermit,
    done: oneshot::Sender<Result<(), PutError>>,
}

/// The end of the queue that callers hold.
#[derive(Debug)]
pub(crate) struct Handle {
    file: PathBuf,
    queue: Mutex<Option<mpsc::Sender<Put>>>,
    // In units of 1 KiB, because a semaphore counts in u32.
    room: Arc<Semaphore>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Longest wait for the file to be written anew, in seconds.
const VACUUM_TIMEOUT_S: u64 = 3600;

const ROOM_KIB: u32 = (QUEUE_BYTES_MAX >> 10) as u32;

impl Handle {
    pub(crate) fn start(
        file: PathBuf,
        connection: Connection,
        lock: File,
        full: Arc<AtomicBool>,
    ) -> Result<Self, LedgerError> {
        let (queue, waiting) = mpsc::channel(QUEUE_RECORDS_MAX);
        let path = file.clone();
        let checkpoints = Checkpoints::start(&file)?;
        let thread = std::thread::Builder::new()
            .name("ledger".to_owned())
            .spawn(move || {
                run(&path, connection, checkpoints, waiting, &full);
                // The lock goes last: whoever gets it next finds everything written.
                drop(lock);
            })
            .map_err(|source| LedgerError::io(&file, "start the writer of", source))?;
        Ok(Self {
            file,
            queue: Mutex::new(Some(queue)),
            room: Arc::new(Semaphore::new(ROOM_KIB as usize)),
            thread: Mutex::new(Some(thread)),
        })
    }

    pub(crate) async fn put(&self, change: Change) -> Result<(), PutError> {
        let timeout_s = match change {
            Change::Vacuum => VACUUM_TIMEOUT_S,
            _ => PUT_TIMEOUT_S,
        };
        let closed = || LedgerError::closed(&self.file);
        let queue = self
            .queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
            .ok_or_else(closed)?;
        let kib = u32::try_from(change.bytes() >> 10)
            .unwrap_or(u32::MAX)
            .clamp(1, ROOM_KIB);
        let put = async {
            let room = Arc::clone(&self.room)
                .acquire_many_owned(kib)
                .await
                .map_err(|_| closed())?;
            let (done, answer) = oneshot::channel();
            let put = Put {
                change,
                _room: room,
                done,
            };
            queue.send(put).await.map_err(|_| closed())?;
            answer.await.map_err(|_| closed())?
        };
        tokio::time::timeout(Duration::from_secs(timeout_s), put)
            .await
            .unwrap_or_else(|_| {
                Err(PutError::Ledger(LedgerError::Stalled {
                    path: self.file.clone(),
                    seconds: timeout_s,
                }))
            })
    }

    fn stop(&self) -> Option<JoinHandle<()>> {
        // The thread ends when the last sender is gone and the queue is empty.
        drop(
            self.queue
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
        self.thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    pub(crate) async fn close(&self) -> Result<(), LedgerError> {
        let Some(thread) = self.stop() else {
            return Ok(());
        };
        match tokio::task::spawn_blocking(move || thread.join()).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(LedgerError::closed(&self.file)),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Whoever opens the run next must find the lock free and everything written. At most the
        // queue's limit is left to write.
        if let Some(thread) = self.stop()
            && thread.join().is_err()
        {
            tracing::error!(file = %self.file.display(), "the ledger's writer had stopped by a defect");
        }
    }
}

fn run(
    file: &Path,
    mut connection: Connection,
    mut checkpoints: Checkpoints,
    mut waiting: mpsc::Receiver<Put>,
    full: &AtomicBool,
) {
    Checkpoints::watch(&connection);
    let mut batch = Vec::with_capacity(COMMIT_RECORDS_MAX);
    while waiting.blocking_recv_many(&mut batch, COMMIT_RECORDS_MAX) > 0 {
        let all = commit(&mut connection, batch.iter().map(|put| &put.change));
        if all.is_ok() {
            full.store(false, Ordering::Relaxed);
            for put in batch.drain(..) {
                // The caller may have gone; what it wanted is done.
                let _ = put.done.send(Ok(()));
            }
            checkpoints.committed(&connection);
            continue;
        }
        // Somebody's record does not go in. The others must not suffer: one by one.
        for put in batch.drain(..) {
            let result = match put.change {
                Change::Vacuum => vacuum(&connection),
                ref change => commit(&mut connection, std::iter::once(change)),
            };
            let result = result.map_err(|refused| match refused {
                Refused::Sqlite(source) => PutError::Ledger(LedgerError::sqlite(file, source)),
                Refused::NoParent => PutError::NoParent,
                Refused::NotAlone => PutError::Ledger(LedgerError::closed(file)),
            });
            match &result {
                Ok(()) => full.store(false, Ordering::Relaxed),
                Err(PutError::Ledger(LedgerError::DiskFull { .. })) => {
                    full.store(true, Ordering::Relaxed);
                }
                Err(_) => {}
            }
            let _ = put.done.send(result);
        }
        checkpoints.committed(&connection);
    }
    checkpoints.end(&connection);
}

fn commit<'a>(
    connection: &mut Connection,
    changes: impl Iterator<Item = &'a Change>,
) -> Result<(), Refused> {
    let transaction = connection.transaction()?;
    for change in changes {
        apply(&transaction, change)?;
    }
    Ok(transaction.commit()?)
}

fn apply(connection: &Connection, change: &Change) -> Result<(), Refused> {
    match change {
        Change::Call(row) => {
            put_call(connection, row)?;
            drop_summary(connection, &row.attempts.id.rollout)?;
        }
        Change::Attempts(row) => {
            connection
                .prepare_cached(
                    "UPDATE calls SET attempts = ?3, attempts_sum = ?4
                     WHERE rollout = ?1 AND call = ?2",
                )?
                .execute(params![
                    row.id.rollout.as_str(),
                    row.id.index,
                    row.attempts,
                    row.sum,
                ])?;
            drop_summary(connection, &row.id.rollout)?;
        }
        Change::Rollout(row) => {
            connection
                .prepare_cached(
                    "INSERT INTO rollouts (id, started_ms, disposition, body, sum)
                     VALUES (?1, ?2, ?3, ?4, ?5)
                     ON CONFLICT (id) DO UPDATE SET
                     started_ms = ?2, disposition = ?3, body = ?4, sum = ?5",
                )?
                .execute(params![
                    row.id,
                    row.started_ms,
                    row.disposition,
                    row.body,
                    row.sum
                ])?;
            connection
                .prepare_cached("DELETE FROM labels WHERE rollout = ?1")?
                .execute(params![row.id])?;
            let mut label = connection
                .prepare_cached("INSERT INTO labels (name, value, rollout) VALUES (?1, ?2, ?3)")?;
            for (name, value) in &row.labels {
                label.execute(params![name, value, row.id])?;
            }
        }
        Change::Note(row) => {
            connection
                .prepare_cached(
                    "INSERT INTO notes (key, body, sum) VALUES (?1, ?2, ?3)
                     ON CONFLICT (key) DO UPDATE SET body = ?2, sum = ?3",
                )?
                .execute(params![row.key, row.body, row.sum])?;
        }
        Change::Summary(row) => {
            connection
                .prepare_cached(
                    "INSERT INTO summaries (rollout, body, sum) VALUES (?1, ?2, ?3)
                     ON CONFLICT (rollout) DO UPDATE SET body = ?2, sum = ?3",
                )?
                .execute(params![row.rollout, row.body, row.sum])?;
        }
        Change::Vacuum => return Err(Refused::NotAlone),
        Change::ForgetCalls(id) => {
            forget_calls(connection, id)?;
            drop_summary(connection, id)?;
        }
        // The summary stays: it says what was captured.
        Change::Rewrite(id, rows) => {
            forget_calls(connection, id)?;
            for row in rows {
                put_call(connection, row)?;
            }
        }
        Change::Forget(id) => {
            forget_calls(connection, id)?;
            drop_summary(connection, id)?;
            for statement in [
                "DELETE FROM labels WHERE rollout = ?1",
                "DELETE FROM rollouts WHERE id = ?1",
            ] {
                connection
                    .prepare_cached(statement)?
                    .execute(params![id.as_str()])?;
            }
        }
    }
    Ok(())
}

/// What was dropped is in no page of the file or the log afterwards, unless a reader holds an old
/// state: then the log is emptied when the ledger is closed.
fn vacuum(connection: &Connection) -> Result<(), Refused> {
    connection.execute_batch("VACUUM")?;
    Ok(connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?)
}

fn drop_summary(connection: &Connection, id: &record::RolloutId) -> rusqlite::Result<()> {
    connection
        .prepare_cached("DELETE FROM summaries WHERE rollout = ?1")?
        .execute(params![id.as_str()])?;
    Ok(())
}

fn put_call(connection: &Connection, row: &CallRow) -> Result<(), Refused> {
    let (rollout, call) = (row.attempts.id.rollout.as_str(), row.attempts.id.index);
    if let Some(parent) = row.parent {
        // The call that it was made against may have been forgotten meanwhile.
        let there = connection
            .prepare_cached("SELECT 1 FROM bodies WHERE number = ?1 AND rollout = ?2")?
            .exists(params![parent, rollout])?;
        if !there {
            return Err(Refused::NoParent);
        }
    }
    let before = connection
        .prepare_cached("SELECT body FROM calls WHERE rollout = ?1 AND call = ?2")?
        .query_row(params![rollout, call], |row| row.get::<_, i64>(0))
        .optional()?;
    connection
        .prepare_cached(
            "INSERT INTO bodies (number, rollout, parent, body, sum) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?
        .execute(params![row.number, rollout, row.parent, row.body, row.sum])?;
    connection
        .prepare_cached(
            "INSERT INTO calls (rollout, call, body, attempts, attempts_sum)
             VALUES (?1, ?2, ?3, ?4, ?5)
             ON CONFLICT (rollout, call) DO UPDATE SET
             body = ?3, attempts = ?4, attempts_sum = ?5",
        )?
        .execute(params![
            rollout,
            call,
            row.number,
            row.attempts.attempts,
            row.attempts.sum,
        ])?;
    if let Some(before) = before {
        // Others may be stored against it; then it stays until the rollout is forgotten.
        connection
            .prepare_cached(
                "DELETE FROM bodies WHERE number = ?1
                 AND NOT EXISTS (SELECT 1 FROM bodies WHERE parent = ?1)",
            )?
            .execute(params![before])?;
    }
    Ok(())
}

fn forget_calls(connection: &Connection, id: &record::RolloutId) -> rusqlite::Result<()> {
    for statement in [
        "DELETE FROM calls WHERE rollout = ?1",
        "DELETE FROM bodies WHERE rollout = ?1",
    ] {
        connection
            .prepare_cached(statement)?
            .execute(params![id.as_str()])?;
    }
    Ok(())
}
