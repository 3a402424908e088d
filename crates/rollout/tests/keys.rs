//! Whoever got hold of another rollout's key gains nothing: while that rollout runs its calls are its
//! own budget's, and when it has ended the key opens nothing.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

mod real;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use harness::Installed;
use real::{Loop, Teacher, jobs, line, shell};
use record::{Disposition, Fault, PolicyVersion, RolloutId};
use rollout::{Capture, Captured, OpenSession, Session};
use task::{Split, chores};
use tokio_util::sync::CancellationToken;

/// The gateway, and somebody who writes every key down.
#[derive(Debug)]
struct Spy {
    inner: Arc<dyn Capture>,
    keys: Mutex<BTreeMap<RolloutId, String>>,
}

#[async_trait]
impl Capture for Spy {
    async fn open(&self, open: OpenSession) -> Result<Session, String> {
        let id = open.spec.id.clone();
        let session = self.inner.open(open).await?;
        self.keys.lock().unwrap().insert(id, session.key.clone());
        Ok(session)
    }

    fn status(&self, id: &RolloutId) -> Option<Captured> {
        self.inner.status(id)
    }

    async fn settle(
        &self,
        id: &RolloutId,
        quiet: Duration,
        limit: Duration,
    ) -> Result<Captured, String> {
        self.inner.settle(id, quiet, limit).await
    }

    fn close(&self, id: &RolloutId) {
        self.inner.close(id);
    }

    fn policy(&self) -> PolicyVersion {
        self.inner.policy()
    }
}

/// `react` with this key, or with its own.
fn harness(name: &str, key: Option<&str>) -> Arc<Installed> {
    // With a stranger's key both ways of saying whose call it is are tried.
    let tries = match key {
        None => r#"react() { /run/espalier/guest react --base-url "$1" --api-key "$2" --model m -- "$TASK"; }; react "$BASE/v1" "$KEY""#.to_owned(),
        Some(key) => format!(
            r#"react() {{ /run/espalier/guest react --base-url "$1" --api-key "$2" --model m -- "$TASK"; }}; react http://127.0.0.1:8080/v1 {key}; react http://127.0.0.1:8080/r/{key}/v1 {key}; react http://127.0.0.1:8080/v1 ""; react http://127.0.0.1:8080/v1 {}"#,
            "0".repeat(32)
        ),
    };
    shell(name, &tries, "")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_a_rollout_that_ended_opens_nothing() {
    let tasks = chores::generate(Split::Train, 0, 1);
    let Some(mut world) = Loop::start(Teacher::of(&tasks)).await else {
        return;
    };
    let spy = Arc::new(Spy {
        inner: Arc::clone(&world.runner.capture),
        keys: Mutex::default(),
    });
    let capture: Arc<dyn Capture> = spy.clone();
    world.runner.capture = capture;
    let never = CancellationToken::new();
    let honest = jobs(&tasks, &harness("honest", None), 1).remove(0);
    let first = world.runner.run(&honest, &never).await;
    println!("{}", line(&first));
    assert_eq!(first.disposition, Some(Disposition::Train));
    let calls = world.ledger.calls(&first.spec.id).unwrap();
    let key = spy.keys.lock().unwrap()[&first.spec.id].clone();

    let thief = jobs(&tasks, &harness("thief", Some(&key)), 1).remove(0);
    let second = world.runner.run(&thief, &never).await;
    println!("{}", line(&second));
    let Some(Disposition::Discard { fault, .. }) = &second.disposition else {
        panic!("{:?}", second.disposition);
    };
    assert_eq!((*fault, &second.verdict), (Fault::NoCalls, &None));
    assert_eq!(
        world.ledger.calls(&first.spec.id).unwrap(),
        calls,
        "none was added"
    );
    assert!(world.ledger.calls(&second.spec.id).unwrap().is_empty());
    let keys: Vec<String> = spy.keys.lock().unwrap().values().cloned().collect();
    assert!(keys.len() == 2 && keys[0] != keys[1]);
    drop(spy);
    world.close().await;
}
