//! Read-only connections, a few of them kept, and the queries.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use record::{Call, CallId, Rollout, RolloutId};
use rusqlite::{Connection, OptionalExtension, params};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::body::{self, Parts};
use crate::row::{self, attempts_name, body_name, call_name};
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
    body: i64,
    attempts: String,
    attempts_sum: Vec<u8>,
}

/// A body as it lies in its table.
struct StoredBody {
    number: i64,
    parent: Option<i64>,
    body: Vec<u8>,
    sum: Vec<u8>,
}

fn stored_call(row: &rusqlite::Row<'_>) -> rusqlite::Result<StoredCall> {
    Ok(StoredCall {
        index: row.get(0)?,
        body: row.get(1)?,
        attempts: row.get(2)?,
        attempts_sum: row.get(3)?,
    })
}

fn stored_body(row: &rusqlite::Row<'_>) -> rusqlite::Result<StoredBody> {
    Ok(StoredBody {
        number: row.get(0)?,
        parent: row.get(1)?,
        body: row.get(2)?,
        sum: row.get(3)?,
    })
}

const CALLS: &str = "SELECT call, body, attempts, attempts_sum FROM calls WHERE rollout = ?1";

/// Bodies in the order in which they were written: parents first.
const BODIES: &str =
    "SELECT number, parent, body, sum FROM bodies WHERE rollout = ?1 ORDER BY number";

/// A body and those that it is read from, parents first.
const CHAIN: &str = "WITH RECURSIVE chain (number, parent, body, sum) AS (
    SELECT number, parent, body, sum FROM bodies WHERE number = ?1
    UNION ALL
    SELECT bodies.number, bodies.parent, bodies.body, bodies.sum
    FROM bodies JOIN chain ON bodies.number = chain.parent
) SELECT number, parent, body, sum FROM chain ORDER BY number";

/// Bodies as they are read, each until the last one that needs it.
struct Read {
    parts: HashMap<i64, Result<Arc<Parts>, String>>,
    /// Who still needs each: children, and calls.
    wanted: HashMap<i64, usize>,
}

impl Read {
    fn take(&mut self, number: i64) -> Result<Arc<Parts>, String> {
        let found = self
            .parts
            .get(&number)
            .cloned()
            .unwrap_or_else(|| Err(format!("body {number} is missing")));
        if let Some(wanted) = self.wanted.get_mut(&number) {
            *wanted = wanted.saturating_sub(1);
            if *wanted == 0 {
                self.parts.remove(&number);
            }
        }
        found
    }
}

fn read_body(
    rollout: &RolloutId,
    stored: &StoredBody,
    read: &mut Read,
) -> Result<Arc<Parts>, String> {
    let name = body_name(rollout.as_str(), stored.number, stored.parent);
    if row::sum(&name, &stored.body) != stored.sum.as_slice() {
        return Err("its checksum does not match".to_owned());
    }
    let parent = match stored.parent {
        None => None,
        Some(number) => Some(read.take(number).map_err(|found| {
            format!("it is stored as a change of body {number}, and of that one: {found}")
        })?),
    };
    body::decode(&stored.body, parent.as_deref()).map(Arc::new)
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

    pub(crate) fn damaged(&self, record: String, found: impl Into<String>) -> LedgerError {
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

    /// Reads calls one by one, in the order of their bodies.
    fn decode_calls(
        &self,
        rollout: &RolloutId,
        stored: Vec<StoredCall>,
        bodies: Vec<StoredBody>,
        mut take: impl FnMut(u32, Result<Call, LedgerError>) -> Result<(), LedgerError>,
    ) -> Result<(), LedgerError> {
        let mut read = Read {
            parts: HashMap::new(),
            wanted: HashMap::new(),
        };
        for parent in bodies.iter().filter_map(|body| body.parent) {
            *read.wanted.entry(parent).or_default() += 1;
        }
        let mut of_body: HashMap<i64, StoredCall> = HashMap::new();
        for call in stored {
            *read.wanted.entry(call.body).or_default() += 1;
            of_body.insert(call.body, call);
        }
        for stored in bodies {
            let parts = read_body(rollout, &stored, &mut read);
            read.parts.insert(stored.number, parts);
            let Some(call) = of_body.remove(&stored.number) else {
                continue;
            };
            let parts = read.take(stored.number);
            take(call.index, self.decode_call(rollout, &call, parts))?;
        }
        for (number, call) in of_body {
            let parts = Err(format!("body {number} is missing"));
            take(call.index, self.decode_call(rollout, &call, parts))?;
        }
        Ok(())
    }

    fn decode_call(
        &self,
        rollout: &RolloutId,
        stored: &StoredCall,
        parts: Result<Arc<Parts>, String>,
    ) -> Result<Call, LedgerError> {
        let id = CallId {
            rollout: rollout.clone(),
            index: stored.index,
        };
        let name = call_name(&id);
        let parts = parts.map_err(|found| self.damaged(name.clone(), found))?;
        let attempts = stored.attempts.as_bytes();
        self.verify(&attempts_name(&id), attempts, &stored.attempts_sum)?;
        row::decode_call(id, &parts, &stored.attempts).map_err(|found| self.damaged(name, found))
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

    /// All summaries of this shape, by rollout. They are derived: one that is damaged or of
    /// another shape is as good as none.
    pub(crate) fn summaries<T: DeserializeOwned>(&self) -> Result<HashMap<String, T>, LedgerError> {
        let found = self.with(|connection| {
            if !connection.table_exists(None, "summaries")? {
                return Ok(Vec::new());
            }
            connection
                .prepare_cached("SELECT rollout, body, sum FROM summaries")?
                .query_map([], |row| {
                    Ok((
                        row.get::<_, String>(0)?,
                        row.get::<_, Vec<u8>>(1)?,
                        row.get::<_, Vec<u8>>(2)?,
                    ))
                })?
                .collect::<rusqlite::Result<Vec<_>>>()
        })?;
        let intact = found.into_iter().filter_map(|(rollout, body, sum)| {
            let name = row::summary_name(&rollout);
            match self.verify(&name, &body, &sum) {
                Ok(()) => Some((rollout, serde_json::from_slice(&body).ok()?)),
                Err(error) => {
                    tracing::warn!(%error, "it is made anew from the calls");
                    None
                }
            }
        });
        Ok(intact.collect())
    }

    /// The calls and bodies of a rollout, from one moment.
    fn stored(&self, id: &RolloutId) -> Result<(Vec<StoredCall>, Vec<StoredBody>), LedgerError> {
        self.with(|connection| {
            let transaction = connection.unchecked_transaction()?;
            let calls = transaction
                .prepare_cached(CALLS)?
                .query_map(params![id.as_str()], stored_call)?
                .collect::<rusqlite::Result<Vec<_>>>()?;
            let bodies = transaction
                .prepare_cached(BODIES)?
                .query_map(params![id.as_str()], stored_body)?
                .collect::<rusqlite::Result<Vec<_>>>()?;
            Ok((calls, bodies))
        })
    }

    pub(crate) fn calls(&self, id: &RolloutId) -> Result<Vec<Call>, LedgerError> {
        let (intact, mut damaged) = self.calls_intact(id)?;
        match damaged.is_empty() {
            true => Ok(intact),
            false => Err(damaged.swap_remove(0)),
        }
    }

    pub(crate) fn calls_intact(
        &self,
        id: &RolloutId,
    ) -> Result<(Vec<Call>, Vec<LedgerError>), LedgerError> {
        let (stored, bodies) = self.stored(id)?;
        let mut intact = Vec::with_capacity(stored.len());
        let mut damaged = Vec::new();
        self.decode_calls(id, stored, bodies, |index, call| {
            match call {
                Ok(call) => intact.push(call),
                Err(error) => damaged.push((index, error)),
            }
            Ok(())
        })?;
        intact.sort_by_key(|call| call.id.index);
        damaged.sort_by_key(|(index, _)| *index);
        Ok((
            intact,
            damaged.into_iter().map(|(_, error)| error).collect(),
        ))
    }

    pub(crate) fn call(&self, id: &CallId) -> Result<Option<Call>, LedgerError> {
        let found = self.with(|connection| {
            let transaction = connection.unchecked_transaction()?;
            let call = transaction
                .prepare_cached(&format!("{CALLS} AND call = ?2"))?
                .query_row(params![id.rollout.as_str(), id.index], stored_call)
                .optional()?;
            let Some(call) = call else { return Ok(None) };
            let chain = transaction
                .prepare_cached(CHAIN)?
                .query_map(params![call.body], stored_body)?
                .collect::<rusqlite::Result<Vec<_>>>()?;
            Ok(Some((call, chain)))
        })?;
        let Some((call, chain)) = found else {
            return Ok(None);
        };
        let mut result = None;
        self.decode_calls(&id.rollout, vec![call], chain, |_, call| {
            result = Some(call?);
            Ok(())
        })?;
        Ok(result)
    }

    /// Ids of all rollouts that have a record of any kind.
    pub(crate) fn ids(&self) -> Result<Vec<String>, LedgerError> {
        self.with(|connection| {
            connection
                .prepare_cached(
                    "SELECT id FROM rollouts UNION SELECT rollout FROM calls ORDER BY 1",
                )?
                .query_map([], |row| row.get(0))?
                .collect()
        })
    }

    /// Keys of all notes.
    pub(crate) fn note_keys(&self) -> Result<Vec<String>, LedgerError> {
        self.with(|connection| {
            connection
                .prepare_cached("SELECT key FROM notes ORDER BY key")?
                .query_map([], |row| row.get(0))?
                .collect()
        })
    }

    /// What SQLite finds wrong with its own pages.
    pub(crate) fn pages(&self) -> Result<Vec<String>, LedgerError> {
        self.with(|connection| {
            connection
                .prepare("PRAGMA quick_check")?
                .query_map([], |row| row.get::<_, String>(0))?
                .filter(|found| !matches!(found, Ok(text) if text == "ok"))
                .collect()
        })
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
