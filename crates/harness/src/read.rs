//! The profile file: strict reading.
//!
//! Every refusal says file, line, key and what was expected. The order of keys does not matter;
//! unknown keys are refused everywhere.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Component, Path},
};

use record::Dialect;
use serde::Deserialize;
use toml::Spanned;

use crate::{Habits, Install, Profile, ProfileError, ToolServers, template};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    name: Spanned<String>,
    #[serde(default)]
    summary: String,
    version: Spanned<String>,
    dialect: Option<Spanned<Dialect>>,
    dialects: Option<Spanned<Vec<Dialect>>>,
    install: RawInstall,
    launch: RawLaunch,
    #[serde(default)]
    limits: RawLimits,
    habits: Option<Spanned<Habits>>,
    tool_servers: Option<Spanned<ToolServers>>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum RawKind {
    None,
    Npm,
    Pip,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawInstall {
    kind: Spanned<RawKind>,
    package: Option<Spanned<String>>,
    node_min: Option<Spanned<String>>,
    scripts: Option<Spanned<bool>>,
    packages: Option<Spanned<Vec<String>>>,
    python_min: Option<Spanned<String>>,
    #[serde(default)]
    provides: Vec<Spanned<String>>,
    #[serde(default)]
    warm: Vec<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLaunch {
    argv: Spanned<Vec<Spanned<String>>>,
    stdin: Option<Spanned<String>>,
    workdir: Option<Spanned<String>>,
    #[serde(default)]
    env: BTreeMap<String, Spanned<String>>,
    #[serde(default)]
    files: BTreeMap<String, Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RawLimits {
    startup_s: u64,
    run_s: u64,
    install_s: u64,
    output_bytes_max: usize,
}

impl Default for RawLimits {
    fn default() -> Self {
        Self {
            startup_s: 120,
            run_s: 600,
            install_s: 900,
            output_bytes_max: 64 * 1024,
        }
    }
}

impl Profile {
    /// Reads a profile from text. `file` is for messages, `name` is what the profile must call
    /// itself.
    ///
    /// # Errors
    /// [`ProfileError`] with line, key and expectation.
    pub fn parse(file: &str, name: &str, text: &str) -> Result<Self, ProfileError> {
        let source = Source { file, text };
        let raw: RawFile = toml::from_str(text).map_err(|error| source.syntax(&error))?;
        if raw.name.get_ref() != name || !is_plain_name(name) {
            return Err(source.at(
                raw.name.span(),
                format!("expected the file's name, `{name}`: letters, digits, `-`, `_`, `.`"),
            ));
        }
        let version = raw.version.get_ref();
        if !is_plain_name(version) {
            return Err(source.at(
                raw.version.span(),
                "expected an exact version, e.g. `1.2.3` (letters, digits, `-`, `_`, `.`)".into(),
            ));
        }
        let dialects = source.dialects(&raw)?;
        let install = source.install(&raw.install)?;
        for path in &raw.install.provides {
            if !is_inside(path.get_ref()) {
                return Err(source.at(
                    path.span(),
                    "expected a path inside the bundle, without `..`".into(),
                ));
            }
        }
        let launch = &raw.launch;
        if launch.argv.get_ref().is_empty() {
            return Err(source.at(launch.argv.span(), "expected at least the program".into()));
        }
        let templates = launch
            .argv
            .get_ref()
            .iter()
            .chain(&raw.install.warm)
            .chain(&launch.stdin)
            .chain(&launch.workdir)
            .chain(launch.env.values())
            .chain(launch.files.values());
        for text in templates {
            template::check(text.get_ref()).map_err(|problem| source.at(text.span(), problem))?;
        }
        for (key, text) in &launch.env {
            if key.is_empty() || key.contains(['=', '\0']) {
                return Err(source.at(text.span(), format!("`{key}` cannot name a variable")));
            }
        }
        for (path, text) in &launch.files {
            if !is_inside(path) {
                return Err(source.at(
                    text.span(),
                    format!("`{path}`: expected a path relative to HOME, without `..`"),
                ));
            }
        }
        let instruction_used = launch
            .argv
            .get_ref()
            .iter()
            .chain(&launch.stdin)
            .chain(launch.env.values())
            .chain(launch.files.values())
            .any(|text| text.get_ref().contains("instruction"));
        if !instruction_used {
            return Err(source.at(
                launch.argv.span(),
                "expected `{{ instruction }}` in argv, stdin, env or files: the harness would never learn its task"
                    .into(),
            ));
        }
        for (code, habits) in raw.habits.iter().flat_map(|habits| {
            let codes = habits.get_ref().exit_truncates.keys();
            codes.map(move |code| (code, habits))
        }) {
            if code.parse::<u8>().is_err() {
                return Err(source.at(
                    habits.span(),
                    format!("exit_truncates: `{code}` is not an exit code; expected 0 to 255"),
                ));
            }
        }
        if let Some(servers) = &raw.tool_servers {
            check_tool_servers(servers.get_ref(), &launch.files)
                .map_err(|problem| source.at(servers.span(), problem))?;
        }
        let text = |text: &Spanned<String>| text.get_ref().clone();
        Ok(Self {
            name: name.to_owned(),
            summary: raw.summary,
            version: version.clone(),
            dialect: dialects[0],
            dialects,
            install,
            provides: raw.install.provides.iter().map(text).collect(),
            warm: raw.install.warm.iter().map(text).collect(),
            argv: launch.argv.get_ref().iter().map(text).collect(),
            stdin: launch.stdin.as_ref().map(text).unwrap_or_default(),
            workdir: launch
                .workdir
                .as_ref()
                .map_or_else(|| "{{ workspace }}".to_owned(), text),
            env: launch
                .env
                .iter()
                .map(|(k, v)| (k.clone(), text(v)))
                .collect(),
            files: launch
                .files
                .iter()
                .map(|(k, v)| (k.clone(), text(v)))
                .collect(),
            startup_s: raw.limits.startup_s,
            run_s: raw.limits.run_s,
            install_s: raw.limits.install_s,
            output_bytes_max: raw.limits.output_bytes_max,
            habits: raw.habits.map(Spanned::into_inner).unwrap_or_default(),
            tool_servers: raw.tool_servers.map(Spanned::into_inner),
        })
    }
}

/// What is wrong with the way in which a harness is told of tool servers.
fn check_tool_servers(
    servers: &ToolServers,
    files: &BTreeMap<String, Spanned<String>>,
) -> Result<(), String> {
    for kind in &servers.kinds {
        if !["stdio", "http", "sse"].contains(&kind.as_str()) {
            return Err(format!("kinds: `{kind}`: expected stdio, http or sse"));
        }
    }
    if servers.kinds.is_empty() {
        return Err("kinds: expected at least one of stdio, http, sse".into());
    }
    let texts = servers.argv.iter().chain(servers.env.values());
    for text in texts.chain(servers.files.values()) {
        template::check(text)?;
    }
    for path in servers.files.keys() {
        if !is_inside(path) {
            return Err(format!(
                "`{path}`: expected a path relative to HOME, without `..`"
            ));
        }
        if files.contains_key(path) {
            return Err(format!(
                "`{path}` is one of `launch.files` already; go through `tool_servers` there"
            ));
        }
    }
    Ok(())
}

/// Whether a text may be part of a file name.
pub(crate) fn is_plain_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 64
        && !text.starts_with(['.', '-'])
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '+'))
}

/// Whether a relative path stays inside its folder.
fn is_inside(path: &str) -> bool {
    !path.is_empty()
        && Path::new(path)
            .components()
            .all(|part| matches!(part, Component::Normal(_)))
}

/// A text with a name, to make errors that point into it.
struct Source<'a> {
    file: &'a str,
    text: &'a str,
}

impl Source<'_> {
    /// At least one dialect, the first one being what is spoken unless asked otherwise.
    fn dialects(&self, raw: &RawFile) -> Result<Vec<Dialect>, ProfileError> {
        match (&raw.dialect, &raw.dialects) {
            (Some(one), None) => Ok(vec![*one.get_ref()]),
            (None, Some(list)) => {
                let mut seen = Vec::new();
                for dialect in list.get_ref() {
                    if seen.contains(dialect) {
                        return Err(self.at(list.span(), "expected each dialect once".into()));
                    }
                    seen.push(*dialect);
                }
                if seen.is_empty() {
                    return Err(self.at(list.span(), "expected at least one dialect".into()));
                }
                Ok(seen)
            }
            (Some(one), Some(_)) => Err(self.at(
                one.span(),
                "expected `dialect` or `dialects`, not both".into(),
            )),
            (None, None) => Err(self.at(
                raw.name.span(),
                "expected a key `dialect` (or `dialects`, the usual one first): chat, responses, messages, gemini"
                    .into(),
            )),
        }
    }

    fn at(&self, span: Range<usize>, problem: String) -> ProfileError {
        let start = span.start.min(self.text.len());
        let line = self.text.as_bytes()[..start]
            .iter()
            .filter(|byte| **byte == b'\n')
            .count()
            + 1;
        let found = self.text.get(span).unwrap_or_default();
        let mut key: String = found
            .lines()
            .next()
            .unwrap_or_default()
            .chars()
            .take(80)
            .collect();
        if key.len() < found.len() {
            key.push('…');
        }
        ProfileError {
            file: self.file.to_owned(),
            line,
            key,
            problem,
        }
    }

    fn syntax(&self, error: &toml::de::Error) -> ProfileError {
        self.at(error.span().unwrap_or(0..0), error.message().to_owned())
    }

    /// The install section: every key belongs to one kind.
    fn install(&self, raw: &RawInstall) -> Result<Install, ProfileError> {
        let kind = *raw.kind.get_ref();
        let foreign = |span: Option<Range<usize>>, key: &str, owner: &str| match span {
            Some(span) => Err(self.at(span, format!("`{key}` belongs to kind = \"{owner}\""))),
            None => Ok(()),
        };
        if kind != RawKind::Npm {
            foreign(raw.package.as_ref().map(Spanned::span), "package", "npm")?;
            foreign(raw.node_min.as_ref().map(Spanned::span), "node_min", "npm")?;
            foreign(raw.scripts.as_ref().map(Spanned::span), "scripts", "npm")?;
        }
        if kind != RawKind::Pip {
            foreign(raw.packages.as_ref().map(Spanned::span), "packages", "pip")?;
            foreign(
                raw.python_min.as_ref().map(Spanned::span),
                "python_min",
                "pip",
            )?;
        }
        let version = |text: &Option<Spanned<String>>| match text {
            Some(text) if parse_version(text.get_ref()).is_none() => Err(self.at(
                text.span(),
                "expected a version of up to three numbers, e.g. `20.6.0`".into(),
            )),
            Some(text) => Ok(Some(text.get_ref().clone())),
            None => Ok(None),
        };
        match kind {
            RawKind::None => Ok(Install::None),
            RawKind::Npm => match &raw.package {
                None => Err(self.at(
                    raw.kind.span(),
                    "kind \"npm\" needs the key `package`, e.g. package = \"@scope/name\"".into(),
                )),
                Some(package) if !is_package(package.get_ref()) => Err(self.at(
                    package.span(),
                    "expected the bare name of a package; its version is the profile's `version`"
                        .into(),
                )),
                Some(package) => Ok(Install::Npm {
                    package: package.get_ref().clone(),
                    node_min: version(&raw.node_min)?,
                    scripts: raw.scripts.as_ref().is_some_and(|value| *value.get_ref()),
                }),
            },
            RawKind::Pip => match &raw.packages {
                Some(packages)
                    if packages.get_ref().first().is_some_and(|name| is_package(name))
                        && packages.get_ref().iter().all(|name| !name.starts_with('-')) =>
                {
                    Ok(Install::Pip {
                        packages: packages.get_ref().clone(),
                        python_min: version(&raw.python_min)?,
                    })
                }
                Some(packages) => Err(self.at(
                    packages.span(),
                    "expected requirements, the first a bare package name (its version is the profile's `version`)"
                        .into(),
                )),
                None => Err(self.at(
                    raw.kind.span(),
                    "kind \"pip\" needs the key `packages`, e.g. packages = [\"name\"]".into(),
                )),
            },
        }
    }
}

/// Whether a text is the name of a package and nothing else (no option, version or address).
fn is_package(name: &str) -> bool {
    let body = name.strip_prefix('@').unwrap_or(name);
    !body.is_empty()
        && body.starts_with(|c: char| c.is_ascii_alphanumeric())
        && body
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/'))
        && !body.contains("..")
}

/// `20.6.0` → (20, 6, 0); missing numbers are 0; a leading `v` is fine.
pub(crate) fn parse_version(text: &str) -> Option<(u32, u32, u32)> {
    let text = text.trim();
    let mut numbers = text.strip_prefix('v').unwrap_or(text).split('.');
    let major = numbers.next()?.parse().ok()?;
    let minor = numbers.next().map_or(Some(0), |part| part.parse().ok())?;
    let patch = numbers.next().map_or(Some(0), |part| part.parse().ok())?;
    numbers.next().is_none().then_some((major, minor, patch))
}
