//! Folders of files, read into memory and written back, within limits.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use crate::{TaskError, TaskFile};

/// Files of one task, the verifier's included.
pub const FILES_MAX: usize = 4_000;
/// Bytes of all files of one task together.
pub const BYTES_MAX: u64 = 128 << 20;

pub(crate) fn refused(path: &Path, error: &std::io::Error) -> TaskError {
    TaskError::File {
        path: path.to_path_buf(),
        reason: error.to_string(),
    }
}

/// All regular files under a folder, sorted by path, with paths relative to it. Empty when the
/// folder does not exist.
pub(crate) fn read(folder: &Path) -> Result<Vec<TaskFile>, TaskError> {
    let mut files = Vec::new();
    let mut bytes = 0;
    if folder.exists() {
        walk(folder, Path::new(""), &mut files, &mut bytes)?;
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn walk(
    root: &Path,
    inner: &Path,
    files: &mut Vec<TaskFile>,
    bytes: &mut u64,
) -> Result<(), TaskError> {
    let folder = root.join(inner);
    for entry in fs::read_dir(&folder).map_err(|error| refused(&folder, &error))? {
        let entry = entry.map_err(|error| refused(&folder, &error))?;
        let path = entry.path();
        let relative = inner.join(entry.file_name());
        let data = entry.metadata().map_err(|error| refused(&path, &error))?;
        if data.is_dir() {
            walk(root, &relative, files, bytes)?;
        } else if data.is_file() {
            *bytes += data.len();
            if *bytes > BYTES_MAX {
                return Err(too_large(
                    root,
                    format!("{bytes} bytes"),
                    format!("{BYTES_MAX} bytes"),
                ));
            }
            if files.len() == FILES_MAX {
                return Err(too_large(
                    root,
                    "the number of files".to_owned(),
                    format!("{FILES_MAX} files"),
                ));
            }
            files.push(TaskFile {
                content: fs::read(&path).map_err(|error| refused(&path, &error))?,
                executable: data.permissions().mode() & 0o111 != 0,
                path: relative,
            });
        } else {
            return Err(TaskError::Field {
                file: path,
                line: None,
                field: "kind of file".into(),
                expected: "a regular file or a folder".to_owned(),
                found: "a symbolic link or a special file".to_owned(),
                hint: "put the content itself there",
            });
        }
    }
    Ok(())
}

/// One regular file of a folder, with its path relative to the folder.
pub(crate) fn read_one(folder: &Path, inner: &Path) -> Result<TaskFile, TaskError> {
    let path = folder.join(inner);
    let data = fs::symlink_metadata(&path).map_err(|error| refused(&path, &error))?;
    within(&path, data.len())?;
    Ok(TaskFile {
        content: fs::read(&path).map_err(|error| refused(&path, &error))?,
        executable: data.permissions().mode() & 0o111 != 0,
        path: inner.to_path_buf(),
    })
}

/// Refuses a single file that is larger than a whole task may be.
pub(crate) fn within(path: &Path, bytes: u64) -> Result<(), TaskError> {
    if bytes <= BYTES_MAX {
        return Ok(());
    }
    Err(too_large(
        path,
        format!("{bytes} bytes"),
        format!("{BYTES_MAX} bytes"),
    ))
}

fn too_large(path: &Path, what: String, limit: String) -> TaskError {
    TaskError::TooLarge {
        path: path.to_path_buf(),
        what,
        limit,
    }
}

/// Writes files under a folder, which is created even when there are none.
pub(crate) fn write(folder: &Path, files: &[TaskFile]) -> Result<(), TaskError> {
    fs::create_dir_all(folder).map_err(|error| refused(folder, &error))?;
    for file in files {
        let path = folder.join(&file.path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|error| refused(parent, &error))?;
        }
        fs::write(&path, &file.content).map_err(|error| refused(&path, &error))?;
        let mode = if file.executable { 0o755 } else { 0o644 };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))
            .map_err(|error| refused(&path, &error))?;
    }
    Ok(())
}

/// What the id of a task looks like.
pub(crate) const ID_EXPECTED: &str =
    "1 to 128 of letters, digits, `.`, `_`, `-`, `:`, starting with a letter or digit";

/// Reads a text file.
pub(crate) fn read_text(path: &Path) -> Result<String, TaskError> {
    let data = fs::metadata(path).map_err(|error| refused(path, &error))?;
    within(path, data.len())?;
    fs::read_to_string(path).map_err(|error| refused(path, &error))
}

/// A path to something inside its folder: relative, without `..`, not the folder itself.
pub(crate) fn stays_inside(path: &Path) -> bool {
    use std::path::Component;
    let mut parts = path
        .components()
        .filter(|part| *part != Component::CurDir)
        .peekable();
    parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
}

/// Sub-folders that are not hidden, sorted.
pub(crate) fn folders(folder: &Path) -> Result<Vec<PathBuf>, TaskError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| refused(folder, &error))? {
        let entry = entry.map_err(|error| refused(folder, &error))?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if !hidden && entry.path().is_dir() {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}
