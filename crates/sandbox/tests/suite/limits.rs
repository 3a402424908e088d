//! Limits: what happens at each.

use std::time::Duration;

use sandbox::{Exit, SandboxError};

use super::{cases, run, say, script};

/// Grows in any shell.
const HOG: &str = "x=xxxxxxxxxxxxxxxx; while :; do x=$x$x; done";

cases! {
    async fn memory_kills_the_process_and_is_said(world) {
        if !world.memory_kills_one {
            return;
        }
        let mut spec = world.spec();
        spec.limits.memory_bytes = 64 << 20;
        let sandbox = world.make(spec).await;
        let output = run(&*sandbox, HOG).await;
        if world.memory_counted {
            assert_eq!(output.exit, Exit::Signal(9), "{output:?}");
            assert!(output.out_of_memory, "{output:?}");
        } else {
            assert_ne!(output.exit, Exit::Code(0));
        }
        let output = run(&*sandbox, "echo alive").await;
        assert_eq!(output.stdout, b"alive\n");
        assert!(!output.out_of_memory, "said once");
    }

    async fn one_that_eats_memory_does_not_take_others_along(world) {
        let mut spec = world.spec();
        spec.limits.memory_bytes = 64 << 20;
        let (greedy, modest) = (world.make(spec).await, world.sandbox().await);
        let (output, text) = tokio::join!(greedy.exec(script(HOG)), say(&*modest, "sleep 0.5; echo fine"));
        match output {
            Ok(output) => assert_ne!(output.exit, Exit::Code(0)),
            Err(SandboxError::Gone { .. }) if !world.memory_kills_one => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(text, "fine");
    }

    async fn processes_have_a_limit(world) {
        if !world.pids_limited {
            return;
        }
        let mut spec = world.spec();
        spec.limits.pids = 20;
        let sandbox = world.make(spec).await;
        // More than the limit, and more than the 64 that a node of a cluster may have of its own.
        let output = run(&*sandbox, "i=0; while [ $i -lt 100 ]; do sleep 600 & i=$((i+1)); done; wait").await;
        let error = String::from_utf8_lossy(&output.stderr).to_lowercase();
        assert!(error.contains("fork"), "{output:?}");
        // The loop's processes are still there: none is free for a shell. Then they are killed.
        let mut exec = script("true");
        exec.timeout = Duration::from_secs(5);
        let _ = sandbox.exec(exec).await;
    }

    async fn a_fork_bomb_ends_at_its_timeout(world) {
        if !world.pids_limited {
            return;
        }
        let sandbox = world.sandbox().await;
        // The bomb is one child, and the shell becomes the sleep: a shell that may make no process
        // any more ends by itself, before its timeout.
        let mut exec = script("sh -c 'f() { f | f & }; f' & exec sleep 1000");
        exec.timeout = Duration::from_millis(700);
        assert_eq!(sandbox.exec(exec).await.unwrap().exit, Exit::TimedOut);
        assert_eq!(say(&*sandbox, "echo alive").await, "alive");
    }

    async fn disk_has_a_limit(world) {
        let mut spec = world.spec();
        spec.limits.disk_bytes = 8 << 20;
        let sandbox = world.make(spec).await;
        for folder in [".", "$HOME", "/tmp", "/dev/shm"] {
            let output = run(&*sandbox, &format!("dd if=/dev/zero of={folder}/big bs=65536 count=400; e=$?; rm -f {folder}/big; exit $e")).await;
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(error.contains("No space left"), "{folder}: {output:?}");
        }
        let large = super::files::file("/workspace/big", 0o644, &vec![0; 20 << 20]);
        match sandbox.upload(vec![large]).await {
            Err(SandboxError::File { reason, .. }) => assert!(reason.contains("No space left"), "{reason}"),
            other => panic!("{other:?}"),
        }
        say(&*sandbox, "rm -f big; echo room again > small").await;
    }

    async fn the_deadline_ends_it_and_says_so(world) {
        let mut spec = world.spec();
        spec.limits.deadline_s = 3;
        let sandbox = world.make(spec).await;
        let gone = |result: Result<sandbox::Output, SandboxError>| match result {
            Err(SandboxError::Gone { reason, .. }) => reason,
            other => panic!("{other:?}"),
        };
        let reason = gone(sandbox.exec(script("sleep 100")).await);
        assert!(reason.contains("deadline"), "{reason}");
        assert!(gone(sandbox.exec(script("true")).await).contains("deadline"));
        let download = sandbox.download("/".into(), 1).await;
        assert!(matches!(download, Err(SandboxError::Gone { .. })), "{download:?}");
        let list = sandbox.list("/".into(), Default::default()).await;
        assert!(matches!(list, Err(SandboxError::Gone { .. })), "{list:?}");
        sandbox.destroy().await;
    }

    async fn limits_that_leave_no_room_are_refused(world) {
        for change in [
            |l: &mut sandbox::Limits| l.pids = 1,
            |l: &mut sandbox::Limits| l.cpu_cores = 0.0,
            |l: &mut sandbox::Limits| l.cpu_cores = f64::NAN,
            |l: &mut sandbox::Limits| l.memory_bytes = 4096,
            |l: &mut sandbox::Limits| l.disk_bytes = 0,
        ] {
            let mut spec = world.spec();
            change(&mut spec.limits);
            let result = world.try_make(spec).await;
            assert!(
                matches!(result, Err(SandboxError::Create { .. } | SandboxError::Refused { .. })),
                "{result:?}"
            );
        }
    }

    async fn no_core_files(world) {
        let sandbox = world.sandbox().await;
        assert_eq!(run(&*sandbox, "kill -11 $$").await.exit, Exit::Signal(11));
        assert_eq!(say(&*sandbox, "ls").await, "");
    }
}
