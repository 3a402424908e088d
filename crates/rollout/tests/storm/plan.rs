//! What happens to each rollout, from one seed, and what it must then end as.

use std::sync::Arc;

use harness::Installed;
use record::{Disposition, Fault, TaskId};
use rollout::{Job, plan_group};
use task::{Split, Step, Task, TaskFile, chores, teacher};

use crate::real;

/// Rollouts of a group.
const SAMPLES: u32 = 5;

/// The next of a sequence of random numbers (splitmix64).
pub(crate) fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// What happens to a rollout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fate {
    /// The task is solved.
    Solves,
    /// It is given up at once.
    GivesUp,
    /// The harness is killed after its work.
    KillHarness,
    /// The sandbox's PID 1 is killed while the harness runs.
    KillGuest,
    /// … while the verifier runs.
    KillGuestLate,
    /// The engine answers with an error.
    EngineError,
    /// The engine never answers.
    EngineHang,
    /// The verifier is killed.
    VerifierCrash,
    /// The task does not fit onto the sandbox's disk.
    SandboxDisk,
    /// The ledger's disk is full when it begins.
    LedgerDisk,
}

const FAULTS: [Fate; 8] = [
    Fate::KillHarness,
    Fate::KillGuest,
    Fate::KillGuestLate,
    Fate::EngineError,
    Fate::EngineHang,
    Fate::VerifierCrash,
    Fate::SandboxDisk,
    Fate::LedgerDisk,
];

/// The reward, or the fault, that is the truth.
pub(crate) fn truth(fate: Fate) -> Result<f64, Fault> {
    match fate {
        Fate::Solves => Ok(1.0),
        Fate::GivesUp => Ok(0.0),
        Fate::KillHarness => Err(Fault::HarnessCrashed),
        Fate::KillGuest | Fate::KillGuestLate => Err(Fault::SandboxLost),
        Fate::EngineError | Fate::EngineHang => Err(Fault::EngineFailed),
        Fate::VerifierCrash => Err(Fault::VerifierFailed),
        Fate::SandboxDisk => Err(Fault::SandboxStart),
        Fate::LedgerDisk => Err(Fault::GatewayFailed),
    }
}

/// The fate of each rollout.
pub(crate) fn fates(seed: u64, rollouts: u32, faults_percent: u64) -> Vec<Fate> {
    let mut state = seed;
    let mut faults = next(&mut state);
    let fate = |_| match next(&mut state) % 100 {
        number if number < faults_percent => {
            // In turn, so that few rollouts have all of them.
            faults = faults.wrapping_add(1);
            FAULTS[(faults % FAULTS.len() as u64) as usize]
        }
        number if number < faults_percent + 20 => Fate::GivesUp,
        _ => Fate::Solves,
    };
    (0..rollouts).map(fate).collect()
}

/// A chore of several steps, so that things can break in between.
pub(crate) fn chore() -> (Task, Vec<Step>) {
    chores::generate(Split::Train, 0, 32)
        .into_iter()
        .map(|task| {
            let steps = teacher::reference(&task).unwrap();
            (task, steps)
        })
        .find(|(_, steps)| steps.len() >= 3)
        .unwrap()
}

/// The mark by which a process is found that is to die with its sandbox.
pub(crate) fn mark(nonce: &str, index: usize) -> String {
    format!("kill-the-guest-of-{nonce}-{index}-")
}

/// Index of the job that an attempt is of.
pub(crate) fn index(id: &str) -> usize {
    let job = id.rsplit_once(".r").map_or(id, |(job, _)| job);
    let numbers: Vec<usize> = job
        .split(['-', 'k'])
        .filter_map(|part| part.parse().ok())
        .collect();
    let [group, sample] = numbers[numbers.len() - 2..] else {
        panic!("{id}");
    };
    group * SAMPLES as usize + sample
}

/// One job per fate: groups of five of one task.
pub(crate) fn jobs(
    nonce: &str,
    fates: &[Fate],
    shell: impl Fn(&str) -> Arc<Installed>,
) -> Vec<Job> {
    let (chore, _) = chore();
    let plain = shell("REACT");
    let mut jobs = Vec::new();
    for (group, fates) in fates.chunks(SAMPLES as usize).enumerate() {
        let id = TaskId::new(format!("storm-{group}")).unwrap();
        let specs = plan_group(rollout::GroupPlan {
            run_seed: 0,
            step: 0,
            split: "train",
            task: &id,
            harness: "s",
            samples: fates.len() as u32,
        });
        for (sample, (spec, fate)) in specs.unwrap().into_iter().zip(fates).enumerate() {
            let index = group * SAMPLES as usize + sample;
            assert_eq!(self::index(spec.id.as_str()), index, "{}", spec.id);
            let mut task = Task {
                id: id.clone(),
                ..chore.clone()
            };
            let mark = mark(nonce, index);
            match fate {
                Fate::VerifierCrash => {
                    task.verifier.argv = ["bash", "-c", "kill -9 $$"].map(str::to_owned).to_vec();
                }
                Fate::KillGuestLate => {
                    let script = format!(": {mark}; sleep 600; :");
                    task.verifier.argv = vec!["bash".into(), "-c".into(), script];
                }
                Fate::SandboxDisk => {
                    task.environment.needs.storage_mb = Some(1);
                    task.files.push(TaskFile {
                        path: task.workspace.join("large"),
                        content: vec![7; 2 << 20],
                        executable: false,
                    });
                }
                _ => {}
            }
            let installed = match fate {
                Fate::KillHarness => shell("REACT; kill -9 $$"),
                Fate::KillGuest => shell(&format!(": {mark}; REACT; sleep 600; :")),
                _ => Arc::clone(&plain),
            };
            let mut job = real::jobs(&[task], &installed, 1).remove(0);
            job.spec = spec;
            jobs.push(job);
        }
    }
    jobs
}

/// Whether a result is what must come of a fate; what came otherwise.
pub(crate) fn check(
    fate: Fate,
    rollout: &record::Rollout,
    at_a_restart: bool,
) -> Result<(), String> {
    let disposition = rollout
        .disposition
        .as_ref()
        .ok_or("it has no disposition")?;
    let reward = rollout.verdict.as_ref().map(|verdict| verdict.reward);
    if reward.is_some() != disposition.has_vote() {
        return Err(format!("{disposition:?} with reward {reward:?}"));
    }
    let came = match disposition {
        Disposition::Train => Ok(reward.unwrap_or(f64::NAN)),
        Disposition::Discard { fault, .. } => Err(*fault),
        other => return Err(format!("{other:?}")),
    };
    // A gateway that went away in the middle is the first that broke, or another broke before.
    let gateway = at_a_restart && came == Err(Fault::GatewayFailed);
    if came == truth(fate) || gateway {
        return Ok(());
    }
    Err(format!(
        "expected {:?}, came {disposition:?} {reward:?}",
        truth(fate)
    ))
}
