//! How containers end, whoever dies.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use sandbox::{Provider, SandboxError, Spec};

use crate::{
    engines::{Engine, Kind},
    provider,
    suite::{run, say, script},
};

fn spec(image: &str) -> Spec {
    Spec {
        image: Some(image.to_owned()),
        ..Spec::default()
    }
}

async fn lifetime(kind: Kind) {
    let Some(engine) = Engine::start(kind) else {
        return;
    };
    let (provider, image) = provider(&engine.host, None).await;

    // An image's own files are in the workspace, and belong to the user.
    let mut own = spec(&image);
    own.workspace = "/image/folder".into();
    let sandbox = provider.create(own).await.unwrap();
    assert_eq!(
        say(&*sandbox, "cat file; stat -c %a-%u file; echo more >> file").await,
        "from the image640-1000"
    );

    // Somebody else removes the container.
    let id = engine.containers().pop().unwrap();
    let id = id.split('"').nth(1).unwrap().to_owned();
    let removal = async {
        let output = Command::new("curl")
            .args([
                "-s",
                "-X",
                "DELETE",
                "--unix-socket",
                engine.host.strip_prefix("unix://").unwrap(),
            ])
            .arg(format!("http://engine/v1.41/containers/{id}?force=1"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    let (result, ()) = tokio::join!(sandbox.exec(script("sleep 100")), removal);
    assert!(
        matches!(result, Err(SandboxError::Gone { .. })),
        "{result:?}"
    );
    drop(sandbox);

    // Dropped, not destroyed.
    let sandbox = provider.create(spec(&image)).await.unwrap();
    run(&*sandbox, "setsid sleep 1000 > /dev/null 2>&1 &").await;
    drop(sandbox);
    engine.assert_empty();

    // Creation is given up at any moment.
    for millis in [1, 30, 100, 200, 400] {
        let create = provider.create(spec(&image));
        drop(tokio::time::timeout(Duration::from_millis(millis), create).await);
    }
    provider.close().await;
    engine.assert_empty();

    // The orchestrator is killed in the middle of everything.
    for wait_ms in [300, 900, 2500] {
        let mut program = Command::new(crate::suite::hold_program())
            .arg("4")
            .env("ESPALIER_HOLD_DOCKER", &engine.host)
            .env("ESPALIER_HOLD_IMAGE", &image)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(wait_ms));
        program.kill().unwrap();
        program.wait().unwrap();
        // What runs ends by itself; what was never started is found by the next provider.
        // The engine may still be at work on what the dead asked for: hence more than one look.
        let begun = Instant::now();
        loop {
            let (next, _) = crate::provider(&engine.host, Some(image.clone())).await;
            next.close().await;
            let left = engine.containers();
            if left.is_empty() {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "{left:#?}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_left_on_dockerd() {
    lifetime(Kind::Docker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_left_on_podman() {
    lifetime(Kind::Podman).await;
}
