//! `espalier doctor`: what works on this machine, and what to do about what does not. Changes
//! nothing.

mod engines;

use std::path::{Path, PathBuf};

use harness::{Install, Profile};
use serde::Serialize;
use task::Split;

use crate::{display::Display, error::CliError, policy, recipe::Recipe, text::table};

/// Free space that a run with its checkpoints should have.
const DISK_BYTES_MIN: u64 = 2 << 30;
/// Checks without which no rollout can run, of whatever kind its sandbox is.
const NEEDED: [&str; 6] = [
    "processor",
    "container engine",
    "container image",
    "kubernetes cluster",
    "kubernetes permissions",
    "kubernetes pod",
];
/// Checks without which no sandbox of this machine can be made.
const NEEDED_LOCALLY: [&str; 5] = [
    "kernel",
    "guest",
    "namespaces",
    "sandbox",
    "user namespace policy",
];

/// Say what works on this machine, and what to do about what does not.
///
/// With a recipe also its policy, tasks, harnesses, engines, judges and container engine are looked
/// at. Exit code 1 when something is
/// missing that is needed.
///
/// Example: espalier doctor recipes/quickstart.toml
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The recipe that is to run here.
    recipe: Option<PathBuf>,
    /// An engine to look at, as `serve` and `eval` take it; may be given several times.
    #[arg(long, value_name = "KIND:WHERE")]
    engine: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Ok,
    /// Works, at a price.
    Limited,
    /// Needed and missing.
    Missing,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Limited => "limited",
            Self::Missing => "MISSING",
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Line {
    name: String,
    state: State,
    found: String,
    /// What the lack costs.
    costs: String,
    /// What to do about it.
    advice: String,
}

fn ok(name: impl Into<String>, found: impl Into<String>) -> Line {
    let (name, found) = (name.into(), found.into());
    Line {
        name,
        state: State::Ok,
        found,
        costs: String::new(),
        advice: String::new(),
    }
}

fn lacking(
    needed: bool,
    name: impl Into<String>,
    found: impl Into<String>,
    costs: impl Into<String>,
    advice: impl Into<String>,
) -> Line {
    let state = if needed {
        State::Missing
    } else {
        State::Limited
    };
    Line {
        state,
        costs: costs.into(),
        advice: advice.into(),
        ..ok(name, found)
    }
}

/// A check of the sandboxes; `locally` when they are to be made on this machine.
fn line(check: sandbox::Check, locally: bool) -> Line {
    if check.ok {
        return ok(check.name, check.found);
    }
    let name = check.name.as_str();
    let needed = NEEDED.contains(&name) || locally && NEEDED_LOCALLY.contains(&name);
    lacking(needed, check.name, check.found, check.costs, check.advice)
}

/// Runs the command.
pub(crate) async fn run(arguments: Arguments, json: bool) -> Result<(), CliError> {
    let display = Display::new(json);
    let recipe = arguments.recipe.as_deref().map(Recipe::load).transpose()?;
    let checks = tokio::task::spawn_blocking(sandbox::doctor)
        .await
        .map_err(|error| CliError::failed("looking at the machine", error))?;
    let kind = recipe.as_ref().map(|recipe| &recipe.sandbox);
    let locally = kind.is_none_or(|kind| matches!(kind, sandbox::SandboxConfig::Local(_)));
    let mut checks = checks;
    if let Some(kind) = kind {
        checks.extend(sandbox::doctor_kind(kind).await);
    }
    let mut lines: Vec<Line> = checks
        .into_iter()
        .map(|check| line(check, locally))
        .collect();
    lines.extend(engines::lines(recipe.as_ref(), &arguments.engine).await);
    lines.push(disk(Path::new(".")));
    lines.push(program(
        "python3",
        "chores of family fix-python, and harnesses of kind pip",
        "python3",
    ));
    let harnesses = match &recipe {
        Some(recipe) => recipe.harnesses.clone(),
        None => harness::names(folder().as_deref()),
    };
    lines.extend(harnesses.iter().map(|name| bundle(name, recipe.is_some())));
    if let Some(recipe) = &recipe {
        lines.extend(policy_lines(&recipe.policy.folder));
        lines.push(tasks("tasks.train", &recipe.tasks.train, Split::Train));
        lines.push(tasks(
            "tasks.held_out",
            &recipe.tasks.held_out,
            Split::HeldOut,
        ));
    }
    let value = serde_json::to_value(&lines)
        .map_err(|error| CliError::failed("the answer as JSON", error))?;
    display.json(&value);
    display.line(text(&lines).trim_end());
    let missing: Vec<&str> = lines
        .iter()
        .filter(|line| line.state == State::Missing)
        .map(|line| line.name.as_str())
        .collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(CliError::plain(
            format!("needed and missing: {}", missing.join(", ")),
            "do what stands behind `do:` above, then run espalier doctor again",
        )),
    }
}

fn text(lines: &[Line]) -> String {
    let rows: Vec<Vec<String>> = lines
        .iter()
        .map(|line| {
            vec![
                line.state.name().to_owned(),
                line.name.clone(),
                line.found.clone(),
            ]
        })
        .collect();
    let mut text = table(&["", "what", "found"], &rows);
    for line in lines.iter().filter(|line| line.state != State::Ok) {
        text.push_str(&format!("\n{} ({})\n", line.name, line.state.name()));
        for (word, what) in [("costs", &line.costs), ("do", &line.advice)] {
            if !what.is_empty() {
                text.push_str(&format!("  {word}: {what}\n"));
            }
        }
    }
    text
}

/// Profiles of the user's own, as for every other command.
fn folder() -> Option<PathBuf> {
    std::env::var_os("ESPALIER_HARNESSES").map(PathBuf::from)
}

fn disk(folder: &Path) -> Line {
    match rustix::fs::statvfs(folder) {
        Ok(system) => {
            let free = system.f_bavail.saturating_mul(system.f_frsize);
            let found = format!("{:.1} GiB free here", free as f64 / (1u64 << 30) as f64);
            if free >= DISK_BYTES_MIN {
                return ok("disk", found);
            }
            lacking(
                false,
                "disk",
                found,
                "a run stops when the disk is full; nothing saved before is lost",
                "free 2 GiB, or choose another --out",
            )
        }
        Err(error) => lacking(
            false,
            "disk",
            error.to_string(),
            "unknown",
            "check the folder",
        ),
    }
}

/// Where a program is, when sandboxes see it too: they have `/usr` of this machine.
fn in_sandboxes(name: &str) -> Option<PathBuf> {
    let folders = ["/usr/local/bin", "/usr/bin", "/bin"].map(Path::new);
    folders
        .iter()
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}

fn program(name: &str, used_by: &str, package: &str) -> Line {
    match in_sandboxes(name) {
        Some(path) => ok(name, path.display().to_string()),
        None => lacking(
            false,
            name,
            "not in /usr/local/bin or /usr/bin, which is what sandboxes see",
            format!("these fail: {used_by}"),
            format!("apt-get install {package}"),
        ),
    }
}

fn in_path(name: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).is_file()))
}

/// Whether a harness can run. Nothing is installed here.
fn bundle(name: &str, needed: bool) -> Line {
    let title = format!("harness {name}");
    let profile = match Profile::load(folder().as_deref(), name) {
        Ok(profile) => profile,
        Err(error) => {
            return lacking(
                needed,
                title,
                error.to_string(),
                "it cannot be used",
                "correct the profile or the name",
            );
        }
    };
    let tool = match profile.install {
        Install::None => {
            return ok(
                title,
                format!("{} {}, in every sandbox", profile.name, profile.version),
            );
        }
        Install::Npm { .. } => "npm",
        Install::Pip { .. } => "python3",
    };
    if let Some(folder) = installed(&profile) {
        return ok(
            title,
            format!(
                "{} {}, in {}",
                profile.name,
                profile.version,
                folder.display()
            ),
        );
    }
    if in_path(tool) {
        return ok(
            title,
            format!(
                "{} {}, is installed at first use with {tool}",
                profile.name, profile.version
            ),
        );
    }
    let advice = match tool {
        "npm" => "apt-get install nodejs npm",
        _ => "apt-get install python3 python3-venv",
    };
    lacking(
        needed,
        title,
        format!("not installed, and {tool} is not in PATH"),
        "it cannot be used",
        advice,
    )
}

/// A bundle of this version in the cache.
fn installed(profile: &Profile) -> Option<PathBuf> {
    let start = format!("{}-{}-", profile.file(), profile.version);
    let entries = std::fs::read_dir(harness::cache_folder().ok()?).ok()?;
    entries.flatten().map(|entry| entry.path()).find(|path| {
        let name = path.file_name().and_then(|name| name.to_str());
        path.is_dir() && name.is_some_and(|name| name.starts_with(&start))
    })
}

fn policy_lines(folder: &Path) -> Vec<Line> {
    let advice =
        "point policy.folder at a Hugging Face folder with weights, tokenizer and chat template";
    let failed = |name: &str, error: &CliError| {
        lacking(true, name, chain(error), "the recipe cannot run", advice)
    };
    let codec = match policy::load_codec(folder) {
        Ok(codec) => codec,
        Err(error) => return vec![failed("policy tokenizer", &error)],
    };
    let mode = match codec.mode() {
        codec::Mode::Exact => ok(
            "policy tokenizer",
            format!("{} ids, prompts continue exactly", codec.vocabulary()),
        ),
        codec::Mode::ReEncode { reason } => lacking(
            false,
            "policy tokenizer",
            format!(
                "{} ids, prompts are encoded anew: {reason}",
                codec.vocabulary()
            ),
            "every call is a branch of its own: more tokens to compute, nothing wrong",
            "use a chat template that prints an assistant turn's content as it is",
        ),
    };
    let weights = match policy::load_weights(folder, &codec) {
        Ok(weights) => {
            let config = &weights.config;
            let shape = format!(
                "{} layers, context of {} tokens",
                config.num_hidden_layers, config.max_position_embeddings
            );
            ok("policy weights", shape)
        }
        Err(error) => failed("policy weights", &error),
    };
    vec![mode, weights]
}

fn tasks(key: &str, source: &str, split: Split) -> Line {
    match task::load(source, split) {
        Ok(tasks) if !tasks.is_empty() => ok(key, format!("{} tasks of {source}", tasks.len())),
        Ok(_) => lacking(
            true,
            key,
            format!("no tasks in {source}"),
            "the recipe cannot run",
            "name a folder of tasks, or chores",
        ),
        Err(error) => lacking(
            true,
            key,
            error.to_string(),
            "the recipe cannot run",
            "espalier tasks check SOURCE",
        ),
    }
}

/// The error with its causes on one line.
fn chain(error: &CliError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_comes_with_its_price_and_advice() {
        let lines = [
            ok("kernel", "6.1.0"),
            lacking(
                false,
                "cpu limit",
                "cgroup v1",
                "a busy loop slows its neighbours",
                "run as root",
            ),
            lacking(
                true,
                "sandbox",
                "refused",
                "no rollout can run",
                "allow user namespaces",
            ),
        ];
        insta::assert_snapshot!(text(&lines), @r"
                 what       found
        ok       kernel     6.1.0
        limited  cpu limit  cgroup v1
        MISSING  sandbox    refused

        cpu limit (limited)
          costs: a busy loop slows its neighbours
          do: run as root

        sandbox (MISSING)
          costs: no rollout can run
          do: allow user namespaces
        ");
    }

    #[test]
    fn a_policy_that_is_not_there_is_needed_and_missing() {
        let folder = tempfile::tempdir().unwrap();
        let lines = policy_lines(folder.path());
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].state, State::Missing);
        assert!(
            lines[0].found.contains("tokenizer.json"),
            "{}",
            lines[0].found
        );
    }

    #[test]
    fn what_a_cluster_does_is_not_needed_here() {
        let check = |name: &str| sandbox::Check {
            name: name.to_owned(),
            ok: false,
            found: String::new(),
            costs: String::new(),
            advice: String::new(),
        };
        assert_eq!(line(check("namespaces"), true).state, State::Missing);
        assert_eq!(line(check("namespaces"), false).state, State::Limited);
        assert_eq!(line(check("kubernetes pod"), false).state, State::Missing);
        assert_eq!(
            line(check("kubernetes egress"), false).state,
            State::Limited
        );
    }

    #[test]
    fn the_recipe_of_the_guide_to_clusters_is_one() {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/kubernetes/react.toml");
        let recipe = Recipe::load(&path).unwrap();
        assert!(matches!(
            recipe.sandbox,
            sandbox::SandboxConfig::Kubernetes(_)
        ));
        // As the run directory keeps it.
        let again = Recipe::parse(&recipe.to_toml().unwrap(), "run.toml").unwrap();
        assert_eq!(again.sandbox, recipe.sandbox);
    }

    #[test]
    fn only_harnesses_that_a_recipe_names_are_needed() {
        assert_eq!(bundle("nosuch", true).state, State::Missing);
        assert_eq!(bundle("nosuch", false).state, State::Limited);
        assert_eq!(bundle("react", true).state, State::Ok);
    }
}
