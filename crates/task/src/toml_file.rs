//! TOML in, with errors that name file, line, key, what was expected and what was found.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::TaskError;

/// Parses the text of a file.
///
/// # Errors
/// [`TaskError::Field`].
pub(crate) fn parse<T: DeserializeOwned>(text: &str, file: &Path) -> Result<T, TaskError> {
    toml::from_str(text).map_err(|error| {
        let (field, expected, found) = explain(text, &error);
        TaskError::Field {
            file: file.to_path_buf(),
            line: error
                .span()
                .map(|span| text[..span.start].matches('\n').count() + 1),
            field: field.into(),
            expected,
            found,
            hint: "correct the file",
        }
    })
}

/// Key, expected and found of a parse error.
fn explain(text: &str, error: &toml::de::Error) -> (String, String, String) {
    let message = error.message();
    let at = error.span().map_or("", |span| &text[span]).trim();
    let quoted = message.split('`').nth(1).unwrap_or("").to_owned();
    if message.starts_with("unknown field") {
        let expected = message
            .split_once("expected ")
            .map_or("no such key", |(_, rest)| rest);
        (quoted, expected.to_owned(), "an unknown key".to_owned())
    } else if message.starts_with("missing field") {
        (quoted, "a value".to_owned(), "nothing".to_owned())
    } else if let Some((found, expected)) = message.split_once(", expected ") {
        // The key stands before the value that the error points at.
        let key = error
            .span()
            .and_then(|span| text[..span.start].lines().last())
            .and_then(|line| line.split_once('='))
            .map_or("", |(key, _)| key.trim());
        let key = if key.is_empty() { "value" } else { key };
        (key.to_owned(), expected.to_owned(), found.to_owned())
    } else {
        let found: String = at.chars().take(40).collect();
        (
            "syntax".to_owned(),
            message.to_owned(),
            format!("{found:?}"),
        )
    }
}

/// Line from 1 on which a key is set, when it is written in the plain way.
pub(crate) fn line_of_key(text: &str, key: &str) -> Option<usize> {
    text.lines()
        .position(|line| {
            line.trim_start()
                .strip_prefix(key)
                .is_some_and(|rest| rest.trim_start().starts_with('='))
        })
        .map(|index| index + 1)
}
