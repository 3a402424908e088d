//! What a sandbox cannot see, reach or change.

use std::{
    io::{Read, Write},
    net::TcpListener,
    os::unix::{fs::PermissionsExt, net::UnixListener},
};

use sandbox::{Exit, GUEST_PATH, Mount, Provider, SandboxError};

use crate::support::{provider, run, sandbox, say, spec};

#[tokio::test]
async fn the_system_is_read_only_and_the_host_is_not_there() {
    let sandbox = sandbox().await;
    assert_eq!(
        say(&*sandbox, "id -u; id -g; hostname; whoami").await,
        "1000\n1000\nsandbox\nagent"
    );
    for path in [
        "/usr/x",
        "/etc/x",
        "/bin/x",
        "/usr/bin/sh",
        "/etc/passwd",
        GUEST_PATH,
        "/dev/x",
    ] {
        let output = run(&*sandbox, &format!("echo x > {path}")).await;
        assert_ne!(output.exit, Exit::Code(0), "{path} is writable");
    }
    for path in ["/bin", "/usr", "/etc", GUEST_PATH, "/etc/passwd"] {
        let output = run(
            &*sandbox,
            &format!("perl -e 'rename(\"{path}\", \"/tmp/moved\") or unlink(\"{path}\") or rmdir(\"{path}\") or exit 1'"),
        )
        .await;
        assert_ne!(output.exit, Exit::Code(0), "{path} can be moved away");
    }
    assert_eq!(say(&*sandbox, "ls /home").await, "agent");
    let root = say(&*sandbox, "ls -A / | tr '\\n' ' '").await;
    for host in ["sys", "boot", "srv", "mnt", "media", "opt", "work"] {
        assert!(
            !root.split_whitespace().any(|name| name == host),
            "{host} in {root}"
        );
    }
    // Root in here has a HOME of his own, where there is a root.
    let of_root = run(&*sandbox, "ls -A /root").await;
    assert_ne!(of_root.exit, Exit::Code(0), "{of_root:?}");
    say(
        &*sandbox,
        "echo x > /dev/null; head -c 3 /dev/urandom > r; test -s r; echo x > /dev/shm/x",
    )
    .await;
    // Nothing of the host's mounts is left below or above.
    let mounts = say(
        &*sandbox,
        "cut -d' ' -f5 /proc/self/mountinfo | sort | tr '\\n' ' '",
    )
    .await;
    assert!(
        !mounts.contains("/sys") && !mounts.contains("cgroup"),
        "{mounts}"
    );
    assert_eq!(
        say(
            &*sandbox,
            "cat /proc/self/status | grep -c -E '^Cap(Inh|Prm|Eff|Bnd|Amb):\\s+0+$'"
        )
        .await,
        "5"
    );
    assert_eq!(
        say(&*sandbox, "grep NoNewPrivs /proc/self/status | cut -f2").await,
        "1"
    );
}

#[tokio::test]
async fn kernel_settings_are_not_writable() {
    let sandbox = sandbox().await;
    for path in [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sys/kernel/pid_max",
        "/proc/sysrq-trigger",
        "/proc/sys/fs/file-max",
    ] {
        let output = run(&*sandbox, &format!("test -e {path} && echo 1 > {path}")).await;
        assert_ne!(output.exit, Exit::Code(0), "{path} is writable");
    }
    let output = run(
        &*sandbox,
        "mount -t tmpfs x /tmp; unshare -m true; chroot / true",
    )
    .await;
    assert_ne!(output.exit, Exit::Code(0));
}

#[tokio::test]
async fn two_sandboxes_do_not_see_each_other() {
    let provider = provider().await;
    let one = provider.create(spec("one")).await.unwrap();
    let two = provider.create(spec("two")).await.unwrap();
    say(&*one, "echo secret > /tmp/x; echo secret > x; sleep 7003 & python3 -c '
import socket; s = socket.socket(socket.AF_UNIX); s.bind(\"\\0espalier-test\"); s.listen()' || true").await;
    assert_eq!(
        say(
            &*two,
            "ls -A /tmp /workspace /dev/shm | grep -v : | tr -d '\\n'"
        )
        .await,
        ""
    );
    assert_eq!(
        say(
            &*two,
            "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 7003 || true"
        )
        .await,
        "1"
    );
    assert_eq!(
        say(&*two, "cat /proc/net/unix | grep -c espalier-test || true").await,
        "0"
    );
    // Few processes at all: PID 1, the supervisor, the shell and its helpers.
    let count: u32 = say(&*two, "ls -d /proc/[0-9]* | wc -l")
        .await
        .parse()
        .unwrap();
    assert!(count < 8, "{count}");
}

const ASK: &str = "bash -c 'exec 3<>/dev/tcp/127.0.0.1/PORT && printf ping >&3 && head -c 4 <&3'";

#[tokio::test]
async fn the_only_way_out_is_the_gateway() {
    // Its folder is private, as run folders are.
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let socket = folder.path().join("gateway.sock");
    let gateway = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for stream in gateway.incoming().flatten() {
            let mut stream = stream;
            let mut asked = [0; 4];
            if stream.read_exact(&mut asked).is_ok() && &asked == b"ping" {
                let _ = stream.write_all(b"pong");
            }
        }
    });
    let host = TcpListener::bind("127.0.0.1:0").unwrap();
    let host_port = host.local_addr().unwrap().port();

    let provider = provider().await;
    let mut connected = spec("connected");
    connected.gateway_socket = Some(socket);
    connected.gateway_port = 8080;
    let sandbox = provider.create(connected).await.unwrap();
    for _ in 0..3 {
        assert_eq!(say(&*sandbox, &ASK.replace("PORT", "8080")).await, "pong");
    }
    // Many at once.
    let each = ASK.replace("PORT", "8080");
    let all = say(
        &*sandbox,
        &format!("for i in $(seq 20); do {each} & done; wait"),
    )
    .await;
    assert_eq!(all, "pong".repeat(20));
    let output = run(&*sandbox, &ASK.replace("PORT", &host_port.to_string())).await;
    assert_ne!(output.exit, Exit::Code(0));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("refused"),
        "{output:?}"
    );
    let interfaces = say(
        &*sandbox,
        "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '",
    )
    .await;
    assert_eq!(interfaces, "lo");
    let output = run(&*sandbox, "bash -c 'exec 3<>/dev/tcp/192.0.2.1/80'").await;
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("unreachable"),
        "{output:?}"
    );

    // Without a gateway there is no port at all.
    let alone = provider.create(spec("alone")).await.unwrap();
    let output = run(&*alone, &ASK.replace("PORT", "8080")).await;
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("refused"),
        "{output:?}"
    );
}

#[tokio::test]
async fn mounts_are_read_only_and_reachable_below_private_folders() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let tool = folder.path().join("tool");
    std::fs::create_dir(&tool).unwrap();
    std::fs::write(tool.join("data"), "from the host").unwrap();
    let provider = provider().await;
    let mut with = spec("mounts");
    with.mounts = vec![
        Mount {
            source: tool.clone(),
            target: "/opt/tool".into(),
        },
        Mount {
            source: tool.join("data"),
            target: "/home/agent/deep/data".into(),
        },
    ];
    let sandbox = provider.create(with).await.unwrap();
    assert_eq!(
        say(&*sandbox, "cat /opt/tool/data ~/deep/data").await,
        "from the hostfrom the host"
    );
    let output = run(
        &*sandbox,
        "echo x > /opt/tool/data || echo x > ~/deep/data || touch /opt/tool/new",
    )
    .await;
    assert_ne!(output.exit, Exit::Code(0));
    assert_eq!(
        std::fs::read_to_string(tool.join("data")).unwrap(),
        "from the host"
    );

    let mut absent = spec("absent");
    absent.mounts = vec![Mount {
        source: folder.path().join("no"),
        target: "/opt/x".into(),
    }];
    let error = provider.create(absent).await.unwrap_err();
    assert!(
        matches!(&error, SandboxError::Create { reason, .. } if reason.contains("/no: No such file")),
        "{error}"
    );
    let mut relative = spec("relative");
    relative.workspace = "../x".into();
    let error = provider.create(relative).await.unwrap_err().to_string();
    assert!(error.contains("absolute"), "{error}");
}

#[tokio::test]
async fn nested_sandboxes_work_and_stay_inside() {
    let sandbox = sandbox().await;
    let nested = "unshare --user --map-root-user --mount --pid --net --fork --mount-proc sh -c \
                  'echo $$; mount -t tmpfs x /tmp && echo mounted; ls -d /proc/[0-9]* | wc -l'";
    let text = say(&*sandbox, nested).await;
    assert!(text.starts_with("1\nmounted\n"), "{text}");
    // Root in there is still nobody out here.
    let output = run(
        &*sandbox,
        "unshare --user --map-root-user --mount sh -c \
         'mount -o remount,rw,bind /usr || umount /usr || umount /bin || echo 1 > /proc/sys/kernel/pid_max'",
    )
    .await;
    assert_ne!(output.exit, Exit::Code(0), "{output:?}");
}
