//! Real tasks, a real harness, a scripted engine: every rollout ends with a verdict of the task's
//! own verifier or with a typed disposition.
//!
//! `cargo nextest run --release -p rollout --test clawgym --run-ignored all --no-capture`
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

mod real;

use std::collections::BTreeMap;

use real::{Loop, Teacher, installed, jobs, line, workspace_root};
use task::Step;
use tokio_util::sync::CancellationToken;

const PARTLY_DONE: &str = "task_0123";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "half a minute of real harness runs"]
async fn sixteen_tasks_through_pi() {
    let folder = workspace_root().join("../shared/tasks/clawgym");
    if !folder.is_dir() {
        println!("skipped: no {}", folder.display());
        return;
    }
    let tasks = task::load_dir(&folder).unwrap();
    let Some(installed) = installed("pi").await else {
        return;
    };
    // Not a solution: looks around, leaves a file, runs something that fails, and says so.
    let steps = vec![
        Step::Bash("ls -R . | head -n 50".into()),
        Step::Write(
            "notes/findings.md".into(),
            "# Findings\n\nNone yet.\n".into(),
        ),
        Step::Bash("cat no-such-file".into()),
        Step::Say("I looked around and wrote notes/findings.md.".into()),
    ];
    let mut teacher = Teacher {
        steps: tasks
            .iter()
            .map(|task| (task.id.to_string(), steps.clone()))
            .collect::<BTreeMap<_, _>>(),
    };
    // Parts of one task are done, so that its verifier has something to reward.
    let mut partly = steps.clone();
    partly[1] = Step::Bash(
        "for mode in Scout Closer Ops; do \
         folder=output/workspace/skills/$(echo $mode | tr A-Z a-z)-mode; \
         mkdir -p $folder; echo \"# $mode Mode\" > $folder/SKILL.md; done"
            .into(),
    );
    teacher.steps.insert(PARTLY_DONE.into(), partly);
    let Some(world) = Loop::start(teacher).await else {
        return;
    };
    let result = world
        .runner
        .run_batch(
            jobs(&tasks, &installed, 1),
            2,
            CancellationToken::new(),
            |_| {},
        )
        .await
        .unwrap();
    for rollout in result.ended() {
        println!("{}", line(rollout));
        let evidence = rollout
            .verdict
            .as_ref()
            .map(|verdict| verdict.evidence.trim());
        println!(
            "    the verifier said: {:?}",
            evidence.and_then(|text| text.lines().last())
        );
    }
    println!("{:?} in {:.1} s", result.counts, result.seconds);
    assert!(result.counts.conserved());
    assert_eq!(result.ended().count(), tasks.len());
    for rollout in result.ended() {
        let disposition = rollout.disposition.as_ref().unwrap();
        assert_eq!(
            rollout.verdict.is_some(),
            disposition.trains(),
            "{}",
            line(rollout)
        );
        assert_eq!(rollout.calls, 4, "{}", line(rollout));
        let reward = rollout.verdict.as_ref().map(|verdict| verdict.reward);
        let partly = rollout.spec.task.as_str() == PARTLY_DONE;
        assert_eq!(reward > Some(0.0), partly, "{}", line(rollout));
    }
    world.close().await;
}
