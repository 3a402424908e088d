//! How sandboxes end.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use sandbox::{Exit, Provider, SandboxError};

use crate::support::{cgroups_of, processes, provider, run, script, spec, until_empty};

fn gone(result: Result<sandbox::Output, SandboxError>) -> String {
    match result {
        Err(SandboxError::Gone { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

/// The warden's children.
fn sandboxes_of(warden: u32) -> Vec<String> {
    let parent = format!("PPid:\t{warden}\n");
    processes(|path| {
        std::fs::read_to_string(path.join("status")).is_ok_and(|status| status.contains(&parent))
    })
}

#[tokio::test]
async fn destroy_and_drop_leave_nothing() {
    let provider = provider().await;
    let warden = provider.warden_process_id().unwrap();
    let sandbox = provider.create(spec("destroyed")).await.unwrap();
    sandbox
        .exec(script("setsid sleep 1000 & echo"))
        .await
        .unwrap();
    assert_eq!(sandboxes_of(warden).len(), 1);
    sandbox.destroy().await;
    assert_eq!(sandboxes_of(warden), Vec::<String>::new());
    assert_eq!(cgroups_of(warden), Vec::<String>::new());

    let sandbox = provider.create(spec("dropped")).await.unwrap();
    sandbox
        .exec(script("setsid sleep 1000 & echo"))
        .await
        .unwrap();
    drop(sandbox);
    until_empty("a dropped sandbox", || {
        [sandboxes_of(warden), cgroups_of(warden)].concat()
    });

    provider.close().await;
    until_empty("a closed provider", || {
        processes(|path| path.ends_with(warden.to_string()))
    });
}

#[tokio::test]
async fn dropping_create_leaves_nothing() {
    let provider = provider().await;
    let warden = provider.warden_process_id().unwrap();
    for micros in (0..6000).step_by(400) {
        let create = provider.create(spec("cancelled"));
        drop(tokio::time::timeout(Duration::from_micros(micros), create).await);
    }
    until_empty("cancelled creations", || {
        [sandboxes_of(warden), cgroups_of(warden)].concat()
    });
    let sandbox = provider.create(spec("after")).await.unwrap();
    assert_eq!(run(&*sandbox, "exit 3").await.exit, Exit::Code(3));
}

#[tokio::test]
async fn the_deadline_ends_it_and_says_so() {
    let provider = provider().await;
    let mut short = spec("short");
    short.limits.deadline_s = 1;
    let sandbox = provider.create(short).await.unwrap();
    let reason = gone(sandbox.exec(script("sleep 100")).await);
    assert!(reason.contains("deadline"), "{reason}");
    assert!(gone(sandbox.exec(script("true")).await).contains("deadline"));
    assert!(
        matches!(sandbox.upload(Vec::new()).await, Ok(())),
        "nothing to do is done"
    );
    let download = sandbox.download("/".into(), 1).await;
    assert!(
        matches!(download, Err(SandboxError::Gone { .. })),
        "{download:?}"
    );
    sandbox.destroy().await;
}

#[tokio::test]
async fn a_killed_pid_1_is_gone_with_everything() {
    let provider = provider().await;
    let warden = provider.warden_process_id().unwrap();
    let sandbox = provider.create(spec("killed")).await.unwrap();
    let first = sandboxes_of(warden).pop().unwrap();
    let pid: i32 = first
        .trim_start_matches("/proc/")
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    let killer = async {
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    };
    let (result, ()) = tokio::join!(sandbox.exec(script("sleep 100")), killer);
    let reason = gone(result);
    assert!(reason.contains("signal 9"), "{reason}");
    until_empty("a killed sandbox", || {
        [sandboxes_of(warden), cgroups_of(warden)].concat()
    });
}

#[tokio::test]
async fn a_killed_warden_takes_its_sandboxes_and_the_next_one_sweeps() {
    let provider = provider().await;
    let warden = provider.warden_process_id().unwrap();
    let sandbox = provider.create(spec("orphan")).await.unwrap();
    let other = crate::support::provider().await;
    let survivor = other.create(spec("survivor")).await.unwrap();
    let inside = sandboxes_of(warden);
    kill_process(Pid::from_raw(warden as i32).unwrap(), Signal::KILL).unwrap();
    let reason = gone(sandbox.exec(script("sleep 100")).await);
    assert!(reason.contains("warden"), "{reason}");
    until_empty("sandboxes of a killed warden", || {
        processes(|path| {
            inside
                .iter()
                .any(|line| line.starts_with(&format!("{} ", path.display())))
        })
    });
    // The provider goes on with a new warden, which sweeps the groups of the dead one and leaves
    // those of the living alone.
    let late = provider.create(spec("late")).await.unwrap();
    assert_ne!(provider.warden_process_id(), Some(warden));
    until_empty("groups of a killed warden", || cgroups_of(warden));
    assert_eq!(run(&*late, "exit 5").await.exit, Exit::Code(5));
    assert_eq!(run(&*survivor, "exit 4").await.exit, Exit::Code(4));
}

#[tokio::test]
async fn too_many_are_refused() {
    let config = sandbox::LocalConfig {
        sandboxes_max: 1,
        ..sandbox::LocalConfig::default()
    };
    let provider = sandbox::LocalProvider::start(config).await.unwrap();
    let first = provider.create(spec("first")).await.unwrap();
    let error = provider
        .create(spec("second"))
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("sandboxes_max"), "{error}");
    Box::new(first).destroy().await;
    provider.create(spec("third")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "long: 200 sandboxes"]
async fn two_hundred_idle_sandboxes() {
    let provider = provider().await;
    let warden = provider.warden_process_id().unwrap();
    let mut all = Vec::new();
    for i in 0..200 {
        all.push(provider.create(spec(&format!("idle-{i}"))).await.unwrap());
    }
    let answers = futures::future::join_all(all.iter().map(|s| run(&**s, "exit 5"))).await;
    assert!(answers.iter().all(|o| o.exit == Exit::Code(5)));
    assert_eq!(sandboxes_of(warden).len(), 200);
    drop(all);
    until_empty("200 dropped sandboxes", || {
        [sandboxes_of(warden), cgroups_of(warden)].concat()
    });
}
