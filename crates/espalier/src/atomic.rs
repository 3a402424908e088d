//! A file that appears whole or not at all. What was there before stays until the new one is
//! complete and on disk.

use std::{
    fs::{self, Permissions},
    io::{BufWriter, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use tempfile::NamedTempFile;

use crate::error::CliError;

const BUFFER_BYTES: usize = 1 << 20;

/// A file being written, under another name beside its own. Removed when dropped before
/// [`AtomicFile::finish`].
#[derive(Debug)]
pub(crate) struct AtomicFile {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
    bytes: u64,
}

impl AtomicFile {
    /// Begins a file; its folder is made when missing.
    pub(crate) fn create(path: &Path) -> Result<Self, CliError> {
        let failed = |error| unwritable(path, error);
        if path.is_dir() {
            return Err(CliError::usage(
                format!("{} is a folder", path.display()),
                "name a file",
            ));
        }
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        fs::create_dir_all(folder).map_err(failed)?;
        let file = tempfile::Builder::new()
            .prefix(".espalier-")
            .suffix(".part")
            // As any new file: less what umask takes away.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(folder)
            .map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
            file: BufWriter::with_capacity(BUFFER_BYTES, file),
            bytes: 0,
        })
    }

    /// Writes a whole file.
    pub(crate) fn write_all_to(path: &Path, bytes: &[u8]) -> Result<u64, CliError> {
        let mut file = Self::create(path)?;
        file.write_all(bytes)
            .map_err(|error| unwritable(path, error))?;
        file.finish()
    }

    /// Puts the file in its place and says how many bytes it has.
    pub(crate) fn finish(self) -> Result<u64, CliError> {
        let Self { path, file, bytes } = self;
        let failed = |error| unwritable(&path, error);
        let file = file
            .into_inner()
            .map_err(|error| failed(error.into_error()))?;
        file.as_file().sync_all().map_err(failed)?;
        file.persist(&path).map_err(|error| failed(error.error))?;
        Ok(bytes)
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

/// A file that could not be written.
pub(crate) fn unwritable(
    path: &Path,
    error: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> CliError {
    CliError::Failed {
        what: format!(
            "{} could not be written; what was there before is as it was",
            path.display()
        ),
        source: Some(error.into()),
        hint: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_finished_leaves_the_old_one_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/rows.jsonl");
        assert_eq!(AtomicFile::write_all_to(&path, b"old").unwrap(), 3);
        let mut file = AtomicFile::create(&path).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        let names = fs::read_dir(path.parent().unwrap()).unwrap();
        assert_eq!(names.count(), 1);
        assert!(AtomicFile::create(folder.path()).is_err());
    }
}
