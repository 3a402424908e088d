//! A report as a document for people, and as tables for machines.

use std::collections::BTreeSet;

use crate::{
    Comparison, Document, Interval, Mean, Outcome, Part, Report, Times, Trial, contamination, csv,
    plot::{Line, Whisker, lines, whiskers},
};

fn percent(share: f64) -> String {
    format!("{:.1}", 100.0 * share)
}

fn ranged(mean: f64, interval: &Interval) -> String {
    let (low, high) = (percent(interval.low), percent(interval.high));
    format!("{} [{low}, {high}]", percent(mean))
}

fn maybe(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), percent)
}

fn number(value: f64) -> String {
    let text = if value.abs() >= 100.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.1}")
    };
    text.trim_end_matches(".0").to_owned()
}

fn money(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.4}"))
}

fn counted(items: &std::collections::BTreeMap<String, usize>) -> String {
    let each: Vec<String> = items
        .iter()
        .map(|(name, count)| format!("{name} {count}"))
        .collect();
    if each.is_empty() {
        "0".to_owned()
    } else {
        each.join(", ")
    }
}

impl Report {
    /// For people: Markdown and HTML come of it.
    #[must_use]
    pub fn document(&self) -> Document {
        let mut page = Document::new("Evaluation");
        self.setup_part(&mut page);
        self.results(&mut page);
        self.draws(&mut page);
        self.comparison(&mut page);
        self.variance(&mut page);
        self.thresholds(&mut page);
        self.families(&mut page);
        self.service(&mut page);
        self.behaviour(&mut page);
        self.judges(&mut page);
        contamination::show(&self.setup.contamination, &mut page);
        page
    }

    fn names(&self) -> Vec<&str> {
        self.setup
            .models
            .iter()
            .map(|model| model.name.as_str())
            .collect()
    }

    fn whole_parts(&self) -> Vec<&Part> {
        let whole = self.whole();
        self.parts
            .iter()
            .filter(|part| part.harness == whole)
            .collect()
    }

    fn setup_part(&self, page: &mut Document) {
        let setup = &self.setup;
        let digest: String = setup.tasks_digest.chars().take(16).collect();
        page.text(format!(
            "{} tasks of {} (digest {digest}), {} attempts each; seed {}; {} resamples. Intervals are 95 %, clustered by task. \
             Percent unless said otherwise.",
            setup.tasks_count, setup.tasks, setup.attempts, setup.seed, setup.rounds
        ));
        let models = setup.models.iter().map(|model| {
            vec![
                model.name.clone(),
                model.engine.clone(),
                model.temperature.to_string(),
            ]
        });
        page.table(&["model", "engine", "temperature"], models.collect());
        let harnesses = setup.harnesses.iter();
        page.table(
            &["harness", "version"],
            harnesses
                .map(|(name, version)| vec![name.clone(), version.clone()])
                .collect(),
        );
    }

    fn results(&self, page: &mut Document) {
        page.heading("Results");
        let rows = self.parts.iter().map(|part| {
            let pass = part.pass.as_ref();
            let reward = part.reward.as_ref();
            vec![
                part.model.clone(),
                part.harness.clone(),
                pass.map_or("–".into(), |rate| ranged(rate.mean, &rate.ci95)),
                part.pass_bootstrap95.map_or("–".into(), |found| {
                    format!("[{}, {}]", percent(found.low), percent(found.high))
                }),
                format!(
                    "[{}, {}]",
                    percent(part.pass_wilson95.low),
                    percent(part.pass_wilson95.high)
                ),
                reward.map_or("–".into(), |mean| ranged(mean.mean, &mean.ci95)),
                format!("{} of {}", part.scored, part.planned),
                counted(&part.missing),
                counted(&part.truncated),
            ]
        });
        let header = [
            "model",
            "harness",
            "pass@1",
            "bootstrap",
            "Wilson over attempts",
            "mean reward",
            "scored",
            "missing",
            "truncated",
        ];
        page.table(&header, rows.collect());
        page.text(
            "Missing attempts (faults, never scores) are excluded and counted. Truncated ones count with the state that they left.",
        );
        let names = self.names();
        let marks: Vec<Whisker> = self
            .parts
            .iter()
            .filter_map(|part| {
                let rate = part.pass.as_ref()?;
                Some(Whisker {
                    label: format!("{} · {}", part.model, part.harness),
                    value: rate.mean,
                    low: rate.ci95.low,
                    high: rate.ci95.high,
                    colour: names.iter().position(|name| *name == part.model)?,
                })
            })
            .collect();
        let plot = whiskers(&marks, 0.0, 1.0, "pass@1, percent");
        page.plot("pass", "pass@1 with 95 % intervals", plot);
    }

    fn draws(&self, page: &mut Document) {
        let most = self.parts.iter().map(|part| part.at_k.len()).max();
        if most.unwrap_or(0) < 2 {
            return;
        }
        page.heading("Several attempts");
        page.text(
            "pass@k: at least one of k attempts passes, 1 − C(n−c, k) / C(n, k). pass^k: all of k pass, C(c, k) / C(n, k). \
             pass^k plug-in: (c / n)^k, biased upwards, as some benches report it.",
        );
        let mut rows = Vec::new();
        for part in self.whole_parts() {
            for at in &part.at_k {
                rows.push(vec![
                    part.model.clone(),
                    at.k.to_string(),
                    maybe(at.pass_at_k),
                    maybe(at.pass_pow_k),
                    maybe(at.pass_pow_k_plug_in),
                ]);
            }
        }
        page.table(&["model", "k", "pass@k", "pass^k", "pass^k plug-in"], rows);
        let mut series = Vec::new();
        for part in self.whole_parts() {
            let of = |value: fn(&crate::AtK) -> Option<f64>, name: &str| Line {
                name: format!("{} {name}", part.model),
                points: part
                    .at_k
                    .iter()
                    .filter_map(|at| Some((f64::from(at.k), value(at)?)))
                    .collect(),
            };
            series.push(of(|at| at.pass_at_k, "pass@k"));
            series.push(of(|at| at.pass_pow_k, "pass^k"));
        }
        page.plot(
            "draws",
            "pass@k and pass^k by k",
            lines(&series, "k", "percent"),
        );
    }

    fn comparison(&self, page: &mut Document) {
        if self.comparisons.is_empty() {
            return;
        }
        page.heading("Differences, paired by task");
        let signed = |mean: &Mean| {
            format!(
                "{:+.1} [{:+.1}, {:+.1}]",
                100.0 * mean.mean,
                100.0 * mean.ci95.low,
                100.0 * mean.ci95.high
            )
        };
        let row = |one: &Comparison| {
            vec![
                format!("{} → {}", one.from, one.to),
                one.harness.clone(),
                one.tasks.to_string(),
                signed(&one.pass),
                format!(
                    "[{:+.1}, {:+.1}]",
                    100.0 * one.pass.bootstrap95.low,
                    100.0 * one.pass.bootstrap95.high
                ),
                signed(&one.reward),
                format!("{:.4}", one.p_value),
                format!("{:.4}", one.p_adjusted),
                one.mcnemar
                    .map_or_else(|| "–".to_owned(), |p| format!("{p:.4}")),
            ]
        };
        let header = [
            "models",
            "harness",
            "tasks",
            "pass@1, points",
            "bootstrap",
            "reward, points",
            "p",
            "p, Holm",
            "McNemar",
        ];
        page.table(&header, self.comparisons.iter().map(row).collect());
        page.text("p: two-sided sign-flip test over tasks; adjusted for the number of rows by Holm's method.");
        for found in &self.improvements {
            let cost = match found.cost_per_point {
                Some(cost) => format!("{cost:.4} per verified percentage point"),
                None => {
                    "no cost per point: the interval of the difference holds 0 or less".to_owned()
                }
            };
            page.text(format!(
                "{} → {}: {:+.1} points for {:.4} ({}): {cost}.",
                found.training.from,
                found.training.to,
                found.points,
                found.training.cost,
                found.training.basis
            ));
        }
    }

    fn variance(&self, page: &mut Document) {
        let Some(found) = &self.matrix.decomposition else {
            return;
        };
        page.heading("Model or harness");
        page.text(format!(
            "Shares of the variance of mean rewards over {} shared tasks (three-way analysis of variance without replication).",
            found.tasks
        ));
        let row = |name: &str, share: f64| vec![name.to_owned(), percent(share)];
        let rows = vec![
            row("model", found.model),
            row("harness", found.harness),
            row("model × harness", found.interaction),
            row("task", found.task),
            row("residual", found.residual),
        ];
        page.table(&["part", "share"], rows);
    }

    fn thresholds(&self, page: &mut Document) {
        page.heading("Threshold");
        let mut header = vec!["model".to_owned()];
        header.extend(
            crate::THRESHOLDS
                .iter()
                .map(|threshold| format!("≥ {threshold}")),
        );
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        let rows = self.whole_parts().into_iter().map(|part| {
            let shares = part.thresholds.iter().map(|(_, share)| percent(*share));
            std::iter::once(part.model.clone()).chain(shares).collect()
        });
        page.table(&header, rows.collect());
        if !self.order_changes.is_empty() {
            page.text(format!(
                "The order of the models is another one at the thresholds {:?}.",
                self.order_changes
            ));
        } else if self.setup.models.len() > 1 {
            page.text("The order of the models is the same at every threshold.");
        }
        let series: Vec<Line> = self
            .whole_parts()
            .into_iter()
            .map(|part| Line {
                name: part.model.clone(),
                points: part.thresholds.clone(),
            })
            .filter(|line| !line.points.is_empty())
            .collect();
        let plot = lines(&series, "reward from which an attempt passes", "percent");
        page.plot("thresholds", "Share of attempts by threshold", plot);
    }

    fn families(&self, page: &mut Document) {
        let parts = self.whole_parts();
        let all: BTreeSet<&String> = parts.iter().flat_map(|part| part.families.keys()).collect();
        if all.len() < 2 {
            return;
        }
        page.heading("By family");
        let mut header = vec!["family"];
        header.extend(parts.iter().map(|part| part.model.as_str()));
        let row = |family: &String| {
            let each = parts
                .iter()
                .map(|part| maybe(part.families.get(family).copied()));
            std::iter::once(family.clone()).chain(each).collect()
        };
        page.table(&header, all.into_iter().map(row).collect());
    }

    fn service(&self, page: &mut Document) {
        page.heading("Use and cost");
        let row = |part: &Part| {
            let service = &part.service;
            let spread = |name: &str| {
                let found = service.spread.get(name).copied().unwrap_or_default();
                format!("{} / {}", number(found.p50), number(found.p95))
            };
            vec![
                part.model.clone(),
                part.harness.clone(),
                spread("calls"),
                spread("tool_calls"),
                spread("prompt_new"),
                spread("prompt_again"),
                spread("generated"),
                percent(service.timeout_rate),
                percent(service.truncated_rate),
                percent(service.missing_rate),
                money(service.cost),
                money(service.cost_per_success),
            ]
        };
        let header = [
            "model",
            "harness",
            "calls, p50 / p95",
            "tool calls",
            "prompt tokens, new",
            "prompt tokens, again",
            "generated",
            "timeouts",
            "truncated",
            "missing",
            "cost",
            "cost per success",
        ];
        page.table(&header, self.parts.iter().map(row).collect());
        page.text("Wall-clock seconds are in time.md: no two runs have the same.");
    }

    fn behaviour(&self, page: &mut Document) {
        page.heading("Behaviour");
        page.text("From captured calls alone; bench's header says by which rules, behaviour.jsonl has the evidence by rollout.");
        let parts = self.whole_parts();
        let mut header = vec!["measure".to_owned()];
        header.extend(parts.iter().map(|part| part.model.clone()));
        let compared = parts.len() == 2;
        if compared {
            header.push("difference".to_owned());
        }
        let shares: Vec<_> = parts
            .iter()
            .map(|part| {
                let mut shares = part.behaviour.shares();
                shares.push(("step_efficiency", part.step_efficiency));
                if parts.iter().any(|part| part.services_coverage.is_some()) {
                    shares.push(("services_coverage", part.services_coverage));
                }
                shares
            })
            .collect();
        let names: Vec<&str> = shares.first().map_or(Vec::new(), |first| {
            first.iter().map(|(name, _)| *name).collect()
        });
        let mut rows: Vec<Vec<String>> = Vec::new();
        for (at, name) in names.iter().enumerate() {
            let values: Vec<Option<f64>> = shares.iter().map(|shares| shares[at].1).collect();
            let shown = |value: Option<f64>| value.map_or("–".to_owned(), |v| format!("{v:.3}"));
            let mut row = vec![(*name).to_owned()];
            row.extend(values.iter().map(|value| shown(*value)));
            if compared {
                let difference = values[0].zip(values[1]).map(|(a, b)| b - a);
                row.push(difference.map_or("–".to_owned(), |d| format!("{d:+.3}")));
            }
            rows.push(row);
        }
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        page.table(&header, rows);
        let tools: BTreeSet<&String> = parts
            .iter()
            .flat_map(|part| part.behaviour.tools.keys())
            .collect();
        let mut header = vec!["tool"];
        header.extend(parts.iter().map(|part| part.model.as_str()));
        let row = |tool: &String| {
            let each = parts.iter().map(|part| {
                let count = part.behaviour.tools.get(tool).copied().unwrap_or(0);
                let all = part.behaviour.tool_calls().max(1);
                format!("{count} ({})", percent(count as f64 / all as f64))
            });
            std::iter::once(tool.clone()).chain(each).collect()
        };
        page.table(&header, tools.into_iter().map(row).collect());
    }

    fn judges(&self, page: &mut Document) {
        if self.agreement.is_empty() {
            return;
        }
        page.heading("Judges");
        let rows = self.agreement.iter().map(|found| {
            let kappa = |value: Option<f64>| value.map_or("–".into(), |v| format!("{v:.3}"));
            vec![
                format!("{} and {}", found.judges.0, found.judges.1),
                found.marks.to_string(),
                percent(found.equal),
                kappa(found.kappa),
                kappa(found.kappa_quadratic),
            ]
        });
        let header = ["judges", "marks", "equal", "kappa", "kappa, quadratic"];
        page.table(&header, rows.collect());
    }

    /// A row per model and harness.
    #[must_use]
    pub fn parts_csv(&self) -> String {
        let header = [
            "model",
            "harness",
            "planned",
            "scored",
            "pass_at_1",
            "ci95_low",
            "ci95_high",
            "bootstrap95_low",
            "bootstrap95_high",
            "wilson95_low",
            "wilson95_high",
            "mean_reward",
            "pass_at_k",
            "pass_pow_k",
            "pass_pow_k_plug_in",
            "k",
            "cost",
            "cost_per_success",
        ];
        let text = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
        let row = |part: &Part| {
            let pass = part.pass.as_ref();
            let last = part.at_k.last();
            vec![
                part.model.clone(),
                part.harness.clone(),
                part.planned.to_string(),
                part.scored.to_string(),
                text(pass.map(|rate| rate.mean)),
                text(pass.map(|rate| rate.ci95.low)),
                text(pass.map(|rate| rate.ci95.high)),
                text(part.pass_bootstrap95.map(|found| found.low)),
                text(part.pass_bootstrap95.map(|found| found.high)),
                part.pass_wilson95.low.to_string(),
                part.pass_wilson95.high.to_string(),
                text(part.reward.map(|mean| mean.mean)),
                text(last.and_then(|at| at.pass_at_k)),
                text(last.and_then(|at| at.pass_pow_k)),
                text(last.and_then(|at| at.pass_pow_k_plug_in)),
                last.map_or(String::new(), |at| at.k.to_string()),
                text(part.service.cost),
                text(part.service.cost_per_success),
            ]
        };
        let rows: Vec<Vec<String>> = self.parts.iter().map(row).collect();
        csv(&header, &rows)
    }
}

/// A row per attempt, in the order given.
#[must_use]
pub fn trials_csv(trials: &[Trial]) -> String {
    let header = [
        "model",
        "harness",
        "task",
        "family",
        "attempt",
        "reward",
        "passed",
        "truncated",
        "missing",
        "calls",
        "tool_calls",
        "prompt_new",
        "prompt_again",
        "generated",
    ];
    let rows: Vec<Vec<String>> = trials
        .iter()
        .map(|trial| {
            let (reward, passed, truncated, missing) = match &trial.outcome {
                Outcome::Scored {
                    reward,
                    passed,
                    truncated,
                } => (
                    reward.to_string(),
                    passed.to_string(),
                    truncated.clone().unwrap_or_default(),
                    String::new(),
                ),
                Outcome::Missing { why } => {
                    (String::new(), String::new(), String::new(), why.clone())
                }
            };
            let usage = &trial.usage;
            vec![
                trial.model.clone(),
                trial.harness.clone(),
                trial.task.clone(),
                trial.family.clone(),
                trial.attempt.to_string(),
                reward,
                passed,
                truncated,
                missing,
                usage.calls.to_string(),
                usage.tool_calls.to_string(),
                usage.prompt_new.to_string(),
                usage.prompt_again.to_string(),
                usage.generated.to_string(),
            ]
        })
        .collect();
    csv(&header, &rows)
}

impl Times {
    /// As Markdown.
    #[must_use]
    pub fn to_markdown(&self) -> String {
        let mut page = Document::new("Wall-clock seconds");
        page.text(format!(
            "{:.1} s in all, at most {} attempts at once. These numbers are those of one machine on one day.",
            self.wall_s, self.concurrency
        ));
        let mut rows = Vec::new();
        for (model, harnesses) in &self.seconds {
            for (harness, spread) in harnesses {
                let each = self
                    .seconds_per_success
                    .get(model)
                    .and_then(|found| found.get(harness).copied().flatten());
                rows.push(vec![
                    model.clone(),
                    harness.clone(),
                    format!("{:.2}", spread.p50),
                    format!("{:.2}", spread.p95),
                    each.map_or_else(|| "–".to_owned(), |seconds| format!("{seconds:.2}")),
                ]);
            }
        }
        page.table(&["model", "harness", "p50", "p95", "per success"], rows);
        page.to_markdown()
    }
}
