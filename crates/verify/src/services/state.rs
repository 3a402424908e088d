//! Records and log of services, and what a request does with them. Pure.

use std::collections::BTreeMap;

use chrono::{DateTime, Days, NaiveDate};
use sandbox::mcp::{Called, Toolbox};
use serde_json::{Map, Value, json};
use task::{Act, Mock, Route, ServiceTool, Task};

use super::{AUDIT_BYTES_MAX, Asked, Audit, CALLS_MAX, ServiceAudit};

#[derive(Debug)]
struct Running {
    name: String,
    mock: Mock,
    lists: BTreeMap<String, Vec<Value>>,
    audit: ServiceAudit,
    /// Requests since the log began.
    asked: u64,
}

/// All services of one rollout.
#[derive(Debug)]
pub(crate) struct State {
    services: BTreeMap<u16, Running>,
    tools: Vec<ServiceTool>,
    /// Whether the log has begun.
    begun: bool,
    calls: usize,
    bytes: usize,
    refused: u64,
}

type Answer = (u16, Value);

fn error(status: u16, text: impl Into<String>) -> Answer {
    (status, json!({"error": text.into()}))
}

impl State {
    pub(crate) fn new(task: &Task) -> Self {
        let services = task.environment.services.iter().filter_map(|service| {
            let mock = service.mock.clone()?;
            let running = Running {
                name: service.name.clone(),
                lists: mock.lists.clone(),
                audit: fresh(&mock),
                mock,
                asked: 0,
            };
            Some((service.port, running))
        });
        Self {
            services: services.collect(),
            tools: task.environment.tools.clone(),
            begun: false,
            calls: 0,
            bytes: 0,
            refused: 0,
        }
    }

    /// Begins the log, with the records as they were at first.
    pub(crate) fn begin(&mut self) {
        for running in self.services.values_mut() {
            running.lists = running.mock.lists.clone();
            running.audit = fresh(&running.mock);
            running.asked = 0;
        }
        (self.begun, self.calls, self.bytes, self.refused) = (true, 0, 0, 0);
    }

    pub(crate) fn audit(&self) -> Audit {
        Audit {
            services: self
                .services
                .values()
                .map(|running| (running.name.clone(), running.audit.clone()))
                .collect(),
            refused: self.refused,
        }
    }

    /// One request to the service at a port.
    pub(crate) fn ask(&mut self, port: u16, method: &str, path: &str, body: &Value) -> Answer {
        let Some(running) = self.services.get_mut(&port) else {
            return error(404, "no such service");
        };
        let path = match path.trim_end_matches('/') {
            "" => "/",
            trimmed => trimmed,
        };
        if self.begun && (self.calls >= CALLS_MAX || self.bytes >= AUDIT_BYTES_MAX) {
            self.refused += 1;
            return error(429, "this service takes no more requests");
        }
        running.asked += 1;
        let answer = match running.injected(self.begun) {
            Some(status) => error(status, "the service failed, try again"),
            None => running.answer(method, path, body),
        };
        if self.begun {
            let tool = self
                .tools
                .iter()
                .find(|tool| tool.port == port && tool.path == path && tool.method == method);
            self.calls += 1;
            self.bytes += body.to_string().len() + answer.1.to_string().len();
            running.audit.calls.push(Asked {
                number: self.calls as u64,
                endpoint: path.to_owned(),
                method: method.to_owned(),
                tool: tool.map(|tool| tool.name.clone()),
                request_body: body.clone(),
                response_body: answer.1.clone(),
                status: answer.0,
            });
        }
        answer
    }
}

impl Toolbox for State {
    fn tools(&self) -> Vec<Value> {
        let told = |tool: &ServiceTool| {
            json!({
                "name": tool.name,
                "description": tool.description,
                "inputSchema": tool.input_schema,
            })
        };
        self.tools.iter().map(told).collect()
    }

    fn call(&mut self, name: &str, arguments: &Value) -> Option<Called> {
        let tool = self.tools.iter().find(|tool| tool.name == name)?.clone();
        let (status, answer) = self.ask(tool.port, &tool.method, &tool.path, arguments);
        Some(Called {
            text: answer.to_string(),
            failed: status >= 400,
        })
    }
}

/// A log with all of its lists, empty.
fn fresh(mock: &Mock) -> ServiceAudit {
    let logs = mock.routes.iter().filter_map(|route| route.log.clone());
    ServiceAudit {
        calls: Vec::new(),
        logs: logs.map(|name| (name, Vec::new())).collect(),
    }
}

impl Running {
    /// The status of a failure that this request is to meet, if it is.
    fn injected(&self, begun: bool) -> Option<u16> {
        let failures = |count: u64| (count as f64 * self.mock.error_rate).floor() as u64;
        let now = failures(self.asked);
        let fails = begun && now > failures(self.asked.saturating_sub(1));
        fails.then_some(if now % 2 == 1 { 500 } else { 429 })
    }

    fn answer(&mut self, method: &str, path: &str, body: &Value) -> Answer {
        let routes = self.mock.routes.iter();
        let here: Vec<&Route> = routes.filter(|route| route.path == path).collect();
        let Some(route) = here.iter().find(|route| route.method == method) else {
            return match here.is_empty() {
                true => error(404, format!("no route {path}")),
                false => error(405, format!("{path} does not take {method}")),
            };
        };
        let route = (*route).clone();
        let mut asked = match body {
            Value::Null => Map::new(),
            Value::Object(asked) => asked.clone(),
            _ => return error(422, "expected an object"),
        };
        asked.retain(|_, value| !value.is_null());
        for (key, value) in &route.defaults {
            asked.entry(key).or_insert_with(|| value.clone());
        }
        for (key, must) in route.keys() {
            if must && !asked.contains_key(&key) {
                return error(422, format!("{key} is missing"));
            }
        }
        match route.act {
            Act::List => self.list(&route, &asked),
            Act::Note => {
                let record = taken(&route, &asked);
                self.log(&route, &record);
                said(&route, record)
            }
            Act::Add => self.add(&route, &asked),
            Act::Get | Act::Update | Act::Remove => self.one(&route, &asked),
        }
    }

    fn records(&self, route: &Route) -> &[Value] {
        let list = route.of.as_deref().and_then(|name| self.lists.get(name));
        list.map(Vec::as_slice).unwrap_or_default()
    }

    fn log(&mut self, route: &Route, record: &Value) {
        if let Some(name) = &route.log {
            let log = self.audit.logs.entry(name.clone()).or_default();
            log.push(record.clone());
        }
    }

    fn list(&self, route: &Route, asked: &Map<String, Value>) -> Answer {
        let mut found: Vec<Value> = self.records(route).to_vec();
        found.retain(|record| fits(route, asked, record));
        if let Some(recent) = &route.recent {
            let days = whole(asked, &recent.days).unwrap_or(u64::from(recent.default));
            let newest = self.records(route).iter();
            let newest = newest
                .filter_map(|record| time(record, &recent.field))
                .max();
            // One day more: the newest record counts as one of yesterday.
            let from = newest.and_then(|newest| {
                newest
                    .checked_add_days(Days::new(1))?
                    .checked_sub_days(Days::new(days))
            });
            found.retain(|record| {
                let at = time(record, &recent.field);
                at.zip(from).is_some_and(|(at, from)| at >= from)
            });
        }
        if let Some(day) = &route.day {
            let text = asked.get(&day.date).and_then(Value::as_str);
            let Some(from) = text.and_then(|text| text.parse::<NaiveDate>().ok()) else {
                return error(
                    self.mock.missing_status,
                    format!("{} is no date: expected YYYY-MM-DD", day.date),
                );
            };
            let days = day.days.as_deref().and_then(|key| whole(asked, key));
            let until = from.checked_add_days(Days::new(days.unwrap_or(1)));
            found.retain(|record| {
                let at = time(record, &day.field).map(|at| at.date_naive());
                at.is_some_and(|at| at >= from && until.is_none_or(|until| at < until))
            });
        }
        if let Some(field) = &route.sort {
            found.sort_by_key(|record| record.get(field).map(Value::to_string));
        }
        if let Some(limit) = &route.limit {
            let most = whole(asked, &limit.key).unwrap_or(limit.default);
            found.truncate(usize::try_from(most).unwrap_or(usize::MAX));
        }
        if !route.shows.is_empty() {
            for record in &mut found {
                if let Value::Object(fields) = record {
                    fields.retain(|name, _| route.shows.contains(name));
                }
            }
        }
        let total = found.len();
        let name = route.of.clone().unwrap_or_default();
        (200, json!({name: found, "total": total}))
    }

    fn add(&mut self, route: &Route, asked: &Map<String, Value>) -> Answer {
        let mut record = taken(route, asked);
        let count = self.records(route).len();
        if let (Value::Object(fields), Some(key)) = (&mut record, &route.key) {
            let id = format!("{}{:03}", route.id, count + 1);
            fields.entry(key.clone()).or_insert(id.into());
        }
        self.log(route, &record);
        let list = route
            .of
            .as_deref()
            .and_then(|name| self.lists.get_mut(name));
        if let Some(list) = list {
            list.push(record.clone());
        }
        said(route, record)
    }

    /// What is about one record.
    fn one(&mut self, route: &Route, asked: &Map<String, Value>) -> Answer {
        let key = route.key.as_deref().unwrap_or_default();
        let wanted = asked.get(key).cloned().unwrap_or_default();
        let list = route
            .of
            .as_deref()
            .and_then(|name| self.lists.get_mut(name));
        let list = list.map(|list| {
            let at = list
                .iter()
                .position(|record| equal(record.get(key), &wanted));
            (list, at)
        });
        let Some((list, Some(at))) = list else {
            return error(
                self.mock.missing_status,
                format!("{key} {wanted} not found"),
            );
        };
        let record = match route.act {
            Act::Remove => list.remove(at),
            Act::Update => {
                if let Value::Object(fields) = &mut list[at] {
                    let changes = route.takes.iter().chain(&route.may);
                    for name in changes.filter(|name| *name != key) {
                        if let Some(value) = asked.get(name) {
                            fields.insert(name.clone(), value.clone());
                        }
                    }
                    fields.extend(route.sets.clone());
                }
                list[at].clone()
            }
            _ => return (200, list[at].clone()),
        };
        self.log(route, &record);
        said(route, record)
    }
}

/// The record that a request gives.
fn taken(route: &Route, asked: &Map<String, Value>) -> Value {
    let names = route.takes.iter().chain(&route.may);
    let fields = names.filter_map(|name| Some((name.clone(), asked.get(name)?.clone())));
    let sets = route.sets.iter();
    let sets = sets.map(|(name, value)| (name.clone(), value.clone()));
    Value::Object(fields.chain(sets).collect())
}

fn said(route: &Route, record: Value) -> Answer {
    let says = if route.says.is_empty() {
        "ok"
    } else {
        &route.says
    };
    let one = route.one.as_deref().unwrap_or("record");
    (200, json!({"status": says, one: record}))
}

fn time(record: &Value, field: &str) -> Option<DateTime<chrono::FixedOffset>> {
    DateTime::parse_from_rfc3339(record.get(field)?.as_str()?).ok()
}

/// A number, also as a text: that is what a query holds.
fn whole(asked: &Map<String, Value>, key: &str) -> Option<u64> {
    let value = asked.get(key)?;
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

/// Whether a field has a value; numbers in a query are texts.
fn equal(field: Option<&Value>, wanted: &Value) -> bool {
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    field.is_some_and(|field| field == wanted || text(field) == text(wanted))
}

fn fits(route: &Route, asked: &Map<String, Value>, record: &Value) -> bool {
    let equals = route.equals.iter().all(|key| {
        asked
            .get(key)
            .is_none_or(|wanted| wanted == "all" || wanted == "" || equal(record.get(key), wanted))
    });
    let contains = route.contains.iter().all(|(key, field)| {
        let Some(wanted) = asked.get(key).and_then(Value::as_str) else {
            return true;
        };
        let holds = |value: &Value| value.as_str().is_some_and(|text| text.contains(wanted));
        match record.get(field) {
            Some(Value::Array(items)) => items.iter().any(holds),
            Some(value) => holds(value),
            None => false,
        }
    });
    equals && contains
}

#[cfg(test)]
mod tests;
