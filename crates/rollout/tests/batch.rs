//! Many rollouts: order, bounds, cancellation, crash and resumption.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

mod world;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, atomic::Ordering::SeqCst},
    time::Duration,
};

use proptest::prelude::*;
use record::{Disposition, Fault, Rollout};
use rollout::{BatchError, Event};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use world::{Does, Ends, GOOD, Plan, Says, World, jobs, plans, runner, simulate};

/// Attempts of the ledger by job, in order: `(ended, superseded)`.
fn attempts(world: &World) -> BTreeMap<String, Vec<Rollout>> {
    let mut jobs: BTreeMap<String, Vec<(u32, Rollout)>> = BTreeMap::new();
    for (id, rollout) in world.ledger() {
        let (job, number) = match id.as_str().rsplit_once(".r") {
            Some((job, number)) => (job.to_owned(), number.parse().unwrap()),
            None => (id.to_string(), 0),
        };
        jobs.entry(job).or_default().push((number, rollout));
    }
    jobs.into_iter()
        .map(|(job, mut list)| {
            list.sort_by_key(|(number, _)| *number);
            for (expected, (number, _)) in list.iter().enumerate() {
                assert_eq!(u32::try_from(expected).unwrap(), *number, "{job} has a gap");
            }
            (job, list.into_iter().map(|(_, rollout)| rollout).collect())
        })
        .collect()
}

fn superseded(rollout: &Rollout) -> bool {
    matches!(
        rollout.disposition,
        Some(
            Disposition::Retry { .. }
                | Disposition::Discard {
                    fault: Fault::Interrupted,
                    ..
                }
        )
    )
}

#[test]
fn results_come_in_the_order_of_the_jobs_and_the_bound_holds() {
    let world = Arc::new(World::default());
    let jobs = jobs(12);
    for (index, job) in jobs.iter().enumerate() {
        let step_ms = 1000 - 80 * u64::try_from(index).unwrap();
        world.plan(job.spec.id.as_str(), Plan { step_ms, ..GOOD });
    }
    let events = Mutex::new(Vec::new());
    let result = simulate(runner(&world).run_batch(
        jobs.clone(),
        3,
        CancellationToken::new(),
        |event: &Event| events.lock().unwrap().push(event.clone()),
    ))
    .unwrap();
    let names: Vec<_> = result.ended().map(|rollout| &rollout.spec.id).collect();
    let expected: Vec<_> = jobs.iter().map(|job| &job.spec.id).collect();
    assert_eq!(names, expected);
    assert_eq!(world.sandboxes_max.load(SeqCst), 3);
    assert!(result.counts.conserved());
    assert_eq!(result.counts.dispositions["train"], 12);
    let events = events.into_inner().unwrap();
    assert_eq!(events.len(), 24);
    let finished = |event: &&Event| {
        matches!(
            event,
            Event::Finished {
                reward: Some(_),
                calls: 2,
                ..
            }
        )
    };
    assert_eq!(events.iter().filter(finished).count(), 12);
}

#[test]
fn two_jobs_of_one_name_are_refused_before_anything_starts() {
    let world = Arc::new(World::default());
    let mut jobs = jobs(2);
    jobs[1].spec.id = jobs[0].spec.id.clone();
    let result = simulate(runner(&world).run_batch(jobs, 2, CancellationToken::new(), |_| {}));
    assert!(matches!(result, Err(BatchError::DuplicateId { .. })));
    assert_eq!(world.creations.load(SeqCst), 0);
}

#[test]
fn a_finished_batch_is_read_from_the_ledger_and_nothing_runs() {
    let world = Arc::new(World::default());
    let jobs = jobs(4);
    // One of them ends as a fault: that is a result too.
    world.plan(
        jobs[1].spec.id.as_str(),
        Plan {
            ends: Ends::Signal,
            ..GOOD
        },
    );
    let run = || {
        simulate(runner(&world).run_batch(jobs.clone(), 2, CancellationToken::new(), |_| {}))
            .unwrap()
    };
    let first = run();
    let creations = world.creations.load(SeqCst);
    let second = run();
    assert_eq!(first.rollouts, second.rollouts);
    assert_eq!(world.creations.load(SeqCst), creations);
    assert_eq!((second.counts.reused, second.counts.started), (4, 0));
}

#[test]
fn cancelling_stops_what_runs_and_starts_no_more() {
    let world = Arc::new(World::default());
    let jobs = jobs(6);
    for job in &jobs[2..] {
        world.plan(
            job.spec.id.as_str(),
            Plan {
                ends: Ends::Limit,
                ..GOOD
            },
        );
    }
    let result = simulate(async {
        let cancel = CancellationToken::new();
        let runner = runner(&world);
        let batch = runner.run_batch(jobs.clone(), 2, cancel.clone(), |_| {});
        let stop = async {
            // Virtual time: two are done, two wait for their limit, two have not begun.
            sleep(Duration::from_secs(5)).await;
            assert_eq!(world.alive(), 2);
            cancel.cancel();
        };
        let started = tokio::time::Instant::now();
        let (result, ()) = tokio::join!(batch, stop);
        assert!(
            started.elapsed() < Duration::from_secs(6),
            "it did not stop quickly"
        );
        result.unwrap()
    });
    let names: Vec<Option<&str>> = result
        .rollouts
        .iter()
        .map(|rollout| Some(rollout.as_ref()?.disposition.as_ref()?.name()))
        .collect();
    assert_eq!(
        names,
        [
            Some("train"),
            Some("train"),
            Some("discard"),
            Some("discard"),
            None,
            None
        ]
    );
    assert_eq!(
        result.counts.faults,
        BTreeMap::from([(Fault::Interrupted, 2)])
    );
    assert!(result.cancelled && result.counts.conserved());
    assert_eq!((world.alive(), world.open_sessions()), (0, 0));
    assert!(
        world
            .ledger()
            .values()
            .all(|rollout| rollout.disposition.is_some())
    );
}

/// Pairs of jobs, each a group of its own task whose rewards differ.
fn pairs(world: &World, count: u32) -> Vec<rollout::Job> {
    let mut jobs = jobs(2 * count);
    for (index, job) in jobs.iter_mut().enumerate() {
        let pair = index / 2;
        job.spec.group = record::GroupId::new(format!("g{pair}")).unwrap();
        job.spec.task = record::TaskId::new(format!("t{pair}")).unwrap();
        let says = Says::Reward((index % 2) as f64);
        world.plan(job.spec.id.as_str(), Plan { says, ..GOOD });
    }
    jobs
}

#[test]
fn each_stage_has_its_own_places() {
    let world = Arc::new(World::default());
    let mut runner = runner(&world);
    let mut settings = (*runner.settings).clone();
    settings.pools.ready = 3;
    settings.pools.verify = 1;
    runner.settings = Arc::new(settings);
    let jobs = jobs(12);
    let batch = runner.run_batch(jobs, 2, CancellationToken::new(), |_| {});
    let result = simulate(batch).unwrap();
    assert_eq!(result.counts.dispositions["train"], 12);
    assert_eq!(
        world.sandboxes_max.load(SeqCst),
        5,
        "two run, three stand ready"
    );
    assert_eq!((world.running.max(), world.verifying.max()), (2, 1));
    assert_eq!((world.alive(), world.open_sessions()), (0, 0));
}

#[test]
fn nobody_waits_for_a_place_for_ever() {
    let world = Arc::new(World::default());
    let mut runner = runner(&world);
    let mut settings = (*runner.settings).clone();
    settings.pools.ready = 1;
    settings.stages.wait_s = 5;
    settings.sandbox_retries = 0;
    runner.settings = Arc::new(settings);
    let jobs = jobs(2);
    let slow = Plan {
        ends: Ends::Limit,
        ..GOOD
    };
    world.plan(jobs[0].spec.id.as_str(), slow);
    let batch = runner.run_batch(jobs, 1, CancellationToken::new(), |_| {});
    let result = simulate(batch).unwrap();
    let ends: Vec<_> = result
        .ended()
        .map(|r| r.disposition.clone().unwrap())
        .collect();
    assert_eq!(ends[0].name(), "truncate");
    let Disposition::Discard { fault, reason } = &ends[1] else {
        panic!("{ends:?}");
    };
    assert_eq!(*fault, Fault::SandboxStart);
    assert!(reason.contains("stages.wait_s"), "{reason}");
    assert_eq!(world.alive(), 0);
}

#[test]
fn a_batch_that_has_enough_ends_and_a_resumed_one_runs_nothing() {
    let world = Arc::new(World::default());
    let jobs = pairs(&world, 6);
    let run = || {
        let runner = runner(&world);
        let cancel = CancellationToken::new();
        let batch = runner.run_until(jobs.clone(), 3, Some(2), cancel, |_| {});
        simulate(batch).unwrap()
    };
    let first = run();
    assert!(first.enough && !first.cancelled && first.counts.conserved());
    let whole: Vec<bool> = first
        .rollouts
        .chunks(2)
        .map(|pair| {
            assert_eq!(pair[0].is_some(), pair[1].is_some(), "half a group");
            pair[0].is_some()
        })
        .collect();
    assert!(whole[0] && whole[1] && !whole[5], "{whole:?}");
    assert!(first.ended().all(|rollout| rollout.verdict.is_some()));
    assert_eq!((world.alive(), world.open_sessions()), (0, 0));
    let creations = world.creations.load(SeqCst);
    let second = run();
    assert_eq!(world.creations.load(SeqCst), creations);
    assert_eq!(second.rollouts, first.rollouts);
    // Whoever wants more gets it, and what was interrupted is run again.
    let runner = runner(&world);
    let all = runner.run_until(jobs.clone(), 3, None, CancellationToken::new(), |_| {});
    let all = simulate(all).unwrap();
    assert!(!all.enough && all.rollouts.iter().all(Option::is_some));
    assert!(all.ended().all(|rollout| rollout.verdict.is_some()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Batches that are cancelled or killed at any moment, any number of times, and then resumed:
    /// every job ends with exactly one result, none is lost, none is run again after it had one.
    #[test]
    fn resuming_loses_none_and_repeats_none(
        faults in proptest::collection::vec(plans(), 8),
        concurrency in 1_usize..5,
        // Milliseconds after which a batch ends, and whether it is killed or cancelled.
        ends in proptest::collection::vec((0_u64..4000, any::<bool>()), 0..4),
    ) {
        let world = Arc::new(World::default());
        let jobs = jobs(8);
        for (job, plan) in jobs.iter().zip(&faults) {
            // A full disk is not part of this test: without a record there is nothing to resume.
            let plan = Plan { record_start: Does::Work, record_end: Does::Work, ..*plan };
            world.plan(job.spec.id.as_str(), plan);
        }
        let mut results: BTreeMap<String, Rollout> = BTreeMap::new();
        let mut keep = |rollouts: &[Option<Rollout>]| {
            for rollout in rollouts.iter().flatten().filter(|rollout| !superseded(rollout)) {
                let id = rollout.spec.id.to_string();
                let job = id.rsplit_once(".r").map_or(id.clone(), |(job, _)| job.to_owned());
                let known = results.entry(job).or_insert_with(|| rollout.clone());
                assert!(known.spec.id == rollout.spec.id, "{id} has two results");
            }
        };
        for (after_ms, killed) in ends {
            let cancel = CancellationToken::new();
            let runner = runner(&world);
            let batch = runner.run_batch(jobs.clone(), concurrency, cancel.clone(), |_| {});
            let after = Duration::from_millis(after_ms);
            let result = simulate(async {
                if killed {
                    // Dropping the future is all that happens.
                    timeout(after, batch).await.ok()
                } else {
                    let stop = async { sleep(after).await; cancel.cancel(); };
                    let (result, ()) = tokio::join!(batch, stop);
                    Some(result)
                }
            });
            prop_assert_eq!((world.alive(), world.open_sessions()), (0, 0));
            if let Some(result) = result {
                let result = result.unwrap();
                prop_assert!(result.counts.conserved(), "{:?}", result.counts);
                keep(&result.rollouts);
            }
        }
        let last = simulate(runner(&world).run_batch(jobs.clone(), concurrency, CancellationToken::new(), |_| {})).unwrap();
        prop_assert!(last.rollouts.iter().all(Option::is_some));
        prop_assert!(last.counts.conserved());
        keep(&last.rollouts);
        prop_assert_eq!(results.len(), jobs.len());
        for (job, list) in attempts(&world) {
            let (end, before) = list.split_last().unwrap();
            prop_assert!(before.iter().all(superseded), "{}: {:?}", job, before);
            prop_assert!(!superseded(end), "{}", job);
            prop_assert_eq!(end.verdict.is_some(), end.disposition.as_ref().unwrap().trains());
        }
        prop_assert_eq!((world.alive(), world.open_sessions()), (0, 0));
    }
}
