//! The whole run, for a terminal.

use std::{collections::BTreeMap, path::Path};

use super::overview::Overview;
use crate::text::{count, table};

/// A part of a whole, for people.
fn percent(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".to_owned(),
        whole => format!("{:.1} %", 100.0 * part as f64 / whole as f64),
    }
}

fn pairs<K: ToString>(counts: &BTreeMap<K, u64>) -> Vec<Vec<String>> {
    counts
        .iter()
        .map(|(name, number)| vec![name.to_string(), count(*number)])
        .collect()
}

impl Overview {
    /// For a terminal.
    pub(super) fn text(&self, run: &Path) -> String {
        let run = run.display();
        let running = match self.running {
            0 => String::new(),
            running => format!(" ({running} running)"),
        };
        let mut text = format!(
            "{run}: {} rollouts{running}, {} calls\n",
            self.rollouts, self.calls
        );
        let over_branched = match self.over_branched {
            0 => String::new(),
            number => format!("{number} rollouts are over-branched: nothing of them is trained\n"),
        };
        let unreadable = self
            .unreadable
            .iter()
            .map(|(id, error)| format!("{id}: no tree: {error}\n"))
            .collect();
        for part in [
            named(&["disposition", "rollouts"], pairs(&self.dispositions)),
            self.endings_text(),
            self.results_text(),
            self.tokens_text(),
            self.retained_text(),
            self.dropped_text(),
            self.forks_text(),
            self.calls_text(),
            self.stale_text(),
            self.stages_text(),
            over_branched,
            unreadable,
            self.worst_text(),
            format!("one rollout: espalier inspect {run} ROLLOUT\n"),
        ] {
            if !part.is_empty() {
                text.push('\n');
                text.push_str(&part);
            }
        }
        text
    }

    fn endings_text(&self) -> String {
        let rows = self.endings.iter().map(|((ending, disposition), ended)| {
            vec![
                ending.clone(),
                (*disposition).to_owned(),
                count(ended.rollouts),
                ended.blame.to_owned(),
                ended.what.to_owned(),
            ]
        });
        let header = ["ending", "disposition", "rollouts", "whose doing", "what"];
        named(&header, rows.collect())
    }

    fn results_text(&self) -> String {
        let rows: Vec<Vec<String>> = self
            .results
            .iter()
            .map(|((split, step, harness), row)| {
                let voted = row.voted.max(1) as f64;
                let or_dash = |text: String| if row.voted == 0 { "-".to_owned() } else { text };
                vec![
                    split.clone(),
                    step.to_string(),
                    harness.clone(),
                    row.rollouts.to_string(),
                    (row.rollouts - row.voted).to_string(),
                    or_dash(format!("{:.1} %", 100.0 * row.passed as f64 / voted)),
                    or_dash(format!("{:.3}", row.reward_sum / voted)),
                    format!("{:.1}", row.calls as f64 / row.rollouts.max(1) as f64),
                ]
            })
            .collect();
        let header = [
            "split",
            "step",
            "harness",
            "rollouts",
            "no vote",
            "pass",
            "reward",
            "calls each",
        ];
        named(&header, rows)
    }

    fn tokens_text(&self) -> String {
        let rows = [
            ("captured", self.tokens.captured),
            ("unique", self.tokens.unique),
            ("generated", self.tokens.generated),
            ("trained", self.tokens.trained),
            ("without log-probabilities", self.tokens.without_logprobs),
        ];
        let rows = rows.map(|(name, number)| vec![name.to_owned(), count(number)]);
        table(&["tokens", ""], &rows)
    }

    fn retained_text(&self) -> String {
        let rows = self.retained.iter().map(|(harness, own)| {
            let (dropped, out) = (own.dropped.values().sum(), own.out.values().sum());
            vec![
                harness.clone(),
                own.rollouts.to_string(),
                count(own.trainable),
                count(own.retained),
                count(dropped),
                count(out),
                percent(own.retained, own.trainable),
            ]
        });
        let header = [
            "harness",
            "rollouts",
            "trainable tokens",
            "retained",
            "dropped",
            "rollout out",
            "retained",
        ];
        named(&header, rows.collect())
    }

    fn dropped_text(&self) -> String {
        let mut reasons: BTreeMap<String, u64> = BTreeMap::new();
        for own in self.retained.values() {
            for (reason, tokens) in &own.dropped {
                *reasons.entry(reason.clone()).or_default() += tokens;
            }
            for (disposition, tokens) in &own.out {
                let reason = format!("rollout: {disposition}");
                *reasons.entry(reason).or_default() += tokens;
            }
        }
        named(&["not trained because", "tokens"], pairs(&reasons))
    }

    fn forks_text(&self) -> String {
        let rows = self.forks.iter().map(|(cause, cost)| {
            let (forks, again) = (cost.forks.to_string(), count(cost.tokens_again));
            vec![cause.clone(), forks, again, cost.example.clone()]
        });
        named(
            &["fork cause", "forks", "tokens again", "dearest"],
            rows.collect(),
        )
    }

    fn calls_text(&self) -> String {
        let calls = &self.call_counts;
        if self.calls == 0 {
            return String::new();
        }
        let mut rows = Vec::new();
        let mut row = |name: String, number: u64, whole: u64| {
            rows.push(vec![name, count(number), percent(number, whole)]);
        };
        for (class, number) in &calls.classes {
            row(format!("class {class}"), *number, self.calls);
        }
        row("carry on another".to_owned(), calls.continued, self.calls);
        row("  token by token".to_owned(), calls.exact, calls.continued);
        row("attempts".to_owned(), calls.attempts, self.calls);
        row("  duplicates".to_owned(), calls.duplicates, calls.attempts);
        row("not parsed".to_owned(), calls.parse_failed, self.calls);
        table(&["calls", "", "rate"], &rows)
    }

    fn stale_text(&self) -> String {
        let all: u64 = self.stale.values().sum();
        let rows = self.stale.iter().map(|(versions, tokens)| {
            vec![versions.to_string(), count(*tokens), percent(*tokens, all)]
        });
        named(&["versions old", "tokens", "share"], rows.collect())
    }

    fn stages_text(&self) -> String {
        let all: f64 = self.stages.iter().map(|stage| stage.sum_s).sum();
        let rows = self.stages.iter().map(|stage| {
            vec![
                stage.stage.to_owned(),
                format!("{:.2}", stage.p50_s),
                format!("{:.2}", stage.p95_s),
                format!("{:.2}", stage.max_s),
                format!("{:.1} %", 100.0 * stage.sum_s / all.max(f64::MIN_POSITIVE)),
            ]
        });
        named(
            &["stage", "p50 s", "p95 s", "max s", "of all time"],
            rows.collect(),
        )
    }

    fn worst_text(&self) -> String {
        let rows = self
            .worst
            .iter()
            .map(|worst| vec![worst.rollout.clone(), worst.why.clone()]);
        named(&["worth a look", "why"], rows.collect())
    }
}

/// A table, or nothing when it has no rows.
fn named(header: &[&str], rows: Vec<Vec<String>>) -> String {
    if rows.is_empty() {
        return String::new();
    }
    table(header, &rows)
}
