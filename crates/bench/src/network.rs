//! What rollouts tried to reach, from the audit log of the way out (a line of JSON per request,
//! `sandbox::EgressRecord`; its other fields are not looked at). Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Document;

/// Hosts that a page names; data names all.
const SHOWN_MAX: usize = 50;

/// One line of the log, as far as it counts here.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Line {
    host: String,
    port: u16,
    decision: Decision,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Decision {
    Allowed,
    Denied,
    Failed,
}

/// How often something was asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempts {
    /// Let through.
    pub allowed: u64,
    /// Not on the list of hosts, or not of the public internet.
    pub denied: u64,
    /// Allowed, and not reached.
    pub failed: u64,
}

/// All attempts of some rollouts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Logs that were read.
    pub logs: u64,
    /// By `host:port`.
    pub hosts: BTreeMap<String, Attempts>,
    /// Lines that are no record.
    pub broken_lines: u64,
}

impl Network {
    /// Adds a log.
    pub fn add(&mut self, log: &str) {
        self.logs += 1;
        for line in log.lines().filter(|line| !line.trim().is_empty()) {
            let Ok(line) = serde_json::from_str::<Line>(line) else {
                self.broken_lines += 1;
                continue;
            };
            let place = format!("{}:{}", line.host.to_lowercase(), line.port);
            let attempts = self.hosts.entry(place).or_default();
            *match line.decision {
                Decision::Allowed => &mut attempts.allowed,
                Decision::Denied => &mut attempts.denied,
                Decision::Failed => &mut attempts.failed,
            } += 1;
        }
    }

    /// All hosts together.
    #[must_use]
    pub fn total(&self) -> Attempts {
        let mut total = Attempts::default();
        for attempts in self.hosts.values() {
            total.allowed += attempts.allowed;
            total.denied += attempts.denied;
            total.failed += attempts.failed;
        }
        total
    }

    /// As Markdown.
    #[must_use]
    pub fn to_markdown(&self) -> String {
        let mut page = Document::new("Network");
        let total = self.total();
        page.text(format!(
            "{} logs: {} requests let through, {} denied, {} allowed and not reached; {} lines could not be read. What is inside TLS is not seen.",
            self.logs, total.allowed, total.denied, total.failed, self.broken_lines
        ));
        let rows = self.hosts.iter().take(SHOWN_MAX).map(|(host, attempts)| {
            vec![
                host.clone(),
                attempts.allowed.to_string(),
                attempts.denied.to_string(),
                attempts.failed.to_string(),
            ]
        });
        page.table(&["host", "allowed", "denied", "failed"], rows.collect());
        page.to_markdown()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_counted_by_host_and_decision() {
        let mut network = Network::default();
        network.add(
            "{\"time_s\": 1.0, \"method\": \"CONNECT\", \"host\": \"PyPI.org\", \"port\": 443, \"decision\": \"allowed\", \"up_bytes\": 1, \"down_bytes\": 2, \"seconds\": 0.1}\n\
             {\"host\": \"pypi.org\", \"port\": 443, \"decision\": \"failed\", \"reason\": \"x\"}\n\n\
             {\"host\": \"evil.example\", \"port\": 80, \"decision\": \"denied\"}\nnot json\n",
        );
        network.add("");
        assert_eq!((network.logs, network.broken_lines), (2, 1));
        assert_eq!(
            network.total(),
            Attempts {
                allowed: 1,
                denied: 1,
                failed: 1
            }
        );
        assert_eq!(network.hosts["pypi.org:443"].failed, 1);
        assert!(
            network
                .to_markdown()
                .contains("| evil.example:80 | 0 | 1 | 0 |")
        );
    }
}
