//! What a sandbox sees of others and of the host.

use sandbox::{Exit, Mount, SandboxError};

use super::{cases, private_folder, run, say};

cases! {
    async fn two_do_not_see_each_other(world) {
        let (one, two) = tokio::join!(world.sandbox(), world.sandbox());
        say(&*one, "echo secret | tee /tmp/x /workspace/x ~/x /dev/shm/x > /dev/null; sleep 7004 > /dev/null 2>&1 &").await;
        assert_eq!(say(&*two, "ls -A /tmp /workspace ~ /dev/shm | grep x || true").await, "");
        assert_eq!(super::count(&*two, "7004").await, 0);
        assert_eq!(super::count(&*one, "7004").await, 1);
    }

    async fn there_are_few_processes(world) {
        let sandbox = world.sandbox().await;
        let count: u32 = say(&*sandbox, "ls -d /proc/[0-9]* | wc -l | tr -d ' '").await.parse().unwrap();
        assert!(count < 12, "{count}");
        assert_eq!(say(&*sandbox, "tr '\\0' ' ' < /proc/1/cmdline | grep -c sandbox-test || true").await, "0");
    }

    async fn pid_1_cannot_be_looked_into(world) {
        let sandbox = world.sandbox().await;
        let output = run(&*sandbox, "cat /proc/1/environ; cat /proc/1/mem; ls /proc/1/fd; cat /proc/1/maps").await;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.matches("Permission denied").count() >= 3, "{errors}");
        assert!(output.stdout.is_empty(), "{output:?}");
    }

    async fn the_host_name_is_no_secret_of_ours(world) {
        let sandbox = world.sandbox().await;
        assert_eq!(say(&*sandbox, "cat /proc/sys/kernel/hostname").await, "sandbox");
    }

    async fn the_kernel_cannot_be_written(world) {
        let sandbox = world.sandbox().await;
        for path in ["/proc/sys/kernel/hostname", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/power/state"] {
            let output = run(&*sandbox, &format!("echo x > {path}")).await;
            assert_ne!(output.exit, Exit::Code(0), "{path}");
        }
    }

    async fn nothing_gains_privileges(world) {
        let sandbox = world.sandbox().await;
        let output = run(&*sandbox, "mkdir d; cp /bin/sh d/sh; chmod 4755 d/sh; d/sh -c 'id -u'; mount -t tmpfs none /tmp; mknod disk b 8 0; chroot / true").await;
        assert_eq!(String::from_utf8_lossy(&output.stdout), "1000\n");
        assert_ne!(output.exit, Exit::Code(0));
    }

    async fn mounts_are_read_only(world) {
        if !world.mounts {
            return;
        }
        let (folder, tool) = private_folder();
        let mut spec = world.spec();
        spec.mounts = vec![
            Mount { source: tool.clone(), target: "/opt/tool".into() },
            Mount { source: tool.join("data"), target: "/opt/deep/data".into() },
        ];
        let sandbox = world.make(spec).await;
        assert_eq!(say(&*sandbox, "cat /opt/tool/data /opt/deep/data").await, "from the hostfrom the host");
        for attempt in ["echo x > /opt/tool/data", "echo x > /opt/deep/data", "touch /opt/tool/new", "rm /opt/tool/data"] {
            assert_ne!(run(&*sandbox, attempt).await.exit, Exit::Code(0), "{attempt}");
        }
        assert_eq!(std::fs::read_to_string(tool.join("data")).unwrap(), "from the host");
        drop(folder);
    }

    async fn a_mount_of_what_is_absent_is_an_error(world) {
        if !world.mounts {
            return;
        }
        let (folder, _) = private_folder();
        let mut spec = world.spec();
        spec.mounts = vec![Mount { source: folder.path().join("no"), target: "/opt/x".into() }];
        match world.try_make(spec).await {
            Err(SandboxError::Create { reason, .. } | SandboxError::Refused { reason, .. }) => {
                assert!(reason.contains("/no"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }

    async fn paths_that_would_break_a_sandbox_are_refused(world) {
        for path in ["relative", "/", "/a/../b", "/proc/x", "/dev/x", "/run/espalier/x"] {
            let mut spec = world.spec();
            spec.workspace = path.into();
            let result = world.try_make(spec).await;
            assert!(
                matches!(result, Err(SandboxError::Create { .. } | SandboxError::Refused { .. })),
                "{path}: {result:?}"
            );
        }
    }
}
