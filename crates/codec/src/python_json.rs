//! JSON and values as Python prints them: `json.dumps` and `repr`. Templates were written for
//! Python, and one space more or less is another prompt.

use std::fmt::Write;

use serde_json::Value;

/// The options of `json.dumps` that templates use.
#[derive(Debug, Clone)]
pub struct Style {
    /// Between items.
    pub item_separator: String,
    /// Between key and value.
    pub key_separator: String,
    /// Spaces per level; `None` prints one line.
    pub indent: Option<usize>,
    /// Whether other characters than ASCII are escaped.
    pub ensure_ascii: bool,
    /// Whether keys are sorted.
    pub sort_keys: bool,
}

impl Style {
    /// The defaults of Python, but for `ensure_ascii=False` as chat templates have it. With an
    /// indent Python leaves out the space behind commas.
    #[must_use]
    pub fn new(indent: Option<usize>) -> Self {
        Self {
            item_separator: if indent.is_some() { "," } else { ", " }.into(),
            key_separator: ": ".into(),
            indent,
            ensure_ascii: false,
            sort_keys: false,
        }
    }
}

/// `json.dumps(value)`.
#[must_use]
pub fn dumps(value: &Value, style: &Style) -> String {
    let mut out = String::new();
    write_json(value, style, 0, &mut out);
    out
}

fn newline(style: &Style, level: usize, out: &mut String) {
    if let Some(indent) = style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', indent * level));
    }
}

fn write_json(value: &Value, style: &Style, level: usize, out: &mut String) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(yes) => out.push_str(if *yes { "true" } else { "false" }),
        Value::Number(number) => out.push_str(&python_number(number)),
        Value::String(text) => write_string(text, style.ensure_ascii, out),
        Value::Array(items) if items.is_empty() => out.push_str("[]"),
        Value::Object(object) if object.is_empty() => out.push_str("{}"),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push_str(&style.item_separator);
                }
                newline(style, level + 1, out);
                write_json(item, style, level + 1, out);
            }
            newline(style, level, out);
            out.push(']');
        }
        Value::Object(object) => {
            let mut entries: Vec<_> = object.iter().collect();
            if style.sort_keys {
                entries.sort_by(|a, b| a.0.cmp(b.0));
            }
            out.push('{');
            for (index, (key, item)) in entries.into_iter().enumerate() {
                if index > 0 {
                    out.push_str(&style.item_separator);
                }
                newline(style, level + 1, out);
                write_string(key, style.ensure_ascii, out);
                out.push_str(&style.key_separator);
                write_json(item, style, level + 1, out);
            }
            newline(style, level, out);
            out.push('}');
        }
    }
}

fn write_string(text: &str, ensure_ascii: bool, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || (ensure_ascii && c > '~') => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn python_number(number: &serde_json::Number) -> String {
    match number.as_f64() {
        Some(float) if number.is_f64() => python_float(float),
        _ => number.to_string(),
    }
}

/// `repr(float)`: the shortest digits that read back, an exponent below 1e-4 and from 1e16.
fn python_float(float: f64) -> String {
    if !float.is_finite() {
        return if float.is_nan() {
            "NaN".into()
        } else if float > 0.0 {
            "Infinity".into()
        } else {
            "-Infinity".into()
        };
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if float != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.abs())
    } else {
        let plain = format!("{float}");
        if plain.contains('.') {
            plain
        } else {
            plain + ".0"
        }
    }
}

/// `str(value)` for a string at the top, `repr(value)` inside: what `{{ value }}` prints.
#[must_use]
pub fn display(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => {
            let mut out = String::new();
            write_repr(other, &mut out);
            out
        }
    }
}

fn write_repr(value: &Value, out: &mut String) {
    match value {
        Value::Null => out.push_str("None"),
        Value::Bool(yes) => out.push_str(if *yes { "True" } else { "False" }),
        Value::Number(number) => out.push_str(&python_number(number)),
        Value::String(text) => {
            let quote = if text.contains('\'') && !text.contains('"') {
                '"'
            } else {
                '\''
            };
            out.push(quote);
            for c in text.chars() {
                match c {
                    '\\' => out.push_str("\\\\"),
                    '\n' => out.push_str("\\n"),
                    '\r' => out.push_str("\\r"),
                    '\t' => out.push_str("\\t"),
                    c if c == quote => {
                        out.push('\\');
                        out.push(c);
                    }
                    c if (c as u32) < 0x20 || c == '\u{7f}' => {
                        let _ = write!(out, "\\x{:02x}", c as u32);
                    }
                    c => out.push(c),
                }
            }
            out.push(quote);
        }
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(item, out);
            }
            out.push(']');
        }
        Value::Object(object) => {
            out.push('{');
            for (index, (key, item)) in object.iter().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(&Value::from(key.as_str()), out);
                out.push_str(": ");
                write_repr(item, out);
            }
            out.push('}');
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Printed by Python 3.
    #[test]
    fn as_python_prints_it() {
        let value = json!({"a": [1, -2.5, 1e16, 1e-5, 0.0001, 123_456_789_012_345.0, 1e22, 2.0],
            "é\n\"\\\t\u{1}\u{7f}/<&>'": null, "t": true, "e": {}, "l": [],
            "n": {"b": 1, "a": [{"x": false}]}});
        let mut style = Style::new(None);
        let text = dumps(&value, &style);
        let numbers = "1, -2.5, 1e+16, 1e-05, 0.0001, 123456789012345.0, 1e+22, 2.0";
        assert_eq!(
            text,
            format!(
                "{{\"a\": [{numbers}], \"é\\n\\\"\\\\\\t\\u0001\u{7f}/<&>'\": null, \"t\": true, \"e\": {{}}, \
                 \"l\": [], \"n\": {{\"b\": 1, \"a\": [{{\"x\": false}}]}}}}"
            )
        );
        style.ensure_ascii = true;
        assert!(dumps(&value, &style).contains(r#""\u00e9\n\"\\\t\u0001\u007f/<&>'""#));
        assert_eq!(dumps(&json!("🌱"), &style), r#""\ud83c\udf31""#);
        style = Style::new(None);
        style.sort_keys = true;
        (style.item_separator, style.key_separator) = (",".into(), ":".into());
        assert_eq!(
            dumps(&json!({"b": [1, 2], "a": {"d": 1, "c": 2}}), &style),
            r#"{"a":{"c":2,"d":1},"b":[1,2]}"#
        );
        assert_eq!(
            dumps(&json!({"b": [1, {}], "a": []}), &Style::new(Some(2))),
            "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": []\n}"
        );
    }

    #[test]
    fn as_python_displays_it() {
        let value = json!(["it's", "a\"b", "both'\"", "\u{1}\u{7f}\n", null, true, {"k": 1.0}]);
        assert_eq!(
            display(&value),
            r#"["it's", 'a"b', 'both\'"', '\x01\x7f\n', None, True, {'k': 1.0}]"#
        );
        assert_eq!(display(&json!("plain 'text'")), "plain 'text'");
    }
}
