//! Folders as tar streams, listings, snapshots.

use std::{
    io,
    path::PathBuf,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use sandbox::{Entry, EntryKind, ReadLimits, Sandbox, SandboxError};
use tokio::io::AsyncWrite;

use super::{cases, is_there, say};

const LIMITS: ReadLimits = ReadLimits {
    bytes_max: 64 << 20,
    files_max: 1000,
    timeout: Duration::from_secs(60),
};

async fn list(sandbox: &dyn Sandbox, folder: &str) -> Vec<Entry> {
    sandbox
        .list(folder.into(), LIMITS)
        .await
        .expect("a listing")
}

async fn download(
    sandbox: &dyn Sandbox,
    folder: &str,
    limits: ReadLimits,
) -> Result<Vec<u8>, SandboxError> {
    let mut tar = Vec::new();
    sandbox
        .download_tar(folder.into(), limits, &mut tar)
        .await
        .map(|()| tar)
}

fn refused<T>(result: Result<T, SandboxError>) -> String {
    match result {
        Err(SandboxError::File { reason, .. }) => reason,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it was not refused"),
    }
}

/// Takes a few bytes at a time, and lets others run in between.
#[derive(Default)]
struct Slow(Vec<u8>, bool);

impl AsyncWrite for Slow {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.1 = !self.1;
        if self.1 {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let count = bytes.len().min(1000);
        self.0.extend(&bytes[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

const TREE: &str = "mkdir -p a/b empty; echo hello > a/b/file; ln -s b/file a/link; \
    chmod 750 a/b; chmod 4711 a/b/file; head -c 300000 /dev/urandom > 'odd é name'";

cases! {
    async fn a_folder_comes_and_goes_unchanged(world) {
        let sandbox = world.sandbox().await;
        say(&*sandbox, TREE).await;
        let before = list(&*sandbox, "/workspace").await;
        let sum = say(&*sandbox, "md5sum < 'odd é name'").await;
        let tar = download(&*sandbox, "/workspace", LIMITS).await.unwrap();
        sandbox.upload_tar("/tmp/copy".into(), &mut tar.as_slice()).await.unwrap();
        let mut after = list(&*sandbox, "/tmp/copy").await;
        // Folders were touched when they were filled.
        for (one, two) in after.iter_mut().zip(&before) {
            if two.kind != EntryKind::File { one.modified_s = two.modified_s; }
        }
        assert_eq!(after, before);
        assert_eq!(say(&*sandbox, "cat /tmp/copy/a/link; md5sum < '/tmp/copy/odd é name'").await, format!("hello\n{sum}"));
    }

    async fn other_programs_read_the_stream(world) {
        let sandbox = world.sandbox().await;
        say(&*sandbox, TREE).await;
        let tar = download(&*sandbox, "/workspace", LIMITS).await.unwrap();
        let mut archive = tar::Archive::new(tar.as_slice());
        let names: Vec<_> = archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().into_owned()).collect();
        let names: Vec<_> = names.iter().map(|n| n.to_string_lossy().trim_end_matches('/').to_owned()).collect();
        assert_eq!(names, ["a", "empty", "odd é name", "a/b", "a/link", "a/b/file"]);
    }

    async fn a_stream_made_elsewhere_is_taken(world) {
        let sandbox = world.sandbox().await;
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_ustar();
        header.set_size(5);
        header.set_mode(0o751);
        header.set_uid(0);
        builder.append_data(&mut header, "x/y/z", &b"12345"[..]).unwrap();
        let tar = builder.into_inner().unwrap();
        sandbox.upload_tar("/workspace/new".into(), &mut tar.as_slice()).await.unwrap();
        assert_eq!(say(&*sandbox, "cat new/x/y/z; stat -c %a-%u new/x/y/z").await, "12345751-1000");
    }

    async fn links_out_of_the_folder_do_not_come_out(world) {
        let sandbox = world.sandbox().await;
        say(&*sandbox, "mkdir d; ln -s /etc/passwd absolute; ln -s ../../etc/passwd d/up; ln -s ../x d/inside; mkfifo fifo").await;
        let tar = download(&*sandbox, "/workspace", LIMITS).await.unwrap();
        sandbox.upload_tar("/tmp/copy".into(), &mut tar.as_slice()).await.unwrap();
        let kept: Vec<_> = list(&*sandbox, "/tmp/copy").await.into_iter().map(|e| e.path).collect();
        assert_eq!(kept, ["d", "d/inside"].map(PathBuf::from));
    }

    async fn limits_of_bytes_and_files(world) {
        let sandbox = world.sandbox().await;
        say(&*sandbox, "for i in 1 2 3 4 5; do head -c 1000 /dev/zero > $i; done").await;
        let limits = ReadLimits { bytes_max: 4999, ..LIMITS };
        let reason = refused(download(&*sandbox, "/workspace", limits).await);
        assert!(reason.contains("more than 4999 bytes"), "{reason}");
        let limits = ReadLimits { files_max: 4, ..LIMITS };
        let reason = refused(download(&*sandbox, "/workspace", limits).await);
        assert!(reason.contains("more than 4 entries"), "{reason}");
        refused(sandbox.list("/workspace".into(), limits).await);
        let limits = ReadLimits { files_max: 5, bytes_max: 5000, ..LIMITS };
        assert!(download(&*sandbox, "/workspace", limits).await.is_ok());
    }

    async fn a_path_that_leaves_the_folder_is_refused(world) {
        let sandbox = world.sandbox().await;
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        header.set_mode(0o644);
        header.set_entry_type(tar::EntryType::Regular);
        let name = b"../escaped";
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.set_cksum();
        let mut builder = tar::Builder::new(Vec::new());
        builder.append(&header, &b"x"[..]).unwrap();
        let tar = builder.into_inner().unwrap();
        let reason = refused(sandbox.upload_tar("/workspace/d".into(), &mut tar.as_slice()).await);
        assert!(reason.contains("leaves the folder"), "{reason}");
        assert!(!is_there(&*sandbox, "/workspace/escaped").await);
    }

    async fn what_is_no_tar_stream_is_refused(world) {
        let sandbox = world.sandbox().await;
        let nonsense = vec![b'x'; 5000];
        refused(sandbox.upload_tar("/workspace".into(), &mut nonsense.as_slice()).await);
        assert_eq!(say(&*sandbox, "ls").await, "");
    }

    async fn a_slow_taker_gets_everything(world) {
        let sandbox = world.sandbox().await;
        say(&*sandbox, "head -c 3000000 /dev/urandom > noise").await;
        let mut slow = Slow::default();
        sandbox.download_tar("/workspace".into(), LIMITS, &mut slow).await.unwrap();
        let all = download(&*sandbox, "/workspace", LIMITS).await.unwrap();
        assert!(slow.0 == all && all.len() > 3_000_000);
    }

    async fn a_listing_says_what_is_there(world) {
        let sandbox = world.sandbox().await;
        say(&*sandbox, "umask 022; mkdir d; echo 12345 > d/f; ln -s f d/l; mkfifo p; chmod 640 d/f; touch -d @1700000000 d/f").await;
        let seen: Vec<_> = list(&*sandbox, "/workspace").await
            .into_iter()
            .map(|e| (e.path.display().to_string(), e.kind, e.bytes, e.mode))
            .collect();
        let modes = |i: usize| seen[i].3;
        assert_eq!(seen, [
            ("d".to_owned(), EntryKind::Folder, 0, 0o755),
            ("p".to_owned(), EntryKind::Other, 0, 0o644),
            ("d/f".to_owned(), EntryKind::File, 6, 0o640),
            ("d/l".to_owned(), EntryKind::Link, 0, modes(3)),
        ]);
        assert_eq!(list(&*sandbox, "/workspace").await[2].modified_s, 1_700_000_000);
    }

    async fn what_is_absent_cannot_be_read(world) {
        let sandbox = world.sandbox().await;
        let reason = refused(sandbox.list("/absent".into(), LIMITS).await);
        assert!(reason.contains("No such file"), "{reason}");
        let reason = refused(download(&*sandbox, "/absent", LIMITS).await);
        assert!(reason.contains("No such file"), "{reason}");
    }

    async fn a_snapshot_goes_on_in_another_sandbox(world) {
        let one = world.sandbox().await;
        say(&*one, "echo work > a; mkdir d; echo home > ~/h; echo tmp > /tmp/t; ln -s a l").await;
        let snapshot = one.snapshot(LIMITS).await.unwrap();
        one.destroy().await;
        let two = world.sandbox().await;
        two.restore(&snapshot).await.unwrap();
        assert_eq!(say(&*two, "cat l ~/h /tmp/t; ls").await, "work\nhome\ntmp\na\nd\nl");
        say(&*two, "echo more >> a && rm -r d && touch ~/new /tmp/new").await;
    }
}
