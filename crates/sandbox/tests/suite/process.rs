//! Processes: what goes in, how they end, what they leave.

use std::time::Duration;

use futures::future::join_all;
use sandbox::{Exit, SandboxError};

use super::{cases, command, count, run, say, script, until};

/// The reason why a program cannot be run.
async fn refusal(sandbox: &dyn sandbox::Sandbox, exec: sandbox::Exec) -> String {
    match sandbox.exec(exec).await {
        Err(SandboxError::NotRunnable { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

cases! {
    async fn exit_codes(world) {
        let sandbox = world.sandbox().await;
        for code in [0, 1, 42, 255] {
            let output = run(&*sandbox, &format!("exit {code}")).await;
            assert_eq!(output.exit, Exit::Code(code));
            assert!(output.seconds > 0.0 && !output.out_of_memory && output.dropped_bytes == 0);
        }
    }

    async fn death_by_signal(world) {
        let sandbox = world.sandbox().await;
        for signal in [9, 15, 13, 6] {
            assert_eq!(
                run(&*sandbox, &format!("kill -{signal} $$; sleep 5")).await.exit,
                Exit::Signal(signal)
            );
        }
    }

    async fn outputs_are_apart(world) {
        let sandbox = world.sandbox().await;
        let output = run(&*sandbox, "echo out; echo err >&2; printf more").await;
        assert_eq!(output.stdout, b"out\nmore");
        assert_eq!(output.stderr, b"err\n");
    }

    async fn every_byte_comes_out(world) {
        let sandbox = world.sandbox().await;
        let mut exec = command(&["cat"]);
        exec.stdin = (0..=255).collect();
        assert_eq!(sandbox.exec(exec.clone()).await.unwrap().stdout, exec.stdin);
    }

    async fn a_program_that_is_absent(world) {
        let sandbox = world.sandbox().await;
        let reason = refusal(&*sandbox, command(&["no-such-program"])).await;
        assert!(reason.contains("No such file"), "{reason}");
    }

    async fn a_program_that_is_not_executable(world) {
        let sandbox = world.sandbox().await;
        say(&*sandbox, "echo exit > plain").await;
        let reason = refusal(&*sandbox, command(&["./plain"])).await;
        assert!(reason.contains("Permission denied"), "{reason}");
    }

    async fn a_program_that_is_a_folder(world) {
        let sandbox = world.sandbox().await;
        let reason = refusal(&*sandbox, command(&["/tmp"])).await;
        assert!(reason.contains("Permission denied"), "{reason}");
    }

    async fn no_program_at_all(world) {
        let sandbox = world.sandbox().await;
        refusal(&*sandbox, command(&[])).await;
        refusal(&*sandbox, command(&[""])).await;
        assert_eq!(say(&*sandbox, "echo alive").await, "alive");
    }

    async fn a_script_without_interpreter_line_is_for_the_shell(world) {
        let sandbox = world.sandbox().await;
        say(&*sandbox, "printf 'echo $0 $1' > plain; chmod +x plain").await;
        let output = sandbox.exec(command(&["./plain", "x"])).await.unwrap();
        assert_eq!(output.stdout, b"./plain x\n");
    }

    async fn the_working_folder_is_the_workspace(world) {
        let sandbox = world.sandbox().await;
        assert_eq!(say(&*sandbox, "pwd").await, "/workspace");
    }

    async fn a_working_folder_of_ones_own(world) {
        let sandbox = world.sandbox().await;
        let mut exec = script("pwd");
        exec.cwd = Some("/tmp".into());
        assert_eq!(sandbox.exec(exec).await.unwrap().stdout, b"/tmp\n");
    }

    async fn a_working_folder_that_is_absent(world) {
        let sandbox = world.sandbox().await;
        let mut exec = command(&["true"]);
        exec.cwd = Some("/absent".into());
        let reason = refusal(&*sandbox, exec).await;
        assert!(reason.contains("/absent"), "{reason}");
    }

    async fn environment_of_spec_and_exec(world) {
        let sandbox = world.sandbox().await;
        let mut exec = script("echo $HOME $LANG $FROM_SPEC $FROM_EXEC");
        exec.env.insert("FROM_EXEC".into(), "exec".into());
        let output = sandbox.exec(exec).await.unwrap();
        assert_eq!(output.stdout, b"/home/agent C.UTF-8 spec exec\n");
        let mut exec = script("echo $FROM_SPEC");
        exec.env.insert("FROM_SPEC".into(), "exec wins".into());
        assert_eq!(sandbox.exec(exec).await.unwrap().stdout, b"exec wins\n");
        assert_eq!(say(&*sandbox, "echo $FROM_SPEC$FROM_EXEC").await, "spec", "of one exec only");
    }

    async fn nothing_of_our_environment_gets_in(world) {
        let sandbox = world.sandbox().await;
        let text = say(&*sandbox, "env; tr '\\0' '\\n' < /proc/self/environ").await;
        assert!(!text.contains("CARGO"), "{text}");
        assert!(!text.contains(env!("CARGO_MANIFEST_DIR")), "{text}");
        assert!(text.contains("PATH="), "{text}");
    }

    async fn arguments_arrive_as_they_are(world) {
        let sandbox = world.sandbox().await;
        let odd = ["", " ", "a b", "'\"$(id)`\\", "new\nline", "é漢🌱", "-n", "*"];
        let mut argv = vec!["sh", "-c", "for a in \"$@\"; do printf '[%s]' \"$a\"; done", "sh"];
        argv.extend(odd);
        let output = sandbox.exec(command(&argv)).await.unwrap();
        let expected: String = odd.iter().map(|a| format!("[{a}]")).collect();
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
        let reason = refusal(&*sandbox, command(&["echo", "a\0b"])).await;
        assert!(reason.contains("zero byte"), "{reason}");
    }

    async fn a_large_argument(world) {
        let sandbox = world.sandbox().await;
        let large = "x".repeat(100 << 10);
        let output = sandbox.exec(command(&["printf", "%s", &large])).await.unwrap();
        assert_eq!(output.stdout.len(), large.len());
        let larger = "x".repeat(2 << 20);
        let reason = refusal(&*sandbox, command(&["true", &larger])).await;
        assert!(reason.contains("bytes"), "{reason}");
    }

    async fn input_of_any_size(world) {
        let sandbox = world.sandbox().await;
        for bytes in [0, 1, 65_536, 3 << 20] {
            let mut exec = command(&["wc", "-c"]);
            exec.stdin = vec![b'x'; bytes];
            let output = sandbox.exec(exec).await.unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert_eq!(text.trim(), bytes.to_string());
        }
    }

    async fn input_that_nobody_reads(world) {
        let sandbox = world.sandbox().await;
        let mut exec = command(&["true"]);
        exec.stdin = vec![0; 1 << 20];
        assert_eq!(sandbox.exec(exec).await.unwrap().exit, Exit::Code(0));
    }

    async fn output_keeps_its_first_and_last_half(world) {
        let sandbox = world.sandbox().await;
        let mut exec = script("seq 1 100000; echo end >&2");
        exec.output_bytes_max = 1000;
        let output = sandbox.exec(exec).await.unwrap();
        assert_eq!(output.stdout.len(), 1000);
        assert!(output.stdout.starts_with(b"1\n2\n3\n"));
        assert!(output.stdout.ends_with(b"99999\n100000\n"));
        assert_eq!(output.dropped_bytes, 588_895 - 1000);
        assert_eq!(output.stderr, b"end\n");
    }

    async fn output_that_nobody_keeps_blocks_nobody(world) {
        let sandbox = world.sandbox().await;
        let mut exec = script("head -c 50000000 /dev/zero");
        exec.output_bytes_max = 0;
        let output = sandbox.exec(exec).await.unwrap();
        assert_eq!((output.stdout.len(), output.dropped_bytes), (0, 50_000_000));
    }

    async fn the_user_is_an_ordinary_one(world) {
        let sandbox = world.sandbox().await;
        assert_eq!(say(&*sandbox, "id -u; id -g").await, "1000\n1000");
        assert!(!say(&*sandbox, "id -un").await.is_empty(), "it has a name");
        let status = say(&*sandbox, "grep -E '^(Cap(Inh|Prm|Eff|Amb)|NoNewPrivs)' /proc/self/status").await;
        for line in status.lines() {
            let value = line.split_whitespace().nth(1).unwrap();
            let expected = if line.starts_with("NoNewPrivs") { "1" } else { "0000000000000000" };
            assert_eq!(value, expected, "{status}");
        }
    }

    async fn a_timeout_kills_the_whole_tree(world) {
        let sandbox = world.sandbox().await;
        // A grandchild in its own session whose parent is gone, and a child that ignores SIGTERM.
        let mut exec = script(
            "(setsid sh -c 'exec sleep 7001' &) ; (trap '' TERM; sleep 7001) & echo begun; sleep 7001",
        );
        exec.timeout = Duration::from_millis(500);
        let output = sandbox.exec(exec).await.unwrap();
        assert_eq!(output.exit, Exit::TimedOut);
        assert_eq!(output.stdout, b"begun\n");
        assert_eq!(count(&*sandbox, "7001").await, 0);
    }

    async fn dropping_the_future_kills_the_tree(world) {
        let sandbox = world.sandbox().await;
        let exec = script("setsid sleep 7002 & touch begun; sleep 7002");
        tokio::select! {
            output = sandbox.exec(exec) => panic!("{output:?}"),
            () = until(&*sandbox, "test -e begun") => {}
        }
        // The cancellation goes first on the same stream; the kill takes its time.
        while count(&*sandbox, "7002").await != 0 {}
    }

    async fn background_processes_do_not_hold_their_parent(world) {
        let sandbox = world.sandbox().await;
        let output = run(&*sandbox, "(while :; do echo noise; sleep 0.1; done) & echo $! > pid; echo done").await;
        assert_eq!(output.exit, Exit::Code(0));
        assert!(String::from_utf8_lossy(&output.stdout).contains("done"));
        say(&*sandbox, "kill -0 $(cat pid)").await;
        assert_eq!(say(&*sandbox, "echo later").await, "later");
        say(&*sandbox, "kill -0 $(cat pid)").await;
    }

    async fn background_processes_end_when_asked(world) {
        let sandbox = world.sandbox().await;
        // One in the same session, one that left it, and a grandchild whose parent has gone.
        let mut exec = script(
            "(while :; do sleep 1; done) & echo $! > pid
             setsid sh -c 'echo $$ >> pid; while :; do sleep 1; done' &
             (sh -c 'echo $$ >> pid; while :; do sleep 1; done' &)
             while [ $(wc -l < pid) -lt 3 ]; do sleep 0.1; done; exit 7",
        );
        exec.end_background = true;
        let output = sandbox.exec(exec).await.expect("a script");
        assert_eq!(output.exit, Exit::Code(7));
        let alive = "for pid in $(cat pid); do kill -0 $pid 2>/dev/null && echo $pid; done; true";
        assert_eq!(say(&*sandbox, alive).await, "");
    }

    async fn killing_everything_inside_does_not_harm_pid_1(world) {
        let sandbox = world.sandbox().await;
        // Its own supervisor dies too; the leader goes with it.
        assert_eq!(run(&*sandbox, "kill -9 -1; sleep 100").await.exit, Exit::Signal(9));
        run(&*sandbox, "kill -9 1").await;
        assert_eq!(say(&*sandbox, "echo alive").await, "alive");
    }

    async fn orphans_are_reaped(world) {
        let sandbox = world.sandbox().await;
        say(&*sandbox, "for i in $(seq 30); do (true &) ; done; (sh -c 'sleep 0.2 & exit' &)").await;
        until(&*sandbox, "! grep -sl '^State:.Z' /proc/[0-9]*/status").await;
    }

    async fn sixteen_at_once(world) {
        let sandbox = world.sandbox().await;
        let all = (0..16).map(|i| {
            let sandbox = &*sandbox;
            async move { say(sandbox, &format!("sleep 0.2; echo {i}")).await }
        });
        let outputs = join_all(all).await;
        assert!(outputs.iter().enumerate().all(|(i, o)| *o == i.to_string()), "{outputs:?}");
    }

    async fn signals_are_as_a_program_expects(world) {
        let sandbox = world.sandbox().await;
        let status = say(&*sandbox, "grep -E '^Sig(Blk|Ign)' /proc/self/status | cut -c9-").await;
        for line in status.lines() {
            let set = u64::from_str_radix(line.trim(), 16).unwrap();
            // 32 and 33 belong to the C library, which hides them.
            assert_eq!(set & !0x1_8000_0000, 0, "{status}");
        }
    }

    async fn no_terminal_is_inherited(world) {
        let sandbox = world.sandbox().await;
        let output = run(&*sandbox, "test -t 0 || test -t 1 || echo hello > /dev/tty").await;
        assert_ne!(output.exit, Exit::Code(0), "{output:?}");
    }

    async fn descriptors_are_the_three_usual_ones(world) {
        let sandbox = world.sandbox().await;
        // One more is the folder that ls itself has open.
        let open = sandbox.exec(command(&["ls", "/proc/self/fd"])).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&open.stdout).lines().collect::<Vec<_>>(), ["0", "1", "2", "3"]);
    }
}
