//! Reading vector files, comparing, reporting.

#[path = "evaluate.rs"]
mod evaluate;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde_json::{Map, Value};

/// Largest relative error that passes.
pub(crate) const RELATIVE_ERROR_MAX: f64 = 1e-5;

/// Below this size differences are taken as they are: the files round to 12 digits.
const SCALE_MIN: f64 = 1e-9;

/// Results of one function.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// Cases compared.
    pub(crate) cases: usize,
    /// Numbers compared.
    pub(crate) numbers: usize,
    /// Largest relative error.
    pub(crate) worst: f64,
    /// Where it is.
    pub(crate) place: String,
}

/// Results of a folder.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// By file and function.
    pub(crate) lines: BTreeMap<(String, String), Line>,
    /// What could not be compared: unknown functions and settings, missing or odd values.
    pub(crate) problems: BTreeMap<String, usize>,
    /// Files without `inputs` and `cases` of this layout.
    pub(crate) other_files: Vec<String>,
}

impl Report {
    /// Whether everything was compared and is near enough.
    pub(crate) fn passed(&self) -> bool {
        !self.lines.is_empty()
            && self.problems.is_empty()
            && self
                .lines
                .values()
                .all(|line| line.worst <= RELATIVE_ERROR_MAX)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<24} {:<30} {:>5} {:>7}  {:<9} worst at",
            "file", "function", "cases", "numbers", "worst"
        )?;
        for ((file, function), line) in &self.lines {
            let mark = if line.worst <= RELATIVE_ERROR_MAX {
                ""
            } else {
                "  FAILED"
            };
            writeln!(
                f,
                "{file:<24} {function:<30} {:>5} {:>7}  {:<9.1e} {}{mark}",
                line.cases, line.numbers, line.worst, line.place
            )?;
        }
        for file in &self.other_files {
            writeln!(f, "{file}: other layout, not a file of the objective")?;
        }
        for (problem, times) in &self.problems {
            writeln!(f, "NOT CHECKED ({times}x) {problem}")?;
        }
        let cases: usize = self.lines.values().map(|line| line.cases).sum();
        write!(
            f,
            "{cases} cases, {} functions, {}",
            self.lines.len(),
            if self.passed() { "passed" } else { "FAILED" }
        )
    }
}

/// Checks every vector file of a folder.
pub(crate) fn folder(path: &Path) -> Result<Report, String> {
    let mut files: Vec<_> = std::fs::read_dir(path)
        .map_err(|error| format!("{}: {error}", path.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|file| file.extension().is_some_and(|ending| ending == "json"))
        .collect();
    files.sort();
    let mut report = Report::default();
    for file in files {
        let name = file
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let text = std::fs::read_to_string(&file)
            .map_err(|error| format!("{}: {error}", file.display()))?;
        let root: Value =
            serde_json::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        one_file(&name, &root, &mut report);
    }
    Ok(report)
}

fn one_file(name: &str, root: &Value, report: &mut Report) {
    let cases = root.get("cases").and_then(Value::as_array);
    // Files of the model have weights beside their inputs and are the model's to check.
    let (Some(cases), true, false) = (
        cases,
        root.get("inputs").is_some(),
        root.get("weights").is_some(),
    ) else {
        report.other_files.push(name.to_owned());
        return;
    };
    for case in cases {
        let text = |key: &str| case.get(key).and_then(Value::as_str).unwrap_or_default();
        let (function, inputs_name) = (text("fn"), text("inputs"));
        let empty = Map::new();
        let params = case
            .get("params")
            .and_then(Value::as_object)
            .unwrap_or(&empty);
        let inputs = root["inputs"]
            .get(inputs_name)
            .and_then(Value::as_object)
            .unwrap_or(&empty);
        let expected = case.get("expect").unwrap_or(&Value::Null);
        let found = match evaluate::evaluate(function, inputs, params, expected) {
            Ok(found) => found,
            Err(problem) => {
                let problem = format!("{name} {function}: {problem}");
                *report.problems.entry(problem).or_default() += 1;
                continue;
            }
        };
        let key = (name.to_owned(), function.to_owned());
        let mut line = report.lines.remove(&key).unwrap_or_default();
        line.cases += 1;
        compare(expected, &found, inputs_name, &mut line, &mut |problem| {
            let problem = format!("{name} {function} {inputs_name}{problem}");
            *report.problems.entry(problem).or_default() += 1;
        });
        report.lines.insert(key, line);
    }
}

/// A number, or the words that stand for what JSON cannot say.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => match text.to_lowercase().as_str() {
            "inf" | "infinity" | "+inf" => Some(f64::INFINITY),
            "-inf" | "-infinity" => Some(f64::NEG_INFINITY),
            "nan" => Some(f64::NAN),
            _ => None,
        },
        _ => None,
    }
}

/// Zero for equal numbers, infinities and NaNs; else relative to the expected size.
fn relative_error(expected: f64, found: f64) -> f64 {
    if expected == found || (expected.is_nan() && found.is_nan()) {
        return 0.0;
    }
    let error = (expected - found).abs() / expected.abs().max(SCALE_MIN);
    if error.is_nan() { f64::INFINITY } else { error }
}

fn compare(
    expected: &Value,
    found: &Value,
    place: &str,
    line: &mut Line,
    problem: &mut dyn FnMut(String),
) {
    match (expected, found) {
        (Value::Object(expected), _) => {
            for (key, value) in expected {
                match found.get(key) {
                    Some(found) => compare(value, found, &format!("{place}.{key}"), line, problem),
                    None => problem(format!(": no value for {key}")),
                }
            }
        }
        (Value::Array(expected), Value::Array(found)) if expected.len() == found.len() => {
            for (at, (expected, found)) in expected.iter().zip(found).enumerate() {
                compare(expected, found, &format!("{place}[{at}]"), line, problem);
            }
        }
        // A refusal, in the same words.
        (Value::String(expected), Value::String(found)) if expected == found => line.numbers += 1,
        _ => match (number(expected), number(found)) {
            (Some(expected), Some(found)) => {
                line.numbers += 1;
                let error = relative_error(expected, found);
                if error > line.worst || line.place.is_empty() {
                    line.worst = error;
                    line.place = place.to_owned();
                }
            }
            _ => problem(format!(": at {place} expected {expected}, found {found}")),
        },
    }
}
