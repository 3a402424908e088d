//! Files in and out, with the rights of the sandbox's user.

use std::{
    collections::VecDeque,
    ffi::{OsStr, OsString},
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::{OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use crate::protocol::{
    CHUNK_BYTES, FileFailure, Frame, Kind, ProtocolError, decode_path, encode_path,
};

/// Most files that one download lists.
const FILES_MAX: usize = 200_000;

fn failure(path: &Path, error: &io::Error) -> FileFailure {
    FileFailure {
        path: path.to_string_lossy().into_owned(),
        reason: error.to_string(),
    }
}

/// A file being written.
#[derive(Debug)]
pub(super) struct Upload {
    path: PathBuf,
    mode: u32,
    file: File,
}

impl Upload {
    /// Makes the file anew: whatever link or file was at its path is replaced, not followed.
    pub(super) fn begin(body: &[u8]) -> Result<Result<Self, FileFailure>, ProtocolError> {
        let (mode, path) = decode_path(body)?;
        let path = PathBuf::from(OsStr::from_bytes(path));
        let mode = (mode & 0o7777) as u32;
        Ok(Self::create(&path)
            .map(|file| Self {
                path: path.clone(),
                mode,
                file,
            })
            .map_err(|e| failure(&path, &e)))
    }

    fn create(path: &Path) -> io::Result<File> {
        if !path.is_absolute() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "an absolute path is expected",
            ));
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        OpenOptions::new().write(true).create_new(true).open(path)
    }

    pub(super) fn add(&mut self, bytes: &[u8]) -> Result<(), FileFailure> {
        self.file
            .write_all(bytes)
            .map_err(|e| failure(&self.path, &e))
    }

    pub(super) fn finish(self) -> Result<(), FileFailure> {
        self.file
            .set_permissions(fs::Permissions::from_mode(self.mode))
            .map_err(|e| failure(&self.path, &e))
    }
}

/// Files being read.
#[derive(Debug)]
pub(super) struct Download {
    pub(super) id: u32,
    root: PathBuf,
    open: VecDeque<PathBuf>,
    current: Option<File>,
    bytes_max: u64,
    bytes: u64,
}

impl Download {
    /// Lists the regular files under a path (or takes the file there), in order of their paths.
    pub(super) fn begin(id: u32, body: &[u8]) -> Result<Result<Self, FileFailure>, ProtocolError> {
        let (bytes_max, path) = decode_path(body)?;
        let root = PathBuf::from(OsStr::from_bytes(path));
        Ok(list(&root)
            .map(|open| Self {
                id,
                root: root.clone(),
                open,
                current: None,
                bytes_max,
                bytes: 0,
            })
            .map_err(|e| failure(&root, &e)))
    }

    /// The next piece, and whether there is more after it.
    pub(super) fn next_frame(&mut self) -> (Frame, bool) {
        match self.try_next() {
            Ok(Some(frame)) => (frame, true),
            Ok(None) => (Frame::new(Kind::GetDone, self.id, Vec::new()), false),
            Err((path, error)) => (
                Frame::json(Kind::FileFailed, self.id, &failure(&path, &error)),
                false,
            ),
        }
    }

    fn try_next(&mut self) -> Result<Option<Frame>, (PathBuf, io::Error)> {
        if let Some(file) = &mut self.current {
            let mut chunk = Vec::with_capacity(CHUNK_BYTES);
            file.take(CHUNK_BYTES as u64)
                .read_to_end(&mut chunk)
                .map_err(|e| (self.root.clone(), e))?;
            self.bytes += chunk.len() as u64;
            if self.bytes > self.bytes_max {
                let reason = format!("more than {} bytes", self.bytes_max);
                return Err((
                    self.root.clone(),
                    io::Error::new(io::ErrorKind::FileTooLarge, reason),
                ));
            }
            if !chunk.is_empty() {
                return Ok(Some(Frame::new(Kind::GetData, self.id, chunk)));
            }
            self.current = None;
        }
        while let Some(path) = self.open.pop_front() {
            match open_regular(&path) {
                Ok(Some((file, mode))) => {
                    self.current = Some(file);
                    let body = encode_path(u64::from(mode), path.as_os_str().as_bytes());
                    return Ok(Some(Frame::new(Kind::GetFile, self.id, body)));
                }
                // Replaced by something else, or removed, since it was listed.
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound && path != self.root => {}
                Err(error) => return Err((path, error)),
            }
        }
        Ok(None)
    }
}

/// Opens a regular file without ever waiting (a FIFO would) and without following a link.
fn open_regular(path: &Path) -> io::Result<Option<(File, u32)>> {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Ok(None),
        Err(error) => return Err(error),
    };
    let metadata = file.metadata()?;
    Ok(metadata
        .is_file()
        .then(|| (file, metadata.permissions().mode() & 0o7777)))
}

fn list(root: &Path) -> io::Result<VecDeque<PathBuf>> {
    if !fs::metadata(root)?.is_dir() {
        // A link is followed here and only here: the caller named it.
        return Ok(VecDeque::from([fs::canonicalize(root)?]));
    }
    let mut found: Vec<OsString> = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path().into_os_string());
            }
            if found.len() + folders.len() > FILES_MAX {
                return Err(io::Error::other(format!("more than {FILES_MAX} files")));
            }
        }
    }
    found.sort_by_cached_key(|path| path.clone().into_vec());
    Ok(found.into_iter().map(PathBuf::from).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("files-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn get(&self, path: &str, bytes_max: u64) -> Vec<Frame> {
            let path = self.0.join(path);
            let body = encode_path(bytes_max, path.as_os_str().as_bytes());
            let mut download = match Download::begin(1, &body).unwrap() {
                Ok(download) => download,
                Err(failure) => return vec![Frame::json(Kind::FileFailed, 1, &failure)],
            };
            let mut frames = Vec::new();
            loop {
                let (frame, more) = download.next_frame();
                frames.push(frame);
                if !more {
                    return frames;
                }
            }
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn put(path: &Path, mode: u64, content: &[u8]) -> Result<(), FileFailure> {
        let body = encode_path(mode, path.as_os_str().as_bytes());
        let mut upload = Upload::begin(&body).unwrap()?;
        upload.add(content)?;
        upload.finish()
    }

    #[test]
    fn an_upload_replaces_links_and_sets_the_mode() {
        let folder = Folder::new("upload");
        let (victim, link) = (folder.0.join("victim"), folder.0.join("a/link"));
        put(&victim, 0o600, b"old").unwrap();
        fs::create_dir(folder.0.join("a")).unwrap();
        symlink(&victim, &link).unwrap();
        put(&link, 0o755, b"new").unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"old");
        assert_eq!(fs::read(&link).unwrap(), b"new");
        assert_eq!(
            fs::metadata(&link).unwrap().permissions().mode() & 0o7777,
            0o755
        );
        let failure = put(&folder.0.join("victim/x"), 0o644, b"").unwrap_err();
        assert!(
            failure.reason.contains("Not a directory") || failure.reason.contains("exists"),
            "{failure:?}"
        );
        assert!(
            put(Path::new("relative"), 0o644, b"")
                .unwrap_err()
                .reason
                .contains("absolute")
        );
    }

    #[test]
    fn a_download_gives_regular_files_in_order_and_never_blocks() {
        let folder = Folder::new("download");
        put(&folder.0.join("b"), 0o644, b"bb").unwrap();
        put(&folder.0.join("a/c"), 0o600, &vec![7; CHUNK_BYTES + 1]).unwrap();
        put(&folder.0.join("a.x"), 0o600, b"").unwrap();
        symlink("b", folder.0.join("link")).unwrap();
        rustix::fs::mkfifoat(
            rustix::fs::CWD,
            folder.0.join("fifo"),
            rustix::fs::Mode::RUSR,
        )
        .unwrap();
        let frames = folder.get("", 1 << 20);
        let kinds: Vec<_> = frames.iter().map(|f| (f.kind, f.body.len())).collect();
        let file = |name: &str| (Kind::GetFile, 8 + folder.0.join(name).as_os_str().len());
        assert_eq!(
            kinds,
            [
                file("a.x"),
                file("a/c"),
                (Kind::GetData, CHUNK_BYTES),
                (Kind::GetData, 1),
                file("b"),
                (Kind::GetData, 2),
                (Kind::GetDone, 0),
            ]
        );
        assert_eq!(folder.get("link", 10).len(), 3);
        let last = folder.get("", 100).pop().unwrap();
        assert_eq!(last.kind, Kind::FileFailed);
        assert!(
            last.parse::<FileFailure>()
                .unwrap()
                .reason
                .contains("more than 100 bytes")
        );
        let absent = folder.get("absent", 100).pop().unwrap();
        assert!(
            absent
                .parse::<FileFailure>()
                .unwrap()
                .reason
                .contains("No such file")
        );
    }
}
