//! The same tests for an ordinary user.

use std::{os::unix::process::CommandExt, process::Command};

use crate::support::{is_root, provider};

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
