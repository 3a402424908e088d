//! What a family hands back, and the words with which it says what the world must look like
//! afterwards. The words become one POSIX shell script.

use std::path::PathBuf;

use super::dice::Dice;
use crate::{Step, TaskFile};

/// A chore before it has a name.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) instruction: String,
    pub(super) files: Vec<TaskFile>,
    pub(super) steps: Vec<Step>,
    checks: Vec<String>,
}

/// Functions of every verifier. `head` bounds what is read when the agent left something huge.
/// Each check ends the script with 0 when it does not hold; the last line of the script says 1.
const PRELUDE: &str = r#"no() { echo 0; exit 0; }
plain() { [ -f "$1" ] && [ ! -L "$1" ] || no; }
same() { plain "$1"; [ "$(head -c 9999 "$1"; echo .)" = "$2." ] || no; }
holds() { plain "$1"; [ "$(head -c 9999 "$1")" = "$2" ] || no; }
tight() { plain "$1"; [ "$(head -c 9999 "$1" | tr -d "$3")" = "$2" ] || no; }
gone() { [ ! -e "$1" ] && [ ! -L "$1" ] || no; }
folder() { [ -d "$1" ] && [ ! -L "$1" ] || no; }
"#;

/// Text as one word of a POSIX shell.
pub(crate) fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

impl Draft {
    /// Sets the instruction: one of the phrasings, `{a}`, `{b}` … replaced by the values in order.
    pub(super) fn ask(&mut self, dice: &mut Dice, phrasings: &[&str], values: &[&str]) {
        self.instruction = fill(dice.pick(phrasings), values);
    }

    /// An initial file.
    pub(super) fn file(&mut self, path: &str, content: &str) {
        self.files.push(TaskFile {
            path: PathBuf::from(path),
            content: content.as_bytes().to_vec(),
            executable: false,
        });
    }

    /// An initial file that must still be there, byte for byte, at the end.
    pub(super) fn kept(&mut self, path: &str, content: &str) {
        self.file(path, content);
        self.same(path, content);
    }

    /// Solution: a shell command.
    pub(super) fn bash(&mut self, command: impl Into<String>) {
        self.steps.push(Step::Bash(command.into()));
    }

    /// Solution: read a file.
    pub(super) fn read(&mut self, path: &str) {
        self.steps.push(Step::Read(path.into()));
    }

    /// Solution: look at a file, by `cat` or by the tool for reading.
    pub(super) fn look(&mut self, dice: &mut Dice, path: &str) {
        if dice.below(4) == 0 {
            self.read(path);
        } else {
            self.bash(format!("cat {path}"));
        }
    }

    /// Solution: write one line to a file, by `echo` or by the tool for writing.
    pub(super) fn put(&mut self, dice: &mut Dice, path: &str, line: &str) {
        if dice.below(4) == 0 {
            self.steps
                .push(Step::Write(path.into(), format!("{line}\n")));
        } else {
            self.bash(format!("echo {line} > {path}"));
        }
    }

    /// Solution: replace a text, by `sed` or by the tool for editing. The texts hold no character
    /// that is special to either.
    pub(super) fn swap(&mut self, dice: &mut Dice, path: &str, old: &str, new: &str) {
        if dice.below(3) == 0 {
            self.steps
                .push(Step::Edit(path.into(), old.into(), new.into()));
        } else {
            self.bash(format!("sed -i 's/{old}/{new}/' {path}"));
        }
    }

    /// Check: the file holds exactly this.
    pub(super) fn same(&mut self, path: &str, content: &str) {
        self.checks
            .push(format!("same {} {}", quote(path), quote(content)));
    }

    /// Check: the file holds exactly this, whatever the number of newlines at its end.
    pub(super) fn holds(&mut self, path: &str, content: &str) {
        self.checks.push(format!(
            "holds {} {}",
            quote(path),
            quote(content.trim_end_matches('\n'))
        ));
    }

    /// Check: the file holds this when spaces and tabs are left out of both.
    pub(super) fn holds_spaced(&mut self, path: &str, content: &str) {
        let tight = content.replace([' ', '\t'], "");
        self.checks.push(format!(
            "tight {} {} ' \\t'",
            quote(path),
            quote(tight.trim_end_matches('\n'))
        ));
    }

    /// Check: the file holds this when all white space is left out of both.
    pub(super) fn holds_reflowed(&mut self, path: &str, content: &str) {
        let tight = content.replace([' ', '\t', '\n'], "");
        self.checks.push(format!(
            "tight {} {} ' \\t\\r\\n'",
            quote(path),
            quote(&tight)
        ));
    }

    /// Check: nothing is there.
    pub(super) fn gone(&mut self, path: &str) {
        self.checks.push(format!("gone {}", quote(path)));
    }

    /// Check: a folder is there.
    pub(super) fn folder(&mut self, path: &str) {
        self.checks.push(format!("folder {}", quote(path)));
    }

    /// Check: any shell code that calls `no` when it is not satisfied.
    pub(super) fn check(&mut self, code: impl Into<String>) {
        self.checks.push(code.into());
    }

    /// The verifier: prints 1 when all checks hold, else 0.
    pub(super) fn script(&self) -> String {
        format!("{PRELUDE}{}\necho 1\n", self.checks.join("\n"))
    }
}

/// Replaces `{a}` by the first value, `{b}` by the second …
pub(super) fn fill(template: &str, values: &[&str]) -> String {
    let mut text = template.to_owned();
    for (letter, value) in ('a'..='z').zip(values) {
        text = text.replace(&format!("{{{letter}}}"), value);
    }
    text
}
