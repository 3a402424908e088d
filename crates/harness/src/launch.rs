//! A profile and the facts of one rollout, turned into files and a process.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use sandbox::{Exec, File, Mount};

use crate::{
    HarnessError, Installed, ToolServers,
    profile::word,
    template::{self, Variables},
};

/// One argument may have this many bytes, the closing NUL not counted (a limit of the kernel).
const ARGUMENT_BYTES_MAX: usize = 128 * 1024 - 1;

/// A tool server (Model Context Protocol) that the harness is told of.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct ToolServer {
    /// Its name: letters, digits, `_` and `-`.
    pub name: String,
    /// `stdio`, `http` (streamable) or `sse`.
    pub kind: String,
    /// Program of a server of kind `stdio`.
    pub command: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Address of a server of another kind.
    pub url: String,
    /// Environment of the program.
    pub env: BTreeMap<String, String>,
    /// Headers of requests.
    pub headers: BTreeMap<String, String>,
}

/// Facts of one rollout that a profile may use.
#[derive(Debug, Clone)]
pub struct LaunchContext {
    /// What the harness is told to do.
    pub instruction: String,
    /// Root of the gateway as the sandbox sees it, with the rollout's path; no trailing slash.
    pub base_url: String,
    /// The rollout's secret.
    pub api_key: String,
    /// Name of the model to ask for.
    pub model: String,
    /// The task's workspace in the sandbox.
    pub workspace: PathBuf,
    /// HOME in the sandbox.
    pub home: PathBuf,
    /// Tokens that prompt and reply may have together.
    pub context_tokens: u32,
    /// Tokens that one reply may have.
    pub reply_tokens_max: u32,
    /// The orchestrator's limit for the run; the profile's own applies as well.
    pub timeout: Duration,
    /// Tool servers to tell the harness of.
    pub tool_servers: Vec<ToolServer>,
}

/// What to do in a sandbox so that the harness runs.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Files to write before.
    pub files: Vec<File>,
    /// The process.
    pub exec: Exec,
    /// Read-only folders that the sandbox must have been made with.
    pub mounts: Vec<Mount>,
}

impl Installed {
    /// Renders the profile for one rollout.
    ///
    /// # Errors
    /// [`HarnessError::Render`]: a template failed, a rendered `.json` file is not JSON, an
    /// argument has a NUL byte or is longer than the kernel takes. [`HarnessError::ToolServers`]:
    /// there are some that the harness cannot be told of.
    pub fn launch(&self, context: &LaunchContext) -> Result<Launch, HarnessError> {
        let profile = &self.profile;
        let failed = |what: &str, reason: String| HarnessError::Render {
            name: profile.name.clone(),
            what: what.to_owned(),
            reason,
        };
        let workspace = context.workspace.to_string_lossy();
        let home = context.home.to_string_lossy();
        let bundle = self.bundle.to_string_lossy();
        let variables = Variables {
            instruction: &context.instruction,
            base_url: context.base_url.trim_end_matches('/'),
            api_key: &context.api_key,
            model: &context.model,
            workspace: &workspace,
            home: &home,
            bundle: &bundle,
            node: &self.node,
            python: &self.python,
            guest: sandbox::GUEST_PATH,
            version: &profile.version,
            dialect: word(profile.dialect),
            context_tokens: context.context_tokens,
            reply_tokens_max: context.reply_tokens_max,
            tool_servers: &context.tool_servers,
        };
        let told = self.tell(&context.tool_servers)?;
        let mut argv = Vec::with_capacity(profile.argv.len());
        for (index, source) in profile.argv.iter().chain(&told.argv).enumerate() {
            let what = format!("launch.argv[{index}]");
            let argument =
                template::render(source, &variables).map_err(|reason| failed(&what, reason))?;
            check_argument(&argument).map_err(|reason| failed(&what, reason))?;
            argv.push(argument);
        }
        let mut env = BTreeMap::new();
        for (key, source) in profile.env.iter().chain(&told.env) {
            let what = format!("launch.env.{key}");
            let value =
                template::render(source, &variables).map_err(|reason| failed(&what, reason))?;
            check_argument(&value).map_err(|reason| failed(&what, reason))?;
            env.insert(key.clone(), value);
        }
        let mut files = Vec::with_capacity(profile.files.len());
        for (path, source) in profile.files.iter().chain(&told.files) {
            let what = format!("launch.files.{path:?}");
            let content =
                template::render(source, &variables).map_err(|reason| failed(&what, reason))?;
            if Path::new(path)
                .extension()
                .is_some_and(|extension| extension == "json")
            {
                serde_json::from_str::<serde::de::IgnoredAny>(&content).map_err(|error| {
                    failed(&what, format!("the rendered text is not JSON: {error}"))
                })?;
            }
            files.push(File {
                path: context.home.join(path),
                content: content.into_bytes(),
                mode: 0o600,
            });
        }
        let render = |what: &str, source: &str| {
            template::render(source, &variables).map_err(|reason| failed(what, reason))
        };
        Ok(Launch {
            files,
            exec: Exec {
                argv,
                cwd: Some(PathBuf::from(render("launch.workdir", &profile.workdir)?)),
                env,
                stdin: render("launch.stdin", &profile.stdin)?.into_bytes(),
                timeout: context.timeout.min(Duration::from_secs(profile.run_s)),
                output_bytes_max: profile.output_bytes_max,
                // The verifier must find a workspace that nobody changes any more.
                end_background: true,
                user: None,
            },
            mounts: self.mounts.clone(),
        })
    }
}

impl Installed {
    /// What is added for tool servers; nothing without any.
    fn tell(&self, servers: &[ToolServer]) -> Result<ToolServers, HarnessError> {
        if servers.is_empty() {
            return Ok(ToolServers::default());
        }
        let failed = |server: &ToolServer, reason: String| HarnessError::ToolServers {
            name: self.profile.name.clone(),
            server: server.name.clone(),
            reason,
        };
        let Some(way) = &self.profile.tool_servers else {
            let reason = "its profile has no table [tool_servers]".to_owned();
            return Err(failed(&servers[0], reason));
        };
        for server in servers {
            if !way.kinds.contains(&server.kind) {
                let kinds = way.kinds.join(", ");
                let reason = format!(
                    "it is of kind {}, and the harness uses {kinds}",
                    server.kind
                );
                return Err(failed(server, reason));
            }
            let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
            if server.name.is_empty() || !server.name.chars().all(plain) {
                let reason = "a name has letters, digits, `_` and `-` only".to_owned();
                return Err(failed(server, reason));
            }
        }
        Ok(way.clone())
    }
}

fn check_argument(text: &str) -> Result<(), String> {
    if text.contains('\0') {
        return Err("has a NUL byte, which no argument can carry; give it on stdin".into());
    }
    if text.len() > ARGUMENT_BYTES_MAX {
        return Err(format!(
            "{} bytes; the kernel takes at most {ARGUMENT_BYTES_MAX} in one argument; give it on stdin",
            text.len()
        ));
    }
    Ok(())
}
