//! The ledger against the simplest thing that could be right: three maps in memory. Random
//! changes, reopening in between, everything compared after every step.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

mod support;

use std::collections::BTreeMap;

use ledger::Ledger;
use proptest::prelude::*;
use record::{Call, CallId, Rollout, RolloutId};
use serde_json::{Value, json};

#[derive(Debug, Clone)]
enum Step {
    Call { rollout: u8, index: u32, seed: u64 },
    Attempts { rollout: u8, index: u32, seed: u64 },
    Rollout { rollout: u8, seed: u64 },
    Note { key: u8, value: f64 },
    Forget { rollout: u8, calls_only: bool },
    Together { seeds: Vec<u64> },
    Reopen { cleanly: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let (r, i, s) = (0..3_u8, 0..4_u32, any::<u64>());
    prop_oneof![
        4 => (r.clone(), i.clone(), s).prop_map(|(rollout, index, seed)| Step::Call { rollout, index, seed }),
        2 => (r.clone(), i, s).prop_map(|(rollout, index, seed)| Step::Attempts { rollout, index, seed }),
        3 => (r.clone(), s).prop_map(|(rollout, seed)| Step::Rollout { rollout, seed }),
        1 => (0..3_u8, any::<f64>().prop_filter("JSON", |f| f.is_finite())).prop_map(|(key, value)| Step::Note { key, value }),
        1 => (r, any::<bool>()).prop_map(|(rollout, calls_only)| Step::Forget { rollout, calls_only }),
        1 => prop::collection::vec(s, 1..20).prop_map(|seeds| Step::Together { seeds }),
        1 => any::<bool>().prop_map(|cleanly| Step::Reopen { cleanly }),
    ]
}

#[derive(Default)]
struct Model {
    calls: BTreeMap<(String, u32), Call>,
    rollouts: BTreeMap<String, Rollout>,
    notes: BTreeMap<String, Value>,
}

fn name(rollout: u8) -> String {
    format!("r{rollout}")
}

fn id(name: &str) -> RolloutId {
    RolloutId::new(name).unwrap()
}

fn compare(ledger: &Ledger, model: &Model) {
    for rollout in (0..3).map(name) {
        let expected: Vec<_> = model
            .calls
            .range((rollout.clone(), 0)..=(rollout.clone(), u32::MAX))
            .map(|(_, call)| call.clone())
            .collect();
        assert_eq!(ledger.calls(&id(&rollout)).unwrap(), expected);
        assert_eq!(
            ledger.rollout(&id(&rollout)).unwrap().as_ref(),
            model.rollouts.get(&rollout)
        );
    }
    for labels in [
        vec![],
        vec![("step", "0")],
        vec![("step", "1"), ("split", "0")],
        vec![("absent", "")],
    ] {
        let mut expected: Vec<_> = model
            .rollouts
            .values()
            .filter(|rollout| {
                labels.iter().all(|(name, value)| {
                    rollout.spec.labels.get(*name).map(String::as_str) == Some(*value)
                })
            })
            .cloned()
            .collect();
        expected.sort_by_key(|rollout| (rollout.started_ms, rollout.spec.id.clone()));
        assert_eq!(ledger.rollouts(&labels).unwrap(), expected, "{labels:?}");
    }
    for key in ["k0", "k1", "k2"] {
        assert_eq!(ledger.note(key).unwrap().as_ref(), model.notes.get(key));
    }
    let counts = ledger.counts().unwrap();
    assert_eq!(counts.calls, model.calls.len() as u64);
    assert_eq!(counts.rollouts, model.rollouts.len() as u64);
    assert_eq!(
        counts.running + counts.dispositions.values().sum::<u64>(),
        counts.rollouts
    );
}

async fn run(steps: Vec<Step>) {
    let dir = tempfile::tempdir().unwrap();
    let mut ledger = Ledger::create(dir.path()).unwrap();
    let mut model = Model::default();
    for step in steps {
        match step {
            Step::Call {
                rollout,
                index,
                seed,
            } => {
                let call = support::call(seed, &name(rollout), index);
                ledger.put_call(call.clone()).await.unwrap();
                model.calls.insert((name(rollout), index), call);
            }
            Step::Attempts {
                rollout,
                index,
                seed,
            } => {
                let attempts = support::attempts(seed);
                let call = CallId {
                    rollout: id(&name(rollout)),
                    index,
                };
                ledger.put_attempts(&call, &attempts).await.unwrap();
                if let Some(call) = model.calls.get_mut(&(name(rollout), index)) {
                    call.attempts = attempts;
                }
            }
            Step::Rollout { rollout, seed } => {
                let record = support::rollout(seed, &name(rollout));
                ledger.put_rollout(record.clone()).await.unwrap();
                model.rollouts.insert(name(rollout), record);
            }
            Step::Note { key, value } => {
                let key = format!("k{key}");
                let value = json!({"value": value});
                ledger.put_note(&key, value.clone()).await.unwrap();
                model.notes.insert(key, value);
            }
            Step::Forget {
                rollout,
                calls_only,
            } => {
                if calls_only {
                    ledger.forget_calls(&id(&name(rollout))).await.unwrap();
                } else {
                    ledger.forget(&id(&name(rollout))).await.unwrap();
                    model.rollouts.remove(&name(rollout));
                }
                model.calls.retain(|(of, _), _| *of != name(rollout));
            }
            Step::Together { seeds } => {
                let calls = seeds
                    .iter()
                    .zip(100..)
                    .map(|(seed, index)| support::call(*seed, "r0", index))
                    .collect::<Vec<_>>();
                let puts = calls.iter().map(|call| ledger.put_call(call.clone()));
                for put in futures::future::join_all(puts).await {
                    put.unwrap();
                }
                for call in calls {
                    model.calls.insert(("r0".to_owned(), call.id.index), call);
                }
            }
            Step::Reopen { cleanly } => {
                if cleanly {
                    ledger.close().await.unwrap();
                } else {
                    drop(ledger);
                }
                ledger = Ledger::open(dir.path()).unwrap();
            }
        }
        compare(&ledger, &model);
    }
    ledger.close().await.unwrap();
    let reader = Ledger::open_read_only(dir.path()).unwrap();
    compare(&reader, &model);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_ledger_is_three_maps(steps in prop::collection::vec(step(), 1..25)) {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(run(steps));
    }
}
