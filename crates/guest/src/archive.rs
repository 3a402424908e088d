//! `guest pack | unpack | list`: folders as tar streams. Processes of their own, run through
//! `exec`, so that they have the rights of the sandbox's user, its limits, and an end.

use std::{
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Component, Path, PathBuf},
    process::ExitCode,
};

use serde::{Deserialize, Serialize};

/// What is at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link.
    Link,
    /// Anything else: FIFO, socket.
    Other,
}

/// One line of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Below the folder that was listed; bytes that are not UTF-8 are replaced.
    pub path: PathBuf,
    /// What it is.
    pub kind: EntryKind,
    /// Size of a file.
    pub bytes: u64,
    /// Permission bits.
    pub mode: u32,
    /// Last change, in seconds since 1970.
    pub modified_s: i64,
}

const USAGE: &str =
    "usage: guest pack ROOT BYTES_MAX FILES_MAX | unpack ROOT | list ROOT FILES_MAX";

/// Runs one of the three.
pub fn run(command: &str, arguments: impl Iterator<Item = String>) -> ExitCode {
    let arguments: Vec<String> = arguments.collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<u64>().map_err(io::Error::other);
    let result = match (command, arguments.as_slice()) {
        ("pack", [root, bytes, files]) => number(bytes)
            .and_then(|bytes| Ok((bytes, number(files)?)))
            .and_then(|(bytes, files)| pack(Path::new(root), io::stdout().lock(), bytes, files)),
        ("unpack", [root]) => unpack(Path::new(root), io::stdin().lock()),
        ("list", [root, files]) => number(files).and_then(|files| {
            let mut out = io::BufWriter::new(io::stdout().lock());
            for (path, metadata) in walk(Path::new(root), files)? {
                serde_json::to_writer(&mut out, &entry(path, &metadata))?;
                out.write_all(b"\n")?;
            }
            out.flush()
        }),
        _ => Err(io::Error::other(USAGE)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn entry(path: PathBuf, metadata: &Metadata) -> Entry {
    let kind = metadata.file_type();
    let kind = if kind.is_file() {
        EntryKind::File
    } else if kind.is_dir() {
        EntryKind::Folder
    } else if kind.is_symlink() {
        EntryKind::Link
    } else {
        EntryKind::Other
    };
    Entry {
        path: path.to_string_lossy().into_owned().into(),
        kind,
        bytes: if kind == EntryKind::File {
            metadata.len()
        } else {
            0
        },
        mode: metadata.permissions().mode() & 0o7777,
        modified_s: metadata.mtime(),
    }
}

/// Everything below a folder, folders before what they hold, in order of names. What vanishes
/// meanwhile is left out.
pub(crate) fn walk(root: &Path, files_max: u64) -> io::Result<Vec<(PathBuf, Metadata)>> {
    let mut found = Vec::new();
    let mut open = vec![PathBuf::new()];
    while let Some(folder) = open.pop() {
        let mut names = match fs::read_dir(root.join(&folder)) {
            Ok(entries) => entries
                .flatten()
                .map(|entry| entry.file_name())
                .collect::<Vec<_>>(),
            Err(_) if folder != Path::new("") => continue,
            Err(error) => return Err(error),
        };
        names.sort();
        let mut folders = Vec::new();
        for name in names {
            let path = folder.join(name);
            let Ok(metadata) = fs::symlink_metadata(root.join(&path)) else {
                continue;
            };
            if metadata.is_dir() {
                folders.push(path.clone());
            }
            found.push((path, metadata));
            if found.len() as u64 > files_max {
                return Err(io::Error::other(format!("more than {files_max} entries")));
            }
        }
        open.extend(folders.into_iter().rev());
    }
    Ok(found)
}

/// Whether a link at `path` (relative to the root) ends inside the root, as its text says.
fn stays_inside(path: &Path, target: &Path) -> bool {
    let mut depth = path.components().count().saturating_sub(1);
    for component in target.components() {
        match component {
            Component::Normal(_) => depth += 1,
            Component::CurDir => {}
            Component::ParentDir if depth > 0 => depth -= 1,
            _ => return false,
        }
    }
    true
}

/// Writes a folder as a tar stream: folders, files, and links that stay inside. Links out, FIFOs
/// and sockets are left out: nothing in the stream can point at anything but itself.
fn pack(root: &Path, out: impl Write, bytes_max: u64, files_max: u64) -> io::Result<()> {
    let mut builder = tar::Builder::new(io::BufWriter::with_capacity(64 << 10, out));
    let mut bytes = 0_u64;
    for (path, metadata) in walk(root, files_max)? {
        let kind = metadata.file_type();
        let mut header = tar::Header::new_gnu();
        header.set_metadata_in_mode(&metadata, tar::HeaderMode::Deterministic);
        header.set_mode(metadata.permissions().mode() & 0o7777);
        header.set_mtime(metadata.mtime().try_into().unwrap_or(0));
        if kind.is_dir() {
            header.set_size(0);
            builder.append_data(&mut header, &path, io::empty())?;
        } else if kind.is_symlink() {
            let target = fs::read_link(root.join(&path))?;
            if stays_inside(&path, &target) {
                header.set_size(0);
                builder.append_link(&mut header, &path, &target)?;
            }
        } else if kind.is_file() {
            let Some(mut file) = open_regular(&root.join(&path))? else {
                continue;
            };
            // Its size now; a file that grows meanwhile is cut, one that shrinks is filled up.
            let size = file.metadata()?.len();
            bytes = bytes.saturating_add(size);
            if bytes > bytes_max {
                return Err(io::Error::other(format!("more than {bytes_max} bytes")));
            }
            header.set_size(size);
            let content = (&mut file).take(size).chain(io::repeat(0)).take(size);
            builder.append_data(&mut header, &path, content)?;
        }
    }
    builder.into_inner()?.flush()
}

/// Opens a regular file without ever waiting and without following a link; `None` when it is
/// something else by now.
fn open_regular(path: &Path) -> io::Result<Option<File>> {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => Ok(file.metadata()?.is_file().then_some(file)),
        Err(error)
            if error.kind() == io::ErrorKind::NotFound
                || matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENXIO)) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Writes a tar stream into a folder, which is made. Paths that leave it are an error.
fn unpack(root: &Path, input: impl Read) -> io::Result<()> {
    fs::create_dir_all(root)?;
    let mut archive = tar::Archive::new(input);
    archive.set_preserve_permissions(true);
    archive.set_preserve_mtime(true);
    archive.set_overwrite(true);
    let mut folders = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        if entry.header().entry_type().is_dir() {
            // Last, or a read-only one could not be filled.
            folders.push(entry);
            continue;
        }
        let inside = entry
            .unpack_in(root)
            .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
        if !inside {
            return Err(io::Error::other(format!(
                "{}: the path leaves the folder",
                path.display()
            )));
        }
    }
    for mut folder in folders.into_iter().rev() {
        let path = folder.path()?.into_owned();
        if !folder.unpack_in(root)? && path != Path::new(".") {
            return Err(io::Error::other(format!(
                "{}: the path leaves the folder",
                path.display()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("archive-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn what_is_packed_comes_out_the_same_but_links_that_leave() {
        let (from, to) = (folder("from"), folder("to"));
        fs::create_dir_all(from.join("a/deep")).unwrap();
        fs::write(from.join("a/deep/file"), "content").unwrap();
        fs::write(from.join("empty"), "").unwrap();
        fs::set_permissions(from.join("empty"), fs::Permissions::from_mode(0o4750)).unwrap();
        symlink("deep/file", from.join("a/inside")).unwrap();
        symlink("../../etc/passwd", from.join("a/outside")).unwrap();
        symlink("/etc/passwd", from.join("absolute")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, from.join("fifo"), rustix::fs::Mode::RUSR).unwrap();
        fs::set_permissions(from.join("a/deep"), fs::Permissions::from_mode(0o555)).unwrap();
        let mut tar = Vec::new();
        pack(&from, &mut tar, 100, 100).unwrap();
        unpack(&to, tar.as_slice()).unwrap();
        let listed: Vec<_> = walk(&to, 100)
            .unwrap()
            .into_iter()
            .map(|(path, metadata)| entry(path, &metadata))
            .map(|e| {
                (
                    e.path.display().to_string(),
                    e.kind,
                    e.bytes,
                    e.mode & 0o777,
                )
            })
            .collect();
        let modes = |mode| mode;
        assert_eq!(
            listed,
            [
                ("a".into(), EntryKind::Folder, 0, listed[0].3),
                ("empty".into(), EntryKind::File, 0, modes(0o750)),
                ("a/deep".into(), EntryKind::Folder, 0, modes(0o555)),
                ("a/inside".into(), EntryKind::Link, 0, modes(0o777)),
                ("a/deep/file".into(), EntryKind::File, 7, listed[4].3),
            ]
        );
        let error = pack(&from, io::sink(), 6, 100).unwrap_err().to_string();
        assert_eq!(error, "more than 6 bytes");
        let error = pack(&from, io::sink(), 100, 2).unwrap_err().to_string();
        assert_eq!(error, "more than 2 entries");
        for path in [&from, &to] {
            let _ = fs::set_permissions(path.join("a/deep"), fs::Permissions::from_mode(0o755));
            fs::remove_dir_all(path).unwrap();
        }
    }

    #[test]
    fn a_stream_that_leaves_the_folder_is_refused() {
        let to = folder("escape");
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        header.set_mode(0o644);
        header.set_entry_type(tar::EntryType::Regular);
        // `set_path` refuses this, so it is written by hand.
        let name = b"../escaped";
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.set_cksum();
        builder.append(&header, &b"x"[..]).unwrap();
        let tar = builder.into_inner().unwrap();
        let error = unpack(&to, tar.as_slice()).unwrap_err().to_string();
        assert!(error.contains("leaves the folder"), "{error}");
        assert!(!to.parent().unwrap().join("escaped").exists());
        fs::remove_dir_all(&to).unwrap();
    }

    #[test]
    fn links_are_judged_by_their_text() {
        for (path, target, inside) in [
            ("a", "b", true),
            ("a/b", "../c", true),
            ("a/b", "../../c", false),
            ("a", "/etc", false),
            ("a/b/c", "./../d/../e", true),
            ("a", "..", false),
        ] {
            assert_eq!(
                stays_inside(Path::new(path), Path::new(target)),
                inside,
                "{path} -> {target}"
            );
        }
    }
}
