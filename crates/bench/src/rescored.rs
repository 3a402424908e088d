//! Two verifiers on the same end states.

use serde::{Deserialize, Serialize};

use crate::{Document, kappa, kappa_quadratic};

/// Disagreements that are named in a document; the numbers are over all.
const NAMED_MAX: usize = 20;

/// What two verifiers say about one end state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    /// The rollout.
    pub rollout: String,
    /// Reward of the verifier that scored it first.
    pub before: f64,
    /// Reward of the other.
    pub after: f64,
    /// Whether the first counts as passed.
    pub before_passed: bool,
    /// Whether the other does.
    pub after_passed: bool,
}

/// How far two verifiers agree.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rescored {
    /// End states that both scored.
    pub pairs: usize,
    /// Mean reward of the first.
    pub before_mean: f64,
    /// Mean reward of the other.
    pub after_mean: f64,
    /// Share of equal rewards.
    pub equal: f64,
    /// Share of equal pass or fail.
    pub passed_equal: f64,
    /// Passed by both, only before, only after, by neither.
    pub table: [usize; 4],
    /// Cohen's kappa of pass or fail; `None` without pairs.
    pub kappa_passed: Option<f64>,
    /// Kappa with quadratic weights of the rewards.
    pub kappa_reward: Option<f64>,
    /// The pairs with the largest differences, largest first.
    pub apart: Vec<Pair>,
}

impl Rescored {
    /// Over all pairs.
    #[must_use]
    pub fn of(pairs: &[Pair]) -> Self {
        let count = pairs.len().max(1) as f64;
        let share =
            |hit: fn(&Pair) -> bool| pairs.iter().filter(|pair| hit(pair)).count() as f64 / count;
        let mut table = [0; 4];
        for pair in pairs {
            let at = match (pair.before_passed, pair.after_passed) {
                (true, true) => 0,
                (true, false) => 1,
                (false, true) => 2,
                (false, false) => 3,
            };
            table[at] += 1;
        }
        let passed: Vec<(f64, f64)> = pairs
            .iter()
            .map(|pair| {
                let of = |passed: bool| f64::from(u8::from(passed));
                (of(pair.before_passed), of(pair.after_passed))
            })
            .collect();
        let rewards: Vec<(f64, f64)> = pairs.iter().map(|pair| (pair.before, pair.after)).collect();
        let mut apart: Vec<Pair> = pairs
            .iter()
            .filter(|pair| pair.before != pair.after)
            .cloned()
            .collect();
        let gap = |pair: &Pair| (pair.after - pair.before).abs();
        apart.sort_by(|a, b| {
            gap(b)
                .total_cmp(&gap(a))
                .then_with(|| a.rollout.cmp(&b.rollout))
        });
        apart.truncate(NAMED_MAX);
        Self {
            pairs: pairs.len(),
            before_mean: rewards.iter().map(|(before, _)| before).sum::<f64>() / count,
            after_mean: rewards.iter().map(|(_, after)| after).sum::<f64>() / count,
            equal: share(|pair| pair.before == pair.after),
            passed_equal: share(|pair| pair.before_passed == pair.after_passed),
            table,
            kappa_passed: kappa(&passed),
            kappa_reward: kappa_quadratic(&rewards),
            apart,
        }
    }

    /// For people; `names` are those of the two verifiers.
    #[must_use]
    pub fn document(&self, names: (&str, &str)) -> Document {
        let mut page = Document::new(&format!("{} against {}", names.1, names.0));
        let kappa = |value: Option<f64>| value.map_or_else(|| "–".into(), |v| format!("{v:.3}"));
        page.text(format!(
            "{} end states scored by both. Mean reward {:.3} → {:.3}; equal rewards {:.1} %; equal pass or fail {:.1} %; \
             kappa of pass or fail {}; kappa of rewards with quadratic weights {}.",
            self.pairs,
            self.before_mean,
            self.after_mean,
            100.0 * self.equal,
            100.0 * self.passed_equal,
            kappa(self.kappa_passed),
            kappa(self.kappa_reward),
        ));
        let [both, before, after, neither] = self.table.map(|count| count.to_string());
        let rows = vec![
            vec![format!("{} passes", names.0), both, before],
            vec![format!("{} fails", names.0), after, neither],
        ];
        let (passes, fails) = (format!("{} passes", names.1), format!("{} fails", names.1));
        page.table(&["", &passes, &fails], rows);
        let row = |pair: &Pair| {
            vec![
                pair.rollout.clone(),
                format!("{:.3}", pair.before),
                format!("{:.3}", pair.after),
            ]
        };
        let rows = self.apart.iter().map(row).collect();
        page.table(&["furthest apart", names.0, names.1], rows);
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(before: f64, after: f64) -> Pair {
        Pair {
            rollout: format!("{before}-{after}"),
            before,
            after,
            before_passed: before >= 1.0,
            after_passed: after >= 1.0,
        }
    }

    #[test]
    fn a_table_by_hand() {
        let pairs = [
            pair(1.0, 1.0),
            pair(1.0, 0.25),
            pair(0.5, 0.5),
            pair(0.0, 0.25),
        ];
        let found = Rescored::of(&pairs);
        assert_eq!(found.table, [1, 1, 0, 2]);
        assert_eq!((found.equal, found.passed_equal), (0.5, 0.75));
        assert_eq!((found.before_mean, found.after_mean), (0.625, 0.5));
        // Observed 3/4, by chance 1/2·1/4 + 1/2·3/4 = 1/2.
        assert!((found.kappa_passed.unwrap_or_default() - 0.5).abs() < 1e-12);
        let names: Vec<&str> = found.apart.iter().map(|one| one.rollout.as_str()).collect();
        assert_eq!(names, ["1-0.25", "0-0.25"]);
        assert!(
            found
                .document(("code", "judge"))
                .to_markdown()
                .contains("| code passes | 1 | 1 |\n| code fails | 0 | 2 |")
        );
        assert_eq!(Rescored::of(&[]).kappa_passed, None);
    }
}
