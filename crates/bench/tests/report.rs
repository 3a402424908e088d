//! A report from trials that are written out here: every number by hand, every page in order.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests are not in a test function"
)]

use std::collections::BTreeMap;

use bench::{
    ALL, Behaviour, Model, Outcome, Price, Report, Setup, Times, Training, Trial, Usage, trials_csv,
};

fn model(name: &str, price: Option<Price>) -> Model {
    Model {
        name: name.into(),
        engine: format!("scripted:{name}"),
        temperature: 1.0,
        price,
    }
}

fn setup() -> Setup {
    let price = Price {
        prompt_mtok: 1.0,
        prompt_again_mtok: 0.0,
        generated_mtok: 0.0,
    };
    Setup {
        tasks: "chores".into(),
        tasks_count: 2,
        tasks_digest: "0123456789abcdef0123".into(),
        models: vec![model("a", None), model("b", Some(price))],
        harnesses: BTreeMap::from([("pi".into(), "1".into()), ("react".into(), "2".into())]),
        attempts: 2,
        seed: 7,
        rounds: 200,
        training: vec![Training {
            from: "a".into(),
            to: "b".into(),
            cost: 10.0,
            basis: "2 h of a machine".into(),
        }],
        contamination: BTreeMap::new(),
    }
}

/// `a` passes the easy task only; `b` passes both through react, and one attempt is lost.
fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for model in ["a", "b"] {
        for harness in ["pi", "react"] {
            for task in ["easy", "hard"] {
                for attempt in 0..2 {
                    let passed = task == "easy" || (model == "b" && harness == "react");
                    let lost = model == "b" && harness == "pi" && task == "hard" && attempt == 1;
                    let late = model == "a" && task == "hard" && attempt == 0;
                    let tools = BTreeMap::from([("bash".to_owned(), 2)]);
                    trials.push(Trial {
                        model: model.into(),
                        harness: harness.into(),
                        task: task.into(),
                        family: task.into(),
                        attempt,
                        outcome: if lost {
                            Outcome::Missing {
                                why: "sandbox_lost".into(),
                            }
                        } else {
                            Outcome::Scored {
                                reward: if passed { 1.0 } else { 0.5 },
                                passed,
                                truncated: late.then(|| "harness_timeout".into()),
                            }
                        },
                        usage: Usage {
                            calls: 3,
                            tool_calls: 2,
                            prompt_new: 500,
                            prompt_again: 900,
                            generated: 40,
                        },
                        steps_reference: Some(1),
                        services_coverage: None,
                        behaviour: Behaviour {
                            rollouts: 1,
                            calls: 3,
                            tools,
                            ..Behaviour::default()
                        },
                        marks: BTreeMap::from([("tidy".to_owned(), vec![1.0, 0.5])]),
                        seconds: 2.0,
                    });
                }
            }
        }
    }
    trials
}

#[test]
fn every_number_by_hand() {
    let report = Report::of(setup(), &trials());
    assert_eq!(report.parts.len(), 6);
    let a = report.part("a", "pi").unwrap();
    assert_eq!((a.planned, a.scored), (4, 4));
    assert_eq!(a.pass.unwrap().mean, 0.5);
    assert_eq!(a.truncated, BTreeMap::from([("harness_timeout".into(), 1)]));
    assert_eq!(a.service.timeout_rate, 0.25);
    assert_eq!(a.reward.unwrap().mean, 0.75);
    assert_eq!(a.thresholds[2], (0.5, 1.0));
    assert_eq!(a.thresholds[6], (1.0, 0.5));
    assert_eq!(a.step_efficiency, Some(0.5));
    assert_eq!(a.service.cost, None);

    // The lost attempt is counted and counts neither way.
    let b = report.part("b", "pi").unwrap();
    assert_eq!((b.planned, b.scored), (4, 3));
    assert_eq!(b.missing, BTreeMap::from([("sandbox_lost".into(), 1)]));
    assert_eq!((b.pass.unwrap().mean, b.pass.unwrap().samples), (0.5, 3));
    assert!((b.service.cost.unwrap() - 4.0 * 500e-6).abs() < 1e-12);
    assert!((b.service.cost_per_success.unwrap() - 1000e-6).abs() < 1e-12);

    let all = report.part("b", ALL).unwrap();
    // easy 4 of 4, hard 2 of 3.
    assert!((all.pass.unwrap().mean - (1.0 + 2.0 / 3.0) / 2.0).abs() < 1e-12);
    assert!((all.at_k[1].pass_at_k.unwrap() - 1.0).abs() < 1e-12);
    assert!((all.at_k[1].pass_pow_k.unwrap() - (1.0 + 1.0 / 3.0) / 2.0).abs() < 1e-12);
    assert!((all.at_k[1].pass_pow_k_plug_in.unwrap() - (1.0 + 4.0 / 9.0) / 2.0).abs() < 1e-12);

    assert_eq!(report.comparisons.len(), 3);
    let react = report
        .comparisons
        .iter()
        .find(|one| one.harness == "react")
        .unwrap();
    assert_eq!((react.pass.mean, react.tasks), (0.5, 2));
    // One task of two moved: both signs are as far from 0.
    assert_eq!((react.p_value, react.p_adjusted), (1.0, 1.0));
    assert_eq!(react.mcnemar, None);
    // Two tasks prove nothing, so nothing is paid per point.
    let found = &report.improvements[0];
    assert!(found.points > 0.0 && !found.verified && found.cost_per_point.is_none());
    let agreement = &report.agreement[0];
    assert_eq!((agreement.judges, agreement.marks), ((1, 2), 16));
    assert_eq!(agreement.equal, 0.0);
    let shares = report.matrix.decomposition.unwrap();
    assert!(shares.task > shares.model && shares.model > 0.0);
}

#[test]
fn the_same_trials_give_the_same_bytes_in_any_order() {
    let mut trials = trials();
    let report = Report::of(setup(), &trials);
    let page = report.document();
    trials.reverse();
    for trial in &mut trials {
        // Time is no part of a report.
        trial.seconds += 1.0;
    }
    let again = Report::of(setup(), &trials);
    assert_eq!(
        serde_json::to_string(&report).unwrap(),
        serde_json::to_string(&again).unwrap()
    );
    let other = again.document();
    assert_eq!(page.to_html(), other.to_html());
    assert_eq!(page.to_markdown(), other.to_markdown());
    assert_eq!(report.parts_csv(), again.parts_csv());
    let back: Report = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    assert_eq!(back, report);
}

#[test]
fn a_page_says_all_of_it() {
    let trials = trials();
    let report = Report::of(setup(), &trials);
    let page = report.document();
    let text = page.to_markdown();
    for part in [
        "| b | pi | 50.0 [",
        "| 3 of 4 | sandbox_lost 1 | 0 |",
        "| a → b | react | 2 | +50.0 [",
        "no cost per point",
        "| model × harness |",
        "| shell_share | 1.000 | 1.000 | +0.000 |",
        "| 1 and 2 | 16 | 0.0 |",
        "![pass@1 with 95 % intervals](pass.svg)",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let html = page.to_html();
    // Self-contained: nothing is loaded from anywhere.
    assert_eq!(html.matches("<svg").count(), 3);
    for outside in ["<script", "<link", "src=", "@import"] {
        assert!(!html.contains(outside), "{outside}");
    }
    assert_eq!(trials_csv(&trials).lines().count(), 17);
    let times = Times::of(&trials, 9.0, 4);
    assert_eq!(times.seconds["a"]["pi"].p50, 2.0);
    assert_eq!(times.seconds_per_success["a"]["pi"], Some(4.0));
    assert!(
        times
            .to_markdown()
            .contains("| a | pi | 2.00 | 2.00 | 4.00 |")
    );
}

#[test]
fn nothing_scored_is_no_number() {
    let mut trials = trials();
    for trial in &mut trials {
        trial.outcome = Outcome::Missing {
            why: "no_calls".into(),
        };
    }
    let report = Report::of(setup(), &trials);
    let part = report.part("a", "pi").unwrap();
    assert_eq!((part.pass, part.reward, part.scored), (None, None, 0));
    assert!(report.comparisons.is_empty());
    assert!(report.document().to_markdown().contains("| – |"));
}
