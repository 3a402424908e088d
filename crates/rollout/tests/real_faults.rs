//! Real processes, sandboxes and a real gateway, and what becomes of a rollout when one of them
//! misbehaves.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

mod real;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use engine::{EngineError, Hint, scripted::Script};
use real::{Loop, Teacher, jobs, line, shell};
use record::{Disposition, Message};
use rollout::{Event, Job};
use task::{Split, Task, chores};
use tokio_util::sync::CancellationToken;

/// The teacher, but the engine breaks for harnesses named so.
#[derive(Debug)]
struct Breaking(Teacher);

impl Script for Breaking {
    fn reply(&self, hint: &Hint) -> Result<Message, EngineError> {
        let harness = hint.rollout.as_ref().map(|spec| spec.harness.as_str());
        let made = task::teacher::steps_made(&hint.conversation);
        match (harness, made) {
            (Some("engine-gone"), _) | (Some("engine-gone-later"), 1..) => {
                Err(EngineError::Gone("weights on fire".into()))
            }
            (Some("too-long"), 1..) => Err(EngineError::TooLong {
                prompt_tokens: 10,
                context_tokens_max: 9,
            }),
            _ => self.0.reply(hint),
        }
    }
}

fn job(tasks: &[Task], name: &str, script: &str, limits: &str) -> Job {
    let more = format!("[limits]\n{limits}\n[habits.exit_truncates]\n77 = \"money\"");
    jobs(tasks, &shell(name, script, &more), 1).remove(0)
}

/// A chore that needs more than one step, so that things can break in between.
fn long_chore() -> Vec<Task> {
    let tasks = chores::generate(Split::Train, 0, 32);
    let task = tasks
        .into_iter()
        .find(|task| task::teacher::reference(task).unwrap().len() >= 3);
    vec![task.unwrap()]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_fault_has_its_name() {
    let tasks = long_chore();
    let Some(world) = Loop::start(Breaking(Teacher::of(&tasks))).await else {
        return;
    };
    let mut bad_mount = job(&tasks, "no-mount", "REACT", "");
    let mut installed = (*bad_mount.installed).clone();
    installed.mounts.push(sandbox::Mount {
        source: "/no/such/folder".into(),
        target: "/opt/harness/x".into(),
    });
    bad_mount.installed = Arc::new(installed);
    let mut no_verifier = job(&tasks, "bad-verifier", "REACT", "");
    let mut task = (*no_verifier.task).clone();
    task.verifier.argv = vec!["bash".into(), "-c".into(), "echo excellent".into()];
    task.verifier.contract = task::Contract::LastLine;
    no_verifier.task = Arc::new(task);
    let jobs = vec![
        job(&tasks, "good", "REACT", ""),
        job(&tasks, "good-but-exit-9", "REACT; exit 9", ""),
        job(&tasks, "exit-77", "REACT; exit 77", ""),
        job(&tasks, "slow-at-the-end", "REACT; sleep 600", "run_s = 3"),
        job(&tasks, "too-long", "REACT", ""),
        job(
            &tasks,
            "no-calls",
            "echo cannot find the model >&2; exit 1",
            "",
        ),
        job(&tasks, "silent", "sleep 600", "startup_s = 1"),
        job(&tasks, "killed", "kill -9 $$", ""),
        job(&tasks, "engine-gone", "REACT", ""),
        job(&tasks, "engine-gone-later", "REACT", ""),
        bad_mount,
        no_verifier,
    ];
    let result = world
        .runner
        .run_batch(jobs, 6, CancellationToken::new(), |_| {})
        .await
        .unwrap();
    let mut ends = Vec::new();
    for rollout in result.ended() {
        println!("{}", line(rollout));
        let disposition = rollout.disposition.as_ref().unwrap();
        assert_eq!(rollout.verdict.is_some(), disposition.trains());
        ends.push(format!(
            "{}: {}{} {}",
            rollout.spec.harness,
            disposition.name(),
            match disposition {
                Disposition::Truncate { reason } => format!(" {reason}"),
                Disposition::Discard { fault, .. } => format!(" {fault:?}"),
                _ => String::new(),
            },
            rollout
                .verdict
                .as_ref()
                .map_or("without reward".to_owned(), |verdict| format!(
                    "reward {}",
                    verdict.reward
                )),
        ));
    }
    insta::assert_snapshot!(ends.join("\n"), @r##"
good: train reward 1
good-but-exit-9: train reward 1
exit-77: truncate money reward 1
slow-at-the-end: truncate harness_timeout reward 1
too-long: truncate context_overflow reward 0
no-calls: discard NoCalls without reward
silent: discard NoCalls without reward
killed: discard HarnessCrashed without reward
engine-gone: discard EngineFailed without reward
engine-gone-later: discard EngineFailed without reward
no-mount: discard SandboxStart without reward
bad-verifier: discard VerifierFailed without reward
"##);
    assert_eq!(
        result.superseded.len(),
        1,
        "the sandbox that could not be made was tried twice"
    );
    assert!(result.counts.conserved());
    let no_calls = result.rollouts[5].as_ref().unwrap();
    let Some(Disposition::Discard { reason, .. }) = &no_calls.disposition else {
        panic!("{no_calls:?}");
    };
    assert!(reason.contains("cannot find the model"), "{reason}");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limit_of_calls_truncates() {
    let tasks = long_chore();
    let Some(mut world) = Loop::start(Teacher::of(&tasks)).await else {
        return;
    };
    let mut settings = (*world.runner.settings).clone();
    settings.calls_max = 1;
    world.runner.settings = Arc::new(settings);
    let job = job(&tasks, "react-like", "REACT", "");
    let rollout = world.runner.run(&job, &CancellationToken::new()).await;
    assert_eq!(
        rollout.disposition,
        Some(Disposition::Truncate {
            reason: "calls_limit".into()
        }),
        "{}",
        line(&rollout)
    );
    assert_eq!((rollout.calls, rollout.verdict.unwrap().reward), (1, 0.0));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelling_ends_running_harnesses_and_the_batch_can_be_resumed() {
    let tasks = long_chore();
    let Some(world) = Loop::start(Teacher::of(&tasks)).await else {
        return;
    };
    let quick = job(&tasks, "quick", "REACT", "");
    let endless = job(&tasks, "endless", "REACT; sleep 600", "");
    let never = job(&tasks, "never", "REACT", "");
    let cancel = CancellationToken::new();
    // Cancelled from the progress display, once the first has ended and the second has begun.
    let seen = std::sync::Mutex::new((false, false));
    let progress = |event: &Event| {
        let mut seen = seen.lock().unwrap();
        match event {
            Event::Finished { .. } => seen.0 = true,
            Event::Started { job: 1, .. } => seen.1 = true,
            Event::Started { .. } => {}
        }
        if seen.0 && seen.1 {
            cancel.cancel();
        }
    };
    let run = world.runner.run_batch(
        vec![quick.clone(), endless.clone(), never.clone()],
        1,
        cancel.clone(),
        progress,
    );
    let first = tokio::time::timeout(Duration::from_secs(60), run)
        .await
        .unwrap()
        .unwrap();
    let names: Vec<_> = first
        .rollouts
        .iter()
        .map(|rollout| Some(rollout.as_ref()?.disposition.as_ref()?.name()))
        .collect();
    assert_eq!(names, [Some("train"), Some("discard"), None]);

    // The second job now has a harness that ends.
    let mut ending = endless;
    ending.installed = quick.installed.clone();
    let second = world
        .runner
        .run_batch(
            vec![quick, ending, never],
            2,
            CancellationToken::new(),
            |_| {},
        )
        .await
        .unwrap();
    let ids: BTreeMap<_, _> = second
        .ended()
        .map(|rollout| (rollout.spec.id.to_string(), rollout.disposition.clone()))
        .collect();
    println!("{ids:?}");
    assert!(
        ids.values().all(|end| *end == Some(Disposition::Train)),
        "{ids:?}"
    );
    assert_eq!(second.counts.reused, 1);
    assert!(
        ids.keys().any(|id| id.ends_with("endless-k00.r1")),
        "{ids:?}"
    );
    world.close().await;
}
