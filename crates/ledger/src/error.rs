//! What can go wrong with a ledger, and what to do about it.

use std::path::{Path, PathBuf};

/// An error of the ledger. Only [`LedgerError::DiskFull`] and [`LedgerError::Stalled`] are worth
/// trying again. The gateway answers a failed put with 503; training discards the rollout.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// A new run was to be made where one already is.
    #[error(
        "{path} already exists: resume that run, or choose another directory for the new one",
        path = path.display()
    )]
    Exists {
        /// The database.
        path: PathBuf,
    },
    /// There is no ledger here.
    #[error(
        "no ledger at {path}: expected the directory of an Espalier run; check the path",
        path = path.display()
    )]
    Missing {
        /// Where the database was expected.
        path: PathBuf,
    },
    /// Another writer holds it.
    #[error(
        "{path} is held by {holder}: a ledger has one writer; stop that process, or open the run read-only",
        path = path.display()
    )]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// Who holds it: process id and command.
        holder: String,
    },
    /// The format is not ours.
    #[error(
        "{path} has ledger format {found}, this program reads format {expected}: {hint}",
        hint = if *found > 0 && found < expected {
            "it is brought up to date when nobody else has it open and this user may write it"
        } else {
            "use the version of Espalier that wrote it"
        },
        path = path.display()
    )]
    Version {
        /// The database.
        path: PathBuf,
        /// Version in the file; -1 when it is not a ledger at all.
        found: i64,
        /// Version of this program.
        expected: i64,
    },
    /// No space. Everything acknowledged before is safe.
    #[error(
        "no space to write {path} ({found}): nothing saved before is lost; free space on that disk and go on",
        path = path.display()
    )]
    DiskFull {
        /// The database.
        path: PathBuf,
        /// What the system said.
        found: String,
    },
    /// A record does not match its checksum, or the file is broken.
    #[error(
        "{path}: {record} is damaged ({found}); other records stay readable: discard this one and run its rollout again, or restore the file from a copy",
        path = path.display()
    )]
    Damaged {
        /// The database.
        path: PathBuf,
        /// What is damaged, e.g. `call r1#3`.
        record: String,
        /// How it shows.
        found: String,
    },
    /// The writer has stopped.
    #[error("the ledger {path} is closed: nothing more can be saved", path = path.display())]
    Closed {
        /// The database.
        path: PathBuf,
    },
    /// It was opened for reading.
    #[error("the ledger {path} was opened read-only", path = path.display())]
    ReadOnly {
        /// The database.
        path: PathBuf,
    },
    /// The writer did not get to it in time. The record may still be written.
    #[error(
        "the ledger {path} took longer than {seconds} s to save a record: is the disk overloaded?",
        path = path.display()
    )]
    Stalled {
        /// The database.
        path: PathBuf,
        /// The limit.
        seconds: u64,
    },
    /// A value cannot be stored.
    #[error("{record} cannot be stored: {found}")]
    Encode {
        /// Which record.
        record: String,
        /// Why.
        found: String,
    },
    /// A rule of redaction is not one.
    #[error("redaction rule {rule:?}: {found}; nothing was written")]
    Redaction {
        /// The pattern or pointer.
        rule: String,
        /// What is wrong with it.
        found: String,
    },
    /// The operating system refused.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// What.
        path: PathBuf,
        /// A verb.
        action: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// Anything else that SQLite says.
    #[error("{path}: {source}", path = path.display())]
    Sqlite {
        /// The database.
        path: PathBuf,
        /// What SQLite said.
        source: rusqlite::Error,
    },
}

// Extended codes that SQLite's unix layer returns for "quota exceeded", "file size limit" and "no
// room for the shared index"; "no space left" itself is SQLITE_FULL.
const IOERR_WRITE: i32 = 778;
const IOERR_SHMSIZE: i32 = 4874;

impl LedgerError {
    pub(crate) fn io(path: &Path, action: &'static str, source: std::io::Error) -> Self {
        if source.kind() == std::io::ErrorKind::StorageFull {
            return Self::DiskFull {
                path: path.to_owned(),
                found: source.to_string(),
            };
        }
        Self::Io {
            path: path.to_owned(),
            action,
            source,
        }
    }

    pub(crate) fn closed(path: &Path) -> Self {
        Self::Closed {
            path: path.to_owned(),
        }
    }

    /// Sorts an error of SQLite into ours.
    pub(crate) fn sqlite(path: &Path, source: rusqlite::Error) -> Self {
        let path = path.to_owned();
        if let rusqlite::Error::SqliteFailure(code, _) = &source {
            if code.code == rusqlite::ErrorCode::DiskFull
                || matches!(code.extended_code, IOERR_WRITE | IOERR_SHMSIZE)
            {
                return Self::DiskFull {
                    path,
                    found: source.to_string(),
                };
            }
            if matches!(
                code.code,
                rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase
            ) {
                return Self::Damaged {
                    path,
                    record: "the file itself".to_owned(),
                    found: source.to_string(),
                };
            }
        }
        Self::Sqlite { path, source }
    }
}
