//! Strict reading of other people's JSON, YAML and table rows: every refusal names file, line
//! where it is known, field with dots, what was expected and what was found.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::{TaskError, tree};

/// An object that is taken apart key by key.
#[derive(Debug)]
pub(crate) struct Fields {
    file: PathBuf,
    line: Option<usize>,
    /// Where the object is in its file, e.g. `services[1].`; empty at the top.
    place: String,
    values: Map<String, Value>,
}

/// A complaint about a file.
pub(crate) fn wrong(
    file: &Path,
    line: Option<usize>,
    field: &str,
    expected: &str,
    found: impl Into<String>,
) -> TaskError {
    TaskError::Field {
        file: file.to_path_buf(),
        line,
        field: field.into(),
        expected: expected.to_owned(),
        found: found.into(),
        hint: "correct the file",
    }
}

fn shown(found: &Value) -> String {
    match found {
        Value::Null => "nothing".to_owned(),
        other => other.to_string().chars().take(120).collect(),
    }
}

impl Fields {
    /// The object of a JSON text.
    pub(crate) fn json(text: &str, file: &Path, line: Option<usize>) -> Result<Self, TaskError> {
        let value = serde_json::from_str(text).map_err(|error| {
            let at = line.map_or(error.line(), |line| line + error.line() - 1);
            wrong(file, Some(at), "the file", "JSON", error.to_string())
        })?;
        Self::of(value, file, line)
    }

    /// The object of a YAML text that begins on a line of the file.
    pub(crate) fn yaml(text: &str, file: &Path, first: usize) -> Result<Self, TaskError> {
        let value: Value = serde_yaml_ng::from_str(text).map_err(|error| {
            let line = error.location().map(|place| place.line() + first - 1);
            wrong(file, line, "the file", "YAML", error.to_string())
        })?;
        Self::of(value, file, None)
    }

    /// The object of a JSON file.
    pub(crate) fn json_file(file: &Path) -> Result<Self, TaskError> {
        Self::json(&tree::read_text(file)?, file, None)
    }

    /// The object of a YAML file.
    pub(crate) fn yaml_file(file: &Path) -> Result<Self, TaskError> {
        Self::yaml(&tree::read_text(file)?, file, 1)
    }

    /// An object that was read otherwise.
    pub(crate) fn of(value: Value, file: &Path, line: Option<usize>) -> Result<Self, TaskError> {
        match value {
            Value::Object(values) => Ok(Self {
                file: file.to_path_buf(),
                line,
                place: String::new(),
                values,
            }),
            other => Err(wrong(file, line, "the file", "an object", shown(&other))),
        }
    }

    /// A complaint about a key.
    pub(crate) fn wrong(&self, key: &str, expected: &str, found: &Value) -> TaskError {
        let field = format!("{}{key}", self.place);
        wrong(&self.file, self.line, &field, expected, shown(found))
    }

    /// Takes whatever a key holds; `None` for null and for nothing.
    pub(crate) fn any(&mut self, key: &str) -> Option<Value> {
        self.values.remove(key).filter(|value| !value.is_null())
    }

    /// Whether a key is there and not null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(|value| !value.is_null())
    }

    /// What is left: keys that the reader does not know, kept for the record.
    pub(crate) fn rest(self) -> Map<String, Value> {
        self.values
    }

    /// Complains about keys that were not taken. For formats that forbid them.
    pub(crate) fn refuse_rest(&self) -> Result<(), TaskError> {
        match self.values.keys().next() {
            None => Ok(()),
            Some(key) => Err(self.wrong(key, "no such key", &"an unknown key".into())),
        }
    }

    /// Takes a text that must be there and hold more than blanks.
    pub(crate) fn text(&mut self, key: &str) -> Result<String, TaskError> {
        match self.any(key) {
            Some(Value::String(text)) if !text.trim().is_empty() => Ok(text),
            other => Err(self.wrong(key, "a text", &other.unwrap_or_default())),
        }
    }

    /// Takes a text that may be missing.
    pub(crate) fn text_or(&mut self, key: &str, default: &str) -> Result<String, TaskError> {
        Ok(self.maybe_text(key)?.unwrap_or_else(|| default.to_owned()))
    }

    /// Takes a text that may be missing.
    pub(crate) fn maybe_text(&mut self, key: &str) -> Result<Option<String>, TaskError> {
        match self.any(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, "a text", &other)),
        }
    }

    /// Takes a finite number that may be missing.
    pub(crate) fn number(&mut self, key: &str) -> Result<Option<f64>, TaskError> {
        match self.any(key) {
            None => Ok(None),
            Some(value) => match value.as_f64().filter(|number| number.is_finite()) {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong(key, "a finite number", &value)),
            },
        }
    }

    /// Takes a whole number that may be missing.
    pub(crate) fn whole(
        &mut self,
        key: &str,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<Option<u64>, TaskError> {
        let Some(value) = self.any(key) else {
            return Ok(None);
        };
        let whole = value.as_u64().or_else(|| {
            value
                .as_f64()
                .filter(|number| number.fract() == 0.0 && *number >= 0.0 && *number < 1e15)
                .map(|number| number as u64)
        });
        match whole {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            _ => {
                let expected = format!("a whole number from {} to {}", range.start(), range.end());
                Err(self.wrong(key, &expected, &value))
            }
        }
    }

    /// Takes a truth value that may be missing.
    pub(crate) fn flag(&mut self, key: &str) -> Result<Option<bool>, TaskError> {
        match self.any(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(self.wrong(key, "true or false", &other)),
        }
    }

    /// Takes a list that may be missing (then empty).
    pub(crate) fn list(&mut self, key: &str) -> Result<Vec<Value>, TaskError> {
        match self.any(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(items)) => Ok(items),
            Some(other) => Err(self.wrong(key, "a list", &other)),
        }
    }

    /// Takes a list of texts that may be missing (then empty).
    pub(crate) fn texts(&mut self, key: &str) -> Result<Vec<String>, TaskError> {
        let items = self.list(key)?;
        let mut texts = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            match item {
                Value::String(text) => texts.push(text),
                other => return Err(self.wrong(&format!("{key}[{index}]"), "a text", &other)),
            }
        }
        Ok(texts)
    }

    /// Takes a list of objects that may be missing (then empty).
    pub(crate) fn objects(&mut self, key: &str) -> Result<Vec<Self>, TaskError> {
        let items = self.list(key)?;
        let mut objects = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            objects.push(self.inner(&format!("{key}[{index}]"), item)?);
        }
        Ok(objects)
    }

    /// Takes an object that may be missing.
    pub(crate) fn object(&mut self, key: &str) -> Result<Option<Self>, TaskError> {
        match self.any(key) {
            None => Ok(None),
            Some(value) => self.inner(key, value).map(Some),
        }
    }

    /// Takes an object of texts (numbers and truth values are written out) that may be missing.
    pub(crate) fn environment(
        &mut self,
        key: &str,
    ) -> Result<std::collections::BTreeMap<String, String>, TaskError> {
        let Some(inner) = self.object(key)? else {
            return Ok(Default::default());
        };
        let mut found = std::collections::BTreeMap::new();
        for (name, value) in &inner.values {
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Number(_) | Value::Bool(_) => value.to_string(),
                other => return Err(inner.wrong(name, "a text", other)),
            };
            found.insert(name.clone(), text);
        }
        Ok(found)
    }

    fn inner(&self, key: &str, value: Value) -> Result<Self, TaskError> {
        match value {
            Value::Object(values) => Ok(Self {
                file: self.file.clone(),
                line: self.line,
                place: format!("{}{key}.", self.place),
                values,
            }),
            other => Err(self.wrong(key, "an object", &other)),
        }
    }

    /// Takes a task's id.
    pub(crate) fn id(&mut self, key: &str) -> Result<record::TaskId, TaskError> {
        let text = self.text(key)?;
        self.as_id(key, &text)
    }

    /// A text as a task's id.
    pub(crate) fn as_id(&self, key: &str, text: &str) -> Result<record::TaskId, TaskError> {
        record::TaskId::new(text).map_err(|_| self.wrong(key, tree::ID_EXPECTED, &text.into()))
    }
}

/// Any text as an id: what ids forbid becomes `-`, and the rest is cut. For formats whose names
/// are paths; the caller keeps the original in the metadata.
pub(crate) fn id_of(text: &str) -> String {
    let clean: String = text
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':') {
                c
            } else {
                '-'
            }
        })
        .take(record::id::ID_BYTES_MAX)
        .collect();
    clean
        .trim_start_matches(|c: char| !c.is_ascii_alphanumeric())
        .to_owned()
}
