//! Plays chores in a temporary folder with the shell of this machine: enough to prove the
//! verifiers, without any sandbox.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use task::{Step, Task, TaskFile};

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

pub(crate) fn play(folder: &Path, step: &Step) -> String {
    match step {
        Step::Bash(command) => shell(folder, command),
        Step::Read(path) => fs::read_to_string(folder.join(path)).unwrap(),
        Step::Write(path, text) => {
            fs::write(folder.join(path), text).unwrap();
            String::new()
        }
        Step::Edit(path, old, new) => {
            let text = fs::read_to_string(folder.join(path)).unwrap();
            assert!(text.contains(old.as_str()), "{path:?} has no {old:?}");
            fs::write(folder.join(path), text.replacen(old.as_str(), new, 1)).unwrap();
            String::new()
        }
        Step::Say(_) => String::new(),
    }
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
