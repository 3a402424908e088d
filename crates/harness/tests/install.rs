//! Bundles: complete or absent. The installer of most tests is a small shell script in the place
//! of npm; one test installs the real pi when npm is there.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use harness::{HarnessError, Profile, cache_folder};
use tokio::io::AsyncReadExt;

const PROFILE: &str = r#"
name = "toy"
version = "1.0.0"
dialect = "chat"
[install]
kind = "npm"
package = "toy"
provides = ["node_modules/toy/cli.js"]
[launch]
argv = ["{{ node }}", "{{ bundle }}/node_modules/toy/cli.js", "{{ instruction }}"]
[limits]
install_s = 20
"#;

/// What a good npm leaves behind.
const GOOD: &str = r#"
echo run >> "$COUNT"
while [ $# -gt 0 ]; do [ "$1" = --prefix ] && prefix=$2; shift; done
mkdir -p "$prefix/node_modules/toy"
echo 'console.log(1)' > "$prefix/node_modules/toy/cli.js"
echo '{"packages":{"":{},"node_modules/toy":{"version":"1.0.0","integrity":"sha512-x","resolved":"https://mirror.example/toy"}}}' > "$prefix/package-lock.json"
"#;

/// Runs this test file's `worker` in a process of its own, whose PATH has only our npm, so that
/// no test changes the environment of another.
struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn new(npm: Option<&str>) -> Self {
        let machine = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        fs::create_dir(machine.path("bin")).unwrap();
        if let Some(script) = npm {
            machine.npm(script);
        }
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn npm(&self, script: &str) {
        let path = self.path("bin/npm");
        fs::write(&path, format!("#!/bin/sh\n{script}")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn command(&self) -> Command {
        self.worker("worker")
    }

    fn worker(&self, name: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([name, "--exact", "--nocapture", "--ignored"])
            .env(
                "PATH",
                format!("{}:/usr/bin:/bin", self.path("bin").display()),
            )
            .env("COUNT", self.path("count"))
            .env("TOY_CACHE", self.path("cache"));
        command
    }

    /// What the worker said.
    fn install(&self) -> String {
        said(&self.command().output().unwrap())
    }

    fn runs(&self) -> usize {
        fs::read_to_string(self.path("count")).map_or(0, |text| text.lines().count())
    }

    /// Names in the cache, locks left out.
    fn cache(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.path("cache"))
            .map(|entries| {
                entries
                    .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
                    .filter(|name| !name.ends_with(".lock"))
                    .collect()
            })
            .unwrap_or_default();
        names.sort();
        names
    }
}

fn said(output: &std::process::Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout);
    let start = text
        .find("SAID ")
        .unwrap_or_else(|| panic!("{text}\n{}", String::from_utf8_lossy(&output.stderr)));
    let end = text.find(" DONE").unwrap();
    text[start + 5..end].to_owned()
}

/// Not a test by itself: the body of the processes that the tests start.
#[tokio::test]
#[ignore = "run by the other tests"]
async fn worker() {
    let Some(cache) = std::env::var_os("TOY_CACHE") else {
        return;
    };
    let node_min = std::env::var("NODE_MIN").unwrap_or("1".into());
    let text = PROFILE.replace(
        "package = ",
        &format!("node_min = {node_min:?}\npackage = "),
    );
    let name = std::env::var("TOY_NAME").unwrap_or("toy".into());
    let text = text.replace("name = \"toy\"", &format!("name = {name:?}"));
    let profile = Profile::parse("toy.toml", &name, &text).unwrap();
    match profile.install(Path::new(&cache)).await {
        Ok(installed) => {
            assert!(
                installed.mounts[0]
                    .source
                    .join("node_modules/toy/cli.js")
                    .is_file()
            );
            assert_eq!(
                installed.mounts[0].target,
                Path::new("/opt/harness").join(&name)
            );
            println!(
                "SAID {}{} DONE",
                installed.digest,
                std::env::var("NODE_MIN").map_or(String::new(), |_| format!(" {}", installed.node))
            );
        }
        Err(error) => println!("SAID {error} DONE"),
    }
}

#[test]
fn a_second_install_finds_the_bundle_and_runs_nothing() {
    let machine = Machine::new(Some(GOOD));
    let first = machine.install();
    assert_eq!(first.len(), 64, "{first}");
    machine.npm("exit 9");
    assert_eq!(machine.install(), first);
    assert_eq!(machine.runs(), 1);
    assert_eq!(machine.cache().len(), 1);
}

/// Two modes of one program are two profiles, and one download.
#[test]
fn profiles_of_one_package_share_its_bundle() {
    let machine = Machine::new(Some(GOOD));
    let first = machine.install();
    let other = machine.command().env("TOY_NAME", "mode").output().unwrap();
    assert_eq!(said(&other), first);
    assert_eq!(machine.runs(), 1);
    assert_eq!(machine.cache().len(), 1);
}

#[test]
fn processes_that_install_at_once_install_once() {
    let machine = Machine::new(Some(GOOD));
    let children: Vec<_> = (0..4)
        .map(|_| {
            machine
                .command()
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let digests: Vec<String> = children
        .into_iter()
        .map(|child| said(&child.wait_with_output().unwrap()))
        .collect();
    assert!(
        digests
            .iter()
            .all(|digest| digest.len() == 64 && *digest == digests[0]),
        "{digests:?}"
    );
    assert_eq!(machine.runs(), 1);
}

#[test]
fn a_failed_install_shows_the_tail_and_leaves_nothing() {
    let machine = Machine::new(Some("echo npm error code ENOTFOUND; exit 3"));
    let text = machine.install();
    assert!(
        text.contains("installing harness toy failed (exit code 3)"),
        "{text}"
    );
    assert!(text.contains("npm error code ENOTFOUND"), "{text}");
    assert!(text.contains("registry can be reached"), "{text}");
    assert_eq!(machine.cache(), Vec::<String>::new());
    // And the next try starts afresh.
    machine.npm(GOOD);
    assert_eq!(machine.install().len(), 64);
}

#[test]
fn an_install_that_lacks_the_program_is_no_bundle() {
    let machine = Machine::new(Some(&format!("{GOOD}\nrm -r \"$prefix/node_modules/toy\"")));
    let text = machine.install();
    assert!(
        text.contains("node_modules/toy/cli.js is not in it"),
        "{text}"
    );
    assert_eq!(machine.cache(), Vec::<String>::new());
}

#[test]
fn an_installer_killed_half_way_never_looks_complete() {
    let machine = Machine::new(Some(&format!("{GOOD}\nkill -9 $PPID\nkill -9 $$")));
    let output = machine.command().output().unwrap();
    assert!(!output.status.success());
    assert!(
        machine
            .cache()
            .iter()
            .all(|name| name.starts_with(".partial-")),
        "{:?}",
        machine.cache()
    );
    machine.npm(GOOD);
    assert_eq!(machine.install().len(), 64);
    // What the killed one left is gone.
    assert!(
        machine
            .cache()
            .iter()
            .all(|name| name.starts_with("toy-1.0.0-")),
        "{:?}",
        machine.cache()
    );
}

#[test]
fn a_missing_npm_is_named_with_advice() {
    let machine = Machine::new(None);
    let mut command = machine.command();
    let output = command.env("PATH", machine.path("bin")).output().unwrap();
    let text = said(&output);
    insta::assert_snapshot!(text, @"harness toy needs `npm`: it is not in PATH; install Node.js with npm (Debian, Ubuntu: `apt-get install nodejs npm`), or choose a harness that needs none: `--harness react`");
}

#[test]
fn a_node_that_sandboxes_do_not_see_is_replaced_by_one_in_the_bundle() {
    let with_node = r#"
for last; do :; done
echo "$last" > "$COUNT"
folder="$prefix/node_modules/${last%@*}/bin"
mkdir -p "$folder" && touch "$folder/node"
"#;
    let machine = Machine::new(Some(&format!(
        "arguments=$*\n{GOOD}\nset -- $arguments\n{with_node}"
    )));
    // Not under /usr, so it would not be there in a sandbox.
    fs::write(machine.path("bin/node"), "#!/bin/sh\necho v99.0.0\n").unwrap();
    fs::set_permissions(machine.path("bin/node"), fs::Permissions::from_mode(0o755)).unwrap();
    let run = |node_min: &str| {
        said(
            &machine
                .worker("worker")
                .env("NODE_MIN", node_min)
                .output()
                .unwrap(),
        )
    };
    let text = run("20.6");
    assert!(
        text.contains(" /opt/harness/toy/node_modules/node-linux-"),
        "{text}"
    );
    let asked = fs::read_to_string(machine.path("count")).unwrap();
    assert!(
        asked.starts_with("node-linux-") && asked.contains("@22."),
        "{asked}"
    );
    let text = run("99");
    assert!(
        text.contains("needs `node 99 or newer under /usr`"),
        "{text}"
    );
}

/// Not a test by itself: drops an install once npm runs, and waits until nothing of it lives.
#[tokio::test]
#[ignore = "run by another test"]
async fn dropping_worker() {
    let (Some(cache), Some(pipe)) = (std::env::var_os("TOY_CACHE"), std::env::var_os("PIPE"))
    else {
        return;
    };
    let profile = Profile::parse("toy.toml", "toy", PROFILE).unwrap();
    let started = async {
        // Opening a pipe for reading waits for the writer, which is npm.
        let mut pipe = tokio::fs::File::open(&pipe).await.unwrap();
        let mut said = [0; 8];
        pipe.read_exact(&mut said).await.unwrap();
        pipe
    };
    let mut pipe = tokio::select! {
        result = profile.install(Path::new(&cache)) => panic!("ended by itself: {result:?}"),
        pipe = started => pipe,
    };
    // End of file comes only when npm and its child, who hold the pipe, are gone.
    let mut rest = Vec::new();
    pipe.read_to_end(&mut rest).await.unwrap();
    println!("SAID gone DONE");
}

#[test]
fn dropping_an_install_ends_its_processes_and_leaves_nothing() {
    let machine = Machine::new(Some("exec 3>\"$PIPE\"; echo started >&3; sleep 3600; true"));
    let pipe = machine.path("pipe");
    assert!(
        Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    let mut command = machine.worker("dropping_worker");
    command.env("PIPE", &pipe);
    let child = command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    assert_eq!(said(&child.wait_with_output().unwrap()), "gone");
    assert_eq!(machine.cache(), Vec::<String>::new());
}

/// The real thing. It stays in the user's cache, where rollouts use it.
#[tokio::test]
async fn pi_installs_from_the_registry() {
    if !Path::new("/usr/bin/npm").exists() && Command::new("npm").arg("--version").output().is_err()
    {
        println!("skipped: no npm on this machine");
        return;
    }
    let profile = Profile::load(None, "pi").unwrap();
    let installed = profile
        .install(&cache_folder().unwrap())
        .await
        .unwrap_or_else(|error: HarnessError| panic!("{error}"));
    let bundle = &installed.mounts[0].source;
    let program = bundle.join("node_modules/@mariozechner/pi-coding-agent/dist/cli.js");
    let node = installed.node.replace(
        &installed.bundle.display().to_string(),
        &bundle.display().to_string(),
    );
    let output = Command::new(node)
        .arg(program)
        .arg("--version")
        .env("PI_OFFLINE", "1")
        .env("HOME", tempfile::tempdir().unwrap().path())
        .output()
        .unwrap();
    let printed = [output.stdout, output.stderr].concat();
    let version = String::from_utf8_lossy(&printed);
    assert_eq!(version.trim(), profile.version);
}
