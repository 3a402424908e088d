//! One suite for every kind of sandbox: what is promised is promised by all of them. The scripts
//! are plain `sh`, so that they run in any image that has one.

// Not every test program uses all of it.
#![allow(dead_code, reason = "shared by the test programs of all kinds")]

mod files;
mod isolation;
mod life;
mod limits;
mod network;
mod process;
pub(crate) mod rootfs;
mod stream;
mod tar;
mod user;

use std::{
    any::Any,
    panic::AssertUnwindSafe,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream::iter};
use sandbox::{Exec, Exit, Limits, Output, Provider, Sandbox, SandboxError, Spec};

/// A kind of sandbox, and what is special about it.
pub(crate) struct World {
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) image: Option<String>,
    /// Whether folders of this machine can be mounted.
    pub(crate) mounts: bool,
    /// Whether there is nothing but the loopback interface.
    pub(crate) no_interface: bool,
    /// Whether the memory limit holds for the sandbox as a whole and its kills are counted.
    pub(crate) memory_counted: bool,
    /// Whether the limit of processes holds.
    pub(crate) pids_limited: bool,
    /// Whether lack of memory kills one process, and not the sandbox.
    pub(crate) memory_kills_one: bool,
    /// Whether programs can run as other users than the sandbox's own.
    pub(crate) users: bool,
    /// Whether the image has the users and groups of [`rootfs::rootfs`].
    pub(crate) accounts: bool,
    /// How long a sandbox may take to be made, with everything else running.
    pub(crate) patience: Duration,
    pub(crate) next: AtomicUsize,
}

pub(crate) type Case = for<'a> fn(&'a World) -> BoxFuture<'a, ()>;

/// Test cases as plain functions, and the list of them.
macro_rules! cases {
    ($( $(#[$note:meta])* async fn $name:ident($world:ident) $body:block )*) => {
        $(
            $(#[$note])*
            pub(crate) fn $name<'a>($world: &'a $crate::suite::World)
                -> futures::future::BoxFuture<'a, ()> { Box::pin(async move $body) }
        )*
        pub(crate) const CASES: &[(&str, $crate::suite::Case)] =
            &[$((concat!(module_path!(), "::", stringify!($name)), $name)),*];
    };
}
pub(crate) use cases;

impl World {
    pub(crate) fn new(provider: Arc<dyn Provider>) -> Self {
        Self {
            provider,
            image: None,
            mounts: true,
            no_interface: true,
            memory_counted: true,
            pids_limited: true,
            memory_kills_one: true,
            users: true,
            accounts: false,
            patience: Duration::from_secs(60),
            next: AtomicUsize::new(1),
        }
    }

    pub(crate) fn spec(&self) -> Spec {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Spec {
            name: format!("suite-{number}"),
            image: self.image.clone(),
            limits: Limits {
                memory_bytes: 256 << 20,
                pids: 64,
                cpu_cores: 2.0,
                disk_bytes: 32 << 20,
                deadline_s: 240,
            },
            env: [("FROM_SPEC".to_owned(), "spec".to_owned())].into(),
            ..Spec::default()
        }
    }

    pub(crate) async fn make(&self, spec: Spec) -> Box<dyn Sandbox> {
        self.try_make(spec).await.expect("a sandbox")
    }

    pub(crate) async fn try_make(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        tokio::time::timeout(self.patience, self.provider.create(spec))
            .await
            .expect("a sandbox, or an error, in time")
    }

    pub(crate) async fn sandbox(&self) -> Box<dyn Sandbox> {
        self.make(self.spec()).await
    }
}

pub(crate) fn command(argv: &[&str]) -> Exec {
    Exec {
        argv: argv.iter().map(|a| (*a).to_owned()).collect(),
        cwd: None,
        env: [].into(),
        stdin: Vec::new(),
        timeout: Duration::from_secs(60),
        output_bytes_max: 1 << 20,
        end_background: false,
        user: None,
    }
}

pub(crate) fn script(text: &str) -> Exec {
    command(&["sh", "-c", text])
}

pub(crate) async fn run(sandbox: &dyn Sandbox, text: &str) -> Output {
    sandbox.exec(script(text)).await.expect("a script")
}

/// Standard output of a script that must succeed.
pub(crate) async fn say(sandbox: &dyn Sandbox, text: &str) -> String {
    let output = run(sandbox, text).await;
    assert_eq!(
        output.exit,
        Exit::Code(0),
        "{text}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout)
        .trim_end()
        .to_owned()
}

/// Processes in the sandbox with this in their command line, but for those that look.
pub(crate) async fn count(sandbox: &dyn Sandbox, mark: &str) -> usize {
    // In brackets the mark is no longer in the command line of whoever looks for it.
    let text = format!(
        "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep -q '[{}]{}' \
         && echo $p; done; true",
        &mark[..1],
        &mark[1..]
    );
    say(sandbox, &text).await.lines().count()
}

/// Waits until something in the sandbox is so; the sandbox itself is asked again and again.
pub(crate) async fn until(sandbox: &dyn Sandbox, test: &str) {
    let begun = Instant::now();
    while run(sandbox, test).await.exit != Exit::Code(0) {
        assert!(begun.elapsed() < Duration::from_secs(30), "never: {test}");
    }
}

/// Whether a file is there.
pub(crate) async fn is_there(sandbox: &dyn Sandbox, path: &str) -> bool {
    run(sandbox, &format!("test -e {path}")).await.exit == Exit::Code(0)
}

pub(crate) fn all() -> Vec<(&'static str, Case)> {
    [
        process::CASES,
        stream::CASES,
        files::CASES,
        tar::CASES,
        limits::CASES,
        network::CASES,
        isolation::CASES,
        life::CASES,
        user::CASES,
    ]
    .concat()
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("it panicked with something that is no text")
        .to_owned()
}

/// Runs all cases, some at a time, and says which failed. `ESPALIER_CASE` picks by name.
pub(crate) async fn run_all(world: &World, at_once: usize) {
    let wanted = std::env::var("ESPALIER_CASE").unwrap_or_default();
    run_some(world, at_once, &wanted).await;
}

/// Runs the cases with this in their names.
pub(crate) async fn run_some(world: &World, at_once: usize, wanted: &str) {
    let failed = Mutex::new(Vec::new());
    let ran = AtomicUsize::new(0);
    let (failed_ref, ran_ref) = (&failed, &ran);
    let cases: Vec<_> = all()
        .into_iter()
        .filter(|(name, _)| name.contains(wanted))
        .collect();
    iter(cases)
        .for_each_concurrent(at_once, |(name, case)| async move {
            let begun = Instant::now();
            let limit = Duration::from_secs(180);
            let guarded = AssertUnwindSafe(tokio::time::timeout(limit, case(world)));
            let outcome = match guarded.catch_unwind().await {
                Ok(Ok(())) => None,
                Ok(Err(_)) => Some(format!("not over after {limit:?}")),
                Err(panic) => Some(message(&*panic)),
            };
            ran_ref.fetch_add(1, Ordering::Relaxed);
            let short = name.rsplit("suite::").next().unwrap_or(name);
            let seconds = begun.elapsed().as_secs_f64();
            println!(
                "{} {seconds:6.2} s  {short}",
                if outcome.is_none() {
                    "ok    "
                } else {
                    "FAILED"
                }
            );
            if let Some(reason) = outcome {
                failed_ref
                    .lock()
                    .unwrap()
                    .push(format!("{short}: {reason}"));
            }
        })
        .await;
    let (failed, ran) = (failed.into_inner().unwrap(), ran.into_inner());
    println!("{ran} cases, {} failed", failed.len());
    assert!(
        wanted.is_empty() && ran >= 60 || ran > 0,
        "only {ran} cases"
    );
    assert!(failed.is_empty(), "{:#?}", failed);
}

/// A folder that only its owner can enter, with some files.
pub(crate) fn private_folder() -> (tempfile::TempDir, PathBuf) {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let tool = folder.path().join("tool");
    std::fs::create_dir(&tool).unwrap();
    std::fs::write(tool.join("data"), "from the host").unwrap();
    std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
    (folder, tool)
}

/// The example that makes sandboxes and waits to be killed.
pub(crate) fn hold_program() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let path = own.ancestors().nth(2).unwrap().join("examples/hold");
    assert!(
        path.exists(),
        "{} is missing: cargo build --examples",
        path.display()
    );
    path
}
