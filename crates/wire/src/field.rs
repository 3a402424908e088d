//! Reading fields: absent and `null` are the same; another type is an error with its path.

use serde_json::{Map, Value};

use crate::WireError;

/// Characters of a client's text that a refusal shows.
const SHOWN_CHARS_MAX: usize = 80;

fn cut(text: &str) -> String {
    let mut cut: String = text.chars().take(SHOWN_CHARS_MAX).collect();
    if cut.len() < text.len() {
        cut.push('…');
    }
    cut
}

/// A name that a client gave to something, as a refusal shows it.
pub(crate) fn named(name: &str) -> String {
    format!("{:?}", cut(name))
}

/// The refusal of `value` at `path`.
pub(crate) fn refuse(path: impl Into<String>, expected: &'static str, value: &Value) -> WireError {
    WireError::Field {
        path: path.into(),
        expected,
        found: cut(&value.to_string()),
    }
}

/// A field that is there and not `null`.
pub(crate) fn present<'a>(object: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    object.get(name).filter(|value| !value.is_null())
}

/// An optional text.
pub(crate) fn text<'a>(
    object: &'a Map<String, Value>,
    path: &str,
    name: &str,
) -> Result<Option<&'a str>, WireError> {
    present(object, name)
        .map(|value| {
            value
                .as_str()
                .ok_or_else(|| refuse(format!("{path}{name}"), "a string", value))
        })
        .transpose()
}

/// An optional boolean.
pub(crate) fn flag(
    object: &Map<String, Value>,
    path: &str,
    name: &str,
) -> Result<Option<bool>, WireError> {
    present(object, name)
        .map(|value| {
            value
                .as_bool()
                .ok_or_else(|| refuse(format!("{path}{name}"), "true or false", value))
        })
        .transpose()
}

/// An optional number of at least `min`.
pub(crate) fn number(
    object: &Map<String, Value>,
    name: &str,
    expected: &'static str,
    min: f64,
    max: f64,
) -> Result<Option<f32>, WireError> {
    present(object, name)
        .map(|value| {
            value
                .as_f64()
                .filter(|number| (min..=max).contains(number))
                .map(|number| number as f32)
                .ok_or_else(|| refuse(name, expected, value))
        })
        .transpose()
}

/// An optional count. Numbers above `u32::MAX` are taken as `u32::MAX`; `1e3` and `7.0` count as
/// whole numbers, as JavaScript clients may write them.
pub(crate) fn count(
    object: &Map<String, Value>,
    name: &str,
    min: u32,
) -> Result<Option<u32>, WireError> {
    present(object, name)
        .map(|value| {
            value
                .as_f64()
                .filter(|number| number.fract() == 0.0 && *number >= f64::from(min))
                .map(|number| number as u32)
                .ok_or_else(|| refuse(name, "a whole number", value))
        })
        .transpose()
}

/// A list of texts, or one text; empty ones are left out.
pub(crate) fn strings(object: &Map<String, Value>, name: &str) -> Result<Vec<String>, WireError> {
    let list = match present(object, name) {
        None => return Ok(Vec::new()),
        Some(one @ Value::String(_)) => std::slice::from_ref(one),
        Some(Value::Array(many)) => many.as_slice(),
        Some(other) => return Err(refuse(name, "a string or strings", other)),
    };
    list.iter()
        .map(|item| {
            item.as_str()
                .map(str::to_owned)
                .ok_or_else(|| refuse(name, "strings", item))
        })
        .filter(|item| !matches!(item, Ok(text) if text.is_empty()))
        .collect()
}
