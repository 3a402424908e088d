//! What services were asked.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Asked {
    /// Its place among the requests to all services of the rollout, from 1.
    pub number: u64,
    /// The path.
    pub endpoint: String,
    /// The method.
    pub method: String,
    /// The task's tool at this path, when it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    /// What was asked, as an object of JSON.
    pub request_body: Value,
    /// What was answered.
    pub response_body: Value,
    /// Status of the answer.
    pub status: u16,
}

/// What one service was asked, and the lists that its routes log to.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ServiceAudit {
    /// Requests in order.
    pub calls: Vec<Asked>,
    /// By name: `sent_messages`, `created_events` …
    #[serde(flatten)]
    pub logs: BTreeMap<String, Vec<Value>>,
}

/// The log of all services of a rollout. Verifiers find it as `services.json`: an object with the
/// services by name, each with `calls` and its lists.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Audit {
    /// Services by name.
    pub services: BTreeMap<String, ServiceAudit>,
    /// Requests beyond a limit, which were refused and are not among the calls.
    #[serde(default)]
    pub refused: u64,
}

impl Audit {
    /// The tool (else the path) and the status of each request to all services, in order.
    #[must_use]
    pub fn dispatches(&self) -> Vec<(&str, u16)> {
        let mut calls: Vec<&Asked> = self
            .services
            .values()
            .flat_map(|service| &service.calls)
            .collect();
        calls.sort_by_key(|call| call.number);
        calls
            .into_iter()
            .map(|call| {
                let name = call.tool.as_deref().unwrap_or(&call.endpoint);
                (name, call.status)
            })
            .collect()
    }

    /// Whether a service has something in a list of its log.
    #[must_use]
    pub fn has(&self, service: &str, list: &str) -> bool {
        self.services
            .get(service)
            .and_then(|service| service.logs.get(list))
            .is_some_and(|records| !records.is_empty())
    }

    /// Whether a service was asked anything.
    #[must_use]
    pub fn used(&self, service: &str) -> bool {
        self.services
            .get(service)
            .is_some_and(|service| !service.calls.is_empty())
    }

    /// As the file that verifiers find.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        // Maps with text as keys only: they always have a JSON form.
        serde_json::to_vec_pretty(&self.services).unwrap_or_default()
    }
}
