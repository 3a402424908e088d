//! Installs of kind `npm`.

use std::{ffi::OsString, fs, path::Path, time::Duration};

use serde::Deserialize;

use crate::{
    HarnessError, Profile,
    install::Runtime,
    read::parse_version,
    run::{answer, installer, visible, which},
};

/// The Node.js that goes into a bundle when the machine has none that will do. The package holds
/// the program and needs no install script.
const NODE_VERSION: &str = "22.23.5";

const ADVICE: &str = "check that the package registry can be reached (`npm ping`; a mirror is set with `npm config set registry URL`) and that the disk has 1 GB free, then try again";

/// The machine's Node.js when sandboxes see it and it is new enough, else one from the registry.
///
/// # Errors
/// [`HarnessError::Tool`] when neither is new enough.
pub(crate) async fn runtime(name: &str, node_min: Option<&str>) -> Result<Runtime, HarnessError> {
    let wanted = node_min.and_then(parse_version).unwrap_or((0, 0, 0));
    if let Some(node) = which("node").as_deref().and_then(visible) {
        let version = answer(&node, &["--version"]).await;
        if version.as_deref().and_then(parse_version) >= Some(wanted) {
            return Ok(Runtime::Machine(node));
        }
    }
    if parse_version(NODE_VERSION) < Some(wanted) {
        return Err(HarnessError::Tool {
            name: name.to_owned(),
            tool: format!("node {} or newer under /usr", node_min.unwrap_or_default()),
            found: format!("the newest that Espalier installs by itself is {NODE_VERSION}"),
            advice: "install a newer Node.js under /usr or /usr/local".into(),
        });
    }
    let processor = match std::env::consts::ARCH {
        "aarch64" => "arm64",
        _ => "x64",
    };
    Ok(Runtime::Bundled {
        package: format!("node-linux-{processor}@{NODE_VERSION}"),
        program: format!("node_modules/node-linux-{processor}/bin/node"),
    })
}

/// Fills the folder, and says what is in it.
pub(crate) async fn install(
    profile: &Profile,
    package: &str,
    scripts: bool,
    runtime: &Runtime,
    folder: &Path,
    timeout: Duration,
) -> Result<Vec<String>, HarnessError> {
    let Some(npm) = which("npm") else {
        return Err(HarnessError::Tool {
            name: profile.name.clone(),
            tool: "npm".into(),
            found: "it is not in PATH".into(),
            advice: "install Node.js with npm (Debian, Ubuntu: `apt-get install nodejs npm`), or choose a harness that needs none: `--harness react`".into(),
        });
    };
    let base = || -> Vec<OsString> {
        let mut arguments: Vec<OsString> = [
            "install",
            "--no-audit",
            "--no-fund",
            "--save-exact",
            "--prefix",
        ]
        .into_iter()
        .map(OsString::from)
        .collect();
        arguments.push(folder.into());
        arguments
    };
    let name = &profile.name;
    let started = std::time::Instant::now();
    let mut arguments = base();
    let mut node = None;
    if scripts {
        // Since version 11, npm runs install scripts only when told to.
        let version = answer(&npm, &["--version"]).await;
        if version.as_deref().and_then(parse_version) >= Some((11, 0, 0)) {
            arguments.push("--dangerously-allow-all-scripts".into());
        }
        // Scripts run on the Node.js that the harness will run on, so that one comes first.
        if let Runtime::Bundled { package, program } = runtime {
            let mut first = base();
            first.push("--ignore-scripts".into());
            first.push(package.into());
            installer(name, &npm, &first, folder, None, timeout, ADVICE).await?;
            node = folder.join(program).parent().map(Path::to_owned);
        }
    } else {
        arguments.push("--ignore-scripts".into());
    }
    arguments.push(format!("{package}@{}", profile.version).into());
    if let Runtime::Bundled { package, .. } = runtime {
        arguments.push(package.into());
    }
    let left = timeout.saturating_sub(started.elapsed());
    let node = node.as_deref();
    installer(name, &npm, &arguments, folder, node, left, ADVICE).await?;
    packages(folder).map_err(|reason| HarnessError::Cache {
        path: folder.join("package-lock.json"),
        reason,
    })
}

#[derive(Deserialize)]
struct LockFile {
    packages: std::collections::BTreeMap<String, LockedPackage>,
}

#[derive(Deserialize)]
struct LockedPackage {
    #[serde(default)]
    version: String,
    #[serde(default)]
    integrity: String,
}

/// Path, version and checksum of every package. The registry's address is left out, so that a
/// mirror gives the same digest.
fn packages(folder: &Path) -> Result<Vec<String>, String> {
    let text = fs::read(folder.join("package-lock.json")).map_err(|error| error.to_string())?;
    let lock: LockFile = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    Ok(lock
        .packages
        .into_iter()
        .filter(|(path, _)| !path.is_empty())
        .map(|(path, package)| format!("{path} {} {}", package.version, package.integrity))
        .collect())
}
