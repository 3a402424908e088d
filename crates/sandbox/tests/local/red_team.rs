//! Hostile programs. Each is contained, and what it tried shows in how it ended.

use std::{
    io::{Read, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    time::Duration,
};

use sandbox::{Exit, Provider, ReadLimits, Sandbox, SandboxError};

use crate::support::{provider, run, sandbox, say, script, spec};

/// A Python program, on machines that have one.
async fn python(sandbox: &dyn Sandbox, text: &str) -> Option<sandbox::Output> {
    if run(sandbox, "command -v python3").await.exit != Exit::Code(0) {
        println!("skipped: no python3 here");
        return None;
    }
    let mut exec = script("exec python3 -");
    exec.stdin = text.as_bytes().to_vec();
    Some(sandbox.exec(exec).await.expect("python runs"))
}

async fn alive(sandbox: &dyn Sandbox) {
    assert_eq!(say(sandbox, "echo alive").await, "alive");
}

#[tokio::test]
async fn stopping_the_supervisor_does_not_outlast_the_timeout() {
    let sandbox = sandbox().await;
    let mut exec = script("kill -STOP $PPID; while :; do sleep 1; done");
    exec.timeout = Duration::from_millis(300);
    assert_eq!(sandbox.exec(exec).await.unwrap().exit, Exit::TimedOut);
    // One that stops it again and again.
    let mut exec = script("setsid sh -c \"while :; do kill -STOP $PPID; done\" & sleep 1000");
    exec.timeout = Duration::from_millis(300);
    assert_eq!(sandbox.exec(exec).await.unwrap().exit, Exit::TimedOut);
    alive(&*sandbox).await;
    let left: u32 = say(&*sandbox, "ls -d /proc/[0-9]* | wc -l")
        .await
        .parse()
        .unwrap();
    assert!(left < 8, "{left} processes");
}

#[tokio::test]
async fn a_storm_of_signals_does_not_harm_pid_1() {
    let sandbox = sandbox().await;
    let storm = "for s in $(seq 1 31); do for i in 1 2 3 4 5 6 7 8 9 10; do kill -$s 1 2>/dev/null; done; done; echo over";
    assert_eq!(say(&*sandbox, storm).await, "over");
    let mut exec = script("while :; do kill -9 -1; kill -STOP 1; done");
    exec.timeout = Duration::from_secs(2);
    let _ = sandbox.exec(exec).await.unwrap();
    // Its last shot may hit whatever starts next.
    while run(&*sandbox, "true").await.exit != Exit::Code(0) {}
    alive(&*sandbox).await;
}

#[tokio::test]
async fn zombies_and_orphans_end_with_their_sandbox() {
    let provider = provider().await;
    let sandbox = provider.create(spec("zombies")).await.unwrap();
    // Children that nobody waits for, of a parent that lives on.
    let text = "import os, time\nn = 0\ntry:\n    while True:\n        if os.fork() == 0: os._exit(0)\n        n += 1\nexcept OSError: print('refused after', n, flush=True)\ntime.sleep(1000)";
    if run(&*sandbox, "command -v python3").await.exit == Exit::Code(0) {
        let mut exec = script("exec python3 -");
        exec.stdin = text.as_bytes().to_vec();
        exec.timeout = Duration::from_secs(5);
        let output = sandbox.exec(exec).await.unwrap();
        assert_eq!(output.exit, Exit::TimedOut);
        assert!(
            String::from_utf8_lossy(&output.stdout).contains("refused after"),
            "{output:?}"
        );
        alive(&*sandbox).await;
    }
    sandbox.destroy().await;
}

#[tokio::test]
async fn files_by_the_million_reach_a_limit() {
    let sandbox = sandbox().await;
    let text = "import os\nn = 0\ntry:\n    while True:\n        open(f'f{n}', 'w').close(); n += 1\nexcept OSError as e: print(n, e.strerror)";
    if let Some(output) = python(&*sandbox, text).await {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("No space left"), "{text}");
        let limits = ReadLimits {
            files_max: 1000,
            ..ReadLimits::default()
        };
        let listed = sandbox.list("/workspace".into(), limits).await;
        assert!(
            matches!(listed, Err(SandboxError::File { .. })),
            "{listed:?}"
        );
    }
    alive(&*sandbox).await;
}

#[tokio::test]
async fn folders_of_any_depth_do_not_harm_whoever_reads_them() {
    let sandbox = sandbox().await;
    let text = "import os\nfor i in range(3000):\n    os.mkdir('d' * 100); os.chdir('d' * 100)\nopen('bottom', 'w').close()";
    if python(&*sandbox, text).await.is_some() {
        // Whether it is an answer or an error, it comes, and nobody is the worse for it.
        let _ = sandbox.download("/workspace".into(), 1 << 20).await;
        let _ = sandbox
            .list("/workspace".into(), ReadLimits::default())
            .await;
        let _ = sandbox
            .download_tar("/workspace".into(), ReadLimits::default(), &mut Vec::new())
            .await;
    }
    alive(&*sandbox).await;
}

#[tokio::test]
async fn pid_1_cannot_be_traced_or_read() {
    let sandbox = sandbox().await;
    let text = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n\
        print(libc.ptrace(16, 1, 0, 0), os.strerror(ctypes.get_errno()))\n\
        class V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('l', ctypes.c_size_t)]\n\
        buffer = ctypes.create_string_buffer(8)\n\
        print(libc.process_vm_readv(1, ctypes.byref(V(ctypes.addressof(buffer), 8)), 1, ctypes.byref(V(0x400000, 8)), 1, 0), os.strerror(ctypes.get_errno()))\n\
        print(libc.syscall(434, 1, 0) and 'no pidfd' or 'pidfd')";
    if let Some(output) = python(&*sandbox, text).await {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(
            text.matches("-1 Operation not permitted").count(),
            2,
            "{output:?}"
        );
    }
    alive(&*sandbox).await;
}

#[tokio::test]
async fn system_calls_that_nobody_needs_are_not_there() {
    let sandbox = sandbox().await;
    assert_eq!(
        say(&*sandbox, "grep -c '^Seccomp:.2' /proc/self/status").await,
        "1"
    );
    // bpf, perf_event_open, userfaultfd, io_uring_setup, keyctl, open_by_handle_at, init_module.
    let text = "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n\
        for n in (321, 298, 323, 425, 250, 304, 175):\n    libc.syscall(n, 0, 0, 0, 0, 0); print(errno.errorcode[ctypes.get_errno()])";
    if cfg!(target_arch = "x86_64")
        && let Some(output) = python(&*sandbox, text).await
    {
        assert_eq!(output.stdout, b"ENOSYS\n".repeat(7), "{output:?}");
    }
}

#[tokio::test]
async fn links_lead_nowhere() {
    let sandbox = sandbox().await;
    std::fs::write("/tmp/espalier-red-team-secret", "secret of the host").unwrap();
    let _ = run(
        &*sandbox,
        "ln -s /tmp/espalier-red-team-secret s; ln -s / root; ln /etc/passwd hard; ln /usr/bin/env hard2; \
         p=/proc/1/root; ln -s $p/tmp proc1; p=/proc/self/root; ln -s $p/etc/shadow shadow; mkdir d; ln -s ../../../../../../etc d/up; echo mine > own",
    )
    .await;
    let files = sandbox
        .download("/workspace".into(), 1 << 20)
        .await
        .unwrap();
    let names: Vec<_> = files.iter().map(|f| f.path.display().to_string()).collect();
    assert_eq!(
        names,
        ["/workspace/own"],
        "hard links to the system are refused, links are not followed"
    );
    // Swapped under the reader's feet, again and again.
    say(&*sandbox, "mkdir race; (while :; do ln -sfn /etc race/x; rm -f race/x; mkdir -p race/x; echo y > race/x/f; rm -rf race/x; done) > /dev/null 2>&1 &").await;
    for _ in 0..50 {
        for file in sandbox
            .download("/workspace/race".into(), 1 << 20)
            .await
            .unwrap_or_default()
        {
            assert!(
                file.content == b"y\n" || file.content.is_empty(),
                "{file:?}"
            );
        }
    }
    assert_ne!(
        run(&*sandbox, "cat s").await.exit,
        Exit::Code(0),
        "another /tmp"
    );
    std::fs::remove_file("/tmp/espalier-red-team-secret").unwrap();
}

#[tokio::test]
async fn abstract_sockets_of_the_host_cannot_be_reached() {
    let name = format!("espalier-red-team-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    listener.set_nonblocking(true).unwrap();
    let sandbox = sandbox().await;
    let text = format!(
        "import socket\ns = socket.socket(socket.AF_UNIX)\ntry:\n    s.connect('\\0{name}'); print('connected')\nexcept OSError as e: print(e.strerror)"
    );
    if let Some(output) = python(&*sandbox, &text).await {
        assert_eq!(output.stdout, b"Connection refused\n", "{output:?}");
    }
    assert!(listener.accept().is_err());
    assert_eq!(
        say(&*sandbox, &format!("grep -c {name} /proc/net/unix || true")).await,
        "0"
    );
}

#[tokio::test]
async fn the_clock_is_not_theirs() {
    let sandbox = sandbox().await;
    assert_ne!(
        run(&*sandbox, "date -s 2001-01-01").await.exit,
        Exit::Code(0)
    );
    let year: u32 = say(&*sandbox, "date +%Y").await.parse().unwrap();
    assert!(year >= 2025);
    // A time namespace moves the clocks of those in it, not of whoever measures the timeout.
    let mut exec =
        script("unshare -UrT --monotonic 100000 --boottime 100000 sleep 1000 || sleep 1000");
    exec.timeout = Duration::from_millis(500);
    let output = sandbox.exec(exec).await.unwrap();
    assert_eq!(output.exit, Exit::TimedOut);
    assert!(output.seconds < 60.0, "{output:?}");
}

#[tokio::test]
async fn nobody_is_left_to_read_or_forge_what_the_verifier_brings() {
    let sandbox = sandbox().await;
    // What the harness leaves behind: a watcher that waits for tests and writes the reward.
    let mut exec = script(
        "echo forged > reward; mkdir -p /logs/verifier; ln -s /workspace/reward /logs/verifier/reward.txt; \
         (setsid sh -c 'while :; do cat /tests/secret >> /workspace/stolen 2>/dev/null; echo 1 > /logs/verifier/reward.txt; done' > /dev/null 2>&1 &); \
         nohup sh -c 'while :; do cat /tests/secret >> /workspace/stolen 2>/dev/null; done' > /dev/null 2>&1 & \
         echo harness over",
    );
    exec.end_background = true;
    assert_eq!(sandbox.exec(exec).await.unwrap().exit, Exit::Code(0));
    let file = |path: &str, content: &str| sandbox::File {
        path: path.into(),
        content: content.into(),
        mode: 0o644,
    };
    sandbox
        .upload(vec![
            file("/tests/secret", "answer"),
            file("/logs/verifier/reward.txt", "0"),
        ])
        .await
        .unwrap();
    say(&*sandbox, "sleep 0.3").await;
    let stolen = say(&*sandbox, "cat stolen 2>/dev/null || true").await;
    assert_eq!(stolen, "", "nobody read it");
    assert_eq!(
        say(&*sandbox, "cat /logs/verifier/reward.txt").await,
        "0",
        "nobody changed it"
    );
    // "forged", or the "1" of the loop before it was killed.
    assert_ne!(
        say(&*sandbox, "cat reward").await,
        "0",
        "the link was replaced, not followed"
    );
}

#[tokio::test]
async fn a_flood_of_connections_does_not_take_the_gateway_along() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("gateway.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut byte = [0];
                while stream.read(&mut byte).is_ok_and(|n| n > 0) {
                    let _ = stream.write_all(&byte);
                }
            });
        }
    });
    let provider = provider().await;
    let mut connected = spec("flood");
    connected.gateway_socket = Some(socket);
    let (hostile, other) = (
        provider.create(connected.clone()).await.unwrap(),
        provider.create(connected).await.unwrap(),
    );
    let text = "import socket, time\nopen_ = []\nfor i in range(900):\n    s = socket.socket(); s.settimeout(0.2)\n    try: s.connect(('127.0.0.1', 8080)); open_.append(s)\n    except OSError: pass\nprint(len(open_), flush=True)\ntime.sleep(1000)";
    if run(&*hostile, "command -v python3").await.exit != Exit::Code(0) {
        return;
    }
    let mut exec = script("exec python3 -");
    exec.stdin = text.as_bytes().to_vec();
    let ask = "bash -c 'exec 3<>/dev/tcp/127.0.0.1/8080 && printf p >&3 && head -c 1 <&3'";
    tokio::select! {
        output = hostile.exec(exec) => panic!("{output:?}"),
        text = async { say(&*other, &format!("sleep 2; {ask}")).await } => assert_eq!(text, "p"),
    }
    alive(&*hostile).await;
    // Its connections are gone with it.
    assert_eq!(say(&*hostile, ask).await, "p");
}

#[tokio::test]
async fn eating_memory_with_files_is_not_blamed_on_anybody_else() {
    let provider = provider().await;
    if provider.capabilities().memory == "rlimit" {
        println!("skipped: no memory controller for this user");
        return;
    }
    let mut small = spec("greedy");
    small.limits.memory_bytes = 64 << 20;
    small.limits.disk_bytes = 1 << 30;
    let (greedy, other) = (
        provider.create(small).await.unwrap(),
        provider.create(spec("other")).await.unwrap(),
    );
    match greedy.exec(script("cat /dev/zero > /dev/shm/x")).await {
        Ok(output) => assert!(output.out_of_memory, "{output:?}"),
        Err(SandboxError::Gone { reason, .. }) => assert!(reason.contains("memory"), "{reason}"),
        Err(other) => panic!("{other:?}"),
    }
    alive(&*other).await;
}

#[tokio::test]
async fn the_guest_inside_gives_no_power() {
    let sandbox = sandbox().await;
    for command in [
        "warden",
        "init '{}'",
        "probe",
        "relay /nowhere",
        "install '{}'",
        "unpack /usr",
        "pack /root 10 10",
        "nonsense",
    ] {
        let text = format!("timeout 5 /run/espalier/guest {command} < /dev/null");
        let output = run(&*sandbox, &text).await;
        // `probe` may find that sandboxes in sandboxes work; nobody gets more than that.
        assert!(
            command == "probe" || output.exit != Exit::Code(0) || output.stdout.is_empty(),
            "{command}: {output:?}"
        );
    }
    alive(&*sandbox).await;
}
