//! A storm of faults over whole rollouts: real harness processes in real sandboxes, a real gateway
//! and ledger, and from one seed: killed harnesses and guests, an engine that fails or hangs,
//! restarts of the gateway, killed verifiers, full disks, and `kill -9` of the orchestrator, which
//! is then resumed. Every rollout ends in exactly one disposition, the right one; no reward is
//! false; nothing is left.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

mod look;
mod orchestrator;
mod plan;
#[path = "../real/mod.rs"]
mod real;

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::{Instant, SystemTime},
};

use ledger::Ledger;
use orchestrator::{ORDERS, Orders, Report};
use record::{Disposition, Fault, Rollout};
use rustix::process::{Pid, Signal, kill_process};
use sandbox::{LocalConfig, LocalProvider, SandboxError};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the orchestrator that the other tests here start and kill"]
async fn orchestrate() {
    let Ok(orders) = std::env::var(ORDERS) else {
        println!("skipped: nobody gave orders");
        return;
    };
    let report = orchestrator::run(serde_json::from_str(&orders).unwrap()).await;
    println!("report {}", serde_json::to_string(&report).unwrap());
}

fn start(orders: &Orders) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["orchestrate", "--exact", "--ignored", "--nocapture"])
        .env(ORDERS, serde_json::to_string(orders).unwrap())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Kills a process in the middle of its work, and waits until nothing of it is left.
fn kill(what: &str, mut child: Child) {
    let pid = Pid::from_raw(child.id() as i32).unwrap();
    // Standing still it makes no children between the look and the kill.
    kill_process(pid, Signal::STOP).unwrap();
    let family = look::family(child.id());
    let wardens = look::children(&family, child.id());
    kill_process(pid, Signal::KILL).unwrap();
    child.wait().unwrap();
    look::until_gone(what, &family, &wardens);
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

struct Storm {
    rollouts: u32,
    faults_percent: u64,
    concurrency: usize,
    kills: u32,
    /// Gateway restarts in each life of the orchestrator.
    restarts: u32,
    /// Sandboxes that stand ready.
    warm: usize,
}

fn sandboxes_work() -> bool {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    match runtime.block_on(LocalProvider::start(LocalConfig::default())) {
        Ok(provider) => {
            runtime.block_on(provider.close());
            true
        }
        Err(error @ SandboxError::Unsupported { .. }) => {
            println!("skipped: {error}");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

fn seed() -> u64 {
    std::env::var("ESPALIER_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            now.unwrap().as_nanos() as u64
        })
}

impl Storm {
    fn rage(&self) {
        if !sandboxes_work() {
            return;
        }
        let seed = seed();
        println!("seed {seed} (ESPALIER_SEED={seed} repeats it)");
        let folder = tempfile::tempdir().unwrap();
        let mut state = seed ^ 0x0057_0412;
        let began = Instant::now();
        let mut report = None;
        for life in 0..=self.kills {
            // An equal part of the rollouts for each life, so that there is something to kill.
            let part = self.rollouts / (self.kills + 1);
            let mut at = |_| 1 + (plan::next(&mut state) % u64::from(part.max(2) - 1)) as u32;
            let kill_at = at(0);
            let restarts = (0..self.restarts).map(&mut at).collect();
            let orders = Orders {
                folder: folder.path().to_owned(),
                seed,
                rollouts: self.rollouts,
                faults_percent: self.faults_percent,
                concurrency: self.concurrency,
                restarts,
                warm: self.warm,
            };
            let mut child = start(&orders);
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let mut finished = 0;
            let mut family = None;
            for line in &mut lines {
                let line = line.unwrap();
                if let Some((_, text)) = line.split_once("report ") {
                    report = Some(serde_json::from_str::<Report>(text).unwrap());
                }
                finished += u32::from(line.contains("finished "));
                if finished > 0 && family.is_none() {
                    family = Some(look::family(child.id()));
                }
                if life < self.kills && finished >= kill_at {
                    break;
                }
            }
            let what = format!("seed {seed}, life {life}");
            if life < self.kills {
                assert!(finished >= kill_at, "{what}: it ended after {finished}");
                kill(&what, child);
                continue;
            }
            let family = family.unwrap_or_default();
            let wardens = look::children(&family, child.id());
            assert!(child.wait().unwrap().success(), "{what}");
            look::until_gone(&what, &family, &wardens);
        }
        let seconds = began.elapsed().as_secs_f64();
        let names: Vec<String> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .filter(|name| !["run", "restarts", "gateway.sock"].contains(&name.as_str()))
            .collect();
        assert!(names.is_empty(), "left behind: {names:?}");
        self.judge(seed, folder.path(), seconds, &report.unwrap());
    }

    /// Looks at the ledger as somebody who knows what happened.
    fn judge(&self, seed: u64, folder: &std::path::Path, seconds: f64, report: &Report) {
        let ledger = Ledger::open_read_only(&folder.join("run")).unwrap();
        let restarts: Vec<(u64, u64)> = std::fs::read_to_string(folder.join("restarts"))
            .unwrap_or_default()
            .lines()
            .filter_map(|line| line.split_once(' '))
            .map(|(begun, ended)| (begun.parse().unwrap(), ended.parse().unwrap()))
            .collect();
        let fates = plan::fates(seed, self.rollouts, self.faults_percent);
        let mut attempts: BTreeMap<usize, BTreeMap<u32, Rollout>> = BTreeMap::new();
        for rollout in ledger.rollouts(&[]).unwrap() {
            let id = rollout.spec.id.as_str();
            let number = id.rsplit_once(".r").map_or(0, |(_, n)| n.parse().unwrap());
            let job = attempts.entry(plan::index(id)).or_default();
            assert!(job.insert(number, rollout.clone()).is_none(), "{id} twice");
        }
        assert_eq!(
            attempts.len(),
            fates.len(),
            "seed {seed}: rollouts are missing"
        );
        let (mut wrong, mut interrupted) = (Vec::new(), 0);
        let mut ends: BTreeMap<String, u32> = BTreeMap::new();
        for (index, attempts) in &attempts {
            let numbers: Vec<u32> = attempts.keys().copied().collect();
            assert_eq!(numbers, (0..numbers.len() as u32).collect::<Vec<_>>());
            let (before, last) = attempts.last_key_value().unwrap();
            for (number, attempt) in attempts {
                assert!(
                    attempt.disposition.is_some(),
                    "seed {seed}: {index}.r{number} is open"
                );
                assert_eq!(
                    superseded(attempt),
                    number < before,
                    "{:?}",
                    attempt.disposition
                );
                assert!(number == before || attempt.verdict.is_none());
                let lost = rollout::Ending::of(attempt.disposition.as_ref().unwrap()).name();
                interrupted += u32::from(lost == "interrupted");
            }
            let fate = fates[*index];
            let (from, to) = (last.started_ms, last.finished_ms.unwrap());
            let at_a_restart = restarts
                .iter()
                .any(|(begun, ended)| from <= *ended && to >= *begun);
            if let Err(reason) = plan::check(fate, last, at_a_restart) {
                wrong.push(format!("{} ({fate:?}): {reason}", last.spec.id));
            }
            let end = rollout::Ending::of(last.disposition.as_ref().unwrap()).name();
            *ends.entry(format!("{fate:?}: {end}")).or_default() += 1;
        }
        println!("{ends:#?}");
        let all = attempts.values().flat_map(BTreeMap::values);
        let warm = all.filter(|rollout| rollout.lineage.warm).count();
        println!("{warm} attempts found their sandbox ready");
        assert_eq!(warm > 0, self.warm > 0, "seed {seed}");
        assert!(wrong.is_empty(), "seed {seed}: {wrong:#?}");
        assert!(
            self.kills == 0 || interrupted > 0,
            "seed {seed}: nothing was ever interrupted"
        );
        assert!(self.restarts == 0 || !restarts.is_empty());
        println!(
            "{} rollouts in {seconds:.1} s ({:.1} a second), {} kills with {interrupted} interrupted attempts, {} restarts",
            self.rollouts,
            f64::from(self.rollouts) / seconds,
            self.kills,
            restarts.len(),
        );
        let each = |ms: u64| ms as f64 / report.rollouts.max(1) as f64;
        println!(
            "the last life: {} attempts in {:.1} s ({:.1} a second); CPU each: orchestrator, gateway, engine script and ledger {:.1} ms, sandboxes with harness and verifier {:.1} ms",
            report.rollouts,
            report.seconds,
            report.rollouts as f64 / report.seconds,
            each(report.own_cpu_ms),
            each(report.children_cpu_ms),
        );
    }
}

#[test]
fn sixty_rollouts_in_a_storm_end_as_they_must() {
    Storm {
        rollouts: 60,
        faults_percent: 30,
        concurrency: 6,
        kills: 2,
        restarts: 1,
        warm: 0,
    }
    .rage();
}

#[test]
fn sixty_rollouts_in_a_storm_with_warm_sandboxes_end_as_they_must() {
    Storm {
        rollouts: 60,
        faults_percent: 30,
        concurrency: 6,
        kills: 2,
        restarts: 1,
        warm: 3,
    }
    .rage();
}

#[test]
#[ignore = "long: minutes"]
fn a_thousand_rollouts_in_a_storm_end_as_they_must() {
    Storm {
        rollouts: 1000,
        faults_percent: 10,
        concurrency: 8,
        kills: 5,
        restarts: 2,
        warm: 0,
    }
    .rage();
}
