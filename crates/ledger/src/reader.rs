//! Read-only connections, a few of them kept, and the queries.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use record::{Call, CallId, Rollout, RolloutId};
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::Value;

use crate::row::{self, attempts_name, call_name};
use crate::{Counts, LedgerError, schema};

/// Idle connections kept; more readers at once open their own and drop it afterwards.
const IDLE_MAX: usize = 4;

#[derive(Debug)]
pub(crate) struct Readers {
    file: PathBuf,
    idle: Mutex<Vec<Connection>>,
}

/// A call as it lies in its table.
struct StoredCall {
    index: u32,
    attempts: String,
    attempts_sum: Vec<u8>,
    body: Vec<u8>,
    sum: Vec<u8>,
}

const CALL_COLUMNS: &str = "call, attempts, attempts_sum, body, sum";

fn stored_call(row: &rusqlite::Row<'_>) -> rusqlite::Result<StoredCall> {
    Ok(StoredCall {
        index: row.get(0)?,
        attempts: row.get(1)?,
        attempts_sum: row.get(2)?,
        body: row.get(3)?,
        sum: row.get(4)?,
    })
}

impl Readers {
    pub(crate) fn new(file: PathBuf) -> Self {
        Self {
            file,
            idle: Mutex::default(),
        }
    }

    /// Opens the file once, so that a wrong one is refused at once.
    pub(crate) fn check(&self) -> Result<(), LedgerError> {
        self.with(|_| Ok(()))
    }

    fn with<T>(
        &self,
        query: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, LedgerError> {
        let idle = self
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let connection = match idle {
            Some(connection) => connection,
            None => schema::open_read_only(&self.file)?,
        };
        // A connection that met an error is dropped: the next one starts clean.
        let found = query(&connection).map_err(|source| LedgerError::sqlite(&self.file, source))?;
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MAX {
            idle.push(connection);
        }
        Ok(found)
    }

    fn damaged(&self, record: String, found: impl Into<String>) -> LedgerError {
        LedgerError::Damaged {
            path: self.file.clone(),
            record,
            found: found.into(),
        }
    }

    fn verify(&self, name: &str, bytes: &[u8], sum: &[u8]) -> Result<(), LedgerError> {
        if row::sum(name, bytes) == sum {
            Ok(())
        } else {
            Err(self.damaged(name.to_owned(), "its checksum does not match"))
        }
    }

    fn decode_call(&self, rollout: &RolloutId, stored: &StoredCall) -> Result<Call, LedgerError> {
        let id = CallId {
            rollout: rollout.clone(),
            index: stored.index,
        };
        self.verify(&call_name(&id), &stored.body, &stored.sum)?;
        self.verify(
            &attempts_name(&id),
            stored.attempts.as_bytes(),
            &stored.attempts_sum,
        )?;
        let name = call_name(&id);
        row::decode_call(id, &stored.body, &stored.attempts)
            .map_err(|found| self.damaged(name, found))
    }

    fn decode_rollout(&self, id: &str, body: &[u8], sum: &[u8]) -> Result<Rollout, LedgerError> {
        let name = format!("rollout {id}");
        self.verify(&name, body, sum)?;
        serde_json::from_slice(body).map_err(|found| self.damaged(name, found.to_string()))
    }

    pub(crate) fn note(&self, key: &str) -> Result<Option<Value>, LedgerError> {
        let found = self.with(|connection| {
            connection
                .prepare_cached("SELECT body, sum FROM notes WHERE key = ?1")?
                .query_row(params![key], |row| {
                    Ok((row.get::<_, Vec<u8>>(0)?, row.get::<_, Vec<u8>>(1)?))
                })
                .optional()
        })?;
        let Some((body, sum)) = found else {
            return Ok(None);
        };
        let name = format!("note {key}");
        self.verify(&name, &body, &sum)?;
        serde_json::from_slice(&body)
            .map(Some)
            .map_err(|found| self.damaged(name, found.to_string()))
    }

    pub(crate) fn rollout(&self, id: &RolloutId) -> Result<Option<Rollout>, LedgerError> {
        let found = self.with(|connection| {
            connection
                .prepare_cached("SELECT body, sum FROM rollouts WHERE id = ?1")?
                .query_row(params![id.as_str()], |row| {
                    Ok((row.get::<_, Vec<u8>>(0)?, row.get::<_, Vec<u8>>(1)?))
                })
                .optional()
        })?;
        found
            .map(|(body, sum)| self.decode_rollout(id.as_str(), &body, &sum))
            .transpose()
    }

    pub(crate) fn rollouts(&self, labels: &[(&str, &str)]) -> Result<Vec<Rollout>, LedgerError> {
        let mut sql = "SELECT id, body, sum FROM rollouts".to_owned();
        for number in 0..labels.len() {
            sql.push_str(if number == 0 { " WHERE" } else { " AND" });
            sql.push_str(&format!(
                " EXISTS (SELECT 1 FROM labels WHERE name = ?{} AND value = ?{} AND rollout = id)",
                2 * number + 1,
                2 * number + 2,
            ));
        }
        sql.push_str(" ORDER BY started_ms, id");
        let words = labels.iter().flat_map(|(name, value)| [*name, *value]);
        let found = self.with(|connection| {
            connection
                .prepare_cached(&sql)?
                .query_map(rusqlite::params_from_iter(words), |row| {
                    Ok((
                        row.get::<_, String>(0)?,
                        row.get::<_, Vec<u8>>(1)?,
                        row.get::<_, Vec<u8>>(2)?,
                    ))
                })?
                .collect::<rusqlite::Result<Vec<_>>>()
        })?;
        found
            .iter()
            .map(|(id, body, sum)| self.decode_rollout(id, body, sum))
            .collect()
    }

    pub(crate) fn calls(&self, id: &RolloutId) -> Result<Vec<Call>, LedgerError> {
        let found = self.with(|connection| {
            connection
                .prepare_cached(&format!(
                    "SELECT {CALL_COLUMNS} FROM calls WHERE rollout = ?1 ORDER BY call"
                ))?
                .query_map(params![id.as_str()], stored_call)?
                .collect::<rusqlite::Result<Vec<_>>>()
        })?;
        found
            .iter()
            .map(|stored| self.decode_call(id, stored))
            .collect()
    }

    pub(crate) fn call(&self, id: &CallId) -> Result<Option<Call>, LedgerError> {
        let found = self.with(|connection| {
            connection
                .prepare_cached(&format!(
                    "SELECT {CALL_COLUMNS} FROM calls WHERE rollout = ?1 AND call = ?2"
                ))?
                .query_row(params![id.rollout.as_str(), id.index], stored_call)
                .optional()
        })?;
        found
            .map(|stored| self.decode_call(&id.rollout, &stored))
            .transpose()
    }

    pub(crate) fn counts(&self) -> Result<Counts, LedgerError> {
        self.with(|connection| {
            let count = |table: &str| {
                connection.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| {
                    row.get::<_, u64>(0)
                })
            };
            let mut counts = Counts {
                calls: count("calls")?,
                notes: count("notes")?,
                ..Counts::default()
            };
            let mut statement = connection
                .prepare_cached("SELECT disposition, count(*) FROM rollouts GROUP BY 1")?;
            let mut rows = statement.query([])?;
            while let Some(row) = rows.next()? {
                let number = row.get::<_, u64>(1)?;
                counts.rollouts += number;
                match row.get::<_, Option<String>>(0)? {
                    Some(name) => {
                        counts.dispositions.insert(name, number);
                    }
                    None => counts.running = number,
                }
            }
            Ok(counts)
        })
    }
}
