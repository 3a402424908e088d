//! The shape of `task.toml` and `solution.toml`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::services::{self, McpForm, ServiceForm};
use crate::{Contract, Environment, Grading, Network, Payload, Step, Task, chores};

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TaskForm {
    pub(super) format: u32,
    pub(super) id: String,
    pub(super) family: String,
    #[serde(default = "workspace")]
    pub(super) workspace: PathBuf,
    #[serde(default = "home")]
    pub(super) home: PathBuf,
    /// Hosts that it needs; an empty list wants none, without the key it takes what the run allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) network: Option<Vec<String>>,
    pub(super) verifier: Option<VerifierForm>,
    #[serde(default, skip_serializing_if = "toml::Table::is_empty")]
    pub(super) metadata: toml::Table,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) services: Vec<ServiceForm>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) mcp_servers: Vec<McpForm>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VerifierForm {
    #[serde(default = "verifier_folder")]
    pub(super) folder: PathBuf,
    pub(super) argv: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) cwd: Option<PathBuf>,
    #[serde(default = "timeout_s")]
    pub(super) timeout_s: u64,
    #[serde(default)]
    pub(super) contract: ContractForm,
}

#[derive(Debug, Default, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum ContractForm {
    #[default]
    LastLine,
    LastLineOrZero,
}

fn workspace() -> PathBuf {
    PathBuf::from(chores::WORKSPACE)
}

fn home() -> PathBuf {
    PathBuf::from(chores::HOME)
}

fn verifier_folder() -> PathBuf {
    PathBuf::from(".verify")
}

fn timeout_s() -> u64 {
    60
}

impl From<ContractForm> for Contract {
    fn from(form: ContractForm) -> Self {
        match form {
            ContractForm::LastLine => Self::LastLine,
            ContractForm::LastLineOrZero => Self::LastLineOrZero,
        }
    }
}

impl TaskForm {
    /// The form of a task; the error says what our format cannot hold.
    pub(super) fn of(task: &Task) -> Result<Self, String> {
        let network = network_of(&task.environment)?;
        let place = &task.environment;
        let plain = Environment {
            services: place.services.clone(),
            tools: services::tools(&place.services),
            mcp_servers: place.mcp_servers.clone(),
            network: place.network.clone(),
            network_said: place.network_said,
            egress: place.egress.clone(),
            ..Environment::default()
        };
        let beyond = task.grading != Grading::default()
            || *place != plain
            || task.verifier.payload != Payload::None
            || !task.verifier.env.is_empty();
        if beyond {
            let format = task.format.name();
            return Err(format!(
                "our format cannot say what {format} says of grading or environment"
            ));
        }
        let mut metadata = toml::Table::new();
        for (key, value) in &task.metadata {
            let value = toml_of(value).map_err(|what| format!("metadata.{key}: {what}"))?;
            metadata.insert(key.clone(), value);
        }
        Ok(Self {
            format: 1,
            id: task.id.to_string(),
            family: task.family.clone(),
            workspace: task.workspace.clone(),
            home: task.home.clone(),
            network,
            verifier: Some(VerifierForm {
                folder: task.verifier.folder.clone(),
                argv: task.verifier.argv.clone(),
                cwd: task.verifier.cwd.clone(),
                timeout_s: task.verifier.timeout_s,
                contract: match task.verifier.contract {
                    Contract::LastLine => ContractForm::LastLine,
                    Contract::LastLineOrZero => ContractForm::LastLineOrZero,
                    other => return Err(format!("our format has no contract {other:?}")),
                },
            }),
            metadata,
            services: place
                .services
                .iter()
                .map(ServiceForm::of)
                .collect::<Result<_, _>>()?,
            mcp_servers: place.mcp_servers.iter().map(McpForm::of).collect(),
        })
    }
}

/// What a task says of the network.
fn network_of(place: &Environment) -> Result<Option<Vec<String>>, String> {
    match &place.network {
        _ if !place.network_said && place.network == Network::None => Ok(None),
        Network::None => Ok(Some(Vec::new())),
        Network::Allowlist { hosts } => Ok(Some(hosts.clone())),
        Network::Public if place.network_said => Ok(Some(vec!["*".to_owned()])),
        Network::Public => {
            Err("our format cannot say that the internet is only allowed".to_owned())
        }
    }
}

/// The place of a task that says this of the network.
pub(super) fn place(network: Option<Vec<String>>) -> Environment {
    let network_said = network.is_some();
    let network = match network {
        Some(hosts) if hosts == ["*"] => Network::Public,
        Some(hosts) if !hosts.is_empty() => Network::Allowlist { hosts },
        _ => Network::None,
    };
    Environment {
        network,
        network_said,
        ..Environment::default()
    }
}

fn toml_of(value: &Json) -> Result<toml::Value, String> {
    Ok(match value {
        Json::Null => return Err("TOML has no null; leave the key out".to_owned()),
        Json::Bool(value) => (*value).into(),
        Json::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(value), _) => value.into(),
            (None, Some(value)) if number.is_f64() => value.into(),
            _ => return Err(format!("{number} does not fit 64 bits with a sign")),
        },
        Json::String(text) => text.as_str().into(),
        Json::Array(items) => {
            toml::Value::Array(items.iter().map(toml_of).collect::<Result<_, _>>()?)
        }
        Json::Object(items) => toml::Value::Table(
            items
                .iter()
                .map(|(key, value)| Ok((key.clone(), toml_of(value)?)))
                .collect::<Result<_, String>>()?,
        ),
    })
}

fn json(value: toml::Value) -> Json {
    match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(value) => value.into(),
        toml::Value::Float(value) => value.into(),
        toml::Value::Boolean(value) => value.into(),
        toml::Value::Datetime(value) => value.to_string().into(),
        toml::Value::Array(items) => items.into_iter().map(json).collect(),
        toml::Value::Table(items) => items
            .into_iter()
            .map(|(key, value)| (key, json(value)))
            .collect(),
    }
}

/// A TOML table as JSON; dates become text.
pub(super) fn json_of(table: toml::Table) -> BTreeMap<String, Json> {
    table
        .into_iter()
        .map(|(key, value)| (key, json(value)))
        .collect()
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SolutionForm {
    #[serde(default)]
    pub(super) step: Vec<StepForm>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct StepForm {
    #[serde(skip_serializing_if = "Option::is_none")]
    bash: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    read: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    write: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    edit: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    old: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    new: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    say: Option<String>,
}

impl StepForm {
    /// The step; the error lists the keys found.
    pub(super) fn into_step(self) -> Result<Step, String> {
        let keys = [
            ("bash", self.bash.is_some()),
            ("read", self.read.is_some()),
            ("write", self.write.is_some()),
            ("text", self.text.is_some()),
            ("edit", self.edit.is_some()),
            ("old", self.old.is_some()),
            ("new", self.new.is_some()),
            ("say", self.say.is_some()),
        ];
        let found: Vec<_> = keys
            .iter()
            .filter(|(_, set)| *set)
            .map(|(key, _)| *key)
            .collect();
        Ok(match (found.as_slice(), self) {
            (
                ["bash"],
                Self {
                    bash: Some(command),
                    ..
                },
            ) => Step::Bash(command),
            (
                ["read"],
                Self {
                    read: Some(path), ..
                },
            ) => Step::Read(path.into()),
            (
                ["write", "text"],
                Self {
                    write: Some(path),
                    text: Some(text),
                    ..
                },
            ) => Step::Write(path.into(), text),
            (
                ["edit", "old", "new"],
                Self {
                    edit: Some(path),
                    old: Some(old),
                    new: Some(new),
                    ..
                },
            ) => Step::Edit(path.into(), old, new),
            (
                ["say"],
                Self {
                    say: Some(text), ..
                },
            ) => Step::Say(text),
            _ if found.is_empty() => return Err("nothing".to_owned()),
            _ => return Err(found.join(" + ")),
        })
    }
}

impl SolutionForm {
    pub(super) fn of(steps: &[Step]) -> Result<Self, String> {
        let name = |path: &Path| {
            path.to_str()
                .map(str::to_owned)
                .ok_or_else(|| format!("path {path:?} is not UTF-8"))
        };
        let step = steps
            .iter()
            .map(|step| {
                let mut form = StepForm::default();
                match step {
                    Step::Bash(command) => form.bash = Some(command.clone()),
                    Step::Read(path) => form.read = Some(name(path)?),
                    Step::Write(path, text) => {
                        form.write = Some(name(path)?);
                        form.text = Some(text.clone());
                    }
                    Step::Edit(path, old, new) => {
                        form.edit = Some(name(path)?);
                        form.old = Some(old.clone());
                        form.new = Some(new.clone());
                    }
                    Step::Say(text) => form.say = Some(text.clone()),
                }
                Ok(form)
            })
            .collect::<Result<_, String>>()?;
        Ok(Self { step })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_task_says_of_the_network_is_read_as_it_is_written() {
        let list = |hosts: &[&str]| Some(hosts.iter().map(|host| (*host).to_owned()).collect());
        let all: [Option<Vec<String>>; 4] = [
            None,
            list(&[]),
            list(&["pypi.org", "*.example.org"]),
            list(&["*"]),
        ];
        for said in all {
            assert_eq!(network_of(&place(said.clone())), Ok(said));
        }
        assert_eq!(place(None), Environment::default());
        assert_eq!(place(list(&["*"])).network, Network::Public);
    }
}
