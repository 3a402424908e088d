//! Ways out that a run grants to tasks: through a filtering proxy, while the harness runs, written
//! down per rollout. Without a grant there is none, and what asks for more is refused.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

mod real;

use std::{
    io::{Read, Write},
    net::TcpListener,
    sync::Arc,
};

use harness::Installed;
use real::{Loop, Teacher, jobs, line, shell};
use record::{Disposition, Fault, Rollout};
use rollout::{Egress, way_out};
use sandbox::Decision;
use task::{Contract, Network, Split, Task, chores};
use tokio_util::sync::CancellationToken;

/// A server on this machine that answers everything.
fn server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut buffer = [0; 4096];
            let _ = stream.read(&mut buffer);
            let body = "from outside";
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            );
        }
    });
    port
}

const ASK: &str = r#"ask() { printf "GET http://$1/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" | /run/espalier/guest reach tcp 127.0.0.1:3128 8000 2>&1; echo; };"#;

/// `react`, then requests to hosts.
fn harness(hosts: &[String]) -> Arc<Installed> {
    let asks: Vec<String> = hosts.iter().map(|host| format!("ask {host};")).collect();
    let asks = asks.join(" ");
    let script = format!(r#"{ASK} REACT > /dev/null; {asks} echo "proxy=$HTTPS_PROXY""#);
    shell("asks", &script, "")
}

async fn run(world: &Loop, task: &Task, hosts: &[String]) -> Rollout {
    let job = jobs(std::slice::from_ref(task), &harness(hosts), 1).remove(0);
    let rollout = world.runner.run(&job, &CancellationToken::new()).await;
    println!("{}\n{}", line(&rollout), rollout.harness_tail);
    rollout
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_granted_host_is_reached_by_the_harness_only_and_all_is_written_down() {
    let mut task = chores::generate(Split::Train, 0, 1).remove(0);
    let without = Task {
        id: record::TaskId::new("without").unwrap(),
        ..task.clone()
    };
    let script = Teacher::of(&[task.clone(), without.clone()]);
    let Some(world) = Loop::start(script).await else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let mut settings = (*world.runner.settings).clone();
    settings.egress = Some(Egress {
        folder: folder.path().join("egress"),
        private_addresses: true,
    });
    let world = world.with(settings);
    let host = format!("127.0.0.1:{}", server());
    // The verifier tells what it can reach: its score is 1 when that is nothing.
    task.verifier.contract = Contract::LastLine;
    task.verifier.argv = vec![
        "bash".into(),
        "-c".into(),
        format!("{ASK} ask {host} | grep -q outside && echo 0 || echo 1"),
    ];
    task.environment.egress = task.environment.grant(std::slice::from_ref(&host)).unwrap();
    let hosts = [host.clone(), "example.org".to_owned()];
    let rollout = run(&world, &task, &hosts).await;
    assert_eq!(rollout.disposition, Some(Disposition::Train));
    let tail = &rollout.harness_tail;
    assert!(
        tail.contains("from outside") && tail.contains("403"),
        "{tail}"
    );
    assert!(tail.contains("proxy=http://127.0.0.1:3128"), "{tail}");
    assert_eq!(
        rollout.verdict.unwrap().reward,
        1.0,
        "the verifier has no way out"
    );
    let log = way_out::read_log(&folder.path().join("egress"), &rollout.spec.id);
    let log = log.unwrap().unwrap();
    let seen: Vec<_> = log
        .iter()
        .map(|record| (record.host.as_str(), record.decision))
        .collect();
    assert_eq!(
        seen,
        [
            ("127.0.0.1", Decision::Allowed),
            ("example.org", Decision::Denied)
        ]
    );

    // Nothing granted: nobody listens, and there is nothing to read.
    let rollout = run(&world, &without, &hosts[..1]).await;
    assert!(
        !rollout.harness_tail.contains("outside"),
        "{}",
        rollout.harness_tail
    );
    assert!(!rollout.harness_tail.contains("proxy=http"));
    let log = way_out::read_log(&folder.path().join("egress"), &rollout.spec.id);
    assert_eq!(log.unwrap(), None);
    let sockets: Vec<_> = std::fs::read_dir(world.runner.settings.gateway_socket.parent().unwrap())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with('e') && name.ends_with(".sock"))
        .collect();
    assert!(sockets.is_empty(), "{sockets:?}");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_that_asks_for_more_than_the_run_may_reach_is_refused() {
    let mut task = chores::generate(Split::Train, 0, 1).remove(0);
    let Some(world) = Loop::start(Teacher::of(std::slice::from_ref(&task))).await else {
        return;
    };
    task.environment.network_said = true;
    task.environment.network = Network::Allowlist {
        hosts: vec!["pypi.org".into(), "evil.org".into()],
    };
    let granted = task.environment.grant(&["pypi.org".to_owned()]);
    assert_eq!(granted, Err(vec!["evil.org".to_owned()]));
    let rollout = run(&world, &task, &[]).await;
    let Some(Disposition::Discard { fault, reason }) = &rollout.disposition else {
        panic!("{rollout:?}");
    };
    assert_eq!(*fault, Fault::SandboxRefused);
    assert!(reason.contains("pypi.org, evil.org"), "{reason}");
    world.close().await;
}
