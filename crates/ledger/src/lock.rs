//! One writer per run directory, by an advisory lock that the kernel drops with its process.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use crate::LedgerError;

const LOCK_NAME: &str = "ledger.lock";

/// Takes the lock of a run directory and writes who holds it. It is released when the file is
/// dropped, or when the process ends in whatever way.
pub(crate) fn take(dir: &Path) -> Result<File, LedgerError> {
    let path = dir.join(LOCK_NAME);
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(|source| LedgerError::io(&path, "open", source))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            // Best effort: the error is clear without the name.
            let _ = Read::by_ref(&mut file)
                .take(512)
                .read_to_string(&mut holder);
            let holder = match holder.trim() {
                "" => "another process".to_owned(),
                text => text.to_owned(),
            };
            return Err(LedgerError::Locked { path, holder });
        }
        Err(TryLockError::Error(source)) => return Err(LedgerError::io(&path, "lock", source)),
    }
    let program = std::env::args_os()
        .next()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let text = format!("process {} ({program})\n", std::process::id());
    file.set_len(0)
        .and_then(|()| file.seek(SeekFrom::Start(0)))
        .and_then(|_| file.write_all(text.as_bytes()))
        .map_err(|source| LedgerError::io(&path, "write", source))?;
    Ok(file)
}
