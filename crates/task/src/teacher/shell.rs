//! File steps as shell commands, for harnesses that offer nothing else.

use std::path::Path;

use crate::chores::quote;

/// A path as one word; quoted only when it must be, because short commands are easier to learn.
fn word(path: &Path) -> String {
    let text = path.to_string_lossy();
    let text = if text.starts_with('-') {
        format!("./{text}")
    } else {
        text.into_owned()
    };
    let harmless = |letter: char| letter.is_ascii_alphanumeric() || "._/-".contains(letter);
    if !text.is_empty() && text.chars().all(harmless) {
        text
    } else {
        quote(&text)
    }
}

/// Prints a file.
pub(super) fn read(path: &Path) -> String {
    format!("cat {}", word(path))
}

/// Writes a file, parents included.
pub(super) fn write(path: &Path, text: &str) -> String {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => {
            format!("mkdir -p {} && ", word(parent))
        }
        _ => String::new(),
    };
    match text.strip_suffix('\n') {
        Some(line) if !line.contains('\n') => {
            format!("{parent}printf '%s\\n' {} > {}", quote(line), word(path))
        }
        _ => format!("{parent}printf %s {} > {}", quote(text), word(path)),
    }
}

/// Replaces the first occurrence of a text. `sed` when both texts are within a line, else Python.
pub(super) fn edit(path: &Path, old: &str, new: &str) -> String {
    if old.is_empty() || old.contains('\n') || new.contains('\n') {
        let program = "import sys; p, a, b = sys.argv[1:]; t = open(p).read(); open(p, \"w\").write(t.replace(a, b, 1))";
        return format!(
            "python3 -c {} {} {} {}",
            quote(program),
            word(path),
            quote(old),
            quote(new)
        );
    }
    let escaped = |text: &str, special: &str| -> String {
        text.chars()
            .flat_map(|letter| {
                special
                    .contains(letter)
                    .then_some('\\')
                    .into_iter()
                    .chain([letter])
            })
            .collect()
    };
    let program = format!(
        "0,/{0}/s/{0}/{1}/",
        escaped(old, r"\/.*[]^$"),
        escaped(new, r"\/&")
    );
    format!("sed -i {} {}", quote(&program), word(path))
}
