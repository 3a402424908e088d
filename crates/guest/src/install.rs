//! `guest install PLAN`: prepares a sandbox from an init container, whose image is the sandbox's
//! own: copies what the image has where the sandbox's folders will be, and writes lists of users
//! and groups that know the sandbox's user. The folders belong to him afterwards.
//!
//! Started as root it needs CAP_CHOWN. Started as the sandbox's user it copies what he may read,
//! and what he may not is an error: a workspace with holes would be a wrong task.

use std::{fs, io, io::Write, os::unix::fs::PermissionsExt, path::Path, process::ExitCode};

use rustix::{
    fs::{AtFlags, CWD},
    thread::{Gid, Uid},
};

use crate::{
    archive,
    protocol::{InstallPlan, UID},
    user,
};

/// Files, folders and links of an image in one folder.
const ENTRIES_MAX: u64 = 1_000_000;

/// Prepares; the exit code says whether all of it was done.
pub fn run(mut arguments: impl Iterator<Item = String>) -> ExitCode {
    let plan = arguments
        .next()
        .ok_or_else(|| "no plan given".to_owned())
        .and_then(|text| {
            serde_json::from_str::<InstallPlan>(&text).map_err(|e| format!("bad plan: {e}"))
        });
    match plan.and_then(|plan| install(&plan)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            let _ = writeln!(io::stderr(), "guest install: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn install(plan: &InstallPlan) -> Result<(), String> {
    for (from, into) in &plan.copies {
        copy_folder(from, into)?;
    }
    let user = format!("agent:x:{UID}:{UID}::{}:/bin/sh", plan.home.display());
    for (name, line) in [("passwd", user), ("group", format!("agent:x:{UID}:"))] {
        let old = Path::new("/etc").join(name);
        let text = user::read_list(&old, user::LIST_BYTES_MAX).map_err(|e| e.to_string())?;
        let new = plan.users.join(name);
        fs::write(
            &new,
            user::with_number(&text.unwrap_or_default(), UID, &line),
        )
        .map_err(|e| format!("{}: {e}", new.display()))?;
    }
    Ok(())
}

/// Copies what is below `from`, if that is a folder, and gives all of `into` to the sandbox's user.
fn copy_folder(from: &Path, into: &Path) -> Result<(), String> {
    let say = |path: &Path, error: io::Error| format!("{}: {error}", path.display());
    fs::create_dir_all(into).map_err(|e| say(into, e))?;
    let mut modes = vec![(into.to_owned(), 0o755)];
    let entries = match fs::metadata(from) {
        Ok(metadata) if metadata.is_dir() => {
            archive::walk(from, ENTRIES_MAX).map_err(|e| say(from, e))?
        }
        Ok(_) => return Err(format!("{}: in the image it is no folder", from.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(say(from, error)),
    };
    for (path, metadata) in entries {
        let (old, new) = (from.join(&path), into.join(&path));
        let kind = metadata.file_type();
        if kind.is_dir() {
            // A folder that cannot be read would look like an empty one.
            fs::read_dir(&old).map_err(|e| say(&old, e))?;
            fs::create_dir_all(&new).map_err(|e| say(&new, e))?;
            modes.push((new, metadata.permissions().mode() & 0o7777));
        } else if kind.is_symlink() {
            let target = fs::read_link(&old).map_err(|e| say(&old, e))?;
            std::os::unix::fs::symlink(target, &new).map_err(|e| say(&new, e))?;
            give(&new).map_err(|e| say(&new, e))?;
        } else if kind.is_file() {
            fs::copy(&old, &new).map_err(|e| say(&old, e))?;
            give(&new).map_err(|e| say(&new, e))?;
        }
    }
    // Last, the deepest first: a folder that may not be written has to be filled before.
    for (folder, mode) in modes.into_iter().rev() {
        // Of a folder that somebody else made for us, as the cluster does, we are not the owner.
        let _ = fs::set_permissions(&folder, fs::Permissions::from_mode(mode));
        give(&folder).map_err(|e| say(&folder, e))?;
    }
    Ok(())
}

/// Root gives it away; everybody else owns what he made.
fn give(path: &Path) -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(UID), Gid::from_raw(UID));
    rustix::fs::chownat(CWD, path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn a_folder_of_an_image_arrives_whole() {
        let folder = std::env::temp_dir().join(format!("espalier-install-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        let (from, into) = (folder.join("from"), folder.join("into"));
        fs::create_dir_all(from.join("locked/deep")).unwrap();
        fs::write(from.join("locked/deep/file"), "text").unwrap();
        fs::write(from.join("script"), "#!/bin/sh\n").unwrap();
        std::os::unix::fs::symlink("/elsewhere", from.join("link")).unwrap();
        let mode = |path: PathBuf, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(from.join("script"), 0o750);
        mode(from.join("locked"), 0o555);
        copy_folder(&from, &into).unwrap();
        let text = fs::read_to_string(into.join("locked/deep/file")).unwrap();
        assert_eq!(text, "text");
        let of = |path: &str| {
            let metadata = fs::metadata(into.join(path)).unwrap();
            metadata.permissions().mode() & 0o7777
        };
        assert_eq!((of("script"), of("locked")), (0o750, 0o555));
        assert_eq!(
            fs::read_link(into.join("link")).unwrap(),
            Path::new("/elsewhere")
        );
        // What is not in the image is an empty folder.
        copy_folder(&folder.join("no"), &folder.join("empty")).unwrap();
        assert_eq!(fs::read_dir(folder.join("empty")).unwrap().count(), 0);
        // A file in its place is a wrong image.
        let wrong = copy_folder(&from.join("script"), &folder.join("x")).unwrap_err();
        assert!(wrong.contains("no folder"), "{wrong}");
        for path in ["from/locked", "into/locked"] {
            mode(folder.join(path), 0o755);
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
