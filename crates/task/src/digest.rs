//! The digest of a task: SHA-256 over a length-prefixed encoding of everything in it but the
//! digest itself. Two tasks have the same digest exactly when all other fields are equal.

use std::{collections::BTreeMap, path::Path};

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{Contract, Environment, Grading, Payload, Step, Task, TaskFile};

struct Feed(Sha256);

impl Feed {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    fn path(&mut self, path: &Path) {
        self.bytes(path.as_os_str().as_encoded_bytes());
    }

    fn count(&mut self, count: usize) {
        self.0.update((count as u64).to_le_bytes());
    }

    fn files(&mut self, files: &[TaskFile]) {
        self.count(files.len());
        for file in files {
            self.path(&file.path);
            self.bytes(&file.content);
            self.count(usize::from(file.executable));
        }
    }

    /// Order of keys does not count: formats do not keep it.
    fn value(&mut self, value: &Value) {
        match value {
            Value::Array(items) => {
                self.text("array");
                self.count(items.len());
                for item in items {
                    self.value(item);
                }
            }
            Value::Object(items) => {
                self.text("object");
                self.count(items.len());
                for (key, item) in items.iter().collect::<BTreeMap<_, _>>() {
                    self.text(key);
                    self.value(item);
                }
            }
            leaf => self.text(&leaf.to_string()),
        }
    }

    /// A part in its JSON form. These types hold text, numbers and lists: they always have one.
    fn said(&mut self, part: &impl serde::Serialize) {
        let value = serde_json::to_value(part).unwrap_or_default();
        self.value(&value);
    }

    fn verifier(&mut self, task: &Task) {
        let verifier = &task.verifier;
        self.files(&verifier.files);
        self.path(&verifier.folder);
        self.count(verifier.argv.len());
        for argument in &verifier.argv {
            self.text(argument);
        }
        self.count(usize::from(verifier.cwd.is_some()));
        if let Some(cwd) = &verifier.cwd {
            self.path(cwd);
        }
        self.0.update(verifier.timeout_s.to_le_bytes());
        self.text(match verifier.contract {
            Contract::LastLine => "last-line",
            Contract::LastLineOrZero => "last-line-or-zero",
            Contract::RewardFile => "reward-file",
            Contract::OfficeAnswer => "office-answer",
            Contract::Audit => "audit",
            Contract::None => "none",
        });
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Bash(command) => {
                self.text("bash");
                self.text(command);
            }
            Step::Read(path) => {
                self.text("read");
                self.path(path);
            }
            Step::Write(path, text) => {
                self.text("write");
                self.path(path);
                self.text(text);
            }
            Step::Edit(path, old, new) => {
                self.text("edit");
                self.path(path);
                self.text(old);
                self.text(new);
            }
            Step::Say(text) => {
                self.text("say");
                self.text(text);
            }
        }
    }
}

/// Digest of all that scores a task, lower-case hexadecimal: the verifier and the grading.
#[must_use]
pub fn verifier_digest(task: &Task) -> String {
    let mut feed = Feed(Sha256::new());
    feed.text("verifier");
    feed.verifier(task);
    feed.said(&(task.verifier.payload, &task.verifier.env));
    feed.said(&task.grading);
    hex::encode(feed.0.finalize())
}

/// Digest of a task, lower-case hexadecimal. The task's own `digest` field is not part of it.
#[must_use]
pub fn digest(task: &Task) -> String {
    let mut feed = Feed(Sha256::new());
    feed.text("task 1");
    feed.text(task.id.as_str());
    feed.text(&task.family);
    feed.text(&task.instruction);
    feed.files(&task.files);
    feed.path(&task.workspace);
    feed.path(&task.home);
    feed.verifier(task);
    feed.count(task.solution.len());
    for step in &task.solution {
        feed.step(step);
    }
    feed.count(task.metadata.len());
    for (key, value) in &task.metadata {
        feed.text(key);
        feed.value(value);
    }
    let verifier = &task.verifier;
    // What came later than "task 1" is fed only where it says something, so that older tasks keep
    // their digests. The words keep the parts apart.
    if verifier.payload != Payload::None || !verifier.env.is_empty() {
        feed.text("verifier 2");
        feed.said(&(verifier.payload, &verifier.env));
    }
    if task.grading != Grading::default() {
        feed.text("grading");
        feed.said(&task.grading);
    }
    if task.environment != Environment::default() {
        feed.text("environment");
        feed.said(&task.environment);
    }
    for stage in &task.environment.stages {
        feed.text("stage");
        feed.files(&stage.files);
        if let Some(verifier) = &stage.verifier {
            feed.files(&verifier.files);
            feed.0.update(verifier.timeout_s.to_le_bytes());
            feed.said(&verifier.env);
        }
        for step in &stage.solution {
            feed.step(step);
        }
    }
    hex::encode(feed.0.finalize())
}

/// Digest of a set: over the digests of its tasks, in order. Lower-case hexadecimal.
#[must_use]
pub fn set_digest<'a>(tasks: impl IntoIterator<Item = &'a Task>) -> String {
    let mut feed = Feed(Sha256::new());
    feed.text("set 1");
    for task in tasks {
        feed.text(&task.digest);
    }
    hex::encode(feed.0.finalize())
}
