//! Files in and out.

use sandbox::{File, Sandbox, SandboxError};

use crate::support::{sandbox, say};

fn file(path: &str, mode: u32, content: &[u8]) -> File {
    File {
        path: path.into(),
        content: content.to_vec(),
        mode,
    }
}

#[tokio::test]
async fn round_trip() {
    let sandbox = sandbox().await;
    let binary: Vec<u8> = (0..1_000_000_u32).map(|i| (i * 7 % 251) as u8).collect();
    let files = vec![
        file("/workspace/a/binary", 0o600, &binary),
        file("/workspace/a/empty", 0o644, b""),
        file(
            "/workspace/a b\u{e9}\n.txt",
            0o755,
            b"#!/bin/sh\necho ran\n",
        ),
    ];
    sandbox.upload(files.clone()).await.unwrap();
    assert_eq!(
        say(&sandbox, "stat -c %a a/* && ./a\\ b*").await,
        "600\n644\nran"
    );
    let mut expected = files;
    expected.sort_by(|a, b| a.path.cmp(&b.path));
    let mut seen = sandbox
        .download("/workspace".into(), 2 << 20)
        .await
        .unwrap();
    seen.sort_by(|a, b| a.path.cmp(&b.path));
    assert_eq!(seen, expected);
    let one = sandbox
        .download("/workspace/a/binary".into(), 2 << 20)
        .await
        .unwrap();
    assert_eq!(one[0].content, binary);
    // Anywhere but in the system.
    sandbox
        .upload(vec![file("/tests/deep/x", 0o644, b"x")])
        .await
        .unwrap();
    for system in ["/usr/x", "/etc/x", "/bin/x", "/proc/x", "/dev/x"] {
        let result = sandbox.upload(vec![file(system, 0o644, b"x")]).await;
        assert!(
            matches!(result, Err(SandboxError::File { .. })),
            "{system}: {result:?}"
        );
    }
    sandbox.upload(Vec::new()).await.unwrap();
}

#[tokio::test]
async fn failures_name_the_path_and_the_reason() {
    let sandbox = sandbox().await;
    let reason = |error: SandboxError| match error {
        SandboxError::File { path, reason, .. } => format!("{path}: {reason}"),
        other => panic!("{other:?}"),
    };
    let absent = reason(
        sandbox
            .download("/workspace/absent".into(), 10)
            .await
            .unwrap_err(),
    );
    assert!(
        absent.contains("/workspace/absent: No such file"),
        "{absent}"
    );
    say(
        &sandbox,
        "head -c 5000 /dev/zero > big; mkfifo fifo; ln -s /etc/passwd link",
    )
    .await;
    let big = reason(
        sandbox
            .download("/workspace".into(), 4999)
            .await
            .unwrap_err(),
    );
    assert!(big.contains("more than 4999 bytes"), "{big}");
    let files = sandbox.download("/workspace".into(), 5000).await.unwrap();
    assert_eq!(files.len(), 1, "fifo and link are no regular files");

    let full = sandbox
        .upload(vec![file("/workspace/full", 0o644, &vec![1; 40 << 20])])
        .await;
    let full = reason(full.unwrap_err());
    assert!(full.contains("/workspace/full: No space left"), "{full}");
    // The rest goes on: space comes back, and processes run even on a full disk.
    say(
        &sandbox,
        "rm full; (head -c 40000000 /dev/zero > fill || true) 2>/dev/null; df . >&2",
    )
    .await;
    let mut exec = crate::support::script("cat");
    exec.stdin = b"still".to_vec();
    assert_eq!(sandbox.exec(exec).await.unwrap().stdout, b"still");
}

#[tokio::test]
async fn many_small_files() {
    let sandbox = sandbox().await;
    let files: Vec<_> = (0..2000)
        .map(|i| {
            file(
                &format!("/workspace/{:02}/{i:04}", i % 50),
                0o644,
                i.to_string().as_bytes(),
            )
        })
        .collect();
    sandbox.upload(files).await.unwrap();
    let seen = sandbox
        .download("/workspace".into(), 1 << 20)
        .await
        .unwrap();
    assert_eq!(seen.len(), 2000);
    assert!(seen.windows(2).all(|pair| pair[0].path < pair[1].path));
    let name = |file: &File| {
        file.path
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .parse::<u32>()
            .unwrap()
    };
    assert!(
        seen.iter()
            .all(|f| f.content == name(f).to_string().as_bytes())
    );
}
