//! The same tests for an ordinary user.

use std::{os::unix::process::CommandExt, path::Path, process::Command, sync::Arc};

use crate::{
    suite::{World, run_some},
    support::{is_root, provider},
};

const NOBODY: u32 = 65534;

#[tokio::test]
async fn capabilities_name_what_is_missing() {
    let provider = provider().await;
    let capabilities = provider.capabilities();
    let expected = if is_root() {
        NOBODY
    } else {
        rustix::process::getuid().as_raw()
    };
    assert_eq!(capabilities.host_uid, expected);
    let one_user = capabilities.degraded.iter().any(|d| d.name == "one-user");
    assert_eq!(capabilities.users == 1, one_user, "{capabilities:?}");
    if is_root() {
        assert_eq!(capabilities.users, 65_536, "{capabilities:?}");
    }
    for degraded in &capabilities.degraded {
        assert!(
            !degraded.found.is_empty() && !degraded.costs.is_empty(),
            "{degraded:?}"
        );
    }
}

#[test]
fn doctor_finds_a_working_machine() {
    let checks = sandbox::doctor();
    let check = |name: &str| checks.iter().find(|c| c.name == name).unwrap();
    assert!(check("namespaces").ok, "{:?}", check("namespaces"));
    assert!(check("sandbox").ok, "{:?}", check("sandbox"));
    let users = check("users in a sandbox");
    assert!(users.ok || users.advice.contains("newuidmap"), "{users:?}");
    for check in &checks {
        assert_eq!(check.ok, check.costs.is_empty(), "{check:?}");
        assert_eq!(check.ok, check.advice.is_empty(), "{check:?}");
        assert!(!check.found.is_empty(), "{check:?}");
    }
}

/// Runs this very program as nobody, on everything an ordinary user is promised.
#[test]
fn everything_works_for_an_ordinary_user() {
    if !is_root() {
        println!("skipped: the tests run as an ordinary user already");
        return;
    }
    let output = Command::new("/proc/self/exe")
        .args([
            "--test-threads",
            "2",
            "conformance::",
            "red_team::",
            "egress::",
            "isolation::",
            "limits::",
            "lifetime::",
        ])
        .args(["user::capabilities", "user::doctor", "react::"])
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("TMPDIR", "/tmp")
        .current_dir("/")
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        text.contains("test result: ok") && !text.contains("running 0 tests"),
        "{text}"
    );
}

/// The cases about users, where there must be several: run by the test below, as a user who was
/// given a range of numbers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs the numbers that the next test gives it"]
async fn there_are_several_users() {
    let provider = provider().await;
    let capabilities = provider.capabilities();
    assert!(capabilities.users > 10_000, "{capabilities:?}");
    let world = World {
        memory_counted: capabilities.memory.starts_with("cgroup"),
        ..World::new(Arc::new(provider))
    };
    run_some(&world, 4, "user::").await;
    run_some(&world, 4, "isolation::").await;
}

/// Runs this very program as nobody, with `/etc/subuid` and `/etc/subgid` that name him; only the
/// processes of the test see these.
#[test]
fn an_ordinary_user_with_a_range_has_several_users() {
    let helper = ["/usr/bin/newuidmap", "/bin/newuidmap"];
    if !is_root() || !helper.iter().any(|path| Path::new(path).exists()) {
        println!("skipped: needs root, and newuidmap (scripts/setup.sh test installs it)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("list");
    std::fs::write(&list, "nobody:1000000:65536\n").unwrap();
    let text = "set -e; touch /etc/subuid /etc/subgid; mount --bind \"$1\" /etc/subuid; \
                mount --bind \"$1\" /etc/subgid; \
                exec setpriv --reuid 65534 --regid 65534 --clear-groups \"$2\" \
                --ignored --exact user::there_are_several_users --nocapture";
    let output = Command::new("unshare")
        .args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            text,
            "sh",
        ])
        .arg(&list)
        .arg(std::env::current_exe().unwrap())
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("TMPDIR", "/tmp")
        .current_dir("/")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}\n{errors}"
    );
}
