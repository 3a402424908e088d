//! `[[services]]` and `[[mcp_servers]]` of `task.toml`. What they mean: [`crate::service`].

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    McpServer, McpTransport, Mock, Route, Service, ServiceTool, TaskError,
    service::check,
    tree::{self, stays_inside},
};

/// Folder of the records that [`crate::write_dir`] writes.
const FOLDER: &str = "services";

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ServiceForm {
    name: String,
    port: u16,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    health_check: Option<String>,
    #[serde(default = "post")]
    health_check_method: String,
    #[serde(default = "ready_timeout_s")]
    ready_timeout_s: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    records: Option<String>,
    data: String,
    #[serde(default = "missing_status")]
    missing_status: u16,
    #[serde(default)]
    error_rate: f64,
    routes: Vec<Route>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct McpForm {
    name: String,
    transport: Transport,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    command: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    args: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    start: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    headers: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Transport {
    Stdio,
    StreamableHttp,
    Sse,
}

fn post() -> String {
    "POST".to_owned()
}

fn ready_timeout_s() -> u64 {
    10
}

fn missing_status() -> u16 {
    404
}

/// What is wrong: field, what was expected, what was found.
pub(super) type Wrong = (String, String, String);

/// The services of a task's folder.
pub(super) fn read(
    forms: Vec<ServiceForm>,
    folder: &Path,
    wrong: &dyn Fn(Wrong) -> TaskError,
) -> Result<Vec<Service>, TaskError> {
    let mut ports = BTreeSet::new();
    let mut services = Vec::new();
    for form in forms {
        let complain = |key: &str, expected: &str, found: String| {
            let field = format!("services.{}.{key}", form.name);
            wrong((field, expected.to_owned(), found))
        };
        if form.port == 0 || !ports.insert(form.port) {
            let found = form.port.to_string();
            return Err(complain("port", "a port of its own", found));
        }
        if !(0.0..1.0).contains(&form.error_rate) {
            let found = form.error_rate.to_string();
            return Err(complain("error_rate", "a share below 1", found));
        }
        if !stays_inside(Path::new(&form.data)) {
            let found = form.data.clone();
            return Err(complain("data", "a path inside the folder", found));
        }
        let lists = lists(&tree::read_text(&folder.join(&form.data))?, &form)
            .map_err(|found| complain("data", "a list of records, or lists by name", found))?;
        let mut routes = form.routes;
        for route in &mut routes {
            if route.of.is_none() {
                route.of.clone_from(&form.records);
            }
            if let Err(found) = check(route, &lists) {
                let expected = "a route over the service's lists".to_owned();
                return Err(wrong((
                    format!("services.{}.routes", form.name),
                    expected,
                    found,
                )));
            }
        }
        let Some(first) = routes.first() else {
            let expected = "at least one route".to_owned();
            let name = format!("services.{}.routes", form.name);
            return Err(wrong((name, expected, "none".to_owned())));
        };
        let health_check = form.health_check.unwrap_or_else(|| first.path.clone());
        services.push(Service {
            name: form.name,
            port: form.port,
            health_check,
            health_check_method: form.health_check_method,
            ready_timeout_s: form.ready_timeout_s.clamp(1, 600),
            mock: Some(Mock {
                lists,
                routes,
                missing_status: form.missing_status,
                error_rate: form.error_rate,
            }),
        });
    }
    Ok(services)
}

fn lists(text: &str, form: &ServiceForm) -> Result<BTreeMap<String, Vec<Value>>, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    match value {
        Value::Array(records) => match &form.records {
            Some(name) => Ok(BTreeMap::from([(name.clone(), records)])),
            None => Err("a list without the key `records` that names it".to_owned()),
        },
        Value::Object(lists) => lists
            .into_iter()
            .map(|(name, records)| match records {
                Value::Array(records) => Ok((name, records)),
                _ => Err(format!("{name} is no list")),
            })
            .collect(),
        _ => Err("neither a list nor an object".to_owned()),
    }
}

/// The tools that the routes of services declare.
pub(super) fn tools(services: &[Service]) -> Vec<ServiceTool> {
    let of = |service: &Service| -> Vec<ServiceTool> {
        let routes = service.mock.iter().flat_map(|mock| &mock.routes);
        routes
            .filter_map(|route| {
                let tool = route.tool.as_ref()?;
                Some(ServiceTool {
                    name: tool.name.clone(),
                    description: tool.description.clone(),
                    input_schema: route.schema(tool),
                    method: route.method.clone(),
                    port: service.port,
                    path: route.path.clone(),
                })
            })
            .collect()
    };
    services.iter().flat_map(of).collect()
}

/// The tool servers of a task's folder.
pub(super) fn servers(
    forms: Vec<McpForm>,
    wrong: &dyn Fn(Wrong) -> TaskError,
) -> Result<Vec<McpServer>, TaskError> {
    let one = |form: McpForm| {
        let McpForm {
            name, url, command, ..
        } = form;
        let need = |value: Option<String>, key: &str| {
            let field = format!("mcp_servers.{name}.{key}");
            value.ok_or_else(|| wrong((field, "a text".to_owned(), "nothing".to_owned())))
        };
        let transport = match form.transport {
            Transport::Stdio => McpTransport::Stdio {
                command: need(command, "command")?,
                args: form.args,
            },
            Transport::StreamableHttp => McpTransport::StreamableHttp {
                url: need(url, "url")?,
            },
            Transport::Sse => McpTransport::Sse {
                url: need(url, "url")?,
            },
        };
        Ok(McpServer {
            name,
            transport,
            env: form.env,
            headers: form.headers,
            start: form.start,
        })
    };
    forms.into_iter().map(one).collect()
}

impl McpForm {
    pub(super) fn of(server: &McpServer) -> Self {
        let (transport, url, command, args) = match &server.transport {
            McpTransport::Stdio { command, args } => {
                (Transport::Stdio, None, Some(command.clone()), args.clone())
            }
            McpTransport::StreamableHttp { url } => (
                Transport::StreamableHttp,
                Some(url.clone()),
                None,
                Vec::new(),
            ),
            McpTransport::Sse { url } => (Transport::Sse, Some(url.clone()), None, Vec::new()),
        };
        Self {
            name: server.name.clone(),
            transport,
            url,
            command,
            args,
            start: server.start.clone(),
            env: server.env.clone(),
            headers: server.headers.clone(),
        }
    }
}

impl ServiceForm {
    /// The form of a service; the error says what our format cannot hold.
    pub(super) fn of(service: &Service) -> Result<Self, String> {
        let Some(mock) = &service.mock else {
            return Err(format!("the service {} is a program", service.name));
        };
        Ok(Self {
            name: service.name.clone(),
            port: service.port,
            health_check: Some(service.health_check.clone()),
            health_check_method: service.health_check_method.clone(),
            ready_timeout_s: service.ready_timeout_s,
            records: None,
            data: format!("{FOLDER}/{}.json", service.name),
            missing_status: mock.missing_status,
            error_rate: mock.error_rate,
            routes: mock.routes.clone(),
        })
    }

    /// Where its records are, and the records.
    pub(super) fn data(service: &Service) -> Option<(String, String)> {
        let lists = &service.mock.as_ref()?.lists;
        let text = serde_json::to_string_pretty(lists).ok()?;
        Some((format!("{FOLDER}/{}.json", service.name), text + "\n"))
    }
}
