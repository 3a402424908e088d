//! Memory, processes, processor, disk.

use sandbox::{Exit, Provider};

use crate::support::{provider, run, sandbox, say, script, spec};

#[tokio::test]
async fn memory() {
    let provider = provider().await;
    if provider.capabilities().memory == "rlimit" {
        println!("skipped: no memory controller for this user");
        return;
    }
    let mut small = spec("memory");
    small.limits.memory_bytes = 64 << 20;
    let sandbox = provider.create(small).await.unwrap();
    let output = run(
        &*sandbox,
        "head -c 200000000 /dev/zero | tail -c 150000000 | wc -c",
    )
    .await;
    assert!(output.out_of_memory, "{output:?}");
    // PID 1 and its sandbox live on, and the next process is not blamed.
    let output = run(&*sandbox, "echo alive").await;
    assert!(!output.out_of_memory && output.stdout == b"alive\n");
    // A process that is killed itself says so.
    let python = "python3 -c 'x = bytearray(200_000_000)'";
    if run(&*sandbox, "command -v python3").await.exit == Exit::Code(0) {
        let output = sandbox
            .exec(script(&format!("exec {python}")))
            .await
            .unwrap();
        assert_eq!(output.exit, Exit::Signal(9));
        assert!(output.out_of_memory);
    }
}

#[tokio::test]
async fn files_count_as_memory() {
    let provider = provider().await;
    if provider.capabilities().memory == "rlimit" {
        println!("skipped: no memory controller for this user");
        return;
    }
    let mut small = spec("memory");
    small.limits.memory_bytes = 48 << 20;
    small.limits.disk_bytes = 512 << 20;
    let sandbox = provider.create(small).await.unwrap();
    let result = sandbox
        .exec(script("head -c 100000000 /dev/zero > file"))
        .await;
    match result {
        Ok(output) => assert!(output.out_of_memory, "{output:?}"),
        // The kernel may find nothing to kill but PID 1.
        Err(error) => assert!(error.to_string().contains("memory"), "{error}"),
    }
}

#[tokio::test]
async fn processes() {
    let provider = provider().await;
    let mut small = spec("pids");
    small.limits.pids = 20;
    let sandbox = provider.create(small).await.unwrap();
    // The shell gives up at the first refused fork.
    let output = run(
        &*sandbox,
        "for i in $(seq 100); do sleep 1000 & echo; done 2>&1",
    )
    .await;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("fork"), "{text}");
    assert!(text.lines().count() <= 20, "{text}");
    let inside = provider.create(spec("other")).await.unwrap();
    say(&*inside, "for i in $(seq 30); do sleep 1000 & done").await;
}

#[tokio::test]
async fn processor() {
    let provider = provider().await;
    if provider.capabilities().cpu == "none" {
        println!("skipped: no cpu controller for this user");
        return;
    }
    let mut slow = spec("cpu");
    slow.limits.cpu_cores = 0.1;
    let sandbox = provider.create(slow).await.unwrap();
    // One second of wall-clock time may use at most about a tenth of processor time; the bound
    // is generous, and only an unlimited process on an idle machine passes it.
    let text = "timeout 1 sh -c 'while :; do :; done'; times | tail -1";
    let output = run(&*sandbox, &format!("bash -c \"{text}\"")).await;
    let times = String::from_utf8_lossy(&output.stdout).into_owned();
    let user = times
        .split_whitespace()
        .next()
        .unwrap_or_default()
        .to_owned();
    let seconds: f64 = user
        .trim_start_matches("0m")
        .trim_end_matches('s')
        .parse()
        .unwrap();
    assert!(seconds < 0.4, "{times}");
}

#[tokio::test]
async fn disk() {
    let sandbox = sandbox().await;
    // Workspace, HOME, /tmp and shared memory are one disk of 32 MiB.
    say(
        &*sandbox,
        "head -c 10000000 /dev/zero > $HOME/a; head -c 10000000 /dev/zero > /tmp/b",
    )
    .await;
    let output = run(&*sandbox, "head -c 20000000 /dev/zero > /dev/shm/c").await;
    assert_eq!(output.exit, Exit::Code(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("No space left"),
        "{output:?}"
    );
    say(
        &*sandbox,
        "rm /dev/shm/c $HOME/a /tmp/b; head -c 20000000 /dev/zero > c",
    )
    .await;
}
