//! What every kind promises.

use std::{os::unix::fs::PermissionsExt, sync::Arc};

use sandbox::{Provider, Spec};

use crate::{
    suite::{World, rootfs, run_all, say},
    support::provider,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite_of_all_kinds() {
    let provider = provider().await;
    let memory_counted = provider.capabilities().memory.starts_with("cgroup");
    let world = World {
        memory_counted,
        users: provider.capabilities().users > 1,
        ..World::new(Arc::new(provider))
    };
    run_all(&world, 6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite_of_all_kinds_on_a_root_file_system() {
    if !rootfs::can_be_made() {
        println!("skipped: busybox is not installed (scripts/setup.sh test does it)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    tar::Archive::new(rootfs::rootfs().as_slice())
        .unpack(folder.path())
        .unwrap();
    // Sandboxes made by root run as nobody, who must be able to read it.
    let read = |path: &str, mode| {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(folder.path().join(path), mode).unwrap();
    };
    read("", 0o755);
    read("image/folder/file", 0o644);
    let provider = provider().await;
    let memory_counted = provider.capabilities().memory.starts_with("cgroup");
    // What the image has in the workspace can be written, and the image stays as it is.
    let sandbox = provider
        .create(Spec {
            image: Some(folder.path().display().to_string()),
            workspace: "/image/folder".into(),
            ..Spec::default()
        })
        .await
        .unwrap();
    let text = "cat file; echo more >> file; rm file; readlink /proc/self/exe";
    assert_eq!(say(&*sandbox, text).await, "from the image/bin/busybox");
    drop(sandbox);
    let kept = std::fs::read(folder.path().join("image/folder/file")).unwrap();
    assert_eq!(kept, b"from the image");
    let world = World {
        image: Some(folder.path().display().to_string()),
        memory_counted,
        users: provider.capabilities().users > 1,
        accounts: true,
        ..World::new(Arc::new(provider))
    };
    run_all(&world, 6).await;
}
