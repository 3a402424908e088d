//! What a progress display may know, and counters.

use std::collections::BTreeMap;

use record::{Disposition, Fault, GroupId, Rollout, RolloutId};

use crate::endings::Ending;

/// Something happened to a rollout of a batch.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// An attempt began.
    Started {
        /// Which job, in the order they were given.
        job: usize,
        /// The attempt's name.
        id: RolloutId,
        /// Its group.
        group: GroupId,
        /// Attempt number, from 0.
        attempt: u32,
    },
    /// An attempt ended.
    Finished {
        /// Which job.
        job: usize,
        /// The attempt's name.
        id: RolloutId,
        /// Its group.
        group: GroupId,
        /// What training does with it.
        disposition: Disposition,
        /// Its reward, when there is one.
        reward: Option<f64>,
        /// Calls captured.
        calls: u32,
        /// Wall-clock seconds, waiting for a place not counted.
        seconds: f64,
        /// Whether another attempt follows.
        superseded: bool,
        /// Whether it was taken from the ledger and not run.
        reused: bool,
    },
}

impl Event {
    pub(crate) fn finished(
        job: usize,
        rollout: &Rollout,
        superseded: bool,
        reused: bool,
    ) -> Option<Self> {
        let seconds = rollout.seconds;
        Some(Self::Finished {
            job,
            id: rollout.spec.id.clone(),
            group: rollout.spec.group.clone(),
            disposition: rollout.disposition.clone()?,
            reward: rollout.verdict.as_ref().map(|verdict| verdict.reward),
            calls: rollout.calls,
            seconds: seconds.create
                + seconds.harness
                + seconds.settle
                + seconds.verify
                + seconds.destroy,
            superseded,
            reused,
        })
    }
}

/// How the attempts of a batch ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Attempts that began in this batch.
    pub started: u64,
    /// Attempts that ended in this batch, by the name of their disposition.
    pub dispositions: BTreeMap<String, u64>,
    /// Those that ended as `retry` or `discard`, by what broke.
    pub faults: BTreeMap<Fault, u64>,
    /// All of them, by the name of their ending ([`crate::endings`]).
    pub endings: BTreeMap<String, u64>,
    /// Results taken from the ledger. Not in the other counters.
    pub reused: u64,
}

impl Counts {
    pub(crate) fn started(&mut self) {
        self.started += 1;
    }

    pub(crate) fn ended(&mut self, disposition: &Disposition) {
        *self
            .dispositions
            .entry(disposition.name().to_owned())
            .or_default() += 1;
        let ending = Ending::counted_as(disposition).to_owned();
        *self.endings.entry(ending).or_default() += 1;
        if let Disposition::Retry { fault, .. } | Disposition::Discard { fault, .. } = disposition {
            *self.faults.entry(*fault).or_default() += 1;
        }
    }

    /// The predicate of I9 for a batch that has ended: as many ends as starts.
    #[must_use]
    pub fn conserved(&self) -> bool {
        self.started == self.dispositions.values().sum::<u64>()
    }
}
