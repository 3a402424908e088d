//! Results for people (lines, a Markdown table) and machines.

use harness::Installed;
use serde::Serialize;

use super::{
    judge::Figures,
    scenario::{Outcome, Scenario},
};

/// Bytes shown of what a failing harness printed.
const TAIL_BYTES: usize = 1500;

/// Everything about one harness in one dialect.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) harness: String,
    pub(crate) version: String,
    pub(crate) digest: String,
    pub(crate) dialect: &'static str,
    pub(crate) outcomes: Vec<Outcome>,
}

impl Report {
    pub(crate) fn new(installed: &Installed) -> Self {
        Self {
            harness: installed.profile.name.clone(),
            version: installed.profile.version.clone(),
            digest: installed.digest.clone(),
            dialect: harness::word(installed.profile.dialect),
            outcomes: Vec::new(),
        }
    }

    pub(crate) fn head(&self) -> String {
        format!(
            "{} {} ({}), {}",
            self.harness,
            self.version,
            self.digest.get(..12).unwrap_or(&self.digest),
            self.dialect
        )
    }

    /// What the turns cost, once they were played.
    pub(crate) fn base(&self) -> Option<&Figures> {
        let turns = |outcome: &&Outcome| outcome.scenario == Scenario::Turns;
        self.outcomes
            .iter()
            .find(turns)
            .map(|outcome| &outcome.figures)
    }

    /// Scenarios that failed, with the checks that did.
    pub(crate) fn failures(&self) -> impl Iterator<Item = String> + '_ {
        self.outcomes
            .iter()
            .filter(|outcome| !outcome.ok)
            .map(|outcome| {
                let names: Vec<&str> = outcome
                    .checks
                    .iter()
                    .filter(|check| !check.ok)
                    .map(|check| check.name)
                    .collect();
                format!(
                    "{} {} ({})",
                    self.harness,
                    outcome.scenario.name(),
                    names.join(", ")
                )
            })
    }
}

/// A scenario for a person.
pub(crate) fn lines(outcome: &Outcome) -> Vec<String> {
    let figures = &outcome.figures;
    let startup = |value: Option<f64>| value.map_or("-".to_owned(), |s| format!("{s:.1}"));
    let mut lines = vec![format!(
        "  {} {:<10} {} calls, {} of {} turns exact; {:.1} s ({} to the first call), {:.1} s CPU ({}), peak {}",
        if outcome.ok { "ok  " } else { "FAIL" },
        outcome.scenario.name(),
        figures.calls,
        figures.exact,
        figures.turns,
        outcome.wall_s,
        startup(outcome.startup_s),
        outcome.cpu_s,
        startup(outcome.startup_cpu_s),
        megabytes(outcome.memory_peak_bytes),
    )];
    for check in &outcome.checks {
        let mark = if check.ok { "ok  " } else { "FAIL" };
        lines.push(format!("       {mark} {:<11} {}", check.name, check.found));
    }
    if !outcome.tail.is_empty() {
        let tail = &outcome.tail;
        let mut start = tail.len().saturating_sub(TAIL_BYTES);
        while !tail.is_char_boundary(start) {
            start += 1;
        }
        lines.push(format!("       it printed: {}", &tail[start..]));
    }
    lines
}

fn megabytes(bytes: Option<u64>) -> String {
    bytes.map_or("-".to_owned(), |bytes| {
        format!("{:.0} MB", bytes as f64 / 1e6)
    })
}

/// All results as a Markdown table: a row for each harness and dialect.
pub(crate) fn table(reports: &[Report]) -> Vec<String> {
    let mut lines = vec![
        "| harness | dialect | turns | storm | sub-agent | compaction | exact | forks | duplicates | refused | first prompt |".to_owned(),
        "|---|---|---|---|---|---|---|---|---|---|---|".to_owned(),
    ];
    for report in reports {
        let cell = |scenario: Scenario| {
            let found = report
                .outcomes
                .iter()
                .find(|outcome| outcome.scenario == scenario);
            match found {
                None => "–".to_owned(),
                Some(outcome) if outcome.ok => format!("{} calls", outcome.figures.calls),
                Some(outcome) => {
                    let names: Vec<&str> = outcome
                        .checks
                        .iter()
                        .filter(|check| !check.ok)
                        .map(|check| check.name)
                        .collect();
                    format!("**{}**", names.join(", "))
                }
            }
        };
        let sum = |count: fn(&Figures) -> usize| -> usize {
            report
                .outcomes
                .iter()
                .map(|outcome| count(&outcome.figures))
                .sum()
        };
        let mut forks = std::collections::BTreeMap::new();
        for (cause, count) in report
            .outcomes
            .iter()
            .flat_map(|outcome| &outcome.figures.forks)
        {
            *forks.entry(*cause).or_insert(0) += count;
        }
        let forks: Vec<String> = forks
            .into_iter()
            .map(|(cause, count)| format!("{cause} {count}"))
            .collect();
        // Asking again after a fault is as it should be.
        let refused: usize = report
            .outcomes
            .iter()
            .filter(|outcome| outcome.scenario != Scenario::Storm)
            .map(|outcome| outcome.figures.repeats)
            .sum();
        let name = report.harness.split(':').next().unwrap_or_default();
        lines.push(format!(
            "| {name} {} | {} | {} | {} | {} | {} | {}/{} | {} | {} | {refused} | {} |",
            report.version,
            report.dialect,
            cell(Scenario::Turns),
            cell(Scenario::Storm),
            cell(Scenario::Subagent),
            cell(Scenario::Compaction),
            sum(|figures| figures.exact),
            sum(|figures| figures.turns),
            if forks.is_empty() {
                "none".to_owned()
            } else {
                forks.join(", ")
            },
            sum(|figures| figures.duplicates),
            report.base().map_or(0, |figures| figures.prompt_tokens),
        ));
    }
    lines
}
