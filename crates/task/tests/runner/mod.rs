//! Plays chores in a temporary folder with the shell of this machine: enough to prove the
//! verifiers, without any sandbox.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use task::{Task, TaskFile};

pub(crate) fn put(folder: &Path, files: &[TaskFile]) {
    fs::create_dir_all(folder).unwrap();
    for file in files {
        let path = folder.join(&file.path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &file.content).unwrap();
        let mode = if file.executable { 0o755 } else { 0o644 };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
}

pub(crate) fn shell(folder: &Path, command: &str) -> String {
    let output = Command::new("bash")
        .args(["-c", command])
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{command}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Runs the verifier; its last line.
pub(crate) fn score(folder: &Path, task: &Task) -> String {
    let verifier = &task.verifier;
    let place = folder.join(&verifier.folder);
    put(&place, &verifier.files);
    let output = Command::new(&verifier.argv[0])
        .args(&verifier.argv[1..])
        .current_dir(folder)
        .output()
        .unwrap();
    fs::remove_dir_all(place).unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{}: {}",
        task.id,
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().last().unwrap_or_default().to_owned()
}
