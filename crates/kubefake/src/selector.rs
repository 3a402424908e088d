//! Label and field selectors.

use serde_json::Value;

use crate::{error::ApiError, resources::Resource};

/// One demand on one label or field.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Demand {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Absent(String),
}

/// What a request wants to see. An empty one lets everything through.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Selector {
    labels: Vec<Demand>,
    fields: Vec<Demand>,
}

/// Fields by which objects can be chosen, beside name and namespace.
fn selectable(resource: &Resource) -> &'static [&'static str] {
    match resource.plural.as_ref() {
        "pods" => &[
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "spec.hostNetwork",
            "status.phase",
            "status.podIP",
            "status.nominatedNodeName",
        ],
        "events" => &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "reportingComponent",
            "source",
            "type",
        ],
        "secrets" => &["type"],
        "namespaces" => &["status.phase"],
        "nodes" => &["spec.unschedulable"],
        _ => &[],
    }
}

impl Selector {
    pub(crate) fn parse(
        labels: Option<&str>,
        fields: Option<&str>,
        resource: &Resource,
    ) -> Result<Self, ApiError> {
        let labels = match labels {
            Some(text) => parse_labels(text).map_err(|reason| {
                ApiError::bad_request(format!("unable to parse requirement: {reason}"))
            })?,
            None => Vec::new(),
        };
        let fields = parse_fields(fields.unwrap_or(""), resource)?;
        Ok(Self { labels, fields })
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        let label = |key: &str| {
            let labels = object["metadata"]["labels"].as_object();
            labels.and_then(|l| Some(l.get(key)?.as_str()?.to_owned()))
        };
        let field = |path: &str| {
            let found = path.split('.').fold(object, |value, key| &value[key]);
            Some(match found {
                Value::String(text) => text.clone(),
                Value::Null if path == "spec.unschedulable" || path == "spec.hostNetwork" => {
                    "false".to_owned()
                }
                Value::Null => String::new(),
                other => other.to_string(),
            })
        };
        self.labels.iter().all(|d| d.holds(label)) && self.fields.iter().all(|d| d.holds(field))
    }
}

/// Whether a `LabelSelector` object (`matchLabels`, `matchExpressions`) chooses these labels.
pub(crate) fn chooses(selector: &Value, labels: &Value) -> bool {
    let mut demands = Vec::new();
    for (key, value) in selector["matchLabels"].as_object().into_iter().flatten() {
        let value = value.as_str().unwrap_or_default().to_owned();
        demands.push(Demand::In(key.clone(), vec![value]));
    }
    for expression in selector["matchExpressions"]
        .as_array()
        .into_iter()
        .flatten()
    {
        let key = expression["key"].as_str().unwrap_or_default().to_owned();
        let values = expression["values"].as_array().into_iter().flatten();
        let values = values
            .filter_map(|v| v.as_str().map(str::to_owned))
            .collect();
        demands.push(match expression["operator"].as_str() {
            Some("In") => Demand::In(key, values),
            Some("NotIn") => Demand::NotIn(key, values),
            Some("DoesNotExist") => Demand::Absent(key),
            _ => Demand::Exists(key),
        });
    }
    demands
        .iter()
        .all(|d| d.holds(|key| labels[key].as_str().map(str::to_owned)))
}

impl Demand {
    fn holds(&self, get: impl Fn(&str) -> Option<String>) -> bool {
        match self {
            Self::In(key, values) => get(key).is_some_and(|v| values.contains(&v)),
            Self::NotIn(key, values) => get(key).is_none_or(|v| !values.contains(&v)),
            Self::Exists(key) => get(key).is_some(),
            Self::Absent(key) => get(key).is_none(),
        }
    }
}

/// Cuts at commas that are not in parentheses.
fn parts(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let (mut depth, mut start) = (0_i32, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                found.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    found.push(&text[start..]);
    found.retain(|part| !part.trim().is_empty());
    found
}

fn parse_labels(text: &str) -> Result<Vec<Demand>, String> {
    parts(text).into_iter().map(parse_label).collect()
}

fn parse_label(part: &str) -> Result<Demand, String> {
    let part = part.trim();
    let own = |text: &str| text.trim().to_owned();
    if let Some((key, value)) = part.split_once("!=") {
        return Ok(Demand::NotIn(check(key)?, vec![own(value)]));
    }
    if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        return Ok(Demand::In(check(key)?, vec![own(value)]));
    }
    if let Some((head, list)) = part.split_once('(') {
        let list = list
            .strip_suffix(')')
            .ok_or_else(|| format!("found '{part}', expected: ')'"))?;
        let values = list.split(',').map(own).collect();
        return match head.split_whitespace().collect::<Vec<_>>().as_slice() {
            [key, "in"] => Ok(Demand::In(check(key)?, values)),
            [key, "notin"] => Ok(Demand::NotIn(check(key)?, values)),
            _ => Err(format!("found '{head}', expected: in, notin")),
        };
    }
    match part.strip_prefix('!') {
        Some(key) => Ok(Demand::Absent(check(key)?)),
        None => Ok(Demand::Exists(check(part)?)),
    }
}

fn check(key: &str) -> Result<String, String> {
    let key = key.trim();
    let good = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    if key.is_empty() || !key.chars().all(good) {
        return Err(format!("found '{key}', expected: identifier"));
    }
    Ok(key.to_owned())
}

fn parse_fields(text: &str, resource: &Resource) -> Result<Vec<Demand>, ApiError> {
    let mut found = Vec::new();
    for part in parts(text) {
        let (key, value, equal) = if let Some((key, value)) = part.split_once("!=") {
            (key, value, false)
        } else if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
            (key, value, true)
        } else {
            return Err(ApiError::bad_request(format!(
                "invalid field selector: {part:?}; can't understand '{part}'"
            )));
        };
        let key = key.trim();
        let known = ["metadata.name", "metadata.namespace"].contains(&key)
            || selectable(resource).contains(&key);
        if !known {
            return Err(ApiError::bad_request(format!(
                "field label not supported: {key}"
            )));
        }
        let (key, values) = (key.to_owned(), vec![value.trim().to_owned()]);
        found.push(if equal {
            Demand::In(key, values)
        } else {
            Demand::NotIn(key, values)
        });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::find;
    use serde_json::json;

    fn pod() -> Value {
        json!({"metadata": {"name": "p", "labels": {"app": "x", "tier": "1"}},
               "status": {"phase": "Running"}})
    }

    #[test]
    fn labels_are_chosen_as_kubectl_writes_them() {
        let pods = find("", "v1", "pods", &[]).unwrap();
        for (text, expected) in [
            ("", true),
            ("app=x", true),
            ("app==x,tier!=2", true),
            ("app in (x, y),tier", true),
            ("app notin (x)", false),
            ("!app", false),
            ("!other", true),
            ("other notin (a)", true),
            ("other=a", false),
        ] {
            let selector = Selector::parse(Some(text), None, &pods).unwrap();
            assert_eq!(selector.matches(&pod()), expected, "{text}");
        }
        for text in ["app in (x", "=x", "a b c", "app like (x)"] {
            assert!(Selector::parse(Some(text), None, &pods).is_err(), "{text}");
        }
    }

    #[test]
    fn only_fields_that_the_real_server_knows_can_be_chosen() {
        let pods = find("", "v1", "pods", &[]).unwrap();
        let matches =
            |text: &str| Selector::parse(None, Some(text), &pods).map(|s| s.matches(&pod()));
        assert_eq!(matches("metadata.name=p,status.phase!=Failed"), Ok(true));
        assert_eq!(matches("spec.nodeName="), Ok(true));
        assert_eq!(matches("spec.nodeName=n"), Ok(false));
        let error = matches("spec.image=a").unwrap_err();
        assert_eq!(error.message, "field label not supported: spec.image");
    }

    #[test]
    fn selectors_of_policies_choose_labels() {
        let labels = json!({"a": "1"});
        assert!(chooses(&json!({}), &labels));
        assert!(chooses(&json!({"matchLabels": {"a": "1"}}), &labels));
        assert!(!chooses(&json!({"matchLabels": {"a": "2"}}), &labels));
        let none = json!({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]});
        assert!(!chooses(&none, &labels));
    }
}
