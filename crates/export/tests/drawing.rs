//! Drawings of trees.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use common::{rollout, story};
use export::{
    Rule, Source, read, report,
    svg::{Caption, draw},
};
use serde_json::json;
use tree::Selection;

/// The picture of the documentation; `ESPALIER_SVG=FILE` writes it.
#[test]
fn a_rollout_with_every_class() {
    let (rollout, calls) = (rollout(Some(1.0)), story());
    let rule = Rule::new(Selection::default(), None);
    let source = Source::new(&rollout, &calls, &rule, None).unwrap();
    let caption = Caption {
        title: rollout.spec.id.as_str().to_owned(),
        facts: ["harness react", "reward 1", "10 calls"]
            .map(str::to_owned)
            .to_vec(),
    };
    let svg = draw(&source.tree, &source.kept, &caption);
    if let Some(file) = std::env::var_os("ESPALIER_SVG") {
        std::fs::write(file, &svg).unwrap();
    }
    insta::assert_snapshot!(svg);
}

#[test]
fn names_cannot_break_the_document() {
    let rule = Rule::new(Selection::default(), None);
    let (rollout, calls) = (rollout(None), story());
    let source = Source::new(&rollout, &calls, &rule, None).unwrap();
    let caption = Caption {
        title: "a<b>&\"c\u{1b}".to_owned(),
        facts: vec!["</svg>".to_owned()],
    };
    let svg = draw(&source.tree, &source.kept, &caption);
    assert!(
        svg.contains("<title>a&lt;b&gt;&amp;&quot;c </title>"),
        "{svg}"
    );
    assert_eq!(svg.matches("</svg>").count(), 1);
}

/// A lane's name and number of nodes do not matter: every bar is inside the picture, and no two bars
/// of one row overlap.
#[test]
fn bars_neither_overlap_nor_leave_the_picture() {
    for calls in [1, 7, 60, 700] {
        let lines: String = (0..calls)
            .map(|call: u32| {
                // Every third call goes back to where an earlier one was.
                let turns = if call % 3 == 2 { call / 2 } else { call };
                let prompt: Vec<u32> = (0..3 + 4 * turns).collect();
                let output: Vec<u32> = match call % 3 {
                    2 => vec![9_000_000 + call, 5],
                    _ => (3 + 4 * call..5 + 4 * call).collect(),
                };
                let line = json!({
                    "rollout": "r", "call": call, "prompt_ids": prompt, "output_ids": output,
                    "logprobs": [-1.0, -1.0], "finish": "stop", "at": call,
                });
                format!("{line}\n")
            })
            .collect();
        let captured = read(lines.as_bytes()).unwrap();
        let grown = report(&captured[0], &Selection::default(), None).unwrap();
        let svg = draw(&grown.tree, &grown.kept, &Caption::default());
        let number = |line: &str, name: &str| -> f64 {
            let (_, rest) = line.split_once(&format!(" {name}=\"")).unwrap();
            rest.split_once('"').unwrap().0.parse().unwrap()
        };
        let head = svg.lines().next().unwrap();
        let (width, height) = (number(head, "width"), number(head, "height"));
        let mut bars: Vec<(i64, f64, f64)> = Vec::new();
        let mut rects = svg.lines().filter(|line| line.starts_with("<rect"));
        rects.next().unwrap();
        for rect in rects.take(grown.tree.nodes.len()) {
            let (x, w) = (number(rect, "x"), number(rect, "width"));
            let (y, h) = (number(rect, "y"), number(rect, "height"));
            assert!(
                x >= 0.0 && x + w <= width && y >= 0.0 && y + h <= height,
                "{rect}"
            );
            bars.push((((y + h / 2.0) * 10.0).round() as i64, x, x + w));
        }
        assert_eq!(bars.len(), grown.tree.nodes.len());
        bars.sort_by(|a, b| a.partial_cmp(b).unwrap());
        for pair in bars.windows(2) {
            let ((row, _, end), (next, start, _)) = (pair[0], pair[1]);
            assert!(row != next || end <= start + 0.2, "{calls} calls: {pair:?}");
        }
    }
}
