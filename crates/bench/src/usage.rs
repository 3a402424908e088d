//! What attempts use and cost: the view of whoever has to serve them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Outcome, Trial, Usage, quantile};

/// The budget whose exhaustion is a timeout.
const TIMEOUT: &str = "harness_timeout";

/// Prices in one currency, whichever. Per million tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Price {
    /// Prompt tokens that are new in their rollout.
    pub prompt_mtok: f64,
    /// Prompt tokens that an earlier call of the rollout had: the price of cached input.
    pub prompt_again_mtok: f64,
    /// Generated tokens.
    pub generated_mtok: f64,
}

impl Price {
    /// What this use costs.
    #[must_use]
    pub fn of(&self, usage: &Usage) -> f64 {
        let part = |tokens: u64, price: f64| tokens as f64 * price / 1e6;
        part(usage.prompt_new, self.prompt_mtok)
            + part(usage.prompt_again, self.prompt_again_mtok)
            + part(usage.generated, self.generated_mtok)
    }
}

/// Median and 95 % quantile over attempts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Median.
    pub p50: f64,
    /// 95 % quantile.
    pub p95: f64,
}

impl Spread {
    /// Over values; zeros without any.
    #[must_use]
    pub fn of(values: &[f64]) -> Self {
        Self {
            p50: quantile(values, 0.5).unwrap_or_default(),
            p95: quantile(values, 0.95).unwrap_or_default(),
        }
    }
}

/// Use over all attempts that ran, scored or not.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Service {
    /// Attempts that made a call.
    pub ran: u64,
    /// By measure: `calls`, `tool_calls`, `prompt_new`, `prompt_again`, `generated`.
    pub spread: BTreeMap<String, Spread>,
    /// Share of planned attempts whose time ran out.
    pub timeout_rate: f64,
    /// Share of planned attempts that a budget ended, time included.
    pub truncated_rate: f64,
    /// Share of planned attempts without a verdict that counts.
    pub missing_rate: f64,
    /// Tokens of all attempts, paid for; `None` without a price.
    pub cost: Option<f64>,
    /// The same for each attempt that passed; `None` when none did.
    pub cost_per_success: Option<f64>,
}

impl Service {
    pub(crate) fn of(trials: &[&Trial], price: Option<Price>) -> Self {
        type Field = fn(&Usage) -> u64;
        let fields: [(&str, Field); 5] = [
            ("calls", |usage| usage.calls),
            ("tool_calls", |usage| usage.tool_calls),
            ("prompt_new", |usage| usage.prompt_new),
            ("prompt_again", |usage| usage.prompt_again),
            ("generated", |usage| usage.generated),
        ];
        let ran: Vec<&Usage> = trials
            .iter()
            .map(|trial| &trial.usage)
            .filter(|usage| usage.calls > 0)
            .collect();
        let spread = fields
            .iter()
            .map(|(name, field)| {
                let values: Vec<f64> = ran.iter().map(|usage| field(usage) as f64).collect();
                ((*name).to_owned(), Spread::of(&values))
            })
            .collect();
        let share = |hit: &dyn Fn(&Outcome) -> bool| {
            let count = trials.iter().filter(|trial| hit(&trial.outcome)).count();
            count as f64 / trials.len().max(1) as f64
        };
        let passed = trials
            .iter()
            .filter(|trial| trial.scored().is_some_and(|(_, passed)| passed))
            .count();
        let cost = price.map(|price| ran.iter().map(|usage| price.of(usage)).sum::<f64>());
        Self {
            ran: ran.len() as u64,
            spread,
            timeout_rate: share(
                &|outcome| matches!(outcome, Outcome::Scored { truncated: Some(why), .. } if why == TIMEOUT),
            ),
            truncated_rate: share(&|outcome| {
                matches!(
                    outcome,
                    Outcome::Scored {
                        truncated: Some(_),
                        ..
                    }
                )
            }),
            missing_rate: share(&|outcome| matches!(outcome, Outcome::Missing { .. })),
            cost,
            cost_per_success: cost.filter(|_| passed > 0).map(|cost| cost / passed as f64),
        }
    }
}

/// Wall-clock seconds: kept apart from the report, because no two runs have the same.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// The whole evaluation; 0 for a report that was made again from a finished run.
    pub wall_s: f64,
    /// Attempts at once, at most.
    pub concurrency: usize,
    /// Seconds of an attempt, by model, then harness.
    pub seconds: BTreeMap<String, BTreeMap<String, Spread>>,
    /// Seconds of all attempts together for each that passed, by model, then harness; `None`
    /// when none did.
    pub seconds_per_success: BTreeMap<String, BTreeMap<String, Option<f64>>>,
}

impl Times {
    /// Over trials that ran.
    #[must_use]
    pub fn of(trials: &[Trial], wall_s: f64, concurrency: usize) -> Self {
        let mut groups: BTreeMap<(&str, &str), Vec<&Trial>> = BTreeMap::new();
        for trial in trials.iter().filter(|trial| trial.seconds > 0.0) {
            groups
                .entry((&trial.model, &trial.harness))
                .or_default()
                .push(trial);
        }
        let mut times = Self {
            wall_s,
            concurrency,
            ..Self::default()
        };
        for ((model, harness), group) in groups {
            let seconds: Vec<f64> = group.iter().map(|trial| trial.seconds).collect();
            let passed = group
                .iter()
                .filter(|trial| trial.scored().is_some_and(|(_, passed)| passed))
                .count();
            let each = (passed > 0).then(|| seconds.iter().sum::<f64>() / passed as f64);
            let (model, harness) = (model.to_owned(), harness.to_owned());
            times
                .seconds
                .entry(model.clone())
                .or_default()
                .insert(harness.clone(), Spread::of(&seconds));
            times
                .seconds_per_success
                .entry(model)
                .or_default()
                .insert(harness, each);
        }
        times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_price_is_paid_for_each_kind_of_token() {
        let price = Price {
            prompt_mtok: 2.0,
            prompt_again_mtok: 0.5,
            generated_mtok: 8.0,
        };
        let usage = Usage {
            calls: 3,
            tool_calls: 2,
            prompt_new: 500_000,
            prompt_again: 1_000_000,
            generated: 250_000,
        };
        assert!((price.of(&usage) - (1.0 + 0.5 + 2.0)).abs() < 1e-12);
    }
}
