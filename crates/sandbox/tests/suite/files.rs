//! Files in and out, one by one.

use std::path::PathBuf;

use sandbox::{File, Sandbox, SandboxError};

use super::{cases, run, say};

pub(super) fn file(path: &str, mode: u32, content: &[u8]) -> File {
    File {
        path: path.into(),
        content: content.to_vec(),
        mode,
    }
}

fn refused<T: std::fmt::Debug>(result: Result<T, SandboxError>) -> String {
    match result {
        Err(SandboxError::File { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

async fn get(sandbox: &dyn Sandbox, path: &str) -> Vec<File> {
    sandbox
        .download(path.into(), 64 << 20)
        .await
        .expect("files")
}

cases! {
    async fn round_trip(world) {
        let sandbox = world.sandbox().await;
        let binary: Vec<u8> = (0..1_000_000_u32).map(|i| (i * 7 % 251) as u8).collect();
        let mut files = vec![
            file("/workspace/a/binary", 0o600, &binary),
            file("/workspace/a/empty", 0o644, b""),
            file("/workspace/a b\u{e9}\n.txt", 0o755, b"#!/bin/sh\necho ran\n"),
        ];
        sandbox.upload(files.clone()).await.unwrap();
        assert_eq!(say(&*sandbox, "stat -c %a a/* && ./a\\ b*").await, "600\n644\nran");
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let mut seen = get(&*sandbox, "/workspace").await;
        seen.sort_by(|a, b| a.path.cmp(&b.path));
        assert_eq!(seen, files);
    }

    async fn a_single_file(world) {
        let sandbox = world.sandbox().await;
        sandbox.upload(vec![file("/tmp/one", 0o640, b"1")]).await.unwrap();
        assert_eq!(get(&*sandbox, "/tmp/one").await, [file("/tmp/one", 0o640, b"1")]);
    }

    async fn files_of_the_spec_are_there_first(world) {
        let mut spec = world.spec();
        spec.files = vec![file("/workspace/deep/x", 0o644, b"early"), file("/home/agent/.rc", 0o600, b"rc")];
        let sandbox = world.make(spec).await;
        assert_eq!(say(&*sandbox, "cat deep/x ~/.rc").await, "earlyrc");
    }

    async fn five_hundred_files(world) {
        let sandbox = world.sandbox().await;
        let files: Vec<_> = (0..500)
            .map(|i| file(&format!("/workspace/{:02}/{i:03}", i % 7), 0o644, format!("{i}").as_bytes()))
            .collect();
        sandbox.upload(files.clone()).await.unwrap();
        assert_eq!(say(&*sandbox, "find . -type f | wc -l | tr -d ' '").await, "500");
        let mut seen = get(&*sandbox, "/workspace").await;
        seen.sort_by(|a, b| a.content.len().cmp(&b.content.len()).then(a.content.cmp(&b.content)));
        assert!(seen.len() == 500 && seen[499].content == b"499");
    }

    async fn a_large_file(world) {
        let sandbox = world.sandbox().await;
        let large = vec![b'y'; 20 << 20];
        sandbox.upload(vec![file("/workspace/large", 0o644, &large)]).await.unwrap();
        assert_eq!(say(&*sandbox, "wc -c < large | tr -d ' '").await, (20 << 20).to_string());
        let seen = get(&*sandbox, "/workspace/large").await;
        assert!(seen[0].content == large);
    }

    async fn what_belongs_to_the_sandbox_can_be_changed_inside(world) {
        let sandbox = world.sandbox().await;
        sandbox.upload(vec![file("/workspace/d/f", 0o644, b"old")]).await.unwrap();
        say(&*sandbox, "echo new > d/f && mv d e && chmod 700 e && rm -r e && test -O .").await;
        assert_eq!(get(&*sandbox, "/workspace").await, []);
    }

    async fn an_upload_replaces_links_and_does_not_follow_them(world) {
        let sandbox = world.sandbox().await;
        say(&*sandbox, "echo victim > victim; ln -s victim link").await;
        sandbox.upload(vec![file("/workspace/link", 0o644, b"new")]).await.unwrap();
        assert_eq!(say(&*sandbox, "cat victim link; test -h link || echo file").await, "victim\nnewfile");
    }

    async fn a_download_takes_regular_files_only_and_never_blocks(world) {
        let sandbox = world.sandbox().await;
        say(&*sandbox, "mkfifo fifo; ln -s /etc/passwd link; ln -s loop loop; mkdir d; echo x > d/f; ln d/f d/hard").await;
        let names: Vec<_> = get(&*sandbox, "/workspace").await.into_iter().map(|f| f.path).collect();
        assert_eq!(names, ["/workspace/d/f", "/workspace/d/hard"].map(PathBuf::from));
    }

    async fn a_download_has_a_limit(world) {
        let sandbox = world.sandbox().await;
        say(&*sandbox, "head -c 1000 /dev/zero > a; head -c 1000 /dev/zero > b").await;
        let reason = refused(sandbox.download("/workspace".into(), 1999).await);
        assert!(reason.contains("more than 1999 bytes"), "{reason}");
        assert_eq!(sandbox.download("/workspace".into(), 2000).await.unwrap().len(), 2);
    }

    async fn a_download_of_what_is_absent(world) {
        let sandbox = world.sandbox().await;
        let reason = refused(sandbox.download("/workspace/absent".into(), 10).await);
        assert!(reason.contains("No such file"), "{reason}");
    }

    async fn an_upload_that_cannot_be(world) {
        let sandbox = world.sandbox().await;
        say(&*sandbox, "echo > plain").await;
        for path in ["/workspace/plain/below", "/workspace", "relative"] {
            refused(sandbox.upload(vec![file(path, 0o644, b"x")]).await);
        }
        assert_eq!(say(&*sandbox, "echo alive").await, "alive");
    }

    async fn the_system_cannot_be_written(world) {
        let sandbox = world.sandbox().await;
        for path in ["/usr/x", "/etc/x", "/bin/x", "/proc/x", "/dev/x", "/run/espalier/guest"] {
            refused(sandbox.upload(vec![file(path, 0o644, b"x")]).await);
            let output = run(&*sandbox, &format!("echo x > {path}")).await;
            assert_ne!(output.exit, sandbox::Exit::Code(0), "{path}");
        }
        for path in ["/etc/passwd", "/bin/sh"] {
            let output = run(&*sandbox, &format!("echo x >> {path} || rm -f {path}")).await;
            assert_ne!(output.exit, sandbox::Exit::Code(0), "{path}");
        }
    }

    async fn folders_of_verifiers_can_be_written(world) {
        let sandbox = world.sandbox().await;
        let files = ["/tests/deep/x", "/solution/solve.sh", "/logs/verifier/reward.txt"];
        sandbox.upload(files.map(|p| file(p, 0o644, b"x")).to_vec()).await.unwrap();
        say(&*sandbox, "cat /tests/deep/x /solution/* && echo 1 > /logs/verifier/reward.txt").await;
    }
}
