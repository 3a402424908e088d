//! Processes: what goes in, what comes out, and how they end.

use std::time::Duration;

use futures::future::join_all;
use sandbox::{Exit, Sandbox, SandboxError};

use crate::support::{command, run, sandbox, say, script};

#[tokio::test]
async fn exit_codes_and_signals() {
    let sandbox = sandbox().await;
    assert_eq!(run(&sandbox, "exit 0").await.exit, Exit::Code(0));
    assert_eq!(run(&sandbox, "exit 42").await.exit, Exit::Code(42));
    assert_eq!(run(&sandbox, "kill -9 $$").await.exit, Exit::Signal(9));
    assert_eq!(run(&sandbox, "kill -15 $$").await.exit, Exit::Signal(15));
    let output = run(&sandbox, "echo out; echo err >&2").await;
    assert_eq!(
        (output.stdout.as_slice(), output.stderr.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );
    assert!(output.seconds > 0.0 && !output.out_of_memory && output.dropped_bytes == 0);
}

#[tokio::test]
async fn programs_that_cannot_run_say_why() {
    let sandbox = sandbox().await;
    say(
        &sandbox,
        "printf 'echo $0 $1' > plain; chmod +x plain; touch not-executable",
    )
    .await;
    let mut refused = Vec::new();
    for argv in [
        &["no-such-program"][..],
        &["./not-executable"],
        &["/usr"],
        &[],
        &[""],
    ] {
        match sandbox.exec(command(argv)).await {
            Err(SandboxError::NotRunnable { reason, .. }) => refused.push(reason),
            other => panic!("{argv:?}: {other:?}"),
        }
    }
    assert!(refused[0].contains("No such file"), "{refused:?}");
    assert!(refused[1].contains("Permission denied"), "{refused:?}");
    let mut there = command(&["true"]);
    there.cwd = Some("/absent".into());
    let error = sandbox.exec(there).await.unwrap_err().to_string();
    assert!(error.contains("/absent"), "{error}");
    // A script without an interpreter line is for the shell.
    let output = sandbox.exec(command(&["./plain", "x"])).await.unwrap();
    assert_eq!(output.stdout, b"./plain x\n");
}

#[tokio::test]
async fn environment_folder_and_input() {
    let sandbox = sandbox().await;
    let mut exec = script("pwd; echo $HOME $LANG $FROM_SPEC $FROM_EXEC; cat");
    exec.env.insert("FROM_EXEC".into(), "exec".into());
    exec.stdin = vec![b'x'; 3 << 20];
    exec.output_bytes_max = 4 << 20;
    let output = sandbox.exec(exec).await.unwrap();
    let head = b"/workspace\n/home/agent C.UTF-8 spec exec\n";
    assert_eq!(&output.stdout[..head.len()], head);
    assert_eq!(output.stdout.len(), head.len() + (3 << 20));
    // The environment is ours alone, and input that nobody reads harms nobody.
    let output = sandbox.exec(command(&["env"])).await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let names: Vec<_> = text
        .lines()
        .map(|line| line.split('=').next().unwrap())
        .collect();
    assert_eq!(names, ["FROM_SPEC", "HOME", "LANG", "PATH"]);
    let mut exec = command(&["true"]);
    exec.stdin = vec![0; 1 << 20];
    assert_eq!(sandbox.exec(exec).await.unwrap().exit, Exit::Code(0));
    let mut exec = script("pwd");
    exec.cwd = Some("/tmp".into());
    assert_eq!(sandbox.exec(exec).await.unwrap().stdout, b"/tmp\n");
}

#[tokio::test]
async fn output_keeps_its_first_and_last_half() {
    let sandbox = sandbox().await;
    let mut exec = script("seq 1 100000; echo end >&2");
    exec.output_bytes_max = 1000;
    let output = sandbox.exec(exec).await.unwrap();
    assert_eq!(output.stdout.len(), 1000);
    assert!(output.stdout.starts_with(b"1\n2\n3\n") && output.stdout.ends_with(b"99999\n100000\n"));
    assert_eq!(output.dropped_bytes, 588_895 - 1000);
    assert_eq!(output.stderr, b"end\n");
    let mut exec = script("head -c 50000000 /dev/zero");
    exec.output_bytes_max = 0;
    let output = sandbox.exec(exec).await.unwrap();
    assert_eq!((output.stdout.len(), output.dropped_bytes), (0, 50_000_000));
}

/// Processes in the sandbox with this in their command line, from inside.
async fn count(sandbox: &sandbox::LocalSandbox, mark: &str) -> String {
    let text = format!("grep -lsa '{mark}' /proc/[0-9]*/cmdline | grep -v -e self -e /$$/ | wc -l");
    // The grep itself carries the mark too, and the shell: hence the bracket trick.
    say(
        sandbox,
        &text.replace(mark, &format!("[{}]{}", &mark[..1], &mark[1..])),
    )
    .await
}

#[tokio::test]
async fn a_timeout_kills_the_whole_tree() {
    let sandbox = sandbox().await;
    // A grandchild in its own session whose parent is gone, and a child that ignores SIGTERM.
    let mut exec = script(
        "(setsid sh -c 'exec sleep 7001' &) ; (trap '' TERM; sleep 7001) & echo begun; sleep 7001",
    );
    exec.timeout = Duration::from_millis(300);
    let output = sandbox.exec(exec).await.unwrap();
    assert_eq!(output.exit, Exit::TimedOut);
    assert_eq!(output.stdout, b"begun\n");
    assert_eq!(count(&sandbox, "7001").await, "0");
}

#[tokio::test]
async fn a_fork_bomb_ends_at_its_timeout() {
    let sandbox = sandbox().await;
    // The bomb is one child, and the shell becomes the sleep: a shell that may make no process any
    // more ends by itself, before its timeout.
    let mut exec = script("sh -c 'f() { f | f & }; f' & exec sleep 1000");
    exec.timeout = Duration::from_millis(500);
    assert_eq!(sandbox.exec(exec).await.unwrap().exit, Exit::TimedOut);
    assert_eq!(say(&sandbox, "echo alive").await, "alive");
}

#[tokio::test]
async fn dropping_the_future_kills_the_tree() {
    let sandbox = sandbox().await;
    let exec = script("setsid sleep 7002 & touch begun; sleep 7002");
    let begun = async { while run(&sandbox, "test -e begun").await.exit != Exit::Code(0) {} };
    tokio::select! {
        output = sandbox.exec(exec) => panic!("{output:?}"),
        () = begun => {}
    }
    // The cancellation goes first on the same stream; the kill takes its time.
    while count(&sandbox, "7002").await != "0" {}
}

#[tokio::test]
async fn background_processes_outlive_their_parent_and_do_not_hold_it() {
    let sandbox = sandbox().await;
    let output = run(
        &sandbox,
        "(while :; do echo noise; sleep 0.01; done) & echo $! > pid; echo done",
    )
    .await;
    assert_eq!(output.exit, Exit::Code(0));
    assert!(String::from_utf8_lossy(&output.stdout).contains("done"));
    say(&sandbox, "sleep 0.1; kill -0 $(cat pid)").await;
}

#[tokio::test]
async fn background_processes_end_with_their_parent_when_asked() {
    let sandbox = sandbox().await;
    // One in the same session, one that left it, and a grandchild whose parent has gone.
    let mut exec = script(
        "(while :; do sleep 1; done) & echo $! > pid
         setsid sh -c 'echo $$ >> pid; while :; do sleep 1; done' &
         (sh -c 'echo $$ >> pid; while :; do sleep 1; done' &)
         while [ $(wc -l < pid) -lt 3 ]; do sleep 0.01; done; exit 7",
    );
    exec.end_background = true;
    let output = sandbox.exec(exec).await.expect("a script");
    assert_eq!(output.exit, Exit::Code(7));
    let alive = say(
        &sandbox,
        "for pid in $(cat pid); do kill -0 $pid 2>/dev/null && echo $pid; done; true",
    );
    assert_eq!(alive.await, "");
}

#[tokio::test]
async fn killing_everything_inside_does_not_harm_pid_1() {
    let sandbox = sandbox().await;
    // Its own supervisor dies too; the leader goes with it.
    assert_eq!(
        run(&sandbox, "kill -9 -1; sleep 100").await.exit,
        Exit::Signal(9)
    );
    assert_eq!(run(&sandbox, "kill -9 1").await.exit, Exit::Code(0));
    assert_eq!(say(&sandbox, "echo alive").await, "alive");
    let output = run(&sandbox, "cat /proc/1/environ /proc/1/mem; ls /proc/1/fd").await;
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors.matches("Permission denied").count(), 3, "{errors}");
}

#[tokio::test]
async fn many_run_at_once() {
    let sandbox = sandbox().await;
    let all = (0..16).map(|i| {
        let sandbox = &sandbox;
        async move { say(sandbox, &format!("sleep 0.2; echo {i}")).await }
    });
    let outputs = join_all(all).await;
    assert!(
        outputs.iter().enumerate().all(|(i, o)| *o == i.to_string()),
        "{outputs:?}"
    );
}
