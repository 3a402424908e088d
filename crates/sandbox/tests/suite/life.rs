//! From birth to death.

use std::time::Duration;

use futures::future::join_all;
use sandbox::SandboxError;

use super::{cases, run, say, script};

cases! {
    async fn ten_at_once(world) {
        let all = (0..10).map(|i| async move {
            let sandbox = world.sandbox().await;
            let text = say(&*sandbox, &format!("echo {i} > own; cat own")).await;
            sandbox.destroy().await;
            text
        });
        let texts = join_all(all).await;
        assert!(texts.iter().enumerate().all(|(i, t)| *t == i.to_string()), "{texts:?}");
    }

    async fn a_name_can_be_used_again(world) {
        let mut spec = world.spec();
        spec.name = "again".to_owned();
        for _ in 0..2 {
            let sandbox = world.make(spec.clone()).await;
            assert_eq!(say(&*sandbox, "ls -A").await, "", "nothing is left of the one before");
            say(&*sandbox, "touch left").await;
            sandbox.destroy().await;
        }
    }

    async fn two_may_have_the_same_name(world) {
        let mut spec = world.spec();
        spec.name = "twin".to_owned();
        let (one, two) = tokio::join!(world.make(spec.clone()), world.make(spec));
        say(&*one, "touch mine").await;
        assert_eq!(say(&*two, "ls").await, "");
    }

    async fn dropping_create_leaves_the_provider_usable(world) {
        for millis in [0, 1, 5, 20, 80] {
            let create = world.provider.create(world.spec());
            drop(tokio::time::timeout(Duration::from_millis(millis), create).await);
        }
        assert_eq!(say(&*world.sandbox().await, "echo alive").await, "alive");
    }

    async fn destroying_ends_what_runs(world) {
        let sandbox = world.sandbox().await;
        run(&*sandbox, "setsid sleep 1000 > /dev/null 2>&1 & trap '' TERM HUP INT; sleep 1000 > /dev/null 2>&1 &").await;
        sandbox.destroy().await;
    }

    async fn an_operation_on_a_dead_sandbox_says_that_it_is_gone(world) {
        let mut spec = world.spec();
        spec.limits.deadline_s = 2;
        let sandbox = world.make(spec).await;
        let result = sandbox.exec(script("sleep 60")).await;
        assert!(matches!(result, Err(SandboxError::Gone { .. })), "{result:?}");
        let file = super::files::file("/workspace/x", 0o644, b"x");
        let result = sandbox.upload(vec![file]).await;
        assert!(matches!(result, Err(SandboxError::Gone { .. })), "{result:?}");
        let result = sandbox.upload_tar("/workspace".into(), &mut &b""[..]).await;
        assert!(matches!(result, Err(SandboxError::Gone { .. })), "{result:?}");
    }

    async fn an_image_that_is_not_there_is_refused(world) {
        let mut spec = world.spec();
        spec.image = Some("espalier-no-such-image:never".to_owned());
        match world.try_make(spec).await {
            Err(SandboxError::Refused { cause: sandbox::RefusalCause::Image, hint, .. }) => assert!(!hint.is_empty()),
            Err(SandboxError::Unsupported { what, .. }) => assert!(what.contains("image"), "{what}"),
            other => panic!("{other:?}"),
        }
    }

    async fn many_operations_at_the_same_time(world) {
        let sandbox = world.sandbox().await;
        let all = (0..12).map(|i| {
            let sandbox = &*sandbox;
            async move {
                let path = format!("/workspace/{i}/f");
                let content = vec![i as u8; 100_000];
                sandbox.upload(vec![super::files::file(&path, 0o644, &content)]).await.unwrap();
                let text = say(sandbox, &format!("wc -c < {i}/f | tr -d ' '")).await;
                let back = sandbox.download(path.into(), 1 << 20).await.unwrap();
                assert!(back[0].content == content);
                let listed = sandbox.list(format!("/workspace/{i}").into(), Default::default()).await;
                (text, listed.unwrap().len())
            }
        });
        let all = join_all(all).await;
        assert!(all.iter().all(|(text, count)| text == "100000" && *count == 1), "{all:?}");
    }
}
