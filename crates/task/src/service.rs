//! Services made of data: records, and what requests do with them. Running them is `verify`'s.
//!
//! ```toml
//! # in task.toml of our own format
//! [[services]]
//! name = "mail"
//! port = 9100
//! health_check = "/mail/messages"     # asked before the harness starts; the first route if absent
//! records = "messages"                # the list that routes are about unless they say `of`
//! data = "services/mail.json"         # beside task.toml: a list of records, or lists by name
//!
//! [[services.routes]]
//! path = "/mail/messages"
//! act = "list"                        # list | get | add | update | remove | note
//! contains = { query = "subject" }    # key of the request = field of the record
//!
//! [[services.routes]]
//! path = "/mail/send"
//! act = "note"                        # keeps the request in a list of the audit, no more
//! takes = ["to", "subject", "body"]
//! log = "sent_messages"
//! tool = { name = "send_mail", description = "Send a mail" }   # told to the harness, if it can
//! ```
//!
//! Requests are objects of JSON, or the query of a GET. Nothing in an answer depends on the clock:
//! "the last seven days" are those up to a day after the newest record.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A service beside the harness that keeps a log of what it was asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Service {
    /// Its name.
    pub name: String,
    /// Port on the loopback of the sandbox.
    pub port: u16,
    /// Path that answers when it is ready.
    pub health_check: String,
    /// Method for that.
    pub health_check_method: String,
    /// Limit for becoming ready, in seconds.
    pub ready_timeout_s: u64,
    /// What it is made of; `None` when it is a program, which nothing runs.
    pub mock: Option<Mock>,
}

/// Records and routes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Mock {
    /// Lists of records by name, as they are before the first request.
    pub lists: BTreeMap<String, Vec<Value>>,
    /// What may be asked.
    pub routes: Vec<Route>,
    /// Status of an answer about a record that is not there.
    pub missing_status: u16,
    /// Share of requests that fail with 500 or 429 by turns, evenly spread: with 0.5 every second.
    pub error_rate: f64,
}

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Act {
    /// Gives the records that fit.
    List,
    /// Gives one record.
    Get,
    /// Adds a record.
    Add,
    /// Changes fields of a record.
    Update,
    /// Takes a record away.
    Remove,
    /// Changes no record; the request itself is logged.
    Note,
}

/// Records of the last days up to a day after the newest record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recent {
    /// Field of the record with a time in RFC 3339.
    pub field: String,
    /// Key of the request that says how many days.
    pub days: String,
    /// Days when it does not.
    pub default: u32,
}

/// Records of a day, or of some days from it on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Day {
    /// Field of the record with a time in RFC 3339.
    pub field: String,
    /// Key of the request with a date, YYYY-MM-DD.
    pub date: String,
    /// Key of the request that says how many days; 1 when it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub days: Option<String>,
}

/// At most so many records.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Key of the request that says how many.
    pub key: String,
    /// How many when it does not.
    pub default: u64,
}

/// A route as a tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteTool {
    /// Its name.
    pub name: String,
    /// What the model is told.
    pub description: String,
    /// Its arguments as a JSON schema; made of the keys that the route knows when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_schema: Option<Value>,
}

/// What may be asked at one path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Route {
    /// The path.
    pub path: String,
    /// The method.
    #[serde(default = "post")]
    pub method: String,
    /// What is done.
    pub act: Act,
    /// The list it is about; the service's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<String>,
    /// Field that names a record, and key of the request that names the one meant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// What an added record's name begins with; its number follows.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
    /// Keys that a request must have. `add`, `update` and `note` take them over.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub takes: Vec<String>,
    /// Keys that it may have beside them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub may: Vec<String>,
    /// Values of keys that a request does not have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub defaults: BTreeMap<String, Value>,
    /// Fields that a record gets whatever the request says.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sets: BTreeMap<String, Value>,
    /// `list`: keys whose value is that of the record's field of the same name, unless it is `all`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub equals: Vec<String>,
    /// `list`: keys whose text is part of a field of the record, or of one of a field's texts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub contains: BTreeMap<String, String>,
    /// `list`: by time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recent: Option<Recent>,
    /// `list`: by day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub day: Option<Day>,
    /// `list`: field to sort by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sort: Option<String>,
    /// `list`: how many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Limit>,
    /// `list`: the fields that are shown; all when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shows: Vec<String>,
    /// List of the audit that gets a copy of the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<String>,
    /// `status` of the answer.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub says: String,
    /// What the record is called in the answer; `record` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub one: Option<String>,
    /// Told to the harness as a tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<RouteTool>,
}

fn post() -> String {
    "POST".to_owned()
}

impl Route {
    /// The keys of a request that it knows, and whether each must be there.
    #[must_use]
    pub fn keys(&self) -> BTreeMap<String, bool> {
        let named = |names: &[String], must: bool| -> Vec<(String, bool)> {
            names.iter().map(|name| (name.clone(), must)).collect()
        };
        let by_key = !matches!(self.act, Act::List | Act::Add | Act::Note);
        let mut keys: BTreeMap<String, bool> = BTreeMap::new();
        keys.extend(named(&self.equals, false));
        keys.extend(self.contains.keys().map(|key| (key.clone(), false)));
        keys.extend(
            self.recent
                .iter()
                .map(|recent| (recent.days.clone(), false)),
        );
        if let Some(day) = &self.day {
            keys.insert(day.date.clone(), true);
            keys.extend(day.days.iter().map(|days| (days.clone(), false)));
        }
        keys.extend(self.limit.iter().map(|limit| (limit.key.clone(), false)));
        keys.extend(named(&self.may, false));
        keys.extend(named(&self.takes, true));
        if let (true, Some(key)) = (by_key, &self.key) {
            keys.insert(key.clone(), true);
        }
        keys
    }

    /// Its tool's schema.
    #[must_use]
    pub fn schema(&self, tool: &RouteTool) -> Value {
        if let Some(schema) = &tool.input_schema {
            return schema.clone();
        }
        let keys = self.keys();
        let properties: serde_json::Map<String, Value> = keys
            .keys()
            .map(|key| (key.clone(), Value::Object(serde_json::Map::new())))
            .collect();
        let required: Vec<&String> = keys
            .iter()
            .filter(|(_, must)| **must)
            .map(|(key, _)| key)
            .collect();
        serde_json::json!({"type": "object", "properties": properties, "required": required})
    }
}

/// A tool over a service's route.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServiceTool {
    /// Its name.
    pub name: String,
    /// What the model is told.
    pub description: String,
    /// Its arguments as a JSON schema.
    pub input_schema: Value,
    /// Method of the request.
    pub method: String,
    /// Port of the service.
    pub port: u16,
    /// Path of the request.
    pub path: String,
}

/// What a service of another bench is made of, but for its records.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Known {
    pub(crate) records: String,
    /// Variable of the service's environment that names its file of records.
    pub(crate) fixtures: String,
    missing_status: u16,
    routes: Vec<Route>,
}

impl Known {
    /// The service of Claw-Eval with that name, when it is one of those in
    /// `tasks/services/claw-eval.toml`.
    pub(crate) fn claw_eval(name: &str) -> Result<Option<Self>, String> {
        const TEXT: &str = include_str!("../../../tasks/services/claw-eval.toml");
        let mut all: BTreeMap<String, Self> = toml::from_str(TEXT)
            .map_err(|error| format!("tasks/services/claw-eval.toml: {error}"))?;
        Ok(all.remove(name))
    }

    pub(crate) fn mock(self, records: Vec<Value>, error_rate: f64) -> Mock {
        let mut routes = self.routes;
        for route in &mut routes {
            route.of.get_or_insert_with(|| self.records.clone());
        }
        Mock {
            lists: BTreeMap::from([(self.records, records)]),
            routes,
            missing_status: self.missing_status,
            error_rate,
        }
    }
}

/// Checks what a route says against the lists that there are; the sentence says what is wrong.
pub(crate) fn check(route: &Route, lists: &BTreeMap<String, Vec<Value>>) -> Result<(), String> {
    if !route.path.starts_with('/') {
        return Err(format!(
            "path {:?}: expected one that starts with /",
            route.path
        ));
    }
    let list = route.of.as_deref().unwrap_or_default();
    if route.act != Act::Note && !lists.contains_key(list) {
        let known: Vec<&str> = lists.keys().map(String::as_str).collect();
        return Err(format!(
            "{}: there is no list {list:?}; the data has {}",
            route.path,
            known.join(", ")
        ));
    }
    if matches!(route.act, Act::Get | Act::Update | Act::Remove) && route.key.is_none() {
        return Err(format!(
            "{}: expected the key that names a record",
            route.path
        ));
    }
    if route.act == Act::Note && route.log.is_none() {
        return Err(format!("{}: expected the list to log in", route.path));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_service_holds_together() {
        for name in [
            "gmail",
            "calendar",
            "todo",
            "contacts",
            "notes",
            "helpdesk",
            "inventory",
            "crm",
        ] {
            let known = Known::claw_eval(name).unwrap().unwrap();
            let mock = known.mock(Vec::new(), 0.0);
            for route in &mock.routes {
                check(route, &mock.lists).unwrap();
            }
        }
        assert!(Known::claw_eval("ocr").unwrap().is_none());
    }

    #[test]
    fn a_schema_is_made_of_the_keys() {
        let known = Known::claw_eval("calendar").unwrap().unwrap();
        let tool = RouteTool {
            name: "t".to_owned(),
            description: String::new(),
            input_schema: None,
        };
        let schema = known.routes[0].schema(&tool);
        assert_eq!(schema["required"], serde_json::json!(["date"]));
        assert_eq!(
            schema["properties"],
            serde_json::json!({"date": {}, "days": {}})
        );
    }
}
