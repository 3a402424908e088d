//! What happens in one attempt at each boundary, and what the rollout must then end as.

use proptest::prelude::*;
use record::Fault;

/// How a boundary behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    Work,
    Fail,
    /// As `Fail`, and for good.
    FailForGood,
    /// The sandbox dies here.
    Die,
    Hang,
}

/// How the harness process ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ends {
    Code(i32),
    Signal,
    Limit,
    NotFound,
    SandboxDies,
    Hangs,
}

/// What the verifier says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Says {
    Reward(f64),
    Fails,
    SandboxDies,
    Hangs,
}

/// Everything that happens in one attempt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    pub record_start: Does,
    pub open: Does,
    pub create: Does,
    pub upload: Does,
    pub calls: u32,
    pub ends: Ends,
    pub engine_fault: bool,
    pub refused: bool,
    pub too_long: bool,
    pub settle: Does,
    pub settled: bool,
    pub says: Says,
    pub destroy: Does,
    pub record_end: Does,
    /// Virtual milliseconds of each working step.
    pub step_ms: u64,
}

pub const GOOD: Plan = Plan {
    record_start: Does::Work,
    open: Does::Work,
    create: Does::Work,
    upload: Does::Work,
    calls: 2,
    ends: Ends::Code(0),
    engine_fault: false,
    refused: false,
    too_long: false,
    settle: Does::Work,
    settled: true,
    says: Says::Reward(1.0),
    destroy: Does::Work,
    record_end: Does::Work,
    step_ms: 10,
};

/// Plans in which each boundary works most of the time.
pub fn plans() -> impl Strategy<Value = Plan> {
    let mostly = |others: Vec<Does>| prop_oneof![8 => Just(Does::Work), 1 => proptest::sample::select(others)];
    let two = || vec![Does::Fail, Does::Hang];
    (
        (
            mostly(vec![Does::Fail]),
            mostly(vec![Does::Fail]),
            mostly(vec![Does::Fail, Does::FailForGood, Does::Hang]),
            mostly(vec![Does::Fail, Does::Die, Does::Hang]),
            mostly(two()),
            mostly(vec![Does::Hang]),
            mostly(vec![Does::Fail]),
        ),
        prop_oneof![1 => Just(0_u32), 4 => 1_u32..4],
        prop_oneof![
            6 => Just(Ends::Code(0)),
            1 => Just(Ends::Code(1)),
            1 => Just(Ends::Code(3)),
            1 => Just(Ends::Signal),
            1 => Just(Ends::Limit),
            1 => Just(Ends::NotFound),
            1 => Just(Ends::SandboxDies),
            1 => Just(Ends::Hangs),
        ],
        proptest::bool::weighted(0.1),
        proptest::bool::weighted(0.1),
        proptest::bool::weighted(0.1),
        proptest::bool::weighted(0.9),
        prop_oneof![
            4 => Just(Says::Reward(1.0)),
            2 => Just(Says::Reward(0.0)),
            1 => Just(Says::Reward(0.25)),
            1 => Just(Says::Reward(1.5)),
            1 => Just(Says::Reward(f64::NAN)),
            1 => Just(Says::Fails),
            1 => Just(Says::SandboxDies),
            1 => Just(Says::Hangs),
        ],
        1_u64..2000,
    )
        .prop_map(
            |(
                (record_start, open, create, upload, settle, destroy, record_end),
                calls,
                ends,
                engine_fault,
                refused,
                too_long,
                settled,
                says,
                step_ms,
            )| Plan {
                record_start,
                open,
                create,
                upload,
                calls,
                ends,
                engine_fault,
                refused,
                too_long,
                settle,
                settled,
                says,
                destroy,
                record_end,
                step_ms,
            },
        )
}

/// What an attempt must end as, told in another way than the code does: the first line that
/// applies.
pub fn expected(plan: &Plan) -> (&'static str, Option<Fault>) {
    use Fault::*;
    let discard = |fault| ("discard", Some(fault));
    let lines: [(bool, (&'static str, Option<Fault>)); 23] = [
        (plan.record_end == Does::Fail, discard(GatewayFailed)),
        (plan.record_start == Does::Fail, discard(GatewayFailed)),
        (plan.open == Does::Fail, discard(GatewayFailed)),
        (plan.create == Does::FailForGood, discard(SandboxRefused)),
        (plan.create != Does::Work, discard(SandboxStart)),
        (plan.upload != Does::Work, discard(SandboxStart)),
        (plan.ends == Ends::NotFound, discard(HarnessCrashed)),
        (plan.ends == Ends::SandboxDies, discard(SandboxLost)),
        // A process that hangs without calls is ended at the start-up limit.
        (
            plan.ends == Ends::Hangs && (plan.calls > 0 || plan.refused),
            discard(SandboxLost),
        ),
        (plan.settle != Does::Work, discard(GatewayFailed)),
        (plan.engine_fault, discard(EngineFailed)),
        (plan.ends == Ends::Signal, discard(HarnessCrashed)),
        (!plan.settled, discard(NotSettled)),
        (plan.calls == 0 && !plan.refused, discard(NoCalls)),
        (plan.says == Says::Fails, discard(VerifierFailed)),
        (plan.says == Says::Hangs, discard(VerifierFailed)),
        (plan.says == Says::SandboxDies, discard(SandboxLost)),
        (
            matches!(plan.says, Says::Reward(reward) if !(0.0..=1.0).contains(&reward)),
            discard(VerifierFailed),
        ),
        (plan.refused, ("truncate", None)),
        (plan.ends == Ends::Limit, ("truncate", None)),
        (plan.too_long, ("truncate", None)),
        (plan.ends == Ends::Code(3), ("truncate", None)),
        (true, ("train", None)),
    ];
    lines.into_iter().find(|(applies, _)| *applies).unwrap().1
}

/// Whether a fresh sandbox is tried after this attempt.
pub fn retried(plan: &Plan) -> bool {
    plan.record_start == Does::Work
        && plan.open == Does::Work
        && (matches!(plan.create, Does::Fail | Does::Hang)
            || (plan.create == Does::Work && plan.upload != Does::Work))
}
