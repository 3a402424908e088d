//! Tables and pragmas. Change a table: raise [`VERSION`] and say how old files are read.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use crate::LedgerError;

/// Version of the format, in `PRAGMA user_version`.
///
/// - 1: bodies were whole and lay in `calls`. [`crate::migrate`] reads them.
/// - 2: bodies are changes against earlier ones, in a table of their own.
/// - 3: a table for summaries.
pub(crate) const VERSION: i64 = 3;
/// The oldest format that is read as it is, without summaries. Older ones must be brought up to
/// date first.
const READABLE: i64 = 2;
/// "Espl", in `PRAGMA application_id`: other SQLite files are refused.
const APPLICATION: i64 = 0x4573_706c;
pub(crate) const PAGE_BYTES: u64 = 8192;
/// A reader that meets a checkpoint waits at most this long.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

const TABLES: &str = "
CREATE TABLE rollouts (
    id TEXT PRIMARY KEY,
    started_ms INTEGER NOT NULL,
    disposition TEXT,
    body BLOB NOT NULL,
    sum BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX rollouts_by_start ON rollouts (started_ms, id);
CREATE TABLE labels (
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    rollout TEXT NOT NULL,
    PRIMARY KEY (name, value, rollout)
) STRICT, WITHOUT ROWID;
CREATE INDEX labels_by_rollout ON labels (rollout);
CREATE TABLE notes (
    key TEXT PRIMARY KEY,
    body BLOB NOT NULL,
    sum BLOB NOT NULL
) STRICT, WITHOUT ROWID;
";

/// The tables that version 2 brought.
pub(crate) const CALLS: &str = "
CREATE TABLE bodies (
    number INTEGER PRIMARY KEY,
    rollout TEXT NOT NULL,
    parent INTEGER,
    body BLOB NOT NULL,
    sum BLOB NOT NULL
) STRICT;
CREATE INDEX bodies_by_rollout ON bodies (rollout, number);
CREATE INDEX bodies_by_parent ON bodies (parent) WHERE parent IS NOT NULL;
CREATE TABLE calls (
    rollout TEXT NOT NULL,
    call INTEGER NOT NULL,
    body INTEGER NOT NULL,
    attempts TEXT NOT NULL,
    attempts_sum BLOB NOT NULL,
    PRIMARY KEY (rollout, call)
) STRICT, WITHOUT ROWID;
";

/// The table that version 3 brought: what was derived from the calls of a rollout, gone as soon as
/// these change.
pub(crate) const SUMMARIES: &str = "
CREATE TABLE summaries (
    rollout TEXT PRIMARY KEY,
    body BLOB NOT NULL,
    sum BLOB NOT NULL
) STRICT, WITHOUT ROWID;
";

/// Makes a new database. A failure half-way leaves no file, so that the next try is not refused.
pub(crate) fn create(file: &Path) -> Result<Connection, LedgerError> {
    let made = connect(file).and_then(|connection| {
        connection
            .execute_batch(&format!(
                "BEGIN; {TABLES} {CALLS} {SUMMARIES} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; COMMIT;"
            ))
            .map_err(|source| LedgerError::sqlite(file, source))?;
        Ok(connection)
    });
    if made.is_err() {
        // Best effort: the error that matters is the first one.
        let _ = std::fs::remove_file(file);
    }
    made
}

/// Opens a database for writing, checks that it is ours and brings it to the current version.
pub(crate) fn open(file: &Path) -> Result<Connection, LedgerError> {
    let mut connection = connect(file)?;
    if version(file, &connection)? == 1 {
        crate::migrate::from_1(file, &mut connection)?;
    }
    if version(file, &connection)? == 2 {
        crate::migrate::from_2(file, &connection)?;
    }
    check(file, &connection, VERSION)?;
    Ok(connection)
}

pub(crate) fn connect(file: &Path) -> Result<Connection, LedgerError> {
    let sqlite = |source| LedgerError::sqlite(file, source);
    let connection = Connection::open(file).map_err(sqlite)?;
    connection.busy_timeout(BUSY_TIMEOUT).map_err(sqlite)?;
    connection
        .execute_batch(&format!(
            "PRAGMA page_size = {PAGE_BYTES};
             PRAGMA journal_mode = WAL;
             PRAGMA synchronous = NORMAL;
             PRAGMA wal_autocheckpoint = 0;
             PRAGMA journal_size_limit = 67108864;
             PRAGMA cache_size = -16384;"
        ))
        .map_err(sqlite)?;
    Ok(connection)
}

/// Number of the last body, 0 without any.
pub(crate) fn last_body(file: &Path, connection: &Connection) -> Result<i64, LedgerError> {
    connection
        .query_row("SELECT coalesce(max(number), 0) FROM bodies", [], |row| {
            row.get(0)
        })
        .map_err(|source| LedgerError::sqlite(file, source))
}

/// Sets the limit on growth.
pub(crate) fn limit(
    file: &Path,
    connection: &Connection,
    bytes_max: Option<u64>,
) -> Result<(), LedgerError> {
    let Some(bytes_max) = bytes_max else {
        return Ok(());
    };
    let pages = (bytes_max / PAGE_BYTES).max(1);
    connection
        .query_row(&format!("PRAGMA max_page_count = {pages}"), [], |_| Ok(()))
        .map_err(|source| LedgerError::sqlite(file, source))
}

/// Opens a database for reading only.
pub(crate) fn open_read_only(file: &Path) -> Result<Connection, LedgerError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let plain = Connection::open_with_flags(file, flags)
        .map_err(|source| LedgerError::sqlite(file, source))
        .and_then(|connection| {
            connection
                .busy_timeout(BUSY_TIMEOUT)
                .map_err(|source| LedgerError::sqlite(file, source))?;
            check(file, &connection, READABLE).map(|()| connection)
        });
    match plain {
        // On read-only media the index of the write-ahead log cannot be made. A cleanly closed
        // ledger has no log, so it can be read as a file that never changes.
        Err(LedgerError::Sqlite { source, .. })
            if cannot_make_index(&source) && !wal_exists(file) =>
        {
            let uri = format!("file:{}?immutable=1", uri_path(file));
            let connection = Connection::open_with_flags(uri, flags | OpenFlags::SQLITE_OPEN_URI)
                .map_err(|source| LedgerError::sqlite(file, source))?;
            check(file, &connection, READABLE)?;
            Ok(connection)
        }
        other => other,
    }
}

fn cannot_make_index(source: &rusqlite::Error) -> bool {
    matches!(
        source.sqlite_error_code(),
        Some(rusqlite::ErrorCode::CannotOpen | rusqlite::ErrorCode::ReadOnly)
    )
}

fn wal_exists(file: &Path) -> bool {
    let mut name = file.as_os_str().to_owned();
    name.push("-wal");
    Path::new(&name).exists()
}

fn uri_path(file: &Path) -> String {
    file.to_string_lossy()
        .chars()
        .map(|c| match c {
            '%' => "%25".to_owned(),
            '?' => "%3f".to_owned(),
            '#' => "%23".to_owned(),
            other => other.to_string(),
        })
        .collect()
}

/// Version of the format; -1 when it is not ours.
fn version(file: &Path, connection: &Connection) -> Result<i64, LedgerError> {
    let pragma = |name: &str| {
        connection
            .query_row(&format!("PRAGMA {name}"), [], |row| row.get::<_, i64>(0))
            .map_err(|source| LedgerError::sqlite(file, source))
    };
    match pragma("application_id")? {
        APPLICATION => pragma("user_version"),
        _ => Ok(-1),
    }
}

fn check(file: &Path, connection: &Connection, oldest: i64) -> Result<(), LedgerError> {
    let found = version(file, connection)?;
    if (oldest..=VERSION).contains(&found) {
        Ok(())
    } else {
        Err(LedgerError::Version {
            path: file.to_owned(),
            found,
            expected: VERSION,
        })
    }
}
