//! What a task needs of the place where it runs, beyond its files.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Service, ServiceTool, Step, TaskFile, Verifier};

/// Whom the sandbox may talk to, besides the gateway.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Network {
    /// Nobody.
    #[default]
    None,
    /// Anybody.
    Public,
    /// These hosts: names, `*.name`, addresses, CIDR ranges.
    Allowlist {
        /// The hosts.
        hosts: Vec<String>,
    },
}

/// A package that must be in the system, as a Dockerfile installs it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "kind", content = "name", rename_all = "kebab-case")]
pub enum Requirement {
    /// A Debian package.
    Apt(String),
    /// A Python distribution, with its version demand.
    Pip(String),
    /// A Node.js package, installed globally.
    Npm(String),
}

/// A server of tools that the harness is told about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct McpServer {
    /// Its name.
    pub name: String,
    /// How it is reached.
    pub transport: McpTransport,
    /// Environment of a child process.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Headers of requests.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Command that starts a server which is reached by an address, run by a shell in the
    /// workspace before the harness; `None` when something else starts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<String>,
}

/// How a tool server is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum McpTransport {
    /// Server-sent events.
    Sse {
        /// Address.
        url: String,
    },
    /// Streamable HTTP.
    StreamableHttp {
        /// Address.
        url: String,
    },
    /// A child process.
    Stdio {
        /// Program.
        command: String,
        /// Its arguments.
        args: Vec<String>,
    },
}

/// A command that says whether the environment is ready.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HealthCheck {
    /// Run by a shell; exit 0 is healthy.
    pub command: String,
    /// Pause between tries.
    pub interval_s: f64,
    /// Limit of one try.
    pub timeout_s: f64,
    /// Time in which failures do not count.
    pub start_period_s: f64,
    /// Failures in a row that are one too many.
    pub retries: u32,
}

/// What the harness's time and the machine must allow. `None`: the format says nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Needs {
    /// Limit of the harness, in seconds.
    pub agent_timeout_s: Option<f64>,
    /// Cores.
    pub cpus: Option<f64>,
    /// Memory, in MiB.
    pub memory_mb: Option<u64>,
    /// Files, in MiB.
    pub storage_mb: Option<u64>,
    /// Graphics processors.
    pub gpus: Option<u32>,
}

/// A command run after the harness ended, so that its traces become files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Collect {
    /// Run by a shell in the workspace.
    pub command: String,
    /// Its limit.
    pub timeout_s: f64,
}

/// How the rewards of steps become one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Mean over the steps that ran.
    #[default]
    Mean,
    /// That of the last step that ran.
    Final,
}

/// A step of a task that is given to the harness in parts (Harbor). The digest of a task covers
/// what serde skips here.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Its name.
    pub name: String,
    /// What the harness is told.
    pub instruction: String,
    /// Least reward by key that lets the next step begin.
    pub min_reward: BTreeMap<String, f64>,
    /// Put into the workspace before the step.
    #[serde(skip)]
    pub files: Vec<TaskFile>,
    /// Command run in the workspace before the harness, once the files are there.
    pub setup: Option<String>,
    /// What scores it; the task's own when `None`.
    #[serde(skip)]
    pub verifier: Option<Verifier>,
    /// Its part of the reference solution.
    #[serde(skip)]
    pub solution: Vec<Step>,
    /// Readiness, checked once setup is done.
    pub healthcheck: Option<HealthCheck>,
    /// Limit of the harness, in seconds.
    pub agent_timeout_s: Option<f64>,
}

/// Everything about the place beyond files, workspace and HOME.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// Base image, when one is named.
    pub image: Option<String>,
    /// Packages that must be there.
    pub requires: Vec<Requirement>,
    /// Environment variables of the harness, the verifier and the solution.
    pub env: BTreeMap<String, String>,
    /// User that the harness runs as, when it is not the image's.
    pub user: Option<String>,
    /// Whom the sandbox may talk to.
    pub network: Network,
    /// Whether the task itself says so. What a format says of all its tasks does not count.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub network_said: bool,
    /// Hosts that it may reach through the proxy: what the run grants it ([`Environment::grant`]).
    /// No part of the task: nothing reads it from a file, and the digest does not cover it.
    #[serde(skip)]
    pub egress: Vec<String>,
    /// Tool servers.
    pub mcp_servers: Vec<McpServer>,
    /// Services with an audit log.
    pub services: Vec<Service>,
    /// Tools over the services' addresses, which the harness is told of as a tool server.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<ServiceTool>,
    /// Readiness.
    pub healthcheck: Option<HealthCheck>,
    /// Time and machine.
    pub needs: Needs,
    /// Files to keep after the harness ended: paths or globs in the sandbox.
    pub artifacts: Vec<String>,
    /// Commands run after the harness ended and before files are kept.
    pub collect: Vec<Collect>,
    /// Steps, when the task comes in parts; empty for the usual one.
    pub stages: Vec<Stage>,
    /// How the rewards of steps become one.
    pub strategy: Strategy,
    /// Command run in the workspace before the harness.
    pub setup: Option<String>,
    /// Whether the verifier gets a fresh sandbox with nothing but the artifacts in it.
    pub verifier_apart: bool,
    /// Why it cannot be run as it is: each a sentence. A task with one of these can be read and
    /// counted; whoever wants to run it is refused with the sentence.
    pub refusals: Vec<String>,
}

impl Environment {
    /// What a run that may reach these hosts grants the task: nothing to one that wants no network,
    /// what it asks for to one that asks (`public` asks for `*`), all of it to one that says nothing.
    ///
    /// # Errors
    /// The hosts that it asks for and the run may not reach.
    pub fn grant(&self, egress: &[String]) -> Result<Vec<String>, Vec<String>> {
        let wanted = match &self.network {
            _ if !self.network_said => return Ok(egress.to_vec()),
            Network::None => return Ok(Vec::new()),
            Network::Public => vec!["*".to_owned()],
            Network::Allowlist { hosts } => hosts.clone(),
        };
        let missing: Vec<String> = wanted
            .iter()
            .filter(|host| !egress.iter().any(|rule| covers(rule, host)))
            .cloned()
            .collect();
        if missing.is_empty() {
            Ok(wanted)
        } else {
            Err(missing)
        }
    }

    /// The hosts that the task asks for itself, in words; `None` when it asks for none.
    #[must_use]
    pub fn asks_for(&self) -> Option<String> {
        match &self.network {
            Network::Public if self.network_said => Some("the internet".to_owned()),
            Network::Allowlist { hosts } if self.network_said => Some(hosts.join(", ")),
            _ => None,
        }
    }
}

/// Whether a rule (`host`, `host:port`, `*.parent`, `*`) lets through all that another one names.
fn covers(rule: &str, host: &str) -> bool {
    let (rule, host) = (
        rule.trim().to_ascii_lowercase(),
        host.trim().to_ascii_lowercase(),
    );
    // A range is more than the proxy can compare with a name.
    if host.contains('/') {
        return false;
    }
    let parts = |text: &str| match text.rsplit_once(':') {
        Some((name, port)) if port.parse::<u16>().is_ok() && !name.contains(':') => {
            (name.to_owned(), Some(port.to_owned()))
        }
        _ => (text.to_owned(), None),
    };
    let ((rule, rule_port), (host, port)) = (parts(&rule), parts(&host));
    // A rule without a port means 80 and 443.
    let ports_fit = match (&rule_port, &port) {
        (None, None) => true,
        (None, Some(port)) => port == "80" || port == "443",
        (rule, port) => rule == port,
    };
    let below = |parent: &str| {
        host.strip_suffix(parent)
            .and_then(|rest| rest.strip_suffix('.'))
            .is_some_and(|rest| !rest.is_empty())
    };
    ports_fit && (rule == "*" || rule == host || rule.strip_prefix("*.").is_some_and(below))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(network: Network, network_said: bool) -> Environment {
        Environment {
            network,
            network_said,
            ..Environment::default()
        }
    }

    fn list(hosts: &[&str]) -> Vec<String> {
        hosts.iter().map(|host| (*host).to_owned()).collect()
    }

    #[test]
    fn a_run_grants_what_is_asked_for_and_never_more_than_it_may() {
        let run = list(&["pypi.org", "*.pythonhosted.org", "mirror:8443"]);
        let asks = |hosts: &[&str]| {
            let hosts = list(hosts);
            place(Network::Allowlist { hosts }, true).grant(&run)
        };
        assert_eq!(asks(&["PyPI.org"]), Ok(list(&["PyPI.org"])));
        let files = "data.pythonhosted.org";
        assert_eq!(
            asks(&[files, "pypi.org:443"]),
            Ok(list(&[files, "pypi.org:443"]))
        );
        assert_eq!(
            asks(&["*.a.pythonhosted.org"]),
            Ok(list(&["*.a.pythonhosted.org"]))
        );
        assert_eq!(
            asks(&[
                "pypi.org",
                "evil.org",
                "pypi.org:22",
                "pythonhosted.org",
                "10.0.0.0/8",
                "mirror",
                "*"
            ]),
            Err(list(&[
                "evil.org",
                "pypi.org:22",
                "pythonhosted.org",
                "10.0.0.0/8",
                "mirror",
                "*"
            ]))
        );
        // Everything is granted by name only.
        assert_eq!(place(Network::Public, true).grant(&run), Err(list(&["*"])));
        assert_eq!(
            place(Network::Public, true).grant(&list(&["*"])),
            Ok(list(&["*"]))
        );
        // None means none, silence takes what there is.
        assert_eq!(place(Network::None, true).grant(&run), Ok(Vec::new()));
        for silent in [Network::None, Network::Public] {
            assert_eq!(place(silent.clone(), false).grant(&run), Ok(run.clone()));
            assert_eq!(place(silent, false).grant(&[]), Ok(Vec::new()));
        }
    }
}
