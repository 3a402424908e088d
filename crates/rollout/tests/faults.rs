//! Seeded faults at every stage of one rollout: exactly one disposition, never a number for a
//! fault, nothing left alive.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

mod world;

use std::sync::Arc;

use proptest::prelude::*;
use record::{Disposition, Fault};
use tokio_util::sync::CancellationToken;
use world::{
    Does, Ends, GOOD, Plan, Says, World, expected, jobs, plans, retried, runner, simulate,
};

/// Runs one job through the world and checks what must hold whatever happens.
fn run(first: Plan, second: Plan) -> record::Rollout {
    let world = Arc::new(World::default());
    let job = jobs(1).remove(0);
    let id = job.spec.id.clone();
    world.plan(id.as_str(), first);
    world.plan(&format!("{id}.r1"), second);
    let rollout = simulate(runner(&world).run(&job, &CancellationToken::new()));

    let (last, plan) = if retried(&first) && first.record_end == Does::Work {
        (format!("{id}.r1"), second)
    } else {
        (id.to_string(), first)
    };
    assert_eq!(rollout.spec.id.as_str(), last);
    let disposition = rollout.disposition.clone().unwrap();
    let fault = match &disposition {
        Disposition::Discard { fault, reason } => {
            assert!(reason.len() > 5, "{reason}");
            Some(*fault)
        }
        _ => None,
    };
    assert_eq!((disposition.name(), fault), expected(&plan), "{plan:?}");
    // I7
    assert_eq!(rollout.verdict.is_some(), disposition.trains());
    if let Some(verdict) = &rollout.verdict {
        assert!((0.0..=1.0).contains(&verdict.reward));
    }
    // I8
    assert_eq!((world.alive(), world.open_sessions()), (0, 0));
    // I9: each attempt is recorded as started once, and ended at most once and last.
    let records = world.records.lock().unwrap();
    for attempt in [id.to_string(), format!("{id}.r1")] {
        let ends: Vec<bool> = records
            .iter()
            .filter(|record| record.spec.id.as_str() == attempt)
            .map(|record| record.disposition.is_some())
            .collect();
        assert!(
            matches!(ends.as_slice(), [] | [false] | [true] | [false, true]),
            "{attempt}: {ends:?}"
        );
    }
    if retried(&first) && first.record_end == Does::Work {
        let ledger = world.ledger();
        assert!(matches!(
            ledger[&id].disposition,
            Some(Disposition::Retry {
                fault: Fault::SandboxStart,
                ..
            })
        ));
        assert_eq!(rollout.spec.group, ledger[&id].spec.group);
        assert_eq!(rollout.spec.labels["attempt"], "1");
    }
    // Secrets do not reach the record.
    assert!(
        !rollout.harness_tail.contains("key-"),
        "{}",
        rollout.harness_tail
    );
    rollout
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]
    #[test]
    fn every_plan_ends_in_exactly_one_disposition(first in plans(), second in plans()) {
        run(first, second);
    }
}

/// Each boundary broken by itself, in each way that it can break.
#[test]
fn each_fault_alone() {
    let mut seen = Vec::new();
    let mut check = |name: &str, plan: Plan| {
        // A second attempt meets the same fault.
        let rollout = run(plan, plan);
        seen.push(match rollout.disposition.unwrap() {
            Disposition::Train => format!("{name}: train"),
            Disposition::Truncate { reason } => format!("{name}: truncate {reason}"),
            Disposition::Discard { fault, reason } => {
                format!("{name}: discard {fault:?}: {reason}")
            }
            other => panic!("{other:?}"),
        });
    };
    check("nothing", GOOD);
    check(
        "record start",
        Plan {
            record_start: Does::Fail,
            ..GOOD
        },
    );
    check(
        "open",
        Plan {
            open: Does::Fail,
            ..GOOD
        },
    );
    check(
        "create",
        Plan {
            create: Does::Fail,
            ..GOOD
        },
    );
    check(
        "create for good",
        Plan {
            create: Does::FailForGood,
            ..GOOD
        },
    );
    check(
        "create hangs",
        Plan {
            create: Does::Hang,
            ..GOOD
        },
    );
    check(
        "upload",
        Plan {
            upload: Does::Fail,
            ..GOOD
        },
    );
    check(
        "upload, sandbox dies",
        Plan {
            upload: Does::Die,
            ..GOOD
        },
    );
    check(
        "upload hangs",
        Plan {
            upload: Does::Hang,
            ..GOOD
        },
    );
    check(
        "exit 1",
        Plan {
            ends: Ends::Code(1),
            ..GOOD
        },
    );
    check(
        "exit 3",
        Plan {
            ends: Ends::Code(3),
            ..GOOD
        },
    );
    check(
        "signal",
        Plan {
            ends: Ends::Signal,
            ..GOOD
        },
    );
    check(
        "limit",
        Plan {
            ends: Ends::Limit,
            ..GOOD
        },
    );
    check(
        "not found",
        Plan {
            ends: Ends::NotFound,
            ..GOOD
        },
    );
    check(
        "sandbox dies",
        Plan {
            ends: Ends::SandboxDies,
            ..GOOD
        },
    );
    check(
        "hangs",
        Plan {
            ends: Ends::Hangs,
            ..GOOD
        },
    );
    check(
        "silent",
        Plan {
            ends: Ends::Hangs,
            calls: 0,
            ..GOOD
        },
    );
    check("no calls", Plan { calls: 0, ..GOOD });
    check(
        "engine",
        Plan {
            engine_fault: true,
            ..GOOD
        },
    );
    check(
        "engine, and crash",
        Plan {
            engine_fault: true,
            ends: Ends::Signal,
            ..GOOD
        },
    );
    check(
        "refused",
        Plan {
            refused: true,
            ..GOOD
        },
    );
    check(
        "too long",
        Plan {
            too_long: true,
            ..GOOD
        },
    );
    check(
        "settle",
        Plan {
            settle: Does::Fail,
            ..GOOD
        },
    );
    check(
        "settle hangs",
        Plan {
            settle: Does::Hang,
            ..GOOD
        },
    );
    check(
        "unsettled",
        Plan {
            settled: false,
            ..GOOD
        },
    );
    check(
        "verifier",
        Plan {
            says: Says::Fails,
            ..GOOD
        },
    );
    check(
        "verifier hangs",
        Plan {
            says: Says::Hangs,
            ..GOOD
        },
    );
    check(
        "verifier, sandbox dies",
        Plan {
            says: Says::SandboxDies,
            ..GOOD
        },
    );
    check(
        "reward 2",
        Plan {
            says: Says::Reward(2.0),
            ..GOOD
        },
    );
    check(
        "reward NaN",
        Plan {
            says: Says::Reward(f64::NAN),
            ..GOOD
        },
    );
    check(
        "destroy hangs",
        Plan {
            destroy: Does::Hang,
            ..GOOD
        },
    );
    check(
        "record end",
        Plan {
            record_end: Does::Fail,
            ..GOOD
        },
    );
    insta::assert_snapshot!(seen.join("\n"), @r##"
nothing: train
record start: discard GatewayFailed: no space left
open: discard GatewayFailed: too many rollouts
create: discard SandboxStart: sandbox s0000-t-react-k00.r1 could not be made: no pids left
create for good: discard SandboxRefused: this machine cannot make a sandbox: user namespaces; enable them
create hangs: discard SandboxStart: not ready after 60 s (stages.create_s)
upload: discard SandboxStart: sandbox s0000-t-react-k00.r1: /workspace/a: no space left
upload, sandbox dies: discard SandboxStart: sandbox s0000-t-react-k00.r1 is gone: connection reset
upload hangs: discard SandboxStart: not ready after 60 s (stages.create_s)
exit 1: train
exit 3: truncate turns_limit
signal: discard HarnessCrashed: killed by signal 9, which was not ours
limit: truncate harness_timeout
not found: discard HarnessCrashed: sandbox s0000-t-react-k00: cannot run "/run/espalier/guest": no such file
sandbox dies: discard SandboxLost: sandbox s0000-t-react-k00 is gone: connection reset
hangs: discard SandboxLost: the sandbox did not answer for 310 s
silent: discard NoCalls: no model call within 100 s (limits.startup_s of the profile); it printed nothing: check base URL and key in its profile
no calls: discard NoCalls: the harness ended with exit code 0 and made no model call; check base URL and key in its profile; it printed: <key> said something
engine: discard EngineFailed: engine is gone
engine, and crash: discard EngineFailed: engine is gone
refused: truncate calls_limit
too long: truncate context_overflow
settle: discard GatewayFailed: the gateway is gone
settle hangs: discard GatewayFailed: the gateway did not settle within 30 s
unsettled: discard NotSettled: calls still in flight at the settling limit: 1
verifier: discard VerifierFailed: no number
verifier hangs: discard VerifierFailed: no verdict after 60 s (stages.verify_s)
verifier, sandbox dies: discard SandboxLost: while the verifier ran: gone
reward 2: discard VerifierFailed: reward 2 is not between 0 and 1
reward NaN: discard VerifierFailed: reward NaN is not between 0 and 1
destroy hangs: train
record end: discard GatewayFailed: its end could not be recorded: no space left
"##);
}

#[test]
fn a_failed_sandbox_is_tried_once_more() {
    let rollout = run(
        Plan {
            create: Does::Fail,
            ..GOOD
        },
        GOOD,
    );
    assert_eq!(rollout.disposition, Some(Disposition::Train));
    assert_eq!(rollout.spec.id.as_str(), "s0000-t-react-k00.r1");
}
