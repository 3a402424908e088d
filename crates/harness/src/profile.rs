//! What is known of a harness, and where profiles are found. `read` reads the file.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    path::Path,
};

use record::Dialect;
use serde::{Deserialize, Serialize};

use crate::{HarnessError, builtin, read::is_plain_name};

/// The largest profile file, in bytes.
const FILE_BYTES_MAX: u64 = 256 * 1024;

/// How the harness gets onto the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Install {
    /// Nothing to install: it is in every sandbox already.
    None,
    /// A package of the npm registry, at the profile's `version`.
    Npm {
        /// The package.
        package: String,
        /// The oldest Node.js that runs it, e.g. `20.6.0`. An older one on the machine is not
        /// used: a current one is then installed into the bundle.
        node_min: Option<String>,
        /// Whether the install scripts of the packages may run. They do not unless asked.
        scripts: bool,
    },
    /// Packages of the Python registry; the first is taken at the profile's `version`.
    Pip {
        /// Requirements.
        packages: Vec<String>,
        /// The oldest Python that runs it, e.g. `3.11`.
        python_min: Option<String>,
    },
}

/// How a harness is told of tool servers (Model Context Protocol). Its templates are used only
/// when there are some; they, and all others, may go through `tool_servers`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolServers {
    /// What it can use: `stdio`, `http` (streamable), `sse`.
    pub kinds: Vec<String>,
    /// Templates of arguments, added at the end.
    #[serde(default)]
    pub argv: Vec<String>,
    /// Templates of environment variables, added.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Templates of files, by path relative to HOME, added.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
}

/// How a harness sends the model's own turn back in the next request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Echo {
    /// Tool-call arguments come back byte for byte.
    Verbatim,
    /// Arguments are parsed and written anew, key order kept.
    Reserialised,
    /// Arguments are parsed and written anew in the order of the schema.
    Reordered,
}

/// What the exit code of a harness tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitMeaning {
    /// 0 when it ended as it should, another code on errors.
    Reliable,
    /// 0 also when model calls failed.
    Unreliable,
}

/// How a model asks this harness for a sub-agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spawn {
    /// The tool.
    pub tool: String,
    /// The argument that takes what the sub-agent is to do.
    pub prompt: String,
    /// Its other arguments.
    #[serde(default)]
    pub arguments: BTreeMap<String, serde_json::Value>,
    /// The tool with which a sub-agent hands its result over, where its last words do not, and the
    /// argument that takes it.
    #[serde(default)]
    pub finish: Option<(String, String)>,
}

/// Declared facts about a harness. They explain what is seen; no verdict rests on them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Habits {
    /// Whether it asks for streams.
    pub streams: bool,
    /// How tool-call arguments come back.
    pub echo: Echo,
    /// Whether reasoning comes back.
    pub echoes_reasoning: bool,
    /// Whether it rewrites tool-call ids.
    pub rewrites_call_ids: bool,
    /// Whether it compacts a long history by itself.
    pub compaction: bool,
    /// Whether it starts sub-agents.
    pub subagents: bool,
    /// Whether it makes side calls (titles, memory).
    pub side_calls: bool,
    /// The most requests it makes for one call when the engine stays dead.
    pub tries_max: u32,
    /// What its exit code tells.
    pub exit_code: ExitMeaning,
    /// Exit codes that mean a spent budget: the code and the name of the budget. Such a rollout
    /// is truncated: verified and counted.
    pub exit_truncates: BTreeMap<String, String>,
    /// The command with which a run ends, for harnesses that do not end when the model stops
    /// calling tools. Teachers run it last.
    pub ends_with: Option<String>,
    /// How a sub-agent is asked for.
    pub spawn: Option<Spawn>,
    /// Faults of the line after which it gives up instead of asking again: `429`, `500`, `503`,
    /// `reset`, `cut`.
    pub gives_up_on: Vec<String>,
    /// Faults of the line after which it goes on with a changed history: half a reply taken for a
    /// whole one, a user message twice. The words are those of `gives_up_on`.
    pub edits_history_on: Vec<String>,
}

impl Default for Habits {
    fn default() -> Self {
        Self {
            streams: true,
            echo: Echo::Reserialised,
            echoes_reasoning: false,
            rewrites_call_ids: false,
            compaction: false,
            subagents: false,
            side_calls: false,
            tries_max: 30,
            exit_code: ExitMeaning::Unreliable,
            exit_truncates: BTreeMap::new(),
            ends_with: None,
            spawn: None,
            gives_up_on: Vec::new(),
            edits_history_on: Vec::new(),
        }
    }
}

impl Habits {
    /// The budget that this exit code says was spent, if any.
    #[must_use]
    pub fn truncates(&self, exit_code: i32) -> Option<&str> {
        self.exit_truncates
            .get(&exit_code.to_string())
            .map(String::as_str)
    }
}

/// The word for a dialect in profiles and names.
#[must_use]
pub fn word(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Chat => "chat",
        Dialect::Responses => "responses",
        Dialect::Messages => "messages",
        Dialect::Gemini => "gemini",
    }
}

/// A harness as we know it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Profile {
    /// Its name: the file's, without `.toml`, and `:DIALECT` when it speaks another one than the
    /// file's first.
    pub name: String,
    /// One line for people.
    pub summary: String,
    /// The version that is installed, and recorded with every rollout.
    pub version: String,
    /// The API it speaks with this configuration.
    pub dialect: Dialect,
    /// Every API that it can speak; the first one unless asked otherwise.
    pub dialects: Vec<Dialect>,
    /// How it gets onto the machine.
    pub install: Install,
    /// Files that a complete install has, relative to the bundle.
    pub provides: Vec<String>,
    /// Templates of a program and arguments that load the whole harness and end: run once in a
    /// sandbox after an install, to keep the code that it compiles. Empty: no such run.
    pub warm: Vec<String>,
    /// Templates of program and arguments.
    pub argv: Vec<String>,
    /// Template of standard input.
    pub stdin: String,
    /// Template of the working folder.
    pub workdir: String,
    /// Templates of environment variables.
    pub env: BTreeMap<String, String>,
    /// Templates of files, by path relative to HOME.
    pub files: BTreeMap<String, String>,
    /// Until the first model call, in seconds. Beyond it a rollout without calls is a fault.
    pub startup_s: u64,
    /// One run, in seconds. The orchestrator's own limit applies as well; the smaller one wins.
    pub run_s: u64,
    /// One install, in seconds.
    pub install_s: u64,
    /// Bytes kept of each of stdout and stderr.
    pub output_bytes_max: usize,
    /// Declared facts.
    pub habits: Habits,
    /// How it is told of tool servers; `None` when it cannot be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_servers: Option<ToolServers>,
}

/// Names of all profiles: those inside the binary and those of the folder, sorted.
#[must_use]
pub fn names(folder: Option<&Path>) -> Vec<String> {
    let mut names: HashSet<String> = builtin::names().map(str::to_owned).collect();
    let entries = folder.and_then(|folder| fs::read_dir(folder).ok());
    for entry in entries.into_iter().flatten().flatten() {
        let path = entry.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "toml")
            && let Some(stem) = path.file_stem().and_then(|stem| stem.to_str())
        {
            names.insert(stem.to_owned());
        }
    }
    let mut names: Vec<String> = names.into_iter().collect();
    names.sort();
    names
}

impl Profile {
    /// Reads `NAME.toml` of the folder when it is there, else the one inside the binary.
    /// `NAME:DIALECT` chooses one of the dialects that the profile offers.
    ///
    /// # Errors
    /// [`HarnessError::Unknown`], [`HarnessError::Read`], [`HarnessError::Profile`],
    /// [`HarnessError::Dialect`].
    pub fn load(folder: Option<&Path>, name: &str) -> Result<Self, HarnessError> {
        let (file, wanted) = match name.split_once(':') {
            Some((file, wanted)) => (file, Some(wanted)),
            None => (name, None),
        };
        let mut profile = Self::load_file(folder, file)?;
        if let Some(wanted) = wanted {
            let offered = &profile.dialects;
            let Some(dialect) = offered.iter().find(|one| word(**one) == wanted).copied() else {
                return Err(HarnessError::Dialect {
                    name: file.to_owned(),
                    wanted: wanted.to_owned(),
                    offered: offered
                        .iter()
                        .map(|one| word(*one))
                        .collect::<Vec<_>>()
                        .join(", "),
                });
            };
            profile.speak(dialect);
        }
        Ok(profile)
    }

    /// Chooses a dialect. Names stay as short as they can be: the first one is not named.
    pub fn speak(&mut self, dialect: Dialect) {
        let file = self.file().to_owned();
        self.dialect = dialect;
        self.name = if self.dialects.first() == Some(&dialect) {
            file
        } else {
            format!("{file}:{}", word(dialect))
        };
    }

    /// The name without the dialect: that of the file and of the bundle.
    #[must_use]
    pub fn file(&self) -> &str {
        self.name
            .split_once(':')
            .map_or(self.name.as_str(), |(file, _)| file)
    }

    fn load_file(folder: Option<&Path>, name: &str) -> Result<Self, HarnessError> {
        if let Some(folder) = folder {
            let path = folder.join(format!("{name}.toml"));
            if is_plain_name(name) && path.is_file() {
                let size = fs::metadata(&path).map(|data| data.len());
                let text = match size {
                    Ok(size) if size > FILE_BYTES_MAX => Err(format!(
                        "{size} bytes; a profile has at most {FILE_BYTES_MAX}"
                    )),
                    _ => fs::read_to_string(&path).map_err(|error| error.to_string()),
                };
                let text = text.map_err(|reason| HarnessError::Read {
                    path: path.clone(),
                    reason,
                })?;
                return Ok(Self::parse(&path.display().to_string(), name, &text)?);
            }
        }
        match builtin::text(name) {
            Some(text) => Ok(Self::parse(&format!("(built in) {name}.toml"), name, text)?),
            None => Err(HarnessError::Unknown {
                name: name.to_owned(),
                looked: folder.map_or_else(
                    || "the built-in profiles".to_owned(),
                    |folder| format!("{} and the built-in profiles", folder.display()),
                ),
                known: names(folder).join(", "),
            }),
        }
    }
}
