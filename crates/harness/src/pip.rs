//! Installs of kind `pip`: packages in the folder `site` of the bundle, to be put on PYTHONPATH.
//! No virtual environment: those hold absolute paths and would break under another mount point.

use std::{ffi::OsString, fs, path::Path, time::Duration};

use crate::{
    HarnessError, Profile,
    install::Runtime,
    read::parse_version,
    run::{answer, installer, visible, which},
};

const ADVICE: &str = "check that the package registry can be reached (a mirror is set with PIP_INDEX_URL) and that the disk has 1 GB free, then try again";

/// A Python of the machine that sandboxes see, new enough, with pip.
pub(crate) async fn runtime(name: &str, python_min: Option<&str>) -> Result<Runtime, HarnessError> {
    let wanted = python_min.and_then(parse_version).unwrap_or((3, 0, 0));
    let mut found = Vec::new();
    let mut seen = Vec::new();
    let names = [
        "python3",
        "python3.14",
        "python3.13",
        "python3.12",
        "python3.11",
    ];
    let paths = names.iter().filter_map(|name| which(name));
    let system = ["/usr/bin/python3", "/usr/local/bin/python3"].map(std::path::PathBuf::from);
    for path in paths.chain(system) {
        let Some(python) = visible(&path) else {
            continue;
        };
        if seen.contains(&python) {
            continue;
        }
        seen.push(python.clone());
        let script = "import sys; print('%d.%d.%d' % sys.version_info[:3])";
        let version = answer(&python, &["-c", script]).await.unwrap_or_default();
        found.push(format!("{} is {version}", python.display()));
        if parse_version(&version) < Some(wanted) {
            continue;
        }
        if answer(&python, &["-m", "pip", "--version"]).await.is_none() {
            found.push("but it has no pip".into());
            continue;
        }
        return Ok(Runtime::Machine(python));
    }
    Err(HarnessError::Tool {
        name: name.to_owned(),
        tool: format!(
            "python {} or newer under /usr, with pip",
            python_min.unwrap_or("3")
        ),
        found: if found.is_empty() {
            "there is none".into()
        } else {
            found.join(", ")
        },
        advice: "install it (Debian, Ubuntu: `apt-get install python3 python3-pip`)".into(),
    })
}

/// Fills the folder, and says what is in it.
pub(crate) async fn install(
    profile: &Profile,
    packages: &[String],
    runtime: &Runtime,
    folder: &Path,
    timeout: Duration,
) -> Result<Vec<String>, HarnessError> {
    let Runtime::Machine(python) = runtime else {
        return Ok(Vec::new());
    };
    let site = folder.join("site");
    let mut arguments: Vec<OsString> = [
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        "--target",
    ]
    .into_iter()
    .map(OsString::from)
    .collect();
    arguments.push(site.clone().into());
    for (index, package) in packages.iter().enumerate() {
        arguments.push(if index == 0 {
            format!("{package}=={}", profile.version).into()
        } else {
            package.into()
        });
    }
    installer(
        &profile.name,
        python,
        &arguments,
        folder,
        None,
        timeout,
        ADVICE,
    )
    .await?;
    distributions(&site).map_err(|error| HarnessError::Cache {
        path: site,
        reason: error.to_string(),
    })
}

/// `NAME-VERSION` of every distribution, from the names of its metadata folders.
fn distributions(site: &Path) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(site)? {
        let name = entry?.file_name();
        if let Some(name) = name.to_string_lossy().strip_suffix(".dist-info") {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}
