//! Captures of other gateways: what is read, what is refused, what the tree makes of them.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

use export::{CaptureError, Facts, read, report, row_lines, write_lines};
use serde_json::{Value, json};
use tree::Selection;

/// A line with log-probabilities of -1.
fn line(call: u32, prompt: &[u32], output: &[u32]) -> Value {
    json!({
        "rollout": "a/b c", "call": call, "prompt_ids": prompt, "output_ids": output,
        "logprobs": vec![-1.0; output.len()], "finish": "stop", "at": f64::from(call),
    })
}

fn with(mut line: Value, more: Value) -> Value {
    let fields = more.as_object().unwrap().clone();
    line.as_object_mut().unwrap().extend(fields);
    line
}

fn jsonl(lines: &[Value]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

fn run(lines: &[Value], policy: &str) -> Value {
    let captured = read(jsonl(lines).as_bytes()).unwrap();
    assert_eq!(captured.len(), 1);
    let selection = Selection::named(policy, 64).unwrap();
    serde_json::to_value(report(&captured[0], &selection, None).unwrap().report).unwrap()
}

/// So many tokens that nobody else has.
fn text(start: u32, count: u32) -> Vec<u32> {
    (start..start + count).collect()
}

#[test]
fn a_linear_rollout_is_one_row() {
    let lines = [line(1, &[1, 2, 3, 9, 4], &[5]), line(0, &[1, 2], &[3, 9])];
    assert_eq!(
        run(&lines, "clawgym2"),
        json!({
            "rollout": "a/b c", "calls": 2, "nodes": 2, "leaves": 1, "unique_tokens": 6,
            "generated_tokens": 3, "kept_generated_tokens": 3, "rows": 1, "disposition": "train",
            "forks": {},
        })
    );
}

#[test]
fn retries_and_lost_replies_are_dead_leaves() {
    let lines = [
        line(0, &[1, 2], &[10, 11]),
        line(1, &[1, 2], &[20]),
        line(2, &[1, 2, 20, 3], &[30]),
        with(
            line(3, &[1, 2, 20, 3, 30, 4], &[40]),
            json!({"delivered": false}),
        ),
    ];
    let found = run(&lines, "clawgym2");
    assert_eq!(
        found,
        json!({
            "rollout": "a/b c", "calls": 4, "nodes": 5, "leaves": 2, "unique_tokens": 9,
            "generated_tokens": 5, "kept_generated_tokens": 2, "rows": 1, "disposition": "train",
            "forks": {"retry": 1},
        })
    );
    assert_eq!(run(&lines, "all")["kept_generated_tokens"], 5);
    assert_eq!(run(&lines, "all")["rows"], 2);
    assert_eq!(run(&lines, "longest")["kept_generated_tokens"], 3);
}

#[test]
fn classes_that_are_given_count() {
    let main = text(100, 20);
    let next: Vec<u32> = [main.clone(), vec![7, 8]].concat();
    let lines = [
        line(0, &main, &[7]),
        with(
            line(1, &text(200, 9), &[70, 71]),
            json!({"class": "subagent"}),
        ),
        line(2, &next, &[9]),
        with(
            line(3, &[next.clone(), vec![9, 5]].concat(), &text(300, 30)),
            json!({"class": "compaction"}),
        ),
        line(4, &[text(100, 3), text(300, 29)].concat(), &[80]),
        line(
            5,
            &[text(100, 3), text(300, 29), vec![80, 6]].concat(),
            &[81],
        ),
    ];
    let found = run(&lines, "clawgym2");
    assert_eq!(found["kept_generated_tokens"], 4);
    assert_eq!(found["rows"], 2);
    assert_eq!(found["forks"], json!({"subagent": 1, "compaction": 1}));
    assert_eq!(
        run(&lines, "clawgym2+aux")["kept_generated_tokens"],
        4 + 2 + 30
    );
}

#[test]
fn a_compaction_is_found_by_its_summary() {
    let summary = text(1000, 40);
    let asked = [text(1, 50), vec![60, 61], text(70, 10)].concat();
    let lines = [
        line(0, &text(1, 50), &[60, 61]),
        line(1, &asked, &summary),
        // A new root: nothing is shared, but the summary reappears without its last token.
        line(
            2,
            &[text(500, 5), summary[..39].to_vec(), vec![3]].concat(),
            &[90, 91],
        ),
        line(
            3,
            &[text(500, 5), summary[..39].to_vec(), vec![3, 90, 91, 4]].concat(),
            &[92],
        ),
    ];
    let found = run(&lines, "clawgym2");
    assert_eq!(found["forks"], json!({"compaction": 1}));
    assert_eq!(found["kept_generated_tokens"], 2 + 3);
    assert_eq!(
        run(&lines, "clawgym2+aux")["kept_generated_tokens"],
        2 + 3 + 40
    );
}

#[test]
fn a_reply_in_other_tokens_is_drift_and_stays_trained() {
    let reply = text(100, 30);
    // Thinking is gone from the history: the reply's end comes back.
    let lines = [
        line(0, &[1, 2], &reply),
        line(
            1,
            &[vec![1, 2], reply[10..29].to_vec(), vec![5, 6]].concat(),
            &[7],
        ),
    ];
    let found = run(&lines, "clawgym2");
    assert_eq!(found["forks"], json!({"parse_drift": 1}));
    assert_eq!(
        (&found["kept_generated_tokens"], &found["rows"]),
        (&json!(31), &json!(2))
    );
}

#[test]
fn over_branched_rollouts_are_discarded() {
    let lines: Vec<Value> = (0..5)
        .map(|at| line(at, &text(100 * at, 4), &[7]))
        .collect();
    let captured = read(jsonl(&lines).as_bytes()).unwrap();
    let report = |leaves_max| {
        let selection = Selection::named("clawgym2", leaves_max).unwrap();
        let report = report(&captured[0], &selection, None).unwrap().report;
        (
            report.disposition,
            report.kept_generated_tokens,
            report.rows,
        )
    };
    assert_eq!(report(5), ("train", 5, 5));
    assert_eq!(report(4), ("discard", 0, 0));
}

#[test]
fn without_logprobs_there_is_nothing_to_train() {
    for missing in [json!([]), Value::Null, json!([-1.0, null])] {
        let lines = [with(line(0, &[1], &[2, 3]), json!({"logprobs": missing}))];
        let found = run(&lines, "all");
        assert_eq!(
            (&found["generated_tokens"], &found["kept_generated_tokens"]),
            (&json!(2), &json!(0))
        );
        assert_eq!(found["disposition"], "mask");
    }
}

#[test]
fn what_is_wrong_is_named_with_its_line() {
    let good = line(0, &[1], &[2]);
    let error = |second: Value| read(jsonl(&[good.clone(), second]).as_bytes()).unwrap_err();
    let short = error(with(line(1, &[1], &[2, 3]), json!({"logprobs": [-1.0]})));
    assert!(
        matches!(
            short,
            CaptureError::Logprobs {
                line: 2,
                logprobs: 1,
                ..
            }
        ),
        "{short}"
    );
    let twice = error(good.clone());
    assert!(
        matches!(
            twice,
            CaptureError::Duplicate {
                line: 2,
                first: 1,
                ..
            }
        ),
        "{twice}"
    );
    let wrong = error(with(line(1, &[1], &[2]), json!({"finish": "eos"})));
    assert!(
        wrong.to_string().contains("line 2") && wrong.to_string().contains("eos"),
        "{wrong}"
    );
    let negative = error(with(line(1, &[1], &[2]), json!({"prompt_ids": [-1]})));
    assert!(
        matches!(negative, CaptureError::Line { line: 2, .. }),
        "{negative}"
    );
    let unknown = error(with(line(1, &[1], &[2]), json!({"class": "aux"})));
    assert!(unknown.to_string().contains("compaction"), "{unknown}");
    let infinite = error(with(line(1, &[1], &[2]), json!({"logprobs": [-1e300]})));
    assert!(
        matches!(infinite, CaptureError::Line { line: 2, .. })
            && infinite.to_string().contains("logprobs[0]"),
        "{infinite}"
    );
}

/// Line, field, what was found, what is expected.
#[test]
fn an_error_says_everything_that_is_needed_to_mend_the_line() {
    let good = line(0, &[1], &[2]);
    let error = |text: String| {
        let text = format!("{good}\n\n{text}\n");
        let error = read(text.as_bytes()).unwrap_err().to_string();
        error
            .split_once("; expected {")
            .map_or(error.clone(), |(before, _)| before.to_owned())
    };
    let changed = |more: Value| error(with(line(1, &[1], &[2]), more).to_string());
    let without = |field: &str| {
        let mut line = line(1, &[1], &[2]);
        line.as_object_mut().unwrap().remove(field);
        error(line.to_string())
    };
    let errors = [
        changed(json!({"output_ids": [7, "x"]})),
        changed(json!({"prompt_ids": [1, 2, -3]})),
        changed(json!({"logprobs": [0.5, 0.5]})),
        changed(json!({"logprobs": [-1e300]})),
        changed(json!({"finish": "eos"})),
        changed(json!({"call": 0})),
        without("prompt_ids"),
        error("{\"rollout\": \"a\"".to_owned()),
        error("[1, 2]".to_owned()),
        error(format!("{} 5", line(1, &[1], &[2]))),
    ];
    insta::assert_snapshot!(errors.join("\n"));
}

#[test]
fn rows_are_written_with_one_denominator_per_rollout() {
    let lines = [line(0, &[1, 2], &[10, 11]), line(1, &[1, 2], &[20])];
    let captured = read(jsonl(&lines).as_bytes()).unwrap();
    let grown = report(&captured[0], &Selection::All, None).unwrap();
    let mut out = Vec::new();
    let facts = Facts {
        rollout: "a/b c",
        group: Some("g"),
        reward: Some(0.5),
        ..Facts::default()
    };
    write_lines(&mut out, &row_lines(&grown.rows, facts)).unwrap();
    let rows: Vec<Value> = String::from_utf8(out)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        rows[0],
        json!({
            "rollout": "a/b c", "group": "g", "reward": 0.5, "row": 0, "rows": 2,
            "rollout_terms": 3, "tokens": [1, 2, 10, 11], "prompt_tokens": 2, "loss_mask": [1, 1],
            "logprobs": [-1.0, -1.0], "logprobs_model": [-1.0, -1.0], "versions": [0, 0],
            "calls": [0], "tokens_cut": 0,
        })
    );
    assert_eq!(rows[1]["tokens"], json!([1, 2, 20]));
}

#[test]
fn a_subagent_is_found_by_what_it_was_asked() {
    // The task is in the middle of the reply that spawns it; that reply is carried on.
    let reply = [text(100, 5), text(1000, 20), vec![6]].concat();
    let main = [text(1, 30), reply.clone(), vec![8, 9]].concat();
    let sub = [text(500, 9), text(1000, 20), vec![3]].concat();
    let lines = [
        line(0, &text(1, 30), &reply),
        line(1, &sub, &[70, 71]),
        line(2, &[sub.clone(), vec![70, 71, 4]].concat(), &[72]),
        line(3, &main, &[90]),
    ];
    let found = run(&lines, "clawgym2");
    assert_eq!(found["forks"], json!({"subagent": 1}));
    assert_eq!(found["kept_generated_tokens"], 26 + 1);
    assert_eq!(
        run(&lines, "clawgym2+aux")["kept_generated_tokens"],
        26 + 1 + 3
    );
}

#[test]
fn images_that_differ_part_where_they_begin() {
    let seen = |call: u32, digest: &str| {
        let media =
            json!({"media": [{"start": 1, "tokens": 2, "digest": digest, "size": [28, 56]}]});
        with(line(call, &[1, 9, 9, 2], &[3, 4]), media)
    };
    let same = run(&[seen(0, "cat"), seen(1, "cat")], "all");
    let unlike = run(&[seen(0, "cat"), seen(1, "dog")], "all");
    assert_eq!(same["unique_tokens"], 6, "{same}");
    assert_eq!(unlike["unique_tokens"], 11, "{unlike}");
    let wide = with(
        seen(0, "cat"),
        json!({"media": [{"start": 3, "tokens": 2, "digest": "cat"}]}),
    );
    let captured = read(jsonl(&[wide]).as_bytes()).unwrap();
    let selection = Selection::named("all", 64).unwrap();
    let refused = report(&captured[0], &selection, None).unwrap_err();
    assert!(refused.to_string().contains("media spans"), "{refused}");
}
