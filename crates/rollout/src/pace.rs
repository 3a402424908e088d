//! How many rollouts run at a time, from what engine and sandboxes say. Pure.
//!
//! Places are taken away quickly and given back slowly. What is looked at: calls that wait at the
//! engine (more places only make that queue longer, and tokens older), memory of the machine
//! (the next sandbox may be the one that gets somebody killed), and how long sandboxes take to
//! start (an engine or cluster that is out of breath).

/// What was seen.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    /// Calls that wait for the engine to begin with them; `None` when it cannot tell.
    pub queued: Option<u64>,
    /// Part of the machine's memory that is available; `None` when unknown.
    pub memory_free: Option<f64>,
    /// The median of the latest starts of sandboxes, as a part of their limit
    /// ([`crate::Stages::create_s`]); `None` without any.
    pub create_part: Option<f64>,
    /// Whether rollouts wait for a place.
    pub waiting: bool,
}

/// Below this part of available memory, places are halved.
pub const MEMORY_FREE_MIN: f64 = 0.08;
/// Above this part of their limit, starts are slow: a quarter of the places goes.
pub const CREATE_PART_MAX: f64 = 0.5;

/// What decided the number of places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// It does not adapt (`pools.run_min` is 0).
    Fixed,
    /// Memory is short: half of them went.
    Memory,
    /// Sandboxes start slowly: a quarter went.
    Starts,
    /// Calls wait at the engine: a tenth went.
    Queue,
    /// Rollouts wait and nothing presses: some came.
    Calm,
    /// Nothing asks for a change.
    Steady,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Fixed,
        Self::Memory,
        Self::Starts,
        Self::Queue,
        Self::Calm,
        Self::Steady,
    ];

    /// The word used in gauges.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Memory => "memory",
            Self::Starts => "starts",
            Self::Queue => "queue",
            Self::Calm => "calm",
            Self::Steady => "steady",
        }
    }
}

/// How many places there are next, between `least` and `most`, and why. A pressure is named also
/// when there are no places left that it could take.
#[must_use]
pub fn next(places: usize, (least, most): (usize, usize), load: &Load) -> (usize, Reason) {
    let most = most.max(1);
    let least = least.clamp(1, most);
    let places = places.clamp(least, most);
    let queued = load.queued.unwrap_or(0);
    let (wanted, reason) = if load.memory_free.is_some_and(|free| free < MEMORY_FREE_MIN) {
        (places / 2, Reason::Memory)
    } else if load.create_part.is_some_and(|part| part > CREATE_PART_MAX) {
        (places - places.div_ceil(4), Reason::Starts)
    } else if queued > places as u64 / 2 {
        // More than every second rollout only waits for the engine.
        (places - places.div_ceil(10), Reason::Queue)
    } else if load.waiting && queued <= places as u64 / 4 {
        (places + places.div_ceil(16), Reason::Calm)
    } else {
        (places, Reason::Steady)
    };
    (wanted.clamp(least, most), reason)
}

/// The available part of this machine's memory.
pub(crate) fn memory_free() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |key: &str| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse::<f64>().ok()
    };
    Some(kib("MemAvailable:")? / kib("MemTotal:")?)
}

/// The median; `None` of nothing.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CALM: Load = Load {
        queued: Some(0),
        memory_free: Some(0.5),
        create_part: Some(0.01),
        waiting: true,
    };

    #[test]
    fn each_pressure_takes_places_away() {
        let bounds = (2, 64);
        assert_eq!(next(32, bounds, &CALM), (34, Reason::Calm));
        let full = Load {
            memory_free: Some(0.01),
            ..CALM
        };
        assert_eq!(next(32, bounds, &full), (16, Reason::Memory));
        let slow = Load {
            create_part: Some(0.9),
            ..CALM
        };
        assert_eq!(next(32, bounds, &slow), (24, Reason::Starts));
        let long = Load {
            queued: Some(17),
            ..CALM
        };
        assert_eq!(next(32, bounds, &long), (28, Reason::Queue));
        assert_eq!(next(2, bounds, &long), (2, Reason::Queue));
        // In between nothing changes, so that it does not swing.
        let some = Load {
            queued: Some(12),
            ..CALM
        };
        assert_eq!(next(32, bounds, &some), (32, Reason::Steady));
        let idle = Load {
            waiting: false,
            ..CALM
        };
        assert_eq!(next(32, bounds, &idle), (32, Reason::Steady));
        assert_eq!(next(64, bounds, &CALM), (64, Reason::Calm));
    }

    proptest! {
        #[test]
        fn bounds_hold_and_more_pressure_never_gives_more(
            places in 0_usize..300, least in 0_usize..50, more in 0_usize..300,
            queued in 0_u64..500, free in 0.0_f64..1.0, part in 0.0_f64..2.0, waiting: bool,
        ) {
            let bounds = (least, least + more);
            let load = Load {
                queued: Some(queued),
                memory_free: Some(free),
                create_part: Some(part),
                waiting,
            };
            let (found, _) = next(places, bounds, &load);
            prop_assert!(found >= 1 && found <= bounds.1.max(1));
            prop_assert!(found >= least.min(bounds.1.max(1)));
            let longer = Load { queued: Some(queued + 100), ..load };
            prop_assert!(next(places, bounds, &longer).0 <= found.max(least.max(1)));
        }

        /// Whatever the start: under steady pressure the least, in calm the most.
        #[test]
        fn it_settles(places in 1_usize..200, least in 1_usize..20, more in 0_usize..100) {
            let bounds = (least, least + more);
            let pressed = Load { queued: Some(10_000), ..CALM };
            let mut found = places;
            for _ in 0..200 {
                found = next(found, bounds, &pressed).0;
            }
            prop_assert_eq!(found, least);
            for _ in 0..400 {
                found = next(found, bounds, &CALM).0;
            }
            prop_assert_eq!(found, least + more);
        }
    }
}
