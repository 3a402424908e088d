//! Folders of tasks that tests make.
#![allow(clippy::unwrap_used, unreachable_pub, reason = "helpers of tests")]

use std::{fs, path::Path};

use task::{Task, load_dir};
use tempfile::{TempDir, tempdir};

/// A folder with these files.
pub fn tree(files: &[(&str, &str)]) -> TempDir {
    let folder = tempdir().unwrap();
    for (path, text) in files {
        let place = folder.path().join(path);
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::write(place, text).unwrap();
    }
    folder
}

/// The one task of a folder.
pub fn only(folder: &Path) -> Task {
    let mut tasks = load_dir(folder).unwrap();
    assert_eq!(tasks.len(), 1);
    tasks.remove(0)
}
