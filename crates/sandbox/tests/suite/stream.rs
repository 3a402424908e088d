//! Output as it comes.

use std::time::Duration;

use sandbox::{Chunk, Exec, Exit, Output, Sandbox, SandboxError};
use tokio::{
    io::{AsyncWriteExt, duplex, empty},
    sync::mpsc,
};

use super::{cases, count, is_there, say, script, until};

async fn run_streaming(
    sandbox: &dyn Sandbox,
    exec: Exec,
    chunks: mpsc::Sender<Chunk>,
) -> Result<Output, SandboxError> {
    sandbox.exec_streaming(exec, &mut empty(), chunks).await
}

async fn heard(chunks: &mut mpsc::Receiver<Chunk>, expected: &str) {
    assert_eq!(
        chunks.recv().await,
        Some(Chunk::Stdout(expected.as_bytes().to_vec()))
    );
}

cases! {
    async fn output_comes_before_the_end(world) {
        let sandbox = world.sandbox().await;
        let exec = script("echo one; while [ ! -e go ]; do sleep 0.05; done; echo two >&2");
        let (sender, mut chunks) = mpsc::channel(4);
        let watch = async {
            assert_eq!(chunks.recv().await, Some(Chunk::Stdout(b"one\n".to_vec())));
            say(&*sandbox, "touch go").await;
            assert_eq!(chunks.recv().await, Some(Chunk::Stderr(b"two\n".to_vec())));
            assert_eq!(chunks.recv().await, None);
        };
        let (output, ()) = tokio::join!(run_streaming(&*sandbox, exec, sender), watch);
        let output = output.unwrap();
        assert_eq!((output.exit, output.dropped_bytes), (Exit::Code(0), 0));
        assert!(output.stdout.is_empty() && output.stderr.is_empty());
    }

    async fn a_process_waits_while_nobody_takes_its_output(world) {
        let sandbox = world.sandbox().await;
        let exec = script("head -c 8000000 /dev/zero; touch done");
        let (sender, mut chunks) = mpsc::channel(1);
        let watch = async {
            let mut bytes = match chunks.recv().await {
                Some(Chunk::Stdout(piece)) => piece.len(),
                other => panic!("{other:?}"),
            };
            // It had all the time in the world, and is not done.
            say(&*sandbox, "sleep 1").await;
            assert!(!is_there(&*sandbox, "done").await, "it did not wait");
            while let Some(chunk) = chunks.recv().await {
                let (Chunk::Stdout(piece) | Chunk::Stderr(piece)) = chunk;
                bytes += piece.len();
            }
            bytes
        };
        let (output, bytes) = tokio::join!(run_streaming(&*sandbox, exec, sender), watch);
        assert_eq!((output.unwrap().exit, bytes), (Exit::Code(0), 8_000_000));
        assert!(is_there(&*sandbox, "done").await);
    }

    async fn every_byte_of_a_large_output_comes_in_order(world) {
        let sandbox = world.sandbox().await;
        let (sender, mut chunks) = mpsc::channel(2);
        let take = async {
            let (mut out, mut err) = (Vec::new(), Vec::new());
            while let Some(chunk) = chunks.recv().await {
                match chunk {
                    Chunk::Stdout(piece) => out.extend(piece),
                    Chunk::Stderr(piece) => err.extend(piece),
                }
            }
            (out, err)
        };
        let exec = script("seq 1 200000 & seq 200001 300000 >&2; wait");
        let (output, (out, err)) = tokio::join!(run_streaming(&*sandbox, exec, sender), take);
        assert_eq!(output.unwrap().exit, Exit::Code(0));
        let lines = |from: u32, to: u32| (from..=to).map(|n| format!("{n}\n")).collect::<String>();
        for (seen, expected) in [(out, lines(1, 200_000)), (err, lines(200_001, 300_000))] {
            let differs = seen.iter().zip(expected.as_bytes()).position(|(a, b)| a != b);
            assert!(differs.is_none() && seen.len() == expected.len(), "{} bytes of {}, the first other one at {differs:?}", seen.len(), expected.len());
        }
    }

    async fn a_taker_that_goes_away_harms_nobody(world) {
        let sandbox = world.sandbox().await;
        let (sender, chunks) = mpsc::channel(1);
        drop(chunks);
        let exec = script("head -c 5000000 /dev/zero; exit 3");
        assert_eq!(run_streaming(&*sandbox, exec, sender).await.unwrap().exit, Exit::Code(3));
    }

    async fn dropping_a_stream_kills_the_tree(world) {
        let sandbox = world.sandbox().await;
        let (sender, _chunks) = mpsc::channel(1);
        let exec = script("setsid sleep 7003 & touch begun; sleep 7003");
        tokio::select! {
            output = run_streaming(&*sandbox, exec, sender) => panic!("{output:?}"),
            () = until(&*sandbox, "test -e begun") => {}
        }
        while count(&*sandbox, "7003").await != 0 {}
    }

    async fn a_timeout_holds_for_a_process_that_waits(world) {
        let sandbox = world.sandbox().await;
        let (sender, mut chunks) = mpsc::channel(1);
        let mut exec = script("cat /dev/zero");
        exec.timeout = Duration::from_millis(700);
        let take = async {
            assert!(chunks.recv().await.is_some());
            // Nothing more is taken until the process was killed.
            until(&*sandbox, "! grep -sqa '^cat' /proc/[0-9]*/cmdline").await;
            while chunks.recv().await.is_some() {}
        };
        let (output, ()) = tokio::join!(run_streaming(&*sandbox, exec, sender), take);
        assert_eq!(output.unwrap().exit, Exit::TimedOut);
    }

    async fn a_conversation(world) {
        let sandbox = world.sandbox().await;
        let mut exec = script("while read line; do echo \"heard $line\"; done; echo over");
        exec.stdin = b"first\n".to_vec();
        let (sender, mut chunks) = mpsc::channel(4);
        let (mut ours, mut theirs) = duplex(1000);
        let talk = async {
            heard(&mut chunks, "heard first\n").await;
            ours.write_all(b"second\n").await.unwrap();
            heard(&mut chunks, "heard second\n").await;
            ours.shutdown().await.unwrap();
            heard(&mut chunks, "over\n").await;
        };
        let (output, ()) = tokio::join!(sandbox.exec_streaming(exec, &mut theirs, sender), talk);
        assert_eq!(output.unwrap().exit, Exit::Code(0));
    }

    async fn input_that_is_taken_slowly_waits(world) {
        let sandbox = world.sandbox().await;
        let (sender, mut chunks) = mpsc::channel(4);
        let (mut ours, mut theirs) = duplex(1000);
        let given = std::sync::atomic::AtomicUsize::new(0);
        let give = async {
            for _ in 0..3000 {
                ours.write_all(&[b'x'; 1000]).await.unwrap();
                given.fetch_add(1000, std::sync::atomic::Ordering::Relaxed);
            }
            ours.shutdown().await.unwrap();
        };
        let watch = async {
            say(&*sandbox, "sleep 1").await;
            // The window, the pipe and what is between.
            let before = given.load(std::sync::atomic::Ordering::Relaxed);
            assert!((100_000..500_000).contains(&before), "{before}");
            say(&*sandbox, "touch go").await;
            assert_eq!(chunks.recv().await, Some(Chunk::Stdout(b"3000000\n".to_vec())));
        };
        let exec = script("while [ ! -e go ]; do sleep 0.05; done; echo $(wc -c)");
        let (output, (), ()) = tokio::join!(sandbox.exec_streaming(exec, &mut theirs, sender), give, watch);
        assert_eq!(output.unwrap().exit, Exit::Code(0));
    }

    async fn input_after_the_end_harms_nobody(world) {
        let sandbox = world.sandbox().await;
        let (sender, _chunks) = mpsc::channel(4);
        let noise = vec![b'x'; 1 << 20];
        let output = sandbox.exec_streaming(script("read x; exit 4"), &mut noise.as_slice(), sender).await;
        assert_eq!(output.unwrap().exit, Exit::Code(4));
        assert_eq!(say(&*sandbox, "echo alive").await, "alive");
    }
}
